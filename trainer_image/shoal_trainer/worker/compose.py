"""Builds a worker from the user's `Training`, the job's configuration and a coordinator client."""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shoal_trainer.contract import RuntimeConfig
from shoal_trainer.data.batch import Batch
from shoal_trainer.data.preprocessed import preprocessed
from shoal_trainer.data.user_code import blamed_on_user, where
from shoal_trainer.errors import HungStep, TrainerError, UserError, WorkerFailed
from shoal_trainer.ps.client import PSClient
from shoal_trainer.security import Credentials
from shoal_trainer.training import Training
from shoal_trainer.wire.messages import ModelSpec, WorkerIdentity
from shoal_trainer.worker.coordination import ControlPlane
from shoal_trainer.worker.exchange import Exchange
from shoal_trainer.worker.feed import Feed
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.keras_internals import names_given_back
from shoal_trainer.worker.label_check import LabelCheck
from shoal_trainer.worker.leases import Leases
from shoal_trainer.worker.loop import End, Loop, Policy
from shoal_trainer.worker.optimizers import Placement, accumulated, place
from shoal_trainer.worker.out_of_memory import memory_is_enough
from shoal_trainer.worker.run_task import run_task
from shoal_trainer.worker.target import check_target
from shoal_trainer.worker.tasks import Outcome, Tasks, evaluated
from shoal_trainer.worker.validation import look
from shoal_trainer.worker.watchdog import FIRST_SECONDS, Watchdog
from shoal_trainer.worker.work import About, TaskWork

log = logging.getLogger(__name__)


@dataclass
class Worker:
    """The parts of a worker."""

    loop: Loop
    flat_model: FlatModel
    spec: ModelSpec
    leases: Leases
    watchdog: Watchdog
    close: Callable[[], None]

    def run(self, on_hang: Callable[[HungStep], None]) -> End:
        """Run until the worker ends; `on_hang` is called from another thread if a step or a task hangs.

        Raises `WorkerFailed` if this worker cannot go on: its memory is too small, or its disk is full.
        """
        self.watchdog.start(on_hang)
        try:
            with memory_is_enough():
                return self.loop.run()
        except WorkerFailed:
            self.leave()
            raise
        finally:
            self.watchdog.stop()

    def leave(self) -> None:
        """Give the leases to the other workers, at the end of one that cannot go on."""
        try:
            self.loop.leave()
        except TrainerError as error:
            log.warning("cannot give back what this worker has leased: %s", error)


@names_given_back()
def build_flat_model(job: Training, config: RuntimeConfig) -> FlatModel:
    """Build the user's model from the first batch of the data.

    Names in it go on after those of its module, parts of which the model may have, also after an attempt that failed.
    `Unreachable` if the data or the model's weights are; `OutOfMemory` if this worker's memory is too small.
    """
    keras.utils.set_random_seed(job.seed)
    with blamed_on_user("Training(model=…)", "Training(model=…) failed"), memory_is_enough():
        model = job.model()
    default = tf.distribute.get_strategy()
    if getattr(model, "distribute_strategy", default) is not default:
        raise UserError(
            "Training(model=…) builds the model in strategy.scope(). Take out strategy.scope(): the workers are "
            "Shoal's, and each of them uses all its GPUs."
        )
    try:
        example = preprocessed(job.data, model).example(config.batch_size)
    except TrainerError:  # an unreachable store, or a full disk, is not an error of the job
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"The data function failed: {where(error)}") from error
    return FlatModel(
        model,
        example,
        job.wire,
        (config.index, config.incarnation, *_continued(config)),
        seed=job.seed,
        reference=config.reference_batch_size or config.batch_size,
    )


def _continued(config: RuntimeConfig) -> tuple[int, ...]:
    """A number of the run that this one continues, which has drawn already what its workers drew first."""
    begin = config.initial_from
    return () if begin is None or begin.weights_only else (zlib.crc32(begin.uri.encode()),)


def steps_per_push(job: Training, model: keras.Model) -> int:
    """The number of batches per push: those whose gradients Keras would accumulate, as often as the job says."""
    return job.batches_per_push * accumulated(model)


