"""Has full garbage collections come in quiet moments, and in others seldom.

A full one walks every object: 60 ms of processor time for 500 pods, in which the event loop stands still, and a job
that ramps up brings one each time that the objects have grown by a quarter. A pod that was lost then waits for it. What
is freed by counting references, as nearly everything here is, needs none; young objects are collected as ever. What is
left of a ramp in cycles, of closed connections above all, is taken soon after it.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

MOST = 100
"""Collections of the middle generation until a full one that waits for no quiet moment. In one, 10 are enough, which is
Python's own choice.

In each at most 7,000 objects have become old, of which some are garbage: what such cycles hold has a bound."""
EVERY_SECONDS = 60.0
"""Between full ones in quiet moments."""
QUIET_SECONDS = 5.0
"""A moment is quiet when nothing has changed for so long."""


class Garbage:
    """The collections of this process. `run` is what has them come seldom; `collected` is called after a full one."""

    def __init__(self, collected: Callable[[], None] = lambda: None) -> None:
        self._collected = collected
        self._changed = asyncio.Event()

    def postpone(self) -> None:
        """Something changes: this moment is not quiet."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled; then collections are as Python has them."""
        before = gc.get_threshold()
        gc.set_threshold(*before[:2], MOST)
        known = _full_ones()
        try:
            while True:
                await self._quiet()
                if gc.get_count()[2] >= before[2]:
                    gc.collect()
                elif _full_ones() == known:
                    await asyncio.sleep(QUIET_SECONDS)
                    continue
                self._collected()  # also after one that came late in a ramp: what it freed is not given back yet
                known = _full_ones()
                await asyncio.sleep(EVERY_SECONDS)
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


def _full_ones() -> int:
    """How many full collections there were."""
    return int(gc.get_stats()[2]["collections"])
