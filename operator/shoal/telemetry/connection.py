"""A kept connection to a coordinator: one GET at a time over TLS, with the server's certificate pinned.

A thousand jobs are polled 45 times a second, and each keeps a connection. With a general HTTP client a poll takes twice
the processor time, and a connection 11 KiB more.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from functools import cache
from hashlib import sha256

from shoal.errors import ShoalError

MOST_HEAD = 16 << 10
"""Bytes of a head. A coordinator's has 150."""


class NoAnswer(ShoalError):
    """What came is no answer that can be used."""


class OtherCertificate(ShoalError):
    """The server has not the certificate that is pinned."""


@dataclass(frozen=True)
class Answer:
    """Of a request."""

    status: int
    body: bytes


class Connection(asyncio.Protocol):
    """Made by `connect`. `get` from one task at a time; whoever does not await its end closes it."""

    __slots__ = (
        "_length",
        "_limit",
        "_received",
        "_start",
        "_status",
        "_transport",
        "_waiter",
        "address",
        "pin",
    )

    def __init__(self, address: str, pin: bytes) -> None:
        self.address, self.pin = address, pin
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._received = bytearray()
        self._start = self._length = self._status = self._limit = 0
        """Of the body: where it begins in what was received (0: its head has not come), and how long it is."""

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._transport is not None and not self._transport.is_closing()

    async def get(self, request: bytes, limit: int) -> Answer:
        """The answer to this request. `limit`: bytes of a body.

        Raises:
            ConnectionError: the connection ended before the answer did.
            NoAnswer: it is too long, or no HTTP.
        """
        if self._transport is None:
            raise ConnectionResetError("the connection is closed")
        self._limit = limit
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """At once, and without a word."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        self._fail(
            ConnectionResetError(f"the connection was closed: {exc}" if exc else "the connection was closed")
        )

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._waiter is None or self._waiter.done():
            self.close()  # nobody asked
            return
        self._received += data
        try:
            complete = self._is_complete()
        except NoAnswer as error:
            self._fail(error)
            self.close()
            return
        if complete:
            body = bytes(memoryview(self._received)[self._start : self._start + self._length])
            self._received, self._start = bytearray(), 0
            self._waiter.set_result(Answer(self._status, body))

    def _is_complete(self) -> bool:
        if not self._start:
            end = self._received.find(b"\r\n\r\n")
            if end < 0 and len(self._received) <= MOST_HEAD:
                return False
            if not 0 < end <= MOST_HEAD:
                raise NoAnswer("no answer of HTTP: its head does not end")
            self._status, self._length = _read_head(bytes(self._received[:end]))
            self._start = end + 4
            if self._length > self._limit:
                raise NoAnswer(f"a report of more than {self._limit} bytes")
        return len(self._received) >= self._start + self._length

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)


async def connect(address: str, port: int, pin: bytes) -> Connection:
    """A connection to a server whose certificate has this SHA-256. Nothing is sent before that is known.

    That the server has the key is proven in the handshake.

    Raises:
        OSError: it cannot be reached, or speaks no TLS.
        OtherCertificate: it has another one.
    """
    loop = asyncio.get_running_loop()
    transport, made = await loop.create_connection(
        lambda: Connection(address, pin), address, port, ssl=_tls(), server_hostname=""
    )
    shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if shown is None or sha256(shown).digest() != pin:
        made.close()
        raise OtherCertificate("the certificate is not that of the job")
    return made


@cache
def _tls() -> ssl.SSLContext:
    """One for all: each takes 16 KiB."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # pinned instead
    return context


def _read_head(head: bytes) -> tuple[int, int]:
    """The status, and the length of the body."""
    first, *lines = head.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise NoAnswer("no answer of HTTP")
    status, length = int(rest[:3]), b"0"
    for line in lines:
        name, _, value = line.partition(b":")
        match name.strip().lower():
            case b"content-length":
                length = value.strip()
            case b"transfer-encoding":
                raise NoAnswer("an answer in pieces (Transfer-Encoding)")
    if not length.isdigit() or len(length) > 18:
        raise NoAnswer("the answer's Content-Length is no number")
    return status, int(length)
