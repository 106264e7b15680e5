"""spotDNN's formulas as in its authors' code, to compare with the paper and to check our search.

Shang et al., "spotDNN: Provisioning Spot Instances for Predictable Distributed DNN Training in the Cloud", IWQoS
2023, in the form of the published code, with two exceptions: nothing is rounded, and the PCIe time of equation 7 is
subtracted as in the paper, where the code adds it. The code's loss has sqrt(N) where the paper's has
sqrt((R + g4) N), with R for how unequal the workers are; R is not used here. As published, there is no start-up time,
no revocation, and no price of the parameter server. A *worker* of the formulas is an instance, with the batch of all
its GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.plan.evaluation import Evaluated, Evaluator
from shoal.sizing.plan.problem import Floats, LossWork, Objective, Pool

__all__ = ["Network", "SpotDnn"]


@dataclass(frozen=True)
class Network:
    """Bandwidths in MB/s (demand of a worker, parameter server, PCIe) and the model's size in MB.

    `a` and `b` give the share of workers that contend: P(N) = min(a sqrt(N) - b, 1).
    """

    model_mb: float
    requested: float
    server: float
    pcie: float
    a: float
    b: float

    def __post_init__(self) -> None:
        for name in ("model_mb", "requested", "server", "pcie"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} of the workload must be a positive number, not {value}")
        if not (math.isfinite(self.a) and math.isfinite(self.b)):
            raise UsageError("P.alpha1 and P.minus_beta1 of the workload must be numbers")

    def of_worker(self, workers: Floats) -> Floats:
        """Bandwidth of each of N workers (m,): a mixture of fair share and full speed by P(N)."""
        contend = np.minimum(self.a * np.sqrt(workers) - self.b, 1.0)
        shared = contend * self.server / workers + (1 - contend) * self.requested
        return np.where(workers * self.requested > self.server, shared, self.requested)


@dataclass(frozen=True)
class SpotDnn:
    """Time and cost of combinations of instances, as published."""

    pools: Sequence[Pool]
    network: Network
    work: LossWork
    objective: Objective
    servers: int = 1
    zone: str = ""

    @property
    def limits(self) -> tuple[int, ...]:
        """The quotas."""
        return tuple(pool.limit for pool in self.pools)

    def evaluators(self) -> Sequence[Evaluator]:
        """Itself: the paper has one parameter server."""
        return (self,)

    def __call__(self, counts: Floats) -> Evaluated:
        """Evaluate counts (k, m)."""
        workers = counts.sum(axis=0)
        some = np.maximum(workers, 1.0)
        # T_i = T_measured + 2 S / B(N) - 2 S / Breq: only the network part depends on the contention.
        slower = 2 * self.network.model_mb * (1 / self.network.of_worker(some) - 1 / self.network.requested)
        step = np.array([[pool.step_seconds] for pool in self.pools]) + slower
        valid = workers > 0
        if step.min(initial=1.0) <= 0:
            valid &= ((counts == 0) | (step > 0)).all(axis=0)
            step[step <= 0] = 1.0
        rates = np.divide(counts, step, out=step)
        steps = rates.sum(axis=0)  # of all workers together, in 1/s
        samples = np.array([float(pool.batch) for pool in self.pools]) @ rates
        steps[~valid] = np.nan
        iterations = self.work.iterations(samples / steps, some)
        seconds = iterations / steps
        hourly = np.array([pool.price for pool in self.pools]) @ counts
        cost = seconds / 3600 * hourly
        nothing = ~np.isfinite(seconds)
        seconds[nothing] = np.inf
        cost[nothing] = np.inf
        return Evaluated(seconds, seconds, cost, iterations)
