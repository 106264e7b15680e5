"""Requests to the API server: the seam that tests replace, and what lies between a controller and the connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, Unpack

from shoal.errors import LeaseLost, Unavailable

JSON = "application/json"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
"""Server-side apply. JSON is YAML."""
TIMEOUT_SECONDS = 30.0

Query = Mapping[str, str]


class Options(TypedDict, total=False):
    """What a request may have beside its method and path."""

    query: Query | None
    body: Any
    """Serialized as JSON. Where the request waits for a place (`runtime.limiter`), also a function that makes it."""
    content_type: str
    """Default: `JSON`."""
    timeout: float
    """Seconds. Default: `TIMEOUT_SECONDS`."""
    urgent: bool
    """It goes before others where there is a limit."""
    leaves: Callable[[], object]
    """Called as the bytes leave: what it raises keeps them back."""


@dataclass(frozen=True)
class Answer:
    """The answer of the API server: an HTTP status below 500 other than 429, and the body."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the request succeeded."""
        return self.status < 300

    @property
    def is_absent(self) -> bool:
        """Whether it is the word that there is no such object.

        So does not answer a server that does not know the kind yet, or a proxy: it may have another answer soon.
        """
        return self.status == 404 and self.reason == "NotFound"

    def accept(self, *also: int) -> None:
        """Raise `Unavailable` unless the request succeeded, or its status is one of `also`.

        A 404 is accepted as the word that there is no such object.
        """
        if self.ok or (self.status in also and (self.status != 404 or self.is_absent)):
            return
        raise Unavailable(f"{self.status}: {self.message}")

    @property
    def message(self) -> str:
        """The server's message about a refusal."""
        return self._said("message") or self.body[:300].decode(errors="replace") or f"HTTP {self.status}"

    @property
    def reason(self) -> str:
        """The reason of a refusal in one word (metav1.Status), or empty."""
        return self._said("reason")

    @property
    def is_status(self) -> bool:
        """Whether it is a metav1.Status."""
        return self._said("kind") == "Status"

    def _said(self, field: str) -> str:
        """A field of a body that is JSON, or empty."""
        try:
            return str(json.loads(self.body)[field])
        except (ValueError, KeyError, TypeError):
            return ""


class Transport(Protocol):
    """Requests to one API server.

    Both methods raise `Unavailable` without an answer, or for one that may differ on retry (429, 5xx).
    """

    async def request(self, method: str, path: str, **options: Unpack[Options]) -> Answer:
        """Send one request."""
        ...

    def stream(self, path: str, query: Query) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The lines of a watch. An HTTP error is raised as `StreamRefused`."""
        ...


async def apply(transport: Transport, path: str, body: Mapping[str, Any], manager: str) -> Answer:
    """Apply on the server: what others manage of these fields becomes the manager's."""
    query = {"fieldManager": manager, "force": "true"}
    return await transport.request("PATCH", path, query=query, body=body, content_type=APPLY_PATCH)


class StreamRefused(Exception):
    """A watch was answered with an error instead of a stream."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"{answer.status}: {answer.message}")
        self.status = answer.status


class Wrapper:
    """A transport in front of another one; as it is, it changes nothing."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    async def request(self, method: str, path: str, **options: Unpack[Options]) -> Answer:
        """See `Transport`."""
        return await self._inner.request(method, path, **options)

    def stream(self, path: str, query: Query) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """See `Transport`."""
        return self._inner.stream(path, query)


LOOK_SECONDS = 1.0
"""A write that waits looks for the Lease as often: the loop's timers stand still while the machine is suspended."""


class Fenced(Wrapper):
    """A transport whose writes end before the Lease does, so that none reaches the server after it.

    `seconds_left` raises `LeaseLost` once writes may not be sent. A write that waits for a connection, or for its
    answer, is given up when the seconds are over and the Lease was not renewed meanwhile. It asks again as its bytes
    leave: in a process that was stopped, what was in hand goes on before any timer tells that the seconds are over.
    """

    def __init__(self, inner: Transport, seconds_left: Callable[[], float]) -> None:
        super().__init__(inner)
        self._seconds_left = seconds_left

    async def request(self, method: str, path: str, **options: Unpack[Options]) -> Answer:
        """See `Transport`. For a write, raises what `seconds_left` raises."""
        if method == "GET":
            return await super().request(method, path, **options)
        left = self._seconds_left()
        options["leaves"] = self._seconds_left
        try:
            async with asyncio.timeout(None) as limit:
                fence = _Fence(limit, self._seconds_left, left)
                try:
                    return await super().request(method, path, **options)
                finally:
                    fence.end()
        except TimeoutError:
            raise Unavailable(f"{method} {path}: the Lease was lost meanwhile") from None


class _Fence:
    """Ends a request with the Lease.

    An object, since a function that has itself called again is a cycle, which each write left to the next garbage
    collection, with its task and all that belongs to that.
    """

    def __init__(self, limit: asyncio.Timeout, seconds_left: Callable[[], float], left: float) -> None:
        self._limit, self._seconds_left = limit, seconds_left
        self._watch = asyncio.get_running_loop().call_later(min(left, LOOK_SECONDS), self._look)

    def end(self) -> None:
        """The request has ended."""
        self._watch.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._watch = loop.call_later(min(self._seconds_left(), LOOK_SECONDS), self._look)
        except LeaseLost:
            self._limit.reschedule(loop.time())
