"""Data whose batches go through a function: one that weighs them by class, or a model's own preprocessing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shoal_trainer.data.batch import Batch
from shoal_trainer.data.downloads import Download
from shoal_trainer.data.source import Epochs, Extent, Part, Probes, Source


@dataclass(frozen=True)
class Mapped(Source):
    """`function` of each batch of `source`, of which it has as many."""

    source: Source
    function: Callable[[Batch], Batch]

    @property
    def lengths(self) -> Sequence[int]:  # type: ignore[override]
        """See `Source`."""
        return self.source.lengths

    @property
    def remark(self) -> str:  # type: ignore[override]
        """See `Source`."""
        return self.source.remark

    @property
    def batch_size(self) -> int | None:
        """See `Source`."""
        return self.source.batch_size

    @property
    def block(self) -> int:
        """See `Source`."""
        return self.source.block

    def describe(self) -> Extent:
        """As the data themselves."""
        return self.source.describe()

    def probes(self) -> Probes:
        """As the data themselves."""
        return self.source.probes()

    def placed(self, seed: int, worker: tuple[int, ...] = (0, 0)) -> Source:
        """As the data themselves."""
        return replace(self, source=self.source.placed(seed, worker))

    def read(self, part: Part, batch_size: int, download: Download | None = None) -> Iterator[Batch]:
        """As the data themselves, through the function."""
        return map(self.function, self.source.read(part, batch_size, download))

    def epochs(self, batch_size: int) -> Epochs | None:
        """As the data themselves, through the function."""
        found = self.source.epochs(batch_size)
        return None if found is None else Epochs(lambda: map(self.function, found.read()), found.batches)

    def whole(self, batch_size: int) -> Iterator[Batch]:
        """As the data themselves, through the function."""
        return map(self.function, self.source.whole(batch_size))

    def example(self, batch_size: int) -> Batch:
        """As the data themselves, through the function."""
        return self.function(self.source.example(batch_size))
