"""The plan for one job: everything about it goes in, what to do and what to say comes out. Reads top to bottom.

Pure: no clock, no I/O, no memory. The same observation always gives the same plan, and carrying out a plan and looking
again leads to an empty one.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.api.training_job import MANAGED_BY
from shoal.api.training_job_status import (
    ParameterServersStatus,
    Restarts,
    TrainingJobStatus,
    WorkersStatus,
)
from shoal.policy import (
    cleanup,
    completion,
    finish,
    manifests,
    names,
    parameter_servers,
    pod_problems,
    slots,
    suspension,
    telemetry,
    workers,
)
from shoal.policy.admission import too_early, unprotected
from shoal.policy.conditions import Census, Conditions, of_pods, phase
from shoal.policy.counters import Counters
from shoal.policy.creation import Decisions
from shoal.policy.disruption import is_spot
from shoal.policy.incarnations import ByIndex, Incarnation
from shoal.policy.model import (
    CreateDisruptionBudget,
    CreatePod,
    CreateSecret,
    CreateService,
    Event,
    Observation,
    Plan,
    UpdateService,
)
from shoal.policy.times import whole

_DO_FIRST = (CreateSecret, CreateService, UpdateService, CreatePod)


def plan(seen: Observation) -> Plan:
    """What to do about a job, and what its status is."""
    job = seen.job
    if job.metadata.deletion_timestamp or (job.spec.managed_by or MANAGED_BY) != MANAGED_BY:
        return Plan((), job.status)
    if job.status.finished:
        return finish.afterwards(seen)

    counters = Counters(job.status, seen.now)
    decisions = Decisions()
    crew = slots.account(seen, "worker", suspension.wants_worker(job), counters)
    servers = slots.account(seen, "ps", suspension.wants_server(seen, crew), counters)

    if end := completion.decide(seen, servers, counters, decisions.wake_after):
        status = _Picture(seen, servers, crew, counters, decisions).status()
        return finish.ending(seen, end, status, counters.events)

    if not job.spec.suspend:
        _foundations(seen, decisions)
        parameter_servers.fill(seen, servers, decisions)
        workers.fill(seen, crew, decisions)
    decisions.actions += cleanup.clean(seen, [servers, crew], decisions.wake_after)
    if any(h.awaiting_the_end for role in (servers, crew) for of in role.values() for h in of):
        decisions.wake_after.append(slots.DONE_PATIENCE.total_seconds())

    picture = _Picture(seen, servers, crew, counters, decisions)
    status = picture.status()
    return Plan(
        actions=tuple(sorted(decisions.actions, key=_order)),
        status=status,
        events=(*counters.events, *picture.events(status)),
        wake_after=min(decisions.wake_after, default=None),
    )


def _order(action: object) -> int:
    return next((i for i, kind in enumerate(_DO_FIRST) if isinstance(action, kind)), len(_DO_FIRST))


def _foundations(seen: Observation, decisions: Decisions) -> None:
    """The Secret and the disruption budget. Services belong to their shards."""
    wake_after = decisions.wake_after
    secret, budget = names.secret_name(seen.job), names.budget_name(seen.job)
    if secret not in seen.existing and not too_early(seen, secret, wake_after):
        decisions.actions.append(CreateSecret(secret))
    if budget not in seen.existing and not too_early(seen, budget, wake_after):
        decisions.actions.append(CreateDisruptionBudget(budget, manifests.disruption_budget(seen.job)))


@dataclass(frozen=True)
class _Picture:
    """The status and the events that follow from what was seen and decided."""

    seen: Observation
    servers: ByIndex
    crew: ByIndex
    counters: Counters
    decisions: Decisions

    def status(self) -> TrainingJobStatus:
        """The whole status: each fact from the one place where it is known."""
        seen, before, counters = self.seen, self.seen.job.status, self.counters
        census = self._census()
        conditions = Conditions(before.conditions, seen.job.metadata.generation, seen.now)
        training = telemetry.progress(seen)
        trouble = pod_problems.find(seen, self.decisions.wake_after)
        conditions.set(
            "Initialized",
            before.start_time is not None or self._has_pods(),
            "Initialized" if self._has_pods() else "Creating",
        )
        of_pods(conditions, census)
        conditions.happened("Disrupted", self._disrupted(), "Recovered")
        stuck = suspension.no_progress(seen, training, self.decisions.wake_after)
        degraded = _pair(trouble) or stuck or self._below_minimum(census) or unprotected(seen)
        conditions.happened("Degraded", degraded, "Healthy")
        quota = self.decisions.quota
        conditions.happened("QuotaExceeded", ("QuotaExceeded", quota) if quota else None, "QuotaAvailable")
        no_nodes = "nodes cannot be read: replacements start from pod signals, which arrive later"
        conditions.happened(
            "NodeSignalsUnavailable",
            None if seen.node_signals else ("NodeSignalsUnavailable", no_nodes),
            "NodeSignalsAvailable",
        )
        suspension.say(seen, conditions, anyone_left=bool(seen.pods))
        settling = not (census.servers_complete and census.workers_ready >= census.workers_wanted)
        reconciling = (
            ("Progressing", "pods are being created") if settling and not seen.job.spec.suspend else None
        )
        conditions.happened("Reconciling", reconciling, "Settled")
        conditions.happened("Stalled", self.decisions.stalled, "Resolved")
        started = before.start_time or (whole(seen.now) if self._has_pods() else None)
        return TrainingJobStatus(
            observed_generation=seen.job.metadata.generation,
            phase="Suspended" if seen.job.spec.suspend else phase(before.phase, census),
            reason=conditions.reason(),
            start_time=started,
            suspended_seconds=suspension.suspended_seconds(seen),
            conditions=conditions.done(),
            slots=slots.records(self.servers, self.crew),
            parameter_servers=ParameterServersStatus(
                desired=census.servers_wanted,
                ready=census.servers_ready,
                restarts=counters.server_restarts,
                last_snapshot_time=telemetry.last_snapshot(seen),
            ),
            workers=self._workers(census),
            restarts=Restarts(
                failures=counters.failures,
                disruptions=counters.disruptions,
                by_reason=dict(sorted(counters.by_reason.items())),
            ),
            last_disruption=telemetry.recovery(counters.last_disruption, seen, self.crew),
            last_failure=counters.last_failure,
            training=training,
            data=telemetry.data(before.data, seen.report.data if seen.report else None),
            output=before.output,
        )

    def events(self, status: TrainingJobStatus) -> list[Event]:
        """What changed since the last status, in words."""
        before = self.seen.job.status
        told = [*self._arrivals(), *suspension.events(before, status)]
        old, new = before.workers.desired, status.workers.desired
        if (
            before.start_time
            and old != new
            and not self.seen.job.spec.suspend
            and before.phase != "Suspended"
        ):
            told.append(
                Event("Normal", "ScaledUp" if new > old else "ScaledDown", f"workers: {old} -> {new}")
            )
        for kind in ("Degraded", "Stalled", "QuotaExceeded"):
            was, now = before.condition(kind), status.condition(kind)
            if now and now.status == "True" and (not was or (was.status, was.reason) != ("True", now.reason)):
                told.append(Event("Warning", now.reason, now.message))
        return told

    def _arrivals(self) -> list[Event]:
        was = {(s.role, s.index, s.incarnation): s.running_at for s in self.seen.job.status.slots}
        told = []
        for role in (self.servers, self.crew):
            for of in role.values():
                for h in of:
                    key = (h.place.role, h.place.index, h.place.incarnation)
                    if h.place.incarnation == 0 or h.slot.running_at is None or was.get(key) or not h.pod:
                        continue
                    reason = "WorkerReplaced" if h.place.role == "worker" else "ParameterServerRestored"
                    where = f" on node {h.node}" if h.node else ""
                    told.append(Event("Normal", reason, f"{h.pod.metadata.name} is running{where}"))
        return told

    def _census(self) -> Census:
        spec, suspended = self.seen.job.spec, self.seen.job.spec.suspend
        staying = self._staying(self.crew)
        return Census(
            servers_wanted=0 if suspended else spec.parameter_servers.replicas,
            servers_ready=sum(bool(h.pod and h.pod.ready) for h in self._staying(self.servers)),
            workers_wanted=0 if suspended else spec.workers.replicas,
            workers_ready=sum(h.slot.state == "Running" for h in staying),
            workers_pending=sum(h.slot.state == "Starting" for h in staying),
            least_workers=spec.workers.min_replicas,
        )

    def _workers(self, census: Census) -> WorkersStatus:
        staying = self._staying(self.crew)
        bound = [node for h in staying if (node := self.seen.nodes.get(h.node)) is not None]
        spot = sum(is_spot(node) for node in bound)
        return WorkersStatus(
            desired=census.workers_wanted,
            active=len(staying),
            ready=census.workers_ready,
            pending=census.workers_pending,
            succeeded=sum(h.awaiting_the_end for of in self.crew.values() for h in of),
            spot=spot,
            on_demand=len(bound) - spot,
            selector=names.worker_selector(self.seen.job),
        )

    def _staying(self, role: ByIndex) -> list[Incarnation]:
        return [h for of in role.values() for h in of if h.staying]

    def _has_pods(self) -> bool:
        return bool(self.seen.pods) or any(isinstance(a, CreatePod) for a in self.decisions.actions)

    def _disrupted(self) -> tuple[str, str] | None:
        """A replacement is outstanding: not created, or created and not yet running."""
        if self.seen.job.spec.suspend:
            return None
        waiting = []
        for word, role, wanted in (
            ("parameter server", self.servers, self.seen.job.spec.parameter_servers.replicas),
            ("worker", self.crew, self.seen.job.spec.workers.replicas),
        ):
            for index, of in role.items():
                done = any(h.running or h.awaiting_the_end for h in of)
                if (
                    index < wanted
                    and of
                    and not done
                    and (of[-1].place.incarnation > 0 or not of[-1].staying)
                ):
                    waiting.append(f"{word} {index}")
        if not waiting:
            return None
        return "ReplacementOutstanding", f"waiting for the replacement of {', '.join(waiting[:10])}"

    def _below_minimum(self, census: Census) -> tuple[str, str] | None:
        if self.seen.job.status.phase != "Running" or self.seen.job.spec.suspend or census.enough_workers:
            return None
        if any(h.awaiting_the_end for of in self.crew.values() for h in of):
            return None
        words = f"{census.workers_ready} workers are running; workers.minReplicas is {census.least_workers}"
        return "BelowMinReplicas", words


def _pair(trouble: pod_problems.Trouble | None) -> tuple[str, str] | None:
    return (trouble.reason, trouble.message) if trouble else None
