"""The thread that exchanges updates and parameters with the parameter servers while the next step computes.

At most one request is in flight. Only `connect` retries; other requests pass `Unreachable` on to the loop.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy.typing as npt

from shoal_trainer.errors import Unreachable
from shoal_trainer.ps.client import PSClient
from shoal_trainer.ps.recovery import JITTER, LONGEST_PAUSE, SHORTEST_PAUSE, longest_pause
from shoal_trainer.retry import Backoff
from shoal_trainer.wire.messages import Copy, ModelSpec, Pulled, Push, Welcome

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Again:
    """A pull `after` so many seconds, just before the parameters are needed, and not only when the push is applied.

    `hurry` is set once they are needed. `answered`: the push is answered with parameters, too, for a step that ends
    early; then only a `cheap` pull is still made.
    """

    after: float
    hurry: threading.Event
    cheap: bool
    answered: bool


class Exchange:
    """One `PSClient` used from one thread. `waits` is told why a connection has to wait; "": it does no more."""

    def __init__(
        self,
        client: PSClient,
        model: ModelSpec,
        *,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        waits: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self._client = client
        self._waits = waits
        self._model = model
        self._random = rng or random.Random()
        self._clock = clock
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        self._stop = threading.Event()

    def submit(self, call: Callable[[PSClient], T]) -> Future[T]:
        """Make a call of the client in the thread, after those before it."""
        return self._pool.submit(call, self._client)

    def push_pull(
        self, update: npt.NDArray[Any], out: npt.NDArray[Any], push: Push, again: Again | None = None
    ) -> Future[Pulled]:
        """`PSClient.push_pull`; `again`: then pull newer parameters, with what others have pushed meanwhile."""
        if again is None:
            return self.submit(lambda client: client.push_pull(update, out, push))
        return self._pool.submit(self._push_pull_again, update, out, push, again)

    def connect(self, copy: Copy) -> Future[Welcome]:
        """Connect, and offer `copy`, until every shard answers and is ready; `Unreachable` only after `close`.

        The pauses double, up to a limit that grows with the number of workers.
        """
        return self._pool.submit(self._connect, copy)

    def end(self) -> None:
        """No call follows the one that is under way, which needs no newer parameters than it has."""
        self._stop.set()

    def close(self) -> None:
        """Stop the thread and close the connections."""
        self._stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _push_pull_again(
        self, update: npt.NDArray[Any], out: npt.NDArray[Any], push: Push, again: Again
    ) -> Pulled:
        started = self._clock()
        client = self._client
        answer = client.push_pull(update, out, push) if again.answered else client.push(update, push)
        early = again.hurry.wait(max(0.0, again.after - (self._clock() - started)))
        if (again.answered and early and not again.cheap) or self._stop.is_set():
            return answer
        newer = client.pull(out, ahead=push.ahead, known=push.base_versions)
        sent, waited = answer.push_seconds, answer.wait_seconds
        return replace(newer, push_seconds=sent, wait_seconds=waited, made=answer.versions[0])

    def _connect(self, copy: Copy) -> Welcome:
        longest = LONGEST_PAUSE if copy.pulled is None else longest_pause(copy.pulled.live_workers)
        backoff = Backoff(SHORTEST_PAUSE, longest, jitter=JITTER, rng=self._random)
        while not self._stop.is_set():
            try:
                welcome = self._client.hello(self._model, copy)
                self._waits("")
                if welcome.ready and not self._stop.is_set():
                    return welcome
            except Unreachable as error:
                self._waits(f"waits for the parameter servers: {error}")
                if backoff.is_new(error):
                    log.warning("waiting for the parameter servers: %s", error)
            backoff.wait(self._stop)
        self._client.close()  # what was opened since `close`
        raise Unreachable("the worker is ending")
