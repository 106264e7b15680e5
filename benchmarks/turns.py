"""Systems that take turns on the same cores, so that a change of the host's speed affects all of them alike.

Each runs for a moment while the processes of the others are stopped. A step that is interrupted continues later.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

SETTLE_SECONDS = 0.5
"""Of each turn, not measured: messages that were due meanwhile, cold caches."""


class System(NamedTuple):
    """The processes of one system, and the number of steps that they have taken together."""

    pids: Sequence[int]
    steps: Callable[[], int]

    def stop(self) -> None:
        """Stop all processes where they are."""
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them continue."""
        for pid in self.pids:
            os.kill(pid, signal.SIGCONT)

    def rate(self, seconds: float) -> float:
        """Steps/s over about `seconds`."""
        before, start = self._now()
        time.sleep(seconds)
        after, end = self._now()
        return (after - before) / (end - start)

    def _now(self) -> tuple[int, float]:
        """The steps, and the middle of the time that it took to ask for them."""
        asked, steps = time.monotonic(), self.steps()
        return steps, (asked + time.monotonic()) / 2


def rates(systems: Mapping[str, System], turns: int, seconds: float) -> dict[str, float]:
    """Steps/s of each system: the mean of its `turns` turns of `seconds`. All are stopped at first."""
    found = dict.fromkeys(systems, 0.0)
    for _ in range(turns):
        for name, system in systems.items():
            system.resume()
            time.sleep(SETTLE_SECONDS)
            found[name] += system.rate(seconds) / turns
            system.stop()
    return found
