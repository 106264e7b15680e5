"""How good a shard's parameters are, and how long it waits for workers that may have better ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

LONGEST_WAIT = 60.0
"""Seconds that a shard waits for parameters that it has asked for; in all, once it has some to begin with."""
BEGIN_SECONDS = 10.0
"""A worker that has not begun to send for so long may be gone, without a word: another one is asked as well."""
SHORTEST_PAUSE = 0.25
LONGEST_PAUSE = 3.0
HELLOS_PER_SECOND = 333
"""A worker that tries to reach a lost shard connects to the other shards as well; this bounds their load."""
JITTER = 0.2
"""Pauses vary randomly by up to this fraction."""
FIRST_COPY_SECONDS = 10.0
MARGIN = 0.45
"""Seconds that a shard waits beyond the longest pause of a worker."""
RETURN_SECONDS = LONGEST_PAUSE * (1 + JITTER) + MARGIN
"""Within these a worker that still has a copy says HELLO again."""
ANYONE = -1
"""Of workers of whom nobody has told: the slot that no worker has."""


class Origin(IntEnum):
    """What is known of how parameters came about; the more, the better."""

    NOWHERE = 0
    """There are none."""
    FIRST = 1
    """A worker's first ones, untrained."""
    COPY = 2
    """Trained, but which pushes of this run they contain is not known: those of a worker whose journal has gaps or
    whose copy is torn, or of another run."""
    KNOWN = 3
    """A snapshot of this run, or the copy of a worker whose journal continues it."""


class Worth(NamedTuple):
    """How good parameters are; the greater is the better. Of untrained ones the generation is 0."""

    generation: int = 0
    origin: Origin = Origin.NOWHERE
    version: int = 0


NOTHING = Worth()


def longest_pause(workers: int) -> float:
    """Seconds between two connection attempts of a worker with a copy. A restarted shard waits longer than this."""
    return min(LONGEST_PAUSE, max(SHORTEST_PAUSE, workers / HELLOS_PER_SECOND))


@dataclass(slots=True)
class _Worker:
    """What a shard knows of a slot's worker that has come."""

    offers: Worth = NOTHING
    """What it has; `NOTHING` once that is sent, or does not come."""
    until: float = -math.inf
    """Until when that is waited for, as it was asked for."""
    sends: bool = False
    """Whether it has begun to send it."""
    sent: Worth = NOTHING
    """What it has sent before, which may have turned out worse: it is not asked for again."""
    whole: bool = False
    """Whether it has come with a copy that is not torn."""

    def delays(self, now: float) -> bool:
        """Whether it was asked long ago, and has not begun."""
        return not self.sends and self.until - now <= LONGEST_WAIT - BEGIN_SECONDS


