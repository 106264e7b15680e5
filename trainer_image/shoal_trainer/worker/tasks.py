"""The tasks of a worker: evaluate, run callbacks, export the model.

A task takes the parameters and returns metrics and files. It is leased and fenced like data, and another worker repeats
it if this one is lost, so tasks are idempotent. The coordinator writes the files to the storage; workers need no
permissions there.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shoal_trainer.data.batch import Batch, map_leaves
from shoal_trainer.errors import Interrupted, UserError
from shoal_trainer.training import Training
from shoal_trainer.worker import best_weights, saving
from shoal_trainer.worker.alone import as_keras, as_raised, dataset_of, quiet_end, validation_batches
from shoal_trainer.worker.best_weights import Best
from shoal_trainer.worker.callbacks import callbacks_of, rate_of
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.hooks import Hooks
from shoal_trainer.worker.keras_internals import batches_taken_first, evaluate, flat_logs
from shoal_trainer.worker.label_check import LabelCheck
from shoal_trainer.worker.optimizers import averages, has_call, take_average
from shoal_trainer.worker.out_of_memory import memory_is_enough
from shoal_trainer.worker.validation import begun, blamed, evaluates_itself
from shoal_trainer.worker.work import TaskWork

log = logging.getLogger(__name__)

Fetch = Callable[[str, Path], bool]
"""(name, target): gets a file that an earlier task of this run uploaded; False if there is none."""
MAX_VALUES = 100
"""Metrics with more values are left out."""


@dataclass(frozen=True)
class Outcome:
    """The result of a task: metrics, whether training should stop, and files by their name in the run's folder.

    For callbacks, `files` includes those of earlier epochs; the worker uploads what has changed. For an export,
    `message` names the files that could not be saved.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    stop: bool = False
    files: dict[str, Path] = field(default_factory=dict)
    message: str = ""
    learning_rate: float | None = None
    """Of all workers from now on, if a callback has changed it."""


