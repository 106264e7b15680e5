"""Tells what was seen and decided: the status of an active job, and events."""

from __future__ import annotations

from collections import Counter

from shoal.api.training_job_status import (
    JobImages,
    ParameterServersStatus,
    Restarts,
    TrainingJobStatus,
    TrainingProgress,
    WorkersStatus,
)
from shoal.manifests import names
from shoal.manifests.platforms import is_spot
from shoal.policy.actions import CreatePod
from shoal.policy.common.wording import role_word
from shoal.policy.decide import records, suspension
from shoal.policy.decide.admission import missing_disruption_budget, missing_pod_group, missing_workload
from shoal.policy.decide.decide import Decisions
from shoal.policy.decide.members import FELL_BACK, MOVED, Member, every, follows_a_loss
from shoal.policy.facts.coordinator import unasked
from shoal.policy.facts.read import Facts
from shoal.policy.model import Plan, Reason
from shoal.policy.tell import pod_problems, progress
from shoal.policy.tell.conditions import Conditions, PodCounts, api_server_refuses, phase, set_pod_conditions
from shoal.policy.tell.events import events_of_changes
from shoal.policy.tell.telemetry import OUTSTANDING
from shoal.policy.tell.the_end import tell_end

ADMITTED = Reason("Admitted", "Kueue has admitted all parameter servers and workers.minReplicas")
_OLD_PODS = Reason(
    "PodsUnreadable",
    "the operator may not list pods any more, and knows them as they were: give it the right",
)
_QUEUED = "the job begins when its queue admits it: see the condition QuotaReserved"
_NO_NODES = "nodes cannot be read: replacements start from pod signals, which arrive later"


def tell(facts: Facts, decided: Decisions) -> Plan:
    """The plan of an active job."""
    status = _Teller(facts, decided).status()
    if decided.end is not None:
        return tell_end(facts, decided.end, status, decided.counters)
    return Plan(
        actions=decided.in_order(),
        status=status,
        events=(
            *decided.counters.events,
            *decided.exclusions.events,
            *decided.wanted.planned.events,
            *events_of_changes(facts, decided, status),
        ),
        wake_after=facts.timers.next_seconds,
        nodes=records.nodes_by_pool(facts, decided.workers, decided.actions.actions)
        - Counter(pool for pool, _ in facts.in_vain),
        looked_at=decided.looked_at(facts),
    )


