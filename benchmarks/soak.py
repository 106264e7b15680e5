"""A long run: real training on digits with a process killed every 20 s; memory, descriptors and threads must not grow.

`make soak` (`SECONDS_TO_RUN=3600`) prints a line each minute and a table at the end, and exits 1 if the job failed or a
process that lived through the run grew.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from shoal_trainer.contract import StopAfter
from shoal_trainer.local import LocalJob, LocalRun

KILL_EVERY = 20.0
SETTLED = 60.0
"""Seconds after which a process has all that it will need."""
MOST_GROWTH = 1.25


@dataclass(frozen=True)
class Reading:
    """Of one process, at an age in seconds: anonymous memory in bytes, open descriptors, threads."""

    name: str
    age: float
    memory: int
    descriptors: int
    threads: int


def read(run: LocalRun) -> list[Reading]:
    """All processes that are alive."""
    found = []
    for process in run.processes:
        try:
            p = psutil.Process(process.popen.pid)
            with p.oneshot():
                info = p.memory_full_info()
                age = time.time() - p.create_time()
                found.append(Reading(process.name, age, info.uss, p.num_fds(), p.num_threads()))
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def main() -> None:
    """Run, watch, judge."""
    seconds = float(os.environ.get("SECONDS_TO_RUN", "3600"))
    console = Console()
    os.chdir(Path(__file__).parent.parent / "examples" / "digits")  # where the processes find `digits`
    job = LocalJob(
        entrypoint="digits:job",
        workers=3,
        batch_size=16,
        stop_after=StopAfter(epochs=10**6),
        kill_every=KILL_EVERY,
        kill="any",
        seed=1,
    )
    first: dict[str, Reading] = {}
    last: dict[str, Reading] = {}
    start = told = time.monotonic()
    with LocalRun(job) as run:
        while time.monotonic() - start < seconds:
            if (outcome := run.poll()) is not None:
                console.print(f"the job ended: {outcome.message}")
                sys.exit(1)
            for reading in read(run):
                if reading.age >= SETTLED:
                    first.setdefault(reading.name, reading)
                    last[reading.name] = reading
            if time.monotonic() - told >= 60:
                told = time.monotonic()
                status = run.status()
                steps = (
                    "the coordinator is away"
                    if status is None
                    else f"step {status.step:,}, loss {status.loss}"
                )
                console.print(f"{told - start:.0f} s: {steps}, {run.kills} killed", highlight=False)
            time.sleep(1.0)
        status = run.status()
    grown = show(console, first, last)
    if status is not None:
        console.print(f"{status.step:,} steps, {status.wasted_steps} wasted, {status.data}", highlight=False)
    console.print(f"{run.kills} processes killed in {seconds:.0f} s; grew: {', '.join(grown) or 'none'}")
    sys.exit(1 if grown else 0)


def show(console: Console, first: dict[str, Reading], last: dict[str, Reading]) -> list[str]:
    """The longest lived processes; returns the names of those that grew."""
    table = Table("process", "lived s", "memory MB", "descriptors", "threads")
    grown = []
    for name, end in sorted(last.items(), key=lambda item: -item[1].age)[:10]:
        begin = first[name]
        pairs = [
            (begin.memory, end.memory),
            (begin.descriptors, end.descriptors),
            (begin.threads, end.threads),
        ]
        if end.age > 3 * SETTLED and any(after > MOST_GROWTH * before + 8 for before, after in pairs):
            grown.append(name)
        cells = [f"{b / 1e6:.0f} → {e / 1e6:.0f}" if b > 10**6 else f"{b} → {e}" for b, e in pairs]
        table.add_row(name, f"{end.age:.0f}", *cells)
    console.print(table)
    return grown


if __name__ == "__main__":
    main()
