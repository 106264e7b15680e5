"""The coordinator as the worker's loop sees it: `work.Coordinator` over the control plane.

A thread joins as soon as it reaches the coordinator and then sends a heartbeat each second, also while the model is
traced or evaluated, so that a worker that is silent has really stopped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from shoal_trainer.contract import RuntimeConfig
from shoal_trainer.coordinator.client import CoordinatorClient
from shoal_trainer.coordinator.protocol import MAX_LIST, MAX_TEXT, DataSpec, Given, Lease
from shoal_trainer.errors import TrainerError, Unreachable, UserError
from shoal_trainer.security import Credentials
from shoal_trainer.training import Training
from shoal_trainer.wire.messages import Progress
from shoal_trainer.worker.work import DataWork, Finished, Idle, TaskWork, Token, Wasted, Words, Work

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
RETRY_SECONDS = 0.25


class ControlPlane:
    """Implements `work.Coordinator`; `start` begins to join and to send heartbeats."""

    def __init__(self, config: RuntimeConfig, credentials: Credentials, job: Training) -> None:
        self._config = config
        self._client = CoordinatorClient(
            config.parameter_servers[0], credentials, config.index, config.incarnation
        )
        self._data = _spec(job)
        self._message: Words = ""
        self._logged: Words = ""
        self._stored: dict[str, tuple[int, int]] = {}
        """Size and time (ns) of each file of a task, as the coordinator took it last."""
        self._joined = threading.Event()
        self._finished = False
        self._stop = threading.Event()
        self._error: TrainerError | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to join and to send heartbeats."""
        self._thread.start()

    def join(self, held: Mapping[Token, DataWork], wasted: Wasted) -> dict[Token, Token]:
        """Join, or join again, with the leases that are held."""
        joined = self._client.join(
            self._data,
            self._config.batch_size,
            node=self._config.node_name,
            pool=self._config.pool,
            held=tuple(_lease(work, token) for token, work in held.items()),
            generation=max((work.generation for work in held.values()), default=0),
            wasted_steps=wasted.steps,
            wasted_told=wasted.told,
        )
        self._joined.set()
        return {renamed.old: renamed.new for renamed in joined.renamed}

    def next_work(self, generation: int) -> Work:
        """Ask for something to do, with parameters of this generation."""
        if self._error is not None:
            raise self._error
        if not self._joined.is_set():
            raise Unreachable("not joined yet")
        return _work(self._client.next_work(generation), generation)

    def diverged(self, generation: int, batch: Progress, what: str) -> None:
        """Have the job go back to its newest snapshot, and this batch left out."""
        self._client.diverged(generation, batch, what)

    def finished(self) -> bool:
        """Whether a heartbeat has learned that the job has finished."""
        return self._finished

    def say(self, message: Words) -> None:
        """Have the heartbeats carry this."""
        self._message = message

    def file_ended(self, token: Token, length: int) -> None:
        """Tell that a leased file has `length` samples."""
        self._client.file_ended(token, length)

    def task_done(
        self,
        work: TaskWork,
        metrics: Mapping[str, float],
        files: Mapping[str, Path],
        *,
        stop: bool,
        message: str,
    ) -> None:
        """Stream what of the files is not in the storage as it is now, then give back the task.

        A model goes whole: its manifest is made of what came with the task's own token.
        """
        sent = []
        for name, path in files.items():
            found = path.stat()  # before it is read: what is written meanwhile goes with the next task
            state = found.st_size, found.st_mtime_ns
            if work.kind == "export" or self._stored.get(name) != state:
                self._client.upload(work.token, name, path)
                sent.append(name)
                self._stored[name] = state
        self._client.task_done(work.token, metrics, tuple(sent), stop=stop, message=message)

    def leave(self) -> None:
        """Say goodbye."""
        self._client.leave()

    def failed(self, error: Exception) -> None:
        """Tell that the user's code is at fault."""
        self._client.failed(str(error))

    def close(self) -> None:
        """No more heartbeats."""
        self._stop.set()
        self._client.close()

    def _spoken(self) -> str:
        """What this heartbeat says. Who is asked cannot log it himself: he waits."""
        message = self._message
        if not callable(message):
            return message[:MAX_TEXT]
        text = message()
        if text and message is not self._logged:
            self._logged = message
            log.warning("%s", text)
        return text[:MAX_TEXT]

    def _run(self) -> None:
        said = ""
        while not self._stop.is_set():
            seconds = HEARTBEAT_SECONDS
            try:
                if self._joined.is_set():
                    self._finished = self._client.heartbeat(self._spoken())
                else:
                    self.join({}, Wasted())
            except Unreachable as error:
                if not self._joined.is_set() and str(error) != said:
                    said = str(error)
                    log.warning("cannot join yet: %s; trying again until it works", said)
                seconds = RETRY_SECONDS
            except TrainerError as error:
                self._error = error
                self._joined.set()
                return
            self._stop.wait(seconds)


def _spec(job: Training) -> DataSpec:
    """What the job's data are. Raises `UserError` where their list is too long to be told."""
    extent = job.data.describe()
    spec = DataSpec(
        size=extent.size,
        files=extent.files,
        validation=job.validation is not None,
        callbacks=job.callbacks is not None,
    )
    if (length := len(spec.to_json().encode())) > MAX_LIST:
        raise UserError(
            f"The training data are {len(spec.files):,} files, whose names take {length / 2**20:.0f} MiB; at most "
            f"{MAX_LIST >> 20} MiB can be told. Put more samples into each file."
        )
    return spec


def _lease(work: DataWork, token: Token) -> Lease:
    return Lease(
        term=token[0],
        counter=token[1],
        epoch=work.epoch,
        start=work.start,
        stop=work.stop,
        file=work.file,
        number=work.number,
    )


def _work(given: Given, generation: int) -> Work:
    if given.kind == "data" and given.lease is not None:
        lease = given.lease
        place = (lease.epoch, lease.start, lease.stop, lease.file, lease.number)
        return DataWork(lease.token, *place, generation)
    if given.kind == "task" and given.task is not None:
        return TaskWork(given.token, given.task, given.epoch, given.history)
    return Finished(given.message) if given.kind == "finished" else Idle(given.seconds)
