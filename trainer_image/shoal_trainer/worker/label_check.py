"""Checks labels and the ids of embeddings before a step uses them, on the host, while another step computes.

TensorFlow reports them only on a CPU without XLA. On a GPU, and with XLA, a label outside of the loss's range gives a
loss that is NaN, and an id outside of an Embedding gives zeros: training would go on with wrong data. A loss with a
`call` of its own may give such values a meaning (-100: no label), so it isn't checked; nor are ids that the model
changes before it looks them up. An id below 0 counts from the end, as in Keras.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shoal_trainer.data.batch import Batch
from shoal_trainer.errors import UserError
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.keras_internals import compiled_loss, flat_losses
from shoal_trainer.worker.weighing import WeighedLoss


class LabelCheck:
    """The limits of a model whose step is traced."""

    def __init__(self, flat_model: FlatModel) -> None:
        self._labels = list(_labels(flat_model.model))
        self._embeddings = flat_model.found.embeddings

    def check(self, batch: Batch) -> None:
        """Raise `UserError` for a label or an id that the model does not have."""
        for path, loss in self._labels:
            _require(
                _at(batch.y, path), batch.samples, 0, loss.classes or 0,
                f"Labels{_named(path)} are outside the loss's range: {{found}}, but the model's output has {{limit}} "
                "classes, 0 to {last}.", ignored=loss.ignored,
            )  # fmt: skip
        for path, layer in self._embeddings.items():
            _require(
                _at(batch.x, path), batch.samples, -layer.input_dim, layer.input_dim,
                f"Ids are outside the Embedding {layer.name!r}: {{found}}, but its input_dim is {{limit}}, for 0 to "
                "{last}.",
            )  # fmt: skip


def _labels(model: Any) -> Iterator[tuple[tuple[Any, ...], WeighedLoss]]:
    compiled = compiled_loss(model)
    for each in flat_losses(compiled) if compiled is not None and compiled.built else ():
        if isinstance(each.loss, WeighedLoss) and each.loss.classes is not None:
            yield each.path, each.loss


def _at(structure: Any, path: tuple[Any, ...]) -> Any:
    """The array at a path; None if the structure is another one than the path is for."""
    try:
        for step in path:
            if isinstance(structure, dict | list | tuple):
                structure = structure[step]
    except (KeyError, IndexError, TypeError):
        return None
    return None if isinstance(structure, dict | list | tuple) else structure


def _require(array: Any, samples: int, first: int, limit: int, text: str, ignored: int | None = None) -> None:
    values = None if array is None else np.asarray(array)[:samples]
    if values is None or values.dtype.kind not in "iuf" or not values.size:
        return
    if ignored is not None:
        values = values[values != ignored]
    if values.size and (values.min() < first or values.max() >= limit):
        wrong = values[(values < first) | (values >= limit)]
        found = ", ".join(f"{value:g}" for value in np.unique(wrong)[:5])
        raise UserError(text.format(found=found, limit=limit, last=limit - 1))


def _named(path: tuple[Any, ...]) -> str:
    return f" of {'/'.join(map(str, path))}" if path else ""
