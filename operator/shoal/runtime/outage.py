"""When the API server answered again after an outage: nodes may look gone that are only not heard yet.

A process that leads after its Lease had lain there without renewals cannot tell whether the server or the operator was
away, and assumes the first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any

from shoal.cluster.transport import JSON, Answer, Query, Transport
from shoal.errors import Unavailable

LEAST_SECONDS = 20.0
"""A shorter outage turns no node Unknown: kubelets report every 10 s, and 40 s without a report are needed."""


class Outage:
    """Takes the results of requests. `returned_at`: when the last outage ended."""

    def __init__(self, monotonic: Callable[[], float], wall: Callable[[], datetime]) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._since: float | None = None
        self.returned_at: datetime | None = None

    def failed(self) -> None:
        """A request was not answered."""
        if self._since is None:
            self._since = self._monotonic()

    def answered(self) -> None:
        """A request was answered, with whatever status."""
        if self._since is not None and self._monotonic() - self._since >= LEAST_SECONDS:
            self.returned_at = self._wall()
        self._since = None

    def assumed(self, seconds: float) -> None:
        """Nobody led for this long, and nobody said that it would be so."""
        if seconds >= LEAST_SECONDS:
            self.returned_at = self._wall()


class Watched:
    """A transport that tells an `Outage` whether its requests are answered."""

    def __init__(self, inner: Transport, outage: Outage) -> None:
        self._inner = inner
        self._outage = outage

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
        try:
            answer = await self._inner.request(
                method, path, query=query, body=body, content_type=content_type, timeout=timeout
            )
        except Unavailable as error:
            self._outage.failed() if error.retry_after is None else self._outage.answered()
            raise
        self._outage.answered()
        return answer

    def stream(self, path: str, query: Query) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """See `Transport`."""
        return self._inner.stream(path, query)
