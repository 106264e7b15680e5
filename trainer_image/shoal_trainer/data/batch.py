"""Batches of one fixed shape.

A batch of another size would retrace the step function (11 s for a ResNet-110). So the short batch at the end of a
range is padded with its own samples, which have weight 0. The weights of the real samples are scaled by
`size / samples`, so that a loss which divides by the batch size is the mean over the real samples, and the parameter
server can weight each push by its number of samples. Weights may be per sample, per token or per output, as in Keras.
The losses of `compile()` also get a mask of the real rows (`worker/weighing.py`); a custom `compute_loss` has only the
weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal_trainer.errors import UserError


@dataclass(frozen=True)
class Batch:
    """One batch of `size` rows, of which the first `samples` are real.

    `x`, `y`: (nested structures of) arrays or tensors with the batch on axis 0; `y` may be None.
    `weights`: float32, shape (size, …), the user's weights (1 for None) times those of the padding described above: one
    array, or a structure with one per output.
    `end`: the position in the range (or file) after the last sample.
    `parts`: the length of the tuple that the data function yields: 1 `(x,)`, 2 `(x, y)`, 3 `(x, y, sample_weight)`; 0
    if it yields x alone.
    """

    x: Any
    y: Any
    weights: Any
    samples: int
    end: int
    parts: int = 2

    @property
    def size(self) -> int:
        """The number of rows, with the padding."""
        return rows_of(next(leaves(self.weights)))

    def as_given(self) -> Any:
        """The real samples, in the form in which the data function yields them and Keras passes them on."""
        n, share = self.samples, np.float32(self.samples / self.size)
        x, y = (map_leaves(lambda leaf: leaf[:n], part) for part in (self.x, self.y))
        weights = map_leaves(lambda leaf: leaf[:n] * share, self.weights)
        return (x, y, weights)[: self.parts] if self.parts else x


def split(element: Any) -> tuple[Any, Any, Any]:
    """Unpack an element of a data set as Keras does: `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`."""
    if not isinstance(element, tuple):
        return element, None, None
    if not 1 <= len(element) <= 3:
        raise UserError(
            f"The data function yields tuples of length {len(element)}. Yield x, (x, y) or (x, y, sample_weight)."
        )
    x, y, weight = (*element, None, None)[:3]
    return x, y, weight


def as_tuple(element: Any) -> Any:
    """A batch as a script yields it, as Keras takes it: a list of its parts is a tuple."""
    return tuple(element) if isinstance(element, list) else element


def fill(element: Any, size: int, end: int) -> Batch:
    """Make a `Batch` of `size` rows from a batched element with 1 to `size` rows.

    Raises `UserError` if the parts of the element have different numbers of rows.
    """
    x, y, user_weight = split(element)
    if y is None and user_weight is not None:
        raise UserError(
            "The data yield (x, None, sample_weight), which Keras' fit refuses: losses weigh by y. Leave the weights "
            "out, or make them a part of x."
        )
    counts = {rows_of(leaf) for leaf in leaves((x, y, user_weight))}
    if len(counts) != 1:
        raise UserError(
            f"The parts of a sample (x, y, sample_weight) have different numbers of rows: {sorted(counts)}."
        )
    samples = counts.pop()
    if not 0 < samples <= size:
        raise UserError(f"The data yield a batch of {samples} samples; at most {size} are expected.")
    scale = np.float32(size / samples)

    def weighed(given: Any) -> npt.NDArray[np.float32]:
        found = np.asarray(given, np.float32)
        weights = np.zeros((size, *found.shape[1:]), np.float32)
        np.multiply(found, scale, out=weights[:samples])
        return weights

    # As in Keras, an output without weights among others counts each sample alike.
    weights = map_leaves(weighed, user_weight, missing=weighed(np.ones(samples)))
    if samples < size:
        rows = np.arange(size) % samples
        x, y = (map_leaves(lambda leaf: np.asarray(leaf)[rows], part) for part in (x, y))
    return Batch(x, y, weights, samples, end, len(element) if isinstance(element, tuple) else 0)


def batches(rows: Iterator[Any], size: int, start: int, stop: int | None, where: str) -> Iterator[Batch]:
    """Convert batched elements (of at most `size` rows) of the range [start, stop) to `Batch`es.

    `stop` None: to the end, of any length. Raises `UserError` if there are fewer or more samples.
    """
    position = start
    for element in rows:
        count = rows_of(next(leaves(split(element)[0])))
        position += count
        if stop is not None and position > stop:
            raise UserError(
                f"{where} yields more than {stop - start} samples. Yield exactly this many, unbatched."
            )
        yield fill(element, size, position)
    if stop is not None and position < stop:
        raise UserError(
            f"{where} yields only {position - start} samples instead of {stop - start}. "
            "Yield exactly stop - start single samples (do not batch, do not drop), or correct the size."
        )


def leaves(structure: Any) -> Iterator[Any]:
    """The arrays of a nested structure of tuples, lists and dicts; None is not an array."""
    return (leaf for _, leaf in located(structure))


def located(structure: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The arrays of `leaves`, each after the keys and indices that lead to it."""
    if isinstance(structure, dict):
        for key in sorted(structure):
            yield from located(structure[key], (*path, key))
    elif isinstance(structure, tuple | list):
        for index, part in enumerate(structure):
            yield from located(part, (*path, index))
    elif structure is not None:
        yield path, structure


def paths_of(structure: Any) -> list[tuple[Any, ...]]:
    """Which arrays a structure has."""
    return [path for path, _ in located(structure)]


def named_in(element: Any) -> str:
    """The arrays of a sample or batch in words: "x.age, x.weight, y"."""
    parts = ("x", "y", "sample_weight")
    return ", ".join(".".join(map(str, (parts[first], *rest))) for first, *rest in paths_of(split(element)))


def map_leaves(function: Any, structure: Any, missing: Any = None) -> Any:
    """The same structure with `function` applied to its arrays, in the order of `leaves`; `missing` replaces None."""
    if isinstance(structure, dict):
        mapped = {key: map_leaves(function, structure[key], missing) for key in sorted(structure)}
        return {key: mapped[key] for key in structure}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(map_leaves(function, part, missing) for part in structure))
    if isinstance(structure, tuple | list):
        return type(structure)(map_leaves(function, part, missing) for part in structure)
    return missing if structure is None else function(structure)


def rows_of(leaf: Any) -> int:
    """The length of the batch axis."""
    if not len(leaf.shape):
        raise UserError(
            "The parts of a sample must be arrays or tensors; after batching, one of them has no batch axis."
        )
    return int(leaf.shape[0])
