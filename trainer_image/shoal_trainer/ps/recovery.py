"""How long a shard that came back waits for workers whose copies may be newer than its snapshot."""

from __future__ import annotations

from collections.abc import Iterable

SHORTEST_WAIT = 0.001


class Recovery:
    """Over when everyone who is expected has been heard, or `seconds` after the first hello.

    Where nobody knows whom to expect, the time runs out or a worker's copy is taken. `known`: there are parameters.
    """

    def __init__(self, seconds: float) -> None:
        self.known = False
        self._seconds = seconds
        self._deadline: float | None = None
        self._expected: set[int] | None = None

    def restored(self, slots: Iterable[int] | None) -> None:
        """There is a snapshot, and these workers were there when it was taken; None: it is of another run."""
        self.known = True
        self._expected = None if slots is None else set(slots)

    def adopted(self) -> None:
        """There is a worker's copy."""
        self.known = True
        self._expected = self._expected or set()

    def begin(self, now: float) -> None:
        """A worker says hello."""
        if self._deadline is None:
            self._deadline = now + self._seconds

    def heard(self, slot: int) -> None:
        """A worker has offered what it has, has nothing newer, or has gone again."""
        if self._expected is not None:
            self._expected.discard(slot)

    def over(self, now: float) -> bool:
        """Whether nobody has to be waited for any longer."""
        if self._deadline is None:
            return False
        return self._expected == set() or now >= self._deadline

    def left(self, now: float) -> float:
        """Seconds until it is over at the latest."""
        return float("inf") if self._deadline is None else max(SHORTEST_WAIT, self._deadline - now)