class Tasks:
    """Runs tasks on the model of `flat_model`, with a temporary folder that `close` deletes.

    `drain`: set when the worker has to leave, which ends an evaluation. `moved`: called at each batch of one.
    `contained`, of a rehearsal: callbacks write only in folders of theirs, and the export says what it could not save.
    """

    def __init__(
        self,
        job: Training,
        flat_model: FlatModel,
        batch_size: int,
        epochs: int | None = None,
        drain: threading.Event | None = None,
        moved: Callable[[], None] = lambda: None,
        *,
        contained: bool = False,
    ) -> None:
        self._job = job
        self._flat_model = flat_model
        self._batch_size = batch_size
        self._drain, self._moved = drain or threading.Event(), moved
        unwritten = saving.obstacle(flat_model.model)
        if (
            job.validation is not None
            and not has_call(flat_model.model)
            and not _tests_itself(flat_model.model)
        ):
            raise UserError(
                "Training(validation=…) cannot be evaluated: the model has neither call() nor test_step(). Define one "
                "of them, or leave validation out."
            )
        metrics = evaluated(job, flat_model.model)
        trained = flat_model.found.metrics
        self._hooks = Hooks(
            lambda: callbacks_of(
                job, unwritten, metrics, trained, settable=rate_of(flat_model.model) is not None
            ),
            flat_model.model,
            epochs,
            (*trained, *(metrics or ())),
            flat_model.only_read,
            contained=contained,
        )
        self._evaluated: tuple[dict[str, float], npt.NDArray[np.float32]] | None = None
        """The metrics and the parameters of this worker's last evaluation, for the callbacks of its epoch."""
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-task-")
        if unwritten and not contained:
            saving.warn(flat_model.model, unwritten)

    def do(self, work: TaskWork, flat: npt.NDArray[np.float32], fetch: Fetch) -> Outcome:
        """Run a task of any kind with these parameters."""
        if work.kind == "evaluate":
            return self.evaluate(flat)
        return (
            self.export(flat, fetch, work.history)
            if work.kind == "export"
            else self.run_callbacks(flat, work.history, work.learning_rate)
        )

    def evaluate(self, flat: npt.NDArray[np.float32]) -> Outcome:
        """Run Keras' `evaluate`, or the model's own, on the validation data; metrics as in `fit` (`val_loss`, …).

        Labels and ids are checked as in training. Raises `Unreachable` if the data cannot be read now; the caller then
        repeats the whole evaluation. Raises `Interrupted` if the worker has to leave.
        """
        if self._job.validation is None:
            return Outcome()
        self._flat_model.load(flat)
        model = self._flat_model.model
        with blamed():
            first, rows = begun(self._job, self._flat_model, self._batch_size, self._checked)
            with memory_is_enough(), _without_xla(model), self._flat_model.counted():
                if evaluates_itself(model):
                    results = self._own_evaluate(first)
                else:
                    elements = map(as_keras, itertools.chain([first], rows))
                    results = evaluate(model, (map_leaves(tf.convert_to_tensor, each) for each in elements))
            metrics = dict(_numbers(results))
        model.reset_metrics()
        if self._job.callbacks is not None:
            self._evaluated = metrics, flat
        return Outcome(metrics)

    def _own_evaluate(self, first: Batch) -> Mapping[str, Any]:
        """What the model's own `evaluate` gives for the data set that `fit` would give it."""
        model, ended = self._flat_model.model, list[BaseException]()
        source, size = self._job.validation, self._batch_size
        rows = dataset_of(lambda: self._until_drain(validation_batches(source, size)), first, ended)
        with quiet_end(), as_raised(ended), batches_taken_first(model, "test"):
            results = model.evaluate(x=rows, verbose=0, return_dict=True)
        if not isinstance(results, Mapping):
            kind = type(results).__name__
            raise UserError(
                f"The model's evaluate(return_dict=True) returned a {kind}, not a dict of metrics."
            )
        return results

    def _checked(self, rows: Iterator[Batch]) -> Iterator[Batch]:
        """The batches as a GPU may have them, which reports no label and no id that is wrong."""
        model, rows = self._flat_model.model, self._until_drain(rows)
        if _tests_itself(model):  # it may give such values a meaning
            return rows
        check = LabelCheck(self._flat_model).check

        def checked(batch: Batch) -> Batch:
            try:
                check(batch)
            except UserError as error:
                raise UserError(f"Training(validation=…): {error}") from error
            return batch

        return map(checked, rows)

    def _until_drain(self, rows: Iterator[Batch]) -> Iterator[Batch]:
        for batch in rows:
            if self._drain.is_set():
                raise Interrupted("the worker has to leave")
            self._moved()
            yield batch

    def run_callbacks(
        self,
        flat: npt.NDArray[np.float32],
        history: Sequence[dict[str, float]],
        learning_rate: float | None = None,
    ) -> Outcome:
        """Run the callbacks for the last epoch of `history` (the logs of each epoch so far).

        `learning_rate`: that of the job, if callbacks have set it before.

        With the parameters of its evaluation if that was this worker's, so that a checkpoint contains the model with
        these metrics; else with `flat`.
        """
        if self._evaluated is not None and history and _has(history[-1], self._evaluated[0]):
            flat = self._evaluated[1]
        self._evaluated = None
        self._flat_model.load(flat)
        # Not that of the model, which this worker's callbacks may have set in epochs that the job has lost since.
        before = self._hooks.compiled_rate if learning_rate is None else learning_rate
        stop = self._hooks.run(history, learning_rate)
        rate = rate_of(self._flat_model.model)
        self._hooks.save_if_best(len(history) - 1, flat)
        return Outcome(
            stop=stop,
            files={f"logs/{name}": path for name, path in self._hooks.files()},
            learning_rate=None if rate == before else rate,
        )

    def export(
        self,
        flat: npt.NDArray[np.float32],
        fetch: Fetch | None = None,
        history: Sequence[Mapping[str, float]] = (),
    ) -> Outcome:
        """Save the model: with `EarlyStopping(restore_best_weights=True)` the best one, with `use_ema` the average.

        `history`: the logs of the epochs; (): unknown.
        """
        self._flat_model.load(flat)
        model = self._flat_model.model
        take_average(model)
        note = "model/ contains the moving average of use_ema, and the metrics are of the last parameters"
        notes = [note] if averages(model) else []
        best = self._best(fetch)
        if best is not None:
            self._flat_model.load(best.parameters)
            # It replaced those of the best epoch that is left of the run, which was not as good.
            undone = ", and was undone by a rollback" if history and not best.is_of(history) else ""
            notes = [
                f"model/ contains the parameters of epoch {best.epoch + 1}, which had the best "
                f"{best.monitor}: {best.value:.4g}{undone}; the metrics are of the last parameters"
            ]
        elif (stopping := self._hooks.restoring) is not None:
            notes.append(
                f"model/ contains the last parameters, because no epoch of this run had the best {stopping.monitor}"
            )
        folder = Path(self._folder.name) / "model"
        folder.mkdir(exist_ok=True)
        notes.insert(0, saving.save(model, folder))
        return Outcome(
            files={str(path.relative_to(folder)): path for path in _files(folder)},
            message="; ".join(filter(None, notes)),
        )

    def _best(self, fetch: Fetch | None) -> Best | None:
        """What the callbacks kept, on whichever worker they ran."""
        if self._job.callbacks is None or (self._hooks.made and self._hooks.restoring is None):
            return None
        path = Path(self._folder.name) / best_weights.NAME
        found = fetch is not None and fetch(f"logs/{best_weights.NAME}", path)
        return best_weights.load(path) if found else None

    @property
    def written(self) -> list[str]:
        """What callbacks of the user wrote to relative paths in a rehearsal."""
        return self._hooks.written

    def close(self) -> None:
        """End the callbacks, and delete the temporary files."""
        self._hooks.close()
        self._folder.cleanup()


