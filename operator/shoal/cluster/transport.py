"""How requests reach the API server: the one seam below which everything is the official client.

The typed methods of the client would build every object twice and check the user's pod template against a schema of
their own, so only its low level is used (`ApiClient.param_serialize`, `call_api`): bytes in, bytes out. Tests put
another `Transport` in its place.
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
CONNECTIONS = 100
"""To the API server, watches among them."""

Query = Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """What the API server said: an HTTP status below 500 and other than 429, and its body."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the request was carried out."""
        return self.status < 300

    @property
    def message(self) -> str:
        """The server's words for a refusal."""
        try:
            return str(json.loads(self.body)["message"])
        except (ValueError, KeyError, TypeError):
            return self.body[:300].decode(errors="replace") or f"HTTP {self.status}"

    @property
    def reason(self) -> str:
        """The server's one word for a refusal (metav1.Status); empty where it gives none."""
        try:
            return str(json.loads(self.body)["reason"])
        except (ValueError, KeyError, TypeError):
            return ""


class Transport(Protocol):
    """Requests to one API server.

    Both methods raise `Unavailable` where no answer came, or one that may differ next time (429, 5xx).
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
        """One request; `body` is made JSON, `timeout` is in seconds."""
        ...

    def stream(self, path: str, query: Query) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The lines of a long GET. An HTTP error is raised as `StreamRefused`."""
        ...


class StreamRefused(Exception):
    """A watch was answered with an error instead of a stream."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"{answer.status}: {answer.message}")
        self.status = answer.status


class HttpTransport:
    """The official client's asynchronous flavour."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api

    @property
    def configuration(self) -> client.Configuration:
        """Server and credentials, for whoever must speak to the same API server in another way."""
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
        """As the protocol says."""
        try:
            answer = await self._call(method, path, query or {}, body, content_type, timeout)
            content = bytes(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ApiException) as error:
            raise Unavailable(f"{method} {path}: {error!r}") from error
        return _sorted(method, path, Answer(answer.status, content))

    @asynccontextmanager
    async def stream(self, path: str, query: Query) -> AsyncIterator[AsyncIterator[bytes]]:
        """As the protocol says."""
        try:
            # aiohttp's own limit is off; who reads the lines knows how long silence may be.
            answer = await self._call("GET", path, query, None, JSON, aiohttp.ClientTimeout(sock_connect=10))
        except (aiohttp.ClientError, TimeoutError, OSError, ApiException) as error:
            raise Unavailable(f"GET {path}: {error!r}") from error
        try:
            if answer.status != 200:
                refused = Answer(answer.status, bytes(await answer.read()))
                raise StreamRefused(_sorted("GET", path, refused))
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


def _sorted(method: str, path: str, answer: Answer) -> Answer:
    if answer.status == 429 or answer.status >= 500:
        raise Unavailable(f"{method} {path}: {answer.status} {answer.message}")
    return answer


class Fenced:
    """A transport that writes only while `check` lets it: after the Lease's renew deadline nothing is sent."""

    def __init__(self, inner: Transport, check: Callable[[], None]) -> None:
        self._inner = inner
        self._check = check

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
        """As the protocol says; whatever `check` raises, for a write that must not be sent."""
        if method != "GET":
            self._check()
        return await self._inner.request(
            method, path, query=query, body=body, content_type=content_type, timeout=timeout
        )

    def stream(self, path: str, query: Query) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """As the protocol says."""
        return self._inner.stream(path, query)


async def connect() -> HttpTransport:
    """The cluster this process belongs to: its service account in a pod, else KUBECONFIG or ~/.kube/config.

    Raises:
        UsageError: neither is there.
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
    configuration.connection_pool_maxsize = CONNECTIONS
    return HttpTransport(client.ApiClient(configuration))
