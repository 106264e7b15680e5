"""Clusters with one and two parameter servers, simulated event by event: CM-DARE's data have one server only.

A worker computes, sends its gradients to all servers at once, and goes on when the slowest has answered; a server
serves one after another. Tensors are dealt to servers whole, at random, so a server's part of the work is not a half;
and the clusters of two servers ran on another day. None of this is a formula of the predictor.
"""

from __future__ import annotations

import heapq

import numpy as np
import pandas as pd
from numpy.typing import NDArray

__all__ = ["simulated"]

Floats = NDArray[np.float64]

# What CM-DARE's clusters show of one server (docs/sizing-model.md): seconds for a tensor and for a parameter.
TENSOR, PARAMETER = 94e-6, 5.5e-9
SIZES = 1.5  # spread of the logarithm of a tensor's size
COMPUTE, SERVICE = 0.05, 0.2  # spread of the logarithm of a step's compute, of a service
DAY = 0.1  # spread of the logarithm of the workers' speed from day to day
STEPS = 120  # of a worker


def simulated(singles: pd.DataFrame, workers: range, seed: int) -> pd.DataFrame:
    """Rows of clusters as `tables.load` gives them, with 1 and 2 servers, for the models and speeds of `singles`."""
    rng = np.random.default_rng(seed)
    found = []
    for _, single in singles.iterrows():
        sizes = rng.lognormal(0.0, SIZES, int(single["num_tensors"]))
        work = TENSOR + PARAMETER * float(single["params"]) * sizes / sizes.sum()
        for servers in (1, 2):
            dealt = rng.integers(0, servers, len(work))
            parts = np.array([work[dealt == at].sum() for at in range(servers)])
            compute = (1.0 if servers == 1 else rng.lognormal(0.0, DAY)) / float(single["measured"])
            for n in workers:
                speed = _steps_per_second(n, compute, parts, rng)
                found.append(single.to_dict() | {"num_workers": n, "num_ps": servers, "measured": speed})
    return pd.DataFrame(found)


def _steps_per_second(workers: int, compute: float, parts: Floats, rng: np.random.Generator) -> float:
    """The speed of the cluster between a quarter and the end of the run."""
    free = np.zeros(len(parts))
    ready = [(float(rng.uniform(0, compute)), worker) for worker in range(workers)]
    heapq.heapify(ready)
    ends = np.empty(workers * STEPS)
    for at in range(len(ends)):
        now, worker = heapq.heappop(ready)
        free = np.maximum(free, now) + parts * rng.lognormal(0.0, SERVICE, len(parts))
        ends[at] = free.max()
        heapq.heappush(ready, (float(ends[at] + compute * rng.lognormal(0.0, COMPUTE)), worker))
    ends.sort()
    warm = len(ends) // 4
    return float((len(ends) - 1 - warm) / (ends[-1] - ends[warm]))
