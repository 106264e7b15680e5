"""From pools, profiles and a job to a problem for the planner: priors and measurements combined."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.accelerators import CPU, catalogue
from shoal.sizing.availability import Floats, Stock
from shoal.sizing.fleet.pace import at_present_pace, pace_of
from shoal.sizing.fleet.values import FleetJob, FleetPool, Pace
from shoal.sizing.plan.cost import wire_bytes
from shoal.sizing.plan.deadline import spare_seconds
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.explain import duration
from shoal.sizing.plan.problem import PASSED, SPENT, Objective, Pool, Problem, Servers
from shoal.sizing.plan.work import StepWork, Work
from shoal.sizing.speed import priors
from shoal.sizing.speed.measurements import Basis, Model
from shoal.sizing.speed.model import SpeedModel
from shoal.sizing.speed.servers import PsModel

__all__ = [
    "JobProblem",
    "batch_of",
    "cores_of",
    "device_of",
    "devices_of",
    "job_problem",
    "servers_of",
    "unusable",
]

RESERVE_SECONDS, RESERVE_SHARE = 300.0, 0.05
"""What must be left of the time to the deadline, beyond what on-demand nodes need, to wait with buying them."""
SHORT_OUT_SECONDS = 600.0
"""A stock-out is expected to last as long again as it has lasted, at least this and at most as long as others did."""
SNAPSHOT_BANDWIDTH = 5e9
"""Bytes/s at which a parameter server copies its memory for a snapshot. Training stops meanwhile."""
BYTES_PER_PARAMETER = 16
"""Accelerator memory per parameter: weight, gradient and two moments in fp32."""
USABLE_MEMORY = 0.9
PRIOR_STARTUPS = 2.0
"""Weight of the prior start-up time of a pool, in measured start-ups."""


@dataclass(frozen=True)
class JobProblem:
    """A problem, and what it rests on: the basis of each pool's speed."""

    problem: Problem
    basis: Mapping[str, Basis]
    notes: tuple[str, ...] = field(default=())
    pace: Pace | None = None
    """Of what runs; the problem is corrected by it."""
    reserve: Mapping[str, int] = field(default_factory=dict)
    """On-demand nodes by pool that would keep the deadline if no spot node were left, as few as would."""

    @property
    def measured(self) -> bool:
        """Whether the model was measured in any of the pools; else all that is said of its speed is a guess."""
        return Basis.MEASURED in self.basis.values()


def job_problem(
    job: FleetJob,
    pools: Sequence[FleetPool],
    limits: Mapping[str, int],
    speeds: SpeedModel,
    servers: Servers | None = None,
    spare: float = 0.0,
    promised: Mapping[str, int] | None = None,
) -> JobProblem:
    """The problem of one job, whose model and work are known, within `limits` (nodes by pool).

    Raises UsageError if there is none to solve. `servers` None: as many as the job has. `spare`: see
    `Objective`; for jobs with spot pools. `promised`: nodes by pool that are the reserve of other jobs; None: nobody
    plans again while the job runs.
    """
    model, work = job.model, work_of(job)
    assert model is not None
    deadline = None if job.deadline_seconds is None else max(job.deadline_seconds, PASSED)
    budget = None if job.budget_left is None else max(job.budget_left, SPENT)
    job = replace(job, deadline_seconds=deadline, budget_left=budget)
    by_name = {pool.name: pool for pool in pools}
    notes = [
        f"There is no CapacityPool {name}: add it or remove it from workers.pools."
        for name in job.pools
        if name not in by_name
    ]
    options: list[Pool] = []
    basis: dict[str, Basis] = {}
    for name in job.pools:
        pool = by_name.get(name)
        if pool is None:
            continue
        if pool.ending:
            notes.append(f"{name} is being deleted: no worker begins there.")
        why = unusable(pool, job) or _too_small(pool, job, model)
        if why is not None:
            notes.append(why)
            continue
        options.append(_pool(job, model, pool, speeds, basis))
    if not options:
        raise UsageError(" ".join(notes) or "workers.pools names no pool: name at least one CapacityPool")
    if servers is None:
        servers = servers_of(model, speeds, (job.parameter_servers,), job.batches_per_update)
        servers = replace(
            servers,
            running=job.parameter_servers if job.running else 0,
            price=job.server_price,
            snapshot_every=job.snapshot_every,
            zone=job.servers_zone or None,
        )
    _check(options, limits, by_name, job, notes)
    problem = Problem(
        pools=tuple(options),
        work=work,
        servers=servers,
        objective=Objective(
            deadline=job.deadline_seconds,
            budget=job.budget_left,
            prefer="MinTime" if _is_free(options, servers) else job.prefer,
            confidence=job.confidence,
            spare=spare if any(option.spot for option in options) else 0.0,
            spent=job.spent,
        ),
        min_workers=job.min_workers,
        max_workers=job.max_workers,
        min_on_demand=job.on_demand_base,
        zone_policy=job.zone_policy,
    ).within(limits)
    pace = pace_of(problem, job.now) or job.pace_before
    problem, note = at_present_pace(problem, pace)
    reserve = _reserve(problem, promised or {})
    supplied = [_supplied(p, by_name[p.name], job, reserve is not None) for p in problem.pools]
    _check(supplied, limits, by_name, job, notes)
    problem = replace(problem, pools=tuple(supplied))
    if reserve is None and promised is not None and job.min_workers < job.max_workers:
        problem = replace(problem, fallback=_fallback(problem, promised))
    return JobProblem(problem, basis, (*notes, *([note] if note else [])), pace, reserve or {})


