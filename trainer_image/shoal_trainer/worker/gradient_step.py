"""The step of a model whose optimizer runs on the parameter servers: Keras' forward pass without its variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from shoal_trainer.errors import UserError
from shoal_trainer.worker.averages import MovingAverages
from shoal_trainer.worker.findings import Findings
from shoal_trainer.worker.keras_internals import (
    clipped,
    compute_loss,
    custom_gradients,
    iterations_of,
    resource_of,
    takes_training,
)
from shoal_trainer.worker.layout import outside_layout, variables_of
from shoal_trainer.worker.lookups import lookups
from shoal_trainer.worker.optimizers import accumulated, takes_rows_apart, unwrap
from shoal_trainer.worker.training_metrics import Sums, TrainingMetrics
from shoal_trainer.worker.weighing import filled, overstated


@dataclass(frozen=True)
class Part:
    """What one device computed: `gradients` and `differences` of the statistics, the loss, and sums of the metrics.

    `outside`: the new values of the variables outside of the layout; None where the step does not assign them.
    """

    gradients: list[Any]
    differences: list[Any]
    loss: Any
    sums: Sums
    outside: list[Any]


class GradientStep:
    """(values, (x, y, weights, samples)) -> (update, loss, sums of the metrics, whether it overflowed).

    The update: gradients of the trainable part, and new - old of the statistics. Several devices each compute the
    `part` of their samples, which reads and assigns no variable; `finish` makes the update of the parts' mean.

    `updates`: a variable with the updates of the job before the step, if a step has read it (`Findings.counts`). It
    stands in for the optimizer's `iterations`, which stay as they are: an exported optimizer has no state to go with.
    """

    def __init__(
        self,
        model: Any,
        found: Findings,
        metrics: TrainingMetrics,
        averages: MovingAverages,
        updates: tf.Variable,
    ) -> None:
        self.model, self._found, self._metrics, self._averages = model, found, metrics, averages
        self._updates = updates
        self._optimizer = unwrap(model.optimizer)
        self._trainable, self._statistics = variables_of(model)
        self.trained = len(self._trainable)
        self._scaler = _Scaler(model.optimizer)
        inside = {id(v) for v in self._statistics}
        self.outside = [v for v in model.non_trainable_variables if id(v) not in inside]
        """Seeds, counters, frozen weights."""

    def __call__(self, values: list[Any], data: Any) -> Any:
        """The whole step on one device."""
        shared = self._scaler.scale(), self._updates  # which is not read where nothing needs it
        part = self.part(values, data, shared, [v.value for v in self.outside])
        self.assign(part.outside)
        update, overflowed = self.finish(values, part.gradients, part.differences)
        return update, part.loss, part.sums, overflowed

    def shared(self) -> tuple[Any, Any]:
        """What all parts of the next step share, scalar tensors: the loss's factor, and the updates before it."""
        return self._scaler.scale(), self._updates.read_value()

    def part(self, values: list[Any], data: Any, shared: tuple[Any, Any], outside: list[Any]) -> Part:
        """The gradients of a batch, or of a device's share of it, from the values of all variables."""
        model, found, (scale, updates) = self.model, self._found, shared
        x, y, weights, samples = data
        weights = filled(weights, samples)
        trained, before = values[: self.trained], values[self.trained :]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(trained)
            predicted, loss, changed, others = self._forward(values, outside, updates, x, y, weights)
            scaled = loss * tf.cast(scale, loss.dtype)
        gradients = tape.gradient(scaled, trained)
        found.without_gradient = _missing(self._trainable, gradients)
        if takes_rows_apart(model):
            pairs = zip(self._trainable, gradients, strict=True)
            found.rows = [v for v, gradient in pairs if isinstance(gradient, tf.IndexedSlices)]
        gradients = [
            tf.zeros_like(value) if g is None else tf.convert_to_tensor(g) / tf.cast(scale, g.dtype)
            for g, value in zip(gradients, trained, strict=True)
        ]
        seeds = {id(generator.state) for generator in found.generators}
        found.assigned = [v for v in outside_layout(model) if id(v) in changed]
        found.assigned += [v for v in others if id(v) not in seeds]
        differences = [
            tf.cast(changed[id(v)], old.dtype) - old if id(v) in changed else tf.zeros_like(old)
            for v, old in zip(self._statistics, before, strict=True)
        ]
        sums = self._metrics.sums(y, predicted, weights, samples, lambda variable: changed[id(variable)])
        loss -= tf.cast(overstated(model), loss.dtype)
        return Part(gradients, differences, loss, sums, [changed.get(id(v)) for v in self.outside])

    def _forward(
        self, values: list[Any], outside: list[Any], updates: Any, x: Any, y: Any, weights: Any
    ) -> tuple[Any, Any, dict[int, Any], list[Any]]:
        """The outputs, the loss, and new values of variables by id, as Keras computes them, but assigned to none.

        And what it did assign: variables that the model does not hold.
        """
        model = self.model
        pairs = [
            *((v, tf.zeros(v.shape, v.dtype)) for v in model.metrics_variables),
            *zip([*self._trainable, *self._statistics, *self.outside], [*values, *outside], strict=True),
        ]
        scope = _Scope(pairs, self._trainable, iterations_of(self._optimizer), updates, self._found)
        before = {id(v): scope.get_current_value(v) for v, _ in pairs}
        kwargs = {"training": True} if takes_training(model) else {}
        with (
            scope,
            self._averages.counted(),
            self._metrics.noted(),
            lookups(self._found, x),
            custom_gradients(scope.closed),
        ):
            predicted = model(x, **kwargs)
            loss = compute_loss(model, x, y, predicted, weights)
        after = {id(v): scope.get_current_value(v) for v, _ in pairs}
        changed = {key: new for key, new in after.items() if new is not before[key]}
        if assigned := [v.path for v in self._trainable if id(v) in changed]:
            self._found.whole = f"a layer assigns {', '.join(assigned)} in its call()"
        return predicted, loss, changed, list(scope.others.values())

    def assign(self, outside: list[Any]) -> None:
        """Keep what a part says of the variables outside of the layout."""
        for variable, new in zip(self.outside, outside, strict=True):
            if new is not None:
                variable.assign(new)

    def finish(
        self, _values: list[Any], gradients: list[Any], differences: list[Any]
    ) -> tuple[list[Any], Any]:
        """The update, and whether it overflowed and is zeros; clipped, unless the mean of several will be."""
        gradients, differences, overflowed = self._scaler.settle(gradients, differences)
        if accumulated(self.model) == 1:
            gradients = clipped(self._optimizer, gradients)
        return [*gradients, *differences], overflowed