class _Teller:
    """Writes the status."""

    def __init__(self, facts: Facts, decided: Decisions) -> None:
        self._facts, self._decided = facts, decided
        self._seen = facts.seen
        self._active_workers = [each for group in decided.workers.values() for each in _active(group)]
        self._moving = any(each.moves for each in self._active_workers)
        self._has_pods = bool(facts.seen.pods) or any(
            isinstance(a, CreatePod) for a in decided.actions.actions
        )

    def status(self) -> TrainingJobStatus:
        """The whole status."""
        seen, facts, before = self._seen, self._facts, self._seen.job.status
        counters = self._decided.counters
        training = progress.progress(facts)
        counts = self._counts(training)
        conditions = self._conditions(counts, training)
        return before.model_copy(
            update={
                "observed_generation": seen.job.metadata.generation,
                "phase": self._phase(counts, conditions),
                "reason": conditions.reason(),
                "start_time": before.start_time or (facts.now if self._has_pods else None),
                "images": self._images(),
                "args_digest": before.args_digest
                or (seen.job.spec.training.args_digest if self._has_pods else None),
                "suspended_seconds": suspension.suspended_seconds(facts),
                "conditions": conditions.in_order(),
                "slots": records.to_record(facts, self._decided.servers, self._decided.workers),
                "parameter_servers": ParameterServersStatus(
                    desired=counts.servers_wanted,
                    ready=counts.servers_ready,
                    restarts=counters.server_restarts,
                    last_snapshot_time=progress.last_snapshot(facts),
                ),
                "workers": self._workers_status(counts),
                "restarts": Restarts(
                    failures=counters.failures,
                    disruptions=counters.disruptions,
                    withdrawn=counters.withdrawn or None,
                    excused=counters.excused or None,
                    by_reason=dict(sorted(counters.by_reason.items())),
                ),
                "last_disruption": progress.recovery(counters.last_disruption, facts, self._decided.workers),
                "last_failure": counters.last_failure,
                "training": training,
                "data": progress.data(before.data, facts.report.data if facts.report else None),
                **self._planning(),
            }
        )

    def _planning(self) -> dict[str, object]:
        """What is told about pools, nodes and money."""
        before, decided = self._seen.job.status, self._decided
        return {
            "plan": decided.plan(self._facts),
            "prediction": progress.prediction(self._facts),
            "pool_usage": decided.usage.pools,
            "cost": decided.usage.cost,
            "counted_until": decided.usage.counted_until,
            "excluded_nodes": decided.exclusions.nodes,
            "node_failures": decided.exclusions.failures,
            "returning_since": self._facts.now if self._returns() else before.returning_since,
        }

    def _returns(self) -> bool:
        """Whether a worker begins to try a spot node again, or gives one up: the next tries later."""
        new = (each.slot for each in every(self._decided.workers) if not each.recorded)
        returns = self._decided.wanted.returns_to_spot
        return any(slot.cause == FELL_BACK or (slot.cause == MOVED and returns(slot)) for slot in new)

    def _phase(self, counts: PodCounts, conditions: Conditions) -> str:
        before = self._seen.job.status.phase
        if not self._facts.suspended:
            return phase(before, counts)
        suspended = conditions.get("Suspended")
        done = suspended is not None and suspended.status == "True"
        return "Suspended" if done else before or "Pending"

    def _conditions(self, counts: PodCounts, training: TrainingProgress) -> Conditions:
        seen, facts, actions = self._seen, self._facts, self._decided.actions
        before = seen.job.status
        conditions = Conditions(before.conditions, seen.job.metadata.generation, seen.now)
        initialized = before.start_time is not None or self._has_pods
        conditions.set("Initialized", initialized, "Initialized" if initialized else "Creating")
        set_pod_conditions(conditions, counts)
        if facts.suspended:
            why = ("Suspended", "the job is suspended") if seen.job.spec.suspend else ("Queued", _QUEUED)
            conditions.set("Running", False, *why)
        conditions.set_exceptional("Disrupted", self._outstanding_replacements(), "Recovered")
        problem = self._decided.wanted.problem
        degraded = (
            (_OLD_PODS if seen.old_pods else None)
            # What the manifest names wrongly explains what its pods suffer; full pools explain nothing.
            or (problem if problem is not None and problem.reason != "PoolsFull" else None)
            or api_server_refuses(seen)
            or pod_problems.find(facts)
            or pod_problems.no_progress(facts, training)
            or pod_problems.unreachable(facts)
            or pod_problems.snapshots_fail(facts)
            or problem
            or actions.conflict
            or self._below_minimum(counts)
            or missing_disruption_budget(seen)
            or missing_pod_group(seen)
            or missing_workload(seen, facts.quota)
        )
        conditions.set_exceptional("Degraded", degraded, "Healthy")
        quota = Reason("QuotaExceeded", actions.quota) if actions.quota else None
        conditions.set_exceptional("QuotaExceeded", quota, "QuotaAvailable")
        self._set_quota(conditions)
        no_signals = None if seen.node_signals else Reason("NodeSignalsUnavailable", _NO_NODES)
        conditions.set_exceptional("NodeSignalsUnavailable", no_signals, "NodeSignalsAvailable")
        conditions.set_exceptional("NodeSignalsSuspect", facts.suspicion, "NodeSignalsBelieved")
        planned = self._decided.wanted.planned
        if planned.ready is not None:
            conditions.set("PlanReady", True, *planned.ready)
        elif planned.not_ready is not None:
            conditions.set("PlanReady", False, *planned.not_ready)
        elif seen.job.spec.elasticity.mode in {"Off", "Manual"}:
            conditions.set_exceptional("PlanReady", None, "NotPlanned")
        self._set_suspended(conditions)
        progressing = None
        if facts.suspended:
            suspended = conditions.get("Suspended")
            if suspended is not None and suspended.status == "False":
                progressing = Reason("Progressing", suspended.message)
        elif not (actions.stalled or (counts.settled and not self._moving)):  # stalled: for a person
            words = "workers move to other nodes" if counts.settled else "pods are being created"
            words = f"{degraded.reason}: {degraded.message}" if degraded else words
            progressing = Reason("Progressing", words)
        conditions.set_exceptional("Reconciling", progressing, "Settled")
        conditions.set_exceptional("Stalled", actions.stalled, "Resolved")
        return conditions

    def _set_suspended(self, conditions: Conditions) -> None:
        if not self._facts.suspended:
            conditions.set_exceptional("Suspended", None, "Resumed")
        elif suspension.is_complete(self._facts):
            if self._seen.job.spec.suspend:
                conditions.set("Suspended", True, "Suspended", "set spec.suspend to false to resume")
            else:
                conditions.set("Suspended", True, "Queued", _QUEUED)
        else:
            conditions.set("Suspended", False, "Suspending", "its pods are terminating")

    def _set_quota(self, conditions: Conditions) -> None:
        quota = self._facts.quota
        if not quota.wanted:
            conditions.set_exceptional("QuotaReserved", None, "NotQueued")
        elif self._seen.job.spec.suspend:
            conditions.set("QuotaReserved", False, "Suspended", "a suspended job asks for no quota")
        else:
            conditions.set("QuotaReserved", quota.lacks is None, *(quota.lacks or ADMITTED))

    def _counts(self, training: TrainingProgress) -> PodCounts:
        spec, facts, suspended = self._seen.job.spec, self._facts, self._facts.suspended
        workers, at_rest = self._active_workers, facts.at_rest
        known = (
            self._seen.report is not None
            or bool(training.phase)
            # What a leader that could not ask has told is not taken back by one that has not asked yet.
            or (self._seen.job.status.phase != "Running" and unasked(self._seen))
        )
        return PodCounts(
            servers_wanted=0 if suspended else spec.parameter_servers.replicas,
            servers_ready=sum(
                bool(each.active and each.pod and each.pod.ready) for each in every(self._decided.servers)
            ),
            workers_asked=self._decided.wanted.asked,
            workers_wanted=len(self._decided.wanted.workers) - self._decided.wanted.lingering,
            workers_ready=len(at_rest.running) + sum(each.works for each in workers),
            workers_pending=len(at_rest.starting)
            + sum(each.active and each.slot.state == "Starting" for each in every(self._decided.workers)),
            min_workers=spec.workers.min_replicas,
            trains=training.step > 0 if known else None,
        )

    def _workers_status(self, counts: PodCounts) -> WorkersStatus:
        active, at_rest = self._active_workers, self._facts.at_rest
        nodes, platform = self._seen.nodes, self._seen.platform
        bound = at_rest.bound + Counter(
            is_spot(node, platform) for each in active if (node := nodes.get(each.slot.node)) is not None
        )
        return WorkersStatus(
            desired=counts.workers_wanted,
            active=len(active) + len(at_rest),
            ready=counts.workers_ready,
            pending=counts.workers_pending,
            succeeded=sum(each.awaiting_job_end for each in every(self._decided.workers)),
            spot=bound[True],
            on_demand=bound[False],
            selector=names.worker_selector(self._seen.job),
        )

    def _images(self) -> JobImages | None:
        images = self._seen.images
        if not self._has_pods:
            return self._seen.job.status.images
        return JobImages(
            ps=images.ps,
            worker=images.worker,
            worker_gpu=images.worker_gpu or None,
            node_selector=dict(images.node_selector) or None,
        )

    def _outstanding_replacements(self) -> Reason | None:
        """Disrupted: a replacement is not created yet, or does not run yet."""
        spec, wanted = self._seen.job.spec, self._decided.wanted
        if self._facts.suspended:
            return None
        shards = range(spec.parameter_servers.replicas)
        servers = [
            i for i, each in self._decided.servers.items() if i in shards and _awaits_replacement(each)
        ]
        workers = {
            i
            for i, each in self._decided.workers.items()
            if i in wanted.workers and _awaits_replacement(each)
        } | {i for i, each in self._facts.at_rest.starting.items() if each.slot.replaces}
        waiting = [f"{role_word('ps')} {index}" for index in servers]
        waiting += [f"{role_word('worker')} {index}" for index in sorted(workers)]
        if not waiting:
            return None
        return Reason(OUTSTANDING, f"waiting for the replacement of {', '.join(waiting[:10])}")

    def _below_minimum(self, counts: PodCounts) -> Reason | None:
        if self._seen.job.status.phase != "Running" or self._facts.suspended or counts.enough_workers:
            return None
        if not counts.workers_wanted:  # scaled to 0
            return None
        if any(each.awaiting_job_end for each in every(self._decided.workers)):
            return None
        least = f" ({counts.min_workers})" if counts.workers_ready else ""
        return Reason("BelowMinReplicas", f"{counts.too_few}{least}")


def _active(group: list[Member]) -> list[Member]:
    """Who has the slot of a worker: one that moves, until its successor runs."""
    active = [each for each in group if each.active]
    if any(each.running for each in active):
        return active
    return [each for each in group if each.moves] or active


def _awaits_replacement(members: list[Member]) -> bool:
    if not members:
        return False
    newest = members[-1]
    if any(each.running or each.moves or each.awaiting_job_end or each.missing for each in members):
        return False
    return newest.slot.replaces if newest.active else follows_a_loss(members)
