"""What is seen of the job from moment to moment: the basis of the figures and of the picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType

from dev.cluster.cgroups import Used
from dev.demo.watch import Picture

SETTLED_SECONDS = 10.0
"""A worker's times count from here on after its first push: the machine is held to its share by then."""


@dataclass(frozen=True)
class WorkerSeen:
    """A worker that trains: its machine's pool, samples and steps so far, and seconds in tasks and waits.

    `parts`: seconds of its last steps: compute, input, pull, push.
    """

    key: tuple[int, int]
    pool: str
    settled: bool
    samples: int
    steps: int = 0
    beside: float = 0.0
    used: Used = Used()
    parts: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Moment:
    """One look, `at` seconds after the job's start."""

    at: float
    phase: str
    workers: tuple[WorkerSeen, ...] = ()
    progress: float | None = None
    remaining: float | None = None
    """Predicted seconds from now, and the range that holds 90 % of simulated runs."""
    remaining_range: tuple[float, float] | None = None
    predicted_speed: float | None = None
    """Samples a second."""
    speed: float | None = None
    plan: tuple[tuple[str, int], ...] = ()
    revision: int = 0
    reason: str = ""
    confidence: float | None = None
    cost: float = 0.0

    @property
    def by_pool(self) -> Counter[str]:
        """Workers that train, by pool."""
        return Counter(worker.pool for worker in self.workers)


def moment(
    picture: Picture, now: datetime, pools: Mapping[str, str], used: Mapping[str, Used] = MappingProxyType({})
) -> Moment:
    """The moment of a picture. `pools`: the pool of each machine that ever was, `used`: of the CPUs, by name."""
    status, report = picture.job.status, picture.report if picture.fresh else None
    start = status.start_time or now
    told, plan = status.prediction, status.plan
    seen = tuple(
        WorkerSeen(
            (w.slot, w.incarnation),
            pools.get(w.node, ""),
            w.step_seconds is not None and now.timestamp() - (w.first_push_at or 0.0) >= SETTLED_SECONDS,
            w.samples,
            w.steps,
            w.beside_seconds,
            used.get(w.node, Used()),
            (w.compute_seconds, w.input_seconds, w.pull_seconds, w.push_seconds),
        )
        for w in picture.pushing
    )
    between = None
    if told and told.earliest_seconds is not None and told.latest_seconds is not None:
        between = float(told.earliest_seconds), float(told.latest_seconds)
    return Moment(
        at=(now - start).total_seconds(),
        phase=status.phase or "",
        workers=seen,
        progress=report.progress_percent if report else None,
        remaining=float(told.remaining_seconds) if told and told.remaining_seconds is not None else None,
        remaining_range=between,
        predicted_speed=float(told.samples_per_second) if told and told.samples_per_second else None,
        speed=report.samples_per_second if report else None,
        plan=tuple(sorted(plan.pools.items())) if plan else (),
        revision=plan.revision if plan else 0,
        reason=plan.reason if plan else "",
        confidence=float(plan.confidence) if plan and plan.confidence else None,
        cost=float(status.cost.accumulated) if status.cost else 0.0,
    )
