"""Which worker lives where.

Without a plan, a worker stays where it is; a new one goes to the first home with room. `onDemandBase` workers live on
demand; with `fallback`, one that waited for a spot node in vain does so, too, and one after the other tries to return.
With a plan (mode Auto) the workers of each pool are as many as it says: those stay that fit, those without a pod fill
what is missing, and only then do workers move, each when its successor runs. Until then one stays where it is, should
the plan go back. Those that are too many end when the others run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from shoal.policy.decide.homes import Homes, needs_a_node
from shoal.policy.decide.members import MOVED
from shoal.policy.facts.read import Facts
from shoal.policy.facts.sightings import Home, Sighting
from shoal.policy.facts.verdict import PodOutcome
from shoal.policy.facts.waits import Wait
from shoal.policy.model import Reason

VACANT = 4
"""From this loss on, a worker has no pod that is worth keeping: its next one may live elsewhere."""
AT_WORK = 1
"""Up to this loss, a worker runs."""


@dataclass
class Assignment:
    """The homes of the wanted workers, and of `lingering` more that end when the wanted ones run."""

    homes: dict[int, Home] = field(default_factory=dict)
    problem: Reason | None = None
    lingering: int = 0


def assign(
    facts: Facts,
    homes: Homes,
    held: Mapping[int, Sighting],
    losses: Mapping[int, int],
    number: int,
    counts: Mapping[str, int] | None,
) -> Assignment:
    """Give `number` workers a home.

    `held`: the newest incarnation of the workers that there are, `losses`: how little would be lost with each.
    `counts`: workers by pool, if a plan says so. Where a pool is not there (any more), its workers stay; it may be that
    it is not read yet.
    """
    every = homes.all()
    if not number:
        return Assignment()
    at = {
        index: held[index].home
        for index in held.keys() - facts.at_rest.homes.keys()
        if losses[index] < VACANT
    }
    living = facts.at_rest.living + Counter(at.values())
    at |= facts.at_rest.homes
    if not every:
        return Assignment(at)
    known = facts.seen.pools
    elsewhere = {home for home in living if home not in every and (not home.pool or home.pool in known)}
    leaving = dict[int, Home]()
    if elsewhere:
        leaving = {i: home for i, home in at.items() if home in elsewhere and losses[i] <= AT_WORK}
        at = {index: home for index, home in at.items() if home not in elsewhere}
        living = Counter({home: number for home, number in living.items() if home not in elsewhere})
    if counts is not None:
        back = _homes_to_go_back_to(facts, held, every)
        return _by_plan(facts, held, losses, at, living, back, number, counts)
    return _by_preference(facts, homes, held, losses, at, leaving, number)


def _indices(held: Mapping[int, Sighting], taken: Mapping[int, Home], number: int) -> list[int]:
    """More workers: those that are held without a pod, then new ones; as many as are missing."""
    missing = number - len(taken)
    vacant = [index for index in sorted(held) if index not in taken]
    fresh = (index for index in range(number + len(held) + 1) if index not in held)
    return (vacant + [next(fresh) for _ in range(max(0, missing - len(vacant)))])[: max(0, missing)]


# --- by plan ----------------------------------------------------------------------------------------------------------


def _homes_to_go_back_to(
    facts: Facts, held: Mapping[int, Sighting], every: Sequence[Home]
) -> dict[int, Home]:
    """Where workers are at work that are on their way to another home, in which none of them runs yet."""
    found = dict[int, Home]()
    for each in facts.sightings["worker"]:
        healthy = each.verdict.outcome is PodOutcome.HEALTHY and each.signal is None
        if each.pod is not None and each.pod.running and healthy:
            found.pop(each.place.index, None)  # the later one runs
            if each.slot.cause == MOVED:
                found[each.place.index] = each.home
    return {index: home for index, home in found.items() if index in held and home in every}


def _by_plan(
    facts: Facts,
    held: Mapping[int, Sighting],
    losses: Mapping[int, int],
    at: Mapping[int, Home],
    living: Counter[Home],
    back: Mapping[int, Home],
    number: int,
    counts: Mapping[str, int],
) -> Assignment:
    left = Counter({Home(name): count for name, count in counts.items() if count > 0})
    result = Assignment()
    here = {**back, **at}
    if not back and living <= left:  # as mostly: none has too many
        result.homes = dict(at)
        left -= living
    stands = [(losses[i], i, home) for i, home in at.items() if i not in result.homes]
    stands += [(AT_WORK, i, home) for i, home in back.items()]
    for _, index, home in sorted(stands):
        if index not in result.homes and left[home] > 0:
            left[home] -= 1
            result.homes[index] = home
    missing = list(left.elements())
    vacant = [index for index in _indices(held, here, len(here) + len(missing)) if index not in here]
    room = number - len(result.homes)
    # Whoever has no pod anyway first; then those move whose pool has too many; the others end.
    movers = sorted(here.keys() - result.homes.keys(), key=lambda index: (_worth(facts, here[index]), index))
    fillers = [*(index for index in vacant if index in held), *movers, *(i for i in vacant if i not in held)]
    for index, home in zip(fillers[:room], missing, strict=False):
        result.homes[index] = home
    # Fewer is no reason to stand still: whoever is to end works on in place of those that do not run yet where they
    # are to be.
    works = {**{i: home for i, home in at.items() if losses[i] <= AT_WORK}, **back} if movers else {}
    ending = [index for index in reversed(movers) if index not in result.homes and index in works]
    coming = len(result.homes.items() - works.items()) if ending else 0
    lingering = {index: back.get(index, here[index]) for index in ending[:coming]}
    return Assignment(result.homes | lingering, lingering=len(lingering))


def _worth(facts: Facts, home: Home) -> float:
    """Samples for a unit of money, of a worker in this home; the least goes first."""
    proposal, pool = facts.seen.proposal, facts.seen.pools.get(home.pool)
    price = pool.spec.price.per_hour if pool is not None and pool.spec.price is not None else 0.0
    speed = proposal.speeds.get(home.pool, 0.0) if proposal is not None else 0.0
    return speed / price if price else float("inf")


# --- by preference ----------------------------------------------------------------------------------------------------


@dataclass
class _Living:
    """Where workers live while that is being decided."""

    homes: dict[int, Home]
    used: Counter[Home]

    def move(self, index: int, home: Home) -> None:
        """This worker lives there."""
        if (before := self.homes.get(index)) is not None:
            self.used[before] -= 1
        self.homes[index] = home
        self.used[home] += 1


def _by_preference(
    facts: Facts,
    homes: Homes,
    held: Mapping[int, Sighting],
    losses: Mapping[int, int],
    at: Mapping[int, Home],
    leaving: Mapping[int, Home],
    number: int,
) -> Assignment:
    """`leaving`: where workers are at work that may not stay there: while there is no room for them, they do."""
    keepers = sorted(held, key=lambda index: (losses[index], index))[:number]
    lives = {index: at[index] for index in keepers if index in at}
    living = _Living(lives, Counter(lives.values()))
    waiting = sorted(i for i in lives.keys() - facts.at_rest.running.keys() if needs_a_node(facts, held[i]))
    _leave_in_vain(facts, homes, [held[index] for index in waiting], living)
    left_over = list[int]()
    for index in _indices({i: held[i] for i in keepers}, lives, number):
        if (home := homes.next(living.used)) is not None:
            living.move(index, home)
        else:
            left_over.append(index)
    _raise_base(homes, living)
    if not any(not homes.is_on_demand(held[index].home) for index in waiting):
        _return_one(facts, homes, losses, living)
    problem = _full(homes, len(left_over)) if left_over else None
    return Assignment(lives | {index: leaving[index] for index in left_over if index in leaving}, problem)


def _full(homes: Homes, number: int) -> Reason:
    """Why so many workers have no room."""
    others = sum(homes.taken.get(name, 0) for name in homes.pools)
    servers = sum(pool.spec.limits.nodes - pool.room for pool in homes.pools.values())
    words = f"{number} workers have no room: raise limits.nodes of the pools in workers.pools, or add one"
    words += f" (other jobs have {others} of their nodes)" if others else ""
    words += f" (parameter servers fill {servers} of their nodes)" if servers else ""
    return Reason("PoolsFull", words)


def _leave_in_vain(facts: Facts, homes: Homes, waiting: Iterable[Sighting], living: _Living) -> None:
    """Workers that wait for a node of an exhausted pool, or too long for a spot node, go where one may be had."""
    exhausted = {home for home in homes.all() if homes.is_exhausted(home)}
    stay = set[tuple[Home, bool]]()
    """Of whom it is known, while nobody moves, that there is nothing better."""
    for each in waiting:
        late = not homes.is_on_demand(each.home) and _is_late(facts, each)
        if (not late and each.home not in exhausted) or (each.home, late) in stay:
            continue
        others = living.used - Counter([each.home])
        instead = homes.next(others, on_demand=True) if late else None
        if instead is None or instead in exhausted or not homes.is_on_demand(instead):
            instead = homes.next(others) if each.home in exhausted else None
        if instead is None or instead in exhausted:
            stay.add((each.home, late))
        else:
            living.move(each.place.index, instead)
            stay.clear()


def _is_late(facts: Facts, waiting: Sighting) -> bool:
    """Whether a worker has waited for a spot node for as long as it is to."""
    rule, slot = facts.job.spec.workers.fallback, waiting.slot
    if rule is None or slot.created_at is None or waiting.verdict.outcome is not PodOutcome.HEALTHY:
        return False
    if facts.wait_of(slot, waiting.pod) is Wait.SERVER:
        return False
    since = facts.asked_since(slot, slot.created_at)
    return not facts.timers.pending(since + timedelta(seconds=rule.after_seconds))


def _raise_base(homes: Homes, living: _Living) -> None:
    """Move workers to on-demand nodes until `onDemandBase` is reached."""
    for index in sorted(living.homes, reverse=True):
        if homes.on_demand(living.used) >= homes.base:
            return
        home = homes.next(living.used, on_demand=True)
        if home is None or not homes.is_on_demand(home):
            return
        if not homes.is_on_demand(living.homes[index]):
            living.move(index, home)


def _return_one(facts: Facts, homes: Homes, losses: Mapping[int, int], living: _Living) -> None:
    """Let one worker that runs on demand try a spot node again, when it is time."""
    rule = facts.job.spec.workers.fallback
    since = facts.job.status.returning_since or facts.job.status.start_time
    if rule is None or since is None or homes.on_demand(living.used) <= homes.base:
        return
    if facts.timers.pending(since + timedelta(seconds=rule.return_after_seconds)):
        return
    home = homes.next(living.used, on_demand=False)
    if home is None or homes.is_on_demand(home) or homes.is_exhausted(home):
        return
    runs = (
        i for i, at in living.homes.items() if homes.is_on_demand(at) and losses.get(i, VACANT) <= AT_WORK
    )
    if (last := max(runs, default=None)) is not None:
        living.move(last, home)
