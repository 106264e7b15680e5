"""Plans of several jobs on shared pools against the exact optimum.

`python -m benchmarks.joint` solves 200 random instances of 2 to 5 jobs on 2 to 4 pools in which all jobs can keep
their deadlines (else there is no optimum to compare with), and the same as an integer program (HiGHS), which is what
Sia (SOSP 2023) allots heterogeneous GPUs to elastic jobs by.
"""

from __future__ import annotations

import itertools
import time

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from shoal.sizing.plan.assign import Columns, assign

__all__ = ["gap"]

INSTANCES = 200
Floats = NDArray[np.float64]


def instance(seed: int) -> tuple[list[Columns], Floats]:
    """2 to 5 jobs on 2 to 4 pools: every candidate that meets its deadline, with its cost."""
    rng = np.random.default_rng(seed)
    pools, jobs = int(rng.integers(2, 5)), int(rng.integers(2, 6))
    limits = rng.integers(3, 8, pools).astype(float)
    price = rng.uniform(0.2, 3.0, pools)
    grid = np.stack(np.meshgrid(*[np.arange(n + 1) for n in limits], indexing="ij")).reshape(pools, -1)[:, 1:]
    columns = []
    for _ in range(jobs):
        speed = rng.uniform(0.5, 2.0, pools)
        work = rng.uniform(1.0, 0.4 * (speed @ limits))
        hours = work / (speed @ grid) + rng.uniform(0.02, 0.1)
        ok = hours <= 1.0
        cost = hours[ok] * (price @ grid[:, ok])
        order = np.argsort(cost, kind="stable")
        columns.append(Columns(grid[:, ok][:, order].astype(float), cost[order]))
    return columns, limits


def optimum(columns: list[Columns], limits: Floats) -> float | None:
    """The exact least cost by an integer program (HiGHS); None if not all jobs can have a candidate."""
    sizes = [len(job.cost) for job in columns]
    one = np.zeros((len(columns), sum(sizes)))
    for row, (start, size) in enumerate(zip(np.cumsum([0, *sizes]), sizes, strict=False)):
        one[row, start : start + size] = 1
    found = milp(
        np.concatenate([job.cost for job in columns]),
        constraints=[
            LinearConstraint(one, 1, 1),
            LinearConstraint(np.concatenate([job.counts for job in columns], axis=1), -np.inf, limits),
        ],
        integrality=np.ones(sum(sizes)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-6},
    )
    return float(found.fun) if found.success else None


def gap(seed: int) -> float | None:
    """How much more the plans of one instance cost than the optimum, as a part of it; None if not all jobs fit."""
    columns, limits = instance(seed)
    exact = optimum(columns, limits)
    if exact is None:
        return None
    chosen = assign(columns, limits)
    taken = [(job, at) for job, at in zip(columns, chosen, strict=True) if at is not None]
    if len(taken) < len(columns):
        return float("inf")
    used = np.sum([job.counts[:, at] for job, at in taken], axis=0)
    assert (used <= limits).all(), "more than the pools hold"
    return sum(float(job.cost[at]) for job, at in taken) / exact - 1


if __name__ == "__main__":
    began = time.monotonic()
    solvable = (each for each in map(gap, itertools.count()) if each is not None)
    gaps = np.array(list(itertools.islice(solvable, INSTANCES)))
    print(
        f"{len(gaps)} instances: median gap {np.median(gaps):.2%}, 95 % of "
        f"them at most {np.quantile(gaps, 0.95):.2%}, worst {gaps.max():.2%}; {time.monotonic() - began:.0f} s"
    )
