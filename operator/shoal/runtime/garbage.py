"""Has full garbage collections wait for a quiet moment.

A full one walks every object: 60 ms of processor time for 500 pods, in which the event loop stands still, and a job
that ramps up brings one each time that the objects have grown by a quarter. A pod that was lost then waits for it. What
is freed by counting references, as nearly everything here is, needs none; young objects are collected as ever.
"""

from __future__ import annotations

import asyncio
import gc
import logging

logger = logging.getLogger(__name__)

NEVER = 1_000_000_000
"""Collections of the middle generation until a full one."""
EVERY_SECONDS = 600.0
QUIET_SECONDS = 5.0
"""A moment is quiet when nothing has changed for so long."""
LATEST_SECONDS = 3600.0
"""Where there is no quiet moment: the cycles that have gathered are taken all the same."""


class Garbage:
    """The collections of this process. `run` is what has them wait."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def postpone(self) -> None:
        """Something changes: this moment is not quiet."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled; then collections are automatic again."""
        before = gc.get_threshold()
        gc.set_threshold(*before[:2], NEVER)
        try:
            while True:
                await asyncio.sleep(EVERY_SECONDS)
                try:
                    async with asyncio.timeout(LATEST_SECONDS - EVERY_SECONDS):
                        await self._quiet()
                except TimeoutError:
                    logger.info("no quiet moment for a garbage collection: it is now")
                gc.collect()
        finally:
            gc.set_threshold(*before)

    async def _quiet(self) -> None:
        while True:
            self._changed.clear()
            try:
                async with asyncio.timeout(QUIET_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                return
            await asyncio.sleep(QUIET_SECONDS)
