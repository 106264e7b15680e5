"""The step of a model whose optimizer runs on the worker: Keras' own `train_step`, or what devices have computed apart.

Keras applies a non-finite gradient to the optimizer's state. Such a step is not pushed, so all other variables that it
assigned get their old values back; otherwise each later step would be non-finite too.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from shoal_trainer.data.batch import split
from shoal_trainer.errors import UserError
from shoal_trainer.worker.averages import MovingAverages
from shoal_trainer.worker.findings import Findings
from shoal_trainer.worker.gradient_step import GradientStep
from shoal_trainer.worker.keras_internals import assigned_handles, flat_logs, loss_tracker
from shoal_trainer.worker.layout import outside_layout, variables_of
from shoal_trainer.worker.lookups import lookups
from shoal_trainer.worker.optimizers import has_own_step
from shoal_trainer.worker.training_metrics import Sums, TrainingMetrics, no_means, sums_of_logs
from shoal_trainer.worker.weighing import filled, overstated


class AppliedStep(GradientStep):
    """The same for several devices, whose gradients' mean the optimizer applies on the first of them.

    For models whose parts can be computed apart (`optimizers.why_whole`), without loss scaling.
    """

    def finish(
        self, values: list[Any], gradients: list[Any], differences: list[Any]
    ) -> tuple[list[Any], Any]:
        """The update: new - old of the trainable part, and what is known of the statistics. It does not overflow."""
        variables, _ = variables_of(self.model)
        finite = tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(each)) for each in [*gradients, *differences]]
        )
        old = values[: self.trained]
        for variable, value in zip(variables, old, strict=True):
            variable.assign(value)

        missing = (
            self._found.without_gradient
        )  # which Keras' optimizer leaves as they are: no decay, no momentum
        known = [None if index in missing else each for index, each in enumerate(gradients)]

        def apply() -> Any:
            self.model.optimizer.apply(known, variables)
            return [tf.convert_to_tensor(variable.value) for variable in variables]

        new = tf.cond(finite, apply, lambda: gradients)
        moved = [after - before for after, before in zip(new, old, strict=True)]
        return moved + differences, tf.constant(False)


def optimizer_step(
    model: Any, found: Findings, metrics: TrainingMetrics, averages: MovingAverages, *, xla: bool
) -> Callable[..., Any]:
    """(values, data) -> (new - old of everything, loss, sums of the metrics, False: see `GradientStep`)."""
    own_step = has_own_step(model)
    trainable, statistics = variables_of(model)
    exchanged = trainable + statistics

    def train(values: list[Any], data: Any) -> Any:
        for variable, value in zip(exchanged, values, strict=True):
            variable.assign(value)
        model.reset_metrics()  # so that the logged values are those of this step, not means
        loss_tracker(model).reset_state()  # a model that overrides `metrics` may leave it out
        with averages.counted(), metrics.noted(), lookups(found, split(data)[0] if own_step else data[0]):
            if own_step:
                with no_means(model) as results:
                    logs = model.train_step(data)
                samples = tf.shape(tf.nest.flatten(data)[0])[0]
                loss = _loss_of(logs)
                sums, found.no_means = sums_of_logs(logs, samples, results)
            else:
                loss, sums = _step(model, metrics, *data)
        after = [tf.convert_to_tensor(v.value) for v in exchanged]
        return [new - old for old, new in zip(values, after, strict=True)], loss, sums

    traced: Any = tf.function(train, autograph=False, jit_compile=xla or None)

    def step(values: list[Any], data: Any) -> Any:
        graph = traced.get_concrete_function(values, data).graph
        handles = assigned_handles(graph)
        found.assigned = [v for v in outside_layout(model) if id(v.value.handle) in handles]
        handles -= {id(v.value.handle) for v in exchanged}
        known = [*graph.variables, *(v.value for v in model.optimizer.variables)]
        others = list({id(v.handle): v for v in known if id(v.handle) in handles}.values())
        before = [variable.read_value() for variable in others]
        differences, loss, sums = traced(values, data)
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in [*differences, loss]])

        def restore() -> Any:
            for variable, value in zip(others, before, strict=True):
                variable.assign(value)
            return tf.constant(0)

        tf.cond(finite, lambda: tf.constant(0), restore)
        return differences, loss, sums, tf.constant(False)

    return step


def _step(
    model: Any, metrics: TrainingMetrics, x: Any, y: Any, weights: Any, samples: Any
) -> tuple[Any, Sums]:
    """The loss of Keras' own `train_step`, and the sums of the metrics."""
    sums: dict[str, tuple[Any, Any]] = {}

    def compute_metrics(_x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        sums.update(metrics.sums(y, y_pred, sample_weight, samples))
        return {"loss": loss_tracker(model).result()}

    model.compute_metrics = compute_metrics
    try:
        loss = _loss_of(model.train_step((x, y, filled(weights, samples))))
        return loss - tf.cast(overstated(model), loss.dtype), sums
    finally:
        del model.compute_metrics


def _loss_of(logs: Any) -> Any:
    """The loss that a custom `train_step` returns, or a GAN's first one: the first name with "loss", else the first."""
    found = flat_logs(logs) if isinstance(logs, dict) else {}
    if not found:
        raise UserError(
            f"The model's train_step must return a dict with its loss, not {reprlib.repr(logs)}. Return for example "
            '{"loss": loss}.'
        )
    names = [key for key in (*logs, *found) if key in found]
    name = "loss" if "loss" in found else next((key for key in names if "loss" in key), names[0])
    return tf.cast(found[name], tf.float32)
