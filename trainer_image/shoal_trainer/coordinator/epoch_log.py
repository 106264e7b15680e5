"""Logs each complete epoch once, so that the history of a job can be read from its log, also after its end.

A new process logs those of its snapshot again: the log of the newest pod has them all.
"""

from __future__ import annotations

import logging

from shoal_trainer.contract import EPOCH_LINE
from shoal_trainer.coordinator.report import epochs
from shoal_trainer.coordinator.task_queue import Tasks

log = logging.getLogger(__name__)


class EpochLog:
    """What was logged. `update` costs nothing unless an epoch is due."""

    def __init__(self) -> None:
        self._next = 0

    def update(self, tasks: Tasks) -> None:
        """Log the epochs that have become complete, in order; again those that a rollback took back."""
        known = len(tasks.history)
        self._next = min(self._next, known)
        if known == self._next:
            return
        for report in epochs(tasks, self._next):
            if not report.complete:
                return
            log.info("%s%s", EPOCH_LINE, report.to_json())
            self._next = report.epoch + 1
