"""Runs controllers: reflectors keep the caches, and the holder of the Lease reconciles.

Crash-only: all state is in the cluster. A standby keeps its caches warm, but a watch may be behind, and the watches of
several resources are behind by different amounts: a new leader that acts on them counts pods as lost that it has not
read yet. So after the Lease was acquired everything is listed again, and nothing is decided before. Optional resources
(another project serves some of them) may delay that, and not prevent it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from shoal.cluster.lease import Lease
from shoal.cluster.reflector import Reflector
from shoal.runtime.controller import Controller
from shoal.runtime.metrics import Metrics
from shoal.runtime.recorder import Recorder

logger = logging.getLogger(__name__)

LAG_SECONDS = 1.0
"""Interval at which the lag of the event loop is sampled, and the Lease hears that it runs."""
FIRST_TRY_SECONDS = 0.5
"""How long the caches of a process that starts wait for its first try to get the Lease."""
OPTIONAL_SECONDS = 10.0
"""How long a new leader waits for the lists of optional resources."""
REFUSED_SECONDS = 1.0
"""Between the tries of a new leader that may not list what it needs."""
SILENT_SECONDS = 180.0
"""Of a resource that is needed, after which a replica is not ready. A watch has a bookmark each minute, a dead one is
opened again after 75 s, and what fails is tried again within 30 s."""
DRAIN_SECONDS = 0.3
"""How long a process that stops posts its last events. Nobody leads meanwhile."""


class Manager:
    """One replica.

    `needed`: reflectors without which nothing can be decided; `optional`: as far as RBAC allows. `background`: what
    runs beside the controllers while this process leads.
    """

    def __init__(
        self,
        lease: Lease,
        controllers: Sequence[Controller],
        *,
        needed: Mapping[str, Reflector[Any]],
        optional: Mapping[str, Reflector[Any]],
        recorder: Recorder,
        metrics: Metrics,
        background: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
        on_lead: Callable[[], None] = lambda: None,
    ) -> None:
        self.lease = lease
        self._controllers = controllers
        self._needed = needed
        self._optional = optional
        self._recorder = recorder
        self._metrics = metrics
        self._background = background
        self._on_lead = on_lead

    def unread(self) -> list[str]:
        """The resources that are needed and cannot be listed, or not yet: permissions or the CRD are missing.

        Also those of which nothing is heard any more: a leader that does not reach the API server ends, and of a
        standby nobody would see it.
        """
        return [
            name
            for name, each in self._needed.items()
            if not each.readable or each.silent_seconds > SILENT_SECONDS
        ]

    async def run(self) -> None:
        """Run until cancelled.

        Raises:
            ExceptionGroup: with `LeaseLost`, `StoreWentBack` or an unexpected error. What objects and answers say
                ends nothing: whoever reads them goes on.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                acquiring = tasks.create_task(self.lease.acquire())
                # What is listed behind the Lease need not be listed again: a leader that is restarted has it at once.
                await asyncio.wait({acquiring}, timeout=FIRST_TRY_SECONDS)
                for each in (*self._needed.values(), *self._optional.values()):
                    tasks.create_task(each.run())
                tasks.create_task(self._sample_lag())
                await acquiring
                before = {each: each.begun for each in (*self._needed.values(), *self._optional.values())}
                tasks.create_task(self.lease.keep())
                await self._read_behind(before, tasks)
                tasks.create_task(self._recorder.run())
                for run in self._background:
                    tasks.create_task(run())
                self._on_lead()
                self._metrics.leading.set(1)
                for controller in self._controllers:
                    controller.lead()
                    tasks.create_task(controller.work())
        finally:
            self._metrics.leading.set(0)
            await self._stop()

    async def _read_behind(self, before: Mapping[Reflector[Any], int], tasks: asyncio.TaskGroup) -> None:
        """Wait for a list of everything that began behind the Lease; `before`: how many lists of each began earlier.

        When an optional resource is late, all is looked at again then.
        """

        async def read(each: Reflector[Any]) -> None:
            begun: int | None = before[each]
            while not await each.refresh(begun):
                begun = None
                await asyncio.sleep(REFUSED_SECONDS)

        optional = {
            name: tasks.create_task(each.refresh(before[each])) for name, each in self._optional.items()
        }
        async with asyncio.TaskGroup() as lists:
            for each in self._needed.values():
                lists.create_task(read(each))
            if optional:
                lists.create_task(asyncio.wait(optional.values(), timeout=OPTIONAL_SECONDS))
        for name, reading in optional.items():
            if not reading.done():
                logger.error("leading without %s, which cannot be listed", name)
                reading.add_done_callback(self._look_again)

    def _look_again(self, _read: asyncio.Task[bool]) -> None:
        for controller in self._controllers:
            controller.wake_all()

    async def _stop(self) -> None:
        if self.lease.held:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    await self._recorder.drain()
        await self.lease.release()

    async def _sample_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self.lease.beat()
            self._metrics.loop_lag.observe(max(0.0, loop.time() - due))
