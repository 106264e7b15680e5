"""The ranges of an epoch, the order of their visits, and how much of them a worker is leased at once. Pure.

Each epoch visits its ranges in a seeded order of its own. A worker is leased a whole range while much is left, and
pieces of one towards the end of what may be trained, so that no worker has much to do when the others have nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal_trainer.coordinator.lease_index import Segment

MIN_RANGES = 32
"""Per epoch, if the data are large enough: so many are mixed."""
MAX_BATCHES = 64
"""Per range: limits the work that a lost worker delays."""
MAX_RANGES = 1 << 14
"""Per epoch, which takes precedence over `MAX_BATCHES`: every snapshot contains all ranges."""
RANGE_BLOCKS = 2
"""Also takes precedence. Of smaller ranges more would be read once, and of larger ones fewer samples mixed."""
FILE_PIECES = 4
"""Of a file, about: who reads a piece has to fetch all of the file, and to skip what lies before."""


@dataclass(frozen=True)
class Portion:
    """How much a worker is leased at once.

    `batch`: the samples of its steps. `share`: its part of what all workers train in the same time. `least`: samples
    that it trains in about the time of a request; `enough`: that it holds for its next steps and the next request.
    """

    batch: int = 1
    share: float = 1.0
    least: float = 1.0
    enough: float = math.inf

    def of(self, left: int, leased: int, held: int, piece: float = 0) -> float:
        """How many samples, of `left` that may be leased before the workers have to wait for each other; 0: not now.

        `leased`: so many are, and not done, `held` of them by this worker. It will have trained what it holds when the
        others are half through with all the rest: as much again is left for who is late. `piece`: of a file, at least.
        """
        part = (left + leased) * self.share / (2 - self.share) - held
        if part < self.batch and held >= self.enough and not piece:
            return 0
        return max(1, min(max(part, self.least, self.batch, piece), left))

    def cut(self, samples: float, left: int, length: int) -> int:
        """About so many `samples` of a segment of this `length`: whole batches, or all where less than one remains."""
        batches = max(1, int(samples // self.batch)) * self.batch
        return length if length <= min(left, batches + self.batch - 1) else min(length, batches)


ALONE = Portion()


@dataclass
class Ranges:
    """The ranges of each epoch over `size` samples, of `length` samples each, or over `files` files."""

    size: int | None
    files: int
    seed: str
    length: int

    @classmethod
    def of(cls, *, size: int | None, files: int, batch_size: int, seed: str, block: int = 0) -> Ranges:
        """Those of data that are read in blocks of `block` samples, or in none."""
        per_epoch = 0 if size is None else size // batch_size
        batches = max(
            1,
            min(MAX_BATCHES, per_epoch // MIN_RANGES),
            -(-per_epoch // MAX_RANGES),
            -(-RANGE_BLOCKS * block // batch_size),
        )
        return cls(size, files, seed, batch_size * batches)

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
        """The ranges in the order of their visits. `lengths`: of known files."""
        if self.size is None:
            segments = [Segment(epoch, file, 0, lengths.get(file)) for file in range(self.files)]
        else:
            starts = range(0, self.size, self.length)
            segments = [Segment(epoch, -1, start, min(start + self.length, self.size)) for start in starts]
        random.Random(f"{self.seed}/{epoch}").shuffle(segments)
        return segments