@contextlib.contextmanager
def _without_xla(model: Any) -> Iterator[None]:
    """XLA would compile the evaluation, and once more for the size of each last batch."""
    before, model.jit_compile = model.jit_compile, False
    try:
        yield
    finally:
        model.jit_compile = before


def evaluated(job: Training, model: keras.Model) -> Sequence[str] | None:
    """The metrics that an evaluation of this model gives, none without validation data; None if that is not known."""
    if job.validation is None:
        return ()
    if _tests_itself(model) or type(model).compute_metrics is not keras.Model.compute_metrics:
        return None
    try:
        return [name for name, _ in _numbers(model.get_metrics_result())]
    except Exception:  # of a metric that has no result before its first batch
        return None


def _tests_itself(model: keras.Model) -> bool:
    return type(model).test_step is not keras.Model.test_step or evaluates_itself(model)


def _numbers(results: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Metrics with the names of `fit`. A metric with several values (F1Score per class) becomes `val_f1_score_0`, …"""
    for name, value in flat_logs(results).items():
        values = np.ravel(value)
        if values.dtype.kind in "OSU":  # None, strings
            log.warning("the metric %s is left out: it is no number", name)
        elif values.size == 1:
            yield f"val_{name}", float(values[0])
        elif values.size <= MAX_VALUES:
            yield from ((f"val_{name}_{index}", float(each)) for index, each in enumerate(values))
        else:
            log.warning(
                "the metric %s is left out: it has %d values, more than %d", name, values.size, MAX_VALUES
            )


def _has(logs: Mapping[str, float], metrics: Mapping[str, float]) -> bool:
    """Whether these logs contain the metrics of an evaluation, of which the coordinator left out non-finite values."""
    return all(logs.get(name) == value for name, value in metrics.items() if math.isfinite(value))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
