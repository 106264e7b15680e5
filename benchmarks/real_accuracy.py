"""Accuracy of real workers beside the same job in virtual time: whether what `convergence` plays can be believed.

`python -m benchmarks.real_accuracy` trains digits with momentum by local processes, whose steps take as long as the
virtual ones, then in virtual time from the same first parameters. `--quick`: two workers, one seed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import conditions
from benchmarks.tasks import BATCH, TASKS
from benchmarks.virtual_job import STEP_SECONDS, Job, VirtualJob
from shoal_trainer.contract import Outcome, Staleness, StatusReport, StopAfter, TerminationMessage
from shoal_trainer.run.processes import LocalJob, LocalRun

TASK = "digits"
WORKERS, SEEDS = (1, 2, 4), 3
POLL_SECONDS = 0.25


class Trained(NamedTuple):
    """What a job has in the end: its accuracy on the test set, and the mean staleness of its last pushes."""

    accuracy: float
    staleness: float


@dataclass(frozen=True)
class Beside:
    """The runs of as many workers, a seed after the other."""

    workers: int
    real: Sequence[Trained]
    virtual: Sequence[Trained]

    @property
    def difference(self) -> float:
        """By how much real workers are more accurate, in the mean."""
        real, virtual = (statistics.fmean(one.accuracy for one in each) for each in (self.real, self.virtual))
        return real - virtual


def error(found: Sequence[Beside]) -> float:
    """The standard error of a `difference`: seeds vary as much in all rows, so all of them tell it."""
    variances = [
        statistics.variance([one.accuracy for one in each])
        for row in found
        for each in (row.real, row.virtual)
    ]
    return math.sqrt(2 * statistics.fmean(variances) / len(found[0].real))


def real(workers: int, seed: int, *, rounds: bool = True) -> Trained:
    """Train by a real parameter server and real workers. Raises RuntimeError if the job fails."""
    with tempfile.TemporaryDirectory() as storage:
        job = LocalJob(
            "benchmarks.jobs:digits",
            workers=workers,
            batch_size=BATCH,
            stop_after=StopAfter(epochs=TASKS[TASK].passes),
            args={"seed": seed, "milliseconds": round(1000 * STEP_SECONDS)},
            storage_uri=Path(storage).as_uri(),
            snapshot_seconds=3600,
            staleness=Staleness(rounds=rounds),
        )
        with LocalRun(job) as run:
            ended, last = _ended(run)
    if ended.outcome is not Outcome.SUCCEEDED:
        raise RuntimeError(f"the job ended: {ended.message}; logs in {run.logs}")
    stale = [worker.staleness or 0.0 for worker in last.workers] if last else [0.0]
    return Trained(ended.metrics["val_accuracy"], statistics.fmean(stale))


def virtual(workers: int, seed: int, *, rounds: bool = True) -> Trained:
    """The same in virtual time."""
    run = VirtualJob(Job(TASK, workers, seed, speeds="equal", rounds=rounds))
    run.train(run.updates)
    return Trained(run.accuracy(), run.shard.damping.staleness)


def measure(workers: Sequence[int], seeds: Sequence[int], *, rounds: bool = True) -> list[Beside]:
    """A row for each number of workers. `rounds`: they may take part in rounds."""
    ways = real, virtual
    return [
        Beside(number, *([way(number, seed, rounds=rounds) for seed in seeds] for way in ways))
        for number in workers
    ]


def table(found: Sequence[Beside]) -> str:
    """Markdown: medians, with the least and the most."""
    lines = [
        "| workers | real | virtual | mean of the differences | staleness, real | virtual |",
        "|---" * 6 + "|",
    ]
    for row in found:
        accuracies = (_cell([one.accuracy for one in each]) for each in (row.real, row.virtual))
        stale = (f"{statistics.fmean(one.staleness for one in each):.1f}" for each in (row.real, row.virtual))
        lines.append(f"| {' | '.join((str(row.workers), *accuracies, f'{row.difference:+.4f}', *stale))} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, and the standard error of its differences if there are several seeds."""
    parser = argparse.ArgumentParser(prog="benchmarks.real_accuracy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two workers and one seed")
    parser.add_argument("--workers", nargs="*", type=int, default=list(WORKERS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--no-rounds", action="store_true", help="as where an exchange takes too long")
    options = parser.parse_args()
    workers, seeds = ((2,), 1) if options.quick else (options.workers, options.seeds)
    found = measure(workers, range(options.first, options.first + seeds), rounds=not options.no_rounds)
    print(conditions("python -m benchmarks.real_accuracy") + table(found))
    if seeds > 1:
        print(f"\nStandard error of a difference: {error(found):.4f}")


def _ended(run: LocalRun) -> tuple[TerminationMessage, StatusReport | None]:
    """How the job ended, and its last status."""
    last = None
    while (outcome := run.poll()) is None:
        last = run.status() or last
        time.sleep(POLL_SECONDS)
    return outcome, last


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


if __name__ == "__main__":
    main()
