"""How long a shard that came back waits for workers whose copies may be newer than its snapshot."""

from __future__ import annotations

from collections.abc import Iterable

SHORTEST_WAIT = 0.001
LONGEST = 60.0
"""Seconds after which a shard begins with what it has, though a copy is still on its way."""
SHORTEST_PAUSE = 0.25
LONGEST_PAUSE = 3.0
HELLOS_PER_SECOND = 333
"""A worker that looks for a lost shard connects to the other shards as well: this many hellos a second are enough."""
JITTER = 0.2
"""Pauses are longer or shorter by up to this share."""
MARGIN = 0.45


def longest_pause(workers: int) -> float:
    """Between two hellos of a worker that holds a copy, in seconds. A restarted shard waits longer than that."""
    return min(LONGEST_PAUSE, max(SHORTEST_PAUSE, workers / HELLOS_PER_SECOND))


class Recovery:
    """Over when everyone who is expected has been heard, or `seconds` after the first hello.

    A copy that was asked for by then is waited for: a large one takes longer than that to arrive. Where nobody knows
    whom to expect, the time runs out or a worker's copy is taken. `known`: there are parameters.
    """

    def __init__(self, seconds: float) -> None:
        self.known = False
        self._seconds = seconds
        self._deadline: float | None = None
        self._expected: set[int] | None = None
        self._coming: set[int] = set()

    def restored(self, slots: Iterable[int] | None) -> None:
        """There is a snapshot, and these workers were there when it was taken; None: it is of another run."""
        self.known = True
        self._expected = None if slots is None else set(slots)
        if self._expected and self._deadline is None:
            pause = longest_pause(len(self._expected)) * (1 + JITTER)
            self._seconds = max(self._seconds, pause + MARGIN)

    def adopted(self) -> None:
        """There is a worker's copy."""
        self.known = True
        self._expected = self._expected or set()

    def begin(self, now: float) -> None:
        """A worker says hello."""
        if self._deadline is None:
            self._deadline = now + self._seconds

    def coming(self, slot: int) -> None:
        """A worker was asked for its copy."""
        self._coming.add(slot)

    def heard(self, slot: int) -> None:
        """A worker has offered its copy, or has none that is newer."""
        self._coming.discard(slot)
        if self._expected is not None:
            self._expected.discard(slot)

    def gone(self, slot: int) -> None:
        """A worker's last connection ended. One that never said hello may still come with its copy."""
        if slot in self._coming:
            self.heard(slot)

    def over(self, now: float) -> bool:
        """Whether nobody has to be waited for any longer."""
        if self._deadline is None:
            return False
        return self._expected == set() or now >= self._end(self._deadline)

    def left(self, now: float) -> float:
        """Seconds until it is over at the latest."""
        return float("inf") if self._deadline is None else max(SHORTEST_WAIT, self._end(self._deadline) - now)

    def _end(self, deadline: float) -> float:
        return max(deadline, deadline - self._seconds + LONGEST) if self._coming else deadline
