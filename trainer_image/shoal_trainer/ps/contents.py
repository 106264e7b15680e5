"""Which pushes are in the parameters of a shard: sequence numbers, by who pushed them. Pure.

The same push goes to every shard under the same number, so two shards that were lost at different moments can be
compared. A worker's numbers follow each other: one interval tells all of them, another one begins where a shard came
back without some. So the whole run fits into a few numbers for each worker, and nothing has to be forgotten at a
snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shoal_trainer.ps.positions import Positions

Worker = tuple[int, int]
"""(slot, incarnation)."""
Push = tuple[int, int, int]
"""(slot, incarnation, sequence number)."""
Span = tuple[int, int, int, int]
"""(slot, incarnation, first sequence number, the one after the last)."""

KEPT_INCARNATIONS = 64
"""Of each slot. What is older is the same on all shards, or has been counted for good."""


class Contents:
    """A set of pushes."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._of: dict[int, dict[int, Positions]] = {}
        for slot, incarnation, start, stop in spans:
            self._worker(slot, incarnation).add(start, stop)

    def add(self, push: Push) -> None:
        """Take a push in."""
        slot, incarnation, seq = push
        self._worker(slot, incarnation).add(seq, seq + 1)

    def __contains__(self, push: Push) -> bool:
        slot, incarnation, seq = push
        return not self.gaps((slot, incarnation), seq, seq + 1)

    def __iter__(self) -> Iterator[Push]:
        for slot, incarnation, start, stop in self.spans():
            for seq in range(start, stop):
                yield slot, incarnation, seq

    def __bool__(self) -> bool:
        return any(held.total for of in self._of.values() for held in of.values())

    def gaps(self, worker: Worker, start: int, stop: int) -> list[tuple[int, int]]:
        """Which of a worker's numbers [start, stop) are not in the set."""
        held = self._known(worker)
        return [(start, stop)] if held is None else held.gaps(start, stop)

    def last(self, worker: Worker) -> int:
        """The highest number of a worker; 0 for none."""
        held = self._known(worker)
        return 0 if held is None or not held.total else held.intervals()[-1][1] - 1

    def newest(self) -> dict[int, int]:
        """The highest incarnation of each slot."""
        return {slot: max(of) for slot, of in self._of.items()}

    def spans(self) -> tuple[Span, ...]:
        """The whole set, in order."""
        return tuple(
            (slot, incarnation, start, stop)
            for slot, of in sorted(self._of.items())
            for incarnation, held in sorted(of.items())
            for start, stop in held.intervals()
        )

    def _known(self, worker: Worker) -> Positions | None:
        slot, incarnation = worker
        return self._of.get(slot, {}).get(incarnation)

    def _worker(self, slot: int, incarnation: int) -> Positions:
        of = self._of.setdefault(slot, {})
        if incarnation not in of:
            of[incarnation] = Positions()
            old = max(of) - KEPT_INCARNATIONS
            for key in [key for key in of if key <= old]:
                del of[key]
            return of.get(incarnation, Positions())
        return of[incarnation]


def uneven(shards: Sequence[Contents]) -> Contents:
    """The pushes that some of the shards have and others have not; incarnations of long ago are left out."""
    newest: dict[int, int] = {}
    for contents in shards:
        for slot, incarnation in contents.newest().items():
            newest[slot] = max(incarnation, newest.get(slot, 0))
    union = Contents(
        span
        for contents in shards
        for span in contents.spans()
        if span[1] > newest[span[0]] - KEPT_INCARNATIONS
    )
    return Contents(
        (slot, incarnation, a, b)
        for slot, incarnation, start, stop in union.spans()
        for contents in shards
        for a, b in contents.gaps((slot, incarnation), start, stop)
    )


def arriving(shards: Sequence[Contents], push: Push) -> bool:
    """Whether a push that some shards lack comes after everything that they have of its worker: it may yet come."""
    return all(push[2] > contents.last(push[:2]) for contents in shards if push not in contents)
