"""One bound for all requests of the process to the API server.

The API server sheds load with 429 and a Retry-After. A process that goes on meanwhile with all its other requests is
what it has to shed next, so every request waits out the longest pause that was asked for. Watches do not pass here, nor
does the Lease, which has a connection of its own: it must be renewed above all when the server is busy.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from shoal.cluster.transport import JSON, Answer, Query, Transport
from shoal.errors import Unavailable

MAX_IN_FLIGHT = 64
"""Concurrent requests. Fewer than the connections, so that none waits where its time-out already runs."""


class Limited:
    """A transport with at most `in_flight` requests, that honours Retry-After.

    `on_answer` is told the verb, the HTTP status (0: no answer) and the seconds of each request.
    """

    def __init__(
        self,
        inner: Transport,
        in_flight: int = MAX_IN_FLIGHT,
        *,
        on_answer: Callable[[str, int, float], None] = lambda _verb, _code, _seconds: None,
    ) -> None:
        self._inner = inner
        self._on_answer = on_answer
        self._places = asyncio.Semaphore(in_flight)
        self._closed_until = 0.0

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Any = None,
        content_type: str = JSON,
        timeout: float = 30.0,
    ) -> Answer:
        """See `Transport`."""
        async with self._places:
            await self._open()
            began, code = self._now(), 0
            try:
                answer = await self._inner.request(
                    method, path, query=query, body=body, content_type=content_type, timeout=timeout
                )
                code = answer.status
                return answer
            except Unavailable as error:
                if error.retry_after is not None:
                    self._closed_until = max(self._closed_until, self._now() + error.retry_after)
                raise
            finally:
                self._on_answer(method, code, self._now() - began)

    def stream(self, path: str, query: Query) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """See `Transport`."""
        return self._inner.stream(path, query)

    async def _open(self) -> None:
        while (wait := self._closed_until - self._now()) > 0:  # noqa: ASYNC110  # a time, not an event
            await asyncio.sleep(wait * random.uniform(1.0, 1.1))  # so that not all come back at once

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
