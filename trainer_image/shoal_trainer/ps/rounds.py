"""Rounds: who waits for whom, so that few workers compute on parameters that lack what a neighbour is about to push.

A gradient is applied when it comes; its worker then waits for those that compute and are about as fast, or faster, and
expected before its step would have taken, with the wait, 1 + `PATIENCE` times its usual time. So equal workers go on
together, and nobody waits for a straggler, which itself waits for the faster ones until it is in step with them. A
worker that hangs delays each other one once, at most until then.

Pure: no lock, and times are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE = 0.5
"""The most that a wait adds to a step, as a share of the worker's usual step. With less, workers of equal speed that
began half a step apart would never get in step. A table: docs/benchmarks/tried.md."""
STRAGGLER = 1.2
"""A worker whose usual step is longer than so many times another one's is not waited for by that one, which it would
slow down at every step. So a mix of accelerators is about as fast as the sum of its workers."""
SMOOTHING = 0.2
"""The share of the newest step in the usual one."""


@dataclass
class _Wait:
    until: float
    awaited: set[int]


class Rounds:
    """The workers of a shard that wait for each other, by slot. Times are in seconds of any one clock."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        """When each worker that computes went on."""
        self._usual: dict[int, float] = {}
        """How long each worker usually takes until its next push is applied."""
        self._waits: dict[int, _Wait] = {}

    def arrive(self, slot: int, now: float, longest: float) -> None:
        """The push of a worker is applied: it waits from now on, at most `longest` seconds.

        Its first one waits for nobody, since its usual time is not known yet.
        """
        until, awaited = now, set[int]()
        self._meet(slot)
        if (since := self._since.pop(slot, None)) is not None:
            took = now - since
            usual = self._usual.get(slot, took)
            self._usual[slot] = usual = usual + SMOOTHING * (min(took, 2 * usual) - usual)
            until = min(since + (1 + PATIENCE) * usual, now + longest)
            awaited = {other for other in self._since if self._comes(other, now, until, usual)}
        self._waits[slot] = _Wait(until, awaited)

    def release(self, now: float) -> list[int]:
        """The workers whose wait is over, in the order in which they came. They compute from now on."""
        over = [slot for slot, wait in self._waits.items() if not wait.awaited or wait.until <= now]
        for slot in over:
            del self._waits[slot]
            self._since[slot] = now
        return over

    def remaining(self, slot: int, now: float) -> float:
        """For how long a worker waits at most, in seconds; 0 if it does not wait."""
        wait = self._waits.get(slot)
        return 0.0 if wait is None else max(0.0, wait.until - now)

    def next(self) -> float:
        """When the next wait is over at the latest; infinite if nobody waits."""
        return min((wait.until for wait in self._waits.values()), default=float("inf"))

    def forget(self, slot: int) -> None:
        """A worker has gone, or does something else: nobody waits for it, and it waits for nobody."""
        self._since.pop(slot, None)
        self._usual.pop(slot, None)
        self._waits.pop(slot, None)
        self._meet(slot)

    def _comes(self, slot: int, now: float, until: float, own: float) -> bool:
        """Whether a worker that computes is no straggler beside the `own` usual step, expected in time, not overdue."""
        since, usual = self._since[slot], self._usual.get(slot)
        if usual is None or usual > STRAGGLER * own:
            return False
        return since + usual <= until and now < since + (1 + PATIENCE) * usual

    def _meet(self, slot: int) -> None:
        for wait in self._waits.values():
            wait.awaited.discard(slot)
