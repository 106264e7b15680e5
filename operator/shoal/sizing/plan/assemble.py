"""From a TrainingJob, CapacityPools and SpeedProfiles to a problem for the planner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from shoal.api.capacity_pool import CapacityPool
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.errors import UsageError
from shoal.sizing.accelerators import Catalogue, catalogue
from shoal.sizing.fleet.problems import batch_of, device_of, job_problem, servers_of
from shoal.sizing.fleet.resources import fleet_pool, profile_of
from shoal.sizing.fleet.values import FleetJob, FleetPool
from shoal.sizing.plan.problem import Problem, Servers
from shoal.sizing.plan.work_left import work_left
from shoal.sizing.speed.measurements import Model, Profile
from shoal.sizing.speed.model import SpeedModel

__all__ = ["problem_of"]

MOST_SERVERS = 8
BYTES_PER_PARAMETER = 16
"""Accelerator memory per parameter: weight, gradient and two moments in fp32."""
USABLE_MEMORY = 0.9
Z90 = 1.6449


def problem_of(
    job: TrainingJob,
    pools: Sequence[CapacityPool],
    profile: SpeedProfile,
    profiles: Sequence[SpeedProfile],
    *,
    deadline: float | None,
    now: datetime,
    max_servers: int | None = None,
) -> Problem:
    """Assemble the problem. The units are those of docs/planning-model.md.

    Args:
        job: the job, with its status if it has started.
        pools: all CapacityPools.
        profile: that of the job's model.
        profiles: all of them, which the speeds are learned from.
        deadline: seconds from now (see `seconds_left`), None: no deadline.
        now: the present, for the age of measurements.
        max_servers: the most parameter servers, None: the limit of their pool, at most `MOST_SERVERS`.

    """
    return _Assembly(job, {pool.metadata.name: pool for pool in pools}, profile, profiles, now).problem(
        deadline, max_servers
    )


@dataclass
class _Assembly:
    """The inputs, and the notes on them that belong in the explanation of the plan."""

    job: TrainingJob
    pools: dict[str, CapacityPool]
    profile: SpeedProfile
    profiles: Sequence[SpeedProfile]
    now: datetime
    sheets: Catalogue = field(default_factory=catalogue)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        own = profile_of(self.profile, self.now)
        if own is None:
            raise UsageError(
                f"SpeedProfile {self.profile.metadata.name or '?'} does not describe its model yet: set spec.model, or "
                "run a job of it"
            )
        others = [profile_of(other, self.now) for other in self.profiles if other is not self.profile]
        self.model: Model = own.model
        self.speeds = SpeedModel([own, *(other for other in others if other is not None)], self.sheets)
        self._own: Profile = own
        for row in own.rows:
            if not self.sheets.knows(row.device):
                self.notes.append(
                    f"The measurement on {row.device} is ignored: it is not in the catalogue of accelerators."
                )

    def problem(self, deadline: float | None, max_servers: int | None) -> Problem:
        """The whole problem."""
        spec, objective = self.job.spec, self.job.spec.elasticity.objective
        candidates = [pool for pool in map(self._value, self._candidates()) if self._fits(pool)]
        if not candidates:
            raise UsageError(
                "the model fits into the accelerators of no pool: lower batchSize or add larger accelerators"
            )
        job = replace(
            self._job(),
            pools=tuple(pool.name for pool in candidates),
            running=self._running([pool.name for pool in candidates]),
            deadline_seconds=deadline,
            budget_left=None if objective.max_cost is None else float(objective.max_cost),
            prefer=objective.prefer,
        )
        for pool in candidates:
            if pool.accelerator is not None:
                self.sheets.find(pool.accelerator)
            self._note_speed(job, pool)
        made = job_problem(
            job,
            self.model,
            work_left(self.job, self.profile, self.notes),
            candidates,
            {pool.name: pool.limit for pool in candidates},
            self.speeds,
            0.95,
            self._servers(max_servers),
        )
        return replace(
            made.problem,
            min_workers=spec.workers.min_replicas,
            max_workers=spec.workers.max_replicas,
            notes=(*self.notes, *made.notes),
        )

    def _job(self) -> FleetJob:
        spec = self.job.spec
        return FleetJob(
            name=self.job.metadata.name,
            pools=(),
            model=self.model,
            batch_size=spec.training.batch_size,
            batch_sizes={entry.accelerator: entry.batch_size for entry in spec.training.batch_sizes},
            on_demand_base=spec.workers.on_demand_base,
            zone_policy=spec.workers.zone_policy,
            parameter_servers=spec.parameter_servers.replicas,
        )

    # -- workers ------------------------------------------------------------------------------------------------

    @staticmethod
    def _value(pool: CapacityPool) -> FleetPool:
        return fleet_pool(pool)

    def _candidates(self) -> list[CapacityPool]:
        """The pools that the job names, or every pool with an accelerator."""
        chosen = self._named("workers", self.job.spec.workers.pools)
        bare = [p.metadata.name for p in chosen if p.spec.accelerator is None and not p.spec.cores]
        if bare:
            raise UsageError(
                f"workers.pools names CapacityPool {bare[0]}, which has no accelerator and no cores: set spec.cores to "
                "train on its CPUs"
            )
        chosen = chosen or [pool for pool in self.pools.values() if pool.spec.accelerator is not None]
        if not chosen:
            raise UsageError("no CapacityPool has an accelerator: add one, or name the job's workers.pools")
        return chosen

    def _running(self, candidates: Sequence[str]) -> dict[str, int]:
        """How many workers run in each candidate; a note on those that run elsewhere."""
        running = dict.fromkeys(candidates, 0)
        elsewhere = []
        for slot in self.job.status.slots:
            if slot.role != "worker" or slot.state not in ("Starting", "Running"):
                continue
            if slot.pool in running:
                running[slot.pool] += 1
            else:
                elsewhere.append(slot.pool or "no pool")
        if elsewhere:
            self.notes.append(
                f"{len(elsewhere)} worker{'s run' if len(elsewhere) > 1 else ' runs'} in "
                f"{', '.join(sorted(set(elsewhere)))}, which is not a CapacityPool of this job: the plan ignores them; "
                "name it in workers.pools."
            )
        return running

    def _fits(self, pool: FleetPool) -> bool:
        """Whether the model fits into a pool's accelerators; a note if it does not."""
        needs = self.profile.model.bytes_per_sample
        if needs is None or pool.accelerator is None:
            return True
        batch, sheet = batch_of(self._job(), pool), self.sheets.find(pool.accelerator)
        needed = BYTES_PER_PARAMETER * self.model.parameters + needs * batch / pool.devices
        if needed <= USABLE_MEMORY * sheet.memory_gb * 1e9:
            return True
        self.notes.append(
            f"{pool.name} is left out: {batch} samples need {needed / 1e9:.1f} GB and {sheet.name} has "
            f"{sheet.memory_gb:g} GB; give the pool a smaller batchSize to use it."
        )
        return False

    def _note_speed(self, job: FleetJob, pool: FleetPool) -> None:
        """A note where a step time is not measured."""
        batch, device = batch_of(job, pool), device_of(pool)
        found = self.speeds.worker(self.model, device, pool.devices, pool.cores, batch)
        if found.basis == "measured":
            return
        low, high = (found.seconds * math.exp(z * found.sigma) for z in (-Z90, Z90))
        where = f"{device} x {pool.devices}" if pool.devices > 1 else device
        self.notes.append(
            f"No step of {batch} samples was measured on {where}: its time of {found.seconds:.3g} s is predicted from "
            f"{found.basis} and may lie between {low:.3g} s and {high:.3g} s."
        )

    # -- parameter servers --------------------------------------------------------------------------------------

    def _servers(self, most: int | None) -> Servers:
        """The parameter servers: at most `most`, as many as the job has if there is no pool to price them."""
        spec, pool = self.job.spec.parameter_servers, self._server_pool()
        if self.model.fingerprint not in self.speeds.servers.names:
            self.notes.append(
                "Several workers were not measured together: an update is taken to keep a parameter server busy for "
                f"{self.speeds.servers.update_seconds(self.model):.2g} s, or half or twice as long."
            )
        found = servers_of(
            self.model, self.speeds, self._fixed_count(most) if pool is None else _counts(pool, most)
        )
        return replace(
            found,
            price=_price(pool) if pool else 0.0,
            running=self.job.status.parameter_servers.ready,
            startup_seconds=float(pool.spec.startup_seconds) if pool else 0.0,
            snapshot_every=spec.snapshot.every_seconds,
            zone=pool.spec.zone or None if pool else None,
        )

    def _server_pool(self) -> CapacityPool | None:
        """The first pool that the job names, or the cheapest on-demand pool without an accelerator.

        With zone policy Same, one in a zone of workers if there is any.
        """
        named = self._named("parameterServers", self.job.spec.parameter_servers.pools)
        if named:
            return named[0]
        bare = [
            pool
            for pool in self.pools.values()
            if pool.spec.accelerator is None and pool.spec.capacity_type == "OnDemand"
        ]
        zones = {pool.spec.zone for pool in self._candidates()}
        if self.job.spec.workers.zone_policy == "Same" and all(zones):
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
                f"{role}.pools of the job names {unknown[0]}, which is not among the CapacityPools "
                f"({', '.join(self.pools)}): correct the name or add the pool"
            )
        return [self.pools[name] for name in names]


def _counts(pool: CapacityPool, most: int | None) -> tuple[int, ...]:
    most = min(pool.spec.limits.nodes, most or MOST_SERVERS)
    if most < 1:
        raise UsageError(
            f"CapacityPool {pool.metadata.name} is for the parameter servers and has limit 0: raise it"
        )
    return tuple(range(1, most + 1))


def _price(pool: CapacityPool) -> float:
    """Price of a node per hour. Raises UsageError if the pool has none."""
    if pool.spec.price is None:
        raise UsageError(
            f"CapacityPool {pool.metadata.name} is for the parameter servers and has no price: set price.perHour"
        )
    return float(pool.spec.price.per_hour)
