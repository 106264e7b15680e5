"""How long a worker waits for the servers' answers: as long as they take, but only a little once it is to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from shoal_trainer.errors import Unreachable
from shoal_trainer.ps.client import PSClient
from shoal_trainer.worker.exchange import Exchange

LEAVE_SECONDS = 10.0
"""How long a worker that stops waits for answers: to its last pushes, then to its word that it leaves.

A pod has 20 s of grace. Without that word its leases are given to others once it is silent for some seconds.
"""
GOODBYE_SECONDS = 2.0
"""How long it waits at least for the answer to that word."""
T = TypeVar("T")


class Answers:
    """Those of one worker, which is to stop once `drain` is set."""

    def __init__(self, exchange: Exchange, drain: threading.Event, clock: Callable[[], float]) -> None:
        self._exchange, self._drain, self._clock = exchange, drain, clock
        self._leave_by: float | None = None
        """Until when answers are waited for, once `drain` is set."""

    def ask(self, call: Callable[[PSClient], T]) -> T:
        """Make a call of the client, and wait for its answer."""
        return self.of(self._exchange.submit(call))

    def of(self, future: Future[T]) -> T:
        """An answer of the servers. They may take any time for it; once `drain` is set this worker has little."""
        if not future.done() and (answer := self.wait(future)) is not None:
            return answer
        return self.last(future) if self._drain.is_set() else future.result()

    def wait(self, future: Future[T], turns: int | None = None) -> T | None:
        """The future's result; None if `drain` is set, or after this many turns of 0.1 s."""
        while not self._drain.is_set() and turns != 0:
            try:
                return future.result(timeout=0.1)
            except FutureTimeout:
                turns = None if turns is None else turns - 1
        return None

    def last(self, future: Future[T]) -> T:
        """An answer to a worker that stops; `Unreachable` if there is none within `LEAVE_SECONDS` of all together."""
        try:
            return future.result(timeout=max(0.0, self._left()))
        except FutureTimeout:
            raise Unreachable("no answer, and this worker is to end") from None

    def left(self) -> float:
        """How many seconds are left for the word that this worker leaves."""
        return max(GOODBYE_SECONDS, self._left())

    def _left(self) -> float:
        """Of `LEAVE_SECONDS`, which begin with the first question: when the worker is told to stop."""
        now = self._clock()
        if self._leave_by is None:
            self._leave_by = now + LEAVE_SECONDS
        return self._leave_by - now
