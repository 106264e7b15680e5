"""The reports of the other shards, for the status: a thread on PS 0 asks each of them every few seconds.

The status is built from the last answers, so a shard that does not answer delays nobody; it is then reported as not
ready.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from shoal_trainer.contract import ShardReport
from shoal_trainer.coordinator.other_shard import OtherShard
from shoal_trainer.errors import TrainerError

log = logging.getLogger(__name__)

ASK_EVERY_SECONDS = 5.0


class ShardReports:
    """Runs on PS 0. `others`: the other shards by index."""

    def __init__(self, others: Mapping[int, OtherShard]) -> None:
        self._others = dict(others)
        self._newest: dict[int, ShardReport] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shard-reports", daemon=True)

    def start(self) -> None:
        """Start the thread, if there are other shards."""
        if self._others:
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stop.set()

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
                    self._newest[index] = last.model_copy(update={"ready": False})

    def _run(self) -> None:
        while not self._stop.wait(ASK_EVERY_SECONDS):
            self.ask()
