"""The ranges of an epoch: what leases start as, and the order in which they are granted. Pure.

Each epoch visits its ranges in a seeded order of its own. Of data that are read in blocks, which are larger than the
ranges of small data, a worker goes on behind its last range for a while if that is free: a **stretch**.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from shoal_trainer.coordinator.lease_index import Segment

MIN_RANGES = 32
"""Per epoch, if the data are large enough: keeps the tail of an epoch short."""
MAX_BATCHES = 64
"""Per range: limits the work that a lost worker delays."""
MAX_RANGES = 1 << 14
"""Per epoch, which takes precedence over `MAX_BATCHES`: every snapshot contains all ranges."""
STRETCH_BLOCKS = 2
"""About what one worker is granted in a row: more would be read once, and fewer samples mixed."""


@dataclass
class Ranges:
    """The ranges of each epoch over `size` samples, of `length` samples each, or over `files` files."""

    size: int | None
    files: int
    seed: str
    length: int
    stretch: int = 0
    """A worker that was granted so many samples in a row goes on elsewhere."""

    @classmethod
    def of(cls, *, size: int | None, files: int, batch_size: int, seed: str, block: int = 0) -> Ranges:
        """Those of data that are read in blocks of `block` samples, or in none."""
        per_epoch = 0 if size is None else size // batch_size
        batches = max(1, min(MAX_BATCHES, per_epoch // MIN_RANGES), -(-per_epoch // MAX_RANGES))
        return cls(size, files, seed, batch_size * batches, STRETCH_BLOCKS * block)

    @property
    def per_epoch(self) -> int:
        """The number of ranges in an epoch."""
        return self.files if self.size is None else -(-self.size // self.length)

    def under(self, segments: Iterable[Segment]) -> set[tuple[int, int]]:
        """(epoch, number) of each range that the segments overlap."""
        found = set()
        for epoch, file, start, stop in segments:
            first, last = max(0, file), max(0, file)
            if file < 0 and stop is not None:
                first, last = start // self.length, max(start, stop - 1) // self.length
            found |= {(epoch, number) for number in range(first, last + 1)}
        return found

    def visiting(self, epoch: int, lengths: Mapping[int, int]) -> list[Segment]:
        """The ranges in the order in which they are granted to workers that do not go on. `lengths`: of known files."""
        if self.size is None:
            segments = [Segment(epoch, file, 0, lengths.get(file)) for file in range(self.files)]
        else:
            starts = range(0, self.size, self.length)
            segments = [Segment(epoch, -1, start, min(start + self.length, self.size)) for start in starts]
        random.Random(f"{self.seed}/{epoch}").shuffle(segments)
        return segments

    def alone(self, epoch: int) -> Iterator[Segment]:
        """The ranges as they are granted to a worker that is the only one."""
        free, stretch = deque(self.visiting(epoch, {})), None
        while free:
            segment = self.next_of(free, stretch)
            stretch = stretched(stretch, segment)
            yield segment

    def next_of(self, free: deque[Segment], stretch: Segment | None) -> Segment:
        """Take what lies behind a worker's stretch, unless that is over or not free; else the first that is."""
        if stretch is None or stretch.stop is None or stretch.stop - stretch.start >= self.stretch:
            return free.popleft()
        begin = *stretch[:2], stretch.stop
        number = next((number for number, segment in enumerate(free) if segment[:3] == begin), 0)
        segment = free[number]
        del free[number]
        return segment


def stretched(stretch: Segment | None, segment: Segment) -> Segment:
    """What a worker was granted in a row, with the newest segment."""
    if stretch is None or (*stretch[:2], stretch.stop) != segment[:3]:
        return segment
    return segment._replace(start=stretch.start)
