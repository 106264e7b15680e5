"""What becomes of an update on the host: an array in the wire's format. `on_device` does the same on an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shoal_trainer.ps import kernels
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.coding import coded, decode, encode, values
from shoal_trainer.ps.pieces import parts


class Lead(NamedTuple):
    """What an update does to the first `trainable` parameters g, and to differences of statistics after them.

    `kind`: "plain" adds `scale` g; "adam" and "rmsprop" do what the kernels `include_adam` and `include_rmsprop` say,
    with the second moments of the updates before. `scalars`: the scale, that of the differences, and the kernel's own.
    """

    kind: Literal["plain", "adam", "rmsprop"]
    trainable: int
    scalars: tuple[np.float32, ...]


class Inclusion(Protocol):
    """Applies leads, one after the other.

    Moving averages stay as they are: what a push says of them does not depend on the parameters (`ps/statistics`).
    """

    def __call__(self, current: Any, update: Any, lead: Lead) -> Any:
        """The parameters `current`, a tensor, with the update."""


class Mean(Protocol):
    """The mean of updates, weighted by their samples."""

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped in the mean."""

    def add(self, update: Any, samples: int) -> None:
        """Add an update of so many samples."""

    def result(self, samples: int) -> Any:
        """The mean over so many samples; the next one begins."""

    def clear(self) -> None:
        """Drop what was added."""


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
                kernels.include(self._total[part], piece, self._total[part], np.float32(samples))
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
            kernels.include(w, g, to, scale)
        else:
            if self._second is None:
                self._second = aligned(n)
            apply = kernels.include_adam if lead.kind == "adam" else kernels.include_rmsprop
            apply(w, self._second, g, to, scale, *rest)
        out[n:] = start[n:]
        for low, high in self._differences:
            for part, piece in parts(values(update, n), low, high):
                kernels.include(start[part], piece, out[part], of_differences)
        return self._tensor
