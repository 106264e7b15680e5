"""How long a restarted shard waits for workers whose copies may be newer than its snapshot."""

from __future__ import annotations

import math
from collections.abc import Iterable

SHORTEST_WAIT = 0.001
LONGEST_WAIT = 60.0
"""Seconds after which a shard starts with the parameters it has, even while a copy is being uploaded."""
SHORTEST_PAUSE = 0.25
LONGEST_PAUSE = 3.0
HELLOS_PER_SECOND = 333
"""A worker that tries to reach a lost shard connects to the other shards as well; this bounds their load."""
JITTER = 0.2
"""Pauses vary randomly by up to this fraction."""
FIRST_COPY_SECONDS = 10.0
MARGIN = 0.45
"""Seconds that a shard waits beyond the longest pause of a worker."""


def longest_pause(workers: int) -> float:
    """Seconds between two connection attempts of a worker with a copy. A restarted shard waits longer than this."""
    return min(LONGEST_PAUSE, max(SHORTEST_PAUSE, workers / HELLOS_PER_SECOND))


class Recovery:
    """Ends when every expected worker has answered, or `seconds` after the first worker with a copy connected.

    Before that, workers without a copy wait `FIRST_COPY_SECONDS` for one: those that replace lost workers may be first.
    The wait is extended, up to `LONGEST_WAIT`, for copies that were requested by then. If the expected workers are not
    known, it ends after `seconds`, or when all workers that a newer copy names have answered.
    """

    def __init__(self, seconds: float) -> None:
        self.has_parameters = False
        """Whether there are parameters, from a snapshot or a copy."""
        self._seconds = seconds
        self._begun: float | None = None
        self._deadline = math.inf
        self._other_run = False
        self._expected: set[int] | None = None
        self._answered: set[int] = set()
        self._requested: set[int] = set()

    def restored(self, slots: Iterable[int] | None) -> None:
        """The shard has a snapshot. `slots`: the workers that had pushed; None: a snapshot of another run.

        A snapshot from before the first push names no worker; all may have newer copies.
        """
        self.has_parameters = True
        self._other_run = slots is None
        self._expected = set(slots or ()) or None
        if self._expected and self._begun is None:
            pause = longest_pause(len(self._expected)) * (1 + JITTER)
            self._seconds = max(self._seconds, pause + MARGIN)

    def adopted(self, slots: Iterable[int]) -> None:
        """The shard has adopted a worker's copy. `slots`: the workers whose pushes are in it.

        Some may have joined after the snapshot, and have pushed after the copy was made.
        """
        self.has_parameters = True
        self._expected = (self._expected or set()).union(slots)

    def begin(self, now: float, *, has_copy: bool) -> None:
        """Start the wait when the first worker connects, and shorten it when the first one with a copy does."""
        if self._begun is None:
            self._begun = now
        wait = 0.0 if has_copy or self._other_run else FIRST_COPY_SECONDS
        self._deadline = min(self._deadline, now + max(wait, self._seconds))

    def requested(self, slot: int) -> None:
        """The shard has requested a worker's copy."""
        self._requested.add(slot)

    def answered(self, slot: int) -> None:
        """A worker has sent its copy, or has none that is newer."""
        self._requested.discard(slot)
        self._answered.add(slot)

    def disconnected(self, slot: int) -> None:
        """Stop waiting for a requested copy whose worker has disconnected."""
        if slot in self._requested:
            self.answered(slot)

    def over(self, now: float) -> bool:
        """Whether the shard may start."""
        if self._begun is None:
            return False
        complete = self._expected is not None and self._expected <= self._answered
        return complete or now >= self._end(self._begun)

    def remaining(self, now: float) -> float:
        """An upper bound of the seconds until `over`; infinite before the first worker connects."""
        return math.inf if self._begun is None else max(SHORTEST_WAIT, self._end(self._begun) - now)

    def _end(self, begun: float) -> float:
        return max(self._deadline, begun + LONGEST_WAIT) if self._requested else self._deadline
