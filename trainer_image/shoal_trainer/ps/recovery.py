"""How long a restarted shard waits for workers whose copies may be newer than its snapshot."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

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
Age = tuple[int, int]
"""The generation and version of a copy; the greater is the newer."""


def longest_pause(workers: int) -> float:
    """Seconds between two connection attempts of a worker with a copy. A restarted shard waits longer than this."""
    return min(LONGEST_PAUSE, max(SHORTEST_PAUSE, workers / HELLOS_PER_SECOND))


class Initializer:
    """Which worker sends the first parameters of a large shard: one at a time, instead of gigabytes from each.

    The lowest slot that has asked, so that all shards of a job elect the same one; unless another one sends already.
    """

    def __init__(self) -> None:
        self._slot: int | None = None
        self._until = -math.inf
        self._sends = False

    def elects(self, slot: int, now: float) -> bool:
        """Whether this worker, which asks, shall send them; for at most `LONGEST_WAIT`, as it may hang."""
        taken = self._slot is not None and now < self._until
        if not taken or slot == self._slot or (slot < (self._slot or 0) and not self._sends):
            self._slot, self._until, self._sends = slot, now + LONGEST_WAIT, False
        return slot == self._slot

    def sends(self, slot: int) -> None:
        """A worker is about to send them."""
        self._sends = self._sends or slot == self._slot

    def prefers(self, slot: int, now: float) -> None:
        """A worker is about to send its copy of trained ones: the others wait."""
        self._slot, self._until, self._sends = slot, now + LONGEST_WAIT, True

    def disconnected(self, slot: int) -> None:
        """Elect the next one that asks, if it was this worker."""
        if slot == self._slot:
            self._slot = None


class Recovery:
    """Ends when every expected worker has answered, or `seconds` after the first worker with a copy connected.

    Before that, workers without a copy wait `FIRST_COPY_SECONDS` for one: those that replace lost workers may be first.
    If they are all that is expected, `seconds`: others that joined after the snapshot may have copies.
    The wait is extended, up to `LONGEST_WAIT`, for copies that were requested by then. If the expected workers are not
    known, it ends after `seconds`, or when all workers that a newer copy names have answered. After a snapshot from
    before the first push only the former: the copy may be old, of a worker that was cut off, and name itself only.

    A copy may be gigabytes, and normally all workers have the same one: while one is requested, others that are no
    newer are put off. Their workers say HELLO again and again; if the requested one does not come, theirs is asked for.
    """

    def __init__(self, seconds: float) -> None:
        self.has_parameters = False
        """Whether there are parameters, from a snapshot or a copy."""
        self._own = False
        """Whether their history in this run is known."""
        self._taken: Age = (-1, -1)
        """Of the copy whose parameters were taken without its history."""
        self._seconds = seconds
        self._begun: float | None = None
        self._deadline = math.inf
        self._other_run = False
        self._expected: set[int] | None = None
        self._anyone = False
        """Whether a worker of whom nobody has told may have the newest copy."""
        self._answered: set[int] = set()
        self._empty: set[int] = set()
        """Those that have come without a copy."""
        self._requested: dict[int, Age] = {}
        self._put_off: dict[int, Age] = {}

    def restored(self, slots: Collection[int] | None) -> None:
        """The shard has a snapshot. `slots`: the workers that had pushed; None: a snapshot of another run.

        A snapshot from before the first push names no worker; all may have newer copies.
        """
        self.has_parameters = True
        self._own = slots is not None
        self._other_run = slots is None
        self._anyone = slots is not None and not slots
        self._expected = set(slots or ()) or None
        if self._expected and self._begun is None:
            pause = longest_pause(len(self._expected)) * (1 + JITTER)
            self._seconds = max(self._seconds, pause + MARGIN)

    def adopted(self, age: Age, slots: Iterable[int]) -> None:
        """The shard has adopted a worker's copy of this age. `slots`: the workers whose pushes are in it.

        Some may have joined after the snapshot, and have pushed after the copy was made.
        """
        self.has_parameters = self._own = True
        for slot in [slot for slot, other in self._put_off.items() if other <= age]:
            del self._put_off[slot]
            self._answered.add(slot)
        if not self._anyone:
            self._expected = (self._expected or set()).union(slots)

    def takes_parameters(self, age: Age) -> bool:
        """Whether to take the parameters of a copy of this age without its history, which has gaps.

        They are better than none, than those of another run, and than older ones of this kind.
        """
        if self._own or age <= self._taken:
            return False
        self._taken, self.has_parameters = age, True
        return True

    def begin(self, slot: int, now: float, *, has_copy: bool) -> None:
        """Start the wait when the first worker connects, and shorten it when the first one with a copy does."""
        if self._begun is None:
            self._begun = now
        (self._empty.discard if has_copy else self._empty.add)(slot)
        wait = 0.0 if has_copy or self._other_run else FIRST_COPY_SECONDS
        self._deadline = min(self._deadline, now + max(wait, self._seconds))

    def request(self, slot: int, age: Age) -> bool:
        """Whether to request the copy of a worker, which is newer than the shard; else it is put off."""
        self._requested.pop(slot, None)
        wanted = all(age > other for other in self._requested.values())
        self._put_off.pop(slot, None)
        (self._requested if wanted else self._put_off)[slot] = age
        return wanted

    def answered(self, slot: int, now: float) -> None:
        """A worker has sent its copy, or has none that is newer."""
        requested = self._requested.pop(slot, None)
        self._put_off.pop(slot, None)
        self._answered.add(slot)
        if (
            requested is not None and self._put_off
        ):  # these are newer than what was adopted: time to ask for one
            self._deadline = max(self._deadline, now + self._seconds)

    def disconnected(self, slot: int, now: float) -> None:
        """Stop waiting for a requested copy whose worker has disconnected."""
        if slot in self._requested:
            self.answered(slot, now)

    def over(self, now: float) -> bool:
        """Whether the shard may start."""
        if self._begun is None:
            return False
        return now >= self._end(self._begun)

    def remaining(self, now: float) -> float:
        """An upper bound of the seconds until `over`; infinite before the first worker connects."""
        return math.inf if self._begun is None else max(SHORTEST_WAIT, self._end(self._begun) - now)

    def _end(self, begun: float) -> float:
        if self._requested:
            return max(self._deadline, begun + LONGEST_WAIT)
        if self._put_off or self._expected is None or not self._expected <= self._answered:
            return self._deadline
        return min(self._deadline, begun + self._seconds) if self._expected & self._empty else begun
