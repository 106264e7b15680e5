"""Brings another shard to where shard 0 is: a thread for each of them on PS 0.

What shard 0 decides holds for all shards: which workers it refuses, and to which generation the job has returned. Each
other shard is told all of it every few seconds, at once when something has changed, and reports for the status in
return, so that its restarts are noticed. One of a later generation has loaded what shard 0 could not: then shard 0 has
the whole job begin a still later one. Nothing waits for a shard that is dead. What reaches a shard before it is told
is in this one only, and counts as partial.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from shoal_trainer.background import Background
from shoal_trainer.contract import ShardReport
from shoal_trainer.coordinator.control_client import ShardControl
from shoal_trainer.errors import TrainerError
from shoal_trainer.ps.shard import ShardStore, State

log = logging.getLogger(__name__)

TELL_EVERY_SECONDS = 2.0


class OtherShard(Background):
    """Shard `index`, reached by `control`; `shard`: shard 0. Wake it when something has changed.

    `restarted` is called when another process of it is READY than before, `overtaken` with its generation if that is
    later than shard 0's, which is READY.
    """

    def __init__(
        self,
        shard: ShardStore,
        index: int,
        control: ShardControl,
        restarted: Callable[[], None] = lambda: None,
        overtaken: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__(f"shard-{index}", self.tell, pause=0.0)
        self._shard, self._index, self._control = shard, index, control
        self._restarted, self._overtaken = restarted, overtaken
        self.report: ShardReport | None = None
        """Its last one; not ready if it has not answered since. None before the first."""
        self._boot: int | None = None
        """The process of it that was READY last."""
        self._returned = (0, 0)
        """Which process of it has returned to which generation."""
        self._logged = ""

    def tell(self) -> float:
        """Tell it all; returns the seconds until the next time. Raises the errors of `ShardControl`."""
        try:
            self._control.fence(self._shard.epoch, *self._shard.workers.refused())
            self.report = self._control.report()
        except TrainerError:
            if self.report is not None:
                silent = {"ready": False, "snapshot_idle_seconds": 0.0}
                self.report = self.report.model_copy(update=silent)
            raise
        if self.report.ready and self.report.boot != self._boot:
            if self._boot is not None:
                log.warning("shard %d has restarted, at epoch %d", self._index, self.report.epoch)
                self._restarted()
            self._boot = self.report.boot
        if self.report.generation > self._shard.history.generation and self._shard.state is State.READY:
            self._roll_back(0, self._overtaken, self.report.generation)
        generation = self._shard.history.generation
        if generation and self._returned != (self.report.boot, generation):
            self._roll_back(self._index, self._control.roll_back, generation)
            self._returned = self.report.boot, generation
        return TELL_EVERY_SECONDS

    def _roll_back(self, index: int, roll_back: Callable[[int], None], generation: int) -> None:
        try:
            roll_back(generation)
        except TrainerError as error:
            if str(error) != self._logged:
                log.warning("shard %d has not rolled back yet: %s", index, error)
            self._logged = str(error)
            raise
