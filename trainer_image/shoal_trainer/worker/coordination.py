"""Implements `work.Coordinator` over the control plane.

A thread joins the coordinator and then sends a heartbeat each second, also while the model is traced or evaluated.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal_trainer.contract import RuntimeConfig
from shoal_trainer.coordinator.control_client import CoordinatorClient
from shoal_trainer.coordinator.protocol import (
    MAX_LEFT_OUT,
    MAX_LIST,
    MAX_TEXT,
    UNKNOWN,
    Assignment,
    DataSpec,
    Diverged,
    Equipment,
    Failed,
    FileEnded,
    Heartbeat,
    Join,
    Lease,
    Leave,
    TaskDone,
    UnsentFiles,
)
from shoal_trainer.data.user_code import blamed_on_user
from shoal_trainer.errors import (
    BadName,
    ProtocolError,
    TrainerError,
    Unauthorized,
    Unreachable,
    UserError,
)
from shoal_trainer.retry import FIRST_PAUSE, Backoff
from shoal_trainer.security import Credentials
from shoal_trainer.training import Training
from shoal_trainer.wire.messages import Progress
from shoal_trainer.worker.beside import Beside
from shoal_trainer.worker.late_files import BUSY, LateFiles, why_unread
from shoal_trainer.worker.work import (
    About,
    DataWork,
    Finished,
    Idle,
    StatusText,
    TaskWork,
    Token,
    Wasted,
    Work,
)

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
UNREAD = 0, 0
"""The size and time of what could not be read, which no file has: the next callbacks try it again."""


class ControlPlane:
    """The coordinator as a worker uses it; `start` begins to join and to send heartbeats."""

    def __init__(
        self,
        config: RuntimeConfig,
        credentials: Credentials,
        job: Training,
        equipment: Callable[[], Equipment] = lambda: UNKNOWN,
        count_flops: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._equipment = equipment
        self._count_flops = count_flops
        self._clock = clock
        self._flops: float | None = None
        """Once they are counted, until they are reported."""
        self._client = CoordinatorClient(
            config.parameter_servers[0], credentials, config.index, config.incarnation
        )
        self._data = spec_of(job)
        self._beside = Beside()
        self._messages: dict[About, StatusText] = dict.fromkeys(About, "")
        self._logged: StatusText = ""
        self._since: dict[About, float] = {}
        """Since when there is a message about something, which may have changed meanwhile."""
        self._uploaded: dict[str, tuple[int, int]] = {}
        """Size and modification time (ns) of each file that is uploaded, or will be by `_late`."""
        self._exported: tuple[Token, dict[str, tuple[int, int]]] = (-1, -1), {}
        """The same of the files of the export under this token."""
        self._left_out: dict[str, str] = {}
        """The files of callbacks that the storage lacks, though none waits for it, and why."""
        self._called: int | None = None
        """The newest epoch whose callbacks this worker has run."""
        self._late = LateFiles(self)
        self._joined = threading.Event()
        self._finished = False
        self._learning_rate: float | None = None
        self._stop = threading.Event()
        self._error: TrainerError | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def watch(self, beside: Beside) -> None:
        """Report this worker's time beside steps with its heartbeats."""
        self._beside = beside

    def start(self) -> None:
        """Begin to join and to send heartbeats."""
        self._thread.start()
        self._late.start()

    def join(self, leases: Mapping[Token, DataWork], wasted: Wasted) -> dict[Token, Token]:
        """Join, or join again with the leases of this worker."""
        unsent = tuple(self._late.copies)
        request = Join(
            **self._client.identity,
            data=self._data,
            batch_size=self._config.batch_size,
            node=self._config.node_name,
            **self._equipment()._asdict(),
            leases=tuple(_lease(work, token) for token, work in leases.items()),
            generation=max((work.generation for work in leases.values()), default=0),
            wasted_steps=wasted.steps,
            wasted_acknowledged=wasted.acknowledged,
            known_samples=wasted.known_samples,
            unsent=unsent,
            called=self._called,
            written=dict(self._late.written),  # after what waits: what was just stored is in neither
        )
        joined = self._client.join(request)
        if unsent:  # some may have arrived before this request did
            self._late.wake()
        self._joined.set()
        return {renamed.old: renamed.new for renamed in joined.renamed}

    def next_work(self, generation: int, stopped: int | None) -> Work:
        """Request work for parameters of this generation. `stopped`: see `Next`."""
        if self._error is not None:
            raise self._error
        if not self._joined.is_set():
            raise Unreachable("the worker has not joined yet")
        return _work(self._client.next_work(generation, stopped), generation)

    def diverged(self, generation: int, batch: Progress, reason: str) -> None:
        """Make the job roll back to its newest snapshot and skip this batch."""
        place = batch._asdict()
        self._client.send(Diverged(**self._client.identity, generation=generation, reason=reason, **place))

    def finished(self) -> bool:
        """Whether a heartbeat was answered that the job has finished. Raises what one was refused with."""
        if self._error is not None:
            raise self._error
        return self._finished

    def learning_rate(self) -> float | None:
        """The learning rate in the answer to the last heartbeat."""
        return self._learning_rate

    def set_message(self, message: StatusText, about: About = About.WORK) -> None:
        """Set a message for the heartbeats."""
        self._messages[about] = message
        if message:
            self._since.setdefault(about, self._clock())
        else:
            self._since.pop(about, None)

    def file_ended(self, token: Token, length: int) -> None:
        """Report that a leased file has `length` samples."""
        self._client.send(FileEnded(**self._client.identity, token=token, length=length))

    def task_done(
        self,
        work: TaskWork,
        metrics: Mapping[str, float],
        files: Mapping[str, Path],
        *,
        stop: bool,
        message: str,
        learning_rate: float | None = None,
    ) -> None:
        """Upload the new and changed files, then send the result.

        An export uploads all files, because the model's manifest lists only files with the task's token; once, though
        the model may have to be published again. Files of callbacks that the storage does not take now follow later.
        """
        if work.kind == "callbacks":
            self._called = work.epoch
        sent = self._upload(work, files)
        left_out, written = dict(self._left_out), dict(self._late.written)  # others are sent meanwhile
        done = TaskDone(
            **self._client.identity,
            token=work.token,
            metrics=dict(metrics),
            files=sent,
            left_out=left_out,
            written={name: written[name] for name in left_out.keys() & written.keys()},
            stop=stop,
            message=message[:MAX_TEXT],
            learning_rate=learning_rate,
        )
        try:
            self._client.send(done)
        except Unreachable as error:  # it may wait for the files
            raise self._late.trouble or error from None

    def _upload(self, work: TaskWork, files: Mapping[str, Path]) -> tuple[str, ...]:
        """Upload what is new or has changed; returns what arrived."""
        exports, sent, late = work.kind == "export", list[str](), dict[str, tuple[int, int]]()
        trouble = None if exports else self._late.trouble
        if exports and self._exported[0] != work.token:
            self._exported = work.token, {}
        stands = self._exported[1] if exports else self._uploaded
        for name, path in files.items():
            state = UNREAD
            try:
                found = path.stat()  # before the upload, so that a later write is uploaded with the next task
                state = found.st_size, found.st_mtime_ns
                if stands.get(name) == state:
                    sent += [name] if exports else []
                    continue
                if trouble is None and self.uploaded(work.token, name, path, leaves_out=not exports):
                    sent.append(name)
                    self._late.written.pop(name, None)
                elif trouble is None:
                    self._late.written[name] = work.epoch
            except Unreachable as error:
                if exports:
                    raise
                trouble = error
            except OSError as error:
                if exports:
                    raise
                self.leave_out(name, why_unread(error))
                self._late.written[name], state = work.epoch, UNREAD
            (stands if trouble is None else late)[name] = state
        if trouble is not None and late:
            taken = self._late.add({name: files[name] for name in late}, work.epoch, trouble)
            self._uploaded |= {name: late[name] for name in taken}
        return tuple(sent)

    def uploaded(self, token: Token, name: str, path: Path, *, leaves_out: bool = True) -> bool:
        """Upload a file; False if it is left out: the storage can never have it. `OSError` if nobody can read it."""
        try:
            self._client.upload(token, name, path)
        except Unauthorized:  # a ProtocolError, but not the fault of the name
            raise
        except OSError as error:
            if error.errno in BUSY:
                raise Unreachable(f"the worker cannot read {name}: {error.strerror}") from error
            raise
        except (BadName, ProtocolError) as error:
            if not leaves_out:
                raise
            self.leave_out(name, str(error))
            return False
        self._left_out.pop(name, None)
        return True

    def leave_out(self, name: str, why: str) -> None:
        """Tell that the storage lacks this file, until it is uploaded."""
        if name not in self._left_out:
            log.warning("%s is left out: %s", name, why)
        if len(self._left_out) < MAX_LEFT_OUT:
            self._left_out[name] = why[:MAX_TEXT]

    def announce(self, copies: Mapping[str, int], written: Mapping[str, int]) -> None:
        """Say which files come later, the number of the copy of each, and of which epochs they are.

        `Overtaken` if others have run callbacks since.
        """
        self._client.send(self._word(copies, written))

    def _word(self, copies: Mapping[str, int], written: Mapping[str, int]) -> UnsentFiles:
        return UnsentFiles(
            **self._client.identity,
            names=tuple(copies),
            copies=tuple(copies.values()),
            called=self._called,
            written=dict(written),
            left_out=dict(self._left_out),
        )

    def forget(self, name: str) -> None:
        """This file was not sent: the next callbacks of this worker upload it again."""
        self._uploaded.pop(name, None)

    def fetch(self, work: TaskWork, name: str, path: Path) -> bool:
        """Get a file of an earlier task, for an export; False if there is none."""
        return self._client.download(work.token, name, path)

    def leave(self, wasted: Wasted, seconds: float) -> None:
        """Leave the job, within `seconds`. Files of callbacks that the storage has not taken are lost."""
        self._late.stop()
        files = self._word(self._late.numbers, self._late.written)  # in this order: see `join`
        counts = {"wasted_steps": wasted.steps, "wasted_acknowledged": wasted.acknowledged}
        self._client.send(Leave(**self._client.identity, **counts, files=files), seconds)

    def end_requests(self) -> None:
        """Wait for no answer any more but that to `leave`."""
        self._client.end_requests()

    def failed(self, error: Exception) -> None:
        """Report an error in the user's code."""
        self._client.send(Failed(**self._client.identity, message=str(error)[:MAX_TEXT]))

    def close(self) -> None:
        """Stop the heartbeats."""
        self._stop.set()
        self._client.close()  # first: the thread of `_late` may wait for an answer
        self._late.close()

    def _message_text(self) -> str:
        """The message of this heartbeat. A callable is logged here, because its thread may be blocked."""
        for message in self._messages.values():
            text = message() if callable(message) else message
            if text and callable(message) and message is not self._logged:
                self._logged = message
                log.warning("%s", text)
            if text:
                return text[:MAX_TEXT]
        return ""

    def _beat(self) -> None:
        now = self._clock()
        flops, (tasks, waits) = self._flops, self._beside.passed(now)
        beat = Heartbeat(
            **self._client.identity,
            message=self._message_text(),
            flops_per_sample=flops,
            task_seconds=tasks,
            wait_seconds=waits,
            reading_seconds=max(0.0, now - self._since.get(About.WORK, now)),
            outage_seconds=max(0.0, now - self._since.get(About.OUTAGE, now)),
        )
        alive = self._client.heartbeat(beat)
        self._finished, self._learning_rate = alive.finished, alive.learning_rate
        if flops is not None:
            self._flops = None
        if alive.count_flops:  # tracing takes seconds for a large model, in which heartbeats must go on
            threading.Thread(target=self._count, name="count-flops", daemon=True).start()

    def _count(self) -> None:
        self._flops = self._count_flops()

    def _run(self) -> None:
        backoff = Backoff(FIRST_PAUSE, HEARTBEAT_SECONDS)
        while not self._stop.is_set():
            try:
                if self._joined.is_set():
                    self._beat()
                else:
                    self.join({}, Wasted())
            except Unreachable as error:
                if not self._joined.is_set() and backoff.is_new(error):
                    log.warning("cannot join yet: %s; retrying", error)
                backoff.wait(self._stop)
            except TrainerError as error:
                self._error = error
                self._joined.set()
                return
            else:
                backoff.reset()
                self._stop.wait(HEARTBEAT_SECONDS)


