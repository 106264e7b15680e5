"""From a TrainingJob, CapacityPools and a SpeedProfile to a problem for the planner."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from shoal.api.capacity_pool import CapacityPool
from shoal.api.speed_profile import SpeedProfile
from shoal.errors import UsageError
from shoal.sizing.accelerators import Catalogue, catalogue
from shoal.sizing.plan.cost import capped, wire_bytes
from shoal.sizing.plan.manifests import JobView, ProgressView, StopView, running
from shoal.sizing.plan.problem import LossWork, Objective, Pool, Problem, Servers, StepWork, Work
from shoal.sizing.plan.speeds import Speeds

__all__ = ["problem_of", "seconds_left"]

PRIOR_NODE_HOURS = 20.0
"""Node-hours that the prior of a pool's interruptions is worth against measured ones."""
PRIOR_STARTUPS = 2.0
"""Start-ups that the prior of a pool's start-up time is worth against measured ones."""
MOST_SERVERS = 8
BYTES_PER_PARAMETER = 16
"""Accelerator memory per parameter: weight, gradient and two moments in fp32."""
USABLE_MEMORY = 0.9
SNAPSHOT_BANDWIDTH = 5e9
"""Bytes/s at which a parameter server copies its memory for a snapshot; training stands still that long."""


def problem_of(
    job: JobView,
    pools: Sequence[CapacityPool],
    profile: SpeedProfile,
    *,
    deadline: float | None,
    max_servers: int | None = None,
    sheets: Catalogue | None = None,
) -> Problem:
    """Say what the three resources ask of the planner. The units are explained in docs/planning.md.

    `deadline`: in s from now; what the job says is `seconds_left`. `max_servers`: no more parameter servers than these.
    """
    sheets = sheets or catalogue()
    notes: list[str] = []
    speeds = Speeds(profile, sheets)
    chosen = _worker_pools(job, pools)
    there, strange = running(job, chosen)
    if strange:
        names = ", ".join(sorted({name or "a node pool without a name" for name in strange}))
        notes.append(
            f"{len(strange)} worker{'s run' if len(strange) > 1 else ' runs'} in {names}, which is no CapacityPool of "
            "this job: planned as if not there; give the pool that name, or put the node pool's label into its "
            "nodeSelector."
        )
    workers = [
        pool
        for resource in chosen
        if (pool := _pool(resource, job, profile, speeds, sheets, there, notes)) is not None
    ]
    if not workers:
        raise UsageError(
            "the model fits into the accelerators of no pool: lower batchSize or add larger accelerators"
        )
    spec = job.spec
    objective = spec.elasticity.objective
    return Problem(
        pools=tuple(capped(workers)),
        work=_work(job, profile, notes),
        servers=_servers(job, pools, speeds, max_servers, notes),
        objective=Objective(
            deadline=deadline,
            budget=None if objective.max_cost is None else float(objective.max_cost),
            prefer=objective.prefer,
        ),
        min_workers=spec.workers.min_replicas,
        max_workers=spec.workers.max_replicas,
        min_on_demand=spec.workers.on_demand_base,
        zone_policy=spec.workers.zone_policy,
        notes=tuple(notes),
    )


def seconds_left(job: JobView, now: datetime) -> float | None:
    """The job's deadline in s from now: it counts from the job's start. None: it has none.

    Raises:
        UsageError: it is over.
    """
    deadline, start = job.spec.elasticity.objective.deadline_seconds, job.status.start_time
    if deadline is None or start is None:
        return deadline
    left = deadline - max(0.0, (now - start).total_seconds())
    if left <= 0:
        raise UsageError(
            f"the job's deadline, {deadline} s after its start ({start:%Y-%m-%d %H:%M:%S %Z}), is over: say with"
            " --deadline in how many seconds it is to be ready"
        )
    return left


