"""The flat vector on accelerators, each of which decodes, encodes and concatenates by itself.

Both ways it crosses the bus in the wire's format, half the bytes in bf16, once per push. An update stays on the
accelerator that made it. The updates of a push are added up there, and what the next step computes on is made of them
there, so that the step waits for no transfer. It is read in pieces: while one is sent, the next is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shoal_trainer.errors import HungStep
from shoal_trainer.ps.scalars import LARGEST
from shoal_trainer.worker.layout import Layout
from shoal_trainer.worker.vector import Lead, alias, taken_apart

READ_VALUES = 1 << 22
"""The values that are read at a time."""
READ_SECONDS = 600.0
"""An accelerator that does not give them in this time hangs."""


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
        """The values [low, high) as they come: (their positions, a view of them). `HungStep` if they do not."""
        self.read()
        for (first, last), piece in zip(pairwise(self._bounds), self._pieces, strict=True):
            start, stop = max(low, first), min(high, last)
            if start < stop:
                yield slice(start, stop), _given(piece)[start - first : stop - first]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """All values, in new memory."""
        del copy
        return np.concatenate([values for _, values in self.parts(0, self.size)]).astype(dtype or self.dtype)


def _given(piece: Future[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    try:
        return piece.result(READ_SECONDS)
    except FutureTimeout:
        raise HungStep(
            f"an update could not be read from the accelerator in {READ_SECONDS:.0f} s. The accelerator or its driver "
            "hangs: the log has the stack of each thread."
        ) from None


def cut(width: int, trainable: int) -> list[int]:
    """The sizes of the pieces of an update, coded in so many elements: those of gradients, then the statistics."""
    bounds = [*range(0, trainable, READ_VALUES), trainable, *([width] if width > trainable else [])]
    return [high - low for low, high in pairwise(bounds)]


def exact(wire: Any) -> Any:
    """The statistics that are coded after the trainable values (`ps/coding`), in fp32."""
    if wire.dtype == tf.float32:
        return wire
    return tf.bitcast(tf.reshape(wire[wire.shape[0] % 2 :], [-1, 2]), tf.float32)


def exactly(values: Any, trainable: int, dtype: npt.DTypeLike) -> Any:
    """The inverse of `exact`, behind so many trainable values."""
    if dtype == np.float32:
        return values
    pairs = tf.reshape(tf.bitcast(values, tf.uint16), [-1])
    return tf.concat([tf.zeros([trainable % 2], tf.uint16), pairs], 0)


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
    """The mean of updates, in fp32 on `device`, of which so many values are trainable. `clip`: as of `HostMean`."""

    def __init__(
        self,
        device: str | None,
        trainable: int,
        reader: ThreadPoolExecutor,
        clip: Callable[[Any], Any] | None = None,
    ) -> None:
        self._device, self._trainable, self._reader, self._clip = device, trainable, reader, clip
        self._total: Any = None
        self._dtype: npt.DTypeLike = np.float32

    @property
    def clips(self) -> bool:
        """See `Mean`."""
        return self._clip is not None

    def add(self, update: OnDevice, samples: int) -> None:
        """Add an update of so many samples."""
        self._dtype = update.dtype
        with tf.device(self._device):
            weight = tf.constant(samples, tf.float32)
            self._total = _added(self._total, update.tensors, weight, self._trainable)

    def result(self, samples: int) -> OnDevice:
        """The mean over so many samples; the next one begins."""
        with tf.device(self._device):
            weight, dtype = tf.constant(samples, tf.float32), tf.as_dtype(self._dtype)
            tensors, sum_of_squares = _averaged(self._total, weight, self._trainable, dtype, self._clip)
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


class DeviceVector:
    """`Vector` of this layout, in the format `wire`, on `devices` (none: TensorFlow chooses one)."""

    alias = staticmethod(alias)

    def __init__(self, layout: Layout, wire: npt.DTypeLike, devices: Sequence[str]) -> None:
        self._layout, self.dtype = layout, wire
        self._devices: Sequence[str | None] = devices or (None,)
        self._first = self._devices[0]
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="readback")

    def decode(self, flat: Any) -> list[Any]:
        """See `Vector`."""
        trainable = self._layout.trainable
        trained, statistics = flat, exact(flat[trainable:])
        if self.dtype == np.uint16:
            trained = tf.bitcast(flat[:trainable], tf.bfloat16)

        def values(low: int, high: int) -> Any:
            return trained[low:high] if low < trainable else statistics[low - trainable : high - trainable]

        return taken_apart(self._layout, values)

    def encode(self, pieces: list[Any], numbers: Any) -> tuple[list[Any], Any]:
        """See `Vector`: the pieces of `OnDevice`; its gradient's squared length, whether it is finite."""
        trainable, trained = self._layout.trainable, self._layout.tensors
        kind = tf.bfloat16 if self.dtype == np.uint16 else tf.float32
        gradients = tf.concat([tf.cast(piece, kind) for piece in pieces[:trained]], 0)
        update = [encoded(piece, self.dtype) for piece in tf.split(gradients, cut(trainable, trainable))]
        finite = tf.reduce_all(tf.math.is_finite(tf.cast(gradients, tf.float32)))
        of_update = [squares(update), tf.cast(finite, tf.float32)]
        if statistics := [tf.cast(piece, tf.float32) for piece in pieces[trained:]]:
            together = tf.concat(statistics, 0)
            of_update[-1] *= tf.cast(tf.reduce_all(tf.math.is_finite(together)), tf.float32)
            update.append(exactly(together, trainable, self.dtype))
        return update, tf.concat([numbers, tf.stack(of_update)], 0)

    def returned(self, pieces: list[Any], numbers: Any) -> tuple[list[Any], Any]:
        """See `Vector`: only the numbers cross the bus; the update is read while the next step runs."""
        with tf.device(self._first):
            pieces = [tf.identity(piece) for piece in pieces]
        with tf.device("/CPU:0"):
            return pieces, tf.identity(numbers)

    def update(self, pieces: list[Any], numbers: npt.NDArray[Any]) -> tuple[Any, bool, npt.NDArray[Any]]:
        """See `Vector`."""
        numbers, (square, finite) = numbers[:-2], numbers[-2:].tolist()
        return OnDevice(pieces, math.sqrt(square), self._reader), bool(finite), numbers

    def upload(self, parameters: Any) -> Any:
        """See `Vector`."""
        with tf.device(self._first):
            return tf.identity(parameters)

    def upload_when(self, answer: Future[Any], parameters: Any) -> Future[Any]:
        """See `Vector`."""
        copy: Future[Any] = Future()

        def arrived(answer: Future[Any]) -> None:
            try:
                failed = answer.cancelled() or answer.exception() is not None
                copy.set_result(None if failed else self.upload(parameters))
            except Exception as error:  # such as no memory
                copy.set_exception(error)

        answer.add_done_callback(arrived)
        return copy

    def on_devices(self, parameters: Any) -> list[Any]:
        """See `Vector`: copies of the first one's."""
        copies = [self.upload(parameters)]
        for device in self._devices[1:]:
            with tf.device(device):
                copies.append(tf.identity(copies[0]))
        return copies

    def read(self, parameters: Any) -> npt.NDArray[Any]:
        """See `Vector`."""
        return _read(parameters)

    def as_update(self, coded: npt.NDArray[Any]) -> OnDevice:
        """See `Vector`; of a length that does not count."""
        with tf.device(self._first):
            pieces = tf.split(tf.constant(coded), cut(coded.size, self._layout.trainable))
        return OnDevice(pieces, 0.0, self._reader)

    def reuse(self, update: OnDevice) -> None:
        """See `Vector`."""

    def mean(self, clip: Callable[[Any], Any] | None) -> DeviceMean:
        """See `Vector`."""
        return DeviceMean(self._first, self._layout.trainable, self._reader, clip)

    def inclusion(self, differences: Sequence[tuple[int, int]], *, xla: bool) -> DeviceInclusion:
        """See `Vector`."""
        return DeviceInclusion(self._first, differences, xla=xla)


