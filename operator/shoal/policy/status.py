"""The status of an active job, from what was seen and decided."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.api.training_job_status import (
    JobImages,
    ParameterServersStatus,
    Restarts,
    TrainingJobStatus,
    TrainingProgress,
    WorkersStatus,
)
from shoal.policy import names, pod_problems, slots, suspension, telemetry
from shoal.policy.admission import missing_disruption_budget
from shoal.policy.conditions import Conditions, PodCounts, phase, set_pod_conditions
from shoal.policy.counters import Counters
from shoal.policy.creation import Decisions
from shoal.policy.disruption import is_spot
from shoal.policy.incarnations import ByIndex, Incarnation, every
from shoal.policy.model import CreatePod, Observation, Reason
from shoal.policy.times import whole
from shoal.policy.wording import role_word

_NO_NODES = "nodes cannot be read: replacements start from pod signals, which arrive later"


@dataclass(frozen=True)
class Assessment:
    """Everything that the status depends on."""

    seen: Observation
    servers: ByIndex
    workers: ByIndex
    counters: Counters
    decisions: Decisions

    def status(self) -> TrainingJobStatus:
        """The whole status."""
        seen, before, counters = self.seen, self.seen.job.status, self.counters
        counts = self._counts()
        training = telemetry.progress(seen)
        conditions = self._conditions(counts, training)
        return TrainingJobStatus(
            observed_generation=seen.job.metadata.generation,
            phase="Suspended" if seen.job.spec.suspend else phase(before.phase, counts),
            reason=conditions.reason(),
            start_time=before.start_time or (whole(seen.now) if self._has_pods() else None),
            images=self._images(),
            suspended_seconds=suspension.suspended_seconds(seen),
            conditions=conditions.in_order(),
            slots=slots.to_record(self.servers, self.workers),
            parameter_servers=ParameterServersStatus(
                desired=counts.servers_wanted,
                ready=counts.servers_ready,
                restarts=counters.server_restarts,
                last_snapshot_time=telemetry.last_snapshot(seen),
            ),
            workers=self._workers_status(counts),
            restarts=Restarts(
                failures=counters.failures,
                disruptions=counters.disruptions,
                by_reason=dict(sorted(counters.by_reason.items())),
            ),
            last_disruption=telemetry.recovery(counters.last_disruption, seen, self.workers),
            last_failure=counters.last_failure,
            training=training,
            data=telemetry.data(before.data, seen.report.data if seen.report else None),
            output=before.output,
        )

    def _conditions(self, counts: PodCounts, training: TrainingProgress) -> Conditions:
        seen, timers = self.seen, self.decisions.timers
        before = seen.job.status
        conditions = Conditions(before.conditions, seen.job.metadata.generation, seen.now)
        initialized = before.start_time is not None or self._has_pods()
        conditions.set("Initialized", initialized, "Initialized" if initialized else "Creating")
        set_pod_conditions(conditions, counts)
        conditions.set_exceptional("Disrupted", self._outstanding_replacements(), "Recovered")
        problem, stuck = pod_problems.find(seen, timers), suspension.no_progress(seen, training, timers)
        degraded = problem or stuck or self._below_minimum(counts) or missing_disruption_budget(seen)
        conditions.set_exceptional("Degraded", degraded, "Healthy")
        quota = Reason("QuotaExceeded", self.decisions.quota) if self.decisions.quota else None
        conditions.set_exceptional("QuotaExceeded", quota, "QuotaAvailable")
        no_signals = None if seen.node_signals else Reason("NodeSignalsUnavailable", _NO_NODES)
        conditions.set_exceptional("NodeSignalsUnavailable", no_signals, "NodeSignalsAvailable")
        suspension.set_condition(seen, conditions)
        progressing = None
        if not (counts.settled or seen.job.spec.suspend or self.decisions.stalled):  # stalled: for a person
            words = f"{degraded.reason}: {degraded.message}" if degraded else "pods are being created"
            progressing = Reason("Progressing", words)
        conditions.set_exceptional("Reconciling", progressing, "Settled")
        conditions.set_exceptional("Stalled", self.decisions.stalled, "Resolved")
        return conditions

    def _counts(self) -> PodCounts:
        spec, suspended = self.seen.job.spec, self.seen.job.spec.suspend
        workers = self._active(self.workers)
        return PodCounts(
            servers_wanted=0 if suspended else spec.parameter_servers.replicas,
            servers_ready=sum(bool(each.pod and each.pod.ready) for each in self._active(self.servers)),
            workers_wanted=0 if suspended else spec.workers.replicas,
            workers_ready=sum(each.slot.state == "Running" for each in workers),
            workers_pending=sum(each.slot.state == "Starting" for each in workers),
            min_workers=spec.workers.min_replicas,
        )

    def _workers_status(self, counts: PodCounts) -> WorkersStatus:
        active = self._active(self.workers)
        bound = [node for each in active if (node := self.seen.nodes.get(each.node)) is not None]
        spot = sum(is_spot(node) for node in bound)
        return WorkersStatus(
            desired=counts.workers_wanted,
            active=len(active),
            ready=counts.workers_ready,
            pending=counts.workers_pending,
            succeeded=sum(each.awaiting_job_end for each in every(self.workers)),
            spot=spot,
            on_demand=len(bound) - spot,
            selector=names.worker_selector(self.seen.job),
        )

    @staticmethod
    def _active(role: ByIndex) -> list[Incarnation]:
        return [each for each in every(role) if each.active]

    def _images(self) -> JobImages | None:
        images = self.seen.images
        return (
            JobImages(ps=images.ps, worker=images.worker) if self._has_pods() else self.seen.job.status.images
        )

    def _has_pods(self) -> bool:
        return bool(self.seen.pods) or any(isinstance(a, CreatePod) for a in self.decisions.actions)

    def _outstanding_replacements(self) -> Reason | None:
        """Disrupted: a replacement is not created yet, or does not run yet."""
        spec = self.seen.job.spec
        if spec.suspend:
            return None
        waiting = [
            f"{role_word(role)} {index}"
            for role, by_index, wanted in (
                ("ps", self.servers, spec.parameter_servers.replicas),
                ("worker", self.workers, spec.workers.replicas),
            )
            for index, incarnations in by_index.items()
            if index < wanted and _awaits_replacement(incarnations)
        ]
        if not waiting:
            return None
        return Reason("ReplacementOutstanding", f"waiting for the replacement of {', '.join(waiting[:10])}")

    def _below_minimum(self, counts: PodCounts) -> Reason | None:
        if self.seen.job.status.phase != "Running" or self.seen.job.spec.suspend or counts.enough_workers:
            return None
        if not counts.workers_wanted:  # scaled to 0
            return None
        if any(each.awaiting_job_end for each in every(self.workers)):
            return None
        message = f"{counts.workers_ready} workers are running; workers.minReplicas is {counts.min_workers}"
        return Reason("BelowMinReplicas", message)


def _awaits_replacement(incarnations: tuple[Incarnation, ...]) -> bool:
    if not incarnations or any(each.running or each.awaiting_job_end for each in incarnations):
        return False
    newest = incarnations[-1]
    return newest.place.incarnation > 0 or not newest.active
