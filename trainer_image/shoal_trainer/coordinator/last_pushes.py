"""The pushes that may still arrive after the end of training; the final tasks wait for them. Pure.

Otherwise the final evaluation would use other parameters than the export. After an early stop, each worker that held a
lease may push once more. A push may reach the other shards later than shard 0, so the shards are compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from shoal_trainer.ps.contents import Worker

RESEND_SECONDS = 3.0


class LastPushes:
    """Waits for pushes to `shards` shards, but for none longer than until its deadline."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._deadlines: dict[Worker, float] = {}
        """Of the workers that may push to shard 0."""
        self._compare_until = -math.inf
        self._compared = shards == 1

    def expect(self, worker: Worker, deadline: float) -> None:
        """This worker may push."""
        self._deadlines[worker] = deadline

    def informed(self, worker: Worker, now: float) -> None:
        """This worker knows of the end of training: it pushes only what an outage interrupted."""
        if worker in self._deadlines:
            self._deadlines[worker] = min(now + RESEND_SECONDS, self._deadlines[worker])

    def arrived(self, worker: Worker, deadline: float) -> None:
        """A push of this worker arrived at shard 0, and should reach the other shards until the deadline."""
        self._deadlines.pop(worker, None)
        self.compare_until(deadline)

    def compare_until(self, deadline: float) -> None:
        """The shards may differ: wait for a comparison, at most until the deadline."""
        self._compare_until = max(self._compare_until, deadline)
        self._compared = self._shards == 1

    def compared(self, *, in_flight: bool) -> None:
        """The shards were compared, and shard 0 has received nothing since."""
        self._compared = not in_flight

    def drop(self, worker: Worker) -> None:
        """This worker pushes no more."""
        self._deadlines.pop(worker, None)

    def clear(self) -> None:
        """Training continues."""
        self._deadlines.clear()

    def workers(self, now: float) -> Collection[Worker]:
        """The workers whose push to shard 0 is awaited."""
        self._deadlines = {worker: until for worker, until in self._deadlines.items() if now < until}
        return self._deadlines.keys()

    def comparison_due(self, now: float) -> bool:
        """Whether the shards must be compared first."""
        return not self._compared and now < self._compare_until