def _is_free(options: Sequence[Pool], servers: Servers) -> bool:
    """Whether all plans cost nothing: then jobs share the nodes so that all of them are fast."""
    return not (servers.price or any(option.price or option.transfer_per_gib for option in options))


def _check(
    options: Sequence[Pool],
    limits: Mapping[str, int],
    pools: Mapping[str, FleetPool],
    job: FleetJob,
    notes: Sequence[str],
) -> None:
    """Raise UsageError where there are fewer nodes than the job needs, and it is no limit that is to be raised."""
    nodes = {option.name: min(option.nodes, limits[option.name]) for option in options}
    short = [option for option in options if nodes[option.name] < option.limit]
    steady = sum(nodes[option.name] for option in options if not option.spot)
    enough = sum(nodes.values()) >= max(job.min_workers, 1) and steady >= job.on_demand_base
    if short and not enough:
        raise UsageError(" ".join([*notes, *(_why_short(pools[o.name], nodes[o.name]) for o in short)]))


def _why_short(pool: FleetPool, nodes: int) -> str:
    """Why a job can have fewer nodes of a pool than its limit, and when that ends."""
    which = f"CapacityPool {pool.name}"
    if pool.ending:
        return f"Name another pool in workers.pools in place of {which}."
    if pool.unready:
        return (
            f"{which} is not Ready ({pool.unready}): see its status, or name another pool in workers.pools."
        )
    if pool.exhausted or pool.doubted:
        ago = f" {duration(pool.exhausted_seconds)} ago" if pool.exhausted_seconds else ""
        return (
            f"{which} ran out of nodes{ago}: wait until it has some, or name another pool in workers.pools."
        )
    return f"The other jobs leave {nodes or 'none'} of the {pool.limit} nodes of {which}."


def _reserve(problem: Problem, promised: Mapping[str, int]) -> dict[str, int] | None:
    """On-demand nodes that alone could still keep the deadline: then a stock-out can be answered when it comes.

    As few as can, the fastest first, with the servers, start-ups and work that every plan has, of those that are not
    `promised` to others. None: none can.
    """
    deadline = problem.objective.deadline
    if deadline is None:
        return {}
    left = deadline - max(RESERVE_SECONDS, RESERVE_SHARE * deadline)
    enough: list[list[int]] = []
    for each in ElasticModel(replace(problem, min_workers=1)).evaluators():
        counts = _on_demand(problem, each.zone if problem.zone_policy == "Same" else None, promised)
        wait = each.wait(counts)
        spare = spare_seconds(each(counts).seconds - wait, wait=wait, left=left)
        # More workers are not always faster: of a job that ends by a metric, they need more samples.
        enough += [[int(n) for n in counts[:, at]] for at in np.flatnonzero(spare >= 0)[:1]]
    fewest = min(enough, key=sum, default=None)
    if fewest is None:
        return None
    return {pool.name: n for pool, n in zip(problem.pools, fewest, strict=True)}


def _fallback(problem: Problem, promised: Mapping[str, int]) -> str:
    """The cheapest on-demand pool next to all spot pools with room for all workers; empty: none dearer than spot."""
    most = sum(problem.limits) if problem.max_workers is None else problem.max_workers
    spot = [pool for pool in problem.pools if pool.spot]
    zones = {pool.zone for pool in spot if problem.zone_policy == "Same"} - {""}
    own = min(
        (
            pool
            for pool in problem.pools
            if not pool.spot
            and pool.nodes - promised.get(pool.name, 0) >= most
            and zones <= {pool.zone or zone for zone in zones}
        ),
        key=_dear,
        default=None,
    )
    return own.name if own is not None and any(_dear(pool) < _dear(own) for pool in spot) else ""


def _dear(pool: Pool) -> float:
    """The price of what a worker does."""
    return pool.price / pool.samples_per_second


