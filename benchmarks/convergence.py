"""Accuracy of many workers on the samples of one, and the time to it, beside synchronous and plain asynchronous runs.

`python -m benchmarks.convergence [--sets …] [--workers …] [--seeds N] [--record]` prints the tables: virtual time, the
real parameter-server shard, real data. Medians over seeds, with the least and the most.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, get_args

from benchmarks.harness import Measurement, record, summary, write
from benchmarks.tasks import TASKS
from benchmarks.trials import Accumulating, FromTwo, Gap, GapAlone, Joined, Pace, Tried, WarmUp
from benchmarks.virtual_job import (
    AllReduce,
    Asynchronous,
    Course,
    Job,
    Speeds,
    VirtualJob,
    accuracy_after_outage,
)

WORKERS = (1, 2, 4, 8, 16, 32)
CHEAP = ("digits", "MNIST", "table", "words", "rings")
"""Sets whose networks are in NumPy."""
CONSTANT_RATES = {"digits": "momentum", "MNIST": "momentum", "words": "Adam"}
"""Sets for the time to an accuracy: a run may need more samples than a schedule has."""
SHOAL = "Shoal"
CONDITIONS: dict[str, dict[str, Any]] = {
    "": {},
    ", no rounds": {"rounds": False},
    ", three times the rate": {"rate": 3.0},
    ", equal workers": {"speeds": "equal"},
    ", a worker lost and replaced every 20 updates": {"churn": 20},
}
Rule = tuple[Callable[[Job], Course], dict[str, Any]]
"""What makes a run of a job, and its options."""
RULES: dict[str, Rule] = {
    **{SHOAL + condition: (VirtualJob, options) for condition, options in CONDITIONS.items()},
    "each gradient a step of Keras": (Asynchronous, {}),
    "all-reduce": (AllReduce, {}),
    "all-reduce, rate × √W": (AllReduce, {"rate": math.sqrt}),
    "all-reduce, rate × 3": (AllReduce, {"rate": 3.0}),
    "all-reduce, rate × W": (AllReduce, {"rate": float}),
    "all-reduce, rate × √W, moments W/2 times shorter": (
        AllReduce,
        {"rate": math.sqrt, "shorter": lambda workers: max(1.0, workers / 2)},
    ),
}
TRIED: dict[str, Rule] = {
    "√pace": (partial(Tried, damping=Pace), {}),
    "agreement from two": (partial(Tried, damping=FromTwo), {}),
    "by gap": (partial(Tried, damping=Gap), {}),
    "by gap alone": (partial(Tried, damping=GapAlone), {"anticipates": False}),
    "warm-up": (partial(Tried, damping=WarmUp), {}),
    "joined": (Joined, {}),
    "joined, warm-up": (partial(Joined, damping=WarmUp), {}),
    "accumulated": (Accumulating, {}),
    "accumulated, rate × √W": (Accumulating, {"rate": math.sqrt}),
    "Constant": (VirtualJob, {"policy": "Constant"}),
    "Inverse": (VirtualJob, {"policy": "Inverse"}),
}
TRIALS = {
    name + condition: (kind, options | more)
    for name, (kind, options) in TRIED.items()
    for condition, more in CONDITIONS.items()
}
"""Only measured if they are named."""
TIMED = (
    SHOAL,
    "Shoal, no rounds",
    "each gradient a step of Keras",
    "all-reduce",
    "all-reduce, rate × √W",
)
TOLERANCE = 0.005
"""The accuracy that a run must reach is that of one worker at its end, less this."""
MOST_SAMPLES = 3.0
"""A run that has not reached it after so many times the samples is given up."""
PROCESSES = 2
PAGE = Path("docs/benchmarks/convergence.md")


def accuracy(case: tuple[str, Job]) -> float:
    """Test accuracy after all passes, by one of the rules."""
    run = course(*case)
    run.train(run.updates)
    return run.accuracy()


def share(case: tuple[str, Job]) -> float:
    """The steps that the workers make, as a share of what they would if none waited for another one."""
    run = course(*case)
    run.train(run.updates)
    return run.share


def course(rule: str, job: Job) -> Course:
    """A run by one of the rules."""
    kind, options = (RULES | TRIALS)[rule]
    return kind(_with(job, **{name: _value(value, job.workers) for name, value in options.items()}))


def seconds_to(case: tuple[str, Job, float]) -> float:
    """The virtual time until the test accuracy is at least a value; infinite: not after `MOST_SAMPLES`."""
    rule, job, target = case
    run = course(rule, job)
    turn = max(1, run.updates // (4 * TASKS[job.task].passes))
    for _ in range(math.ceil(MOST_SAMPLES * run.updates / turn)):
        run.train(turn)
        if run.accuracy() >= target:
            return run.now
    return math.inf


def equal_samples(
    pool: ProcessPoolExecutor,
    sets: Sequence[str],
    workers: Sequence[int],
    seeds: Sequence[int],
    rules: Sequence[str],
    optimizers: Sequence[str] = (),
) -> Iterator[tuple[str, str, str, int, Measurement]]:
    """(set, optimizer, rule, workers, accuracy on the samples of one worker). `optimizers`: in place of a set's own."""
    for name in sets:
        for optimizer, rule, number in itertools.product(
            optimizers or TASKS[name].optimizers, rules, workers
        ):
            if number == 1 and rule not in {SHOAL, f"{SHOAL}, three times the rate"}:
                continue
            jobs = [(rule, Job(name, number, seed, optimizer)) for seed in seeds]
            label = f"accuracy, {name}, {optimizer}, {number} workers, {rule}"
            row = summary(
                label, pool.map(accuracy, jobs), "", f"{len(seeds)} seeds, {TASKS[name].passes} passes"
            )
            yield name, optimizer, rule, number, row


