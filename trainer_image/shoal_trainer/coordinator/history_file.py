"""`logs/history.csv` of every run: the metrics of each complete epoch, as Keras' `CSVLogger` writes them.

A thread of its own writes it, because the storage may be slow or unreachable. The whole file is written each time: it
replaces one of before a rollback.
"""

from __future__ import annotations

import csv
import io
import logging
import threading
from collections.abc import Callable, Mapping, Sequence

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
        self._changed, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def update(self, epochs: Sequence[Mapping[str, float]]) -> None:
        """Write the complete epochs, if there are others than before."""
        if epochs != self._epochs:
            self._epochs = epochs
            self._changed.set()

    def close(self, seconds: float) -> None:
        """Write what is left, and wait for it so long at most."""
        self._stop.set()
        self._changed.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        backoff = Backoff()
        # None is written yet, whatever an update that was ahead of this thread has left.
        written: Sequence[Mapping[str, float]] = ()
        while not self._stop.is_set() or written != self._epochs:
            self._changed.wait()
            self._changed.clear()
            epochs = self._epochs
            if epochs == written:
                continue
            try:
                self._storage.write(NAME, [as_csv(epochs).encode()], self._confirm)
            except (TrainerError, OSError) as error:
                if backoff.is_new(error):
                    log.warning("cannot write %s: %s", NAME, error)
                if self._stop.is_set():
                    return
                backoff.wait(self._stop)
                self._changed.set()
            else:
                written = epochs
                backoff.reset()


def as_csv(epochs: Sequence[Mapping[str, float]]) -> str:
    """A line per epoch, counted from 0, with the names of metrics in order; empty where an epoch lacks one."""
    names = sorted({name for logs in epochs for name in logs})
    text = io.StringIO()
    writer = csv.DictWriter(text, ["epoch", *names], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"epoch": number, **logs} for number, logs in enumerate(epochs))
    return text.getvalue()
