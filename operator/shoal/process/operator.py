"""The operator: the wiring of reflectors, caches and controllers. What runs them is `shoal.runtime.manager`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from datetime import datetime
from functools import cache, partial
from typing import Any, TypeVar

from shoal.api.base import Resource
from shoal.api.capacity_pool import CapacityPool
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.cluster.cache import Cache
from shoal.cluster.clock import boot_time, utc_now
from shoal.cluster.lease import Lease, LeaseTimes
from shoal.cluster.own_thread import Runs, here
from shoal.cluster.reflector import Reflector
from shoal.cluster.transport import Fenced, Transport
from shoal.controllers.capacitypool.reconcile import PoolReconciler
from shoal.controllers.planning.metrics import PlanMetrics
from shoal.controllers.planning.planner import Planner
from shoal.controllers.planning.priorities import PriorityClasses
from shoal.controllers.sources import sources
from shoal.controllers.speedprofile.reconcile import Learner
from shoal.controllers.state import ClusterState, Wakes
from shoal.controllers.trainingjob.api_answers import AnswerStore
from shoal.controllers.trainingjob.apply import Applier
from shoal.controllers.trainingjob.claims import Claims
from shoal.controllers.trainingjob.credentials import CredentialsOfJobs
from shoal.controllers.trainingjob.metrics import JobMetrics
from shoal.controllers.trainingjob.observe import Observer
from shoal.controllers.trainingjob.reactions import Reactions
from shoal.controllers.trainingjob.reconcile import Reconciler
from shoal.controllers.trainingjob.report import Reporter
from shoal.controllers.trainingjob.unreadable import Complaints
from shoal.process.life import give_back
from shoal.process.settings import Settings
from shoal.runtime.controller import Controller, Key, count_waiting, key_of
from shoal.runtime.garbage import Garbage
from shoal.runtime.limiter import Limited
from shoal.runtime.manager import Manager
from shoal.runtime.metrics import Metrics
from shoal.runtime.outage import Outage, Watched
from shoal.runtime.recorder import Recorder
from shoal.runtime.status_writer import StatusWriter
from shoal.runtime.tasks import Tasks
from shoal.runtime.work_queue import Priority
from shoal.telemetry.coordinator import Coordinator
from shoal.telemetry.poller import Poller
from shoal_trainer.contract import StatusReport

R = TypeVar("R", bound=Resource)

LEASE_TIMES = LeaseTimes()
NEEDED = ("trainingjobs", "pods", "services", "poddisruptionbudgets")
SEEN_WITHIN_SECONDS = 5.0
"""A change that kopf has seen and the cache has not, after this time, is one that the reflector misses."""


POOLS_AT_ONCE, PROFILES_AT_ONCE = 4, 2
"""An API server that is slow with one does not hold up the others. Profiles are merged by this processor."""


def _nothing(_found: Mapping[str, Any], _why: str) -> None:
    """An object of the operator's own, or of Kubernetes: the log is enough."""