def times(
    pool: ProcessPoolExecutor, sets: Sequence[str], workers: Sequence[int], seeds: Sequence[int]
) -> Iterator[tuple[str, str, str, int, Measurement]]:
    """(set, speeds, rule, workers, by how much faster than one worker it reaches its accuracy)."""
    for name in (each for each in sets if each in CONSTANT_RATES):
        optimizer = CONSTANT_RATES[name]
        one = [Job(name, 1, seed, optimizer, speeds="equal") for seed in seeds]
        target = statistics.median(pool.map(accuracy, [(SHOAL, job) for job in one])) - TOLERANCE
        alone = list(pool.map(seconds_to, [(SHOAL, job, target) for job in one]))
        for speeds, rule, number in itertools.product(("equal", "straggler", "unequal"), TIMED, workers):
            jobs = [(rule, _with(job, workers=number, speeds=speeds), target) for job in one]
            faster = [
                a / b if math.isfinite(a) else math.nan
                for a, b in zip(alone, pool.map(seconds_to, jobs), strict=True)
            ]
            known = [ratio for ratio in faster if not math.isnan(ratio)]
            label = f"time to the accuracy of one worker ({target:.3f}), {name}, {number} workers, {speeds}, {rule}"
            row = summary(label, known, "x", f"one worker, {len(known)} seeds")
            yield name, f"{speeds} ({target:.3f})", rule, number, row


def waits(
    pool: ProcessPoolExecutor, sets: Sequence[str], workers: Sequence[int], seeds: Sequence[int]
) -> Iterator[tuple[str, str, str, int, Measurement]]:
    """(set, speeds, rule, workers, steps as a share of those of workers that never wait)."""
    for name, speeds in itertools.product(sets, get_args(Speeds)):
        for rule, number in itertools.product((SHOAL, "all-reduce"), workers):
            optimizer = next(iter(TASKS[name].optimizers))
            jobs = [(rule, Job(name, number, seed, optimizer, speeds=speeds)) for seed in seeds]
            label = f"steps of workers that never wait, {name}, {number} workers, {speeds}, {rule}"
            row = summary(
                label, pool.map(share, jobs), "", f"the sum of the workers' speeds, {len(seeds)} seeds"
            )
            yield name, speeds, rule, number, row


