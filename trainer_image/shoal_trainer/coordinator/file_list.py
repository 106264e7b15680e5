"""Asks one worker at a time for a long list of files: it takes megabytes of memory, and the others' is the same."""

from __future__ import annotations

from collections.abc import Callable

from shoal_trainer.coordinator.protocol import Joined
from shoal_trainer.errors import Unreachable
from shoal_trainer.ps.contents import Worker

LIST_SECONDS = 10.0
"""How long a worker that was asked has to send its list, until another one is asked."""


class FileList:
    """Who is to send it. Used under the coordinator's lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked: tuple[Worker, float] | None = None

    def ask(self, worker: Worker) -> Joined:
        """Ask this worker. `Unreachable` while another one has time to send its list."""
        now = self._clock()
        if self._asked is not None and self._asked[0] != worker and now < self._asked[1] + LIST_SECONDS:
            raise Unreachable("another worker is sending the list of files")
        self._asked = worker, now
        return Joined(wants_files=True)

    def joins(self, worker: Worker) -> None:
        """A worker joins, with its list if it was asked for it."""
        if self._asked is not None and self._asked[0] == worker:
            self._asked = None
