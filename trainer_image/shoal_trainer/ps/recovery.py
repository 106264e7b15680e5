"""How good a shard's parameters are, and how long it waits for workers that may have better ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

LONGEST_WAIT = 60.0
"""Seconds that a shard waits for parameters that it has asked for."""
SHORTEST_PAUSE = 0.25
LONGEST_PAUSE = 3.0
HELLOS_PER_SECOND = 333
"""A worker that tries to reach a lost shard connects to the other shards as well; this bounds their load."""
JITTER = 0.2
"""Pauses vary randomly by up to this fraction."""
FIRST_COPY_SECONDS = 10.0
MARGIN = 0.45
"""Seconds that a shard waits beyond the longest pause of a worker."""
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
    """How good parameters are; the greater is the better."""

    origin: Origin = Origin.NOWHERE
    generation: int = 0
    version: int = 0


def longest_pause(workers: int) -> float:
    """Seconds between two connection attempts of a worker with a copy. A restarted shard waits longer than this."""
    return min(LONGEST_PAUSE, max(SHORTEST_PAUSE, workers / HELLOS_PER_SECOND))


class Recovery:
    """Who is asked for better parameters than the shard has, and until when it waits for them.

    Ends when every expected worker has answered, or `seconds` after the first worker with a copy connected. Before
    that, workers without a copy wait `FIRST_COPY_SECONDS` for one: those that replace lost workers may be first. If
    they are all that is expected, `seconds`: others that joined after the snapshot may have copies. The wait is
    extended, up to `LONGEST_WAIT`, for what was asked for by then. If the expected workers are not known, it ends
    after `seconds`, or when all workers that a newer copy names have answered. After a snapshot from before the first
    push only the former: the copy may be old, of a worker that was cut off, and name itself only. A worker's first
    parameters are asked for when the wait is over and there are no others: at once, if no earlier process is followed.

    Parameters may be gigabytes, and normally all workers have the same: while some are asked for, others that are no
    better are put off. Their workers say HELLO again and again; if what was asked for does not come, theirs is.
    """

    def __init__(self, seconds: float, *, follows: bool) -> None:
        self.have = Worth()
        """That of the shard's parameters."""
        self._seconds = seconds
        self._begun = math.inf
        self._deadline = math.inf if follows else -math.inf
        self._expected: set[int] = set()
        """Empty: not known."""
        self._answered: set[int] = set()
        self._empty: set[int] = set()
        """Those that have come without a copy, or with one that the shard cannot use."""
        self._offers: dict[int, Worth] = {}
        """What is better, and has not come yet."""
        self._asked: dict[int, float] = {}
        """Which of it was asked for, and until when it is waited for."""

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

    def hello(self, slot: int, offered: Worth, now: float) -> bool:
        """A worker offers parameters; returns whether it shall send them. The first copy shortens the wait."""
        usable = offered.origin >= max(self.have.origin, Origin.COPY)
        (self._empty.discard if usable else self._empty.add)(slot)
        wait = 0.0 if usable or self.have.origin is Origin.COPY else FIRST_COPY_SECONDS
        self._begun = min(self._begun, now)
        self._deadline = min(self._deadline, now + max(wait, self._seconds))
        if offered <= self.have or (offered.origin is Origin.FIRST and not self.over(now)):
            self.answered(slot, now)
            return False
        self._asked = {other: until for other, until in self._asked.items() if until > now and other != slot}
        wanted = all(offered > self._offers[other] for other in self._asked)
        self._offers[slot] = offered
        if wanted:
            self._asked[slot] = now + LONGEST_WAIT
        return wanted

    def asks(self, slot: int) -> bool:
        """Whether a worker shall still send what it was asked for."""
        return slot in self._asked

    def adopted(self, worth: Worth, slots: Iterable[int]) -> None:
        """The shard has taken a worker's parameters. `slots`: the workers whose pushes are known to be in them.

        Some may have joined after the snapshot, and have pushed after the copy was made.
        """
        self.have = worth
        for slot in [slot for slot, other in self._offers.items() if other <= worth]:
            del self._offers[slot]
            self._asked.pop(slot, None)
            self._answered.add(slot)
        self._expected.update(slots)

    def answered(self, slot: int, now: float) -> None:
        """A worker has sent its parameters, or has none that are better."""
        asked = self._asked.pop(slot, None)
        self._offers.pop(slot, None)
        self._answered.add(slot)
        if asked is not None and self._offers.keys() > self._asked.keys():  # time to ask for what was put off
            self._deadline = max(self._deadline, now + self._seconds)

    def disconnected(self, slot: int, now: float) -> None:
        """Stop waiting for what was asked for, as its worker has disconnected."""
        if slot in self._asked:
            self.answered(slot, now)

    def over(self, now: float) -> bool:
        """Whether no better parameters than these are waited for."""
        return now >= self._end()

    def remaining(self, now: float) -> float:
        """The seconds until `over`, if nobody is heard of; infinite before the first worker, and once it is over."""
        end = self._end()
        return end - now if end > now else math.inf

    def _end(self) -> float:
        if self._asked:
            return max(self._deadline, *self._asked.values())
        if self._offers or not self._expected or not self._expected <= self._answered:
            return self._deadline
        return (
            min(self._deadline, self._begun + self._seconds) if self._expected & self._empty else self._begun
        )
