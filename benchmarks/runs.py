"""Run a job as local processes and read its rate from the coordinator when all workers are active."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil

from shoal_trainer.contract import Role, Staleness, StatusReport, StopAfter, WorkerState
from shoal_trainer.run.processes import LocalJob, LocalRun

START_SECONDS = 420.0
PARTS = re.compile(
    r"import ([0-9.]+) s, build and trace ([0-9.]+) s.*?joined: hello ([0-9.]+) s, pull ([0-9.]+) s",
    re.DOTALL,
)


class JoinParts(NamedTuple):
    """Parts of a worker's start in seconds, from its log. `hello`: connect, initialize the parameters, and join."""

    imports: float
    build: float
    hello: float
    pull: float


@dataclass(frozen=True)
class Run:
    """Steps/s of all workers; CPU seconds per step of PS and worker, and peak memory (bytes) of a PS."""

    rate: float
    ps_cpu: float
    worker_cpu: float
    ps_memory: int
    first_push_seconds: tuple[float, ...]
    """Seconds from the start of each worker's process to its first accepted push."""
    join_parts: tuple[JoinParts, ...] = ()


def run(
    entrypoint: str,
    *,
    workers: int,
    args: Mapping[str, Any],
    batch: int,
    seconds: float,
    parameter_servers: int = 1,
    spans: int = 1,
    rounds: bool = True,
) -> list[Run]:
    """Measure `spans` times `seconds` of one job. Raises RuntimeError if a worker does not become active."""
    with working(
        entrypoint,
        workers=workers,
        args=args,
        batch=batch,
        parameter_servers=parameter_servers,
        rounds=rounds,
    ) as local:
        started = {
            p.index: psutil.Process(p.popen.pid).create_time()
            for p in local.processes
            if p.role is Role.WORKER
        }
        return [_span(local, seconds, started) for _ in range(spans)]


@contextlib.contextmanager
def working(
    entrypoint: str,
    *,
    workers: int,
    args: Mapping[str, Any],
    batch: int,
    parameter_servers: int = 1,
    rounds: bool = True,
) -> Iterator[LocalRun]:
    """A job whose workers are all active. Raises RuntimeError if one does not become so."""
    job = LocalJob(
        entrypoint=entrypoint,
        workers=workers,
        parameter_servers=parameter_servers,
        batch_size=batch,
        stop_after=StopAfter(epochs=100_000),
        args=dict(args),
        snapshot_seconds=3600,
        staleness=Staleness(rounds=rounds),
    )
    with LocalRun(job) as local:
        _wait_for_all(local, workers)
        time.sleep(2.0)  # the first steps of the last one
        yield local


def _span(local: LocalRun, seconds: float, started: Mapping[int, float]) -> Run:
    """Measure over `seconds`. `started`: when each worker's process started."""
    before, at = status_of(local), time.monotonic()
    cpu = _cpu(local)
    time.sleep(seconds)
    after, elapsed = status_of(local), time.monotonic() - at
    steps = after.step - before.step
    spent = {role: value - cpu[role] for role, value in _cpu(local).items()}
    memory = max(psutil.Process(p.popen.pid).memory_info().rss for p in local.processes if p.role is Role.PS)
    pushes = tuple(w.first_push_at - started[w.slot] for w in after.workers if w.first_push_at is not None)
    logs = (p.log.read_text(errors="replace") for p in local.processes if p.role is Role.WORKER)
    parts = tuple(JoinParts(*map(float, m.groups())) for log in logs if (m := PARTS.search(log)))
    return Run(steps / elapsed, spent[Role.PS] / steps, spent[Role.WORKER] / steps, memory, pushes, parts)


def status_of(local: LocalRun) -> StatusReport:
    """The status of a job that goes on."""
    for _ in range(5):
        if (status := local.status()) is not None:
            return status
    raise RuntimeError(f"the job ended while it was measured: logs in {local.logs}")


def _wait_for_all(local: LocalRun, workers: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        outcome = local.poll()
        if outcome is not None:
            raise RuntimeError(f"the job ended: {outcome.message}")
        status = local.status()
        if status is not None:
            active = [w for w in status.workers if w.state is WorkerState.ACTIVE and w.steps > 1]
            if len(active) >= workers:
                return
        time.sleep(0.25)
    raise RuntimeError(f"not all workers became active: logs in {local.logs}")


def _cpu(local: LocalRun) -> dict[Role, float]:
    spent = {Role.PS: 0.0, Role.WORKER: 0.0}
    for process in local.processes:
        spent[process.role] += sum(psutil.Process(process.popen.pid).cpu_times()[:2])
    return spent
