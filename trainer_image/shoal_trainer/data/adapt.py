"""Turns what users hold into a `Source`: arrays, data sets of TensorFlow, Keras, Hugging Face, Grain and PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal_trainer.data.arrays import Arrays
from shoal_trainer.data.batch import Batch, leaves, map_leaves
from shoal_trainer.data.items import Batches, Items
from shoal_trainer.data.source import Source
from shoal_trainer.data.stream import Stream
from shoal_trainer.errors import UserError

FORMS = (
    "Use arrays (x, y), Indexed, Files, a tf.data.Dataset, a keras.utils.PyDataset, a data set with len() and "
    "[index] (Hugging Face, Grain, PyTorch), or Stream(function, samples=N) for a generator"
)


def as_source(data: Any, argument: str) -> Source:
    """`data` as a `Source`. `argument`: where the user passed it. Raises `UserError` for what cannot be read."""
    if isinstance(data, Source):
        return data
    kind = type(data)
    if hasattr(data, "element_spec"):
        return Stream(data)
    if _is_pydataset(kind):
        if data.num_batches is None:
            raise UserError(
                f"{argument} is a PyDataset that never ends. Say how many samples make an epoch: Stream(data, "
                "samples=N)."
            )
        return Batches(data)
    if isinstance(data, tuple) and 1 <= len(data) <= 3:
        return Arrays(*data, *(None,) * (3 - len(data)))
    if isinstance(data, Mapping) and data and not all(map(_is_array, leaves(dict(data)))):
        raise UserError(
            f"{argument} has the parts {', '.join(map(str, data))}. Pass one: data[{next(iter(data))!r}]."
        )
    if isinstance(data, dict) or _is_array(data):
        return Arrays(data, None, None)
    if hasattr(kind, "__len__") and hasattr(kind, "__getitem__") and not isinstance(data, str | bytes | list):
        return Items(data)
    if hasattr(kind, "__iter__") and not isinstance(data, str | bytes | list):
        raise UserError(
            f"{argument} is a {kind.__name__}, whose samples Shoal cannot count or find by number. Pass "
            "Stream(data, samples=N) with batches, as Keras' fit takes them; for a generator, its function."
        )
    if callable(data):
        raise UserError(
            f"{argument} is a function. Pass the data that it returns, or Stream(function, samples=N) if it returns "
            "batches as Keras' fit takes them."
        )
    split = " There is no validation_split: pass other samples." if isinstance(data, float) else ""
    raise UserError(f"{argument} cannot be of the type {kind.__name__}.{split} {FORMS}.")


def _is_array(data: Any) -> bool:
    is_pandas = type(data).__module__.partition(".")[0] == "pandas"
    return (hasattr(data, "shape") and hasattr(data, "dtype")) or is_pandas


def _is_pydataset(kind: type) -> bool:
    return any(base.__name__ == "PyDataset" and base.__module__.startswith("keras.") for base in kind.__mro__)


@dataclass(frozen=True)
class ClassWeights:
    """Weighs the samples of a batch by their class, as `class_weight` of Keras' `fit` does."""

    weights: Mapping[int, float]

    @classmethod
    def of(cls, weights: Any) -> ClassWeights:
        """From the user's argument, whose keys JSON makes text. Raises `UserError` if it is no map of numbers."""
        try:
            return cls({int(number): float(weight) for number, weight in weights.items()})
        except (AttributeError, TypeError, ValueError):
            raise UserError(
                f"Training(class_weight=…) must be a map from class numbers to weights, such as {{0: 1.0, 1: 5.0}}, "
                f"not {weights!r}."
            ) from None

    def __call__(self, batch: Batch) -> Batch:
        """The batch with weights."""
        labels = list(leaves(batch.y))
        if len(labels) != 1 or len(list(leaves(batch.weights))) != 1:
            raise UserError(
                "Training(class_weight=…) needs data with one output, as in Keras. Pass weights per output instead: "
                "(x, y, {name: weights})."
            )
        of_row = self._of(np.asarray(labels[0]))

        def times(weights: Any) -> Any:
            return weights * of_row.reshape(-1, *[1] * (np.ndim(weights) - 1))

        return replace(batch, weights=map_leaves(times, batch.weights), parts=3)

    def _of(self, y: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """The weight of each row, as Keras finds its class."""
        if y.ndim > 1:
            y = y[..., 0] if y.shape[-1] == 1 else np.argmax(y, -1)
        if y.ndim != 1:
            raise UserError(
                "Training(class_weight=…) needs one label per sample. Pass weights per token instead."
            )
        classes, places = np.unique(np.round(y).astype(np.int64), return_inverse=True)
        return np.array([self.weights.get(int(each), 1.0) for each in classes], np.float32)[places]
