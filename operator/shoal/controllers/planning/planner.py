"""Plans all jobs that name pools, off the event loop: at once after what matters, else once a minute.

One plan at a time, of all jobs together, since they share the pools. The first one of a thousand jobs may take an hour:
those that follow no plan yet get theirs meanwhile, as it is before jobs trade. One that follows the plan of an operator
before this one keeps it until the end: it would give up what it got by a trade, and get it back. What matters
interrupts a plan that takes longer than a minute: the next one has the choices that were made, and what came.

A plan that fails leaves the last proposals, which grow old and say so. A job, pool, profile or report that fails is
left out and counted, and the others' plans go on.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Protocol, TypeVar

from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.controllers.planning.cores import Cores
from shoal.controllers.planning.metrics import PlanMetrics
from shoal.controllers.planning.paces import Paces
from shoal.controllers.planning.priorities import Priorities, PriorityClasses
from shoal.controllers.planning.progress import Progress
from shoal.controllers.planning.scene import Scene, is_planned, take
from shoal.controllers.planning.trades import Trade, trades
from shoal.controllers.planning.translate import proposal
from shoal.controllers.planning.turns import with_turn
from shoal.controllers.speedprofile.reconcile import Learner
from shoal.controllers.state import ClusterState, Wake
from shoal.controllers.trainingjob.claims import holdings
from shoal.errors import Interrupted
from shoal.manifests.pods import Images
from shoal.policy.model import Proposal
from shoal.runtime.controller import Key, key_of
from shoal.runtime.work_queue import Priority
from shoal.sizing.fleet import FleetJob, FleetPlan, FleetPool, JobPlan, Profile, plan_fleet
from shoal.sizing.fleet.jobs import job_name, unreadable
from shoal.sizing.fleet.resources import profile_of
from shoal.telemetry.poller import Poller

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 1.0
"""A wave of changes is one plan."""

LATER = 2
"""A plan after one that was interrupted has so many times as long before it is, too: so it comes to an end."""

T = TypeVar("T")
U = TypeVar("U")

PORTION_SECONDS = 10.0
"""First proposals are published so often while a plan is made: as a rule it is done before, and published whole."""


class Plan(Protocol):
    """Makes a plan; `told` hears of each job's as it is made, `between` is called while jobs trade."""

    def __call__(
        self,
        pools: list[FleetPool],
        profiles: list[Profile],
        jobs: list[FleetJob],
        /,
        *,
        told: Callable[[str, JobPlan], None],
        between: Callable[[], None],
    ) -> FleetPlan:
        """See `plan_fleet`."""
        ...


