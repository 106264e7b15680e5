"""Tells the other shards which workers shard 0 refuses: a thread for each of them on PS 0.

A worker that is silent for too long still has its connections, and may go on. Shard 0 refuses it in the moment in which
its leases are released. No fence or join waits for another shard: each is told at once, all of it, and again until it
answers and when it has restarted. What reaches a shard before is in this one only, and counts as partial.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from shoal_trainer.coordinator.other_shard import OtherShard
from shoal_trainer.errors import TrainerError
from shoal_trainer.ps.workers import Workers

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0


class Fencing:
    """Runs on PS 0. `workers`: those of shard 0; `others`: the other shards by index."""

    def __init__(self, workers: Workers, others: Mapping[int, OtherShard]) -> None:
        self._workers = workers
        self._others = dict(others)
        self._due = {index: threading.Event() for index in others}
        self._stop = threading.Event()

    def start(self) -> None:
        """Start the threads."""
        for index in self._others:
            threading.Thread(target=self._run, args=(index,), name=f"fence-{index}", daemon=True).start()

    def stop(self) -> None:
        """Stop the threads."""
        self._stop.set()
        self.schedule()

    def schedule(self) -> None:
        """Shard 0 refuses another worker, or a shard has restarted: tell all of them."""
        for due in self._due.values():
            due.set()

    def tell(self, index: int) -> bool:
        """Tell one shard, if that is due; returns whether it knows all."""
        due = self._due[index]
        if due.is_set():
            due.clear()  # first: what changes while it is told is told again
            try:
                self._others[index].fence(*self._workers.refused())
            except TrainerError as error:
                log.debug("shard %d does not know yet which workers are fenced: %s", index, error)
                due.set()
        return not due.is_set()

    def _run(self, index: int) -> None:
        while True:
            self._due[index].wait()
            if self._stop.is_set():
                return
            if not self.tell(index):
                self._stop.wait(RETRY_SECONDS)
