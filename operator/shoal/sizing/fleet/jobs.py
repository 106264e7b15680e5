"""A TrainingJob as the planner sees it, for the operator and for `shoal plan` alike; `work.py` has the work left.

Nothing in both raises for what a user wrote, but a time without a zone: what cannot be planned says why in `work_note`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import datetime

from shoal.api.amounts import NVIDIA, quantity
from shoal.api.capacity_pool import CapacityPool
from shoal.api.planning_status import PlanStatus
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.errors import UsageError
from shoal.sizing.fleet.resources import beside_of, decimal, model_of
from shoal.sizing.fleet.values import FleetJob, Pace, Watched
from shoal.sizing.fleet.work import samples_per_epoch, with_work
from shoal.sizing.speed.measurements import Kind, Model, of_an_update
from shoal_trainer.contract import StatusReport

__all__ = ["END_SECONDS", "asked", "fleet_job", "job_name", "running", "server_price", "unreadable"]

END_SECONDS = 10.0
"""Kept free before a deadline: after the last step come the last snapshot and the export of the model."""
LEAST_ERROR = -0.99
"""A hundred times faster than predicted: the four digits of a status make -1 of more, which nothing can be."""
_NOT_WATCHED = Watched()


def fleet_job(
    job: TrainingJob,
    profile: SpeedProfile | None,
    now: datetime,
    report: StatusReport | None = None,
    *,
    priority: int = 0,
    watched: Watched = _NOT_WATCHED,
    server_price: float = 0.0,
) -> FleetJob:
    """A job. One whose workers nobody plans (mode Off or Manual) is planned with the number that it has.

    Args:
        job: with its status.
        profile: that of its model, with what was learned since it was written; None: nothing is known.
        now: the present.
        report: the newest one of its coordinator.
        priority: that of its pods.
        watched: what its workers do.
        server_price: of a parameter server, per hour: see `server_price`.

    """
    spec, status, objective = job.spec, job.status, job.spec.elasticity.objective
    mode, prior = spec.elasticity.mode, profile.spec.model if profile else None
    behind = sum(not epoch.complete for epoch in report.epochs) if report is not None else 0
    spent = decimal(status.cost.accumulated) if status.cost else 0.0
    chooses, replicas = mode in {"Advise", "Auto"}, spec.workers.replicas
    planned = FleetJob(
        name=job_name(job),
        created=job.metadata.creation_timestamp or "",
        priority=priority,
        model=_model(job, report, profile),
        beside=beside_of(profile.status, samples_per_epoch(job, profile, report), behind)
        if profile
        else None,
        bytes_per_sample=prior.bytes_per_sample if prior else None,
        cpu_limit=_cpu_limit(job),
        gpu_limit=_gpu_limit(job),
        batch_size=spec.training.batch_size,
        batch_sizes={each.accelerator: each.batch_size for each in spec.training.batch_sizes},
        pools=tuple(spec.workers.pools),
        min_workers=replicas,
        max_workers=max(1, (spec.workers.max_replicas or replicas) if chooses else replicas),
        least=_least(job),
        keeps=_keeps(job),
        on_demand_base=spec.workers.on_demand_base,
        zone_policy=spec.workers.zone_policy,
        parameter_servers=spec.parameter_servers.replicas,
        batches_per_update=_batches_per_update(report),
        server_price=server_price,
        snapshot_every=spec.parameter_servers.snapshot.every_seconds,
        running=running(job),
        planned=_planned(job),
        kept_to=_plan(job).kept_to or {},
        in_vain=_in_vain(job),
        asked=asked(job, now),
        deadline_seconds=_deadline(job, now),
        budget_left=None if objective.max_cost is None else objective.max_cost - spent,
        prefer=objective.prefer,
        confidence=objective.confidence,
        spent=spent,
        now=watched,
        pace_before=_pace_before(job),
    )
    return with_work(job, planned, profile, report)


def _least(job: TrainingJob) -> int:
    """The workers that it keeps whoever wants their nodes: of one that nobody plans, all."""
    spec = job.spec
    return spec.workers.min_replicas if spec.elasticity.mode in {"Advise", "Auto"} else spec.workers.replicas


def _keeps(job: TrainingJob) -> int | None:
    """The workers that it has whatever is planned for it; None: it follows its plan, as in mode Auto alone."""
    return None if job.spec.elasticity.mode == "Auto" else job.spec.workers.replicas


def _planned(job: TrainingJob) -> Mapping[str, int]:
    """Workers by pool that it has or is on its way to: by its plan, or the pods that there are where it follows none.

    These have a node, or wait for one where they are: nobody makes them anew elsewhere.
    """
    if job.spec.elasticity.mode == "Auto":
        return _plan(job).pools
    return job.status.worker_nodes


def server_price(job: TrainingJob, pools: Mapping[str, CapacityPool]) -> float:
    """Price of one parameter server per hour: of the pool where one is, or else the first that is named for them.

    Pools without a price are passed over; 0: there is none with one.
    """
    there = (slot.pool for slot in job.status.slots if slot.role == "ps" and slot.state != "Ended")
    named = (*there, *job.spec.parameter_servers.pools)
    prices = (pools[name].spec.price for name in named if name in pools)
    return next((price.per_hour for price in prices if price is not None), 0.0)


def unreadable(job: TrainingJob, fault: str) -> FleetJob:
    """A job of which no more than this can be read, for a fault of the operator."""
    return FleetJob(
        name=job_name(job),
        created=job.metadata.creation_timestamp or "",
        pools=tuple(job.spec.workers.pools),
        min_workers=job.spec.workers.replicas,
        least=_least(job),
        keeps=_keeps(job),
        running=running(job),
        planned=_planned(job),
        kept_to=_plan(job).kept_to or {},
        in_vain=_in_vain(job),
        asked=asked(job),
        fault=fault,
    )


def job_name(job: TrainingJob) -> str:
    """The name of a job among those of all namespaces."""
    return f"{job.metadata.namespace}/{job.metadata.name}"


def running(job: TrainingJob) -> dict[str, int]:
    """Workers by pool that have a node, without those that go: one that waits in vain does not run."""
    return dict(
        Counter(
            slot.pool
            for slot in job.status.slots
            if slot.role == "worker"
            and slot.pool
            and slot.node
            and slot.state in {"Starting", "Running", "Silent"}
        )
    )


def asked(job: TrainingJob, now: datetime | None = None) -> dict[str, float]:
    """Pools of which a worker of the job has no node yet, and for how many seconds the first of them waits for it.

    None waits for a node that is in a queue, or waits in vain: how many these are is known, and they wait longest.
    """
    waits, vain = defaultdict[str, list[float]](list), Counter(_plan(job).in_vain or {})
    for slot in job.status.slots:
        asks = slot.role == "worker" and slot.pool and not slot.node and not slot.cause
        if asks and slot.queued:
            vain[slot.pool] -= 1
        elif asks and slot.state in {"Planned", "Starting"}:
            since = (now - slot.created_at).total_seconds() if now and slot.created_at else 0.0
            waits[slot.pool].append(max(since, 0.0))  # the API server's clock may be ahead
    left = {pool: sorted(found, reverse=True)[max(0, vain[pool]) :] for pool, found in waits.items()}
    return {pool: found[0] for pool, found in left.items() if found}


def _model(job: TrainingJob, report: StatusReport | None, profile: SpeedProfile | None) -> Model | None:
    """The job's model: as it reports it, or as its profile says."""
    known = model_of(profile) if profile is not None else None
    if report is None or report.model is None:
        return known
    said = report.model
    flops, precision = said.flops_per_sample, said.precision
    if known is not None and known.kind.alike(Kind(said.fingerprint, flops, precision)):
        flops, precision = flops or known.flops, known.precision
    try:
        return Model(
            said.fingerprint,
            flops or None,
            said.parameters,
            max(1, said.tensors),
            job.metadata.namespace,
            precision,
        )
    except UsageError:
        return known


