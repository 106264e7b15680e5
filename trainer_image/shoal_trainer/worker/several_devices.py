"""One step on several devices of a worker: each computes a share of the batch, and the first adds them up.

What users of `MirroredStrategy` expect: the batch is that of the worker; losses are means over a device's samples, and
count by them; BatchNormalization normalizes with its device's samples, and the moving statistics are the mean of what
the devices would make of them; layers draw other random numbers on each device.

The part of a device reads and assigns no variable, because another device's copy would have to wait for it: what it
needs besides the parameters is passed to it. Frozen weights are copied to each device once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import tensorflow as tf

from shoal_trainer.data.batch import Batch, map_leaves
from shoal_trainer.worker.findings import Findings
from shoal_trainer.worker.gradient_step import GradientStep
from shoal_trainer.worker.keras_internals import (
    global_seed_generator,
    layers_of,
    replace_global_seed_generator,
    seed_generators,
)
from shoal_trainer.worker.seeds import after
from shoal_trainer.worker.training_metrics import as_vector
from shoal_trainer.worker.weighing import counted_whole

GOLDEN = 0x9E3779B9
"""Between the seeds of two devices."""


class NotPure(Exception):
    """A model that uses variables which Keras does not know, so that only the device that has them can compute it."""


def shares(batch: Batch, devices: int) -> Iterator[tuple[Any, Any, Any, np.int32, np.float32, np.float32]]:
    """(x, y, weights, samples, whole, real) of each device: rows one after the other, which differ by at most one.

    Of the rows, the first `samples` are real, and weights are scaled as `Batch` says. `whole`: how many times as many
    rows the batch has; `real`: which share of them is real.
    """
    real = np.float32(batch.samples / batch.size)
    bounds = [batch.size * device // devices for device in range(devices + 1)]
    for low, high in pairwise(bounds):
        samples = min(max(batch.samples - low, 0), high - low)
        whole = np.float32(batch.size / (high - low))
        scale = np.float32(batch.samples / max(1, samples) / whole)

        def part(structure: Any, low: int = low, high: int = high) -> Any:
            return map_leaves(lambda leaf: leaf[low:high], structure)

        weights = part(batch.weights)
        if scale != 1:
            weights = map_leaves(lambda leaf, scale=scale: leaf * scale, weights)
        yield part(batch.x), part(batch.y), weights, np.int32(samples), whole, real


class SeveralDevices:
    """(parameters of each device, shares) -> (the mean update in pieces, numbers), to be traced.

    `decode` and `encode`: see `FlatModel`. `structure`: that of a share. `copies`: of frozen weights, by device and
    variable, which the functions for all shapes share.
    """

    def __init__(
        self,
        step: GradientStep,
        devices: Sequence[str],
        structure: Any,
        decode: Callable[[Any], list[Any]],
        encode: Callable[[list[Any], list[Any], Any, Any], Any],
        found: Findings,
        copies: dict[tuple[str, int], Any],
        *,
        xla: bool,
    ) -> None:
        self._step, self._devices, self._structure = step, devices, structure
        self._decode, self._encode, self._found = decode, encode, found
        self._copies = copies
        self._shapes: list[tuple[Any, Any]] = []
        self._changed: list[int] = []
        """Which variables outside of the layout the step assigns."""
        self._parts = [
            tf.function(self._part_on(index, device), autograph=False, jit_compile=xla or None)
            for index, device in enumerate(devices)
        ]
        self._merge = tf.function(self._merged, autograph=False, jit_compile=xla or None)
        generators = [g for layer in layers_of(step.model) for g in seed_generators(layer)]
        self._seeds = {id(generator.state) for generator in generators}

    def __call__(self, *tensors: Any) -> Any:
        """Trace the step of all devices."""
        count = len(self._devices)
        flats, rest = tensors[:count], tensors[count:]
        size = len(rest) // count
        parts = []
        with tf.device(self._devices[0]):
            shared = self._step.shared()
            outside = [v.value.read_value() for v in self._step.outside]
            drawn = global_seed_generator().state.value.read_value()
        for index, device in enumerate(self._devices):
            with tf.device(device):
                arguments = rest[index * size : (index + 1) * size]
                given = self._outside_of(index, outside)
                parts.append(self._parts[index](flats[index], shared, given, drawn, arguments))
        updates, numbers, changed, seeds = zip(*parts, strict=True)
        new = dict(zip(self._changed, changed[0], strict=True))
        with tf.device(self._devices[0]):
            self._step.assign([new.get(index) for index in range(len(outside))])
            global_seed_generator().state.assign(seeds[0])
            return self._merge(flats[0], updates, numbers, rest[size - 3 :: size])

    def _outside_of(self, index: int, values: list[Any]) -> list[Any]:
        """The values of the variables outside of the layout for one device."""
        if index == 0:
            return values
        given = list(values)
        for position, variable in enumerate(self._step.outside):
            if position not in self._changed:
                key = self._devices[index], id(variable)
                if key not in self._copies:
                    with tf.init_scope(), tf.device(self._devices[index]):
                        self._copies[key] = tf.identity(variable.value)
                given[position] = self._copies[key]
        return given

    def _part_on(self, index: int, device: str) -> Callable[..., Any]:
        def part(flat: Any, shared: Any, outside: list[Any], seed: Any, arguments: Any) -> Any:
            given = iter(arguments)
            *data, whole, real = map_leaves(lambda _: next(given), self._structure)
            outside = [
                _varied(value, index) if id(v) in self._seeds else value
                for v, value in zip(self._step.outside, outside, strict=True)
            ]
            generator = global_seed_generator()
            stand_in = _Drawing(generator, _varied(seed, index))
            replace_global_seed_generator(stand_in)
            try:
                with tf.device(device), counted_whole(self._step.model, whole, real):
                    found = self._step.part(self._decode(flat), data, shared, outside)
                    loss = tf.reduce_mean(tf.cast(found.loss, tf.float32))
                    # Values of samples were multiplied, so that their gradients' mean is the sum.
                    if found.loss.shape.rank:
                        loss /= whole
                    pieces = [*found.gradients, *found.differences]
                    self._shapes = [(piece.shape, piece.dtype) for piece in pieces]
                    update = tf.concat([tf.reshape(tf.cast(p, tf.float32), [-1]) for p in pieces], 0)
                    self._found.metrics = tuple(found.sums)
                    numbers = as_vector(loss, found.sums)
            finally:
                replace_global_seed_generator(generator)
            self._changed = [position for position, new in enumerate(found.outside) if new is not None]
            graph = tf.compat.v1.get_default_graph()
            if any(tensor.dtype == tf.resource for tensor, _ in graph.captures):
                raise NotPure
            return update, numbers, [found.outside[position] for position in self._changed], stand_in.state

        return part

    def _merged(self, flat: Any, updates: list[Any], numbers: list[Any], samples: list[Any]) -> Any:
        """The mean of the parts, by samples: a device without samples may have computed anything."""
        present = [tf.cast(each > 0, tf.float32) for each in samples]
        parts = [tf.cast(each / tf.add_n(samples), tf.float32) for each in samples]
        mean = tf.add_n([tf.math.multiply_no_nan(u, part) for u, part in zip(updates, parts, strict=True)])
        loss = tf.add_n(
            [tf.math.multiply_no_nan(n[:1], part) for n, part in zip(numbers, parts, strict=True)]
        )
        sums = tf.add_n(
            [tf.math.multiply_no_nan(n[1:], has) for n, has in zip(numbers, present, strict=True)]
        )
        pieces = [
            tf.cast(tf.reshape(piece, shape), dtype)
            for piece, (shape, dtype) in zip(
                tf.split(mean, [shape.num_elements() for shape, _ in self._shapes]), self._shapes, strict=True
            )
        ]
        trained = self._step.trained
        values = self._decode(flat)
        update, overflowed = self._step.finish(values, pieces[:trained], pieces[trained:])
        return self._encode(values, update, tf.concat([loss, sums], 0), overflowed)


class _Drawing:
    """Draws for `keras.random` in the part of one device, without a variable."""

    def __init__(self, generator: Any, state: Any) -> None:
        self._generator, self.state = generator, state

    def next(self, ordered: bool = True) -> Any:
        drawn = self.state
        self.state = after(drawn, ordered=ordered)
        return drawn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


def _varied(seed: Any, index: int) -> Any:
    """The state of a seed generator for a device; the first one keeps the state."""
    if index == 0:
        return seed
    return tf.bitwise.bitwise_xor(seed, tf.constant([index * GOLDEN % 2**31, 0], seed.dtype))
