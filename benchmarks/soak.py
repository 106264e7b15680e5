"""A long run: real training on digits with a process killed every 20 s; memory, descriptors and threads must not grow.

`make soak` (`SECONDS_TO_RUN=3600`) prints a line each minute and a table at the end, and exits 1 if the job failed or
a surviving process grew.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from shoal_trainer.contract import Role, StatusReport, StopAfter
from shoal_trainer.local import LocalJob, LocalRun

KILL_EVERY = 20.0
SETTLED = 60.0
"""Warm-up of a process in seconds after its first answer or push."""
SAMPLES = 10
"""Readings, one per second, for the median at either end, since the reading of a dying process is invalid."""
LONG = 3 * SETTLED
"""The shortest lifetime in seconds for a growth measurement."""
MOST = {"memory": (1.25, 16e6), "descriptors": (1.25, 8.0), "threads": (1.25, 8.0)}
"""The allowed growth: a factor and a constant."""


@dataclass(frozen=True)
class Reading:
    """A reading of one process at an age in seconds: memory in bytes (USS), open descriptors, threads."""

    age: float
    memory: float
    descriptors: float
    threads: float


def read(run: LocalRun, at_work: set[str]) -> dict[str, Reading]:
    """The readings of all active processes, by name."""
    found = {}
    for process in run.processes:
        if process.name not in at_work:
            continue
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            p = psutil.Process(process.popen.pid)
            with p.oneshot():
                memory, age = p.memory_full_info().uss, time.time() - p.create_time()
                reading = Reading(age, memory, p.num_fds(), p.num_threads())
            if p.is_running() and reading.descriptors:
                found[process.name] = reading
    return found


def working(run: LocalRun, status: StatusReport | None) -> set[str]:
    """Names of the processes that are active according to the coordinator."""
    if status is None:
        return set()
    pushing = {f"worker-{w.slot}-{w.incarnation}" for w in status.workers if w.first_push_at is not None}
    return pushing | {p.name for p in run.processes if p.role is Role.PS}


def main() -> None:
    """Run the job, watch it, and report growth."""
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
    lives: dict[str, list[Reading]] = {}
    begun: dict[str, float] = {}
    last: StatusReport | None = None
    start = printed = time.monotonic()
    with LocalRun(job) as run:
        while (now := time.monotonic()) - start < seconds:
            if (outcome := run.poll()) is not None:
                console.print(f"the job ended: {outcome.message}")
                sys.exit(1)
            status = run.status()
            last = status or last
            for name in working(run, status):
                begun.setdefault(name, now)
            settled = {name for name, at in begun.items() if now - at >= SETTLED}
            for name, reading in read(run, settled).items():
                lives.setdefault(name, []).append(reading)
            if now - printed >= 60:
                printed = now
                steps = "the coordinator is unreachable" if status is None else f"step {status.step:,}"
                console.print(f"{now - start:.0f} s: {steps}, {run.kills} killed", highlight=False)
            time.sleep(1.0)
    grown = show(console, lives)
    if last is not None:
        console.print(f"{last.step:,} steps, {last.wasted_steps} wasted, {last.data}", highlight=False)
    console.print(f"{run.kills} processes killed in {seconds:.0f} s; grew: {', '.join(grown) or 'none'}")
    sys.exit(1 if grown else 0)


def ends(life: list[Reading], what: str) -> tuple[float, float]:
    """Medians of the first and of the last readings."""
    values = [getattr(reading, what) for reading in life]
    return statistics.median(values[:SAMPLES]), statistics.median(values[-SAMPLES:])


def show(console: Console, lives: dict[str, list[Reading]]) -> list[str]:
    """Print the longest lifetimes. Returns the names of the processes that grew."""
    table = Table("process", "lived s", "memory MB", "descriptors", "threads")
    grown = []
    for name, life in sorted(lives.items(), key=lambda item: -item[1][-1].age):
        if life[-1].age < LONG or len(life) < 2 * SAMPLES:
            continue
        pairs = {what: ends(life, what) for what in MOST}
        if any(after > MOST[what][0] * before + MOST[what][1] for what, (before, after) in pairs.items()):
            grown.append(name)
        scale = {"memory": 1e6}
        cells = [f"{b / scale.get(w, 1):.0f} → {e / scale.get(w, 1):.0f}" for w, (b, e) in pairs.items()]
        table.add_row(name, f"{life[-1].age:.0f}", *cells)
    console.print(table)
    return grown


if __name__ == "__main__":
    main()
