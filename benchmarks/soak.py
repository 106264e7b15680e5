"""A long run: real training on digits with a process killed every 20 s; memory, descriptors and threads must not grow.

One parameter server and one worker are never killed, and are judged over the whole run (`benchmarks.growth`).
`make soak` (`SECONDS_TO_RUN=3600`, at least 300) prints a line each minute and a table at the end, and exits 1 if the
job failed or a process grew.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.growth import SURVIVOR, Life, Reading, judge
from shoal_trainer.contract import Role, StatusReport, StopAfter
from shoal_trainer.run.processes import LocalJob, LocalRun

WARM_UP = 60.0
"""Seconds after the first answer or push of a process before it is read."""
SHOWN = 12
"""Lines of the table."""
DIGITS = Path(__file__).parent.parent / "examples" / "digits"
JOB = LocalJob(
    entrypoint="digits:job",
    workers=3,
    parameter_servers=2,
    batch_size=16,
    stop_after=StopAfter(epochs=10**6),
    kill_every=20.0,
    kill="any",
    never_killed=frozenset({(Role.PS, 1), (Role.WORKER, 2)}),
    seed=1,
)
SURVIVORS = {"ps-1-0", "worker-2-0"}
"""The first incarnations of `never_killed`."""


def read(run: LocalRun, names: set[str]) -> dict[str, Reading]:
    """The readings of these processes."""
    found = {}
    for process in run.processes:
        if process.name not in names:
            continue
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            p = psutil.Process(process.popen.pid)
            with p.oneshot():
                memory, age = p.memory_full_info().uss, time.time() - p.create_time()
                reading = Reading(age, memory, p.num_fds(), p.num_threads())
            if p.is_running() and reading.descriptors:  # the reading of a dying process is invalid
                found[process.name] = reading
    return found


def working(run: LocalRun, status: StatusReport | None) -> set[str]:
    """Names of the processes that are active according to the coordinator."""
    if status is None:
        return set()
    pushing = {f"worker-{w.slot}-{w.incarnation}" for w in status.workers if w.first_push_at is not None}
    return pushing | {p.name for p in run.processes if p.role is Role.PS}


def watch(
    run: LocalRun, seconds: float, console: Console
) -> tuple[dict[str, list[Reading]], StatusReport | None]:
    """Read all warm processes each second; returns their readings and the last status report."""
    readings: dict[str, list[Reading]] = {}
    begun: dict[str, float] = {}
    last: StatusReport | None = None
    start = printed = time.monotonic()
    while (now := time.monotonic()) - start < seconds:
        if (outcome := run.poll()) is not None:
            console.print(f"the job ended: {outcome.message}")
            sys.exit(1)
        status = run.status()
        last = status or last
        for name in working(run, status):
            begun.setdefault(name, now)
        warm = {name for name, at in begun.items() if now - at >= WARM_UP}
        for name, reading in read(run, warm).items():
            readings.setdefault(name, []).append(reading)
        if now - printed >= 60:
            printed = now
            steps = "the coordinator is unreachable" if status is None else f"step {status.step:,}"
            console.print(f"{now - start:.0f} s: {steps}, {run.kills} killed", highlight=False)
        time.sleep(1.0)
    return readings, last


def show(lives: Sequence[Life], console: Console) -> None:
    """Print the survivors and the longest other lives."""
    table = Table("process", "lived s", *(f"{q} MB" if q == "memory" else q for q in SURVIVOR))
    for life in lives[:SHOWN]:
        name = f"{life.name}, never killed" if life.survivor else life.name
        table.add_row(name, f"{life.seconds:.0f}", *map(str, life.growth))
    console.print(table)


def main() -> None:
    """Run the job, watch it, and report growth."""
    seconds = float(os.environ.get("SECONDS_TO_RUN", "3600"))
    console = Console()
    os.chdir(DIGITS)  # where the processes find `digits`
    with LocalRun(JOB) as run:
        began = time.monotonic()
        readings, last = watch(run, seconds, console)
        lasted = time.monotonic() - began
    lives, reasons = judge(readings, SURVIVORS, lasted)
    show(lives, console)
    if last is not None:
        console.print(
            f"{last.step:,} steps in {last.epoch:,} epochs, {last.wasted_steps} wasted, {last.data}",
            highlight=False,
        )
    console.print(f"{run.kills} processes killed in {lasted:.0f} s", highlight=False)
    for reason in reasons:
        console.print(f"failed: {reason}", highlight=False)
    sys.exit(1 if reasons else 0)


if __name__ == "__main__":
    main()
