"""Tells the other shards which workers shard 0 refuses: a thread for each of them on PS 0.

A worker that is silent for too long still has its connections, and may go on. Shard 0 refuses it in the moment in which
its leases are released. No fence or join waits for another shard: each is told at once, all of it, and again until it
answers and when it has restarted. What reaches a shard before is in this one only, and counts as partial.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from functools import partial

from shoal_trainer.background import RETRY_SECONDS, Background
from shoal_trainer.coordinator.control_client import ShardControl
from shoal_trainer.errors import TrainerError
from shoal_trainer.ps.workers import Workers

log = logging.getLogger(__name__)


class Fencing:
    """Runs on PS 0. `workers`: those of shard 0; `others`: the other shards by index."""

    def __init__(self, workers: Workers, others: Mapping[int, ShardControl]) -> None:
        self._workers = workers
        self._others = dict(others)
        self._due = {index: threading.Event() for index in others}
        self._threads = {index: Background(f"fence-{index}", partial(self._tell, index)) for index in others}

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads.values():
            thread.start()

    def stop(self) -> None:
        """Stop the threads."""
        for thread in self._threads.values():
            thread.stop()

    def schedule(self) -> None:
        """Shard 0 refuses another worker, or a shard has restarted: tell all of them."""
        for index, due in self._due.items():
            due.set()
            self._threads[index].wake()

    def tell(self, index: int) -> bool:
        """Tell one shard, if that is due; returns whether it knows all."""
        due = self._due[index]
        if due.is_set():
            due.clear()  # first: what changes while it is told is told again
            try:
                self._others[index].fence(*self._workers.refused())
            except Exception as error:
                due.set()
                if not isinstance(error, TrainerError):
                    raise
                log.debug("shard %d does not know yet which workers are fenced: %s", index, error)
        return not due.is_set()

    def _tell(self, index: int) -> float | None:
        if self.tell(index):
            return None
        self._threads[index].stopped.wait(RETRY_SECONDS)
        return 0.0
