"""The thread that talks to the parameter servers while the next step computes.

At most one request is under way. `Unreachable` is an answer like any other here; what to do about it is the loop's.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy.typing as npt

from shoal_trainer.errors import Unreachable
from shoal_trainer.ps.client import PSClient
from shoal_trainer.ps.recovery import JITTER, LONGEST_PAUSE, SHORTEST_PAUSE, longest_pause
from shoal_trainer.wire.messages import Copy, ModelSpec, Pulled, Push, Welcome

log = logging.getLogger(__name__)


class Exchange:
    """One `PSClient` used from one thread."""

    def __init__(self, client: PSClient, model: ModelSpec, *, rng: random.Random | None = None) -> None:
        self._client = client
        self._model = model
        self._random = rng or random.Random()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        self._stop = threading.Event()
        self.bytes_moved = 0

    def push_pull(self, update: npt.NDArray[Any], out: npt.NDArray[Any], push: Push) -> Future[Pulled]:
        """Push a gradient (or a worker-side optimizer's difference) and fill `out` with the parameters after it."""
        return self._pool.submit(self._client.push_pull, update, out, push)

    def push_delta(
        self, delta: npt.NDArray[Any], out: npt.NDArray[Any], push: Push, *, scale: float, merge: bool
    ) -> Future[Pulled]:
        """Push the difference of an outage's local steps."""
        return self._pool.submit(self._client.push_delta, delta, out, push, scale=scale, merge=merge)

    def pull(self, out: npt.NDArray[Any], *, idle: bool = False, exact: bool = False) -> Future[Pulled]:
        """Fill `out` with the parameters. `idle`: no gradient follows; `exact`: in fp32, for evaluation and export."""
        return self._pool.submit(self._client.pull, out, idle=idle, exact=exact)

    def probe(self) -> Future[Welcome]:
        """The state of the shards, without parameters."""
        return self._pool.submit(self._client.probe, self._model)

    def initialize(self, flat: npt.NDArray[Any]) -> Future[None]:
        """Give the servers their first values, unless another worker was first."""
        return self._pool.submit(self._client.initialize, flat)

    def connect(self, copy: Callable[[], Copy | None]) -> Future[Welcome]:
        """Say hello until every shard answers and is ready; `Unreachable` only after `close`.

        The pauses double, up to a bound that grows with the number of workers.
        """
        return self._pool.submit(self._connect, copy)

    def close(self) -> None:
        """End the thread and the connections."""
        self._stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _connect(self, copy: Callable[[], Copy | None]) -> Welcome:
        warned, pause = "", SHORTEST_PAUSE
        while not self._stop.is_set():
            offered = copy()
            try:
                welcome = self._client.hello(self._model, offered)
                if welcome.alike and not any(shard.recovering for shard in welcome.shards):
                    return welcome
            except Unreachable as error:
                if str(error) != warned:
                    log.warning("waiting for the parameter servers: %s", error)
                warned = str(error)
            self._stop.wait(pause * self._random.uniform(1 - JITTER, 1 + JITTER))
            longest = LONGEST_PAUSE if offered is None else longest_pause(offered.pulled.live_workers)
            pause = min(2 * pause, longest)
        raise Unreachable("the worker is ending")
