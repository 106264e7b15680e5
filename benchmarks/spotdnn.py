"""spotDNN's formulas as in its authors' code, on its own workload: what it chose, and what our search finds.

`python -m benchmarks.spotdnn` prints a table of the cases of tests/data/spotdnn.

Shang et al., "spotDNN: Provisioning Spot Instances for Predictable Distributed DNN Training in the Cloud", IWQoS
2023, in the form of the published code, with two exceptions: nothing is rounded, and the PCIe time of equation 7 is
subtracted as in the paper, where the code adds it. The code's loss has sqrt(N) where the paper's has
sqrt((R + g4) N), with R for how unequal the workers are; R is not used here. As published, there is no start-up time,
no revocation, and no price of the parameter server. A *worker* of the formulas is an instance, with the batch of all
its GPUs.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from shoal.sizing.availability import Floats
from shoal.sizing.plan.evaluation import Evaluated, Evaluator
from shoal.sizing.plan.problem import Objective, Pool, Problem
from shoal.sizing.plan.search import search
from shoal.sizing.plan.work import LossWork

DATA = Path(__file__).parents[1] / "tests" / "data" / "spotdnn"


@dataclass(frozen=True)
class Network:
    """Bandwidths in MB/s (demand of a worker, parameter server) and the model's size in MB.

    `a` and `b` give the share of workers that contend: P(N) = min(a sqrt(N) - b, 1).
    """

    model_mb: float
    requested: float
    server: float
    a: float
    b: float

    def of_worker(self, workers: Floats) -> Floats:
        """Bandwidth of each of N workers (m,): a mixture of fair share and full speed by P(N)."""
        contend = np.minimum(self.a * np.sqrt(workers) - self.b, 1.0)
        shared = contend * self.server / workers + (1 - contend) * self.requested
        return np.where(workers * self.requested > self.server, shared, self.requested)


@dataclass(frozen=True)
class SpotDnn:
    """Time and cost of combinations of instances, as published."""

    problem: Problem
    network: Network
    servers: int = 1
    zone: str = ""

    def evaluators(self) -> Sequence[Evaluator]:
        """Itself: the paper has one parameter server."""
        return (self,)

    def __call__(self, counts: Floats) -> Evaluated:
        """Evaluate counts (k, m)."""
        workers = counts.sum(axis=0)
        some = np.maximum(workers, 1.0)
        # T_i = T_measured + 2 S / B(N) - 2 S / Breq: only the network part depends on the contention.
        slower = 2 * self.network.model_mb * (1 / self.network.of_worker(some) - 1 / self.network.requested)
        step = np.array([[pool.step_seconds] for pool in self.problem.pools]) + slower
        valid = workers > 0
        if step.min(initial=1.0) <= 0:
            valid &= ((counts == 0) | (step > 0)).all(axis=0)
            step[step <= 0] = 1.0
        rates = np.divide(counts, step, out=step)
        steps = rates.sum(axis=0)  # of all workers together, in 1/s
        samples = np.array([float(pool.batch) for pool in self.problem.pools]) @ rates
        steps[~valid] = np.nan
        iterations = self.problem.work.iterations(samples / steps, some)
        seconds = iterations / steps
        hourly = np.array([pool.price for pool in self.problem.pools]) @ counts
        cost = seconds / 3600 * hourly
        nothing = ~np.isfinite(seconds)
        seconds[nothing] = np.inf
        cost[nothing] = np.inf
        return Evaluated(seconds, seconds, cost, iterations)


def published(quotas: Sequence[int], prices: Sequence[float], loss: float, deadline: float) -> SpotDnn:
    """The workload of the authors' repository, ResNet-110 on CIFAR-100, with these quotas and prices per hour."""
    workload = json.loads((DATA / "workload.json").read_text())
    share, curve = workload["P"], workload["loss"]
    network = Network(
        workload["S_param_MB"],
        workload["B_req_MBps"],
        workload["B_ps_MBps"],
        share["alpha1"],
        share["minus_beta1"],
    )
    with (DATA / "instances.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    pools = [
        Pool(
            row["type_in_repo"],
            quota,
            price,
            float(row["batch_instance"]) / float(row["img_per_s(instance)"]),
            int(row["batch_instance"]),
        )
        for row, quota, price in zip(rows, quotas, prices, strict=True)
    ]
    work = LossWork(loss, curve["r1"], curve["r2"], curve["r3"], curve["r4"])
    return SpotDnn(Problem(pools, work, objective=Objective(deadline=deadline)), network)


def main() -> None:
    """Print the table."""
    table = Table(
        "loss", "deadline", "spotDNN's windows", "our search", "cheaper by", title=__doc__.splitlines()[0]
    )
    for row in json.loads((DATA / "plans.json").read_text())["rows"]:
        found, _ = search(published(row["quota"], row["price"], row["objloss"], row["objtime"]))
        theirs, best = row["window_heuristic"], found.best
        cells = [f"{row['objloss']}", f"{row['objtime']} s"]
        cells.append(f"{theirs['counts']} ${theirs['cost']:.3f}" if theirs else "none")
        cells.append(f"{list(best.counts)} ${best.cost:.3f}" if best else "none")
        cells.append(f"{max(0.0, 1 - best.cost / theirs['cost']):.1%}" if best and theirs else "")
        table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    main()
