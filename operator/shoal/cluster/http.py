"""The transport over HTTPS, with bytes in and out.

aiohttp directly: the official client copies each body, and has every request look for proxies and ~/.netrc in two
threads (aiohttp's `trust_env`), which took longer than the request itself.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Unpack
from urllib.parse import urlencode

import aiohttp
from pydantic_core import to_json
from yarl import URL

from shoal import __version__
from shoal.cluster.server import ApiServer, find
from shoal.cluster.transport import JSON, TIMEOUT_SECONDS, Answer, Options, Query, StreamRefused
from shoal.errors import TooLong, Unavailable

CONNECTIONS = 100
"""Connections to the API server, including watches."""
KEPT_OPEN = 16
"""Connections that are kept while idle. What a burst opens beyond takes 0.1 MiB each, and ends soon after it."""
KEEP_SECONDS, SURPLUS_SECONDS = 80.0, 2.0
"""How long an idle one is kept of these and of the others: the API server closes it after 90 s, and a new one costs a
loss 10 ms."""
USE_SECONDS = 60.0
"""How often those that are kept are used though there is nothing to ask (`HttpTransport.keep_open`)."""
LONGEST_BYTES = 2**24
"""That are read of an answer, and of a line of a watch. A pod takes etcd's 1.5 MiB at most, and six times as much here
where its user wrote `<` only, which the API server writes as `\\u003c`; a list has many of them."""
ANSWER_BYTES = 2**14
"""That an answer may read in one turn of the event loop, where connections begin with less (`process.life`): a record
of TLS."""
WATCH_BYTES = 2**16
"""That a watch may. With 16 KiB, 1,000 pods that start say more than a process can read that has a loop of 50 turns a
second, since others have the machine, too."""
CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 0.05
"""After which connections that were cancelled while they opened have closed, too: asyncio forgets a socket whose loop
ends before. On an idle machine 1 ms is enough."""
LONGEST_RETRY_AFTER = 120.0
"""A server that asks for more is asked again after this many seconds."""

_FAULTS = (aiohttp.ClientError, TimeoutError, OSError)


class HttpTransport:
    """A transport with connections of its own: what fills those of one does not delay another."""

    def __init__(self, server: ApiServer, connections: int = CONNECTIONS) -> None:
        self.server = server
        self._kept, self._surplus = min(KEPT_OPEN, connections), max(0, connections - KEPT_OPEN)
        self._opened: dict[bool, aiohttp.ClientSession] = {}
        """By whether their idle connections are kept."""
        self._on_kept = 0
        """Requests that have a connection that is kept, or wait for one."""

    async def close(self) -> None:
        """Close all connections."""
        if self._opened:
            for session in self._opened.values():
                await session.close()
            await asyncio.sleep(CLOSE_SECONDS)

    async def keep_open(self) -> None:
        """Have the connections that are kept open before they are needed, until cancelled.

        A wave of losses comes after hours in which nobody had anything to ask.
        """
        while True:
            idle = range(self._kept - self._on_kept)
            await asyncio.gather(*(self.request("GET", "/version") for _ in idle), return_exceptions=True)
            await asyncio.sleep(USE_SECONDS)

    async def request(self, method: str, path: str, **options: Unpack[Options]) -> Answer:
        """See `Transport`."""
        timeout = aiohttp.ClientTimeout(total=options.get("timeout", TIMEOUT_SECONDS))
        kept = self._on_kept < self._kept or not self._surplus
        self._on_kept += kept
        try:
            async with await self._send(method, path, options, timeout, kept=kept) as response:
                _read_more(response, ANSWER_BYTES)
                found = Answer(response.status, await _body(f"{method} {path}", response))
        except _FAULTS as error:
            raise Unavailable(f"{method} {path}: {error!r}") from error
        finally:
            self._on_kept -= kept
        return _available(method, path, found, response.headers)

    @asynccontextmanager
    async def stream(self, path: str, query: Query) -> AsyncIterator[AsyncIterator[bytes]]:
        """See `Transport`."""
        # No total timeout: the reader limits the time between lines.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        try:
            response = await self._send("GET", path, {"query": query}, timeout, kept=False)
        except _FAULTS as error:
            raise Unavailable(f"GET {path}: {error!r}") from error
        try:
            if response.status != 200:
                try:
                    refused = Answer(response.status, await _body(f"GET {path}", response))
                except _FAULTS as error:
                    raise Unavailable(f"GET {path}: {error!r}") from error
                raise StreamRefused(_available("GET", path, refused, response.headers))
            _read_more(response, WATCH_BYTES)
            yield _lines(path, response)
        finally:
            response.close()

    async def _send(
        self, method: str, path: str, options: Options, timeout: aiohttp.ClientTimeout, *, kept: bool
    ) -> aiohttp.ClientResponse:
        server = self.server
        headers = {"Accept": JSON}
        if (token := await server.bearer()) is not None:
            headers["Authorization"] = f"Bearer {token}"
        body, leaves = options.get("body"), options.get("leaves")
        if body is None and leaves:
            body = {}  # of a DELETE: its bytes are what is looked at as they leave
        if body is not None:
            headers["Content-Type"] = options.get("content_type", JSON)
        query = options.get("query")
        url = f"{server.url}{path}?{urlencode(query)}" if query else f"{server.url}{path}"
        return await self._session(kept).request(
            method,
            URL(url, encoded=True),
            data=None if body is None else _Body(to_json(body), leaves),
            headers=headers,
            timeout=timeout,
            proxy=server.proxy,
            server_hostname=server.server_name,
            allow_redirects=False,
        )

    def _session(self, kept: bool) -> aiohttp.ClientSession:
        if not self._opened:
            tls = self.server.tls()
            self._opened = {
                True: _open(tls, self._kept, KEEP_SECONDS),
                False: _open(tls, max(1, self._surplus), SURPLUS_SECONDS),
            }
        return self._opened[kept]


class _Body(aiohttp.BytesPayload):
    """A body that may still be kept back as it leaves, and the headers with it: see `Options.leaves`."""

    def __init__(self, content: bytes, leaves: Callable[[], object] | None) -> None:
        super().__init__(content)
        self._leaves = leaves

    async def write_with_length(
        self, writer: aiohttp.abc.AbstractStreamWriter, content_length: int | None
    ) -> None:
        """See `aiohttp.Payload`."""
        if self._leaves:
            self._leaves()
        await super().write_with_length(writer, content_length)


def _open(tls: ssl.SSLContext, connections: int, keep_seconds: float) -> aiohttp.ClientSession:
    """A pool of at most so many connections, each closed when it was idle for so long."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections, ssl=tls, keepalive_timeout=keep_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"User-Agent": f"shoal/{__version__}"},  # as the API server's audit log names it
    )


