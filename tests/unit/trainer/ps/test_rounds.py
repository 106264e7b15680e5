"""Who waits for whom after a push, and for how long at most."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.ps.rounds import PATIENCE, Rounds

LONGEST = 20.0
SECONDS = st.floats(0.01, 10.0)


class Team:
    """Workers whose steps take the `times` that are given, each an endless iterator; an infinite one never ends."""

    def __init__(self, times: Mapping[int, Iterator[float]]) -> None:
        self.times = times
        self.rounds, self.now = Rounds(), 0.0
        self.events: list[tuple[float, int]] = []
        self.pushed: dict[int, list[list[Any]]] = {slot: [] for slot in times}
        """When each worker's pushes were applied, and when it went on."""
        for slot in times:
            self.begin(slot)

    def begin(self, slot: int) -> None:
        heapq.heappush(self.events, (self.now + next(self.times[slot]), slot))

    def turn(self) -> None:
        """The next push, or the next wait that is over."""
        if self.rounds.next() <= self.events[0][0]:
            self.now = self.rounds.next()
        else:
            self.now, slot = heapq.heappop(self.events)
            self.rounds.arrive(slot, self.now, LONGEST)
            self.pushed[slot].append([self.now, None])
        for slot in self.rounds.release(self.now):
            self.pushed[slot][-1][1] = self.now
            self.begin(slot)

    def run(self, turns: int) -> Team:
        for _ in range(turns):
            self.turn()
        return self


def steady(seconds: float, jitter: float = 0.0, seed: int = 0) -> Iterator[float]:
    draw = random.Random(seed)
    return (seconds * draw.uniform(1 - jitter, 1 + jitter) for _ in itertools.count())


@given(st.lists(SECONDS, min_size=1, max_size=50))
def test_one_worker_never_waits(steps: list[float]) -> None:
    rounds, now = Rounds(), 0.0
    for seconds in steps:
        now += seconds
        rounds.arrive(0, now, LONGEST)
        assert rounds.release(now) == [0]
        assert rounds.remaining(0, now) == 0


@given(st.integers(2, 12), st.integers(0, 1000))
def test_of_equal_workers_a_round_holds_each_exactly_once(workers: int, seed: int) -> None:
    team = Team({slot: steady(1.0, 0.1, seed + slot) for slot in range(workers)}).run(40 * workers)
    in_step = max(pushes[9][1] for pushes in team.pushed.values())
    ends = Counter(end for pushes in team.pushed.values() for _, end in pushes if end and end > in_step)
    assert len(ends) >= 20
    assert set(ends.values()) == {workers}


@given(st.lists(st.lists(SECONDS, min_size=1, max_size=20), min_size=2, max_size=8))
def test_nobody_waits_for_longer_than_a_share_of_the_usual_step(workers: list[list[float]]) -> None:
    """Whatever the others do: a wait ends when the step took 1 + PATIENCE times the usual one, which is in between."""
    times = {slot: itertools.cycle(steps) for slot, steps in enumerate(workers)}
    team = Team(times).run(150)
    for slot, pushes in team.pushed.items():
        longest = max(0.0, (1 + PATIENCE) * max(workers[slot]) - min(workers[slot]))
        assert all((end or team.now) - at <= longest + 1e-6 for at, end in pushes)


def speed(pushes: list[list[Any]], after: int = 5) -> float:
    """Pushes a second, without the first ones."""
    return (len(pushes) - 1 - after) / (pushes[-1][0] - pushes[after][0])


def test_worker_that_hangs_delays_each_other_one_once() -> None:
    hangs = itertools.chain([1.0] * 5, [1e9])
    team = Team({0: hangs, 1: steady(1.0), 2: steady(1.0)}).run(200)
    for slot in (1, 2):
        waits = [end - at for at, end in team.pushed[slot] if end is not None and end > at]
        assert waits == pytest.approx([PATIENCE])


def test_lost_worker_is_not_waited_for() -> None:
    rounds = Rounds()
    for now in (0.0, 1.0):
        for slot in range(3):
            rounds.arrive(slot, now, LONGEST)
            rounds.release(now)
    rounds.arrive(0, 2.0, LONGEST)
    rounds.arrive(1, 2.0, LONGEST)
    assert rounds.release(2.0) == []
    assert rounds.remaining(0, 2.0) == pytest.approx(PATIENCE)
    rounds.forget(2)
    assert rounds.release(2.0) == [0, 1]
    rounds.arrive(2, 2.0, LONGEST)  # its successor waits for nobody at first
    assert rounds.release(2.0) == [2]


def in_step(slots: int, until: float = 2.0) -> Rounds:
    """Workers whose steps take a second; all go on at `until`."""
    rounds, now = Rounds(), 0.0
    while now <= until:
        for slot in range(slots):
            rounds.arrive(slot, now, LONGEST)
        assert rounds.release(now) == list(range(slots))
        now += 1.0
    return rounds


def test_worker_that_has_gone_waits_for_nobody() -> None:
    rounds = in_step(2)
    rounds.arrive(0, 3.0, LONGEST)
    rounds.forget(0)
    assert rounds.remaining(0, 3.0) == 0
    rounds.arrive(1, 3.0, LONGEST)
    assert rounds.release(10.0) == [1]


def test_nobody_waits_for_a_successor_before_its_second_push() -> None:
    """It may still compile, and may be on another accelerator than the worker before."""
    rounds = in_step(3)
    rounds.forget(2)
    rounds.arrive(2, 2.1, LONGEST)
    assert rounds.release(2.1) == [2]
    for slot in (0, 1):
        rounds.arrive(slot, 3.0, LONGEST)
    assert rounds.release(3.0) == [0, 1]


def test_successor_waits_for_nobody_after_its_first_push() -> None:
    rounds = in_step(2)
    rounds.forget(1)
    rounds.arrive(1, 2.9, LONGEST)
    assert rounds.release(2.9) == [1]


def test_step_that_hung_does_not_make_waits_long() -> None:
    rounds = in_step(2)
    for slot in (0, 1):
        rounds.arrive(slot, 100.0, LONGEST)
    assert rounds.release(100.0) == [0, 1]
    rounds.arrive(0, 101.0, LONGEST)
    assert 0 < rounds.remaining(0, 101.0) < 1


@pytest.mark.parametrize("slower", [1.3, 2.0, 3.0, 4.5])
def test_straggler_is_waited_for_by_nobody_that_it_would_delay_by_more(slower: float) -> None:
    team = Team({0: steady(slower), **{slot: steady(1.0) for slot in range(1, 8)}}).run(600)
    assert speed(team.pushed[1]) == pytest.approx(1.0, rel=0.01)
    assert speed(team.pushed[0]) >= 1 / (slower + 1)


def test_workers_that_began_at_different_times_get_in_step() -> None:
    started = {slot: itertools.chain([1 + 0.1 * slot], steady(1.0)) for slot in range(4)}
    team = Team(started).run(200)
    assert len({pushes[-2][1] for pushes in team.pushed.values()}) == 1


def test_wait_ends_at_the_deadline_of_the_request() -> None:
    rounds = Rounds()
    for now in (0.0, 100.0):
        for slot in range(2):
            rounds.arrive(slot, now, LONGEST)
            rounds.release(now)
    rounds.arrive(0, 195.0, 0.5)
    assert rounds.remaining(0, 195.0) == 0.5
    assert rounds.release(195.5) == [0]
