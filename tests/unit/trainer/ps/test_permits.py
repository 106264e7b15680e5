"""The bookkeeping of bounded staleness."""

from __future__ import annotations

import random
from typing import Any

from shoal_trainer.ps.admission import Permits


def admits_by_definition(permits: Permits, slot: int, base: int, version: int, bound: int) -> bool:
    """Compares with the gradients of every other worker."""
    others = [versions[0] for other, versions in permits._pulled.items() if other != slot and versions]
    others += [other_base for other, other_base in permits._waiting.items() if other != slot]
    oldest = min(others, default=base)
    return base <= oldest or version + len(permits._admitted) + 1 - oldest <= bound


def computed_by_definition(permits: Permits) -> bool:
    heads = {slot: versions[0] for slot, versions in permits._pulled.items() if versions}
    oldest = min([*heads.values(), *permits._waiting.values()], default=None)
    return bool(permits._waiting) and oldest in {heads[slot] for slot in heads.keys() - permits._here}


def test_admission_equals_its_definition_in_any_order_of_calls() -> None:
    refused, computed = 0, [0, 0]
    for seed in range(300):
        rng, permits, version, bound = random.Random(seed), Permits(), 0, seed % 4
        pulled: dict[int, list[int]] = {}
        waiting: dict[int, int] = {}
        for _ in range(80):
            slot = rng.randrange(5)
            computed[permits.computed] += 1
            assert permits.computed is computed_by_definition(permits)
            match rng.choice(["pull", "arrive", "ask", "ask", "end", "forget", "give up"]):
                case "pull" if slot not in waiting:
                    permits.pulled(slot, version)
                    pulled.setdefault(slot, []).append(version)
                case "arrive" if slot not in waiting and pulled.get(slot):
                    base = rng.choice(pulled[slot])
                    pulled[slot] = [version for version in pulled[slot] if version >= base]
                    permits.arrive(slot, base)
                    waiting[slot] = base
                case "ask" if slot in waiting:
                    base = waiting[slot]
                    expected = admits_by_definition(permits, slot, base, version, bound)
                    assert permits.admits(base, version, bound) is expected
                    refused += not expected
                    if expected:
                        permits.leave(slot)
                        permits.pushed(slot, waiting.pop(slot))
                        version += 1
                        permits.pulled(slot, version)
                        pulled[slot] = [v for v in pulled[slot] if v > base] + [version]
                case "end" if slot not in waiting:
                    permits.ended(slot)
                case "forget":
                    permits.forget(slot)
                case "give up":
                    permits.give_up(slot, version, bound)
    assert refused > 100
    assert min(computed) > 1_000


class Counted(dict[int, Any]):
    """Counts the iterations over it."""

    iterations = 0

    def values(self) -> Any:
        self.iterations += 1
        return super().values()

    def items(self) -> Any:
        self.iterations += 1
        return super().items()


def test_waiting_pushes_share_what_one_look_at_the_workers_has_found() -> None:
    """Each end of a push wakes all that wait, and each of them asks, under the shard's lock."""
    permits = Permits()
    permits._pulled = pulled = Counted()
    for slot in range(100):
        permits.pulled(slot, 0)
    for slot in range(50):
        permits.arrive(slot, 0)
    assert all(permits.admits(0, 0, 0) and permits.computed for _ in range(50))
    assert pulled.iterations == 2


def test_nobody_is_asked_for_who_computes_while_no_push_waits() -> None:
    permits = Permits()
    permits._pulled = pulled = Counted()
    permits.pulled(0, 0)
    assert not permits.computed
    assert pulled.iterations == 0


def test_the_oldest_gradient_is_computed_until_its_push_arrives_and_again_once_that_was_refused() -> None:
    permits = Permits()
    permits.pulled(9, 0)
    permits.arrive(0, 1)
    assert permits.computed
    permits.arrive(9, 0)
    assert not permits.computed
    permits.leave(9)
    assert not permits.computed
    permits.ended(9)
    assert permits.computed


def test_pushes_that_are_admitted_together_do_not_exceed_the_bound() -> None:
    """The slow worker 9 computes on version 0, and 3 updates were applied: with a bound of 4 one more may be."""
    permits, version, bound = Permits(), 3, 4
    permits.pulled(9, 0)
    admitted = 0
    for slot in range(4):
        permits.pulled(slot, version)
        permits.arrive(slot, version)
        if permits.admits(version, version, bound):
            permits.leave(slot)
            admitted += 1
    assert admitted == 1


def test_a_push_that_is_not_applied_gives_its_place_back() -> None:
    permits = Permits()
    permits.pulled(9, 0)
    for slot in (0, 1):
        permits.pulled(slot, 3)
        permits.arrive(slot, 3)
    permits.leave(0)
    assert not permits.admits(3, 3, 4)
    permits.ended(0)
    assert permits.admits(3, 3, 4)
