"""The job's callbacks. Keras callbacks that cannot work here are refused before they run.

Callbacks run on one worker after each epoch. Their logs are those of the whole job. A learning rate that they set goes
to all workers; other changes that a callback makes on its worker only (trainable layers) are refused when they happen.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import string
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from shoal_trainer.contract import HISTORY
from shoal_trainer.data.read_errors import is_network_outage
from shoal_trainer.data.user_code import where
from shoal_trainer.errors import CallbackOutage, DiskFull, TrainerError, UserError, has_no_room
from shoal_trainer.training import Training
from shoal_trainer.worker.keras_internals import learning_rate_of, remember_if_better, resource_of
from shoal_trainer.worker.layout import outside_layout, variables_of
from shoal_trainer.worker.optimizers import parts, unwrap

log = logging.getLogger(__name__)

RATES = keras.callbacks.LearningRateScheduler | keras.callbacks.ReduceLROnPlateau
SCHEDULED = (
    "cannot change the learning rate of the job, because the optimizer has a schedule, or several rates "
    "(MultiOptimizer). Give it a number, or leave the callback out."
)
REFUSED = {
    keras.callbacks.SwapEMAWeights: (
        "has no effect, because on_test_begin is not called. Leave it out: with use_ema, the exported model is the "
        "averaged one."
    ),
    keras.callbacks.OrbaxCheckpoint: (
        "writes to the disk of one worker, which is not stored. Use ModelCheckpoint, whose files are stored in logs/."
    ),
}
"""Keras' callbacks that cannot work here, and why."""
UNCALLED = [
    *(
        f"on_{part}batch_{moment}"
        for part in ("", "train_", "test_", "predict_")
        for moment in ("begin", "end")
    ),
    *(f"on_{part}_{moment}" for part in ("test", "predict") for moment in ("begin", "end")),
]
"""Hooks that no worker calls: callbacks run once per epoch, and the evaluation is one of its tasks."""
PATHS = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.TensorBoard: "log_dir",
}
"""The output paths of Keras' callbacks."""
NOT_WRITTEN = (
    "A pod can write below /tmp, and where the template mounts a volume: use such a path, or ModelCheckpoint, "
    "CSVLogger or TensorBoard, whose files are stored with the run"
)


def callbacks_of(
    job: Training,
    unwritten: str | None = None,
    evaluated: Collection[str] | None = None,
    trained: Collection[str] = (),
    *,
    settable: bool = True,
) -> Sequence[Any]:
    """Create and check the job's callbacks. Raises `UserError` for one that cannot work here.

    `unwritten`: why Keras cannot serialize the model, if it cannot. `evaluated`: the metrics of an evaluation
    (`val_loss`, …), none without validation data; None if they are not known before it. `trained`: those of training.
    `settable`: whether the learning rate is a number.
    """
    try:
        made = job.callbacks() if job.callbacks else None
        callbacks = [made] if isinstance(made, keras.callbacks.Callback) else list(made or ())
    except (Exception, SystemExit) as error:
        raise failure("Training(callbacks=…) failed", error) from error
    computed = False  # by a callback of the user, which may put what it likes into the logs of those after it
    for callback in callbacks:
        _check(callback)
        if not computed:
            _check_trained(callback, ("loss", *trained))
            _check_evaluated(callback, evaluated)
        computed = computed or _is_users(callback, "on_epoch_end")
        if isinstance(callback, RATES) and not settable:
            raise UserError(f"{type(callback).__name__} {SCHEDULED}")
        if unwritten and isinstance(callback, keras.callbacks.ModelCheckpoint):
            _check_unwritten(callback, unwritten)
        _warn(callback)
    return [each for each in callbacks if not isinstance(each, keras.callbacks.BackupAndRestore)]


def failure(what: str, error: BaseException, remedy: str = "") -> TrainerError:
    """An error in a callback ends the job, as it ends `fit`; a full disk or an outage of the network only this worker.

    The callbacks are not repeated here: they may have seen a part of the epoch. The next worker has new ones.
    """
    kind = DiskFull if has_no_room(error) else CallbackOutage if is_network_outage(error) else UserError
    if "Read-only file system" in str(error):  # of Python, or of TensorFlow
        remedy = f". {NOT_WRITTEN}"
    return kind(f"{what}: {where(error)}{remedy}")


