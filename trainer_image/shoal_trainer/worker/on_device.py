"""What becomes of an update on the accelerator that computed it.

It stays there. The updates of a push are added up on the accelerator, and what the next step computes on is made of
them there, so that the step waits for no transfer. An update crosses the bus once, in pieces: while one is sent, the
next is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shoal_trainer.worker.on_host import Lead

READ_VALUES = 1 << 22
"""The values that are read at a time."""


class OnDevice:
    """An update in the wire's format, in `tensors` of an accelerator, that can be read like an array, once `read`.

    `length`: the Euclidean length of its gradient. If there are statistics, they are the last piece.
    """

    def __init__(self, tensors: Sequence[Any], length: float, reader: ThreadPoolExecutor) -> None:
        self.tensors, self.length = tensors, length
        self._reader = reader
        self._bounds = [0, *accumulate(int(tensor.shape[0]) for tensor in tensors)]
        self._pieces: list[Future[npt.NDArray[Any]]] = []
        self.size = self._bounds[-1]
        self.shape = (self.size,)
        self.dtype: np.dtype[Any] = np.dtype(tensors[0].dtype.as_numpy_dtype)

    def read(self) -> None:
        """Start to read it. Call it from one thread, before others need the values."""
        if not self._pieces:
            self._pieces = [self._reader.submit(_read, tensor) for tensor in self.tensors]

    def parts(self, low: int, high: int) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
        """The values [low, high) as they come: (their positions, a view of them)."""
        self.read()
        for (first, last), piece in zip(pairwise(self._bounds), self._pieces, strict=True):
            start, stop = max(low, first), min(high, last)
            if start < stop:
                yield slice(start, stop), piece.result()[start - first : stop - first]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """All values, in new memory."""
        del copy
        return np.concatenate([values for _, values in self.parts(0, self.size)]).astype(dtype or self.dtype)


def cut(size: int, trainable: int) -> list[int]:
    """The sizes of the pieces of an update."""
    bounds = [*range(0, trainable, READ_VALUES), trainable, *([size] if size > trainable else [])]
    return [high - low for low, high in pairwise(bounds)]


def encoded(values: Any, dtype: npt.DTypeLike) -> Any:
    """Of fp32 or bf16 values, a tensor in the wire's format."""
    if dtype == np.float32:
        return tf.cast(values, tf.float32)
    return tf.bitcast(tf.cast(values, tf.bfloat16), tf.uint16)


def decoded(wire: Any) -> Any:
    """The inverse of `encoded`, in fp32."""
    return tf.cast(tf.bitcast(wire, tf.bfloat16), tf.float32) if wire.dtype == tf.uint16 else wire


def squares(pieces: Sequence[Any]) -> Any:
    """The sum of the squares of values in the wire's format."""
    return tf.add_n([tf.reduce_sum(tf.square(decoded(piece))) for piece in pieces])


class DeviceMean:
    """The mean of updates, in fp32 on `device`; `trained` of their pieces are gradients."""

    def __init__(self, device: str | None, trained: int, reader: ThreadPoolExecutor) -> None:
        self._device, self._trained, self._reader = device, trained, reader
        self._total: Any = None
        self._dtype: npt.DTypeLike = np.float32

    def add(self, update: OnDevice, samples: int) -> None:
        """Add an update of so many samples."""
        self._dtype = update.dtype
        with tf.device(self._device):
            self._total = _added(self._total, update.tensors, tf.constant(samples, tf.float32))

    def result(self, samples: int) -> OnDevice:
        """The mean over so many samples; the next one begins."""
        with tf.device(self._device):
            tensors, sum_of_squares = _averaged(
                self._total, tf.constant(samples, tf.float32), self._trained, tf.as_dtype(self._dtype)
            )
        self.clear()
        return OnDevice(tensors, math.sqrt(float(sum_of_squares)), self._reader)

    def clear(self) -> None:
        """Drop what was added."""
        self._total = None


class DeviceInclusion:
    """`Inclusion` on `device`, with `differences`; `xla`: as one XLA cluster."""

    def __init__(self, device: str | None, differences: Sequence[tuple[int, int]], *, xla: bool) -> None:
        self._device = device
        included = partial(_included, differences)
        self._apply: Callable[..., Any] = tf.function(included, autograph=False, jit_compile=xla or None)
        self._second: Any = None

    def __call__(self, current: Any, update: OnDevice, lead: Lead) -> Any:
        """The parameters with the update, a tensor in the format of `current`."""
        with tf.device(self._device):
            tensor, self._second = self._apply(
                current,
                update.tensors,
                self._second,
                lead.kind,
                list(map(tf.constant, lead.scalars)),
                lead.trainable,
            )
        return tensor


def _read(tensor: Any) -> npt.NDArray[Any]:
    with tf.device("/CPU:0"):
        return np.asarray(memoryview(tf.identity(tensor)))


@tf.function(autograph=False)  # type: ignore[untyped-decorator]
def _added(total: Any, pieces: Sequence[Any], weight: Any) -> Any:
    added = [decoded(piece) * weight for piece in pieces]
    return added if total is None else [old + new for old, new in zip(total, added, strict=True)]


@tf.function(autograph=False)  # type: ignore[untyped-decorator]
def _averaged(total: Sequence[Any], samples: Any, trained: int, dtype: Any) -> Any:
    pieces = [encoded(piece / samples, dtype.as_numpy_dtype) for piece in total]
    return pieces, squares(pieces[:trained])


def _included(
    differences: Sequence[tuple[int, int]],
    current: Any,
    pieces: Sequence[Any],
    second: Any,
    kind: str,
    scalars: Sequence[Any],
    trainable: int,
) -> Any:
    scale, of_differences, *rest = scalars
    values, update = decoded(current), tf.concat([decoded(piece) for piece in pieces], 0)
    w, g = values[:trainable], update[:trainable]
    if kind == "plain":
        w += scale * g
    else:
        second = tf.zeros_like(g) if second is None else second
        if kind == "adam":
            one_less, bias, epsilon = rest
            second += (g * g - second) * one_less
            w -= scale * g / (tf.sqrt(second / bias) + epsilon)
        else:
            rho, one_less, epsilon = rest
            second = rho * second + one_less * (g * g)
            w -= scale * g / tf.sqrt(second + epsilon)
    after, end = [w], trainable
    for low, high in differences:
        after += [values[end:low], values[low:high] + of_differences * update[low:high]]
        end = high
    return encoded(tf.concat([*after, values[end:]], 0), current.dtype.as_numpy_dtype), second
