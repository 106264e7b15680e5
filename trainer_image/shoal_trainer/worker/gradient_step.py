"""The step of a model whose optimizer runs on the parameter servers: Keras' forward pass without its variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from shoal_trainer.errors import UserError
from shoal_trainer.worker.findings import Findings
from shoal_trainer.worker.keras_internals import clipped, current_value, losses_override, takes_training
from shoal_trainer.worker.layout import outside_layout, variables_of
from shoal_trainer.worker.optimizers import takes_rows_apart, unwrap
from shoal_trainer.worker.training_metrics import TrainingMetrics
from shoal_trainer.worker.weighing import filled


def gradient_step(model: Any, found: Findings, metrics: TrainingMetrics) -> Callable[..., Any]:
    """(values, (x, y, weights, samples)) -> (update, loss, sums of the metrics).

    The update: gradients of the trainable part, and new - old of the statistics.
    """
    optimizer = unwrap(model.optimizer)
    trainable, statistics = variables_of(model)
    scaler = _Scaler(model.optimizer)

    def compute(values: list[Any], x: Any, y: Any, weights: Any, samples: Any, scale: Any) -> Any:
        weights = filled(weights, samples)
        trained, before = values[: len(trainable)], values[len(trainable) :]
        statistics_before = {id(v): value for v, value in zip(statistics, before, strict=True)}
        others = model.non_trainable_variables
        others_before = [statistics_before.get(id(v), v.value) for v in others]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(trained)
            predicted, loss, after = _forward(model, trained, others_before, x, y, weights)
            scaled = loss * tf.cast(scale, loss.dtype)
        gradients = tape.gradient(scaled, trained)
        found.without_gradient = _missing(trainable, gradients)
        if takes_rows_apart(model):
            found.rows = [v for v, g in zip(trainable, gradients, strict=True) if _is_rows(g)]
        gradients = [
            tf.zeros_like(value) if g is None else tf.convert_to_tensor(g) / tf.cast(scale, g.dtype)
            for g, value in zip(gradients, trained, strict=True)
        ]
        others_after = dict(zip((id(v) for v in others), after, strict=True))
        assigned = {
            id(v): (v, new)
            for v, old, new in zip(others, others_before, after, strict=True)
            if id(v) not in statistics_before and new is not None and new is not old
        }
        for variable, new in assigned.values():
            variable.assign(new)
        found.assigned = [v for v in outside_layout(model) if id(v) in assigned]
        differences = [
            tf.zeros_like(old)
            if others_after.get(id(v)) is None
            else tf.cast(others_after[id(v)], old.dtype) - old
            for v, old in zip(statistics, before, strict=True)
        ]
        return gradients, differences, loss, metrics.sums(y, predicted, weights, samples)

    def step(values: list[Any], data: Any) -> Any:
        x, y, weights, samples = data
        gradients, differences, loss, sums = compute(values, x, y, weights, samples, scaler.scale())
        gradients, differences = scaler.settle(gradients, differences)
        return [*clipped(optimizer, gradients), *differences], loss, sums

    return step


class _Scaler:
    """Loss scaling of `mixed_float16`: dynamic as in `LossScaleOptimizer`, fixed, or none.

    Each worker has its own scale, which depends on its overflows. A step that overflowed pushes zeros.
    """

    def __init__(self, optimizer: Any) -> None:
        self._dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self._fixed = None if self._dynamic else optimizer.loss_scale_factor
        if self._dynamic:
            self._scale = tf.Variable(float(optimizer.initial_scale), trainable=False)
            self._good = tf.Variable(0, trainable=False)
            self._grow_after = int(optimizer.dynamic_growth_steps)

    def scale(self) -> Any:
        if self._dynamic:
            return tf.convert_to_tensor(self._scale)
        return tf.constant(float(self._fixed or 1.0))

    def settle(self, gradients: list[Any], differences: list[Any]) -> tuple[list[Any], list[Any]]:
        """After an overflow zeros, also for the statistics, which may have overflowed in the forward pass."""
        if not self._dynamic:
            return gradients, differences
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
        grow = tf.logical_and(finite, self._good >= self._grow_after - 1)
        factor = tf.where(finite, tf.where(grow, 2.0, 1.0), 0.5)
        self._good.assign(tf.where(tf.logical_and(finite, tf.logical_not(grow)), self._good + 1, 0))
        self._scale.assign(self._scale * factor)

        def kept(values: list[Any]) -> list[Any]:
            return [tf.where(finite, value, tf.zeros_like(value)) for value in values]

        return kept(gradients), kept(differences)


def _forward(
    model: Any, trainable: list[Any], non_trainable: list[Any], x: Any, y: Any, weights: Any
) -> tuple[Any, Any, Any]:
    """The outputs, the loss, and new values of the non-trainable variables, computed by Keras without its variables."""
    kwargs = {"training": True} if takes_training(model) else {}
    with _watched(model) as assigned:
        predicted, after, losses = model.stateless_call(
            trainable, non_trainable, x, return_losses=True, **kwargs
        )
    if assigned:
        raise UserError(
            f"A layer assigns the trainable variables {', '.join(assigned)} in its call(), which parameter servers "
            "cannot do. Let the optimizer run on the workers: give the model a train_step that returns "
            "super().train_step(data)."
        )
    if losses:  # from regularizers and add_loss in this call; compute_loss must use these
        losses_override(model, losses)
    try:
        loss, (_, new, _) = model.stateless_compute_loss(
            trainable, after, [v.value for v in model.metrics_variables], x=x, y=y, y_pred=predicted,
            sample_weight=weights, training=True,
        )  # fmt: skip
    finally:
        losses_override(model, [])
    return predicted, loss, new


@contextlib.contextmanager
def _watched(model: Any) -> Iterator[list[str]]:
    """Collect the paths of trainable variables that `call` assigns: `stateless_call` discards their values."""
    call, own = model.call, vars(model).get("call")
    assigned: list[str] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        variables = model.trainable_variables
        before = [current_value(v) for v in variables]
        outputs = call(*args, **kwargs)
        after = [current_value(v) for v in variables]
        assigned.extend(
            v.path for v, old, new in zip(variables, before, after, strict=True) if new is not old
        )
        return outputs

    model.call = watched
    try:
        yield assigned
    finally:
        del model.call
        if own is not None:
            model.call = own


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


def _is_rows(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)