def _on_demand(problem: Problem, zone: str | None, promised: Mapping[str, int]) -> Floats:
    """(k, m) at most 1 to m workers on demand, the fastest first; in a zone, if one is named."""
    most = sum(problem.limits) if problem.max_workers is None else problem.max_workers
    counts, left = np.zeros((len(problem.pools), most)), np.arange(1.0, most + 1)
    for row, pool in sorted(enumerate(problem.pools), key=lambda each: -each[1].samples_per_second):
        if not pool.spot and (zone is None or pool.zone in {"", zone}):
            counts[row] = np.minimum(left, max(pool.nodes - promised.get(pool.name, 0), 0))
            left = left - counts[row]
    return counts


def _supplied(option: Pool, pool: FleetPool, job: FleetJob, reserved: bool) -> Pool:
    """A pool with its stock-outs: what is out now, or may be still, and, of spot without a reserve, what may come."""
    if pool.doubted and sum(job.running.values()) > option.running:
        # One worker shows whether there are nodes again; more may leave theirs for nothing.
        option = replace(option, room=min(option.room, option.running + 1))
    if not option.spot:
        return option
    if pool.exhausted and reserved and job.deadline_seconds is not None:  # there is time to wait for it
        longest = max(option.stock.out_seconds, SHORT_OUT_SECONDS)
        return replace(option, out_seconds=min(max(pool.exhausted_seconds, SHORT_OUT_SECONDS), longest))
    if pool.exhausted:  # nothing more comes from it
        option = replace(option, room=min(option.room, option.running))
    return option if reserved else _with_stock_outs(option, pool, job)


def _with_stock_outs(option: Pool, pool: FleetPool, job: FleetJob) -> Pool:
    """A spot pool that may be out of stock, as often as it was; the more likely so, the longer pods wait for nodes."""
    known = priors.NODE_HOURS * max(pool.interruptions_per_hour, priors.LEAST_RATE) + pool.interruptions_seen
    process = option.running_out(known, out_now=1.0 if pool.exhausted else None)
    if waited := 0.0 if pool.exhausted else job.asked.get(pool.name, 0.0):
        late = math.log(waited / max(option.startup_seconds, 1.0)) / priors.START_SIGMA
        process = process.waited(NormalDist().cdf(-late))
    return replace(option, availability=replace(process, horizon=job.deadline_seconds or math.inf))


def _stock_of(pool: FleetPool) -> Stock:
    """What is known of the pool's stock-outs."""
    return Stock.watched(pool.watched_seconds, pool.out_seconds, pool.outs)


def _shocks_of(pool: FleetPool) -> tuple[float, float]:
    """The part of the losses that are shocks, and the part of the nodes that each takes."""
    share = priors.SHOCK_SHARE * priors.SHOCK_LOSSES + pool.lost_in_shocks
    size = priors.SHOCK_SIZE * priors.SHOCK_NODES + pool.lost_in_shocks
    return (
        share / (priors.SHOCK_LOSSES + max(pool.interruptions_seen, pool.lost_in_shocks)),
        size / (priors.SHOCK_NODES + max(pool.there_in_shocks, pool.lost_in_shocks)),
    )


def servers_of(model: Model, speeds: SpeedModel, counts: tuple[int, ...], batches: float = 0.0) -> Servers:
    """The parameter servers of a model: their capacity, and how sure it is.

    `batches`: those of an update, as the job itself says; 0: not known, as many as all jobs of its model had.
    """
    fitted, batches = speeds.servers, batches or speeds.batches_per_update(model.key)
    measured = fitted.measured.get(model.key, 1)
    capacity, sigma = fitted.capacity(model, measured)
    return Servers(
        counts=counts,
        model=PsModel(measured**fitted.scaling / capacity / batches, fitted.sharpness, fitted.scaling),
        sigma=sigma,
        measured=measured,
        bytes_per_step=wire_bytes(model.parameters) / batches,
        snapshot_seconds=3 * 4 * model.parameters / SNAPSHOT_BANDWIDTH,
    )


def unusable(pool: FleetPool, job: FleetJob) -> str | None:
    """Why no worker of a job can be planned in a pool, and what to change; None: it can be used."""
    if pool.price_per_hour is None:
        return f"{pool.name} has no price and is left out: set spec.price.perHour."
    accelerator = accelerator_of(job, pool)
    if accelerator is None and not cores_of(job, pool) > 0:
        return (
            f"{pool.name} has neither an accelerator nor known CPU cores and is left out: no node of it was seen; set "
            "spec.cores."
        )
    if accelerator is not None and not catalogue().knows(accelerator):
        return (
            f"{pool.name} is left out: the accelerator {accelerator} is not in the catalogue; use one of "
            f"{', '.join(catalogue().names)}."
        )
    if accelerator is not None and not job.gpu_image:
        return (
            f"{pool.name} is left out: its nodes have GPUs, and Shoal has no worker image with CUDA; name one in "
            "workers.template, or set trainer.workerGpuImage in the chart's values."
        )
    return None


