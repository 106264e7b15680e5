"""The layout of a model's variables in the flat vector that workers and parameter servers exchange.

    [ trainable variables, in Keras' order | statistics ]

Statistics are the float state that layers update in training (BatchNormalization's moving mean and variance). They
travel in the same vector, but no optimizer changes them (`ps/statistics`). So one round trip exchanges all state, each
snapshot contains it, and the batches of all workers update it as in one process.

The state of seeds and metrics stays on the worker, and so do frozen weights that a step assigns (a teacher that follows
its student) and the scales of float8: a difference is computed one push late, so the sum of differences of copies would
oscillate.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal_trainer.errors import UserError
from shoal_trainer.worker.keras_internals import layer_variables, layers_of

SMALL = 16_384
"""Variables of at most this many values are copied together with their neighbours where each piece has a cost."""
RUN = 16 * SMALL
"""The most values of such a copy, so that they stay in the cache."""
FLOATS = frozenset({"float32", "float16", "bfloat16", "float64"})


@dataclass(frozen=True)
class Entry:
    """One variable: `size` floats from `offset`, of this shape and dtype in the model."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    size: int


@dataclass(frozen=True)
class Layout:
    """The entries of the flat vector: `trainable` floats for the optimizer, then the statistics; `size` in total."""

    entries: tuple[Entry, ...]
    trainable: int

    @property
    def size(self) -> int:
        """Floats in the flat vector."""
        return sum(entry.size for entry in self.entries)

    @property
    def tensors(self) -> int:
        """Trainable variables."""
        return sum(entry.offset < self.trainable for entry in self.entries)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of (path, shape, dtype) of every entry: models with equal fingerprints can share parameters.

        The numbers that Keras appends to names count all layers of a process, so they are counted per model here:
        a model has the same fingerprint in a worker and in a notebook that has built others before.
        """
        paths = numbered(entry.path for entry in self.entries)
        entries = [[path, list(e.shape), e.dtype] for path, e in zip(paths, self.entries, strict=True)]
        described = [*entries, self.trainable]
        return hashlib.sha256(json.dumps(described, separators=(",", ":")).encode()).hexdigest()

    @cached_property
    def runs(self) -> tuple[slice, ...]:
        """All `entries` as runs of neighbours: small ones together, each large one alone; statistics in their own."""
        starts, total = [0], 0.0
        for index, entry in enumerate(self.entries):
            large, other = entry.size > SMALL, entry.offset == self.trainable
            if index > starts[-1] and (large or other or total + entry.size > RUN):
                starts.append(index)
                total = 0.0
            total = math.inf if large else total + entry.size
        return tuple(slice(a, b) for a, b in pairwise([*starts, len(self.entries)]))

    def pieces(self, flat: Any) -> Iterator[Any]:
        """The slices of a flat vector, one per entry."""
        for entry in self.entries:
            yield flat[entry.offset : entry.offset + entry.size]


def variables_of(model: Any) -> tuple[list[Any], list[Any]]:
    """The trainable variables of a built Keras model that gradients move, and its statistics.

    Statistics are the non-trainable float variables of trainable layers; frozen weights are not statistics. The scales
    of float8 are neither: a step overwrites them by what it has seen.
    """
    seen = {id(v) for v in model.trainable_variables}
    trainable = [v for v in model.trainable_variables if not getattr(v, "overwrite_with_gradient", False)]
    statistics = []
    for layer in layers_of(model):
        for variable in layer_variables(layer)[1] if layer.trainable else ():
            if id(variable) not in seen and str(variable.dtype) in FLOATS:
                seen.add(id(variable))
                statistics.append(variable)
    return trainable, statistics


def outside_layout(model: Any) -> list[Any]:
    """The variables of the model's layers that are not in its layout; seeds and metrics are not among them."""
    trainable, statistics = variables_of(model)
    inside = {id(v) for v in trainable + statistics}
    own = [v for layer in layers_of(model) for part in layer_variables(layer) for v in part]
    return list({id(v): v for v in own if id(v) not in inside}.values())


def precision_of(model: Any) -> str:
    """The types that layers with variables compute with, by name, with `+` between them: "bfloat16+float32".

    It is no part of the layout: with mixed precision, variables are as they are without.
    """
    kinds = {str(layer.compute_dtype) for layer in layers_of(model) if any(layer_variables(layer))}
    return "+".join(sorted(kinds))[:256]


def numbered(paths: Iterable[str]) -> list[str]:
    """The paths with the numbers of their parts counted from the first of a name: "dense_7/bias" is "dense/bias"."""
    seen: dict[str, dict[str, int]] = {}

    def renamed(part: str) -> str:
        base = re.sub(r"_[0-9]+$", "", part)
        of_base = seen.setdefault(base, {})
        number = of_base.setdefault(part, len(of_base))
        return f"{base}_{number}" if number else base

    return ["/".join(map(renamed, path.split("/"))) for path in paths]


def layout_of(model: Any) -> Layout:
    """The layout of a built Keras model. Raises `UserError` if it has no trainable variable."""
    trainable, statistics = variables_of(model)
    if not trainable:
        raise UserError("The model has no trainable variable. Add a layer with weights, or unfreeze one.")
    entries: list[Entry] = []
    offset = 0
    for variable in trainable + statistics:
        shape = tuple(int(n) for n in variable.shape)
        size = int(np.prod(shape, dtype=np.int64))
        entries.append(Entry(variable.path, shape, str(variable.dtype), offset, size))
        offset += size
    return Layout(tuple(entries), sum(e.size for e in entries[: len(trainable)]))


def flatten(model: Any, layout: Layout) -> npt.NDArray[np.float32]:
    """The model's current values as one fp32 vector of `layout.size`."""
    flat = np.empty(layout.size, np.float32)
    trainable, statistics = variables_of(model)
    for variable, piece in zip(trainable + statistics, layout.pieces(flat), strict=True):
        piece[:] = np.asarray(variable.numpy(), np.float32).ravel()
    return flat


def unflatten(model: Any, layout: Layout, flat: npt.NDArray[np.float32]) -> None:
    """Set the model's variables from a flat fp32 vector."""
    trainable, statistics = variables_of(model)
    for variable, entry, piece in zip(
        trainable + statistics, layout.entries, layout.pieces(flat), strict=True
    ):
        variable.assign(piece.reshape(entry.shape))
