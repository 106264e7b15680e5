"""One controller: a queue of keys, and the function that reconciles one of them.

A standby queues nothing. When the process leads, every known key is queued once, then those that change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from shoal.api.base import Resource
from shoal.runtime.about import about
from shoal.runtime.metrics import Metrics
from shoal.runtime.work_queue import Priority, WorkQueue

Key = tuple[str, str]
"""(namespace, name) of an object; the namespace of a cluster-scoped one is empty."""

Reconcile = Callable[[Key], Awaitable[float | None]]
"""Reconciles one object; returns the seconds until the next time, or None: only after a change."""


def key_of(resource: Resource) -> Key:
    """The key of a custom resource."""
    return resource.metadata.namespace, resource.metadata.name


class Controller:
    """Reconciles the objects of one kind.

    `keys`: all that are known; `workers`: how many are reconciled concurrently, where a reconcile waits for answers.
    """

    def __init__(
        self,
        name: str,
        reconcile: Reconcile,
        *,
        keys: Callable[[], Iterable[Key]],
        metrics: Metrics,
        workers: int = 1,
    ) -> None:
        self.name = name
        self.queue: WorkQueue[Key] = WorkQueue(
            on_taken=lambda seconds: metrics.queue_seconds.labels(name).observe(seconds)
        )
        self._reconcile = reconcile
        self._keys = keys
        self._workers = workers
        self._metrics = metrics
        self._leads = False

    def wake(self, key: Key, priority: Priority = Priority.NORMAL) -> None:
        """Queue an object because something about it changed."""
        if self._leads:
            self.queue.add(key, priority)

    def lead(self) -> None:
        """Queue all known objects, and from now on those that change."""
        self._leads = True
        self.wake_all()

    def wake_all(self) -> None:
        """Queue all known objects."""
        for key in self._keys():
            self.wake(key)

    async def work(self) -> None:
        """Reconcile until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._workers):
                tasks.create_task(self.queue.work(self._timed))

    async def _timed(self, key: Key) -> float | None:
        loop = asyncio.get_running_loop()
        began, result = loop.time(), "error"
        try:
            with about(self.name, *key):
                delay = await self._reconcile(key)
            result = "done"
            return delay
        finally:
            self._metrics.reconcile_seconds.labels(self.name, result).observe(loop.time() - began)


def count_waiting(controllers: Sequence[Controller], metrics: Metrics) -> None:
    """Export how many objects wait for each of the controllers, and for how long."""
    metrics.live(
        "shoal_queue_length",
        "Objects waiting to be reconciled, by controller.",
        "controller",
        lambda: {each.name: len(each.queue) for each in controllers},
    )
    metrics.live(
        "shoal_queue_oldest_seconds",
        "For how long the object has waited that waits for longest, by controller.",
        "controller",
        lambda: {each.name: each.queue.oldest_seconds() for each in controllers},
    )
