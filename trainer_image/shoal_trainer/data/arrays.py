"""Data in memory."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal_trainer.data.batch import leaves, map_leaves
from shoal_trainer.data.indexed import Ranges
from shoal_trainer.data.order import order_name, samples_at
from shoal_trainer.data.probes import probes_of
from shoal_trainer.data.source import Probes
from shoal_trainer.errors import UserError

PROBES = 16
"""The number of rows by which two workers' arrays are compared."""


@dataclass(frozen=True)
class Arrays(Ranges):
    """Data in memory, made by `Indexed.from_arrays`.

    Args:
        x: The inputs, shape (N, …), or a nested structure of such arrays.
        y: The targets, likewise, or None.
        sample_weight: Weights with the samples on axis 0, a structure of them with one per output, or None.
        seed: The seed of the order; None: that of the job.

    Attributes:
        size: N, the number of samples.

    Raises:
        UserError: As `Indexed.from_arrays`.
    """

    x: Any
    y: Any
    sample_weight: Any
    seed: int | None = None
    size: int = field(init=False)

    def __post_init__(self) -> None:
        for name in ("x", "y", "sample_weight"):
            convert = functools.partial(_array, column=name != "sample_weight")
            object.__setattr__(self, name, map_leaves(convert, getattr(self, name)))
        sizes = {len(leaf) for leaf in leaves((self.x, self.y, self.sample_weight))}
        if len(sizes) != 1:
            raise UserError(
                f"The arrays have different numbers of samples: {sorted(sizes)}. Pass one row per sample."
            )
        object.__setattr__(self, "size", sizes.pop())
        if self.size < 1:
            raise UserError("The data must have at least one sample; the arrays are empty.")

    def probes(self) -> Probes:
        """See `Source`."""
        rows = np.linspace(0, self.size - 1, min(self.size, PROBES)).astype(int)
        columns = [np.asarray(leaf[rows]) for leaf in leaves((self.x, self.y, self.sample_weight))]
        return Probes(tuple(number for number, _ in probes_of(columns)))

    def _order_name(self) -> str:
        return order_name(self.size)

    def _elements(self, epoch: int | None, start: int, stop: int, batch_size: int) -> Iterator[Any]:
        for begin in range(start, stop, batch_size):
            rows = samples_at(begin, min(begin + batch_size, stop), self.size, self.seed or 0, epoch)
            element = map_leaves(lambda leaf: as_floatx(leaf[rows]), (self.x, self.y, self.sample_weight))  # noqa: B023
            yield _packed(*element)


def _array(leaf: Any, *, column: bool) -> Any:
    """Convert to an array whose rows can be indexed by position in any order; pandas and h5py cannot.

    `column`: a pandas Series becomes shape (N, 1), as in Keras' `fit`.
    """
    if type(leaf).__name__ in {"RaggedTensor", "SparseTensor"}:
        raise UserError(
            f"Indexed.from_arrays got a {type(leaf).__name__}. Pass a dense array: x.to_tensor() or "
            "tf.sparse.to_dense(x)."
        )
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(leaf, pandas.Series) and column:
        leaf = leaf.to_numpy()[:, None]
    elif pandas is not None and isinstance(leaf, pandas.DataFrame):
        leaf = _table(leaf)
    array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    if not array.ndim:
        raise UserError(
            f"Indexed.from_arrays got a {type(leaf).__name__} instead of an array with the samples on axis 0. Pass "
            "NumPy arrays, for example np.asarray(y); a list is a structure of inputs."
        )
    return array


def _table(frame: Any) -> npt.NDArray[Any]:
    """The values of a DataFrame; mixed numeric columns (float and bool) become floats, as in Keras' `fit`."""
    values: npt.NDArray[Any] = frame.to_numpy()
    if values.dtype == object:
        with contextlib.suppress(TypeError, ValueError):  # text stays text
            values = frame.to_numpy(np.float32)
    return values


def as_floatx(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Cast floats to `keras.config.floatx()`, as Keras' `fit` does."""
    if rows.dtype.kind != "f":
        return rows
    import keras

    return rows.astype(keras.config.floatx(), copy=False)


def _packed(x: Any, y: Any, sample_weight: Any) -> Any:
    """Pack a sample as Keras' `fit(x, y, sample_weight)` passes it to `train_step`: without y, weights are left out."""
    if y is not None:
        return (x, y) if sample_weight is None else (x, y, sample_weight)
    return (x,) if isinstance(x, tuple | list) else x
