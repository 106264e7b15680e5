"""Saves the model: `model.keras`, and a SavedModel for serving.

Keras reports what it cannot serialize (a schedule or a layer without `get_config`) only when the model is saved, after
the last epoch. So the worker tries before the first, and a failure at the end does not lose the other files.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import keras

from shoal_trainer.data.user_code import where
from shoal_trainer.errors import DiskFull, UserError, has_no_room
from shoal_trainer.worker.keras_internals import Functional
from shoal_trainer.worker.optimizers import has_call

log = logging.getLogger(__name__)

WHOLE, WEIGHTS, SERVING = "model.keras", "model.weights.h5", "saved_model"


def obstacle(model: keras.Model) -> str | None:
    """Why Keras cannot serialize this model; None if it can."""
    try:
        json.dumps(keras.saving.serialize_keras_object(model))
    except (Exception, SystemExit) as error:
        return where(error)
    return None


def warn(model: keras.Model, why: str) -> None:
    """Warn before training about the files that `save` will not be able to write."""
    log.warning(
        "model/ will contain %s%s but not %s, because Keras cannot serialize this model: %s",
        WEIGHTS, f" and {SERVING}" if has_call(model) else "", WHOLE, why,
    )  # fmt: skip


def save(model: keras.Model, folder: Path) -> str:
    """Save all files that can be saved; return a message about the others, "" if there are none.

    Raises `UserError` if no file can be saved, or the disk fails, and `DiskFull`.
    """
    missing: dict[str, str] = {}
    _try(WHOLE, model.save, folder, missing)
    if missing or not isinstance(
        model, Functional | keras.Sequential
    ):  # `load_model` may need what only the user's class knows
        _try(WEIGHTS, model.save_weights, folder, missing)
    if has_call(model):  # a SavedModel serves call()
        _try(SERVING, lambda path: model.export(str(path), verbose=False), folder, missing)
    if not missing:
        return ""
    saved = " and ".join(name for name in (WHOLE, WEIGHTS, SERVING) if (folder / name).exists())
    reasons = "; ".join(f"{name}: {why}" for name, why in missing.items())
    if not saved:
        raise UserError(f"The model cannot be saved: {reasons}")
    note = f"model/ contains {saved}, but not the files that Keras cannot save: {reasons}"
    log.info("%s", note)  # `warn` has said it, and so does the end of the job
    return note


def _try(name: str, write: Any, folder: Path, missing: dict[str, str]) -> None:
    try:
        write(folder / name)
    except (Exception, SystemExit) as error:
        if isinstance(error, OSError) or has_no_room(
            error
        ):  # of the disk, not of the model: so would be the others
            kind = DiskFull if has_no_room(error) else UserError
            raise kind(f"The model cannot be saved: {where(error)}") from error
        missing[name] = where(error)
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).unlink(missing_ok=True)
