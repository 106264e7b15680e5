"""The speed of unequal workers that share parameter servers.

Asynchronous workers add up, 1/T = sum of 1/T_i (spotDNN, CM-DARE), until the parameter servers are saturated. The
functions take arrays of counts, since the planner evaluates millions of combinations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.sizing.speed.servers import soft_min
from shoal.sizing.types import PsModel

__all__ = ["cluster_samples", "cluster_throughput"]

Floats = NDArray[np.float64]


def cluster_throughput(
    counts: ArrayLike,
    step_seconds: ArrayLike,
    batch: ArrayLike,  # noqa: ARG001 - the batch does not change the number of steps
    ps: PsModel,
    n_ps: ArrayLike = 1,
) -> Floats:
    """Steps per second of the whole cluster, one step being one worker's mini-batch.

    Args:
        counts: (m, k) workers of each of k groups in m combinations.
        step_seconds: (k,) a worker's step time without contention, in s.
        batch: (k,) samples in a step (unused, for symmetry with `cluster_samples`).
        ps: the cost of one update at the parameter servers.
        n_ps: number of parameter servers, (m,) or one number.

    Returns:
        (m,) steps/s: soft minimum of the sum of the workers' speeds and of the servers' capacity.

    """
    alone = np.asarray(counts) @ (1.0 / np.asarray(step_seconds, dtype=np.float64))
    if ps.update_seconds == 0:
        return np.asarray(alone, dtype=np.float64)
    cap = np.asarray(n_ps, dtype=np.float64) ** ps.scaling / ps.update_seconds
    return soft_min(alone, cap, ps.sharpness)


def cluster_samples(
    counts: ArrayLike, step_seconds: ArrayLike, batch: ArrayLike, ps: PsModel, n_ps: ArrayLike = 1
) -> Floats:
    """Samples per second of the whole cluster. Contention slows all workers equally. Shapes as above."""
    n = np.asarray(counts)
    speed = 1.0 / np.asarray(step_seconds, dtype=np.float64)
    steps_alone = n @ speed
    samples_alone = n @ (speed * np.asarray(batch, dtype=np.float64))
    steps = cluster_throughput(n, step_seconds, batch, ps, n_ps)
    factor = np.divide(steps, steps_alone, out=np.zeros_like(steps), where=steps_alone > 0)
    return np.asarray(samples_alone * factor)
