"""From a TrainingJob, a PlanRequest, CapacityPools and a SpeedProfile to a problem for the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.api.capacity_pool import AcceleratorSpec, CapacityPool
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.errors import UsageError
from shoal.sizing.accelerators import Accelerator, Catalogue, catalogue
from shoal.sizing.plan.cost import capped, wire_bytes
from shoal.sizing.plan.problem import Objective, Pool, Problem, Servers
from shoal.sizing.plan.request import PlanRequest
from shoal.sizing.plan.speeds import Speeds
from shoal.sizing.plan.work_left import work_left

__all__ = ["problem_of"]

PRIOR_NODE_HOURS = 20.0
"""Weight of the prior interruption rate of a pool, in measured node-hours."""
PRIOR_STARTUPS = 2.0
"""Weight of the prior start-up time of a pool, in measured start-ups."""
MOST_SERVERS = 8
BYTES_PER_PARAMETER = 16
"""Accelerator memory per parameter: weight, gradient and two moments in fp32."""
USABLE_MEMORY = 0.9
SNAPSHOT_BANDWIDTH = 5e9
"""Bytes/s at which a parameter server copies its memory for a snapshot. Training stops meanwhile."""


def problem_of(
    job: TrainingJob,
    request: PlanRequest,
    pools: Sequence[CapacityPool],
    profile: SpeedProfile,
    *,
    deadline: float | None,
    max_servers: int | None = None,
) -> Problem:
    """Assemble the problem. The units are those of docs/planning.md.

    Args:
        job: the job, with its status if it has started.
        request: the objective and the pools to choose from.
        pools: all CapacityPools.
        profile: the measured speeds of the job's model.
        deadline: seconds from now (see `seconds_left`), None: no deadline.
        max_servers: the most parameter servers, None: the limit of their pool, at most `MOST_SERVERS`.

    """
    assembly = _Assembly(job, request, {pool.metadata.name: pool for pool in pools}, profile)
    spec, objective = job.spec, request.objective
    return Problem(
        pools=tuple(capped(assembly.worker_pools())),
        work=work_left(job, profile, assembly.notes),
        servers=assembly.servers(max_servers),
        objective=Objective(
            deadline=deadline,
            budget=None if objective.max_cost is None else float(objective.max_cost),
            prefer=objective.prefer,
        ),
        min_workers=spec.workers.min_replicas,
        max_workers=spec.workers.max_replicas,
        min_on_demand=request.workers.on_demand_base,
        zone_policy=request.workers.zone_policy,
        notes=tuple(assembly.notes),
    )


@dataclass
class _Assembly:
    """The inputs, and the notes on them that belong in the explanation of the plan."""

    job: TrainingJob
    request: PlanRequest
    pools: dict[str, CapacityPool]
    profile: SpeedProfile
    sheets: Catalogue = field(default_factory=catalogue)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.speeds = Speeds(self.profile, self.sheets)

    def worker_pools(self) -> list[Pool]:
        """The pools that workers can use."""
        candidates = self._candidates()
        running = self._running(candidates)
        found = [
            self._worker_pool(pool, running[pool.metadata.name]) for pool in candidates if self._fits(pool)
        ]
        if not found:
            raise UsageError(
                "the model fits into the accelerators of no pool: lower batchSize or add larger accelerators"
            )
        return found

    def servers(self, most: int | None) -> Servers:
        """The parameter servers: at most `most`, as many as the job has if there is no pool to price them."""
        spec, pool, speed = self.job.spec.parameter_servers, self._server_pool(), self.speeds.servers()
        if speed.note:
            self.notes.append(speed.note)
        parameters = self.speeds.features.parameters
        return Servers(
            counts=self._fixed_count(most) if pool is None else _counts(pool, most),
            price=_price(pool) if pool else 0.0,
            model=speed.model,
            sigma=speed.sigma,
            measured=speed.measured,
            running=self.job.status.parameter_servers.ready,
            bytes_per_step=wire_bytes(parameters),
            startup_seconds=pool.spec.startup_seconds if pool else 0.0,
            snapshot_every=spec.snapshot.every_seconds,
            snapshot_seconds=3 * 4 * parameters / SNAPSHOT_BANDWIDTH,
            zone=pool.spec.zone or None if pool else None,
        )

    # -- workers ------------------------------------------------------------------------------------------------

    def _candidates(self) -> list[CapacityPool]:
        """The pools that the request names, or every pool with an accelerator."""
        chosen = self._named("workers", self.request.workers.pools)
        without = [pool.metadata.name for pool in chosen if pool.spec.accelerator is None]
        if without:
            raise UsageError(
                f"workers.pools names CapacityPool {without[0]}, which has no accelerator: add it"
            )
        chosen = chosen or [pool for pool in self.pools.values() if pool.spec.accelerator is not None]
        if not chosen:
            raise UsageError("no CapacityPool has an accelerator: add one that workers can run on")
        return chosen

    def _running(self, candidates: Sequence[CapacityPool]) -> dict[str, int]:
        """How many workers run in each candidate; a note on those that run elsewhere.

        A slot of the status has the node pool's name as the cloud labels it: the name of a CapacityPool, or a value in
        its nodeSelector.
        """
        running = {pool.metadata.name: 0 for pool in candidates}
        by_label = {
            value: pool.metadata.name
            for pool in reversed(candidates)
            for value in pool.spec.node_selector.values()
        }
        elsewhere = []
        for slot in self.job.status.slots:
            if slot.role != "worker" or slot.state not in ("Starting", "Running"):
                continue
            name = slot.pool if slot.pool in running else by_label.get(slot.pool) if slot.pool else None
            if name is None:
                elsewhere.append(slot.pool or "a node pool without a name")
            else:
                running[name] += 1
        if elsewhere:
            self.notes.append(
                f"{len(elsewhere)} worker{'s run' if len(elsewhere) > 1 else ' runs'} in "
                f"{', '.join(sorted(set(elsewhere)))}, which is not a CapacityPool of this job: the plan ignores them; "
                "give the pool that name, or put the node pool's label into its nodeSelector."
            )
        return running

    def _fits(self, pool: CapacityPool) -> bool:
        """Whether the model fits into a pool's accelerators; a note if it does not."""
        model, batch, sheet = self.profile.model, self._batch(pool), self._sheet(pool)
        if model.bytes_per_sample is None:
            return True
        needed = BYTES_PER_PARAMETER * model.parameters + model.bytes_per_sample * batch / _count(pool)
        if needed <= USABLE_MEMORY * sheet.memory_gb * 1e9:
            return True
        self.notes.append(
            f"{pool.metadata.name} is left out: {batch} samples need {needed / 1e9:.1f} GB and {sheet.name} has "
            f"{sheet.memory_gb:g} GB; give the pool a smaller batchSize to use it."
        )
        return False

    def _worker_pool(self, pool: CapacityPool, running: int) -> Pool:
        """A pool as the planner sees it: priors and measurements combined."""
        spec, status, name = pool.spec, pool.status, pool.metadata.name
        batch, sheet = self._batch(pool), self._sheet(pool)
        speed = self.speeds.of(_accelerator(pool).name, _count(pool), batch)
        if speed.note:
            self.notes.append(speed.note)
        measured, starts = status.interruptions, status.startup
        prior = float(spec.interruptions_per_hour) * PRIOR_NODE_HOURS
        rate = (prior + measured.seen) / (PRIOR_NODE_HOURS + float(measured.node_hours))
        started = spec.startup_seconds * PRIOR_STARTUPS + starts.seconds * starts.seen
        return Pool(
            name=name,
            limit=spec.limits.nodes,
            price=_price(pool),
            step_seconds=speed.step_seconds,
            step_sigma=speed.sigma,
            batch=batch,
            spot=spec.capacity_type == "Spot",
            accelerator=f"{sheet.name} x {_count(pool)}",
            zone=spec.zone,
            transfer_per_gib=float(spec.transfer_per_gib),
            startup_seconds=started / (PRIOR_STARTUPS + starts.seen),
            interruptions_per_hour=rate if spec.capacity_type == "Spot" else 0.0,
            shock_size=0.5 if measured.together is None else float(measured.together),
            running=running,
        )

    def _batch(self, pool: CapacityPool) -> int:
        return pool.spec.batch_size or self.job.spec.training.batch_size

    def _sheet(self, pool: CapacityPool) -> Accelerator:
        return self.sheets.find(_accelerator(pool).name)

    # -- parameter servers --------------------------------------------------------------------------------------

    def _server_pool(self) -> CapacityPool | None:
        """The first pool that the request names, or the cheapest on-demand pool without an accelerator.

        With zone policy Same, one in a zone of workers if there is any.
        """
        named = self._named("parameterServers", self.request.parameter_servers.pools)
        if named:
            return named[0]
        bare = [
            pool
            for pool in self.pools.values()
            if pool.spec.accelerator is None and pool.spec.capacity_type == "OnDemand"
        ]
        zones = {pool.spec.zone for pool in self._candidates()}
        if self.request.workers.zone_policy == "Same" and all(zones):
            bare = [pool for pool in bare if not pool.spec.zone or pool.spec.zone in zones] or bare
        return min(bare, key=_price, default=None)

    def _fixed_count(self, most: int | None) -> tuple[int, ...]:
        replicas = self.job.spec.parameter_servers.replicas
        if most is not None and most < replicas:
            raise UsageError(
                f"--max-servers {most} is less than the job's parameterServers.replicas, {replicas}, and without "
                "a CapacityPool for parameter servers their number is not planned: raise it, lower replicas, or add a "
                "CapacityPool without accelerator"
            )
        self.notes.append(
            f"There is no pool for parameter servers: they are not priced, and stay {replicas}; add a "
            "CapacityPool without accelerator to count them."
        )
        return (replicas,)

    def _named(self, role: str, names: Sequence[str]) -> list[CapacityPool]:
        unknown = [name for name in names if name not in self.pools]
        if unknown:
            raise UsageError(
                f"{role}.pools of the PlanRequest names {unknown[0]}, which is not among the CapacityPools "
                f"({', '.join(self.pools)}): correct the name or add the pool"
            )
        return [self.pools[name] for name in names]


def _accelerator(pool: CapacityPool) -> AcceleratorSpec:
    assert pool.spec.accelerator is not None
    return pool.spec.accelerator


def _count(pool: CapacityPool) -> int:
    return _accelerator(pool).count


def _counts(pool: CapacityPool, most: int | None) -> tuple[int, ...]:
    most = min(pool.spec.limits.nodes, most or MOST_SERVERS)
    if most < 1:
        raise UsageError(
            f"CapacityPool {pool.metadata.name} is for the parameter servers and has limit 0: raise it"
        )
    return tuple(range(1, most + 1))


def _price(pool: CapacityPool) -> float:
    if pool.spec.price is None:
        raise UsageError(f"CapacityPool {pool.metadata.name} has no price: set spec.price.perHour")
    return float(pool.spec.price.per_hour)
