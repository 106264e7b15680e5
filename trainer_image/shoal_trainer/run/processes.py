"""Runs a job as processes on this machine, for `shoal-trainer run`.

Parameter servers and workers are the same programs as in the pods, with the same `RuntimeConfig`. A process that ends
too early is replaced by its next incarnation, as the operator replaces a pod. The job ends with the termination message
of parameter server 0, or with the `UserError` of a worker.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal_trainer.contract import (
    BATCH_SIZE,
    CONFIG_ENV,
    EXIT_OK,
    EXIT_USER,
    STATUS_PATH,
    InitialFrom,
    JobIdentity,
    Outcome,
    Role,
    RuntimeConfig,
    Shard,
    SnapshotPolicy,
    Staleness,
    StatusReport,
    StopAfter,
    TerminationMessage,
    status_token,
)
from shoal_trainer.errors import OutOfMemory
from shoal_trainer.security import Credentials, create_secret_dir
from shoal_trainer.snapshot.storage import open_storage
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.termination.orphans import PARENT_ENV
from shoal_trainer.termination.termination_log import TERMINATION_LOG_ENV
from shoal_trainer.worker.hardware import accelerators_of, shared_by
from shoal_trainer.worker.work import JOINED

MAX_WARNINGS = 10
MAX_FAILURES = 10
"""The run fails after this many processes have failed without being killed by this process."""

STOP_SECONDS = {Role.WORKER: 15.0, Role.PS: 60.0}
"""How long `suspend` waits: for the workers' last pushes, and for the final snapshot."""

DONE_PATIENCE = 15.0
"""A process that has exited 0 is replaced if the job has not ended after this many seconds."""


@dataclass(frozen=True)
class LocalJob:
    """The options of `shoal-trainer run`."""

    entrypoint: str
    workers: int = 1
    parameter_servers: int = 1
    batch_size: int = BATCH_SIZE
    stop_after: StopAfter = StopAfter(epochs=1)
    args: dict[str, Any] = field(default_factory=dict)
    storage_uri: str = "file:///tmp/shoal-runs"
    initial_from: InitialFrom | None = None
    snapshot_seconds: int = 10
    staleness: Staleness = Staleness()
    data_tls: bool = False
    kill_every: float | None = None
    kill: str = "any"
    never_killed: frozenset[tuple[Role, int]] = frozenset()
    """The (role, index) that `kill_every` leaves out."""
    seed: int | None = None


@dataclass
class Process:
    """The current process of one (role, index)."""

    role: Role
    index: int
    incarnation: int
    popen: subprocess.Popen[bytes]
    log: Path
    termination: Path
    started_at: float = 0.0
    killed: bool = False
    done_at: float | None = None
    """When its exit code 0 was first seen."""

    @property
    def name(self) -> str:
        """The name, as a pod's without the job."""
        return f"{self.role.value}-{self.index}-{self.incarnation}"


