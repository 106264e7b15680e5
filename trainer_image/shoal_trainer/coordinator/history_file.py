"""`logs/history.csv` of every run: the metrics of each complete epoch, as Keras' `CSVLogger` writes them.

A thread of its own writes it, because the storage may be slow or unreachable. The whole file is written each time: it
replaces one of before a rollback.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable, Mapping, Sequence

from shoal_trainer.background import Background, Wish
from shoal_trainer.errors import TrainerError
from shoal_trainer.retry import Backoff
from shoal_trainer.snapshot.storage import Storage

log = logging.getLogger(__name__)

NAME = "logs/history.csv"


class HistoryFile:
    """Keeps the file up to date. `confirm` raises if this process was replaced, and the file is then not written."""

    def __init__(self, storage: Storage, confirm: Callable[[], object]) -> None:
        self._storage, self._confirm = storage, confirm
        self._epochs: Sequence[Mapping[str, float]] = ()
        """Nothing is written of a process that knows no epoch: the file may be that of the process before it."""
        self._wish, self._backoff = Wish(), Backoff()
        self._background = Background("history", self._write, pause=0.0)

    def start(self) -> None:
        """Start the thread."""
        self._background.start()

    def update(self, epochs: Sequence[Mapping[str, float]]) -> None:
        """Write the complete epochs, if there are others than before."""
        if list(epochs) != list(self._epochs):
            self._epochs = epochs
            self._wish.make()
            self._background.wake()

    def close(self, seconds: float) -> None:
        """Write what is left, and wait for it so long at most."""
        self._wish.wait(seconds)
        self._background.stop()

    def _write(self) -> float | None:
        if not self._wish.open:
            return None
        number = self._wish.number
        try:
            self._storage.write(NAME, [as_csv(self._epochs).encode()], self._confirm)
        except (TrainerError, OSError) as error:
            if self._backoff.is_new(error):
                log.warning("cannot write %s: %s", NAME, error)
            self._backoff.wait(self._background.stopped)
            return 0.0
        self._backoff.reset()
        self._wish.fulfil(number)
        return None


def as_csv(epochs: Sequence[Mapping[str, float]]) -> str:
    """A line per epoch, counted from 0, with the names of metrics in order; empty where an epoch lacks one."""
    names = sorted({name for logs in epochs for name in logs})
    text = io.StringIO()
    writer = csv.DictWriter(text, ["epoch", *names], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"epoch": number, **logs} for number, logs in enumerate(epochs))
    return text.getvalue()