@contextlib.contextmanager
def unchanged(model: Any, read: Sequence[Any] = ()) -> Iterator[None]:
    """Raise `UserError` if callbacks change what only this worker would follow.

    That is the optimizer, its schedule, which variables are trained, and the values of those that are not. `read`:
    TensorFlow's variables that the step only reads; the model may hold them where Keras finds none.
    """
    optimizer, variables = unwrap(model.optimizer), variables_of(model)
    rates = _fixed_rates(optimizer)
    held = [(each.path, resource_of(each)) for each in (*variables[1], *outside_layout(model))]
    known = [each for _, each in held]
    known += map(resource_of, (*variables[0], *model.optimizer.variables))  # these may change
    handles = {id(each.handle) for each in known}
    names = {id(each): name for name, each in vars(model).items()}  # TensorFlow's own name may be "Variable"
    others = [(names.get(id(v), v.name.partition(":")[0]), v) for v in read if id(v.handle) not in handles]
    values = [(name, each, each.read_value()) for name, each in held + others]
    yield
    changed = unwrap(model.optimizer)
    if changed is not optimizer or _fixed_rates(changed) != rates:
        raise UserError(
            "A callback cannot replace the optimizer or its schedule, or set the rates of a MultiOptimizer: it runs on "
            "one worker. It may set optimizer.learning_rate to a number."
        )
    if _ids(variables_of(model)) != _ids(variables):
        raise UserError(
            "A callback cannot change which variables are trained (layer.trainable): the parameter servers hold those "
            "of the start. Use a second job, whose model function loads the exported model and unfreezes its layers."
        )
    if assigned := [
        name
        for name, each, value in values
        if not np.array_equal(value.numpy(), each.numpy(), equal_nan=True)
    ]:
        raise UserError(
            f"A callback sets {', '.join(assigned)}, and training would not see it: callbacks run on one worker. Let "
            "the model compute it from the step, self.optimizer.iterations, where it uses it."
        )


def path_attribute(callback: Any) -> str | None:
    """The attribute with the output path of a callback of Keras; None for other callbacks."""
    return next((name for kind, name in PATHS.items() if isinstance(callback, kind)), None)


def remember(callback: Any, logs: dict[str, float]) -> None:
    """Update the best value of a ModelCheckpoint from an epoch that another worker ran."""
    value = logs.get(callback.monitor)
    if value is None:
        return
    remember_if_better(callback, value)


def rate_of(model: Any) -> float | None:
    """The learning rate that callbacks may set; None for a schedule or a function, and for several rates."""
    optimizer = unwrap(model.optimizer)
    rate = learning_rate_of(optimizer)
    return float(rate.numpy()) if hasattr(rate, "assign") and parts(optimizer) == [optimizer] else None


def set_rate(model: Any, rate: float) -> None:
    """Set the learning rate of an optimizer that has a number."""
    variable = learning_rate_of(unwrap(model.optimizer))
    if hasattr(variable, "assign"):
        variable.assign(rate)


def _fixed_rates(optimizer: Any) -> list[tuple[int, float | None]]:
    """What callbacks may not change: schedules, and the rates in a `MultiOptimizer`."""
    rates = [(part, learning_rate_of(part)) for part in parts(optimizer)]
    return [
        (id(rate), None if part is optimizer or not hasattr(rate, "assign") else float(rate.numpy()))
        for part, rate in rates
    ]


def _ids(variables: tuple[list[Any], ...]) -> list[list[int]]:
    return [[id(variable) for variable in part] for part in variables]