Answers = list[tuple[TrainingJob, Proposal]]


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
        images: Images,
        classes: PriorityClasses,
        every_seconds: float = 60.0,
        plan: Plan | None = None,
    ) -> None:
        self._state = state
        self._poller = poller
        self._learner = learner
        self._wake = wake
        self._wall = wall
        self._metrics = metrics
        self._images = images
        self._classes = classes
        self._every_seconds = every_seconds
        self._plan = plan or partial(plan_fleet, kept={})
        self._known: dict[str, _Known] = {}
        self._wanted = asyncio.Event()
        self._progress = Progress()
        self._paces = Paces()
        self._cores = Cores()

    def trigger(self) -> None:
        """Plan soon: a job began or ended, a worker was taken, a pool ran out of nodes."""
        self._wanted.set()

    def proposal(self, uid: str) -> Proposal | None:
        """The newest proposal for a job, with its age."""
        known = self._known.get(uid)
        return None if known is None else replace(known.proposal, age_seconds=self._now() - known.at)

    def oldest_seconds(self) -> float:
        """The age of the oldest proposal; 0 without one."""
        return max((self._now() - known.at for known in self._known.values()), default=0.0)

    def waiting(self) -> int:
        """How many jobs wait for their first proposal."""
        return sum(is_planned(job) and job.metadata.uid not in self._known for job in self._state.jobs.all())

    async def run(self) -> None:
        """Plan until cancelled, for at most half of the time: a wave of disruptions comes while a plan is made.

        It rests no longer than it does without a reason to plan, however long a plan took.
        """
        rest, ended, patience = 0.0, self._now(), self._every_seconds
        while True:
            settle = min(SETTLE_SECONDS, self._every_seconds)
            try:
                async with asyncio.timeout(self._every_seconds):
                    await self._wanted.wait()
            except TimeoutError:
                settle = 0.0
            await asyncio.sleep(max(settle, ended + rest - self._now()))
            self._wanted.clear()
            began, interrupted = self._now(), False
            try:
                await self.plan_once(patience=patience)
            except Interrupted:
                self._metrics.plans.labels("interrupted").inc()
                interrupted = True
            except Exception:  # broad: a fault of the planner must not stop the operator
                self._metrics.plans.labels("error").inc()
                logger.exception("the planner failed; the last plans stay")
            since, ended = ended, self._now()
            took = ended - began
            patience = LATER * patience if interrupted else self._every_seconds
            rest = 0.0 if interrupted else min(took, self._every_seconds)
            self._metrics.busy.set(took / max(ended - since, 1e-9))

    async def plan_once(self, clock: Callable[[], float] | None = None, patience: float = math.inf) -> None:
        """Plan all jobs once. `clock`: by which portions are due; None: the loop's.

        `patience`: seconds after which it is given up for what matters.
        """
        # Who has no pools may read no classes either.
        shared = self._state.pools_by_name and any(map(is_planned, self._state.jobs.all()))
        priorities = await self._classes.read() if shared else Priorities()
        scene = take(
            self._state,
            self._poller,
            self._learner,
            self._images,
            priorities,
            self._cores,
            self._wall(),
            self._now(),
        )
        uids = {look.job.metadata.uid for look in scene.looks}
        for uid in self._known.keys() - uids:
            del self._known[uid]
        self._progress.forget(uids)
        self._paces.forget(uids)
        if not uids:
            return
        began, loop = self._now(), asyncio.get_running_loop()

        def tell(portion: Answers) -> None:
            loop.call_soon_threadsafe(self._publish, portion)

        proposals, faults = await asyncio.to_thread(
            self._proposals, scene, tell, clock or loop.time, patience
        )
        self._metrics.seconds.observe(self._now() - began)
        self._metrics.plans.labels("done").inc()
        self._metrics.faults.labels("profile").inc(len(faults))
        failed = {key: f"the predictor fails with it ({words})" for key, words in faults.items()}
        self._learner.judged({**scene.unread, **failed})
        self._publish(proposals)

    def _publish(self, proposals: Answers) -> None:
        for job, fresh in proposals:
            self._known[job.metadata.uid] = _Known(fresh, self._now())
            self._wake(key_of(job), Priority.NORMAL)

    # --- off the event loop ---------------------------------------------------------------------------------------

    def _proposals(
        self, scene: Scene, tell: Callable[[Answers], None], clock: Callable[[], float], patience: float
    ) -> tuple[Answers, dict[Key, str]]:
        """What is proposed to the jobs, and why some profiles cannot be used.

        `tell`: gets the first proposals of jobs, in portions.
        """
        began = clock()
        pools = self._each("pool", scene.pools.values(), scene.pool)
        merged = {key: known.merged() for key, known in scene.profiles.items()}
        profiles, faults = _read_profiles(merged, scene.now)
        jobs = {job_name(look.job): look.job for look in scene.looks}
        seen = [
            _read(job, partial(scene.job, look, merged.get(look.profile), self._progress, self._paces))
            for job, look in zip(jobs.values(), scene.looks, strict=True)
        ]  # all of them, before any is estimated: jobs of one model help each other
        fleet = [
            _read(job, partial(self._progress.estimated, job, planned))
            for job, planned in zip(jobs.values(), seen, strict=True)
        ]
        fleet = with_turn(fleet, scene.now)
        by_name = {planned.name: planned for planned in fleet}
        held = {job_name(job): holdings(job) for job in scene.jobs}
        limits = {name: pool.room for name, pool in scene.pools.items()}
        priorities = {planned.name: planned.priority for planned in fleet}

        def answers_of(plans: Mapping[str, JobPlan], names: Iterable[str]) -> Answers:
            holds = {name: by_name[name].holds(plan.counts) for name, plan in plans.items()}
            traded = trades(holds, held, limits, priorities)
            each = ((jobs[name], plans[name], traded[name]) for name in names)
            return self._each("job", each, lambda one: (one[0], self._proposal(*one, scene.now)))

        made, first, since = dict[str, JobPlan](), list[str](), clock()

        def told(name: str, plan: JobPlan) -> None:
            made[name] = plan
            if jobs[name].metadata.uid not in self._known and not _follows(jobs[name]):
                first.append(name)
            if clock() - since >= PORTION_SECONDS:
                publish()
            if len(made) < len(jobs):
                between()

        def publish() -> None:
            nonlocal since
            if first:
                logger.info("the plan has %d of %d jobs so far", len(made), len(jobs))
                tell(answers_of(made, first))
                first.clear()
                since = clock()

        def between() -> None:
            if self._wanted.is_set() and clock() - began >= patience:
                publish()
                raise Interrupted(f"after {len(made)} of {len(jobs)} jobs")

        found = self._plan(pools, list(profiles.values()), fleet, told=told, between=between)
        blamed = {id(each.profile): each.fault for each in found.left_out}
        faults |= {key: blamed[id(each)] for key, each in profiles.items() if id(each) in blamed}
        self._metrics.rows_left_out.set(found.rows_left_out)
        self._metrics.faults.labels("job").inc(sum(bool(plan.fault) for plan in found.jobs.values()))
        return answers_of(found.jobs, found.jobs), faults

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

    def _proposal(self, job: TrainingJob, plan: JobPlan, trade: Trade, now: datetime) -> Proposal:
        """The proposal that follows from a job's plan."""
        uid = job.metadata.uid
        known = self._known.get(uid)
        return proposal(job, plan, trade, now, known.proposal if known else None, self._progress.course(uid))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _follows(job: TrainingJob) -> bool:
    """Whether the job carries out a plan that was made for it, and not what it begins with."""
    return job.status.plan is not None and job.status.plan.finish_time is not None


def _read(job: TrainingJob, read: Callable[[], FleetJob]) -> FleetJob:
    """A job as the planner sees it; one that cannot be read keeps what it has, and says so."""
    try:
        return read()
    except Exception as error:  # broad: as in `_each`
        logger.exception("job %s cannot be planned", job_name(job))
        return unreadable(job, f"{type(error).__name__}: {error}")


def _read_profiles(
    merged: Mapping[Key, SpeedProfile], now: datetime
) -> tuple[dict[Key, Profile], dict[Key, str]]:
    """What was measured, and why some of it cannot be read."""
    made, faults = dict[Key, Profile](), dict[Key, str]()
    for key, profile in merged.items():
        try:
            if (found := profile_of(profile, now, strict=False)) is not None:
                made[key] = found
        except Exception as error:  # broad: as in `_each`
            faults[key] = f"{type(error).__name__}: {error}"
            logger.exception("SpeedProfile %s/%s is left out of the plans", *key)
    return made, faults
