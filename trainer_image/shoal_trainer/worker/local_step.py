"""The step of a model whose optimizer runs on the worker: Keras' own `train_step`."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from shoal_trainer.errors import UserError
from shoal_trainer.worker.layout import variables_of
from shoal_trainer.worker.optimizers import has_own_step
from shoal_trainer.worker.weighing import filled


def local_step(model: Any) -> Callable[..., Any]:
    """(values, data) -> (new - old of everything, loss)."""
    own_step = has_own_step(model)
    trainable, statistics = variables_of(model)
    variables = trainable + statistics

    def step(values: list[Any], data: Any) -> Any:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        model.reset_metrics()  # so that the logged loss is that of this step, not a mean
        loss = _loss_of(model.train_step(data) if own_step else _step(model, *data))
        after = [tf.convert_to_tensor(v.value) for v in variables]
        return [new - old for old, new in zip(values, after, strict=True)], loss

    return step


def _step(model: Any, x: Any, y: Any, weights: Any, samples: Any) -> Any:
    """Run Keras' own `train_step` without the metrics."""
    model.compute_metrics = lambda *_, **__: {"loss": model._loss_tracker.result()}
    try:
        return model.train_step((x, y, filled(weights, samples)))
    finally:
        del model.compute_metrics


def _loss_of(logs: Any) -> Any:
    """The loss that a custom `train_step` returns, or its first value if it has none (a GAN)."""
    if not isinstance(logs, dict) or not logs:
        raise UserError(
            f"The model's train_step must return a dict with its loss, not {reprlib.repr(logs)}. Return for example "
            '{"loss": loss}.'
        )
    return tf.reduce_mean(logs["loss"] if "loss" in logs else next(iter(logs.values())))
