"""Everything that a worker does once, done in seconds on this machine: `shoal-trainer check`.

A cluster finds a mistake only where it happens: in the first step, after the first epoch, on a GPU, at the export. Each
of these is tried here on one batch with the worker's own code, and the rehearsal goes on after an error, so one run
names everything at once. Nothing is sent, nothing is stored; callbacks see two epochs, in a folder of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import keras

from shoal_trainer.contract import JobIdentity, Role, RuntimeConfig, StopAfter
from shoal_trainer.data.adapt import ClassWeights
from shoal_trainer.data.arrays import Arrays
from shoal_trainer.data.batch import Batch, leaves
from shoal_trainer.data.downloads import Download
from shoal_trainer.data.mapped import Mapped
from shoal_trainer.data.preprocessed import preprocessed
from shoal_trainer.data.source import Extent, Part, Source
from shoal_trainer.data.user_code import where
from shoal_trainer.errors import TrainerError, UserError
from shoal_trainer.ps.memory import needed
from shoal_trainer.training import Training
from shoal_trainer.worker.alone import validation_batches
from shoal_trainer.worker.callbacks import NOT_WRITTEN
from shoal_trainer.worker.compose import build_flat_model, warn_of_data, warn_of_placement
from shoal_trainer.worker.entrypoint import load
from shoal_trainer.worker.flat_model import FlatModel, Step
from shoal_trainer.worker.inputs import described
from shoal_trainer.worker.keras_internals import model_supports_jit, names_given_back
from shoal_trainer.worker.label_check import LabelCheck
from shoal_trainer.worker.optimizers import place
from shoal_trainer.worker.packages import beside_the_image
from shoal_trainer.worker.target import check_target
from shoal_trainer.worker.tasks import Tasks, evaluated
from shoal_trainer.worker.xla import INSTEAD, as_on_gpu, left_to_keras, unsupported

State = Literal["ok", "warning", "error", "skipped"]
LOOK_BATCHES = 64
"""How many batches of the validation are read, to find one of each shape."""
EPOCHS = 2
"""That callbacks see: what they do before an epoch may differ from the second one on."""
PLACES = {True: "parameter servers", False: "workers"}


@dataclass
class Finding:
    """What one part of the rehearsal showed. `message`: what it found, or what to change."""

    part: str
    state: State = "ok"
    message: str = ""
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class BatchOfEachShape(Source):
    """A data source of a few batches that were read already."""

    batches: tuple[Batch, ...]

    def describe(self) -> Extent:
        """As many samples as the batches have."""
        return Extent(sum(batch.samples for batch in self.batches))

    def read(self, part: Part, batch_size: int, download: Download | None = None) -> Iterator[Batch]:  # noqa: ARG002
        """Yield the batches."""
        yield from self.batches

    def example(self, batch_size: int) -> Batch:  # noqa: ARG002
        """The first batch."""
        return self.batches[0]


class Rehearsal:
    """Tries a job. `findings` grows part by part; `report` is called with each when it is complete."""

    def __init__(
        self,
        entrypoint: str,
        args: dict[str, Any],
        *,
        batch_size: int,
        stop_after: StopAfter,
        workers: int = 1,
        folder: Path | None = None,
        report: Callable[[Finding], None] = lambda _: None,
    ) -> None:
        self.findings: list[Finding] = []
        self._entrypoint, self._args, self._folder = entrypoint, args, folder
        self._stop_after, self._workers, self._report = stop_after, workers, report
        self._config = RuntimeConfig(
            job=JobIdentity(namespace="check", name="check", uid="check"), role=Role.WORKER, index=0, incarnation=0,
            parameter_servers=(), entrypoint=entrypoint, args=args, batch_size=batch_size, storage_uri="",
        )  # fmt: skip

    @property
    def passed(self) -> bool:
        """Whether nothing was found that would end the job on a cluster."""
        return not any(finding.state == "error" for finding in self.findings)

    def run(self) -> bool:
        """Try all parts; returns `passed`. Parts that need one that failed are skipped."""
        with left_to_keras() as chosen:
            job = self._part("import", lambda _: self._load())
            if job is None:
                return False
            model = self._part("model and data", lambda say: self._build(job, say))
        if model is None:
            return False
        step = self._part("training step", lambda say: self._step(model, say, job.data))
        if step is not None:
            self._part("as on a GPU", lambda say: self._step_as_on_gpu(job, model, chosen, say))
        self._part("amount of data", lambda say: self._amount(job, model, say))
        validation = self._part("validation", lambda say: self._validation(job, say))
        judged = dataclasses.replace(job, validation=validation)
        self._part("target", lambda say: self._target(judged, model, say))
        metrics = self._part("evaluation", lambda say: self._evaluate(judged, model, say))
        self._part("callbacks", lambda say: self._callbacks(judged, model, step, metrics or {}, say))
        self._part("export", lambda say: self._export(judged, model, say))
        return self.passed

    def _part(self, name: str, attempt: Callable[[Callable[[str], None]], Any]) -> Any:
        """Run one part; None if it failed. What it logs as a warning, and what it says, becomes its message."""
        finding, said, start = Finding(name), list[str](), time.monotonic()
        result = None
        try:
            with _warnings() as found:
                result = attempt(said.append)
        except TrainerError as error:
            finding.state, said = "error", [str(error)]
        except (Exception, SystemExit) as error:
            finding.state, said = "error", [where(error)]
        told = {words for each in self.findings for words in each.warnings}
        finding.warnings = [words for words in dict.fromkeys(found) if words not in told]
        if finding.warnings and finding.state == "ok":
            finding.state = "warning"
        finding.message, finding.seconds = ". ".join(said), time.monotonic() - start
        self.findings.append(finding)
        self._report(finding)
        return result

    def _load(self) -> Training:
        job = load(self._entrypoint, self._args, self._folder)
        module = sys.modules[self._entrypoint.partition(":")[0]]
        if missing := beside_the_image(Path(module.__file__ or "")):
            _log.warning(
                "%s: on this machine, and not in Shoal's worker image; the job needs an image of your own "
                "(docs/install.md, Your image)",
                ", ".join(missing),
            )
        return job

    def _build(self, job: Training, say: Callable[[str], None]) -> FlatModel:
        with names_given_back(always=True):  # for the model as on a GPU
            model = build_flat_model(job, self._config)
        say(f"{model.layout.size:,} parameters, {_bytes(model.wire_bytes)} in each push and pull")
        say(f"a batch is {described(model.example)}")
        return model

    def _step(self, model: FlatModel, say: Callable[[str], None], data: Source | None = None) -> Step:
        """One step; of `data` in memory all labels are looked at, not only those of the batch."""
        model.trace()
        check = LabelCheck(model).check
        check(model.example)
        if (labels := None if data is None else _labels(preprocessed(data, model.model))) is not None:
            check(labels)
        step = model.step(model.vector.alias(model.coded(model.vector.dtype)), model.example)
        if not step.finite:
            raise UserError(
                f"The loss of the first batch is {step.loss}, or its gradient is not finite. Look for zeros in "
                "divisions and logarithms, for NaN in the data, and for a learning rate that is much too high."
            )
        found = model.found
        placement = place(
            model.model, model.layout, self._config.batch_size, found.without_gradient, found.whole
        )
        warn_of_placement(placement)
        say(f"loss {step.loss:.4g}; the optimizer runs on the {PLACES[placement.on_server]}")
        say(f"one parameter server needs {_bytes(needed(model.layout.size, placement.config))} of memory")
        return step

    def _step_as_on_gpu(
        self, job: Training, first: FlatModel, chosen: list[keras.Model], say: Callable[[str], None]
    ) -> None:
        """On a GPU, Keras compiles the step with XLA, unless `compile(jit_compile=False)` says otherwise.

        `first`: the model that was built before. `chosen`: models for which Keras chose already. One that was compiled
        before it was asked for would keep the choice for this machine.
        """
        with as_on_gpu():
            model = build_flat_model(job, self._config)
        # Keras' optimizer knows the variables of one model.
        shared = model.model.optimizer is first.model.optimizer and model.model is not first.model
        if shared and not first.on_server:
            say(
                "not tried: the optimizer is made outside of Training(model=…), and is that of the model before"
            )
            return
        before = model.model.jit_compile
        if any(model.model is each for each in chosen):
            model.model.jit_compile = model_supports_jit(model.model)
        try:
            self._compiles(model, say)
        finally:
            model.model.jit_compile = before
        if model.why_one_device:
            say(f"of several GPUs of a worker one computes: {model.why_one_device}")

    def _compiles(self, model: FlatModel, say: Callable[[str], None]) -> None:
        if not model.model.jit_compile:
            say(
                "XLA is off for this model, by compile() or because Keras knows a layer that XLA cannot compile"
            )
            return
        try:
            self._step(model, lambda _: None)
        except UserError as error:
            what = f"{words}. {INSTEAD}" if (words := unsupported(error)) else str(error)
            raise UserError(
                f"XLA, which Keras uses on a GPU, cannot run the training step: {what}"
            ) from error
        say("the training step compiles with XLA")

    def _amount(self, job: Training, model: FlatModel, say: Callable[[str], None]) -> None:
        extent, size = job.data.describe(), self._config.batch_size
        warn_of_data(job, size, model.example)
        if extent.size is None:
            say(f"{len(extent.files)} files; their lengths are learned in the first epoch")
            if len(extent.files) < self._workers:
                _log.warning(
                    "a worker reads a file at a time: %d files keep no more than %d of %d workers busy",
                    *(len(extent.files), len(extent.files), self._workers),
                )
            return
        steps = math.ceil(extent.size / size)
        say(f"{extent.size:,} samples, {_count(steps, 'step')} in an epoch")
        if size > extent.size:
            _log.warning(
                "a batch of %s is more than all %s: the rest of each is padding, which is computed, too. Use a smaller "
                "batch size",
                *(f"{size:,}", _count(extent.size, "sample")),
            )
        if self._workers > 1 and steps < 10 * self._workers:
            _log.warning(
                "%s in an epoch: few for %s, since asynchronous training needs many small steps. Use a smaller batch "
                "size, or fewer workers",
                *(_count(steps, "step"), f"{self._workers} workers"),
            )

    def _validation(self, job: Training, say: Callable[[str], None]) -> Source | None:
        if job.validation is None:
            say("none: there will be no val_… metrics")
            return None
        found: dict[Any, Batch] = {}
        for batch in itertools.islice(
            validation_batches(job.validation, self._config.batch_size), LOOK_BATCHES
        ):
            found.setdefault(tuple(tuple(leaf.shape) for leaf in leaves((batch.x, batch.y))), batch)
        each = BatchOfEachShape(tuple(found.values()))
        what = "a batch" if len(found) == 1 else f"a batch of each of {len(found)} shapes,"
        say(f"{what} of {each.describe().size} samples was read")
        return each

    def _target(self, job: Training, model: FlatModel, say: Callable[[str], None]) -> None:
        check_target(self._stop_after, evaluated(job, model.model))
        name, value = self._stop_after.metric, self._stop_after.value
        say(f"training stops when {name} reaches {value:g}" if name is not None else "none")

    def _evaluate(self, job: Training, model: FlatModel, say: Callable[[str], None]) -> dict[str, float]:
        with self._tasks(dataclasses.replace(job, callbacks=None), model) as tasks:
            metrics = tasks.evaluate(model.initial()).metrics
        say(", ".join(f"{name} {value:.4g}" for name, value in metrics.items()) or "nothing to evaluate")
        return metrics

    def _callbacks(
        self,
        job: Training,
        model: FlatModel,
        step: Step | None,
        metrics: dict[str, float],
        say: Callable[[str], None],
    ) -> None:
        if job.callbacks is None:
            say("none")
            return
        trained = {each.name: each.total / (each.weight or 1.0) for each in (step.metrics if step else ())}
        with self._tasks(job, model) as tasks:
            logs = {"loss": step.loss if step else 0.0, **trained, **metrics}
            files = dict.fromkeys(
                name
                for epoch in range(EPOCHS)
                for name in tasks.run_callbacks(model.initial(), [logs] * (epoch + 1)).files
            )
            say("ran for two epochs" + (f"; they write {', '.join(files)}" if files else ""))
            if written := tasks.written:
                names = ", ".join(written)
                _log.warning(
                    "they write %s to the current folder, which a pod cannot. %s", names, NOT_WRITTEN
                )

    def _export(self, job: Training, model: FlatModel, say: Callable[[str], None]) -> None:
        with self._tasks(dataclasses.replace(job, callbacks=None, validation=None), model) as tasks:
            outcome = tasks.export(model.initial())
            sizes = {name: path.stat().st_size for name, path in outcome.files.items()}
        say(f"{len(sizes)} files, {_bytes(sum(sizes.values()))}")
        if outcome.message:
            _log.warning("%s", outcome.message)

    @contextlib.contextmanager
    def _tasks(self, job: Training, model: FlatModel) -> Iterator[Tasks]:
        tasks = Tasks(job, model, self._config.batch_size, EPOCHS, threading.Event(), contained=True)
        try:
            yield tasks
        finally:
            tasks.close()


def _labels(data: Source) -> Batch | None:
    """The labels of arrays in memory as one batch."""
    if isinstance(data, Mapped) and isinstance(data.function, ClassWeights):
        data = data.source
    if not isinstance(data, Arrays):
        return None
    return Batch(x=None, y=data.y, weights=None, samples=data.size, end=data.size)


_log = logging.getLogger(__name__)


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what the trainer logs as a warning instead of printing it."""
    found: list[str] = []
    logger = logging.getLogger("shoal_trainer")

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, propagate = Collector(logging.WARNING), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
