"""The reports of the other shards, for the status: a thread on PS 0 asks each of them every few seconds.

The status is built from the last answers, so a shard that does not answer delays nobody; it is then reported as not
ready.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from shoal_trainer.background import Background
from shoal_trainer.contract import ShardReport
from shoal_trainer.coordinator.control_client import ShardControl
from shoal_trainer.errors import TrainerError

log = logging.getLogger(__name__)

ASK_EVERY_SECONDS = 5.0


class ShardReports:
    """Runs on PS 0. `others`: the other shards by index."""

    def __init__(self, others: Mapping[int, ShardControl]) -> None:
        self._others = dict(others)
        self._newest: dict[int, ShardReport] = {}
        self._background = Background("shard-reports", self._ask_again, pause=ASK_EVERY_SECONDS)

    def start(self) -> None:
        """Start the thread, if there are other shards."""
        if self._others:
            self._background.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._background.stop()

    def newest(self) -> list[ShardReport]:
        """The last report of each other shard that has answered, in order."""
        return [report for _, report in sorted(self._newest.items())]

    def ask(self) -> None:
        """Ask every other shard once."""
        for index, other in self._others.items():
            try:
                self._newest[index] = other.report()
            except TrainerError as error:
                log.debug("shard %d does not report: %s", index, error)
                if (last := self._newest.get(index)) is not None:
                    silent = {"ready": False, "snapshot_idle_seconds": 0.0}
                    self._newest[index] = last.model_copy(update=silent)

    def _ask_again(self) -> float:
        self.ask()
        return ASK_EVERY_SECONDS
