"""The speed of unequal workers that share parameter servers.

Asynchronous workers add up, 1/T = sum of 1/T_i (spotDNN, CM-DARE), until the parameter servers are saturated. The
functions take arrays of counts, since the planner evaluates millions of combinations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.sizing.types import PsModel

__all__ = ["busy", "cluster_samples", "cluster_throughput", "soft_min"]

Floats = NDArray[np.float64]


def soft_min(demand: Floats, cap: Floats | float, sharpness: float) -> Floats:
    """A smooth minimum (demand^-p + cap^-p)^(-1/p) of two speeds: 0 where demand is 0, at most either one."""
    ratio = demand / cap
    if np.isinf(sharpness):
        return np.asarray(np.minimum(demand, cap))
    # Factoring out the smaller one keeps powers from overflowing.
    small = np.minimum(ratio, 1.0)
    other = np.minimum(1.0, 1.0 / np.maximum(ratio, 1.0))
    worst = np.where(ratio <= 1.0, small, other)
    return np.asarray(np.minimum(demand, cap) * (1.0 + worst**sharpness) ** (-1.0 / sharpness))


def busy(speed: Floats, alone: Floats, sharpness: float) -> Floats:
    """How much the servers' capacity determines the speed: 0 far below it, 1 at it.

    It is d log(speed) / d log(capacity) of the smooth minimum; the rest to 1 is the derivative by the workers' speed.
    """
    if np.isinf(sharpness):
        return np.asarray(np.where(speed < alone, 1.0, 0.0))
    return np.asarray(1.0 - np.minimum(speed / alone, 1.0) ** sharpness)


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
