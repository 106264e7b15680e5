"""Prometheus metrics of plans and of the pools that they size."""

from __future__ import annotations

from collections import Counter as Sums
from collections.abc import Callable, Iterable
from functools import partial

from shoal.api.capacity_pool import CapacityPool
from shoal.api.training_job import TrainingJob
from shoal.runtime.metrics import Metrics


class PlanMetrics:
    """The metrics of the planner. Pools are few and named by the platform team, so they may be labels."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.seconds = metrics.histogram(
            "shoal_plan_seconds",
            "Duration of one plan of all jobs with pools.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600),
        )
        self.busy = metrics.gauge(
            "shoal_plan_busy_ratio",
            "Share of the time that plans take, from the end of the last but one to the end of the last.",
        )
        self.plans = metrics.counter(
            "shoal_plans_total", "Plans, by result: done, error, interrupted.", "result"
        )

        self.faults = metrics.counter(
            "shoal_plan_faults_total",
            "What a plan had to leave out because of a fault, by what: job, pool, profile, report.",
            "what",
        )
        self.rows_left_out = metrics.gauge(
            "shoal_plan_rows_left_out",
            "Measured configurations of models that are not planned, too many for the last plan to learn from.",
        )

    def count_proposals(self, oldest_seconds: Callable[[], float], waiting: Callable[[], int]) -> None:
        """Export the age of the oldest proposal, and how many jobs wait for their first, computed at each scrape."""
        self._metrics.live_value(
            "shoal_plan_oldest_seconds",
            "Age of the oldest proposal to a job that is planned: plans take longer than they last where it grows.",
            oldest_seconds,
        )
        self._metrics.live_value(
            "shoal_plan_waiting_jobs", "Jobs with pools that wait for their first proposal.", waiting
        )

    def count_pools(
        self, pools: Callable[[], Iterable[CapacityPool]], jobs: Callable[[], Iterable[TrainingJob]]
    ) -> None:
        """Export the state of each pool, and what is advised, computed at each scrape."""

        def gauge(name: str, text: str, value: Callable[[CapacityPool], float]) -> None:
            self._metrics.live(
                name, text, "pool", lambda: {pool.metadata.name: value(pool) for pool in pools()}
            )

        gauge("shoal_pool_nodes", "Nodes of a CapacityPool.", lambda pool: pool.status.nodes)
        gauge("shoal_pool_used_nodes", "Its nodes with a pod of a job.", lambda pool: pool.status.used)
        words = "The nodes that it should have."
        gauge("shoal_pool_recommended_nodes", words, lambda pool: pool.status.recommended.nodes)
        words = "1 if its size is left to shoal-pools."
        gauge("shoal_pool_sized", words, lambda pool: float(pool.spec.scaling.mode != "Pods"))
        conditions = {
            "Exhausted": ("shoal_pool_exhausted", "1 while pods wait for a node of it for too long."),
            "FieldConflict": ("shoal_pool_field_conflict", "1 while somebody else sizes it, too."),
        }
        for kind, (name, text) in conditions.items():
            gauge(name, text, partial(_has, kind))

        def advised() -> dict[str, float]:
            nodes = Sums[str]()
            for job in jobs():
                if job.spec.elasticity.mode == "Advise" and job.status.plan and not job.status.finished:
                    nodes.update(job.status.plan.pools)
            return {pool.metadata.name: nodes[pool.metadata.name] for pool in pools()}

        self._metrics.live(
            "shoal_pool_advised_nodes",
            "The nodes that plans would have that are only advised.",
            "pool",
            advised,
        )


def _has(kind: str, pool: CapacityPool) -> float:
    return float(any(each.type == kind and each.status == "True" for each in pool.status.conditions))