def _worker_pools(job: JobView, pools: Sequence[CapacityPool]) -> list[CapacityPool]:
    by_name = {pool.metadata.name: pool for pool in pools}
    names = job.spec.workers.pools
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise UsageError(
            f"the job's workers.pools names {unknown[0]}, which is not among the CapacityPools "
            f"({', '.join(by_name)}): correct the name or add the pool"
        )
    chosen = (
        [by_name[name] for name in names] if names else [p for p in pools if p.spec.accelerator is not None]
    )
    if not chosen:
        raise UsageError("no CapacityPool has an accelerator: add one that workers can run on")
    bare = [pool.metadata.name for pool in chosen if pool.spec.accelerator is None]
    if bare:
        raise UsageError(f"CapacityPool {bare[0]} has no accelerator, but workers are to run there: set it")
    return chosen


def _pool(
    resource: CapacityPool,
    job: JobView,
    profile: SpeedProfile,
    speeds: Speeds,
    sheets: Catalogue,
    there: dict[str, int],
    notes: list[str],
) -> Pool | None:
    """The workers of a pool; None, with a note, if the model does not fit into its accelerators."""
    spec, status, name = resource.spec, resource.status, resource.metadata.name
    assert spec.accelerator is not None
    batch = spec.batch_size or job.spec.training.batch_size
    sheet = sheets.find(spec.accelerator.name)
    per_sample = profile.spec.model.bytes_per_sample
    if per_sample is not None:
        needed = (
            BYTES_PER_PARAMETER * profile.spec.model.parameters + per_sample * batch / spec.accelerator.count
        )
        if needed > USABLE_MEMORY * sheet.memory_gb * 1e9:
            notes.append(
                f"{name} is left out: {batch} samples need {needed / 1e9:.1f} GB and {sheet.name} has "
                f"{sheet.memory_gb:g} GB; give the pool a smaller batchSize to use it."
            )
            return None
    speed = speeds.of(spec.accelerator.name, spec.accelerator.count, batch)
    if speed.note:
        notes.append(speed.note)
    seen = status.interruptions
    hours = float(seen.node_hours)
    rate = (float(spec.interruptions_per_hour) * PRIOR_NODE_HOURS + seen.seen) / (PRIOR_NODE_HOURS + hours)
    starts = status.startup
    startup = (spec.startup_seconds * PRIOR_STARTUPS + starts.seconds * starts.seen) / (
        PRIOR_STARTUPS + starts.seen
    )
    return Pool(
        name=name,
        limit=spec.limits.nodes,
        price=float(spec.price.per_hour),
        step_seconds=speed.step_seconds,
        step_sigma=speed.sigma,
        batch=batch,
        spot=spec.capacity_type == "Spot",
        accelerator=f"{sheet.name} x {spec.accelerator.count}",
        zone=spec.zone,
        transfer_per_gib=float(spec.transfer_per_gib),
        startup_seconds=startup,
        interruptions_per_hour=rate if spec.capacity_type == "Spot" else 0.0,
        shock_size=0.5 if seen.together is None else float(seen.together),
        running=there.get(name, 0),
    )


def _work(job: JobView, profile: SpeedProfile, notes: list[str]) -> Work:
    stop, done = job.spec.training.stop_after, job.status.training
    if stop.steps is not None or stop.epochs is not None:
        if stop.metric is not None:
            notes.append(
                f"The job may end earlier, when {stop.metric} reaches {stop.value}: it is planned without that."
            )
        return StepWork(steps=_steps_left(stop, done), samples=_samples_left(job, profile, notes))
    curve = profile.spec.convergence
    if stop.metric is None or stop.value is None:
        raise UsageError(
            "the job does not say when it ends: set training.stopAfter to epochs, steps or metric and value"
        )
    if stop.metric not in ("loss", "val_loss") or curve is None:
        raise UsageError(
            f"the steps until {stop.metric} is {stop.value} cannot be planned: stop after steps or epochs, or after "
            "the metric loss with a SpeedProfile that has spec.convergence"
        )
    if stop.metric == "val_loss":
        notes.append("The validation loss is taken to follow the curve of the training loss.")
    return LossWork(
        target=float(stop.value),
        r1=float(curve.r1),
        r2=float(curve.r2),
        r3=float(curve.r3),
        r4=float(curve.r4),
        batch_range=(float(curve.least_batch), float(curve.most_batch)),
        done=float(done.loss) if done and done.loss is not None else None,
    )


