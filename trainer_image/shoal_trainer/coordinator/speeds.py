"""The measured steps of all workers, as cumulative sums by configuration: what the speed predictor learns from. Pure.

A step counts only in a settled state. After a change of the members the parameter servers' queue, the new worker's
caches and the clock of its GPU need some steps to become steady, so the first `SETTLE_STEPS` of the slowest worker are
left out, and those of at least `SETTLE_SECONDS`, unless workers only left. A loss is noticed late (a worker is silent
for seconds before anybody knows), so sums are kept back for as long as that takes, and dropped if it turns out that a
member was lost. Who comes, and who says that it leaves, is known at once: nothing is dropped then, or a job whose
workers change often would learn nothing. Nor is it for a member that was heard and pushes again: it was slow, and its
long step counts like all others, or a job of many workers that stall now and then would learn nothing, and too little.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from operator import add

from shoal_trainer.contract import MAX_SPEEDS, LogSums, SpeedSums
from shoal_trainer.coordinator.members import SILENCE_SECONDS, SILENCE_STEPS
from shoal_trainer.ps.contents import Worker
from shoal_trainer.wire.messages import Timings

SETTLE_SECONDS = 10.0
SETTLE_STEPS = 10
TASK_STEPS = 2
"""Steps of the slowest worker after a task that are left out: the worker with the task returns, and its first pull
waits for nothing."""
SHORTEST = 1e-6
"""Seconds; a part of a step may have taken none by the clock."""

Key = tuple[str, int, float, int, int, int]
"""As `SpeedSums.key`."""
CONFIGURATION = "device", "devices", "cores", "batch_size", "workers", "servers"
PARTS = "compute", "pull", "push", "step"


class _Row:
    """The sums of one configuration, as `LogSums` of each part of a step, and when it was last measured."""

    def __init__(self) -> None:
        self.sums = [[0, 0.0, 0.0, 0.0] for _ in PARTS]
        self.at = 0.0

    def add(self, timings: Timings) -> None:
        parts = timings.compute + timings.input, timings.pull, timings.push, timings.step
        for sums, seconds in zip(self.sums, parts, strict=True):
            value = math.log(max(SHORTEST, seconds))
            sums[:] = sums[0] + 1, sums[1] + value, sums[2] + value**2, sums[3] + max(SHORTEST, seconds)

    def merge(self, other: _Row, now: float) -> None:
        self.sums = [list(map(add, *pair)) for pair in zip(self.sums, other.sums, strict=True)]
        self.at = now

    def report(self, key: Key) -> SpeedSums:
        names = "count", "total", "squares", "seconds"
        parts = (LogSums(**dict(zip(names, sums, strict=True))) for sums in self.sums)
        where = zip(CONFIGURATION, key, strict=True)
        return SpeedSums.model_validate(dict(where) | dict(zip(PARTS, parts, strict=True)))


class Speeds:
    """The sums of a job with `servers` parameter servers. Call `observe` a few times a second."""

    def __init__(self, servers: int) -> None:
        self._servers = servers
        self._rows: dict[Key, _Row] = defaultdict(_Row)
        self._fresh: dict[Key, _Row] = defaultdict(_Row)
        """What was measured since `_since`, and in the window before that: both may still be dropped."""
        self._kept: dict[Key, _Row] = defaultdict(_Row)
        self._since = -math.inf
        self.team: frozenset[Worker] = frozenset()
        """The workers that pushed when it was observed last."""
        self._slowest = 0.0
        self._settled_at = math.inf

    def observe(
        self,
        now: float,
        team: frozenset[Worker],
        slowest: float,
        left: frozenset[Worker] = frozenset(),
        doubted: float = math.inf,
    ) -> None:
        """The workers that push now, the longest time between two pushes of one of them, and who said goodbye.

        `slowest` is in seconds. Of those who push no more only they are known not to have been lost. `doubted`: since
        when a member of the team is late, who may be lost: what was measured after it is kept back until that is known.
        """
        self._slowest = slowest
        before, self.team = self.team, team
        if before - team - left:
            self.disturbed(now)
        elif team - before:
            self._settle(now)
        elif before - team:
            self._settled_at = max(self._settled_at, now + SETTLE_STEPS * slowest)
        if now - self._since >= max(SILENCE_SECONDS, SILENCE_STEPS * slowest) and self._since <= doubted:
            self._merge(self._kept, now)
            self._kept, self._fresh = self._fresh, defaultdict(_Row)
            self._since = now

    def disturbed(self, now: float) -> None:
        """A worker or a server was lost: drop what may have been measured in between, and settle again."""
        self._fresh.clear()
        self._kept.clear()
        self._since = now
        self._settle(now)

    def task(self, now: float) -> None:
        """A worker has, or had, a task: the steps until shortly after it are not typical."""
        self._settled_at = max(self._settled_at, now + TASK_STEPS * self._slowest)

    def pushed(
        self, now: float, worker: Worker, where: Callable[[], tuple[str, int, float, int]], timings: Timings
    ) -> None:
        """Add a step of this worker. `where`: its device, devices, cores and batch size."""
        if now < self._settled_at or worker not in self.team or not timings.step > 0:
            return
        self._fresh[(*where(), len(self.team), self._servers)].add(timings)

    def report(self) -> tuple[SpeedSums, ...]:
        """All rows, the one that was measured last first."""
        return tuple(row.report(key) for key, row in self._newest_first())

    def _settle(self, now: float) -> None:
        self._settled_at = now + max(SETTLE_SECONDS, SETTLE_STEPS * self._slowest)

    def _merge(self, rows: dict[Key, _Row], now: float) -> None:
        for key, row in rows.items():
            self._rows[key].merge(row, now)
        for key, _ in self._newest_first()[MAX_SPEEDS:]:
            del self._rows[key]

    def _newest_first(self) -> list[tuple[Key, _Row]]:
        return sorted(self._rows.items(), key=lambda item: (-item[1].at, item[0]))
