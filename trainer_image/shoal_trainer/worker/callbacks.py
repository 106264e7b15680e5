"""The job's callbacks, and which of Keras' own would do nothing or harm here: those are refused before the first step.

They run on one worker after each pass, and their logs hold the training's loss and what the evaluation found: no worker
knows the training metrics of all.
"""

from __future__ import annotations

import importlib.util
import string
from collections.abc import Sequence
from typing import Any

import keras

from shoal_trainer.errors import UserError
from shoal_trainer.training import Training
from shoal_trainer.worker.entrypoint import where

LOGS = "The logs of callbacks hold loss, and of Training(validation=…) val_loss and val_… of each metric"


def callbacks_of(job: Training, unwritten: str | None = None) -> Sequence[Any]:
    """The job's callbacks. Raises `UserError`, when the worker starts, for one that would do nothing or harm.

    `unwritten`: why Keras cannot write the model down, where it cannot.
    """
    if job.callbacks is None:
        return ()
    try:
        callbacks = list(job.callbacks())
    except (Exception, SystemExit) as error:
        raise UserError(f"Training(callbacks=…) failed: {where(error)}") from error
    for callback in callbacks:
        _check(callback)
        if job.validation is None:
            _check_without_validation(callback)
        if unwritten and isinstance(callback, keras.callbacks.ModelCheckpoint):
            _check_unwritten(callback, unwritten)
    return callbacks


def remember(callback: Any, logs: dict[str, float]) -> None:
    """Let a ModelCheckpoint know the best value of an epoch that another worker saved."""
    value = logs.get(callback.monitor)
    if value is None:
        return
    if callback.monitor_op is None:
        callback._set_monitor_op()
    if callback._is_improvement(value, callback.best):
        callback.best = value


def _check(callback: Any) -> None:
    kind = type(callback).__name__
    if not isinstance(callback, keras.callbacks.Callback):
        raise UserError(f"Training(callbacks=…) gave a {kind}; give keras.callbacks.Callback objects.")
    if isinstance(callback, keras.callbacks.LearningRateScheduler | keras.callbacks.ReduceLROnPlateau):
        raise UserError(
            f"{kind} cannot change the learning rate of a parameter server. "
            "Give the optimizer a keras.optimizers.schedules schedule."
        )
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        raise UserError(f"{kind} is not needed: the parameter servers' snapshots do its work. Leave it out.")
    if isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights:
        raise UserError(
            "EarlyStopping(restore_best_weights=True) cannot bring back the parameters of an earlier epoch: the "
            "model that is exported is the last one. Leave it out, and keep the best one beside it with "
            'ModelCheckpoint("best.keras", monitor=…, save_best_only=True).'
        )
    best = isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_best_only
    if (best or isinstance(callback, keras.callbacks.EarlyStopping)) and not _known(callback.monitor):
        raise UserError(
            f"{kind}(monitor={callback.monitor!r}) would never see that. {LOGS}: take "
            f'"val_{callback.monitor}", or "loss".'
        )
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        for name in _fields(callback.filepath):
            if name != "epoch" and not _known(name):
                raise UserError(
                    f"{kind}({callback.filepath!r}) cannot be named by {name!r}. {LOGS}: take these, and epoch."
                )
    if isinstance(callback, keras.callbacks.TensorBoard) and importlib.util.find_spec("tensorboard") is None:
        raise UserError(f"{kind} needs a package: add it to your image, pip install tensorboard.")


def _check_without_validation(callback: Any) -> None:
    kind, wants = type(callback).__name__, []
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        wants = _fields(callback.filepath) + [callback.monitor] * callback.save_best_only
    elif isinstance(callback, keras.callbacks.EarlyStopping):
        wants = [callback.monitor]
    for name in wants:
        if name.startswith("val_"):
            raise UserError(
                f"{kind} would never see {name!r}: nothing is evaluated without Training(validation=…). "
                'Give that, or take "loss".'
            )


def _check_unwritten(callback: Any, why: str) -> None:
    if not callback.save_weights_only:
        raise UserError(
            f"ModelCheckpoint({callback.filepath!r}) cannot save this model: {why}. Mend that, or take "
            'ModelCheckpoint("….weights.h5", save_weights_only=True).'
        )


def _known(name: str) -> bool:
    return name == "loss" or name.startswith("val_")


def _fields(pattern: str) -> list[str]:
    try:
        return [name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None]
    except ValueError as error:
        raise UserError(f"ModelCheckpoint({pattern!r}) is no name of a file: {error}") from error
