"""Accuracy after equal samples for 1 to 16 workers with uneven delays, by staleness and momentum rule (real data).

The parameter-server shard is the real one, in virtual time. The networks are small and in NumPy, so that hundreds of
runs take minutes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.harness import Measurement, summary
from benchmarks.virtual_job import SETS, Job, Policy, accuracy, accuracy_after_outage

WORKERS = (1, 4, 8, 16)
RULES: dict[str, tuple[Policy, bool]] = {
    "1/sqrt(tau), corrected momentum (default)": ("InverseSquareRoot", True),
    "1/sqrt(tau), momentum as configured": ("InverseSquareRoot", False),
    "1/tau, corrected momentum": ("Inverse", True),
    "1/tau, momentum as configured": ("Inverse", False),
    "constant, corrected momentum": ("Constant", True),
    "constant, momentum as configured": ("Constant", False),
}
MERGERS = {"scaled 1/W (default)": False, "Adasum": True}
PLOT = Path("build/convergence.png")
PROCESSES = 2

Row = tuple[str, str, float, int, Measurement]


def measure(quick: bool = False) -> Iterator[Measurement]:
    """Each figure is the median over seeds, with the worst and the best one."""
    seeds = range(1 if quick else 5)
    rows: list[Row] = []
    cases = list(itertools.product(SETS, RULES.items(), WORKERS))
    with ProcessPoolExecutor(PROCESSES) as pool:
        for (data, (label, (policy, corrected)), workers), rate in [
            (case, rate) for case in cases for rate in SETS[case[0]].rates
        ]:
            jobs = [Job(data, workers, policy, corrected, rate, seed) for seed in seeds]
            row = summary(
                f"accuracy, {data}, {workers} workers, rate {rate}, {label}",
                pool.map(accuracy, jobs),
                "",
                f"test set after {SETS[data].passes} passes",
            )
            rows.append((data, label, rate, workers, row))
            yield row
        for data, (label, merge), workers in itertools.product(SETS, MERGERS.items(), WORKERS[1:]):
            rate = SETS[data].rates[0]
            for steps in (8, 64):
                jobs = [Job(data, workers, "InverseSquareRoot", True, rate, seed) for seed in seeds]
                found = list(
                    pool.map(accuracy_after_outage, jobs, itertools.repeat(merge), itertools.repeat(steps))
                )
                name = f"{data}, {workers} workers, outage of {steps} steps each, {label}"
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

    figure, grid = plt.subplots(len(SETS), 2, figsize=(11, 4 * len(SETS)), squeeze=False)
    for (data, of), axes in zip(SETS.items(), grid, strict=True):
        for axis, rate in zip(axes, of.rates, strict=True):
            for label in RULES:
                mine = [row for row in rows if row[:3] == (data, label, rate)]
                axis.plot([row[3] for row in mine], [row[4].value for row in mine], marker="o", label=label)
            axis.set_xscale("log", base=2)
            axis.set_xticks(WORKERS, [str(w) for w in WORKERS])
            axis.set_xlabel("workers")
            axis.set_ylim(0, 1)
            axis.set_title(f"{data}, learning rate {rate}, momentum 0.9", fontsize=10)
            axis.grid(alpha=0.3)
        axes[0].set_ylabel(f"test accuracy after {of.passes} passes")
    grid[0][0].legend(fontsize=7)
    figure.tight_layout()
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=110)
    plt.close(figure)
