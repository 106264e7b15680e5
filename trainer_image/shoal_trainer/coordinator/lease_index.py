"""The leases of a ledger, by token and by position. Pure.

Leases of a file in an epoch never overlap, so they are sorted by position: a push finds its lease by bisection.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shoal_trainer.ps.contents import Worker

Token = tuple[int, int]

END = 1 << 62
"""An unknown stop as a number, for comparisons."""


class Segment(NamedTuple):
    """Positions [start, stop) of an epoch, in file number `file` (-1: data without files). `stop` None: unknown.

    A tuple to save memory: an epoch has one per file, and each snapshot contains the free ones.
    """

    epoch: int
    file: int
    start: int
    stop: int | None

    @property
    def end(self) -> int:
        """The stop as a number."""
        return END if self.stop is None else self.stop


@dataclass(frozen=True)
class Grant:
    """A lease in the ledger: a segment that a worker holds, which trains it in steps of `batch` samples."""

    token: Token
    worker: Worker
    segment: Segment
    batch: int = 1


class LeaseIndex(Mapping[Token, Grant]):
    """Leases by token, in the order in which they were added."""

    def __init__(self) -> None:
        self._leases: dict[Token, Grant] = {}
        self._at: dict[int, dict[int, list[tuple[int, Token]]]] = {}
        """Epoch, then file: (start, token) in order."""
        self._of: Counter[Worker] = Counter()

    def __getitem__(self, token: Token) -> Grant:
        return self._leases[token]

    def __iter__(self) -> Iterator[Token]:
        return iter(self._leases)

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, lease: Grant) -> None:
        """Add a lease, or replace the one with the same token and start."""
        segment = lease.segment
        if lease.token not in self._leases:
            files = self._at.setdefault(segment.epoch, {})
            insort(files.setdefault(segment.file, []), (segment.start, lease.token))
            self._of[lease.worker] += 1
        self._leases[lease.token] = lease

    def remove(self, token: Token) -> None:
        """Remove a lease."""
        lease = self._leases.pop(token)
        self._of[lease.worker] -= 1
        if not self._of[lease.worker]:
            del self._of[lease.worker]
        segment = lease.segment
        files = self._at[segment.epoch]
        entries = files[segment.file]
        del entries[bisect_left(entries, (segment.start, token))]
        if not entries:
            del files[segment.file]
        if not files:
            del self._at[segment.epoch]

    def has(self, worker: Worker) -> bool:
        """Whether a worker holds any."""
        return worker in self._of

    def in_epoch(self, epoch: int) -> bool:
        """Whether an epoch has leases."""
        return epoch in self._at

    def overlapping(self, segment: Segment) -> list[Grant]:
        """The leases that share positions with a segment, in order."""
        entries = self._at.get(segment.epoch, {}).get(segment.file, [])
        first = max(0, bisect_right(entries, segment.start, key=_start) - 1)
        last = bisect_left(entries, segment.end, key=_start)
        candidates = [self._leases[token] for _, token in entries[first:last]]
        return [lease for lease in candidates if overlap(lease.segment, segment)]


def overlap(one: Segment, other: Segment) -> bool:
    """Whether two segments share positions."""
    return one[:2] == other[:2] and max(one.start, other.start) < min(one.end, other.end)


def _start(entry: tuple[int, Token]) -> int:
    return entry[0]
