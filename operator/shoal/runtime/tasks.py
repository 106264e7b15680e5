"""Tasks that nobody waits for, by their owner. They end with the owner, or with the process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Hashable
from typing import Any

logger = logging.getLogger(__name__)


class Tasks:
    """The tasks of a process that leads. `run` is where they end."""

    def __init__(self) -> None:
        self._of: dict[Hashable, set[asyncio.Task[None]]] = {}

    def start(self, owner: Hashable, work: Coroutine[Any, Any, None]) -> None:
        """Do this beside everything else. An error ends nothing but the task itself."""
        task = asyncio.create_task(work)
        self._of.setdefault(owner, set()).add(task)
        task.add_done_callback(lambda done: self._ended(owner, done))

    def forget(self, owner: Hashable) -> None:
        """Cancel the tasks of an owner that is gone."""
        for task in self._of.get(owner, ()):
            task.cancel()

    async def run(self) -> None:
        """Until cancelled; then all tasks are cancelled, too, and have ended."""
        try:
            await asyncio.Event().wait()
        finally:
            for owner in list(self._of):
                self.forget(owner)
            await self.idle()

    async def idle(self) -> None:
        """Until no task is left."""
        while left := [task for tasks in self._of.values() for task in tasks]:
            await asyncio.wait(left)

    def _ended(self, owner: Hashable, task: asyncio.Task[None]) -> None:
        tasks = self._of[owner]
        tasks.discard(task)
        if not tasks:
            del self._of[owner]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: %r", owner, error, exc_info=error)
