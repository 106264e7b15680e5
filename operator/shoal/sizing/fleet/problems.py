"""From pools, profiles and a job to a problem for the planner: priors and measurements combined."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.errors import UsageError
from shoal.sizing.accelerators import catalogue
from shoal.sizing.fleet.values import FleetJob, FleetPool
from shoal.sizing.plan.cost import capped, wire_bytes
from shoal.sizing.plan.problem import Objective, Pool, Problem, Servers, StepWork
from shoal.sizing.speed.measurements import Model
from shoal.sizing.speed.model import SpeedModel
from shoal.sizing.types import PsModel

__all__ = ["JobProblem", "job_problem", "startup_of"]

PRIOR_NODE_HOURS = 20.0
"""Weight of the prior interruption rate of a pool, in measured node-hours."""
PRIOR_STARTUPS = 2.0
"""Weight of the prior start-up time of a pool, in measured start-ups."""


@dataclass(frozen=True)
class JobProblem:
    """A problem, and what it rests on: the basis of each pool's speed in words."""

    problem: Problem
    basis: Mapping[str, str]
    notes: tuple[str, ...] = field(default=())


def job_problem(
    job: FleetJob,
    model: Model,
    samples: float,
    pools: Sequence[FleetPool],
    limits: Mapping[str, int],
    speeds: SpeedModel,
    confidence: float,
) -> JobProblem:
    """The problem of one job within `limits` (nodes by pool). Raises UsageError if there is none to solve."""
    by_name = {pool.name: pool for pool in pools}
    notes = [
        f"There is no CapacityPool {name}: add it or remove it from workers.pools."
        for name in job.pools
        if name not in by_name
    ]
    options: list[Pool] = []
    basis: dict[str, str] = {}
    for name in job.pools:
        pool = by_name.get(name)
        if pool is None:
            continue
        why = unusable(pool)
        if why is not None:
            notes.append(why)
            continue
        options.append(_pool(job, model, pool, limits[name], speeds, basis))
    if not options:
        raise UsageError(" ".join(notes) or "workers.pools names no pool: name at least one CapacityPool")
    capacity, sigma = speeds.servers.capacity(model, job.parameter_servers)
    servers = Servers(
        counts=(job.parameter_servers,),
        model=PsModel(
            job.parameter_servers**speeds.servers.scaling / capacity,
            speeds.servers.sharpness,
            speeds.servers.scaling,
        ),
        sigma=sigma,
        bytes_per_step=wire_bytes(model.parameters),
        running=job.parameter_servers if job.running else 0,
    )
    problem = Problem(
        pools=tuple(capped(options)),
        work=StepWork(samples=max(samples, 1.0)),
        servers=servers,
        objective=Objective(
            deadline=job.deadline_seconds, budget=job.budget_left, prefer=job.prefer, confidence=confidence
        ),
        min_workers=job.min_workers,
        max_workers=job.max_workers,
        min_on_demand=job.on_demand_base,
        zone_policy=job.zone_policy,
    )
    return JobProblem(problem, basis, tuple(notes))


def unusable(pool: FleetPool) -> str | None:
    """Why nothing can be planned in a pool, and what to change; None: it can be used."""
    if pool.price_per_hour is None:
        return f"{pool.name} has no price and is left out: set spec.price.perHour."
    if pool.accelerator is None and not pool.cores > 0:
        return f"{pool.name} has neither an accelerator nor known CPU cores and is left out: no node of it was seen."
    if pool.accelerator is not None and not catalogue().knows(pool.accelerator):
        return (
            f"{pool.name} is left out: the accelerator {pool.accelerator} is not in the catalogue; use one of "
            f"{', '.join(catalogue().names)}."
        )
    return None


def startup_of(pool: FleetPool) -> float:
    """Start-up seconds: the prior, outweighed by measurements with time."""
    measured = (
        pool.startup_seconds if pool.measured_startup_seconds is None else pool.measured_startup_seconds
    )
    seen = pool.startup_seen
    return (pool.startup_seconds * PRIOR_STARTUPS + measured * seen) / (PRIOR_STARTUPS + seen)


def device_of(pool: FleetPool) -> str:
    """The device that workers of this pool compute on."""
    return pool.accelerator or "CPU"


def batch_of(job: FleetJob, pool: FleetPool) -> int:
    """Samples in a step of a worker of this pool, as the trainer chooses them."""
    sheets = catalogue()
    name = sheets.sheet(device_of(pool), pool.cores).name
    for key, batch in job.batch_sizes.items():
        if key == device_of(pool) or (sheets.knows(key) and sheets.sheet(key).name == name):
            return batch
    return job.batch_size


def _pool(
    job: FleetJob, model: Model, pool: FleetPool, limit: int, speeds: SpeedModel, basis: dict[str, str]
) -> Pool:
    batch = batch_of(job, pool)
    speed = speeds.worker(model, device_of(pool), pool.devices, pool.cores, batch)
    basis[pool.name] = speed.basis
    rate = (pool.interruptions_per_hour * PRIOR_NODE_HOURS + pool.interruptions_seen) / (
        PRIOR_NODE_HOURS + pool.node_hours
    )
    running = job.running.get(pool.name, 0)
    limit = min(limit, running) if pool.exhausted else limit
    if pool.available is not None:
        limit = min(limit, running + pool.available)
    return Pool(
        name=pool.name,
        limit=limit,
        price=pool.price_per_hour or 0.0,
        step_seconds=speed.seconds,
        step_sigma=math.exp(speed.sigma) - 1 if speed.sigma < 0.5 else speed.sigma,
        batch=batch,
        spot=pool.spot,
        accelerator=f"{device_of(pool)} x {pool.devices}",
        zone=pool.zone,
        transfer_per_gib=pool.transfer_per_gib,
        startup_seconds=startup_of(pool),
        interruptions_per_hour=rate if pool.spot else 0.0,
        shock_size=0.5 if pool.together is None else pool.together,
        running=running,
    )
