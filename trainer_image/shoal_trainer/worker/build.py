"""Builds the user's model: creates its variables, and reports what cannot be trained before training starts."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Collection
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shoal_trainer.data.batch import Batch, leaves, map_leaves
from shoal_trainer.data.user_code import where
from shoal_trainer.errors import TrainerError, UserError
from shoal_trainer.worker.keras_internals import (
    ALL_LOSSES,
    ALL_METRICS,
    CompileMetrics,
    MetricsList,
    build_symbolically,
    compiled_loss,
    compiled_metrics,
    layers_of,
    makes_own_function,
    user_loss,
    user_metrics,
)
from shoal_trainer.worker.optimizers import has_call, has_own_step
from shoal_trainer.worker.out_of_memory import memory_is_enough
from shoal_trainer.worker.weighing import WeighedLoss, weigh_samples

BUILD_PARTS = "Build its parts before you return it: start each with keras.Input(…), or call its build(…)."


def build(model: Any, example: Batch) -> None:
    """Create the variables of the model, its loss, metrics and optimizer.

    Raises `UserError` if that fails, `OutOfMemory` if they do not fit.
    """
    if not isinstance(model, keras.Model):
        raise UserError(f"Training(model=…) returned {type(model).__name__}. It must return a keras.Model.")
    if not model.compiled or model.optimizer is None:
        raise UserError(
            "The model is not compiled. Call model.compile(optimizer=…, loss=…) before returning it from the function."
        )
    if makes_own_function(model, "train"):
        raise UserError(
            "The model has a make_train_function() of its own, which no worker calls: the parameters of a step come "
            "from the parameter servers. Override train_step(data) instead."
        )
    _check_compiled(model)
    weigh_samples(model)
    try:
        with memory_is_enough():
            if has_own_step(model) and not has_call(model):
                _build_without_call(model)
            else:
                build_symbolically(model, _data(example))
            model.reset_metrics()
        for layer in layers_of(model):
            if isinstance(layer, keras.layers.RNN | keras.layers.Bidirectional) and layer.stateful:
                raise UserError(
                    f"The layer {layer.name!r} is stateful, but consecutive batches of a worker do not continue the "
                    "same sequences. Use stateful=False."
                )
    except TrainerError:
        raise
    except Exception as error:
        if missing := _outputs_without_weights(example):
            raise UserError(
                f"sample_weight has no entry for {', '.join(map(repr, missing))}, of which y has labels. Give each "
                "output its weights; np.ones(…) weighs all samples alike."
            ) from error
        if unlabelled := _outputs_without_labels(model, example):
            raise UserError(
                f"The model has the output {', '.join(map(repr, unlabelled))}, of which y has no labels: with a "
                "sample_weight per output, Keras computes no metrics then. Leave it out of the model that is trained "
                "(another keras.Model of the same layers may return it), or pass zeros as its labels and weights."
            ) from error
        if _in(error, WeighedLoss.__call__):
            loss = keras.tree.map_structure(_name, user_loss(compiled_loss(model)))
            raise _does_not_fit(f"compile(loss={loss})", model, example, error) from error
        in_metrics = _in(error, type(model).compute_metrics)
        if in_metrics and example.parts != 3:
            raise _does_not_fit(f"In compile(), {_metric(error)}", model, example, error) from error
        if in_metrics:
            shapes = ", ".join(str(tuple(np.shape(leaf))[1:]) for leaf in leaves(example.weights))
            raise UserError(
                f"sample_weight has the shape {shapes} per sample, which does not fit the values of "
                f"{_metric(error)} of compile(): {where(error)}. Give one weight per sample, or one for each of "
                "these values."
            ) from error
        raise UserError(
            f"The model cannot be built from the first batch, x of the shape {_shapes(example.x)} (the data yield "
            f"single samples, which are batched by Shoal): {where(error)}"
        ) from error


def _outputs_without_weights(example: Batch) -> list[str]:
    """The outputs that have labels, but no entry in a dict of weights."""
    if not (isinstance(example.weights, dict) and isinstance(example.y, dict)):
        return []
    return sorted(set(example.y) - set(example.weights))


def _outputs_without_labels(model: Any, example: Batch) -> list[str]:
    """The outputs of a functional model that have neither labels nor an entry in a dict of weights."""
    outputs = getattr(model, "output", None)
    if isinstance(outputs, dict) and isinstance(example.weights, dict) and isinstance(example.y, dict):
        return sorted(set(outputs) - set(example.y))
    return []


def _does_not_fit(what: str, model: keras.Model, example: Batch, error: Exception) -> UserError:
    shapes = f"y of the shape {_shapes(example.y)}"
    if outputs := getattr(model, "outputs", None):  # a functional model's
        shapes += (
            f", the model's output {', '.join(str((example.samples, *each.shape[1:])) for each in outputs)}"
        )
    return UserError(f"{what} cannot be computed for the first batch, {shapes}: {where(error)}")


def _in(error: BaseException, function: Any) -> bool:
    """Whether the error was raised while this function ran, such as a loss of `compile()`."""
    return any(frame.f_code is function.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def _metric(error: BaseException) -> str:
    """The metric that was updated when the error was raised: of those in one another, the first that the user named."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = frame.f_locals.get("self")
        if isinstance(found, keras.metrics.Metric) and not isinstance(found, CompileMetrics | MetricsList):
            return f"the metric {found.name!r}"
    return "a metric"


def _name(loss: Any) -> str:
    return loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)


def _shapes(structure: Any) -> str:
    return ", ".join(str(tuple(np.shape(leaf))) for leaf in leaves(structure))


def _check_compiled(model: Any) -> None:
    """Raise `UserError` for losses and metrics that Keras cannot interpret, which it reports only when it builds."""
    losses, metrics = compiled_loss(model), compiled_metrics(model)
    if losses is not None:
        _check_objects("loss", user_loss(losses), ALL_LOSSES, ("crossentropy", "ce"))
    if metrics is not None:
        for argument, values in zip(("metrics", "weighted_metrics"), user_metrics(metrics), strict=True):
            _check_objects(argument, values, ALL_METRICS, ("accuracy", "acc"))


def _check_objects(argument: str, values: Any, names: Collection[str], short: Collection[str]) -> None:
    """`short`: names that Keras resolves by the shape of the output."""
    for value in keras.tree.flatten(values):
        known = value in names or value.lower() in short if isinstance(value, str) else callable(value)
        if value is None or known:
            continue
        near = difflib.get_close_matches(value, [*names, *short], n=1) if isinstance(value, str) else ()
        module = "losses" if argument == "loss" else "metrics"
        raise UserError(
            f"compile({argument}=…) got {repr(value)[:80]} ({type(value).__name__}). "
            + (
                f"Did you mean {near[0]!r}?"
                if near
                else f"Pass an object of keras.{module}, its name, or a function of (y_true, y_pred)."
            )
        )


def _build_without_call(model: Any) -> None:
    """Build a model that has a `train_step` but no `call()` (a VAE, a GAN): its parts must be built already."""
    if not model.trainable_variables:
        raise UserError(f"The model has no variables, and no call() to create them. {BUILD_PARTS}")
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model.built = True  # else Keras warns when it saves the model


def _data(example: Batch) -> Any:
    weights = example.weights if example.parts == 3 else None
    return tuple(map_leaves(tf.convert_to_tensor, part) for part in (example.x, example.y, weights))
