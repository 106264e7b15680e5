"""Random numbers in training: they differ between steps and between workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shoal_trainer.worker.keras_internals import (
    global_seed_generator,
    layers_of,
    replace_global_seed_generator,
    resource_of,
    seed_generators,
)


def vary_seeds(model: Any, worker: tuple[int, ...], seed: int = 0) -> None:
    """Give each worker (slot, incarnation) its own random numbers; the first keeps the seeds of the model.

    In a run that continues another one, each has a third number, of that one, and none keeps them. `seed`: that of the
    job, from which they follow.
    """
    if worker == (0, 0):
        return
    generators = [*_held(model), global_seed_generator()]
    *drawn, last = np.random.SeedSequence((seed, *worker)).generate_state(2 * len(generators) + 1)
    _set(generators, drawn)
    tf.random.set_seed(int(last))  # of layers that draw from TensorFlow


def vary_others(model: Any, found: Sequence[Any], worker: tuple[int, ...], seed: int = 0) -> None:
    """The same for those of the generators `found` that the model does not hold: global ones, those of a loss."""
    held = {id(generator) for generator in _held(model)}
    others = [generator for generator in found if id(generator) not in held]
    if worker != (0, 0):
        sequence = np.random.SeedSequence((seed, *worker), spawn_key=(1,))
        _set(others, sequence.generate_state(2 * len(others)))


def _held(model: Any) -> list[Any]:
    return [generator for layer in layers_of(model) for generator in seed_generators(layer)]


def _set(generators: Sequence[Any], numbers: Any) -> None:
    for generator, pair in zip(generators, np.reshape(numbers, (-1, 2)), strict=True):
        generator.state.assign(pair.astype(np.asarray(generator.state.numpy()).dtype))


def keep_drawing() -> None:
    """Replace the global generator, which `keras.random` uses if a layer passes none."""
    original = global_seed_generator()
    generator = _Drawing(0, name="seed_generator")  # a valid name in a SavedModel
    generator.state.assign(original.state)
    replace_global_seed_generator(generator)


class _Drawing(keras.random.SeedGenerator):  # type: ignore[misc]
    """Keras' global generator, which also advances in a stateless call; else each step draws the same numbers."""

    def next(self, ordered: bool = True) -> Any:
        state = resource_of(self.state)
        drawn = state.read_value()
        state.assign(after(drawn, ordered=ordered))
        return drawn


def after(drawn: Any, *, ordered: bool) -> Any:
    """The state of a seed generator after a draw, as in `keras.random.SeedGenerator.next`."""
    return drawn + tf.constant([0, 1], drawn.dtype) if ordered else (drawn + 1) * 5387 % 933199
