"""When the API server answered again after an outage: nodes may look gone that are only not heard yet.

A process that leads after its Lease had lain there without renewals cannot tell whether the server or the operator was
away, and assumes the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from shoal.cluster.transport import Answer, Options, Transport, Wrapper
from shoal.errors import Unavailable

LEAST_SECONDS = 20.0
"""A shorter outage turns no node Unknown: kubelets report every 10 s, and 40 s without a report are needed."""


class Outage:
    """Takes the results of requests, of any thread."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._since: float | None = None
        self._returned_at: float | None = None

    @property
    def returned_seconds(self) -> float | None:
        """How long ago the last outage ended."""
        return None if self._returned_at is None else self._monotonic() - self._returned_at

    def failed(self) -> None:
        """A request was not answered, or with an error of the server: without its store it hears no kubelet, either."""
        if self._since is None:
            self._since = self._monotonic()

    def answered(self) -> None:
        """A request was answered, or the server has asked for it later."""
        since, self._since = self._since, None
        if since is not None and self._monotonic() - since >= LEAST_SECONDS:
            self._returned_at = self._monotonic()

    def assumed(self, seconds: float) -> None:
        """Nobody led for this long, and nobody said that it would be so."""
        if seconds >= LEAST_SECONDS:
            self._returned_at = self._monotonic()


class Watched(Wrapper):
    """A transport that tells an `Outage` how its requests fare."""

    def __init__(self, inner: Transport, outage: Outage) -> None:
        super().__init__(inner)
        self._outage = outage

    async def request(self, method: str, path: str, **options: Unpack[Options]) -> Answer:
        """See `Transport`."""
        try:
            answer = await super().request(method, path, **options)
        except Unavailable as error:
            self._outage.failed() if error.retry_after is None else self._outage.answered()
            raise
        self._outage.answered()
        return answer
