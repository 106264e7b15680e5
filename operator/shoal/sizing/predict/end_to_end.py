"""How long the whole job takes: work over speed, snapshots, and recoveries from revocations.

CM-DARE's sum, T = work / speed + snapshots * t_snapshot + revocations * t_recovery, and start-up. Snapshots may overlap
with training, and a lost worker only slows an asynchronous job down. Each part has its own interval; the interval of
the total comes from drawing all of them together, with a fixed seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        steps: steps to do (three equal numbers if known).
        speed: steps/s of the whole cluster.
        workers: how many workers share the speed.
        startup: s until the cluster runs.
        snapshot: s of one snapshot.
        snapshot_every: s between snapshots, 0: no snapshots.
        snapshot_blocks: part of a snapshot during which training stops; 0 for Shoal's.
        revocations_per_hour: of one worker.
        recovery: s from a revocation to a replacement at full speed.
        draws: number of draws for the interval.
        seed: seed of the draws.

    """
    if not speed.low > 0:
        raise UsageError(f"the predicted speed must be positive, not {speed.low}")
    job = _Job(workers, revocations_per_hour, snapshot_every, snapshot_blocks)
    inputs = [interval or _ZERO for interval in (steps, speed, startup, snapshot, recovery)]
    expected = job.parts(*(np.array(interval.mean) for interval in inputs))
    low, high = _quantiles(job, inputs, draws, seed)
    mean = float(expected.total)
    return EndToEnd(
        total=Interval(min(low, mean), mean, max(high, mean)),
        training=float(expected.training),
        startup=float(expected.startup),
        snapshots=float(expected.snapshots),
        recoveries=float(expected.revocations * expected.recovery),
        revocations=float(expected.revocations),
    )


_ZERO = Interval(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class _Parts:
    """What a job's time is made of, in s, once or for many draws. `recovery` is what one revocation costs the job."""

    startup: Floats
    training: Floats
    snapshots: Floats
    revocations: Floats
    recovery: Floats

    @property
    def total(self) -> Floats:
        return self.startup + self.training + self.snapshots + self.revocations * self.recovery


@dataclass(frozen=True)
class _Job:
    """What is known of a job for sure, as in `end_to_end`."""

    workers: int
    revocations_per_hour: float
    snapshot_every: float
    snapshot_blocks: float

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"a job needs at least one worker, not {self.workers}")
        if not 0 <= self.snapshot_blocks <= 1 or min(self.revocations_per_hour, self.snapshot_every) < 0:
            raise UsageError("snapshot_blocks must be between 0 and 1, and rates and intervals 0 or more")

    def parts(
        self, steps: Floats, speed: Floats, startup: Floats, snapshot: Floats, recovery: Floats
    ) -> _Parts:
        """The expected time."""
        training = steps / speed
        blocked = self.snapshot_blocks / self.snapshot_every if self.snapshot_every > 0 else 0.0
        snapshots = training * blocked * snapshot
        # Revocations continue while the lost time is made up. One worker of n costs the job 1 / n of its absence.
        rate = self.revocations_per_hour / 3600
        revocations = self.workers * rate * (training + snapshots) / np.maximum(1 - rate * recovery, 0.05)
        return _Parts(startup, training, snapshots, revocations, recovery / self.workers)


def _quantiles(job: _Job, inputs: Sequence[Interval], draws: int, seed: int) -> tuple[float, float]:
    """The 90 % interval of the total time."""
    rng = np.random.default_rng(seed)
    expected = job.parts(*(_draw(interval, rng, draws) for interval in inputs))
    drawn = replace(expected, revocations=rng.poisson(expected.revocations).astype(float))
    low, high = np.quantile(drawn.total, [0.05, 0.95])
    return float(low), float(high)


def _draw(interval: Interval, rng: np.random.Generator, draws: int) -> Floats:
    """Draw from a split log-normal with this interval: the median is the prediction, each side has its own spread."""
    z = rng.standard_normal(draws)
    if interval.low <= 0:  # a normal cut off at 0
        spread = np.where(z < 0, interval.mean - interval.low, interval.high - interval.mean) / 1.6449
        return np.asarray(np.maximum(interval.mean + z * spread, 0.0))
    below, above = np.log(interval.mean / interval.low), np.log(interval.high / interval.mean)
    return np.asarray(interval.mean * np.exp(z * np.where(z < 0, below, above) / 1.6449))
