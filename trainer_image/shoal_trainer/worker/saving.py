"""The model as files: `model.keras`, and a SavedModel for serving.

What Keras cannot write (a schedule or a layer without `get_config`) it says only when it is asked to, and that is after
the last pass. So it is asked once before the first, and what it refuses then does not cost the rest of a trained model.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import keras

from shoal_trainer.errors import UserError
from shoal_trainer.worker.entrypoint import where
from shoal_trainer.worker.optimizers import has_call

log = logging.getLogger(__name__)

WHOLE, WEIGHTS, SERVING = "model.keras", "model.weights.h5", "saved_model"


def obstacle(model: keras.Model) -> str | None:
    """Why Keras cannot write this model down; None where it can."""
    try:
        json.dumps(keras.saving.serialize_keras_object(model))
    except (Exception, SystemExit) as error:
        return where(error)
    return None


def warn(model: keras.Model, why: str) -> None:
    """Say now what `save` will not be able to write, while somebody may still mend it."""
    log.warning(
        "model/ will hold %s%s, but no %s, for Keras cannot write this model down: %s",
        WEIGHTS, f" and {SERVING}" if has_call(model) else "", WHOLE, why,
    )  # fmt: skip


def save(model: keras.Model, folder: Path) -> str:
    """Write into `folder` whatever can be written; what is to be said of the rest, "" where there is none.

    Raises `UserError` where nothing can be written, or the disk fails.
    """
    missing: dict[str, str] = {}
    _try(WHOLE, model.save, folder, missing)
    if missing:
        _try(WEIGHTS, model.save_weights, folder, missing)
    if has_call(model):  # else there is nothing to serve
        _try(SERVING, lambda path: model.export(str(path), verbose=False), folder, missing)
    if not missing:
        return ""
    there = " and ".join(name for name in (WHOLE, WEIGHTS, SERVING) if (folder / name).exists())
    reasons = "; ".join(f"{name}: {why}" for name, why in missing.items())
    if not there:
        raise UserError(f"The model cannot be saved: {reasons}")
    note = f"model/ holds {there}, and not what Keras cannot write: {reasons}"
    log.warning(note)
    return note


def _try(name: str, write: Any, folder: Path, missing: dict[str, str]) -> None:
    try:
        write(folder / name)
    except OSError as error:  # not the model's fault: nothing else will be written well
        raise UserError(f"The model cannot be saved: {where(error)}") from error
    except (Exception, SystemExit) as error:
        missing[name] = where(error)
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).unlink(missing_ok=True)