def outages(
    pool: ProcessPoolExecutor, sets: Sequence[str], workers: Sequence[int], seeds: Sequence[int]
) -> Iterator[Measurement]:
    """Accuracy after an outage of the server in which workers train on their own."""
    for name, number, steps in itertools.product(sets, workers, (8, 64)):
        jobs = [Job(name, number, seed) for seed in seeds]
        found = list(pool.map(accuracy_after_outage, jobs, itertools.repeat(steps)))
        of = f"{name}, {number} workers, outage of {steps} steps each"
        yield summary(f"accuracy at once, {of}", [f[0] for f in found], "", "the moment all are back")
        yield summary(f"accuracy at the end, {of}", [f[1] for f in found], "", "after equal samples")


def measure(quick: bool = False) -> Iterator[Measurement]:
    """The tables of the cheap sets, and those of outages."""
    seeds, sets = (range(1), ("digits",)) if quick else (range(5), CHEAP)
    workers = (1, 8) if quick else WORKERS
    with _pool() as pool:
        for *_, row in equal_samples(pool, sets, workers, seeds, list(RULES)):
            yield row
        for *_, row in times(pool, sets, (8,), seeds):
            yield row
        for *_, row in waits(pool, sets[:1], (8,), seeds):
            yield row
        yield from outages(pool, sets[:2], (4,) if quick else (4, 8, 16), seeds)


def table(title: str, rows: Sequence[tuple[str, str, str, int, Measurement]]) -> str:
    """Markdown: a line for each set and rule, a column for each number of workers."""
    numbers = sorted({row[3] for row in rows})
    lines = [f"| {title} | {' | '.join(map(str, numbers))} |", "|---" * (len(numbers) + 1) + "|"]
    for key, group in itertools.groupby(rows, key=lambda row: row[:3]):
        found = {row[3]: row[4] for row in group}
        cells = [_cell(found.get(number)) for number in numbers]
        lines.append(f"| {', '.join(key)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables, write their figures, and with `--record` the page."""
    parser = argparse.ArgumentParser(prog="benchmarks.convergence", description=__doc__)
    parser.add_argument("--sets", nargs="*", choices=list(TASKS), default=list(CHEAP))
    parser.add_argument("--workers", nargs="*", type=int, default=list(WORKERS))
    parser.add_argument("--rules", nargs="*", choices=[*RULES, *TRIALS], default=list(RULES))
    parser.add_argument("--optimizers", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--times", nargs="*", type=int, default=[8], metavar="WORKERS", help="of the second table"
    )
    parser.add_argument("--output", type=Path, default=Path("build/convergence.json"))
    parser.add_argument("--record", action="store_true", help=f"replace the tables of {PAGE}")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    with _pool() as pool:
        rows = []
        parts = options.sets, options.workers, seeds, options.rules, options.optimizers
        for row in equal_samples(pool, *parts):
            print(f"{row[4].name}: {_cell(row[4])}", flush=True)
            rows.append(row)
        timed = []
        for row in times(pool, options.sets, options.times, seeds):
            print(f"{row[4].name}: {_cell(row[4])}", flush=True)
            timed.append(row)
        waited = []
        for row in waits(pool, options.sets[:1] if options.times else (), options.times, seeds):
            print(f"{row[4].name}: {_cell(row[4])}", flush=True)
            waited.append(row)
    write(options.output, [row[4] for row in (*rows, *timed, *waited)])
    tables = [table("accuracy on the samples of one worker", rows)]
    if timed:
        tables.append(table("times as fast as one worker", timed))
        tables.append(table("steps, as a share of those of workers that never wait", waited))
    text = "\n\n".join(tables)
    print(text)
    if options.record:
        record(PAGE, "Convergence", text)


def _value(value: Any, workers: int) -> Any:
    """That of an option, which may depend on the number of workers."""
    return value(workers) if callable(value) else value


def _with(job: Job, **changes: Any) -> Job:
    return Job(**{**vars(job), **changes})


def _cell(row: Measurement | None) -> str:
    if row is None:
        return ""
    digits = 1 if row.unit else 3
    return f"{row.value:.{digits}f} ({row.low:.{digits}f}-{row.high:.{digits}f})"


def _pool() -> ProcessPoolExecutor:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # inherited: each process computes on one core
        os.environ.setdefault(name, "1")
    return ProcessPoolExecutor(PROCESSES)


if __name__ == "__main__":
    main()