def _read(tensor: Any) -> npt.NDArray[Any]:
    with tf.device("/CPU:0"):
        return np.asarray(memoryview(tf.identity(tensor)))


@tf.function(autograph=False)  # type: ignore[untyped-decorator]
def _added(total: Any, pieces: Sequence[Any], weight: Any, trainable: int) -> Any:
    gradients = len(cut(trainable, trainable))
    read = [*map(decoded, pieces[:gradients]), *map(exact, pieces[gradients:])]
    added = [piece * weight for piece in read]
    return added if total is None else [old + new for old, new in zip(total, added, strict=True)]


@tf.function(autograph=False)  # type: ignore[untyped-decorator]
def _averaged(
    total: Sequence[Any], samples: Any, trainable: int, dtype: Any, clip: Callable[[Any], Any] | None
) -> Any:
    sizes, kind = cut(trainable, trainable), dtype.as_numpy_dtype
    gradients = len(sizes)
    means = [piece / samples for piece in total]
    if clip is not None:
        means[:gradients] = tf.split(clip(tf.concat(means[:gradients], 0)), sizes)
    pieces = [encoded(piece, kind) for piece in means[:gradients]]
    return [*pieces, *(exactly(piece, trainable, kind) for piece in means[gradients:])], squares(pieces)


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
    gradients = len(cut(trainable, trainable))
    w, g = decoded(current[:trainable]), tf.concat(list(map(decoded, pieces[:gradients])), 0)
    if kind == "plain":
        w += scale * g
    else:
        second = tf.zeros_like(g) if second is None else second
        g = tf.where(
            tf.abs(g) <= LARGEST, g, 0.0
        )  # as on the servers: else it would stay in the second moments
        if kind == "adam":
            one_less, bias, epsilon = rest
            second += (g * g - second) * one_less
            w -= scale * g / (tf.sqrt(second / bias) + epsilon)
        else:
            rho, one_less, epsilon = rest
            second = rho * second + one_less * (g * g)
            w -= scale * g / tf.sqrt(second + epsilon)
    kind = current.dtype.as_numpy_dtype
    if len(pieces) == gradients:
        return encoded(w, kind), second
    old, made, after, end = exact(current[trainable:]), exact(pieces[-1]), [], 0
    for low, high in ((low - trainable, high - trainable) for low, high in differences):
        after += [old[end:low], old[low:high] + of_differences * made[low:high]]
        end = high
    statistics = exactly(tf.concat([*after, old[end:]], 0), trainable, kind)
    return tf.concat([encoded(w, kind), statistics], 0), second
