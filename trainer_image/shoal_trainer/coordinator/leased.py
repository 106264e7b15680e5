"""The leases of a ledger, by token and by position. Pure.

Leases of one file in one pass never overlap, so they are kept in the order of their positions: a push finds the lease
that it belongs to without a walk over those of all workers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

Token = tuple[int, int]

END = 1 << 62
"""Stands for a stop that is not known, where numbers are compared."""


class Segment(NamedTuple):
    """Positions [start, stop) of one epoch, of file number `file` (-1: the data have no files); `stop` None: unknown.

    A tuple, because an epoch over many files makes one for each, and every snapshot holds those that are free.
    """

    epoch: int
    file: int
    start: int
    stop: int | None

    @property
    def end(self) -> int:
        """The stop, as a number."""
        return END if self.stop is None else self.stop


@dataclass(frozen=True)
class Lease:
    """A segment that a worker holds."""

    token: Token
    slot: int
    incarnation: int
    segment: Segment


class Leased(Mapping[Token, Lease]):
    """Leases by token, in the order in which they were added."""

    def __init__(self) -> None:
        self._leases: dict[Token, Lease] = {}
        self._at: dict[int, dict[int, list[tuple[int, Token]]]] = {}
        """Of each pass and file, (start, token) in order."""

    def __getitem__(self, token: Token) -> Lease:
        return self._leases[token]

    def __iter__(self) -> Iterator[Token]:
        return iter(self._leases)

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, lease: Lease) -> None:
        """Take in a lease, or a lease of the same token and start that ends elsewhere."""
        segment = lease.segment
        if lease.token not in self._leases:
            files = self._at.setdefault(segment.epoch, {})
            insort(files.setdefault(segment.file, []), (segment.start, lease.token))
        self._leases[lease.token] = lease

    def remove(self, token: Token) -> None:
        """Forget a lease."""
        segment = self._leases.pop(token).segment
        files = self._at[segment.epoch]
        entries = files[segment.file]
        del entries[bisect_left(entries, (segment.start, token))]
        if not entries:
            del files[segment.file]
        if not files:
            del self._at[segment.epoch]

    def in_pass(self, epoch: int) -> bool:
        """Whether a lease is of this pass."""
        return epoch in self._at

    def overlapping(self, segment: Segment) -> list[Lease]:
        """The leases that have positions in common with a segment, in order."""
        entries = self._at.get(segment.epoch, {}).get(segment.file, [])
        first = max(0, bisect_right(entries, segment.start, key=_start) - 1)
        last = bisect_left(entries, segment.end, key=_start)
        found = [self._leases[token] for _, token in entries[first:last]]
        return [lease for lease in found if overlap(lease.segment, segment) is not None]


def overlap(one: Segment, other: Segment) -> Segment | None:
    """What two segments have in common; None where that is nothing."""
    if (one.epoch, one.file) != (other.epoch, other.file):
        return None
    start, end = max(one.start, other.start), min(one.end, other.end)
    return None if start >= end else one._replace(start=start, stop=None if end == END else end)


def _start(entry: tuple[int, Token]) -> int:
    return entry[0]
