"""Builds the user's model: creates its variables, and reports what cannot be trained before training starts."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shoal_trainer.data.batch import Batch, leaves, map_leaves
from shoal_trainer.errors import UserError
from shoal_trainer.worker.optimizers import has_call, has_own_step
from shoal_trainer.worker.weighing import weigh_samples

BUILD_PARTS = "Build its parts before you return it: start each with keras.Input(…), or call its build(…)."


def build(model: Any, example: Batch) -> None:
    """Create the variables of the model, its loss, metrics and optimizer. Raises `UserError` if that fails."""
    if not isinstance(model, keras.Model):
        raise UserError(f"Training(model=…) returned {type(model).__name__}. It must return a keras.Model.")
    if not model.compiled or model.optimizer is None:
        raise UserError(
            "The model is not compiled. Call model.compile(optimizer=…, loss=…) before returning it from the function."
        )
    weigh_samples(model)
    try:
        if has_own_step(model) and not has_call(model):
            _build_without_call(model)
        else:
            model._symbolic_build(data_batch=_data(example))
        model.reset_metrics()
    except UserError:
        raise
    except Exception as error:
        shapes = ", ".join(str(tuple(np.shape(leaf))) for leaf in leaves(example.x))
        raise UserError(
            f"The model cannot be built from the first batch, x of the shape {shapes} (the data yield single samples, "
            f"which are batched by Shoal): {brief(error)}"
        ) from error


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


def brief(error: BaseException) -> str:
    """The error in one line of plain text."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    text = " ".join(lines)[:600] or repr(error)
    return f"{type(error).__name__}: {text}"
