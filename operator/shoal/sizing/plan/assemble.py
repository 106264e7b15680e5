"""From files, or objects of a cluster, to a problem for the planner: what `shoal plan` and `shoal simulate` solve.

The job is read as the operator reads it (`fleet/jobs.py`). Beyond that, the number of parameter servers is planned and
they are priced, pools may be left to the planner, and what cannot be planned is an error that says what to change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from shoal.api.capacity_pool import CapacityPool
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.errors import UsageError
from shoal.manifests.pods import Images, has_gpu_image
from shoal.sizing.accelerators import catalogue
from shoal.sizing.fleet.jobs import END_SECONDS, fleet_job, server_price
from shoal.sizing.fleet.problems import (
    JobProblem,
    batch_of,
    cores_of,
    device_of,
    devices_of,
    job_problem,
    servers_of,
)
from shoal.sizing.fleet.resources import fleet_pool, profile_of
from shoal.sizing.fleet.values import FleetJob, FleetPool
from shoal.sizing.fleet.work import course_of, ending_by_metric
from shoal.sizing.plan.explain import sentence
from shoal.sizing.plan.problem import Servers
from shoal.sizing.speed import priors
from shoal.sizing.speed.measurements import Basis, Model
from shoal.sizing.speed.model import SpeedModel

__all__ = ["assembled"]

MOST_SERVERS = 8
LEAST_SECONDS = 1.0
"""Left of a deadline of which nothing has passed, however near: there is an answer to it, the fastest plan."""


def assembled(
    job: TrainingJob,
    pools: Sequence[CapacityPool],
    profile: SpeedProfile,
    profiles: Sequence[SpeedProfile],
    *,
    now: datetime,
    deadline: float | None = None,
    budget: float | None = None,
    job_deadline: bool = True,
    max_servers: int | None = None,
) -> tuple[FleetJob, JobProblem]:
    """Assemble the problem, and the job that it is of. The units are those of docs/planning-model.md.

    Args:
        job: the job, with its status if it has started.
        pools: all CapacityPools.
        profile: that of the job's model.
        profiles: all of them, which the speeds are learned from.
        now: the present, for the deadline and the age of measurements.
        deadline: seconds from now, of which as many are kept free for the end as of the job's; None: the job's.
        budget: the most that the work left may cost; None: what the job's maxCost leaves.
        job_deadline: whether the job's deadline counts.
        max_servers: the most parameter servers, None: the limit of their pool, at most `MOST_SERVERS`.

    """
    own = profile_of(profile, now)
    if own is None:
        raise UsageError(
            f"SpeedProfile {profile.metadata.name or '?'} does not describe its model yet: set spec.model, or "
            "run a job of it"
        )
    others = [profile_of(other, now) for other in profiles if other is not profile]
    speeds = SpeedModel([own, *(other for other in others if other is not None)], planned={own.model.key})
    by_name = {pool.metadata.name: pool for pool in pools}
    planned = fleet_job(job, profile, now, server_price=server_price(job, by_name))
    planned = replace(planned, keeps=None)  # asked is what jobs would do that follow their plans
    if job.status.images is not None:  # else nobody knows yet what its operator would give it
        planned = replace(planned, gpu_image=has_gpu_image(job, Images("", "")))
    if course := [point for _, point in sorted(course_of(job).items())]:
        planned = ending_by_metric(job, planned, course)
    if deadline is not None or not job_deadline:
        planned = replace(planned, deadline_seconds=None if deadline is None else deadline - END_SECONDS)
    if planned.deadline_seconds is not None and (deadline is not None or job.status.start_time is None):
        planned = replace(planned, deadline_seconds=max(planned.deadline_seconds, LEAST_SECONDS))
    if budget is not None:
        if not budget > 0:
            raise UsageError(f"the budget must be above 0, not {budget:g}")
        planned = replace(planned, budget_left=budget)
    _check(job, planned)
    assembly = _Assembly(job, by_name, planned, own.model, speeds, now)
    for row in own.rows:
        if not catalogue().knows(row.device):
            assembly.notes.append(
                f"The measurement on {row.device} is ignored: it is not in the catalogue of accelerators."
            )
    if speeds.left_out:
        assembly.notes.append(
            f"{speeds.left_out} measured configurations of other models are left out: they are too many to learn from."
        )
    return assembly.problem(max_servers)


def _check(job: TrainingJob, planned: FleetJob) -> None:
    """Raise UsageError if there is nothing to plan, or no limit that can be kept."""
    if not planned.has_work:
        raise UsageError(planned.work_note or "the work left is not known")
    for left, what in ((planned.steps_left, "steps"), (planned.samples_left, "epochs")):
        if left is not None and left < 1:
            raise UsageError(f"the job has made all its {what}: nothing is left to plan")
    objective = job.spec.elasticity.objective
    if planned.deadline_seconds is not None and planned.deadline_seconds <= 0:
        raise UsageError(
            f"the deadline of {objective.deadline_seconds} s after the start of the job "
            f"({job.status.start_time:%Y-%m-%d %H:%M:%S %Z}) has passed: set --deadline to the seconds from now"
        )
    if planned.budget_left is not None and planned.budget_left <= 0:
        raise UsageError(
            f"the budget of {objective.max_cost:.15g} is spent ({planned.spent:.2f}): set --max-cost to what the work "
            "left may cost"
        )


@dataclass
class _Assembly:
    """The inputs, and the notes on them that belong in the explanation of the plan."""

    job: TrainingJob
    pools: dict[str, CapacityPool]
    planned: FleetJob
    model: Model
    speeds: SpeedModel
    now: datetime
    notes: list[str] = field(default_factory=list)

    def problem(self, max_servers: int | None) -> tuple[FleetJob, JobProblem]:
        """The job with all that is planned for it, and the whole problem."""
        workers = self.job.spec.workers
        candidates = [fleet_pool(pool, self.now) for pool in self._candidates()]
        names = tuple(pool.name for pool in candidates)
        for pool in candidates:
            if pool.accelerator is not None:
                catalogue().find(pool.accelerator)
            self._note_speed(pool)
        self._note_elsewhere(names)
        if self.planned.work_note:
            self.notes.append(sentence(self.planned.work_note))
        planned = replace(
            self.planned,
            pools=names,
            min_workers=workers.min_replicas,
            max_workers=workers.max_replicas or max(sum(pool.nodes for pool in candidates), 1),
        )
        made = job_problem(
            planned,
            candidates,
            {pool.name: pool.nodes for pool in candidates},
            self.speeds,
            self._servers(max_servers),
        )
        notes = (*self.notes, *made.notes)
        whole = replace(made.problem, max_workers=workers.max_replicas, notes=notes)
        return planned, replace(made, problem=whole)

    # -- workers ------------------------------------------------------------------------------------------------

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

    def _note_elsewhere(self, candidates: Sequence[str]) -> None:
        """A note on workers that run in none of the candidates."""
        elsewhere = [
            slot.pool or "no pool"
            for slot in self.job.status.slots
            if slot.role == "worker" and slot.state in {"Starting", "Running"} and slot.pool not in candidates
        ]
        if elsewhere:
            self.notes.append(
                f"{len(elsewhere)} worker{'s run' if len(elsewhere) > 1 else ' runs'} in "
                f"{', '.join(sorted(set(elsewhere)))}, which is not a CapacityPool of this job: the plan ignores them; "
                "name it in workers.pools."
            )

    def _note_speed(self, pool: FleetPool) -> None:
        """A note where a step time is not measured."""
        batch, device = batch_of(self.planned, pool), device_of(self.planned, pool)
        devices, cores = devices_of(self.planned, pool), cores_of(self.planned, pool)
        found = self.speeds.worker(self.model, device, devices, cores, batch)
        if found.basis is Basis.MEASURED:
            return
        low, high = (found.seconds * math.exp(z * found.sigma) for z in (-priors.Z90, priors.Z90))
        where = f"{device} x {devices}" if devices > 1 else device
        note = (
            f"No step of {batch} samples was measured on {where}: its time of {found.seconds:.3g} s is predicted from "
            f"{found.basis} and may lie between {low:.3g} s and {high:.3g} s."
        )
        if note not in self.notes:  # another pool of the same accelerator has said it
            self.notes.append(note)

    # -- parameter servers --------------------------------------------------------------------------------------

    def _servers(self, most: int | None) -> Servers:
        """The parameter servers: at most `most`, as many as the job has if there is no pool to price them."""
        spec, pool = self.job.spec.parameter_servers, self._server_pool()
        if self.model.key not in self.speeds.servers.names:
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
    return pool.spec.price.per_hour
