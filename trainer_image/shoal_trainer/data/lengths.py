"""Samples of different lengths: padded with zeros to the shortest of a few lengths that holds the batch.

A batch of another shape costs a compilation of the step, so there are few shapes. Samples of like lengths are put into
the same batches where the samples are shuffled anyway.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal_trainer.data.batch import leaves, map_leaves
from shoal_trainer.data.rows import columns, stacked
from shoal_trainer.errors import UserError


def checked(lengths: Sequence[int], where: str) -> tuple[int, ...]:
    """The lengths in ascending order. Raises `UserError` for others than positive integers."""
    if not all(isinstance(length, int) and length > 0 for length in lengths):
        raise UserError(f"{where}: lengths must be positive integers, not {list(lengths)}.")
    return tuple(sorted(set(lengths)))


def fitting(lengths: Sequence[int], length: int, what: str) -> int:
    """The shortest of ascending `lengths` that holds `what`. Raises `UserError` if none does."""
    if length > lengths[-1]:
        raise UserError(
            f"{what} has the length {length}, and the longest of lengths=… is {lengths[-1]}. Cut it, or add a length."
        )
    return lengths[bisect.bisect_left(lengths, length)]


def padding(kind: np.dtype[Any]) -> Any:
    """With what arrays of this type are padded: objects are bytes, among which TensorFlow takes no number."""
    return b"" if kind.hasobject else np.zeros((), kind)[()]


class Lengths:
    """Pads samples to one of `lengths`. `varies`: for each array of a sample, whether its axis 0 varies in length.

    Between `pad` and `cut`, an element is a pair: the arrays, padded to the longest length, and how long each row is.
    """

    def __init__(self, lengths: tuple[int, ...], varies: Sequence[bool]) -> None:
        self.lengths, self.varies = lengths, tuple(varies)

    def stacked(self, samples: Sequence[Any]) -> tuple[Any, npt.NDArray[np.int64]]:
        """Single samples as one element."""
        longest, arrays = self.lengths[-1], [tuple(map(np.asarray, column)) for column in columns(samples)]
        lengths = ([leaf.shape[:1] for leaf in row] for row in zip(*arrays, strict=True))
        sizes = np.array([self._length(row) for row in lengths], np.int64)
        found = iter(zip(arrays, self.varies, strict=True))

        def stack(_: Any) -> Any:
            rows, varies = next(found)
            if not varies:
                return stacked(
                    rows, "Pad them: other arrays were seen to vary in length, and this one was not."
                )
            kinds = {row.dtype for row in rows if row.size} or {rows[0].dtype}  # of no values it says nothing
            kind = np.result_type(*kinds)
            out = np.full((len(rows), longest, *rows[0].shape[1:]), padding(kind), kind)
            for target, row in zip(out, rows, strict=True):
                target[: len(row)] = row
            return out

        return map_leaves(stack, samples[0]), sizes

    def dataset(self, rows: Any, batch_size: int) -> Any:
        """A data set of single samples as one of elements."""
        import tensorflow as tf

        varying = self.varies.index(True)

        def measured(*sample: Any) -> Any:
            element = sample if isinstance(rows.element_spec, tuple) else sample[0]
            length = tf.shape(list(leaves(element))[varying], tf.int64)[0]
            text = f"A sample is longer than the longest of lengths=…, {self.lengths[-1]}. Cut it, or add a length."
            check = tf.debugging.assert_less_equal(length, np.int64(self.lengths[-1]), message=text)
            with tf.control_dependencies([check]):
                return element, tf.identity(length)

        flags = iter(self.varies)
        shapes = map_leaves(
            lambda spec: (self.lengths[-1], *spec.shape[1:]) if next(flags) else tuple(spec.shape),
            rows.element_spec,
        )
        return rows.map(measured).padded_batch(batch_size, padded_shapes=(shapes, ()))

    def group(self, element: Any, order: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int64]:
        """The order with the rows of one length as neighbours; which length comes first depends on `seed`."""
        groups = np.searchsorted(self.lengths, element[1][order])
        ranks = np.random.default_rng(seed).permutation(len(self.lengths))
        return order[np.argsort(ranks[groups], kind="stable")]

    def cut(self, elements: Iterator[Any]) -> Iterator[Any]:
        """The arrays of elements, as short as their longest row allows."""
        for element, sizes in elements:
            width = fitting(self.lengths, int(np.max(sizes)), "A sample")
            flags = iter(self.varies)
            yield map_leaves(lambda leaf: np.asarray(leaf)[:, :width] if next(flags) else leaf, element)  # noqa: B023

    def _length(self, shapes: Sequence[tuple[int, ...]]) -> int:
        found = {shape[0] for shape, varies in zip(shapes, self.varies, strict=True) if varies}
        if len(found) != 1:
            raise UserError(
                f"The arrays of a sample that vary in length have different lengths: {sorted(found)}. Pad them to one."
            )
        fitting(self.lengths, length := found.pop(), "A sample")
        return length


def varying_in(samples: Sequence[Any], axis: int = 0) -> list[bool]:
    """Which arrays of these samples vary in length along an axis; if none does, those that are as long as the first."""
    sizes = [tuple(np.shape(leaf)[axis : axis + 1] for leaf in column) for column in columns(samples)]
    found = [len(set(column)) > 1 for column in sizes]
    if any(found):
        return found
    first = next(filter(any, sizes), None)
    if first is None:
        raise UserError("lengths=… needs samples with an array of at least one axis.")
    return [column == first for column in sizes]


def varying_by(spec: Any) -> list[bool]:
    """Which tensors of a sample vary in length, by the `element_spec` of a data set: axis 0 is None."""
    found = [leaf.shape.rank != 0 and leaf.shape[0] is None for leaf in leaves(spec)]
    if not any(found):
        raise UserError("lengths=… needs a data set with tensors of unknown length, of shape (None, …).")
    return found