def _too_small(pool: FleetPool, job: FleetJob, model: Model) -> str | None:
    """Why the model does not fit into the accelerators of a pool; None: it does, or nobody knows."""
    accelerator = accelerator_of(job, pool)
    if job.bytes_per_sample is None or accelerator is None:
        return None
    batch, sheet = batch_of(job, pool), catalogue().find(accelerator)
    needed = BYTES_PER_PARAMETER * model.parameters + job.bytes_per_sample * batch / devices_of(job, pool)
    if needed <= USABLE_MEMORY * sheet.memory_gb * 1e9:
        return None
    return (
        f"{pool.name} is left out: {batch} samples need {needed / 1e9:.1f} GB and {sheet.name} has "
        f"{sheet.memory_gb:g} GB; give the pool a smaller batchSize to use it."
    )


def work_of(job: FleetJob) -> Work:
    """What is left of a job: at least one step, or sample. Where none is left, that ends no epoch."""
    if job.loss is not None:
        return job.loss
    left = job.steps_left, job.samples_left
    steps, samples = (None if each is None else max(each, 1.0) for each in left)
    beside = job.beside
    if beside is not None and any(each is not None and each < 1 for each in left):
        beside = beside.at_the_end
    return StepWork(steps, samples, job.samples_sigma, job.efficiency, beside)


def startup_of(pool: FleetPool) -> float:
    """Start-up seconds: the prior, outweighed by measurements with time."""
    measured = (
        pool.startup_seconds if pool.measured_startup_seconds is None else pool.measured_startup_seconds
    )
    seen = pool.startup_seen
    return (pool.startup_seconds * PRIOR_STARTUPS + measured * seen) / (PRIOR_STARTUPS + seen)


def accelerator_of(job: FleetJob, pool: FleetPool) -> str | None:
    """The accelerator of a worker of this pool; None: its node has none, or its template asks for none of them."""
    return None if job.gpu_limit == 0 else pool.accelerator


def device_of(job: FleetJob, pool: FleetPool) -> str:
    """The device that a worker of this pool computes on."""
    return accelerator_of(job, pool) or CPU


def cores_of(job: FleetJob, pool: FleetPool) -> float:
    """CPU cores of a worker of this pool, as the worker itself counts them: of its node and its limit the smaller one.

    0: neither is known.
    """
    return min((cores for cores in (pool.cores, job.cpu_limit) if cores > 0), default=0.0)


def devices_of(job: FleetJob, pool: FleetPool) -> int:
    """Devices of a worker of this pool: all of its node, or as many as its template asks for."""
    return pool.devices if job.gpu_limit is None else max(1, min(pool.devices, job.gpu_limit))


def batch_of(job: FleetJob, pool: FleetPool) -> int:
    """Samples in a step of a worker of this pool, as the trainer chooses them: by words in the device's name."""
    if pool.batch_size is not None:
        return pool.batch_size
    device = device_of(job, pool)
    sheet = catalogue().sheet(device, cores_of(job, pool))
    names = f"{device} {sheet.name}".lower()
    for words, batch in job.batch_sizes.items():
        if all(word in names for word in words.lower().replace("-", " ").split()):
            return batch
    return job.batch_size


def _pool(job: FleetJob, model: Model, pool: FleetPool, speeds: SpeedModel, basis: dict[str, Basis]) -> Pool:
    batch, devices, cores = batch_of(job, pool), devices_of(job, pool), cores_of(job, pool)
    device = device_of(job, pool)
    speed = speeds.worker(model, device, devices, cores, batch)
    basis[pool.name] = speed.basis
    rate = (pool.interruptions_per_hour * priors.NODE_HOURS + pool.interruptions_seen) / (
        priors.NODE_HOURS + pool.node_hours
    )
    running = job.running.get(pool.name, 0)
    shock_share, shock_size = _shocks_of(pool)
    return Pool(
        name=pool.name,
        limit=pool.limit,
        room=min(
            running if pool.ending or (pool.exhausted and not pool.spot) else math.inf, pool.room(running)
        ),
        price=pool.price_per_hour or 0.0,
        step_seconds=speed.seconds,
        step_sigma=speed.sigma,
        batch=batch,
        spot=pool.spot,
        accelerator=f"{device} x {cores if device == CPU else devices:g}",
        zone=pool.zone,
        transfer_per_gib=pool.transfer_per_gib,
        startup_seconds=startup_of(pool),
        interruptions_per_hour=rate if pool.spot else 0.0,
        shock_share=shock_share,
        shock_size=shock_size,
        stock=_stock_of(pool),
        running=running,
        idle_seconds=pool.idle_seconds,
    )