class LocalRun:
    """The processes of one job. A context manager, which ends them all."""

    def __init__(self, job: LocalJob, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.job = job
        self.processes: list[Process] = []
        self.kills = 0
        self.too_often = ""
        """Says that a worker was killed before it had joined: training may never go on."""
        self.failures = 0
        self.outcome: TerminationMessage | None = None
        name = job.entrypoint.partition(":")[0].replace(".", "-")
        self.identity = JobIdentity(namespace="local", name=name, uid=uuid.uuid4().hex[:12])
        self._clock = clock
        self._random = random.Random(job.seed)
        self._folder = Path(tempfile.mkdtemp(prefix="shoal-run-"))
        self.credentials: Credentials = create_secret_dir(self._folder / "secret")
        self.shards: tuple[Shard, ...] = ()
        self._next_kill = float("inf")

    def __enter__(self) -> LocalRun:
        try:
            self._start_all()
        except BaseException as error:  # interrupted, or no more processes: none may stay
            self.__exit__(type(error))
            raise
        return self

    def _start_all(self) -> None:
        (self._folder / "tmp").mkdir()
        with _free_ports(2 * self.job.parameter_servers) as ports:
            pairs = zip(ports[::2], ports[1::2], strict=True)
            self.shards = tuple(Shard(host="127.0.0.1", data_port=a, control_port=b) for a, b in pairs)
        for index in range(self.job.parameter_servers):
            self._start(Role.PS, index, 0)
        for index in range(self.job.workers):
            self._start(Role.WORKER, index, 0)
        if self.job.kill_every is not None:
            self._next_kill = self._clock() + self.job.kill_every

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.kill()
        for process in self.processes:
            process.popen.wait()
        failed = self.outcome is not None and self.outcome.outcome is not Outcome.SUCCEEDED
        # Keep the logs of a run that failed.
        scratch = [self._folder / "secret", self._folder / "tmp"]
        for folder in scratch if failed or error else [self._folder]:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def logs(self) -> Path:
        """The folder with one log per process."""
        return self._folder

    @property
    def run_uri(self) -> str:
        """The folder of this run in the storage."""
        return f"{self.job.storage_uri}/{self.identity.prefix}"

    def warnings(self) -> list[str]:
        """What the workers warned about, each message once, at most `MAX_WARNINGS`."""
        logs = (
            process.log.read_text(errors="replace")
            for process in self.processes
            if process.role is Role.WORKER
        )
        found = (
            line.split(" WARNING ", 1) for log in logs for line in log.splitlines() if " WARNING " in line
        )
        return list(dict.fromkeys(message.partition(": ")[2] for _, message in found))[:MAX_WARNINGS]

    def suspend(self) -> bool:
        """End the job as the operator suspends one: the workers push what they have, then PS 0 saves all shards.

        Returns whether the storage has a snapshot of this run, which may be an older one if the final one failed.
        """
        self._terminate([p for p in self.processes if p.role is Role.WORKER])
        self._terminate([p for p in self.processes if p.role is Role.PS and p.index == 0])
        return SnapshotStore(open_storage(self.run_uri)).next_number() > 1

    def _terminate(self, processes: list[Process]) -> None:
        for process in processes:
            process.popen.terminate()
        started = self._clock()
        for process in processes:
            until = started + STOP_SECONDS[process.role]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.0, until - self._clock()))

    def poll(self) -> TerminationMessage | None:
        """Replace processes that have ended; return the termination message once the job has ended."""
        for process in list(self.processes):
            code = process.popen.poll()
            if code is None or self.outcome is not None:
                continue
            self._ended(process, code)
        if self.outcome is None and self._clock() >= self._next_kill:
            self._next_kill = self._clock() + float(self.job.kill_every or 0)
            if (victim := self.kill()) is not None and not self.too_often and not _joined(victim):
                age = self._clock() - victim.started_at
                self.too_often = (
                    f"{victim.name} was killed {age:.0f} s after its start, before it had joined: with --kill-every "
                    f"{self.job.kill_every:g}, training may never go on. Use a longer interval than a worker's start."
                )
        return self.outcome

    def kill(self, role: Role | None = None, how: int = signal.SIGKILL) -> Process | None:
        """Kill a random running process (of this role), except those in `never_killed`."""
        wanted = role or {"worker": Role.WORKER, "ps": Role.PS}.get(self.job.kill)
        running = [
            p
            for p in self.processes
            if p.popen.poll() is None
            and wanted in {None, p.role}
            and (p.role, p.index) not in self.job.never_killed
        ]
        if not running:
            return None
        victim = self._random.choice(running)
        victim.killed = True
        self.kills += 1
        victim.popen.send_signal(how)
        return victim

    def status(self) -> StatusReport | None:
        """The coordinator's status report; None while it does not answer."""
        shard = self.shards[0]
        connection = http.client.HTTPSConnection(
            shard.host, shard.control_port, timeout=2, context=self.credentials.client_context()
        )
        try:
            token = status_token(self.credentials.key)
            connection.request("GET", STATUS_PATH, headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            return StatusReport.model_validate_json(answer.read()) if answer.status == 200 else None
        except (OSError, http.client.HTTPException, ValidationError):
            return None
        finally:
            connection.close()

    def _ended(self, process: Process, code: int) -> None:
        message = _read(process.termination)
        if process.role is Role.PS and process.index == 0 and code == EXIT_OK and message is not None:
            self.outcome = message
        elif code == EXIT_USER:
            reason = message or TerminationMessage(outcome=Outcome.FAILED, message=tail(process.log))
            self.outcome = reason.model_copy(update={"outcome": Outcome.FAILED})
        elif code == EXIT_OK and not self._too_early(process):
            return
        else:
            if not process.killed:
                self.failures += 1
            # All workers are on this machine: a model that does not fit into its memory twice will not fit later.
            full = message is not None and message.reason == OutOfMemory.__name__
            if full and process.incarnation > 0:
                self.outcome = message
                return
            if self.failures > MAX_FAILURES:
                text = f"{process.name} exited with {code} after {MAX_FAILURES} earlier failures: {tail(process.log)}"
                self.outcome = TerminationMessage(outcome=Outcome.FAILED, reason="BackoffLimit", message=text)
                return
            self.processes.remove(process)
            self._start(process.role, process.index, process.incarnation + 1)

    def _too_early(self, process: Process) -> bool:
        """Whether the process exited 0 more than `DONE_PATIENCE` seconds ago, although the job continues."""
        if process.done_at is None:
            process.done_at = self._clock()
        return self._clock() - process.done_at >= DONE_PATIENCE

    def _start(self, role: Role, index: int, incarnation: int) -> None:
        name = f"{role.value}-{index}-{incarnation}"
        log, termination = self._folder / f"{name}.log", self._folder / f"{name}.termination"
        config = self._config(role, index, incarnation)
        command = {Role.PS: "serve", Role.WORKER: "work"}[role]
        environment = os.environ | {
            CONFIG_ENV: config.to_json(),
            TERMINATION_LOG_ENV: str(termination),
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
            "PYTHONUNBUFFERED": "1",
            **shared_by(self.job.workers),
            **(accelerators_of(index, self.job.workers) if role is Role.WORKER else {}),
            "TMPDIR": str(self._folder / "tmp"),  # a killed process leaves its files there
            PARENT_ENV: str(os.getpid()),
        }
        with log.open("wb") as output:
            popen = subprocess.Popen(
                [sys.executable, "-m", "shoal_trainer.cli", command],
                env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C in a terminal is for this process, which then ends them in order
            )  # fmt: skip
        self.processes.append(Process(role, index, incarnation, popen, log, termination, self._clock()))

    def _config(self, role: Role, index: int, incarnation: int) -> RuntimeConfig:
        job = self.job
        return RuntimeConfig(
            job=self.identity,
            role=role,
            index=index,
            incarnation=incarnation,
            parameter_servers=self.shards,
            entrypoint=job.entrypoint,
            args=job.args,
            batch_size=job.batch_size,
            stop_after=job.stop_after,
            staleness=job.staleness,
            snapshot=SnapshotPolicy(every_seconds=job.snapshot_seconds),
            storage_uri=job.storage_uri,
            initial_from=job.initial_from,
            secret_dir=str(self._folder / "secret"),
            bind_host="127.0.0.1",
            data_tls=job.data_tls,
            node_name="local",
        )


def _joined(process: Process) -> bool:
    """Whether a worker has reached the parameter servers; True for a server."""
    return process.role is Role.PS or f" {JOINED}: " in process.log.read_text(errors="replace")


def tail(log: Path, lines: int = 3) -> str:
    """The last lines of a log that are not empty."""
    try:
        text = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return " | ".join([line.strip() for line in text if line.strip()][-lines:])[:1000]


def _read(path: Path) -> TerminationMessage | None:
    try:
        return TerminationMessage.model_validate_json(path.read_text())
    except (OSError, ValidationError):
        return None


@contextlib.contextmanager
def _free_ports(count: int) -> Iterator[list[int]]:
    """Find free ports, all different; they are bound until the `with` block ends."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        yield [bound.getsockname()[1] for bound in sockets]
    finally:
        for bound in sockets:
            bound.close()
