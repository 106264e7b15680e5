"""Data that a model preprocesses itself, as the tasks of KerasHub do in `fit`: text to tokens, with weights per token.

The worker does not call `fit`, so the preprocessing runs where the data are read, while another step computes.
`evaluate` of such a model preprocesses by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from shoal_trainer.data.batch import Batch, fill, split
from shoal_trainer.data.downloads import Download
from shoal_trainer.data.source import Extent, Part, Source


def preprocessed(data: Source, model: Any) -> Source:
    """The data as the model's step needs them; the same data for a model without a preprocessor."""
    if getattr(model, "preprocessor", None) is None or not hasattr(model, "preprocess_samples"):
        return data
    return Preprocessed(data, model.preprocess_samples)


@dataclass(frozen=True)
class Preprocessed(Source):
    """`function(x, y, sample_weight)` gives what Keras packs of the three: x, (x, y) or (x, y, sample_weight)."""

    source: Source
    function: Callable[[Any, Any, Any], Any]

    def describe(self) -> Extent:
        """As the data themselves."""
        return self.source.describe()

    def placed(self, seed: int, worker: tuple[int, int] = (0, 0)) -> Source:
        """As the data themselves."""
        return replace(self, source=self.source.placed(seed, worker))

    def read(self, part: Part, batch_size: int, download: Download | None = None) -> Iterator[Batch]:
        """As the data themselves, preprocessed."""
        return map(self._applied, self.source.read(part, batch_size, download))

    def example(self, batch_size: int) -> Batch:
        """As the data themselves, preprocessed."""
        return self._applied(self.source.example(batch_size))

    def _applied(self, batch: Batch) -> Batch:
        return fill(self.function(*split(batch.as_given())), batch.size, batch.end)
