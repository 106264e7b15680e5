"""The process `shoal-trainer work`: from the environment to an exit code.

The SIGTERM handler is installed before TensorFlow is imported. It exits at once until the worker holds leases; then it
sets a flag that the loop checks after each step. A `UserError` exits with `EXIT_USER` and a termination message.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from shoal_trainer.contract import (
    EXIT_DRAINED,
    EXIT_OK,
    RuntimeConfig,
)
from shoal_trainer.environment import configuration, use_tensorflow
from shoal_trainer.errors import Fenced, HungStep, TrainerError, Unreachable, UserError, WorkerFailed
from shoal_trainer.retry import until_reachable
from shoal_trainer.termination.deadline import end_soon
from shoal_trainer.termination.exits import exit_code, log_to_stderr, write_failure
from shoal_trainer.termination.sigterm import in_thread
from shoal_trainer.worker.hardware import (
    device_name,
    equipment,
    fitted,
    promised_accelerators,
    require_accelerators,
    shared_by,
)

if TYPE_CHECKING:
    from shoal_trainer.coordinator.protocol import Equipment
    from shoal_trainer.security import Credentials
    from shoal_trainer.training import Training
    from shoal_trainer.worker.compose import Worker
    from shoal_trainer.worker.coordination import ControlPlane
    from shoal_trainer.worker.flat_model import FlatModel

log = logging.getLogger(__name__)

EXIT_FAILED = 1


class Drain:
    """SIGTERM as a flag; before `hold` it ends the process at once, with exit code 143."""

    def __init__(self) -> None:
        self.flag = threading.Event()
        self._set = in_thread(self._drain)
        self._then: Callable[[], None] | None = None
        signal.signal(signal.SIGTERM, self._handle)

    def hold(self, then: Callable[[], None]) -> None:
        """Let the loop handle SIGTERM, because the worker may hold leases. A thread calls `then` beside it."""
        self._then = then

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self._then is None:
            os._exit(EXIT_DRAINED)
        self._set()

    def _drain(self, _at: float) -> None:
        self.flag.set()
        assert self._then is not None
        self._then()


def main() -> int:
    """Run the worker configured by `$SHOAL_CONFIG`; returns the exit code."""
    started = time.monotonic()
    drain = Drain()
    log_to_stderr()
    try:
        use_tensorflow()
        config = configuration()
        try:
            return _work(config, drain, started)
        except SystemExit as error:  # exit code 0 would mean that the job has ended
            from shoal_trainer.data.user_code import where

            raise UserError(f"The job's code ends the process: {where(error)}. Remove this call.") from error
    except (UserError, Fenced) as error:
        if isinstance(error, Fenced):
            faulthandler.dump_traceback()  # if it was fenced for a read that hangs: where
        return exit_code(error)
    except WorkerFailed as error:
        return _failed(error)
    except Exception as error:
        traceback.print_exc()
        write_failure("InternalError", repr(error))
        return EXIT_FAILED


def _failed(error: WorkerFailed) -> int:
    """Say why this worker ends; returns the exit code, with which it is replaced."""
    log.error("%s", error)
    if isinstance(error, HungStep):
        faulthandler.dump_traceback()
    write_failure(type(error).__name__, str(error))
    return EXIT_FAILED


def abandon(worker: Worker, error: HungStep) -> None:
    """End this process although its main thread is in a step that does not end. For the watchdog's thread."""
    code = _failed(error)
    end_soon(code)
    try:
        worker.leave()
    finally:
        os._exit(code)


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Disable garbage collection in this block, and exclude its objects from later collections: most live forever."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _code(config: RuntimeConfig, credentials: Credentials) -> Path | None:
    """The archive with the job's code, if it lies in the storage. It is there until this process ends."""
    if not config.code_digest:
        return None
    from shoal_trainer.worker.code_client import fetch

    folder = tempfile.mkdtemp(prefix="shoal-code-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return until_reachable(partial(fetch, config, credentials, Path(folder)), "the job's code")


def _built(job: Training, config: RuntimeConfig) -> FlatModel:
    """One attempt to build the model."""
    from shoal_trainer.worker.compose import build_flat_model
    from shoal_trainer.worker.out_of_memory import memory_is_enough

    try:
        with memory_is_enough():
            return build_flat_model(job, config)
    except Unreachable:
        gc.collect()  # each attempt leaves a model, and automatic collection is disabled
        raise


def _hurry(worker: Worker, coordinator: ControlPlane, sleep: Callable[[float], object] = time.sleep) -> None:
    """The worker is to stop, and may be in a request that has 10 s, or 600 s for a file: it has 20 s in all."""
    sleep(worker.loop.upstream.answers.left())
    coordinator.end_requests()


def _work(config: RuntimeConfig, drain: Drain, started: float) -> int:
    os.environ.update(shared_by(1, config.cores))  # TensorFlow reads it when it is imported
    with _no_garbage():  # a collection over all objects of TensorFlow is slow
        from shoal_trainer.security import Credentials
        from shoal_trainer.worker.entrypoint import load

        credentials = Credentials.load(config.secret_dir)
        archive = _code(config, credentials)
        job = until_reachable(lambda: load(config.entrypoint, config.args, archive=archive), "the data")

        from shoal_trainer.worker.compose import compose
        from shoal_trainer.worker.coordination import ControlPlane
        from shoal_trainer.worker.loop import End
        from shoal_trainer.worker.work import reporting

        imported = time.monotonic()
        require_accelerators(promised_accelerators())
        device = device_name()
        config = fitted(config, device)

        flat_model = until_reachable(partial(_built, job, config), "the data")

        def facts() -> Equipment:
            devices, layout = flat_model.device_count, flat_model.layout
            return equipment(device, devices, layout.tensors, config.cores, flat_model.precision)

        coordinator = until_reachable(
            lambda: ControlPlane(config, credentials, job, facts, flat_model.flops_per_sample), "the data"
        )
        coordinator.start()  # send heartbeats while the model is traced
        flat_model.trace()
    traced = time.monotonic()
    if flat_model.model.jit_compile:
        with reporting(coordinator, "the compilation of the training step", time.monotonic):
            flat_model.compile()  # before this worker holds leases
    compiled = time.monotonic()
    log.info(
        "ready in %.1f s: import %.2f s, build and trace %.2f s, compile %.2f s, %d parameters, batches of %d on %s",
        compiled - started, imported - started, traced - imported, compiled - traced, flat_model.layout.size,
        config.batch_size, device,
    )  # fmt: skip
    worker = compose(job, config, flat_model, coordinator, credentials, drain.flag)
    coordinator.watch(worker.loop.beside)
    drain.hold(partial(_hurry, worker, coordinator))
    try:
        end = worker.run(partial(abandon, worker))
    except UserError as error:
        try:
            coordinator.failed(error)
        except Fenced:  # the job goes on without this worker
            log.warning("an error of a fenced worker: %s", error)
            raise
        except TrainerError as unsent:
            log.warning("cannot report the error to the coordinator: %s", unsent)
        raise
    finally:
        worker.close()
        coordinator.close()
    return EXIT_OK if end is End.FINISHED else EXIT_DRAINED
