"""One bound for all requests of the process to the API server.

The API server sheds load with 429 and a Retry-After. A process that goes on meanwhile with all its other requests is
what it has to shed next, so every request waits out the longest pause that was asked for. Watches do not pass here, nor
does the Lease, which has a connection of its own: it must be renewed above all when the server is busy.

Some places are kept for urgent requests, such as the replacement of a lost pod: they do not wait behind the many of a
job that begins.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Unpack

from shoal.cluster.transport import Answer, Options, Transport, Wrapper
from shoal.errors import Unavailable

MAX_IN_FLIGHT, KEPT = 64, 8
"""Concurrent requests, and how many of them are kept for urgent ones.

Fewer than the connections, so that none waits where its time-out already runs."""


class Limited(Wrapper):
    """A transport with at most `in_flight` requests, `kept` of them for urgent ones, that honours Retry-After.

    `on_answer` is told the verb, the HTTP status (0: no answer) and the seconds of each request.
    """

    def __init__(
        self,
        inner: Transport,
        in_flight: int = MAX_IN_FLIGHT,
        kept: int = KEPT,
        *,
        on_answer: Callable[[str, int, float], None] = lambda _verb, _code, _seconds: None,
    ) -> None:
        super().__init__(inner)
        self._on_answer = on_answer
        self._places = asyncio.Semaphore(in_flight)
        self._ordinary = asyncio.Semaphore(max(1, in_flight - kept))
        self._closed_until = 0.0

    async def request(self, method: str, path: str, **options: Unpack[Options]) -> Answer:
        """See `Transport`."""
        if options.pop("urgent", False):
            return await self._request(method, path, **options)
        async with self._ordinary:
            return await self._request(method, path, **options)

    async def _request(self, method: str, path: str, **options: Unpack[Options]) -> Answer:
        async with self._places:
            await self._open()
            began, code = self._now(), 0
            try:
                answer = await super().request(method, path, **options)
                code = answer.status
                return answer
            except Unavailable as error:
                if error.retry_after is not None:
                    self._closed_until = max(self._closed_until, self._now() + error.retry_after)
                raise
            finally:
                self._on_answer(method, code, self._now() - began)

    async def _open(self) -> None:
        while (wait := self._closed_until - self._now()) > 0:  # noqa: ASYNC110  # a time, not an event
            await asyncio.sleep(wait * random.uniform(1.0, 1.1))  # so that not all come back at once

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