async def connect(connections: int = CONNECTIONS) -> HttpTransport:
    """Connect with the pod's service account, or else with KUBECONFIG or ~/.kube/config.

    Raises:
        UsageError: none of them is available.
    """
    return HttpTransport(await find(), connections)


def _read_more(response: aiohttp.ClientResponse, size: int) -> None:
    """Have a connection read so many bytes at a time, unless all is read, as far as asyncio's own TLS serves it."""
    connection = response.connection
    tls: Any = getattr(connection and connection.transport, "_ssl_protocol", None)
    if tls is not None:
        tls.max_size = max(size, tls.max_size)


async def _body(what: str, response: aiohttp.ClientResponse) -> bytes:
    body = _Bounded(what)
    async for part in response.content.iter_any():
        body.add(part)
    return body.take()


async def _lines(path: str, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    # Not aiohttp's own lines: those end with an error of its own above twice the buffer that a connection has.
    line = _Bounded(f"watch of {path}")
    try:
        async for part in response.content.iter_any():
            begin = 0
            while end := part.find(b"\n", begin) + 1:
                line.add(part[begin:end])
                yield line.take()
                begin = end
            line.add(part[begin:])
    except _FAULTS as error:
        raise Unavailable(f"watch of {path}: {error!r}") from error
    if rest := line.take():
        yield rest


class _Bounded:
    """Bytes that come in parts, together at most `LONGEST_BYTES`."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, part: bytes) -> None:
        """Add a part.

        Raises:
            TooLong: it is one too much.
        """
        self._size += len(part)
        if self._size > LONGEST_BYTES:
            raise TooLong(f"{self._what}: more than {LONGEST_BYTES} bytes")
        self._parts.append(part)

    def take(self) -> bytes:
        """What came since this was called before."""
        whole = b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        return whole


def _available(method: str, path: str, answer: Answer, headers: Mapping[str, str]) -> Answer:
    if answer.status == 429 or answer.status >= 500:
        # What sheds load (priority and fairness, a shutdown) answers in plain words before anybody looks at the object.
        # A Status comes from behind it: a webhook's, or of a list that is being made ready. Both have the headers of
        # priority and fairness.
        words = f"{method} {path}: {answer.status} {answer.message}"
        raise Unavailable(words, _retry_after(headers), of_one=answer.is_status)
    return answer


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of the header Retry-After. A date, which Kubernetes never sends, is ignored."""
    text = headers.get("Retry-After", "")
    return min(float(text), LONGEST_RETRY_AFTER) if text.isdigit() else None
