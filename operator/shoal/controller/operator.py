"""The operator: reflectors fill the cluster state, changes queue jobs, and the holder of the Lease reconciles them.

Crash-only: all state is in the cluster. A start lists everything, acquires the Lease and reconciles all jobs. A standby
keeps its caches warm for a quick takeover, but queues no jobs and does not export their number, as the leader does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any

from shoal.cluster.lease import Lease, LeaseTimes
from shoal.cluster.reflector import Reflector
from shoal.cluster.transport import Fenced, Transport
from shoal.cluster.work_queue import Priority, WorkQueue
from shoal.controller.api_answers import AnswerStore
from shoal.controller.apply import Applier
from shoal.controller.cluster_state import ClusterState, Key, sources
from shoal.controller.credentials import job_credentials
from shoal.controller.events import Recorder
from shoal.controller.observe import Observer
from shoal.controller.reconcile import Reconciler
from shoal.controller.report import Reporter
from shoal.controller.settings import Settings
from shoal.telemetry.coordinator import Coordinator
from shoal.telemetry.metrics import Metrics
from shoal.telemetry.poller import Poller

LEASE_TIMES = LeaseTimes()


def _now() -> datetime:
    return datetime.now(UTC)


class Operator:
    """One replica of the operator."""

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        coordinator: Coordinator,
        *,
        wall: Callable[[], datetime] = _now,
        lease_times: LeaseTimes = LEASE_TIMES,
    ) -> None:
        self.metrics = metrics = Metrics()
        self.queue: WorkQueue[Key] = WorkQueue()
        self.state = state = ClusterState(self.wake)
        self._leads = False
        self.lease = Lease(
            transport,
            namespace=settings.lease_namespace,
            name=settings.lease_name,
            identity=settings.identity,
            times=lease_times,
            wall=wall,
        )
        self._workers = settings.workers
        self._poller = Poller(coordinator, show_every=settings.telemetry_seconds)
        self._reflectors(transport, settings)
        fenced = Fenced(transport, self.lease.check)
        credentials = lru_cache(1024)(partial(job_credentials, settings.install_key))
        answers = AnswerStore()
        recorder = Recorder(fenced, reporter=settings.identity, wall=wall)
        self._reconcile = Reconciler(
            Observer(
                state,
                answers,
                self._poller,
                images=settings.images,
                node_signals=self._nodes_readable,
                wall=wall,
            ),
            Applier(fenced, state, answers, credentials=credentials, wall=wall, metrics=metrics),
            Reporter(fenced, state, recorder, metrics, telemetry_seconds=settings.telemetry_seconds),
            state=state,
            answers=answers,
            poller=self._poller,
            credentials=credentials,
            wake=self.wake,
            metrics=metrics,
        )

    def wake(self, key: Key, priority: Priority = Priority.NORMAL) -> None:
        """Queue a job because something about it changed."""
        if self._leads:
            self.queue.add(key, priority)

    def lead(self) -> None:
        """Start to reconcile, after the Lease was acquired: first all known jobs, then those that change."""
        self._leads = True
        self.metrics.count_jobs(
            lambda: [job.status.phase for job in self.state.jobs.all()], lambda: len(self.queue)
        )
        for job in self.state.jobs.all():
            self.wake((job.metadata.namespace, job.metadata.name))

    def _reflectors(self, transport: Transport, settings: Settings) -> None:
        jobs, pods, services, nodes = sources(settings.namespace)
        state = self.state

        def reflector(name: str, source: Any, cache: Any) -> Reflector[Any]:
            restarted = partial(self._watch_restarted, name)
            return Reflector(transport, source, cache, on_restart=restarted)

        self._needed = {
            "trainingjobs": reflector("trainingjobs", jobs, state.jobs),
            "pods": reflector("pods", pods, state.pods),
            "services": reflector("services", services, state.services),
        }
        self._nodes = reflector("nodes", nodes, state.nodes) if settings.node_signals else None

    def unread(self) -> list[str]:
        """The resources that jobs need and that cannot be listed: permissions or the CRD are missing, or not yet."""
        return [name for name, each in self._needed.items() if not each.synced.is_set() or each.denied]

    def _watch_restarted(self, resource: str, reason: str) -> None:
        self.metrics.watch_restarts.labels(resource, reason).inc()

    def _nodes_readable(self) -> bool:
        return self._nodes is not None and self._nodes.synced.is_set() and not self._nodes.denied

    async def run(self) -> None:
        """Run until cancelled.

        Raises:
            ExceptionGroup: with `LeaseLost`, or an unexpected error.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for each in [*self._needed.values(), *([self._nodes] if self._nodes else [])]:
                    tasks.create_task(each.run())
                await self.lease.acquire()
                tasks.create_task(self.lease.keep())
                self.lead()
                for each in self._needed.values():
                    await each.synced.wait()
                self.metrics.leading.set(1)
                if self._nodes is not None:
                    await self._nodes.first_try.wait()
                for _ in range(self._workers):
                    tasks.create_task(self.queue.work(self._reconcile))
        finally:
            self.metrics.leading.set(0)
            await self._poller.close()
            await self.lease.release()
