"""The flat vector where a step computes: on the host (`on_host`) or on accelerators (`on_device`).

A step takes it apart into the values of variables, and makes an update. Steps of one push are added up, and what the
next step computes on is made of parameters and the update in flight, all of it where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shoal_trainer.worker.layout import Layout


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


class Vector(Protocol):
    """Parameters and updates of one layout, in the formats of one place."""

    @property
    def dtype(self) -> npt.DTypeLike:
        """Of the coded parameters that a step takes (`ps/coding`)."""

    def decode(self, flat: Any) -> list[Any]:
        """In a traced step: the values of the variables."""

    def encode(self, pieces: list[Any], numbers: Any) -> tuple[list[Any], Any]:
        """In a traced step: the pieces of an update, of one vector for each variable, and `numbers` with its own."""

    def returned(self, pieces: list[Any], numbers: Any) -> tuple[list[Any], Any]:
        """In a traced step, behind all that XLA compiles: its results, where they are to be."""

    def update(self, pieces: list[Any], numbers: npt.NDArray[Any]) -> tuple[Any, bool, npt.NDArray[Any]]:
        """The update of a step's results, whether it is finite, and the numbers that `encode` was given."""

    def alias(self, buffer: npt.NDArray[Any]) -> Any:
        """A tensor that shares the memory of a 64-byte aligned buffer."""

    def upload(self, parameters: Any) -> Any:
        """A copy of the parameters, a tensor on the host, on the first accelerator; itself if they are there."""

    def upload_when(self, answer: Future[Any], parameters: Any) -> Future[Any] | None:
        """What `upload` gives once the answer is there, made while a step runs; None without an accelerator.

        The future has None if the answer is an error.
        """

    def on_devices(self, parameters: Any) -> list[Any]:
        """The parameters on each device: steps of one push share them."""

    def read(self, parameters: Any) -> npt.NDArray[Any]:
        """The coded parameters on which a step computes, on the host."""

    def as_update(self, coded: npt.NDArray[Any]) -> Any:
        """An update as a step would have made it."""

    def reuse(self, update: Any) -> None:
        """Let a later step overwrite this update, which saves the allocation of new pages."""

    def mean(self, clip: Callable[[Any], Any] | None) -> Mean:
        """The mean of updates. `clip`: of the gradient, an fp32 tensor."""

    def inclusion(self, differences: Sequence[tuple[int, int]], *, xla: bool) -> Inclusion:
        """Adds updates to parameters. `differences`: the ranges of statistics of which an update has differences."""


def alias(buffer: npt.NDArray[Any]) -> Any:
    """A tensor that shares the memory of a 64-byte aligned buffer."""
    if buffer.ctypes.data % 64:
        raise ValueError("the buffer is not 64-byte aligned")  # TensorFlow would abort the process
    return tf.experimental.dlpack.from_dlpack(buffer.__dlpack__())


def taken_apart(layout: Layout, values: Callable[[int, int], Any]) -> list[Any]:
    """The values of the variables, in a traced step. `values`: those of a flat vector from one index to another."""
    pieces = []
    for run in layout.runs:  # a slice shares memory, but costs an operation; a split copies
        entries = layout.entries[run]
        low, high = entries[0].offset, entries[-1].offset + entries[-1].size
        pieces += tf.split(values(low, high), [entry.size for entry in entries])
    found = zip(layout.entries, pieces, strict=True)
    return [tf.cast(tf.reshape(piece, entry.shape), entry.dtype) for entry, piece in found]