def compose(
    job: Training,
    config: RuntimeConfig,
    flat_model: FlatModel,
    coordinator: ControlPlane,
    credentials: Credentials,
    drain: threading.Event,
) -> Worker:
    """Build a worker that is ready to run. `flat_model` is traced."""
    placement = place(
        flat_model.model,
        flat_model.layout,
        config.reference_batch_size or config.batch_size,
        flat_model.found.without_gradient,
        flat_model.found.whole,
    )
    warn_of_data(job, config.reference_batch_size or config.batch_size, flat_model.example)
    warn_of_placement(placement)
    spec = ModelSpec(
        fingerprint=flat_model.layout.fingerprint,
        parameters=flat_model.layout.trainable,
        statistics=flat_model.layout.size - flat_model.layout.trainable,
        averages=flat_model.averages,
        optimizer=placement.config,
    )
    identity = WorkerIdentity(config.job.uid, config.index, config.incarnation)
    exchange = Exchange(
        PSClient(config.parameter_servers, identity, credentials, dtype=job.wire, tls=config.data_tls),
        spec,
        waits=partial(coordinator.set_message, about=About.CONNECTION),
    )
    leases = Leases()
    check_target(config.stop_after, evaluated(job, flat_model.model))
    if (config.index, config.incarnation) == (0, 0):
        look(job, flat_model, config.batch_size)  # once in a job: the evaluation tells it after an epoch
    watchdog = Watchdog()
    tasks = Tasks(job, flat_model, config.batch_size, config.stop_after.epochs, drain, watchdog.moved)

    def do_task(work: TaskWork, flat: npt.NDArray[np.float32]) -> None:
        def attempt() -> Outcome:
            with watchdog.watch(f"the task {work.kind} of epoch {work.epoch + 1}", FIRST_SECONDS):
                return tasks.do(work, flat, partial(coordinator.fetch, work))

        run_task(work, attempt, coordinator, drain)

    worker = (config.index, config.incarnation, *_continued(config))
    feed = Feed(
        preprocessed(job.data.placed(job.seed, worker), flat_model.model),
        config.batch_size,
        lambda: coordinator.next_work(leases.generation, leases.stopped),
        leases.grant,
        coordinator.set_message,
        holds=lambda work: leases.token(work.token) is not None,
        check=LabelCheck(flat_model).check,
    )
    policy = Policy(
        sequential=config.staleness.max == 0,
        rounds=config.staleness.rounds,
        steps_per_push=steps_per_push(job, flat_model.model) if placement.on_server else 1,
        accumulates=accumulated(flat_model.model) > 1,
        on_nan=job.on_nan,
    )
    loop = Loop(
        flat_model,
        placement,
        exchange,
        feed,
        coordinator,
        leases,
        do_task,
        drain,
        policy,
        watch=watchdog.watch,
    )

    def close() -> None:
        feed.stop()
        exchange.close()
        tasks.close()

    return Worker(loop, flat_model, spec, leases, watchdog, close)


def warn_of_data(job: Training, batch_size: int, example: Batch) -> None:
    """Log where these data are not read as Keras reads them. `example`: the first batch."""
    if job.data.remark:
        log.warning("Training(data=…): %s", job.data.remark)
    if (own := job.data.batch_size) not in {None, batch_size}:
        log.warning(
            "Training(data=…): a step has %d samples, and the data have batches of %d, which are %s. To train them as "
            "Keras' fit does: --batch-size %d, or batchSize: %d in a manifest",
            batch_size,
            own,
            "cut" if own > batch_size else "joined where they are of one shape, and padded elsewhere",
            own,
            own,
        )

    if len(files := job.data.describe().files) > 1 and example.samples < example.size:
        log.warning(
            "Training(data=…): a step has samples of one file, and the first of %d files has %d: %d of %d rows are "
            "padding. Use larger files, or Indexed(%d, fn) if each has one sample",
            *(len(files), example.samples, example.size - example.samples, example.size, len(files)),
        )


def warn_of_placement(placement: Placement) -> None:
    """Log where the optimizer is not one for all workers, as Keras has one."""
    if placement.reason:
        log.warning(
            "the optimizer runs on the workers: %s. Each worker has its own optimizer state", placement.reason
        )
