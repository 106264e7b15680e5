"""One open epoch of the ledger: what of it is free, done and leased. Pure.

What is free may also be done or leased: who takes it looks, so that replaying a push needs no search.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal_trainer.coordinator.lease_index import Segment
from shoal_trainer.ps.positions import Positions


@dataclass
class EpochState:
    """The free segments of an epoch in visiting order, and the done positions of each file."""

    free: deque[Segment] | None = None
    """None: the whole epoch, not listed yet. A push may name an epoch far ahead, and the list of each takes a while."""
    rests: dict[int, Segment] = field(default_factory=dict)
    """By slot: what is free behind the piece that its worker was leased last."""
    done: dict[int, Positions] = field(default_factory=dict)
    samples: int = 0
    """That are done."""
    leased: Counter[int] = field(default_factory=Counter)
    """Samples that are leased and not done, by the batch size of their workers; none of files of unknown length."""

    def done_in(self, file: int) -> Positions:
        """The done positions of a file (-1: data without files)."""
        return self.done.setdefault(file, Positions())

    def apply(self, segment: Segment) -> list[tuple[int, int]]:
        """Positions of a file are done; returns those that were not."""
        fresh = self.done_in(segment.file).add(segment.start, segment.end)
        self.samples += sum(stop - start for start, stop in fresh)
        return fresh

    @property
    def taken(self) -> int:
        """Samples that are done or leased."""
        return self.samples + self.leased.total()

    def take(self, slot: int) -> Segment | None:
        """Take what lies behind the last piece of this slot, else what nobody has begun, else another one's rest."""
        if slot in self.rests:
            return self.rests.pop(slot)
        if self.free:
            return self.free.popleft()
        return self.rests.pop(next(iter(self.rests))) if self.rests else None

    def give_back(self, segments: Sequence[Segment]) -> None:
        """What is taken next, by who does not go on. The epoch is listed."""
        assert self.free is not None
        self.free.extendleft(reversed(segments))

    def all_free(self) -> list[Segment] | None:
        """All that is free; None as `free`."""
        return None if self.free is None else [*self.free, *self.rests.values()]