def _check(callback: Any) -> None:
    kind = type(callback).__name__
    if not isinstance(callback, keras.callbacks.Callback):
        raise UserError(f"Training(callbacks=…) returned a {kind}. Return keras.callbacks.Callback objects.")
    for refused, reason in REFUSED.items():
        if isinstance(callback, refused):
            raise UserError(f"{kind} {reason}")
    path = getattr(callback, path_attribute(callback) or "", None)
    if isinstance(path, str) and os.path.normpath(path).startswith(".."):
        raise UserError(f"{kind}({path!r}) writes outside of logs/. Use a path without '..'.")
    if isinstance(path, str) and os.path.normpath(path).split("/")[0] == HISTORY:
        raise UserError(
            f"{kind}({path!r}) would write logs/{HISTORY}, which Shoal writes, with the metrics of all epochs. Use "
            "another path, or leave it out."
        )
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
        raise UserError(
            f"{kind}(save_freq={callback.save_freq}) would never save: callbacks are not called after batches. Leave "
            "save_freq out to save after each epoch."
        )
    if isinstance(callback, keras.callbacks.TensorBoard) and importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            f"{kind} requires the package tensorboard. Install it where the workers run: pip install tensorboard."
        )


def _warn(callback: Any) -> None:
    """Log what of a callback does not happen here."""
    kind = type(callback).__name__
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        log.warning("%s is left out: the parameter servers' snapshots do its work", kind)
        return
    if uncalled := [name for name in UNCALLED if _is_users(callback, name)]:
        log.warning(
            "%s: %s is not called: callbacks run once per epoch, on one worker. A learning rate that changes within an "
            "epoch is a schedule, the optimizer's learning_rate=…",
            kind,
            ", ".join(uncalled),
        )
    path = getattr(callback, path_attribute(callback) or "", None)
    if isinstance(path, str) and Path(path).is_absolute():
        log.warning(
            "%s(%r) writes to the disk of the worker that runs it, which is lost with its pod: a relative path is "
            "stored, in logs/ of the run",
            kind,
            path,
        )


def _is_users(callback: Any, hook: str) -> bool:
    """Whether the user wrote this hook, as a method or as the argument of a LambdaCallback."""
    if hook in vars(callback):
        return True
    owner = next((each for each in type(callback).__mro__ if hook in vars(each)), keras.callbacks.Callback)
    return not owner.__module__.startswith("keras.")


def needed(callback: Any) -> list[str]:
    """The metrics that a callback of Keras monitors, or has in the names of its files."""
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        names = [name for name in _fields(callback.filepath) if name != "epoch"]
        return names + [callback.monitor] * callback.save_best_only
    monitors = keras.callbacks.EarlyStopping | keras.callbacks.ReduceLROnPlateau
    return [callback.monitor] if isinstance(callback, monitors) else []


def _check_trained(callback: Any, trained: Sequence[str]) -> None:
    """`trained`: the names in the logs of an epoch without validation data."""
    for name in needed(callback):
        if name not in trained and not name.startswith("val_"):
            raise UserError(
                f"{type(callback).__name__} uses {name!r}, which is not in its logs. The logs contain "
                f"{', '.join(trained)} and, with Training(validation=…), val_loss and val_… for each metric. Metrics "
                "that are no means over samples (AUC, precision) and what compute_metrics adds are computed in the "
                f'evaluation only. Use one of these, such as "val_{name}" or "loss".'
            )


def _check_evaluated(callback: Any, evaluated: Collection[str] | None) -> None:
    kind = type(callback).__name__
    for name in needed(callback):
        if evaluated is None or not name.startswith("val_") or name in evaluated:
            continue
        if evaluated:
            raise UserError(
                f"{kind} uses {name!r}, which the evaluation does not give. It gives {', '.join(evaluated)}."
            )
        raise UserError(
            f"{kind} uses {name!r}, but nothing is evaluated without Training(validation=…). "
            'Set validation, or use "loss".'
        )


def _check_unwritten(callback: Any, why: str) -> None:
    if not callback.save_weights_only:
        raise UserError(
            f"ModelCheckpoint({callback.filepath!r}) cannot save this model: {why}. Fix this, or use "
            'ModelCheckpoint("….weights.h5", save_weights_only=True).'
        )


def _fields(pattern: str) -> list[str]:
    try:
        return [name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None]
    except ValueError as error:
        raise UserError(f"ModelCheckpoint({pattern!r}) is not a valid file name: {error}") from error
