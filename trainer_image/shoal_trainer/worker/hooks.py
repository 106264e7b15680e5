"""Calls the epoch hooks of the job's callbacks, with the arguments of Keras' `fit`.

The callbacks are made on the worker that runs them, when they are first needed: a function that begins a run of a
tracker is called once, not on each worker.
The state of callbacks (patience, best values) is not stored: new callbacks get it from the logs of earlier epochs.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, MutableSet, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from shoal_trainer.data.user_code import where
from shoal_trainer.errors import DiskFull, TrainerError, UserError, has_no_room
from shoal_trainer.worker import best_weights
from shoal_trainer.worker.best_weights import Best
from shoal_trainer.worker.callbacks import (
    failure,
    needed,
    path_attribute,
    rate_of,
    remember,
    set_rate,
    unchanged,
)

log = logging.getLogger(__name__)

CHECKPOINTS = (".keras", ".weights.h5")
"""The suffixes that ModelCheckpoint accepts."""
IN_A_FOLDER = (
    " (`check` calls callbacks in an empty folder, so that they replace no file of yours: what they read needs an "
    "absolute path, such as Path(__file__).with_name(…))"
)

_MISSING = re.compile(r"no such file|(file|folder|directory)\b.{0,20}(not found|not exist)", re.IGNORECASE)
"""What is said of a file that is not there by errors of any class: Keras' ValueError, TensorFlow's OSError."""


class Hooks:
    """The callbacks of `build` on this model. Their relative paths are below a temporary folder.

    `epochs`: the number of the last epoch, if the job ends with one. `metrics`: those of training and, as far as
    they are known before it, of an evaluation. `read`: gives the variables that the step only reads. `contained`, of a
    rehearsal: absolute paths are below the temporary folder as well, and what callbacks of the user write to a relative
    path is in another one, and replaces no file of theirs.
    """

    def __init__(
        self,
        build: Callable[[], Sequence[Any]],
        model: keras.Model,
        epochs: int | None = None,
        metrics: Sequence[str] = (),
        read: Callable[[], Sequence[Any]] = tuple,
        *,
        contained: bool = False,
    ) -> None:
        self._build = build
        self._made: Sequence[Any] | None = None
        self._unused: list[tuple[Any, dict[str, Any]]] = []
        """The callbacks, and their attributes before any hook was called."""
        self._model = model
        self._epochs = epochs
        self._read, self._contained = read, contained
        self._expected = ("loss", *metrics)
        self._temporary = tempfile.TemporaryDirectory(prefix="shoal-callbacks-", ignore_cleanup_errors=True)
        self._folder, self._own = (Path(self._temporary.name, name) for name in ("logs", "own"))
        self._folder.mkdir()
        self._own.mkdir()
        self._seen: Sequence[dict[str, float]] | None = None
        """The logs of the epochs that the callbacks have seen; None before `on_train_begin`."""
        self._names: dict[str, float] = {}
        """The names in these logs, each with NaN."""
        self._missed = set[tuple[str, str]]()
        self._ended = False
        self.compiled_rate = rate_of(model)
        """That of the job until a callback sets it; None: callbacks cannot."""

    @property
    def _callbacks(self) -> Sequence[Any]:
        return self._make() if self._made is None else self._made

    def _make(self) -> Sequence[Any]:
        """Make the callbacks, which have seen no epoch, even if the user's function returns the same objects again."""
        for callback, state in self._unused:
            vars(callback).clear()
            vars(callback).update(state)
        try:
            with self._called():
                made = self._build()
        except UserError as error:
            raise UserError(f"{error}{self._remedy(error.__cause__)}") from error
        self._unused = [(callback, _copied(vars(callback))) for callback in made]
        self._model.history = keras.callbacks.History()  # as in Keras, the last one, which does nothing else
        self._made = [*made, self._model.history] if made else ()
        return self._made

    def run(self, history: Sequence[dict[str, float]], learning_rate: float | None = None) -> bool:
        """Call the hooks for the last epoch of `history`; returns whether training should stop.

        `learning_rate`: that of the job, if callbacks have set it before; afterwards, the optimizer has the new one.

        Callbacks that have not seen the earlier epochs get their logs first, without saving models. Callbacks that have
        seen this epoch already (a repeated task) or other logs (a rollback) are replaced by new ones. After the last
        epoch, `on_train_end` follows at once, so that its files are stored.
        """
        if not self._callbacks or not history:
            return False
        history = tuple(history)
        try:
            self._delete_checkpoints()
            if anew := not self._continues(history):
                self._end()  # closes their files
            with unchanged(self._model, self._read()), self._called():
                self._catch_up(history, learning_rate, anew=anew)
            if self._model.stop_training or len(history) == self._epochs:
                self._end()
        except TrainerError:
            raise
        except (Exception, SystemExit) as error:
            raise failure("A callback failed", error, self._remedy(error)) from error
        return bool(self._model.stop_training)

    @property
    def made(self) -> bool:
        """Whether this worker has made the callbacks."""
        return self._made is not None

    @property
    def restoring(self) -> Any:
        """The EarlyStopping that restores the best weights, of several the last, as in Keras; None if there is none."""
        found = [
            callback
            for callback in self._made or ()
            if isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights
        ]
        return found[-1] if found else None

    def save_if_best(self, epoch: int, parameters: npt.NDArray[np.float32]) -> None:
        """Keep the parameters of this epoch, after `run`, if it is the best one so far."""
        stopping, seen = self.restoring, self._seen or ()
        ran = len(seen) == epoch + 1
        if stopping is not None and ran and stopping.best is not None and stopping.best_epoch == epoch:
            name = stopping.monitor if stopping.monitor in seen[epoch] else "loss"
            recorded = (name, seen[epoch][name]) if name in seen[epoch] else None
            try:
                best = Best(parameters, epoch, float(stopping.best), stopping.monitor, recorded)
                best_weights.save(self._folder, best)
            except OSError as error:
                kind = DiskFull if has_no_room(error) else UserError
                raise kind(f"The weights of the best epoch cannot be saved: {where(error)}") from error

    def files(self) -> Iterator[tuple[str, Path]]:
        """The files of the callbacks, with their relative names."""
        for path in sorted(self._folder.rglob("*")):
            if path.is_file():
                yield _named(path, self._folder), path

    @property
    def written(self) -> list[str]:
        """What callbacks of the user wrote to relative paths in a rehearsal."""
        return sorted(_named(path, self._own) for path in self._own.rglob("*") if path.is_file())

    def close(self) -> None:
        """Call `on_train_end` if it was not called yet, and delete the files."""
        self._end()
        self._temporary.cleanup()

    def _called(self) -> contextlib.AbstractContextManager[None]:
        """Where callbacks are called: a process has one current folder, and nothing else runs in a rehearsal."""
        return contextlib.chdir(self._own) if self._contained else contextlib.nullcontext()

    def _remedy(self, error: BaseException | None) -> str:
        named = type(error).__name__ in {"FileNotFoundError", "NotFoundError"}  # of Python, or of TensorFlow
        return IN_A_FOLDER if self._contained and (named or _MISSING.search(str(error))) else ""

    def _continues(self, history: Sequence[dict[str, float]]) -> bool:
        seen = self._seen
        return seen is not None and len(history) > len(seen) and history[: len(seen)] == seen

    def _catch_up(
        self, history: Sequence[dict[str, float]], learning_rate: float | None, *, anew: bool
    ) -> None:
        seen = self._begin() if anew or self._seen is None else self._seen
        epoch = len(seen)
        try:
            while epoch < len(history) and not self._model.stop_training:  # as in Keras, no epoch follows
                live = epoch == len(history) - 1
                if live and learning_rate is not None:
                    set_rate(self._model, learning_rate)
                self._epoch(epoch, self._logs(history[epoch], live=live), live=live)
                epoch += 1
        finally:
            self._seen = history[:epoch]

    def _begin(self) -> Sequence[dict[str, float]]:
        if self._seen is not None:
            self._make()
            shutil.rmtree(self._folder)
            self._folder.mkdir()
        self._seen, self._names, self._ended = (), {}, False
        self._model.stop_training = False
        for callback in self._callbacks:
            self._redirect(callback)
            callback.set_params({"epochs": self._epochs, "steps": None, "verbose": 0})
            callback.set_model(self._model)
        self._set_compiled_rate()  # the callbacks see all epochs again
        for callback in self._callbacks:
            callback.on_train_begin({})
        self._begin_epoch(0)
        self._warn_of_first_rate()
        return self._seen

    def _warn_of_first_rate(self) -> None:
        """The first epoch is complete by now; what follows has the rate that callbacks set for it, as in Keras."""
        compiled, rate = self.compiled_rate, rate_of(self._model)
        if compiled is not None and rate is not None and rate != compiled:
            log.warning(
                "a callback sets a learning rate of %.3g before the first epoch, which the job trains with that of "
                "compile(), %.3g: callbacks run when an epoch is complete. Give it to compile()",
                rate,
                compiled,
            )

    def _set_compiled_rate(self) -> None:
        if self.compiled_rate is not None:
            set_rate(self._model, self.compiled_rate)

    def _redirect(self, callback: Any) -> None:
        name = path_attribute(callback)
        if name is None or not isinstance(value := getattr(callback, name), str):
            return
        if self._contained and not Path(value).is_relative_to(self._folder):
            value = value.lstrip("/")
        target = Path(os.path.normpath(self._folder / value))  # `value` itself if it is absolute
        if target.is_relative_to(self._folder):
            target.parent.mkdir(parents=True, exist_ok=True)
            setattr(callback, name, str(target))

    def _logs(self, logs: dict[str, float], *, live: bool) -> dict[str, float]:
        """Keras' logs of the next epoch, whose own `logs` have no values that are not finite: these are NaN.

        Without them, ModelCheckpoint would save the diverged model as the best one. An earlier epoch may have been
        trained by a run without validation, so it has only the metrics of the epochs before it.
        """
        self._names |= dict.fromkeys(logs, math.nan)
        return (dict.fromkeys(self._expected, math.nan) if live else {}) | self._names | logs

    def _delete_checkpoints(self) -> None:
        """Delete the models that ModelCheckpoint wrote in earlier epochs: they would fill the disk.

        They are stored, or copies of them are on the way. Callbacks of the user may read them.
        """
        if all(type(callback).__module__.startswith("keras.") for callback in self._callbacks):
            for _, path in self.files():
                if path.name.endswith(CHECKPOINTS):
                    path.unlink(missing_ok=True)

    def _epoch(self, epoch: int, logs: dict[str, float], *, live: bool) -> None:
        for callback in self._callbacks:
            if not live and isinstance(callback, keras.callbacks.ModelCheckpoint):
                remember(callback, logs)
            else:
                if live:
                    self._warn_of_missing(callback, logs)
                callback.on_epoch_end(epoch, logs)
        if not self._model.stop_training and epoch + 1 != self._epochs:
            self._begin_epoch(epoch + 1)

    def _warn_of_missing(self, callback: Any, logs: dict[str, float]) -> None:
        """Log once what a callback of Keras needs and nobody has put into the logs, neither the job nor a callback."""
        for name in needed(callback):
            if name not in logs and (key := (type(callback).__name__, name)) not in self._missed:
                self._missed.add(key)
                log.warning("%s uses %r, which is not in its logs, %s", *key, ", ".join(logs))

    def _begin_epoch(self, epoch: int) -> None:
        """After the epoch before it, so that the rate that a callback sets here is that of the epoch."""
        for callback in self._callbacks:
            callback.on_epoch_begin(epoch, {})

    def _end(self) -> None:
        """Call `on_train_end`. An error is logged: the model is trained, and the worker has yet to export or leave."""
        if self._seen is None or self._ended:
            return
        self._ended = True
        logs = dict(self._seen[-1]) if self._seen else {}
        for callback in self._callbacks:
            try:
                with self._called():
                    callback.on_train_end(logs)
            except (Exception, SystemExit) as error:
                log.warning("%s.on_train_end failed: %s", type(callback).__name__, where(error))


def _named(path: Path, folder: Path) -> str:
    """The name in its folder, as UTF-8: messages and buckets have no other."""
    return os.fsencode(path.relative_to(folder)).decode(errors="replace")


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes, with copies of lists and the like, in which callbacks collect what they see."""
    kinds = (MutableSequence, MutableMapping, MutableSet)
    return {
        name: copy.copy(value) if isinstance(value, kinds) else value for name, value in attributes.items()
    }