class _Scope(keras.StatelessScope):  # type: ignore[misc]
    """Holds the new values of the variables that it was given. Others are assigned at once, as in Keras' own step.

    `iterations`, a variable of an optimizer, is read as `updates`.

    In the scope a variable is a tensor. Where TensorFlow must know that it is one, `found.whole` says so: the gradient
    of a custom one has the variables that its function uses, of which the `trained` ones matter, and what it assigns is
    assigned again where it is computed again; a loop or a branch may assign some, while its tensors are its own.
    """

    def __init__(
        self,
        pairs: list[tuple[Any, Any]],
        trained: list[Any],
        iterations: Any,
        updates: Any,
        found: Findings,
    ) -> None:
        super().__init__(pairs, collect_losses=True)
        self.others: dict[int, Any] = {}
        self._trained = {id(variable) for variable in trained}
        self._iterations, self._updates = iterations, updates
        self._found = found
        self._graph = tf.compat.v1.get_default_graph()
        self._closed = 0

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """In this block a function with a gradient of its own is traced."""
        self._closed += 1
        try:
            yield
        finally:
            self._closed -= 1

    def get_current_value(self, variable: Any) -> Any:
        if variable is self._iterations:
            self._found.counts = True
            return tf.cast(self._updates, variable.dtype)
        if self._closed and id(variable) in self._trained:
            self._found.whole = f"keras.remat or a tf.custom_gradient uses {variable.path}"
        return super().get_current_value(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        own = resource_of(variable)
        if id(variable) in self.state_mapping and self._closed:
            self._found.whole = f"keras.remat or a tf.custom_gradient assigns {variable.path}"
        elif getattr(value, "graph", self._graph) is not self._graph and id(variable) in self.state_mapping:
            self._found.whole = f"a layer assigns {variable.path} in a loop or a branch"
        if id(variable) in self.state_mapping or own is None:  # None: of a variable that the call creates
            super().add_update(update)
        else:
            own.assign(value)
            self.others[id(variable)] = variable


class _Scaler:
    """Loss scaling of `mixed_float16`: dynamic as in `LossScaleOptimizer`, fixed, or none.

    Each worker has its own scale, which depends on its overflows. A step that overflowed pushes zeros.
    """

    def __init__(self, optimizer: Any) -> None:
        self._dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self._fixed = None if self._dynamic else optimizer.loss_scale_factor
        if self._dynamic:
            self._scale = tf.Variable(float(optimizer.initial_scale), trainable=False)
            self._good = tf.Variable(0, dtype=tf.int64, trainable=False)  # a GPU has no int32 variables
            self._grow_after = int(optimizer.dynamic_growth_steps)

    def scale(self) -> Any:
        if self._dynamic:
            return tf.convert_to_tensor(self._scale)
        return tf.constant(float(self._fixed or 1.0))

    def settle(self, gradients: list[Any], differences: list[Any]) -> tuple[list[Any], list[Any], Any]:
        """After an overflow zeros, also for the statistics, which may have overflowed in the forward pass."""
        if not self._dynamic:
            return gradients, differences, tf.constant(False)
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
        grow = tf.logical_and(finite, self._good >= self._grow_after - 1)
        factor = tf.where(finite, tf.where(grow, 2.0, 1.0), 0.5)
        self._good.assign(tf.where(tf.logical_and(finite, tf.logical_not(grow)), self._good + 1, 0))
        self._scale.assign(self._scale * factor)

        def kept(values: list[Any]) -> list[Any]:
            return [tf.where(finite, value, tf.zeros_like(value)) for value in values]

        return kept(gradients), kept(differences), tf.logical_not(finite)


def _missing(variables: list[Any], gradients: list[Any]) -> tuple[int, ...]:
    """The positions of variables without a gradient. `UserError` if none has one, as in Keras."""
    missing = tuple(index for index, gradient in enumerate(gradients) if gradient is None)
    if len(missing) == len(variables):
        raise UserError(
            "The loss has no gradient for any variable, so nothing would be trained. Compute it from the model's "
            "outputs with differentiable operations (not argmax, rounding, comparisons or stop_gradient), and without "
            "a @tf.function inside the model."
        )
    return missing
