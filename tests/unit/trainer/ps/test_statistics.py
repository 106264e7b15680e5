"""Moving averages move as far per sample with many workers as with one, whoever waits for whom."""

from __future__ import annotations

import heapq
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.ps import kernels
from shoal_trainer.ps.pieces import Pieces
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.ps.statistics import Statistics
from shoal_trainer.wire.messages import Average, ModelSpec, PushMeta
from tests.unit.trainer.ps.shards import push_to

START, SEEN = 1.0, -3.0
"""Where a moving average starts, and what each batch shows."""


class Job:
    """Workers in virtual time, which push what their batches show. `moved`: (steps, the average) after each push."""

    def __init__(self, momentum: float, steps_per_push: int, seconds: list[float], *, rounds: bool) -> None:
        self.now, self._queue = 0.0, list[tuple[float, int]]()
        self._seconds, self._steps, self._rounds = seconds, steps_per_push, rounds
        self._random = random.Random(0)
        self._bases, self._seqs = dict[int, int](), [0] * len(seconds)
        self._shard = ShardStore(0, 1, 0, clock=lambda: self.now)
        averages = (Average(1, 2, momentum),)
        self._shard.hello(
            0, 0, ModelSpec(fingerprint="f" * 64, parameters=1, statistics=1, averages=averages)
        )
        self._shard.offer(0, 0, np.array([0.0, START], np.float32))
        self._shard.workers.set_live(len(seconds))
        self.moved = [(0, START)]
        for slot in range(len(seconds)):
            self._begin(slot)

    def run(self, steps: int) -> list[tuple[int, float]]:
        waits = self._shard.workers.rounds
        while self.moved[-1][0] < steps:
            if waits.next() <= self._queue[0][0]:
                self.now = waits.next()
            else:
                self.now, slot = heapq.heappop(self._queue)
                self._push(slot)
                if self._rounds:
                    waits.arrive(slot, self.now, math.inf)
                else:
                    self._begin(slot)
            for slot in waits.release(self.now):
                self._begin(slot)
        return self.moved

    def _begin(self, slot: int) -> None:
        self._bases[slot] = self._shard.history.version
        heapq.heappush(self._queue, (self.now + self._seconds[slot] * self._random.uniform(0.9, 1.1), slot))

    def _push(self, slot: int) -> None:
        self._seqs[slot] += 1
        io = np.array([0.0, SEEN], np.float32)
        meta = PushMeta(samples=self._steps, steps=self._steps)
        push_to(self._shard, slot, 0, self._seqs[slot], self._bases[slot], meta, io)
        self.moved.append((self.moved[-1][0] + self._steps, float(io[1])))


@pytest.mark.by_day(24)
@pytest.mark.parametrize("rounds", [False, True], ids=["free", "rounds"])
@pytest.mark.parametrize("slowest", [1.0, 2.0], ids=["equal", "unequal"])
@pytest.mark.parametrize("steps_per_push", [1, 4])
@pytest.mark.parametrize("workers", [1, 2, 8, 16])
@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.99, 0.999])
def test_averages_move_as_far_per_sample_as_with_one_worker(
    momentum: float, workers: int, steps_per_push: int, slowest: float, rounds: bool
) -> None:
    """To rounding. (Differences, as they were pushed before, went 0.13 to 1.8 times as fast.)"""
    seconds = list(np.linspace(1.0, slowest, workers))
    moved = Job(momentum, steps_per_push, seconds, rounds=rounds).run(320)
    for steps, average in moved:
        assert average == pytest.approx(SEEN + (START - SEEN) * momentum**steps, abs=2e-5)


VALUES = st.floats(-1e3, 1e3, width=32)


@given(
    st.lists(st.tuples(VALUES, st.integers(1, 300)), min_size=1, max_size=60), st.floats(0, 0.9999), VALUES
)
def test_average_stays_between_what_was_seen(
    pushes: list[tuple[float, int]], momentum: float, start: float
) -> None:
    """So it cannot diverge, and a variance cannot become negative."""
    statistics, w, seen = Statistics((Average(0, 1, momentum),), 0, 1), np.array([start], np.float32), [start]
    for value, steps in pushes:
        seen.append(value)
        statistics.apply(w, np.array([value], np.float32), steps, 1.0)
        slack = 1e-6 * max(map(abs, seen))
        assert min(seen) - slack <= w[0] <= max(seen) + slack


def test_each_value_follows_its_own_rule_in_shards_and_in_pieces() -> None:
    averages, size = (Average(6, 9, 0.5), Average(3, 5, 0.75)), 12
    start, pushed = np.arange(12, dtype=np.float32), np.full(12, 8, np.float32)
    expected = start + 8 / 4  # differences
    expected[6:9] = start[6:9] + (8 - start[6:9]) * (1 - 0.5**2)
    expected[3:5] = start[3:5] + (8 - start[3:5]) * (1 - 0.75**2)
    for low in (0, 4, 7):  # where a shard begins
        w, io = start[low:].copy(), Pieces([part.copy() for part in np.array_split(pushed[low:], 3)])
        statistics = Statistics(averages, 0, size - low, low)
        assert not statistics.apply(w, io, 2, 1 / 4)
        np.testing.assert_array_equal(w, expected[low:])
        np.testing.assert_array_equal(np.concatenate(io.arrays), w)
    assert Statistics(averages, 2, size).differences == [(2, 3), (5, 6), (9, 12)]
    assert Statistics((), 3, 3).differences == []


@pytest.mark.parametrize("dtype", [np.float32, np.uint16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", [(), (Average(0, 4, 0.5),)], ids=["difference", "average"])
def test_what_is_not_finite_moves_nothing(dtype: Any, kind: tuple[Average, ...]) -> None:
    w, io = np.ones(4, np.float32), np.empty(4, dtype)
    kernels.encode(np.array([np.nan, np.inf, -np.inf, 3], np.float32), io)
    assert Statistics(kind, 0, 4).apply(w, io, 1, 1.0)
    np.testing.assert_array_equal(w[:3], 1)
    assert w[3] > 1
