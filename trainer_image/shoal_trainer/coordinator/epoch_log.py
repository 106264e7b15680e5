"""Logs each complete epoch once, so that the history of a job can be read from its log, also after its end.

A new process logs those of its snapshot again: the log of the newest pod has them all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from shoal_trainer.contract import EPOCH_LINE, EpochReport

log = logging.getLogger(__name__)


class EpochLog:
    """What was logged."""

    def __init__(self) -> None:
        self._logged: Sequence[Mapping[str, float]] = ()

    def update(self, epochs: Sequence[Mapping[str, float]]) -> None:
        """Log those of the complete epochs that were not logged like this; again those that a rollback took back."""
        before, self._logged = self._logged, epochs
        if epochs == before:
            return
        for epoch, metrics in enumerate(epochs):
            if epoch >= len(before) or metrics != before[epoch]:
                report = EpochReport(epoch=epoch, metrics=dict(metrics), complete=True)
                log.info("%s%s", EPOCH_LINE, report.to_json())
