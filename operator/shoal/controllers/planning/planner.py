"""Plans all jobs that name pools, off the event loop: at once after what matters, else once a minute.

One plan at a time, of all jobs together, since they share the pools. A plan that fails leaves the last proposals, which
grow old and say so. A job, pool, profile or report that fails is left out and counted, and the others'
plans go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TypeVar

from shoal.api.capacity_pool import CapacityPool
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.controllers.capacitypool.measure import matches
from shoal.controllers.planning.metrics import PlanMetrics
from shoal.controllers.planning.paces import Paces
from shoal.controllers.planning.progress import Progress
from shoal.controllers.planning.translate import pool_values, proposal, with_status
from shoal.controllers.speedprofile.reconcile import Learner
from shoal.controllers.state import ClusterState, Key, Wake, key_of
from shoal.controllers.trainingjob.claims import holdings
from shoal.policy.model import Proposal
from shoal.runtime.work_queue import Priority
from shoal.sizing.fleet import FleetJob, FleetPlan, FleetPool, JobPlan, Profile, plan_fleet
from shoal.sizing.fleet.jobs import fleet_job, job_name, unreadable
from shoal.sizing.fleet.resources import profile_of
from shoal.sizing.fleet.work import samples_per_epoch
from shoal.telemetry.poller import Poller

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 1.0
"""A wave of changes is one plan."""

T = TypeVar("T")
U = TypeVar("U")

Plan = Callable[[list[FleetPool], list[Profile], list[FleetJob]], FleetPlan]


@dataclass(frozen=True)
class _Known:
    """The newest proposal for a job, and when it was made (the loop's clock)."""

    proposal: Proposal
    at: float


class Planner:
    """Runs `plan` and keeps its proposals. `every_seconds`: the interval without a reason to plan sooner."""

    def __init__(
        self,
        state: ClusterState,
        poller: Poller,
        learner: Learner,
        *,
        wake: Wake,
        wall: Callable[[], datetime],
        metrics: PlanMetrics,
        every_seconds: float = 60.0,
        plan: Plan = plan_fleet,
    ) -> None:
        self._state = state
        self._poller = poller
        self._learner = learner
        self._wake = wake
        self._wall = wall
        self._metrics = metrics
        self._every_seconds = every_seconds
        self._plan = plan
        self._known: dict[str, _Known] = {}
        self._wanted = asyncio.Event()
        self._progress = Progress()
        self._paces = Paces()

    def trigger(self) -> None:
        """Plan soon: a job began or ended, a worker was taken, a pool ran out of nodes."""
        self._wanted.set()

    def proposal(self, uid: str) -> Proposal | None:
        """The newest proposal for a job, with its age."""
        known = self._known.get(uid)
        return None if known is None else replace(known.proposal, age_seconds=self._now() - known.at)

    async def run(self) -> None:
        """Plan until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._every_seconds):
                    await self._wanted.wait()
                await asyncio.sleep(min(SETTLE_SECONDS, self._every_seconds))
            except TimeoutError:
                pass
            self._wanted.clear()
            try:
                await self.plan_once()
            except Exception:  # broad: a fault of the planner must not stop the operator
                self._metrics.plans.labels("error").inc()
                logger.exception("the planner failed; the last plans stay")

    async def plan_once(self) -> None:
        """Plan all jobs once."""
        jobs = {job_name(job): job for job in self._state.jobs.all() if _is_planned(job)}
        for uid in self._known.keys() - {job.metadata.uid for job in jobs.values()}:
            del self._known[uid]
        uids = {job.metadata.uid for job in jobs.values()}
        self._progress.forget(uids)
        self._paces.forget(uids)
        if not jobs:
            return
        now = self._wall()
        pools = self._each("pool", self._state.pools.all(), lambda pool: self._pool(pool, now))
        profiles, faults = self._profiles(now)
        fleet = [(job, self._read(job, partial(self._job, job, now))) for job in jobs.values()]
        began = self._now()

        def solve() -> FleetPlan:
            estimated = self._progress.estimated
            known = [self._read(job, partial(estimated, job, planned)) for job, planned in fleet]
            return self._plan(pools, list(profiles.values()), known)

        found = await asyncio.to_thread(solve)
        self._metrics.seconds.observe(self._now() - began)
        self._metrics.plans.labels("done").inc()
        self._metrics.faults.labels("job").inc(sum(bool(plan.fault) for plan in found.jobs.values()))
        blamed = {id(each.profile): each.fault for each in found.left_out}
        faults |= {key: blamed[id(each)] for key, each in profiles.items() if id(each) in blamed}
        self._metrics.faults.labels("profile").inc(len(faults))
        self._learner.judged(faults)
        priorities = {planned.name: planned.priority for _, planned in fleet}
        planned = [(jobs[name], plan) for name, plan in found.jobs.items()]
        self._each("job", planned, lambda one: self._propose(*one, found, priorities, now))

    def _each(self, what: str, items: Iterable[T], make: Callable[[T], U]) -> list[U]:
        """What is made of each; those that fail are left out, and counted."""
        made = []
        for item in items:
            try:
                made.append(make(item))
            except Exception:  # broad: nobody's plan must stop for one object that somebody else may edit
                self._metrics.faults.labels(what).inc()
                logger.exception("a %s is left out of the plans: %.200r", what, item)
        return made

    @staticmethod
    def _read(job: TrainingJob, read: Callable[[], FleetJob]) -> FleetJob:
        """A job as the planner sees it; one that cannot be read keeps what it has, and says so."""
        try:
            return read()
        except Exception as error:  # broad: as above
            logger.exception("job %s cannot be planned", job_name(job))
            return unreadable(job, f"{type(error).__name__}: {error}")

    def _propose(
        self,
        job: TrainingJob,
        plan: JobPlan,
        found: FleetPlan,
        priorities: Mapping[str, int],
        now: datetime,
    ) -> None:
        """Keep the proposal that follows from a job's plan, and wake the job."""
        old = self._known.get(job.metadata.uid)
        counts = {pool: count for pool, count in plan.counts.items() if count}
        same = old is not None and dict(old.proposal.pools) == counts
        since = old.proposal.since if old is not None and same and old.proposal.since else now
        fresh = proposal(job, plan, now, since, self._progress.course(job.metadata.uid))
        traded, higher = self._trade(job, found, priorities)
        fresh = replace(fresh, urgent=fresh.urgent or higher, traded=traded)
        self._known[job.metadata.uid] = _Known(fresh, self._now())
        self._wake(key_of(job), Priority.NORMAL)

    def _trade(
        self, job: TrainingJob, found: FleetPlan, priorities: Mapping[str, int]
    ) -> tuple[frozenset[str], bool]:
        """Pools of which this job gives nodes to others or gets theirs, and whether a higher priority gets some."""
        own, held = job_name(job), {job_name(other): holdings(other) for other in self._state.jobs.all()}
        traded, higher = set[str](), False
        for name in {*held[own], *found.jobs[own].counts}:
            wanted = {other: plan.counts.get(name, 0) for other, plan in found.jobs.items()}
            pool, before, after = self._state.pools.get(name), held[own][name], wanted[own]
            meanwhile = sum(max(wanted.get(other, 0), has[name]) for other, has in held.items())
            if pool is None or before == after or meanwhile <= pool.spec.limits.nodes:
                continue
            traded.add(name)
            above = any(count and priorities[other] > priorities[own] for other, count in wanted.items())
            higher |= before > after and above
        return frozenset(traded), higher

    def _job(self, job: TrainingJob, now: datetime) -> FleetJob:
        report, age = self._poller.latest(job.metadata.uid)
        fingerprint = report.model.fingerprint if report is not None and report.model is not None else ""
        profile = self._known_of((job.metadata.namespace, self._learner.name_of(job, fingerprint)))
        pods = self._state.pods.indexed("job", key_of(job))
        self._progress.observe(job, report, samples_per_epoch(profile))
        watched = self._paces.observe(job, report, self._now() - age)
        priority = max((pod.spec.priority for pod in pods), default=0)
        return fleet_job(job, profile, now, report, priority=priority, watched=watched)

    def _pool(self, pool: CapacityPool, now: datetime) -> FleetPool:
        return pool_values(pool, [node for node in self._state.nodes.all() if matches(pool, node)], now)

    def _profiles(self, now: datetime) -> tuple[dict[Key, Profile], dict[Key, str]]:
        """What was measured, and why some of it cannot be read."""
        made, faults = dict[Key, Profile](), dict[Key, str]()
        for key in self._learner.keys:
            try:
                if (found := profile_of(self._known_of(key), now, strict=False)) is not None:
                    made[key] = found
            except Exception as error:  # broad: as in `_each`
                faults[key] = f"{type(error).__name__}: {error}"
                logger.exception("SpeedProfile %s/%s is left out of the plans", *key)
        return made, faults

    def _known_of(self, key: Key) -> SpeedProfile:
        """A profile as it is stored, with the newest reports."""
        namespace, name = key
        return with_status(self._state.profiles.get(name, namespace), namespace, self._learner.learned(key))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _is_planned(job: TrainingJob) -> bool:
    return (
        bool(job.spec.workers.pools)
        and not job.status.finished
        and not job.spec.suspend
        and job.metadata.deletion_timestamp is None
        and job.spec.ours
    )