def spec_of(job: Training) -> DataSpec:
    """The job's data as a message. Raises `UserError` if the list of files is too long.

    Reads some samples: `Unreachable` if their storage is.
    """
    extent = job.data.describe()
    with blamed_on_user("the training data", "The data function failed"):
        probes = job.data.probes()
    spec = DataSpec(
        size=extent.size,
        files=extent.files,
        seed=job.seed,
        order=extent.order
        and f"{extent.order} with the seed {job.seed if extent.seed is None else extent.seed}",
        probes=probes.numbers,
        scales=probes.scales,
        block=job.data.block,
        validation=job.validation is not None,
        callbacks=job.callbacks is not None,
    )
    if (length := len(spec.to_json().encode())) > MAX_LIST:
        raise UserError(
            f"The training data are {len(spec.files):,} files, whose names take {length / 2**20:.0f} MiB; at most "
            f"{MAX_LIST >> 20} MiB can be sent. Put more samples into each file."
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


def _work(assignment: Assignment, generation: int) -> Work:
    if assignment.kind == "data" and assignment.lease is not None:
        lease = assignment.lease
        positions = (lease.epoch, lease.start, lease.stop, lease.file, lease.number)
        return DataWork(lease.token, *positions, generation)
    if assignment.kind == "task" and assignment.task is not None:
        known = assignment.epoch, assignment.history, assignment.learning_rate
        return TaskWork(assignment.token, assignment.task, *known)
    if assignment.kind == "finished":
        return Finished(assignment.message)
    return Idle(assignment.seconds)
