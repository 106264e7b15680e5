"""Tells each complete epoch of a run: in a line of the log, and in `logs/history.csv`, as Keras' `CSVLogger` writes it.

A new process logs those of its snapshot again: the log of the newest pod has them all, also after the job's end. A
thread writes the file, because the storage may be slow or unreachable; all of it, as it replaces one of before a
rollback.
"""

from __future__ import annotations

import csv
import io
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from shoal_trainer.background import Background, Wish
from shoal_trainer.contract import EPOCH_LINE, HISTORY, EpochReport
from shoal_trainer.errors import TrainerError
from shoal_trainer.retry import Backoff
from shoal_trainer.snapshot.storage import Storage

log = logging.getLogger(__name__)

NAME = f"logs/{HISTORY}"
REST, LONGEST_REST = 50.0, 10.0
"""After a write it rests for so many times what that took, and at most so many seconds: the file grows with the run."""


class EpochHistory(Background):
    """Keeps both up to date. `confirm` raises if this process was replaced, and the file is then not written."""

    def __init__(
        self,
        storage: Storage,
        confirm: Callable[[], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("history", self._write, pause=0.0)
        self._storage, self._confirm, self._clock = storage, confirm, clock
        self._ends = threading.Event()
        self._epochs: Sequence[Mapping[str, float]] = ()
        """Nothing is written of a process that knows no epoch: the file may be that of the process before it."""
        self._wish, self._backoff = Wish(), Backoff()

    def update(self, epochs: Sequence[Mapping[str, float]]) -> None:
        """The complete epochs: those that were not told like this are, and again those that a rollback took back."""
        before, self._epochs = self._epochs, epochs
        if list(epochs) == list(before):
            return
        self._wish.make()
        self.wake()
        for epoch, metrics in enumerate(epochs):
            if epoch >= len(before) or metrics != before[epoch]:
                report = EpochReport(epoch=epoch, metrics=dict(metrics), complete=True)
                log.info("%s%s", EPOCH_LINE, report.to_json())

    def close(self, seconds: float) -> None:
        """Write what is left, and wait for it so long at most."""
        self._ends.set()
        self._wish.wait(seconds)
        self.stop()

    def _write(self) -> float | None:
        if not self._wish.open:
            return None
        number, began = self._wish.number, self._clock()
        try:
            self._storage.write(NAME, [as_csv(self._epochs).encode()], self._confirm)
        except (TrainerError, OSError) as error:
            if self._backoff.is_new(error):
                log.warning("cannot write %s: %s", NAME, error)
            self._backoff.wait(self.stopped)
            return 0.0
        self._backoff.reset()
        self._wish.fulfil(number)
        self._ends.wait(min(LONGEST_REST, REST * (self._clock() - began)))
        return None


def as_csv(epochs: Sequence[Mapping[str, float]]) -> str:
    """A line per epoch, counted from 0, with the names of metrics in order; empty where an epoch lacks one."""
    names = sorted({name for logs in epochs for name in logs})
    text = io.StringIO()
    writer = csv.DictWriter(text, ["epoch", *names], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"epoch": number, **logs} for number, logs in enumerate(epochs))
    return text.getvalue()
