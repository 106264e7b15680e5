"""Prometheus metrics of TrainingJobs: the increments between two written statuses, so that nothing is counted twice."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal, InvalidOperation
from itertools import product

from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import TROUBLE, TrainingJobStatus
from shoal.cluster.clock import utc_now
from shoal.controllers.trainingjob.reactions import STAGES
from shoal.policy.common.times import parse_time
from shoal.policy.facts.losses import BY_NODE, LOSSES
from shoal.runtime.metrics import Metrics

REACTIONS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
"""Seconds: from an operator that reacts at once to a cloud that makes a node."""
WAITS_ANEW = {"Running", "Suspended", "QuotaExceeded", "Degraded"}
"""The conditions with whose change a wait begins: with a resume, with quota, with what a job waits for. A place in a
queue of pods is a Degraded that ends."""
RATIOS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0)
"""Predicted over measured."""


@dataclass(frozen=True)
class _Expected:
    """When the end of a job was first predicted, and in how many seconds it was."""

    at: datetime
    seconds: float


class JobMetrics:
    """The metrics of all jobs together. No label contains a job's name, so that their number stays small."""

    def __init__(self, metrics: Metrics, *, wall: Callable[[], datetime] = utc_now) -> None:
        self._metrics = metrics
        self._wall = wall
        self.actions = metrics.counter(
            "shoal_actions_total", "Actions of reconciles of jobs, by kind and result.", "action", "result"
        )
        self.polls = metrics.counter(
            "shoal_coordinator_polls_total", "Reads of coordinators, by result: read, unreachable.", "result"
        )
        self.disruptions = metrics.counter("shoal_disruptions_total", "Workers that the platform disrupted.")
        self.failures = metrics.counter(
            "shoal_failures_total", "Failures of jobs (disruptions not included)."
        )
        self.lost = metrics.counter(
            "shoal_workers_lost_total", "Failures and disruptions of workers, by reason.", "reason"
        )
        self.server_restarts = metrics.counter(
            "shoal_parameter_server_restarts_total", "Replacements and restarts of parameter servers."
        )
        self.reactions = metrics.histogram(
            "shoal_reaction_seconds",
            "From the loss of a pod to the stage that its replacement has reached: created, running, first_push.",
            "role",
            "stage",
            "reason",
            buckets=REACTIONS,
        )
        self.plan_changes = metrics.counter(
            "shoal_plan_changes_total", "Changes of the counts in plans of jobs."
        )
        self.speed_predictions = metrics.histogram(
            "shoal_predicted_speed_ratio",
            "Predicted over measured speed of a job, at each write of its status with a new prediction.",
            buckets=RATIOS,
        )
        self.finish_predictions = metrics.histogram(
            "shoal_predicted_finish_ratio",
            "Of a job that succeeded: the remaining time when it was first predicted, over what it took.",
            buckets=RATIOS,
        )
        self.cost = metrics.counter(
            "shoal_cost_total", "Cost of the jobs' nodes, in the currency of the pools."
        )
        self.saved = metrics.counter(
            "shoal_cost_saved_total", "What the same node hours would have cost more at on-demand prices."
        )
        self._first: dict[str, _Expected] = {}
        self._begin_at_0()

    def _begin_at_0(self) -> None:
        """Make the series of losses, so that the first wave of them is an increase, also of a new leader's process.

        Of the reactions, those to what comes in waves: all would be 5,000 series.
        """
        for reason in LOSSES:
            self.lost.labels(reason)
        for role, stages in STAGES.items():
            for stage, reason in product(stages, BY_NODE):
                self.reactions.labels(role, stage, reason)

    def count_jobs(
        self, jobs: Callable[[], Iterable[TrainingJob]], unreadable: Callable[[], int] = lambda: 0
    ) -> None:
        """Export the numbers of jobs, computed at each scrape, without those that another controller manages.

        `unreadable`: how many cannot be read, of which `jobs` has an older state or none.
        """

        def ours() -> list[TrainingJob]:
            return [job for job in jobs() if job.spec.ours]

        def waiting() -> list[tuple[str, TrainingJob]]:
            """Those that have not begun to train, with the reason."""
            return [
                (job.status.reason or job.status.phase or "Pending", job)
                for job in ours()
                if job.status.phase in {"", "Pending", "Starting"}
            ]

        def oldest() -> dict[str, float]:
            now, found = self._wall(), dict[str, float]()
            for reason, job in waiting():
                waited = max(0.0, (now - _waits_since(job, now)).total_seconds())
                found[reason] = max(waited, found.get(reason, 0.0))
            return found

        self._metrics.live(
            "shoal_jobs",
            "TrainingJobs by phase.",
            "phase",
            lambda: Count(job.status.phase or "Pending" for job in ours()),
        )
        self._metrics.live(
            "shoal_jobs_waiting",
            "TrainingJobs that have not begun to train (Pending, Starting), by the reason in their status.",
            "reason",
            lambda: Count(reason for reason, _ in waiting()),
        )
        self._metrics.live(
            "shoal_jobs_waiting_oldest_seconds",
            "For how long the one of them has waited that waits for longest, by the reason in its status.",
            "reason",
            oldest,
        )
        self._metrics.live(
            "shoal_jobs_troubled",
            "TrainingJobs by each condition of trouble that is True.",
            "condition",
            lambda: Count(
                condition.type
                for job in ours()
                for condition in job.status.conditions
                if condition.type in TROUBLE and condition.status == "True"
            ),
        )
        self._metrics.live_value(
            "shoal_jobs_unreadable",
            "TrainingJobs that this version cannot read: what they lose is not replaced.",
            unreadable,
        )
        self._metrics.live_value(
            "shoal_cost_per_hour",
            "Cost of the nodes in use now, per hour, in the currency of the pools.",
            lambda: float(sum(_amount(job.status.cost.per_hour) for job in ours() if job.status.cost)),
        )

    def reacted(self, role: str, reason: str, stage: str, seconds: float) -> None:
        """See `reactions.Observe`."""
        self.reactions.labels(role, stage, reason).observe(seconds)

    def forget(self, uid: str) -> None:
        """Drop what is known of a deleted job."""
        self._first.pop(uid, None)

    def count_changes(self, uid: str, old: TrainingJobStatus, new: TrainingJobStatus, now: datetime) -> None:
        """Count the increments between two written statuses."""
        self._count_losses(old, new)
        self._count_predictions(uid, old, new, now)
        for counter, name in ((self.cost, "accumulated"), (self.saved, "saved_versus_on_demand")):
            before, after = (
                _amount(getattr(status.cost, name)) if status.cost else Decimal(0) for status in (old, new)
            )
            counter.inc(max(0.0, float(after - before)))

    def _count_losses(self, old: TrainingJobStatus, new: TrainingJobStatus) -> None:
        self.disruptions.inc(max(0, new.restarts.disruptions - old.restarts.disruptions))
        self.failures.inc(max(0, new.restarts.failures - old.restarts.failures))
        self.server_restarts.inc(max(0, new.parameter_servers.restarts - old.parameter_servers.restarts))
        for reason, more in _increments(old.restarts.by_reason, new.restarts.by_reason).items():
            self.lost.labels(reason).inc(more)

    def _count_predictions(
        self, uid: str, old: TrainingJobStatus, new: TrainingJobStatus, now: datetime
    ) -> None:
        revision = new.plan.revision if new.plan else 0
        self.plan_changes.inc(max(0, revision - (old.plan.revision if old.plan else 0)))
        said = new.prediction
        if said is not None and said != old.prediction and said.relative_error is not None:
            self.speed_predictions.observe(1.0 + float(said.relative_error))
        if said is not None and said.remaining_seconds and not new.finished:
            self._first.setdefault(uid, _Expected(now, said.remaining_seconds))
        if new.finished and (first := self._first.pop(uid, None)) is not None:
            took = (now - first.at).total_seconds()
            if new.phase == "Succeeded" and took > 0:
                self.finish_predictions.observe(first.seconds / took)


def _waits_since(job: TrainingJob, now: datetime) -> datetime:
    """Since when a job that does not train is expected to."""
    created = parse_time(job.metadata.creation_timestamp) or now
    changed = (each.last_transition_time for each in job.status.conditions if each.type in WAITS_ANEW)
    return max((created, *changed))


def _amount(text: str) -> Decimal:
    """An amount of money of a status; of one that somebody changed to what is no number, nothing."""
    try:
        amount = Decimal(text)
    except InvalidOperation:
        return Decimal(0)
    return amount if amount.is_finite() else Decimal(0)


def _increments(old: Mapping[str, int], new: Mapping[str, int]) -> dict[str, int]:
    return {reason: count - old.get(reason, 0) for reason, count in new.items() if count > old.get(reason, 0)}
