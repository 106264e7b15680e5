"""How long the whole job takes: work over speed, snapshots, and recoveries from revocations.

CM-DARE's sum, T = work / speed + snapshots * t_snapshot + revocations * t_recovery, with start-up, where snapshots
may be taken beside the training and a lost worker only slows an asynchronous job down. Each part carries its own
interval; the total's comes from drawing all of them together (a fixed seed: same input, same answer).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.sizing.types import Interval

__all__ = ["EndToEnd", "end_to_end"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class EndToEnd:
    """Total time and what it is made of, all in s."""

    total: Interval
    training: float
    startup: float
    snapshots: float
    recoveries: float
    revocations: float  # how many are expected


def end_to_end(
    steps: Interval,
    speed: Interval,
    *,
    workers: int,
    startup: Interval | None = None,
    snapshot: Interval | None = None,
    snapshot_every: float = 0.0,
    snapshot_blocks: float = 0.0,
    revocations_per_hour: float = 0.0,
    recovery: Interval | None = None,
    draws: int = 4000,
    seed: int = 0,
) -> EndToEnd:
    """Predict the time of a job.

    Args:
        steps: steps to do (an `Interval` of three equal numbers if it is known).
        speed: steps/s of the whole cluster.
        workers: how many workers share the speed.
        startup: s until the cluster runs.
        snapshot: s of one snapshot.
        snapshot_every: s between snapshots, 0: none are taken.
        snapshot_blocks: part of a snapshot during which training stands still; Shoal's are written beside it, so 0.
        revocations_per_hour: of one worker.
        recovery: s from a revocation to a replacement at full speed.
        draws: how many totals are drawn for the interval.
        seed: of the drawing.

    """
    if workers < 1:
        raise UsageError(f"a job needs at least one worker, not {workers}")
    if not speed.low > 0:
        raise UsageError(f"the predicted speed must be positive, not {speed.low}")
    if not 0 <= snapshot_blocks <= 1 or revocations_per_hour < 0 or snapshot_every < 0:
        raise UsageError("snapshot_blocks is a part (0 to 1), and rates and intervals are not negative")
    rng = np.random.default_rng(seed)
    zero = Interval(0.0, 0.0, 0.0)
    w, v, s, c, r = (
        _draw(i, rng, draws) for i in (steps, speed, startup or zero, snapshot or zero, recovery or zero)
    )
    training = w / v
    blocked = snapshot_blocks * c / snapshot_every if snapshot_every > 0 else np.zeros(draws)
    busy = training * (1 + blocked)
    # One worker of n away for r seconds costs the job r / n; revocations go on while the lost time is made up.
    per_second = workers * revocations_per_hour / 3600
    factor = np.maximum(1 - per_second * r / workers, 0.05)
    hits = rng.poisson(per_second * busy / factor)
    total = s + busy + hits * r / workers
    mean_training = steps.mean / speed.mean
    share = snapshot_blocks * (snapshot or zero).mean / snapshot_every if snapshot_every > 0 else 0.0
    mean_blocked = mean_training * share
    mean_r = (recovery or zero).mean
    mean_hits = per_second * (mean_training + mean_blocked) / max(1 - per_second * mean_r / workers, 0.05)
    mean = (startup or zero).mean + mean_training + mean_blocked + mean_hits * mean_r / workers
    low, high = (float(q) for q in np.quantile(total, [0.05, 0.95]))
    return EndToEnd(
        total=Interval(min(low, mean), mean, max(high, mean)),
        training=mean_training,
        startup=(startup or zero).mean,
        snapshots=mean_blocked,
        recoveries=mean_hits * mean_r / workers,
        revocations=mean_hits,
    )


def _draw(interval: Interval, rng: np.random.Generator, draws: int) -> Floats:
    """Draw from a split log-normal with this interval: the median is the prediction, each side has its own spread."""
    z = rng.standard_normal(draws)
    if interval.low <= 0:  # a normal cut off at 0
        spread = np.where(z < 0, interval.mean - interval.low, interval.high - interval.mean) / 1.6449
        return np.asarray(np.maximum(interval.mean + z * spread, 0.0))
    below, above = np.log(interval.mean / interval.low), np.log(interval.high / interval.mean)
    return np.asarray(interval.mean * np.exp(z * np.where(z < 0, below, above) / 1.6449))