class Operator:
    """One replica of the operator.

    `lease_transport`, `lease_runs`: connection and event loop of the Lease, by default the same as for the rest;
    `lease_clock`: see `Lease`.
    """

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        coordinator: Coordinator,
        *,
        lease_transport: Transport | None = None,
        lease_runs: Runs = here,
        lease_clock: Callable[[], float] = boot_time,
        wall: Callable[[], datetime] = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
        lease_times: LeaseTimes = LEASE_TIMES,
    ) -> None:
        self.metrics = metrics = Metrics()
        self.garbage = Garbage(give_back)
        wakes = Wakes(
            jobs=self._wake_job, pools=self._wake_pool, profiles=self._wake_profile, plans=self._replan
        )
        self.state = ClusterState(wakes, settings.platform, own=settings.own_spot, wall=wall)
        self._settings = settings
        self._wall = wall
        self._outage = Outage(monotonic)
        self.lease = Lease(
            Watched(lease_transport or transport, self._outage),
            namespace=settings.lease_namespace,
            name=settings.lease_name,
            identity=settings.identity,
            times=lease_times,
            clock=lease_clock,
            wall=wall,
            runs=lease_runs,
            on_renewed=metrics.renewal_seconds.observe,
        )
        self._fenced = Limited(
            Fenced(Watched(transport, self._outage), self.lease.seconds_left),
            on_answer=lambda verb, code, seconds: metrics.requests.labels(verb, code).observe(seconds),
        )
        self._complaints = Complaints(
            self._fenced, wake=self._wake_job, wall=wall, unread=self.state.jobs.is_unread
        )
        self._reflectors = self._make_reflectors(self._fenced)
        self.recorder = Recorder(
            self._fenced,
            reporter=settings.identity,
            wall=wall,
            on_result=lambda result: metrics.events.labels(result).inc(),
        )
        self._job_metrics = JobMetrics(metrics, wall=wall)
        count_poll = cache(self._job_metrics.polls.labels)  # 45 a second
        self._poller = Poller(
            coordinator,
            show_every=settings.telemetry_seconds,
            on_result=lambda result: count_poll(result).inc(),
            on_report=self._hear,
        )
        self.learner, self.profiles = self._make_profiles()
        self._plan_metrics = PlanMetrics(metrics)
        self.planner = Planner(
            self.state,
            self._poller,
            self.learner,
            wake=self._wake_job,
            wall=wall,
            metrics=self._plan_metrics,
            images=settings.images,
            classes=PriorityClasses(self._fenced),
            every_seconds=settings.plan_seconds,
        )
        self._tasks = Tasks()
        self.pools = self._make_pools() if settings.pools else None
        self.jobs = self._make_jobs()
        controllers = [each for each in (self.jobs, self.pools, self.profiles) if each is not None]
        count_waiting(controllers, metrics)
        self.manager = Manager(
            self.lease,
            controllers,
            needed={name: self._reflectors[name] for name in NEEDED},
            optional={name: each for name, each in self._reflectors.items() if name not in NEEDED},
            recorder=self.recorder,
            metrics=metrics,
            background=[self.planner.run, self._tasks.run],
            on_lead=self._lead,
        )

    @property
    def watched(self) -> Set[str]:
        """The resources that it watches."""
        return self._reflectors.keys()

    async def run(self) -> None:
        """Run until cancelled; see `Manager.run`."""
        try:
            await self.manager.run()
        finally:
            await self._poller.close()

    def changed(self, plural: str, namespace: str, name: str, uid: str, version: str) -> bool:
        """Wake a key because another watch saw it change; False if the cache has seen that version already."""
        cache = self.state.cache_of(plural)
        if cache is None or not version.isdigit() or cache.has_seen(uid, int(version)):
            return False
        self.state.wake(plural, (namespace, name), Priority.NORMAL)
        return True

    def missed(self, plural: str, uid: str, version: str) -> bool:
        """List a resource again if the cache still has not seen this version of an object; whether it had not."""
        cache, reflector = self.state.cache_of(plural), self._reflectors.get(plural)
        if cache is None or reflector is None or reflector.denied or cache.has_seen(uid, int(version)):
            return False
        reflector.request_refresh()
        return True

    def _make_reflectors(self, transport: Transport) -> dict[str, Reflector[Any]]:
        state, settings = self.state, self._settings
        unwatched = {"nodes": not settings.node_signals, CapacityPool.PLURAL: not settings.pools}
        unreadable = {"trainingjobs": self._unreadable, "capacitypools": state.hear_unreadable_pool}
        return {
            name: Reflector(
                transport,
                source,
                state.caches[name],
                on_restart=partial(self._restarted, name),
                on_unread=self.metrics.unread_objects.labels(name).inc,
                on_unreadable=unreadable.get(name, _nothing),
            )
            for name, source in sources(settings.namespace, kueue=settings.kueue).items()
            if not unwatched.get(name)
        }

    def _unreadable(self, found: Mapping[str, Any], why: str) -> None:
        self.jobs.wake(self._complaints.hear(found, why))

    def _restarted(self, resource: str, reason: str) -> None:
        """Count a watch that was started again."""
        self.metrics.watch_restarts.labels(resource, reason).inc()

    def _lead(self) -> None:
        self._outage.assumed(self.lease.abandoned_seconds)
        self._job_metrics.count_jobs(self.state.jobs.all, self.state.jobs.unread)
        self._plan_metrics.count_pools(self.state.pools.all, self.state.jobs.all)
        self._plan_metrics.count_proposals(self.planner.oldest_seconds, self.planner.waiting)
        self.planner.trigger()

    def _hear(self, uid: str, report: StatusReport) -> None:
        if (job := self.state.jobs.by_uid(uid)) is not None:
            self.learner.hear(job, report)

    def _writer(self, kind: type[R], cache: Cache[R]) -> StatusWriter[R]:
        written = self.metrics.status_writes

        def count(result: str) -> None:
            written.labels(kind.__name__, result).inc()

        reflector = self._reflectors[kind.PLURAL]
        return StatusWriter(self._fenced, cache, kind, on_result=count, on_stale=reflector.request_refresh)

    def _make_pools(self) -> Controller:
        state = self.state

        def rest(key: Key, seconds: float) -> None:
            controller.queue.rest(key, seconds)

        reconcile = PoolReconciler(
            state,
            self._writer(CapacityPool, state.pools),
            self.recorder,
            wall=self._wall,
            operator=f"{self._settings.lease_namespace}/{self._settings.lease_name}",
            nodes_readable=self._nodes_readable,
            on_change=self._replan,
            rest=rest,
        )
        controller = Controller(
            "capacitypool",
            reconcile,
            keys=lambda: [key_of(pool) for pool in state.pools.all()],
            metrics=self.metrics,
            workers=POOLS_AT_ONCE,
        )
        return controller

    def _make_profiles(self) -> tuple[Learner, Controller]:
        learner = Learner(
            self._fenced,
            self.state,
            self._writer(SpeedProfile, self.state.profiles),
            wake=self._wake_profile,
            wall=self._wall,
            on_fault=lambda: self._plan_metrics.faults.labels("report").inc(),
            tell=lambda job, event: self.recorder.record(job, [event]),
        )
        controller = Controller(
            "speedprofile", learner, keys=lambda: learner.keys, metrics=self.metrics, workers=PROFILES_AT_ONCE
        )
        return learner, controller

    def _make_jobs(self) -> Controller:
        state, settings, fenced, wall = self.state, self._settings, self._fenced, self._wall
        credentials = CredentialsOfJobs(settings.install_key)
        state.on_gone.append(credentials.forget)
        answers = AnswerStore()
        claims = Claims()
        state.on_job.append(claims.see)
        writer = self._writer(TrainingJob, state.jobs)
        reconcile = Reconciler(
            Observer(
                state,
                answers,
                self._poller,
                claims,
                images=settings.images,
                node_signals=self._nodes_readable,
                old_pods=lambda: self._reflectors["pods"].denied,
                no_workloads=self._no_workloads,
                no_pools=self._no_pools,
                api_returned_seconds=lambda: self._outage.returned_seconds,
                proposal=self.planner.proposal,
                wall=wall,
            ),
            Applier(
                fenced, state, answers, credentials=credentials.get, wall=wall, metrics=self._job_metrics
            ),
            Reporter(
                writer,
                self.recorder,
                self._job_metrics,
                wall=wall,
                telemetry_seconds=settings.telemetry_seconds,
            ),
            state=state,
            answers=answers,
            claims=claims,
            poller=self._poller,
            credentials=credentials.get,
            complaints=self._complaints,
            reactions=Reactions(self._job_metrics.reacted),
            tasks=self._tasks,
            waited=self._waited,
            wake=self._wake_job,
            rest=self._rest,
        )
        return Controller(
            "trainingjob",
            reconcile,
            keys=lambda: {*map(key_of, state.jobs.all()), *self._complaints.keys()},
            metrics=self.metrics,
        )

    def _wake_job(self, key: Key, priority: Priority) -> None:
        if priority is not Priority.ROUTINE:
            self.garbage.postpone()
        self.jobs.wake(key, priority)

    def _waited(self, key: Key) -> float:
        return self.jobs.queue.waited(key)

    def _rest(self, key: Key, seconds: float) -> None:
        self.jobs.queue.rest(key, seconds)

    def _wake_pool(self, key: Key, priority: Priority) -> None:
        if self.pools is not None:
            self.pools.wake(key, priority)

    def _wake_profile(self, key: Key, priority: Priority) -> None:
        self.profiles.wake(key, priority)

    def _replan(self) -> None:
        self.planner.trigger()

    def _no_workloads(self) -> str:
        """Why Workloads of Kueue cannot be read; empty: they can."""
        reflectors = [self._reflectors.get(name) for name in ("workloads", "resourceflavors")]
        if not all(reflectors):
            return "the operator has nothing to do with Kueue: set the chart's value kueue.enabled"
        if any(each is not None and not each.readable for each in reflectors):
            return (
                "Kueue's Workloads and ResourceFlavors cannot be listed:"
                " it is not installed, older than 0.15, not permitted, or does not answer"
            )
        return ""

    def _no_pools(self) -> str:
        """Why CapacityPools cannot be read; empty: they can."""
        if (pools := self._reflectors.get(CapacityPool.PLURAL)) is None:
            return "it reads none: set the chart's value scope.pools, or name no pools"
        if not pools.readable:
            return "they cannot be listed: not permitted, or the API server does not answer"
        return ""

    def _nodes_readable(self) -> bool:
        nodes = self._reflectors.get("nodes")
        return nodes is not None and nodes.readable
