"""Requests to the API server through the official client.

Only its low level is used (`ApiClient.param_serialize`, `call_api`), with bytes in and out: the typed methods would
build every object twice and check the user's pod template against their own schema. Tests replace the `Transport`.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException

from shoal.errors import Unavailable, UsageError

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
"""Server-side apply. JSON is YAML."""
CONNECTIONS = 100
"""Connections to the API server, including watches."""
LONGEST_RETRY_AFTER = 120.0
"""A server that asks for more is asked again after this many seconds."""

Query = Mapping[str, str]


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
    def message(self) -> str:
        """The server's message about a refusal."""
        try:
            return str(json.loads(self.body)["message"])
        except (ValueError, KeyError, TypeError):
            return self.body[:300].decode(errors="replace") or f"HTTP {self.status}"

    @property
    def reason(self) -> str:
        """The reason of a refusal in one word (metav1.Status), or empty."""
        try:
            return str(json.loads(self.body)["reason"])
        except (ValueError, KeyError, TypeError):
            return ""


class Transport(Protocol):
    """Requests to one API server.

    Both methods raise `Unavailable` without an answer, or for one that may differ on retry (429, 5xx).
    """

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
        """Send one request; `body` is serialized as JSON, `timeout` is in seconds."""
        ...

    def stream(self, path: str, query: Query) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The lines of a watch. An HTTP error is raised as `StreamRefused`."""
        ...


class StreamRefused(Exception):
    """A watch was answered with an error instead of a stream."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"{answer.status}: {answer.message}")
        self.status = answer.status


class HttpTransport:
    """A transport on the official asynchronous client."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api

    @property
    def configuration(self) -> client.Configuration:
        """Server and credentials, for other clients of the same API server."""
        return self._api.configuration

    async def close(self) -> None:
        """Close all connections."""
        await self._api.close()

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
            answer = await self._call(method, path, query or {}, body, content_type, timeout)
            content = bytes(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ApiException) as error:
            raise Unavailable(f"{method} {path}: {error!r}") from error
        return _available(method, path, Answer(answer.status, content), answer.response.headers)

    @asynccontextmanager
    async def stream(self, path: str, query: Query) -> AsyncIterator[AsyncIterator[bytes]]:
        """See `Transport`."""
        try:
            # No total timeout: the reader limits the time between lines.
            answer = await self._call("GET", path, query, None, JSON, aiohttp.ClientTimeout(sock_connect=10))
        except (aiohttp.ClientError, TimeoutError, OSError, ApiException) as error:
            raise Unavailable(f"GET {path}: {error!r}") from error
        try:
            if answer.status != 200:
                refused = Answer(answer.status, bytes(await answer.read()))
                raise StreamRefused(_available("GET", path, refused, answer.response.headers))
            yield _lines(path, answer.response)
        finally:
            answer.response.close()

    async def _call(
        self, method: str, path: str, query: Query, body: Any, content_type: str, timeout: Any
    ) -> Any:
        serialized = await self._api.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params={"Content-Type": content_type, "Accept": JSON},
            body=body,
            auth_settings=["BearerToken"],
        )
        return await self._api.call_api(*serialized, _request_timeout=timeout)


async def _lines(path: str, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for line in response.content:
            yield line
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Unavailable(f"watch of {path}: {error!r}") from error


def _available(method: str, path: str, answer: Answer, headers: Mapping[str, str]) -> Answer:
    if answer.status == 429 or answer.status >= 500:
        raise Unavailable(f"{method} {path}: {answer.status} {answer.message}", _retry_after(headers))
    return answer


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of the header Retry-After. A date, which Kubernetes never sends, is ignored."""
    text = headers.get("Retry-After", "")
    return min(float(text), LONGEST_RETRY_AFTER) if text.isdigit() else None


class Fenced:
    """A transport whose writes end before the Lease does, so that none reaches the server after it.

    `seconds_left` raises `LeaseLost` once writes may not be sent; a write that waits for a connection, or for its
    answer, is given up when the seconds are over.
    """

    def __init__(self, inner: Transport, seconds_left: Callable[[], float]) -> None:
        self._inner = inner
        self._seconds_left = seconds_left

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
        """See `Transport`. For a write, raises what `seconds_left` raises."""
        if method != "GET":
            timeout = min(timeout, self._seconds_left())
        return await self._inner.request(
            method, path, query=query, body=body, content_type=content_type, timeout=timeout
        )

    def stream(self, path: str, query: Query) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """See `Transport`."""
        return self._inner.stream(path, query)


async def connect(connections: int = CONNECTIONS) -> HttpTransport:
    """Connect with the pod's service account, or else with KUBECONFIG or ~/.kube/config.

    A transport has connections of its own: what fills one does not delay another.

    Raises:
        UsageError: none of them is available.
    """
    configuration = client.Configuration()
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            config.load_incluster_config(client_configuration=configuration)
        else:
            await config.load_kube_config(client_configuration=configuration, persist_config=False)
    except (config.ConfigException, OSError) as error:
        raise UsageError(
            f"no cluster configuration: set KUBECONFIG, or run in a pod with a service account ({error})"
        ) from error
    configuration.connection_pool_maxsize = connections
    return HttpTransport(client.ApiClient(configuration))