class Recovery:
    """Who is asked for better parameters than the shard has, and until when it waits for them.

    Ends when every expected worker has answered, or `seconds` after the first worker with a whole copy connected.
    Before that, the others wait `FIRST_COPY_SECONDS` for one: those that replace lost workers may be first. If they are
    all that is expected, `seconds`: others that joined after the snapshot may have copies. The wait is extended, up to
    `LONGEST_WAIT`, for what was asked for by then. If the expected workers are not known, it ends after `seconds`, or
    when all workers that a newer copy names have answered. After a snapshot from before the first push only the former:
    the copy may be old, of a worker that was cut off, and name itself only. A worker's first parameters are asked for
    when the wait is over and there are no others, nor a worker that may come back with some: at once, if no earlier
    process is followed.

    Parameters may be gigabytes, and normally all workers have the same: while some are asked for, others that are no
    better are put off. Their workers say HELLO again and again; if what was asked for does not come, or not begin to in
    `BEGIN_SECONDS`, theirs is.
    Of first ones those of the lowest slot are, until another sends its own: so all shards choose the same worker.
    """

    def __init__(self, seconds: float, *, follows: bool) -> None:
        self.have = NOTHING
        """That of the shard's parameters."""
        self._seconds = seconds
        self._patience = FIRST_COPY_SECONDS
        """Seconds that workers without a whole copy wait for one, if not longer."""
        self._begun = math.inf
        self._deadline = math.inf if follows else -math.inf
        self._limit = math.inf
        """When the shard begins with what it has, whoever sends."""
        self._returns = -math.inf
        """Until when a worker with a copy may come back."""
        self._expected: set[int] = set()
        """Empty: not known."""
        self._workers: dict[int, _Worker] = {}

    def restored(self, have: Worth, slots: Iterable[int] = ()) -> None:
        """The shard has a snapshot. `slots`: the workers that had pushed, if it is one of this run.

        One from before the first push names none; all may have newer copies.
        """
        self.have, self._deadline = have, math.inf
        self._expected = set(slots)
        if have.origin is Origin.KNOWN:
            self._expected = self._expected or {ANYONE}
            pause = longest_pause(len(self._expected)) * (1 + JITTER)
            self._seconds = max(self._seconds, pause + MARGIN)
        else:
            self._patience = 0.0

    def hello(self, slot: int, offered: Worth, now: float, *, whole: bool) -> bool:
        """A worker offers parameters; returns whether it shall send them.

        `whole`: it has a copy that is not torn, even if the shard has no use for it: the other workers that were here
        before have come, too, or come soon. A torn one does not shorten the wait for theirs, which may be whole.
        """
        worker = self._workers.setdefault(slot, _Worker())
        self._begun = min(self._begun, now)
        wait = self._seconds if whole else max(self._seconds, self._patience)
        self._deadline = min(self._deadline, now + wait)
        worker.offers = offered if offered > worker.sent else NOTHING
        worker.until, worker.sends, worker.whole = -math.inf, False, whole
        first = offered.origin is Origin.FIRST
        if worker.offers <= self.have or (first and now < max(self._end(), self._returns)):
            return False
        if not first:
            self._returns = now + RETURN_SECONDS
        asked = {
            other: rival
            for other, rival in self._workers.items()
            if rival.until > now and rival.offers > self.have and (first or not rival.delays(now))
        }
        if not all(
            offered > rival.offers or (first and slot < other and not rival.sends)
            for other, rival in asked.items()
        ):
            return False
        if first:
            for rival in asked.values():
                rival.until = -math.inf
        worker.until = now + LONGEST_WAIT
        self._limit_from(now)
        return True

    def begins(self, slot: int, now: float) -> bool:
        """Whether a worker shall still send what it was asked for, as it is about to."""
        worker = self._workers.get(slot)
        if worker is None or worker.until <= now or worker.offers <= self.have:
            return False
        worker.sends = True
        return True

    def adopted(self, worth: Worth, slots: Iterable[int], now: float) -> None:
        """The shard has taken a worker's parameters. `slots`: the workers whose pushes are known to be in them.

        Some may have joined after the snapshot, and have pushed after the copy was made.
        """
        self.have = worth
        self._expected.update(slots)
        self._limit_from(now)

    def sent(self, slot: int, now: float) -> None:
        """A worker has sent its parameters."""
        worker = self._workers.setdefault(slot, _Worker())
        worker.sent = max(worker.sent, worker.offers)
        self._comes_not(worker, now)

    def disconnected(self, slot: int, now: float) -> None:
        """Stop waiting for what was asked for, as its worker has disconnected."""
        worker = self._workers.get(slot)
        if worker is not None and worker.until > -math.inf and worker.offers > self.have:
            if worker.offers.origin > Origin.FIRST:
                self._returns = now + RETURN_SECONDS
            self._comes_not(worker, now)

    def over(self, now: float) -> bool:
        """Whether no better parameters than these are waited for."""
        return now >= self._end()

    def remaining(self, now: float) -> float:
        """The seconds until `over`, if nobody is heard of; infinite before the first worker, and once it is over."""
        end = self._end()
        return end - now if end > now else math.inf

    def _comes_not(self, worker: _Worker, now: float) -> None:
        """Nothing more comes of what a worker was asked for: time to ask for what was put off."""
        asked, worker.offers, worker.until = worker.until > -math.inf, NOTHING, -math.inf
        if asked and any(other.until == -math.inf for other in self._better()):
            self._deadline = max(self._deadline, now + self._seconds)

    def _limit_from(self, now: float) -> None:
        if self.have > NOTHING:
            self._limit = min(self._limit, now + LONGEST_WAIT)

    def _better(self) -> list[_Worker]:
        """The workers that have better copies."""
        return [
            worker
            for worker in self._workers.values()
            if worker.offers.origin > Origin.FIRST and worker.offers > self.have
        ]

    def _end(self) -> float:
        """The deadline; before it if all have answered, after it for what was asked for."""
        end, better = self._deadline, self._better()
        if self._expected and not better and self._expected <= self._workers.keys():
            whole = all(self._workers[slot].whole for slot in self._expected)
            end = min(end, self._begun + (0.0 if whole else self._seconds))
        return min(self._limit, max([end, *(worker.until for worker in better)]))
