"""Accuracy after equal samples for 1 to 16 workers with uneven delays (real data).

The parameter-server shard is the real one, in virtual time. The networks are small and in NumPy, so that hundreds of
runs take minutes.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness import Measurement, summary
from benchmarks.virtual_job import SETS, Job, accuracy, accuracy_after_outage

WORKERS = (1, 2, 4, 8, 16)
RULES: dict[str, dict[str, Any]] = {
    "anticipated, waits for its answers": {},
    "anticipated, overlaps (the newest answer comes a step late)": {"overlaps": True},
    "not anticipated, waits for its answers": {"anticipates": False},
    "not anticipated, overlaps": {"anticipates": False, "overlaps": True},
    "one worker lost and replaced every 20 updates": {"churn": 20},
}
RATES: dict[Literal["momentum", "adam"], tuple[float, float]] = {
    "momentum": (0.05, 0.15),
    "adam": (0.003, 0.009),
}
"""A learning rate that is good for one worker, and three times it."""
PLOT = Path("build/convergence.png")
PROCESSES = 2

Row = tuple[str, str, str, float, int, Measurement]


def measure(quick: bool = False) -> Iterator[Measurement]:
    """Each figure is the median over seeds, with the worst and the best one."""
    seeds = range(1 if quick else 5)
    rows: list[Row] = []
    cases = list(itertools.product(SETS, RATES, RULES.items(), WORKERS, (0, 1)))
    if quick:
        cases = [case for case in cases if case[0] == "digits" and case[3] in {1, 8} and not case[4]]
    with ProcessPoolExecutor(PROCESSES) as pool:
        for data, optimizer, (label, options), workers, which in cases:
            if workers == 1 and "churn" in options:
                continue
            rate = RATES[optimizer][which]
            jobs = [
                Job(data, workers, "InverseSquareRoot", rate, seed, optimizer=optimizer, **options)
                for seed in seeds
            ]
            row = summary(
                f"accuracy, {data}, {optimizer}, {workers} workers, rate {rate}, {label}",
                pool.map(accuracy, jobs),
                "",
                f"test set after {SETS[data].passes} passes",
            )
            rows.append((data, optimizer, label, rate, workers, row))
            yield row
        for data, workers in itertools.product(
            (["digits"] if quick else SETS), (4,) if quick else (4, 8, 16)
        ):
            rate = RATES["momentum"][0]
            for steps in (8, 64):
                jobs = [Job(data, workers, "InverseSquareRoot", rate, seed) for seed in seeds]
                found = list(pool.map(accuracy_after_outage, jobs, itertools.repeat(steps)))
                name = f"{data}, {workers} workers, outage of {steps} steps each"
                yield summary(
                    f"accuracy at once, {name}", [f[0] for f in found], "", "the moment all are back"
                )
                yield summary(
                    f"accuracy at the end, {name}", [f[1] for f in found], "", "after equal samples"
                )
    if not quick:
        _plot(rows)


def _plot(rows: list[Row]) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(len(SETS), len(RATES), figsize=(11, 4 * len(SETS)), squeeze=False)
    for (data, of), axes in zip(SETS.items(), grid, strict=True):
        for axis, (optimizer, rates) in zip(axes, RATES.items(), strict=True):
            for label, rate in itertools.product(RULES, rates):
                mine = [row for row in rows if row[:4] == (data, optimizer, label, rate)]
                style = "-" if rate == rates[0] else ":"
                values = [row[5].value for row in mine]
                axis.plot([row[4] for row in mine], values, style, marker="o", label=f"{label}, rate {rate}")
            axis.set_xscale("log", base=2)
            axis.set_xticks(WORKERS, [str(w) for w in WORKERS])
            axis.set_xlabel("workers")
            axis.set_ylim(0.5, 1)
            axis.set_title(f"{data}, {optimizer}", fontsize=10)
            axis.grid(alpha=0.3)
        axes[0].set_ylabel(f"test accuracy after {of.passes} passes")
    grid[0][0].legend(fontsize=6)
    figure.tight_layout()
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=110)
    plt.close(figure)


def spread(data: str, seeds: int) -> Iterator[str]:
    """The default rule with up to 32 workers: for each optimizer and rate, median (least, most) over seeds."""
    with ProcessPoolExecutor(PROCESSES) as pool:
        for optimizer, rates in RATES.items():
            for rate, workers in itertools.product(rates, (*WORKERS, 32)):
                jobs = [
                    Job(data, workers, "InverseSquareRoot", rate, seed, optimizer=optimizer)
                    for seed in range(seeds)
                ]
                found = list(pool.map(accuracy, jobs))
                values = f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})"
                yield f"{data}, {optimizer}, rate {rate}, {workers} workers: {values}"


if __name__ == "__main__":
    for line in spread("digits", seeds=7):
        print(line, flush=True)
