"""Has full garbage collections come seldom, and mostly in quiet moments.

A full one walks every object: 60 ms of processor time for 500 pods, in which the event loop stands still, and a job
that ramps up brings one each time that the objects have grown by a quarter. A pod that was lost then waits for it. What
is freed by counting references, as nearly everything here is, needs none; young objects are collected as ever.
"""

from __future__ import annotations

import asyncio
import gc

MOST = 100
"""Collections of the middle generation until a full one that waits for no quiet moment; Python's own choice is 10.

In each at most 7,000 objects have become old, of which some are garbage: what such cycles hold has a bound."""
EVERY_SECONDS = 600.0
QUIET_SECONDS = 5.0
"""A moment is quiet when nothing has changed for so long."""


class Garbage:
    """The collections of this process. `run` is what has them come seldom."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def postpone(self) -> None:
        """Something changes: this moment is not quiet."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled; then collections are as Python has them."""
        before = gc.get_threshold()
        gc.set_threshold(*before[:2], MOST)
        try:
            while True:
                await asyncio.sleep(EVERY_SECONDS)
                await self._quiet()
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
