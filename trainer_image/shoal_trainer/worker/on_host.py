"""The flat vector on the host: parameters in fp32, and updates that are arrays in the wire's format.

TensorFlow's casts and concatenation would take several passes over memory. So a step takes parameters in fp32 without a
copy (dlpack), and a kernel encodes gradients in one pass into the update. Only small ones are concatenated first: a
deep model has hundreds, and each output of the function has a cost of its own in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shoal_trainer.ps import kernels, lookahead
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.coding import coded, decode, encode, values
from shoal_trainer.ps.pieces import parts
from shoal_trainer.worker.layout import Layout
from shoal_trainer.worker.vector import Lead, alias, taken_apart


class HostMean:
    """`Mean` in fp32, of coded updates of so many values. `reuse` gets each update that was added.

    `clip`: of the gradient, an fp32 tensor.
    """

    def __init__(
        self,
        size: int,
        trainable: int,
        reuse: Callable[[npt.NDArray[Any]], None] = lambda _: None,
        clip: Callable[[Any], Any] | None = None,
    ) -> None:
        self._size, self._trainable, self._reuse, self._clip = size, trainable, reuse, clip
        self._total = aligned(0)
        self._dtype: npt.DTypeLike = np.float32
        self._empty = True

    @property
    def clips(self) -> bool:
        """See `Mean`."""
        return self._clip is not None

    def add(self, update: npt.NDArray[Any], samples: int) -> None:
        """Add an update of so many samples."""
        if self._empty:
            if not self._total.size:
                self._total = aligned(self._size)
            self._dtype, self._empty = update.dtype, False
            decode(update, self._total, self._trainable)
            self._total *= np.float32(samples)
        else:
            for part, piece in parts(values(update, self._trainable)):
                lookahead.include(self._total[part], piece, self._total[part], np.float32(samples))
        self._reuse(update)

    def result(self, samples: int) -> npt.NDArray[Any]:
        """The mean over so many samples; the next one begins."""
        self._total *= np.float32(1 / samples)
        if self._clip is not None:
            self._total[: self._trainable] = self._clip(self._total[: self._trainable])
        self.clear()
        out = coded(self._size, self._trainable, self._dtype)
        encode(self._total, out, self._trainable)
        return out

    def clear(self) -> None:
        """Drop what was added."""
        self._empty = True


class HostInclusion:
    """`Inclusion` of `size` parameters in fp32, with kernels. `alias` makes a tensor of an array.

    `differences`: the ranges of the statistics of which an update has differences.
    """

    def __init__(
        self,
        size: int,
        alias: Callable[[npt.NDArray[Any]], Any],
        differences: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._size, self._alias = size, alias
        self._differences = differences
        self._second: npt.NDArray[np.float32] | None = None
        self._sum: npt.NDArray[np.float32] | None = None
        """fp32; made with the first gradient in flight: a worker that waits for its answers needs none."""
        self._tensor: Any = None

    def __call__(self, current: Any, update: npt.NDArray[Any], lead: Lead) -> Any:
        """The parameters with the update; in memory that the next call overwrites."""
        current = np.asarray(memoryview(current))
        if self._sum is None:
            self._sum = aligned(self._size)
            self._tensor = self._alias(self._sum)
        out, start, n = self._sum, current, lead.trainable
        scale, of_differences, *rest = lead.scalars
        w, g, to = start[:n], update[:n], out[:n]
        if lead.kind == "plain":
            lookahead.include(w, g, to, scale)
        else:
            if self._second is None:
                self._second = aligned(n)
            apply = lookahead.include_adam if lead.kind == "adam" else lookahead.include_rmsprop
            apply(w, self._second, g, to, scale, *rest)
        out[n:] = start[n:]
        for low, high in self._differences:
            for part, piece in parts(values(update, n), low, high):
                lookahead.include(start[part], piece, out[part], of_differences)
        return self._tensor


class HostVector:
    """`Vector` of this layout, whose updates are of the dtype `wire`."""

    dtype: npt.DTypeLike = np.float32
    alias = staticmethod(alias)

    def __init__(self, layout: Layout, wire: npt.DTypeLike) -> None:
        self._layout, self._wire = layout, wire
        self._spare: list[npt.NDArray[Any]] = []

    def decode(self, flat: Any) -> list[Any]:
        """See `Vector`."""
        return taken_apart(self._layout, lambda low, high: flat[low:high])

    def encode(self, pieces: list[Any], numbers: Any) -> tuple[list[Any], Any]:
        """See `Vector`; one piece for each run of the layout."""
        flat = [tf.cast(piece, tf.float32) for piece in pieces]
        return [tf.concat(flat[run], 0) for run in self._layout.runs], numbers

    def returned(self, pieces: list[Any], numbers: Any) -> tuple[list[Any], Any]:
        """See `Vector`: where they are."""
        return pieces, numbers

    def update(self, pieces: list[Any], numbers: npt.NDArray[Any]) -> tuple[Any, bool, npt.NDArray[Any]]:
        """See `Vector`."""
        size, trainable = self._layout.size, self._layout.trainable
        update = self._spare.pop() if self._spare else coded(size, trainable, self._wire)
        target, finite, low = values(update, trainable), True, 0
        for piece in pieces:
            array = np.asarray(memoryview(piece))
            for part, into in parts(target, low, low + array.size):
                finite &= kernels.encode(array[part.start - low : part.stop - low], into)
            low += array.size
        return update, finite, numbers

    def upload(self, parameters: Any) -> Any:
        """See `Vector`."""
        return parameters

    def upload_when(self, answer: Future[Any], parameters: Any) -> None:
        """See `Vector`."""

    def on_devices(self, parameters: Any) -> list[Any]:
        """See `Vector`."""
        return [parameters]

    def read(self, parameters: Any) -> npt.NDArray[Any]:
        """See `Vector`."""
        return np.asarray(memoryview(parameters))

    def as_update(self, coded: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """See `Vector`."""
        return coded

    def reuse(self, update: npt.NDArray[Any]) -> None:
        """See `Vector`."""
        if not self._spare:
            self._spare.append(update)

    def mean(self, clip: Callable[[Any], Any] | None) -> HostMean:
        """See `Vector`."""
        return HostMean(self._layout.size, self._layout.trainable, self.reuse, clip)

    def inclusion(self, differences: Sequence[tuple[int, int]], *, xla: bool) -> HostInclusion:
        """See `Vector`."""
        del xla
        return HostInclusion(self._layout.size, self.alias, differences)
