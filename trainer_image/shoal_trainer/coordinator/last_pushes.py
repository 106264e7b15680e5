"""The pushes that may still arrive after the end of training, or of an epoch; evaluations wait for them. Pure.

Otherwise the final evaluation would use other parameters than the export. After an early stop, each worker that held a
lease may push once more. A push may reach the other shards later than shard 0, so the shards are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

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
        self._epoch: Mapping[Worker, int] = {}
        """The last push of each worker to shard 0 when an epoch ended, if other shards may lack them."""
        self._epoch_until = -math.inf

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

    def epoch_ended(self, applied: Mapping[Worker, int], deadline: float) -> None:
        """An epoch ended with these last pushes to shard 0; wait for them in all shards, at most until the deadline."""
        self._epoch, self._epoch_until = ({} if self._shards == 1 else dict(applied)), deadline

    def epoch_compared(self, last: Callable[[Worker], int], present: Collection[Worker]) -> None:
        """The shards were compared. `last`: the last push of a worker that is in all of them."""
        if all(last(worker) >= seq for worker, seq in self._epoch.items() if worker in present):
            self._epoch = {}

    def evaluation_waits(self, now: float) -> bool:
        """Whether a shard may lack pushes of the epoch that is to be evaluated."""
        return bool(self._epoch) and now < self._epoch_until

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