def _batches_per_update(report: StatusReport | None) -> float:
    """The batches of an update, which the job's code says, as its servers count them; 0: not known yet."""
    shards = report.shards if report is not None else ()
    return of_an_update((each.updates, each.batches / each.updates) for each in shards if each.updates)


def _cpu_limit(job: TrainingJob) -> float:
    """The CPU cores that the template allows a worker; 0: all of its node."""
    limits = (job.spec.workers.container("worker").get("resources") or {}).get("limits") or {}
    return quantity(limits.get("cpu", 0))


def _gpu_limit(job: TrainingJob) -> int | None:
    """The GPUs, or parts of one, that the template asks for; None: it names none, and a worker has all of its node.

    As `manifests/pods.py` has it: a worker that names 0 of them, or beside whom another container requests some, has
    none.
    """
    containers = (job.spec.workers.template.read().get("spec") or {}).get("containers") or ()
    requests = (name for each in containers for name in (each.get("resources") or {}).get("requests") or ())
    own = job.spec.workers.container("worker").get("resources") or {}
    asked = {**(own.get("requests") or {}), **(own.get("limits") or {})}
    if not any(name.startswith(NVIDIA) for name in (*asked, *requests)):
        return None
    return int(sum(quantity(number) for name, number in asked.items() if name.startswith(NVIDIA)))


def _plan(job: TrainingJob) -> PlanStatus:
    return job.status.plan or PlanStatus()


def _in_vain(job: TrainingJob) -> Mapping[str, int]:
    """Workers by pool that it has no nodes for: a queue may hold back those of a plan, too, that are to begin."""
    plan = _plan(job)
    found = Counter(plan.in_vain or {})
    if job.spec.run_policy.scheduling_policy.queue and job.spec.elasticity.mode == "Auto":
        found += job.status.to_begin(plan.have_nodes(job.status.worker_nodes))
    return found


def _pace_before(job: TrainingJob) -> Pace | None:
    """What the workers were last seen to do, also by an operator before this one."""
    said = job.status.prediction
    if said is None or said.relative_error is None or not said.watched_seconds:
        return None
    return Pace(max(decimal(said.relative_error), LEAST_ERROR), float(said.watched_seconds))


def _deadline(job: TrainingJob, now: datetime) -> float | None:
    limit = job.spec.elasticity.objective.deadline_seconds
    if limit is None:
        return None
    began = job.status.start_time or now
    return limit - END_SECONDS - max((now - began).total_seconds(), 0.0)
