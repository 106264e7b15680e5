"""The parameters of the best epoch, for `EarlyStopping(restore_best_weights=True)`.

Keras keeps them in the process that trains. Here any worker may run the callbacks of an epoch, and it may be lost
afterwards. So they are a file in the run's `logs/`, which the worker that exports the model gets from the coordinator.
"""

from __future__ import annotations

import logging
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

NAME = "best_weights.npz"
"""In `logs/`. Written by each epoch that is better than all before it."""


@dataclass(frozen=True)
class Best:
    """`parameters`: the flat vector that the servers hold. `value`: of the metric `monitor` of EarlyStopping.

    `recorded`: a metric of the epoch as the job's history has it, which may not know what a callback computes.
    """

    parameters: npt.NDArray[np.float32]
    epoch: int
    value: float
    monitor: str = "monitored metric"
    recorded: tuple[str, float] | None = None

    def is_of(self, history: Sequence[Mapping[str, float]]) -> bool:
        """Whether its epoch is in the history, and no rollback has undone it: another one has another value."""
        if self.epoch >= len(history):
            return False
        name, value = self.recorded or (self.monitor, self.value)
        return math.isclose(history[self.epoch].get(name, value), value, rel_tol=1e-6)


def save(folder: Path, best: Best) -> None:
    """Write the file, which replaces that of an earlier epoch."""
    name, value = best.recorded or (best.monitor, best.value)
    np.savez(
        folder / NAME,
        parameters=best.parameters,
        epoch=best.epoch,
        value=best.value,
        monitor=np.asarray(best.monitor),
        name=np.asarray(name),
        recorded=value,
    )


def load(path: Path) -> Best | None:
    """The inverse of `save`; None if the file is damaged, which is logged."""
    try:
        with path.open("rb") as file, np.load(file) as saved:  # `np.load` would leave a damaged file open
            monitor = str(saved["monitor"]) if "monitor" in saved else Best.monitor
            recorded = (str(saved["name"]), float(saved["recorded"])) if "recorded" in saved else None
            return Best(saved["parameters"], int(saved["epoch"]), float(saved["value"]), monitor, recorded)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        log.warning("logs/%s cannot be read: %r", NAME, error)
        return None