def _steps_left(stop: StopView, done: ProgressView | None) -> int | None:
    if stop.steps is None:
        return None
    left = stop.steps - (done.step if done else 0)
    if left < 1:
        raise UsageError("the job has made all its steps: nothing is left to plan")
    return left


def _samples_left(job: JobView, profile: SpeedProfile, notes: list[str]) -> float | None:
    stop, done, data = job.spec.training.stop_after, job.status.training, job.status.data
    if stop.epochs is None:
        return None
    each = profile.spec.model.samples_per_epoch
    if each is None:
        if stop.steps is None:
            raise UsageError(
                "the job stops after epochs, and the SpeedProfile does not say how long one is: set "
                "spec.model.samplesPerEpoch in it"
            )
        notes.append(
            "The job may end earlier, after its epochs: set spec.model.samplesPerEpoch in the SpeedProfile."
        )
        return None
    epochs = stop.epochs - (done.epoch if done else 0.0)
    # `epoch` counts complete passes; of the open one `data` says how far it is.
    epochs -= min(data.done / (data.total or each), 1.0)
    if epochs * each < 1:
        raise UsageError("the job has made all its epochs: nothing is left to plan")
    return epochs * each


def _servers(
    job: JobView, pools: Sequence[CapacityPool], speeds: Speeds, most: int | None, notes: list[str]
) -> Servers:
    spec = job.spec.parameter_servers
    by_name = {pool.metadata.name: pool for pool in pools}
    unknown = [name for name in spec.pools if name not in by_name]
    if unknown:
        raise UsageError(
            f"the job's parameterServers.pools names {unknown[0]}, which is not among the CapacityPools "
            f"({', '.join(by_name)}): correct the name or add the pool"
        )
    candidates = [by_name[name] for name in spec.pools] or [
        p for p in pools if p.spec.accelerator is None and p.spec.capacity_type == "OnDemand"
    ]
    home = (
        candidates[0]
        if spec.pools
        else min(candidates, key=lambda p: float(p.spec.price.per_hour), default=None)
    )
    speed = speeds.servers()
    if speed.note:
        notes.append(speed.note)
    counts: tuple[int, ...] = (spec.replicas,)
    if home is None:
        if most is not None and most < spec.replicas:
            raise UsageError(
                f"--max-servers {most} is less than the job's parameterServers.replicas, {spec.replicas}, and without "
                "a CapacityPool for parameter servers their number is not planned: raise it, lower replicas, or add a "
                "CapacityPool without accelerator"
            )
        notes.append(
            f"No pool is given for parameter servers: they are not priced, and stay {spec.replicas}; add a "
            "CapacityPool without accelerator to count them."
        )
    else:
        most = min(home.spec.limits.nodes, most or MOST_SERVERS)
        if most < 1:
            raise UsageError(
                f"CapacityPool {home.metadata.name} is for the parameter servers and has limit 0: raise it"
            )
        counts = tuple(range(1, most + 1))
    parameters = speeds.features.parameters
    return Servers(
        counts=counts,
        price=float(home.spec.price.per_hour) if home else 0.0,
        model=speed.model,
        sigma=speed.sigma,
        measured=speed.measured,
        running=job.status.parameter_servers.ready,
        bytes_per_step=wire_bytes(parameters),
        startup_seconds=home.spec.startup_seconds if home else 0.0,
        snapshot_every=spec.snapshot.every_seconds,
        snapshot_seconds=3 * 4 * parameters / SNAPSHOT_BANDWIDTH,
        zone=home.spec.zone or None if home else None,
    )
