"""The set of pushes that a shard's parameters contain, by worker and sequence number. Pure.

A push has the same sequence number on every shard, so shards that were lost at different times can be compared. A
worker's numbers are consecutive and stored as intervals, so the set stays small over a whole run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from shoal_trainer.ps.positions import Positions

Worker = tuple[int, int]
"""(slot, incarnation)."""
Push = tuple[int, int, int]
"""(slot, incarnation, sequence number)."""
Span = tuple[int, int, int, int]
"""(slot, incarnation, first sequence number, last sequence number + 1)."""

KEPT_INCARNATIONS = 64
"""Per slot. Pushes of older incarnations are equal on all shards, or already counted as partial."""

_NONE = Positions()


class Contents:
    """A set of pushes."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._slots: dict[int, dict[int, Positions]] = {}
        """slot -> incarnation -> sequence numbers."""
        for slot, incarnation, start, stop in spans:
            self._numbers(slot, incarnation).add(start, stop)

    def add(self, push: Push) -> None:
        """Add a push."""
        slot, incarnation, seq = push
        self._numbers(slot, incarnation).add(seq, seq + 1)

    def __contains__(self, push: Push) -> bool:
        slot, incarnation, seq = push
        return not self.gaps((slot, incarnation), seq, seq + 1)

    def __iter__(self) -> Iterator[Push]:
        for slot, incarnation, start, stop in self.spans():
            for seq in range(start, stop):
                yield slot, incarnation, seq

    def __eq__(self, other: object) -> bool:
        return self._slots == other._slots if isinstance(other, Contents) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __bool__(self) -> bool:
        return any(
            numbers.total for incarnations in self._slots.values() for numbers in incarnations.values()
        )

    def gaps(self, worker: Worker, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of a worker's sequence numbers [start, stop) that are not in the set."""
        numbers = self._existing(worker)
        return [(start, stop)] if numbers is None else numbers.gaps(start, stop)

    def last(self, worker: Worker) -> int:
        """The highest sequence number of a worker; 0 for none."""
        numbers = self._existing(worker)
        return 0 if numbers is None or not numbers.total else numbers.intervals()[-1][1] - 1

    def passed(self, worker: Worker) -> int:
        """No push of a worker up to this sequence number can be added any more: a later one was, or a replacement's."""
        slot, incarnation = worker
        replaced = max(self._slots.get(slot, ()), default=-1) > incarnation
        return sys.maxsize if replaced else self.last(worker)

    def without(self, other: Contents) -> Contents:
        """Those that are not in the other set."""
        return Contents(
            (slot, incarnation, *gap)
            for slot, incarnation, start, stop in self.spans()
            for gap in other.gaps((slot, incarnation), start, stop)
        )

    def within(self, other: Contents) -> Contents:
        """Those that are in the other set as well."""
        return self.without(self.without(other))

    def newest(self) -> dict[int, int]:
        """The highest incarnation of each slot."""
        return {slot: max(incarnations) for slot, incarnations in self._slots.items()}

    def spans(self) -> tuple[Span, ...]:
        """The whole set, in order."""
        return tuple(
            (slot, incarnation, start, stop)
            for slot, incarnations in sorted(self._slots.items())
            for incarnation, numbers in sorted(incarnations.items())
            for start, stop in numbers.intervals()
        )

    def _existing(self, worker: Worker) -> Positions | None:
        slot, incarnation = worker
        return self._slots.get(slot, {}).get(incarnation)

    def _numbers(self, slot: int, incarnation: int) -> Positions:
        incarnations = self._slots.setdefault(slot, {})
        if incarnation not in incarnations:
            incarnations[incarnation] = Positions()
            oldest_kept = max(incarnations) - KEPT_INCARNATIONS + 1
            for key in [key for key in incarnations if key < oldest_kept]:
                del incarnations[key]
            return incarnations.get(incarnation, Positions())
        return incarnations[incarnation]


def uneven(shards: Sequence[Contents]) -> Contents:
    """The pushes that some but not all shards contain, without incarnations beyond `KEPT_INCARNATIONS`.

    Nearly all incarnations are equal in all of them, and are many after weeks: with these nothing else is done.
    """
    kept, found = _kept(shards), list[Span]()
    for slot in set[int]().union(*(contents._slots for contents in shards)):
        slots = [contents._slots.get(slot, {}) for contents in shards]
        for incarnation in set[int]().union(*slots):
            held = [incarnations.get(incarnation, _NONE) for incarnations in slots]
            if all(one == held[0] for one in held[1:]) or not kept(slot, incarnation):
                continue
            union = Positions(interval for one in held for interval in one.intervals())
            gaps = (one.gaps(*interval) for interval in union.intervals() for one in held)
            found += [(slot, incarnation, *gap) for each in gaps for gap in each]
    return Contents(found)


def forgotten(shards: Sequence[Contents], pushes: Iterable[Push]) -> set[Push]:
    """Those of the pushes that are of incarnations beyond `KEPT_INCARNATIONS`."""
    kept = _kept(shards)
    return {push for push in pushes if not kept(*push[:2])}


def arriving(shards: Sequence[Contents], push: Push) -> bool:
    """Whether a push may still arrive at the shards that lack it: they have no later push of its worker."""
    return all(push[2] > contents.last(push[:2]) for contents in shards if push not in contents)


def settled(shards: Sequence[Contents], pushes: Contents) -> Contents:
    """Those of the pushes that arrive at no shard any more."""
    return Contents(
        (slot, incarnation, start, min(stop, 1 + min(one.passed((slot, incarnation)) for one in shards)))
        for slot, incarnation, start, stop in pushes.spans()
    )


def _kept(shards: Sequence[Contents]) -> Callable[[int, int], bool]:
    """Whether the contents of all shards still hold this incarnation of this slot."""
    newest: dict[int, int] = {}
    for contents in shards:
        for slot, incarnation in contents.newest().items():
            newest[slot] = max(incarnation, newest.get(slot, 0))
    return lambda slot, incarnation: incarnation > newest.get(slot, 0) - KEPT_INCARNATIONS
