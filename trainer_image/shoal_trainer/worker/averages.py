"""The moving averages of BatchNormalization in a model: what a step shows of them, and how far the servers move them.

A call of the layer moves an average to momentum old + (1 - momentum) seen. A layer that a step calls c times (on two
views, on real and generated samples) moves it by 1 - momentum^c of the way to a mean of what its calls saw. So the
calls are counted where a step is traced: both the update and the servers (`ps/statistics`) use momentum^c. One that no
call moves (`training=False`) is no average: its difference is 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from shoal_trainer.wire.messages import Average
from shoal_trainer.worker.keras_internals import layers_of
from shoal_trainer.worker.layout import Layout, variables_of


class MovingAverages:
    """Those among the entries of a model's layout."""

    def __init__(self, model: Any, layout: Layout) -> None:
        trainable, statistics = variables_of(model)
        moved = {
            id(variable): float(layer.momentum)
            for layer in layers_of(model)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.momentum < 1
            for variable in (layer.moving_mean, layer.moving_variance)
        }
        self._layout = layout
        self._variables = {
            len(trainable) + index: variable
            for index, variable in enumerate(statistics)
            if id(variable) in moved
        }
        self._momenta = {index: moved[id(variable)] for index, variable in self._variables.items()}
        self._calls = dict.fromkeys(self._variables, 1)
        """Of the step that was traced last."""
        self._traced = False
        self._moved = dict(self._calls)
        """The calls of the first step that was traced, of those that it moves."""

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the calls in this block, where a step is traced."""
        calls = dict.fromkeys(self._variables, 0)

        def counting(index: int, assign: Any) -> Any:
            def assigned(value: Any) -> Any:
                calls[index] += 1
                return assign(value)

            return assigned

        for index, variable in self._variables.items():
            variable.assign = counting(index, variable.assign)
        try:
            yield
        finally:
            for variable in self._variables.values():
                del variable.assign
        self._calls = calls
        if not self._traced:
            self._traced, self._moved = True, {index: count for index, count in calls.items() if count}

    @property
    def ranges(self) -> tuple[Average, ...]:
        """In the flat vector, as the servers know them: a range for each, and one for neighbours that move alike."""
        found: list[Average] = []
        for index, calls in self._moved.items():
            entry, momentum = self._layout.entries[index], self._momenta[index] ** calls
            low, high = entry.offset, entry.offset + entry.size
            if found and (found[-1].high, found[-1].momentum) == (low, momentum):
                low = found.pop().low
            found.append(Average(low, high, momentum))
        return tuple(found)

    def observed(self, before: list[Any], pieces: list[Any]) -> list[Any]:
        """What the calls of the step saw, for each average, in place of its difference (new - old) from `before`."""
        result = list(pieces)
        for index in self._moved:
            calls = self._calls[index]
            share = 1 - self._momenta[index] ** calls if calls else 1.0  # none: the difference is 0
            result[index] = before[index] + pieces[index] / share
        return result
