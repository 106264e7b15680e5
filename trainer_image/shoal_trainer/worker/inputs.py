"""The batch of a step as tensors where it is computed; with an accelerator, copied while the step before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shoal_trainer.data.batch import Batch, leaves, named_in, paths_of
from shoal_trainer.worker.several_devices import shares

Placed = tuple[list[Any], tuple[Any, ...]]
"""Tensors, and the shapes of all of them."""


class Inputs:
    """The arguments of a step that come from a batch, for each of `devices` (none: TensorFlow chooses one).

    All batches are of the dtypes of `example`. `as_given`: a custom `train_step` gets the real samples as the data
    function yields them. `on_host`: without an accelerator.
    """

    def __init__(self, example: Batch, devices: Sequence[str], *, as_given: bool, on_host: bool) -> None:
        self._devices, self._as_given, self._on_host = devices, as_given, on_host
        self.structure: Any = next(self._arguments(example))
        """Of the arguments of one device."""
        self._paths, self._named = paths_of(self.structure), named_in(example.as_given())
        """By their number alone, one array would be trained under another one's name."""
        self.specs = [_spec(leaf) for arguments in self._arguments(example) for leaf in leaves(arguments)]
        """Of all tensors, for each device."""
        self._uploads = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._ahead: tuple[Batch, Future[Placed]] | None = None
        """The batch of the next step, on its way to the accelerator."""

    def place(self, batch: Batch, upcoming: Batch | None) -> Placed:
        """The inputs of a step, copied by now if its batch was `upcoming` before; starts to copy the one after it."""
        ahead, self._ahead = self._ahead, None
        inputs = ahead[1].result() if ahead is not None and ahead[0] is batch else self._place(batch)
        if upcoming is not None and not self._on_host:
            self._ahead = upcoming, self._uploads.submit(self._place, upcoming)
        return inputs

    def _place(self, batch: Batch) -> Placed:
        given = list(self._arguments(batch))
        if paths_of(given[0]) != self._paths:
            raise TypeError(f"its parts are {named_in(batch.as_given())}, those of the first {self._named}")
        shared = [list(leaves(arguments)) for arguments in given]
        shapes = tuple(np.shape(leaf) for share in shared for leaf in share)
        specs = self.specs[: len(self.specs) // len(shared)]
        tensors: list[Any] = []
        for device, share in zip(self._devices or (None,), shared, strict=True):
            with tf.device(device):
                placed = [_tensor(leaf, spec) for leaf, spec in zip(share, specs, strict=True)]
                tensors += placed if self._on_host else map(tf.identity, placed)
        return tensors, shapes

    def _arguments(self, batch: Batch) -> Iterator[Any]:
        """The arguments of a step, for each device."""
        if len(self._devices) > 1:
            yield from shares(batch, len(self._devices))
        elif self._as_given:
            yield batch.as_given()
        else:
            yield batch.x, batch.y, batch.weights, np.int32(batch.samples)


def unlike(batch: Batch, example: Batch) -> str:
    """How a batch differs from the first one, in words; empty if it does not."""
    found, first = described(batch), described(example)
    return "" if found == first else f" The batch has {found}; the first one has {first}."


def described(batch: Batch) -> str:
    """The dtypes and shapes of the arrays and tensors of a batch: `float32(32, 10), int64(32,)`."""
    # Without a conversion to tensors, which may be what failed.
    arrays = leaves((batch.x, batch.y))
    return ", ".join(f"{getattr(leaf.dtype, 'name', leaf.dtype)}{tuple(leaf.shape)}" for leaf in arrays)


def _tensor(leaf: Any, spec: tf.TensorSpec) -> Any:
    if not isinstance(leaf, np.ndarray):
        return tf.convert_to_tensor(leaf, spec.dtype)
    check_whole(leaf, spec)
    return tf.constant(leaf, spec.dtype)  # with less overhead than `convert_to_tensor`


def check_whole(leaf: npt.NDArray[Any], spec: tf.TensorSpec) -> None:
    """Raise `TypeError` for numbers that integers of this type are not: TensorFlow would cut them off in silence."""
    dtype = spec.dtype.as_numpy_dtype
    if leaf.dtype == dtype or leaf.dtype.kind not in "iuf" or spec.dtype.is_floating:
        return
    with np.errstate(invalid="ignore"):
        lost = leaf[leaf.astype(dtype) != leaf]
    if lost.size:
        raise TypeError(
            f"{lost.flat[0]} cannot be {np.dtype(dtype).name}, the type in the first batch. Where some numbers have a "
            "fraction, make all of them floats, for example float(row['stars'])"
        )


def _spec(leaf: Any) -> tf.TensorSpec:
    tensor = tf.convert_to_tensor(leaf)
    return tf.TensorSpec(tensor.shape, tensor.dtype)
