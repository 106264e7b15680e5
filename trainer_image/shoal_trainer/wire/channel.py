"""One TCP connection that moves whole messages: the only place of the data plane that touches a socket.

Plain sockets stay blocking with kernel timeouts and MSG_WAITALL, so that a megabyte costs one system call and Python
holds the interpreter lock for none of it. Python's own timeouts would make the socket non-blocking and cost a poll for
every 64 KiB; TLS has to use them.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Callable

from shoal_trainer.errors import ProtocolError, Unreachable

CHUNK = 4 << 20
DEAD_SECONDS = 25.0
"""A peer whose machine acknowledges nothing for so long is gone. Longer than a server may let a request wait (20 s):
the kernel counts a peer that takes no more bytes in the same way."""
_TIMEVAL = struct.Struct("ll")
MIN_RATE = 1 << 20
"""Bytes a second below which a peer that has begun a message is given up, after its allowance of seconds."""


def enable_keepalive(sock: socket.socket) -> None:
    """Have the kernel end the connection when the peer's machine has been silent for `DEAD_SECONDS`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe = max(1, int(DEAD_SECONDS / 4))
    options = {"TCP_KEEPIDLE": probe, "TCP_KEEPINTVL": probe, "TCP_KEEPCNT": 3}
    for option, value in {**options, "TCP_USER_TIMEOUT": int(DEAD_SECONDS * 1000)}.items():
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class Channel:
    """A connected socket, plain or TLS. Not for two threads at once, except `close`."""

    def __init__(
        self, sock: socket.socket, *, timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._clock = clock
        self._flags = 0 if self._tls else socket.MSG_WAITALL
        enable_keepalive(sock)
        self.set_timeout(timeout)

    def set_timeout(self, seconds: float) -> None:
        """How long one read or write may make no progress at all."""
        self._timeout = seconds
        if self._tls:
            self._sock.settimeout(seconds)
            return
        self._sock.settimeout(None)
        value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all parts in order. Small ones go together in one segment."""
        try:
            if self._tls or not parts[1:]:
                for part in parts:
                    self._sock.sendall(part)
                return
            total = sum(len(part) for part in parts)
            sent = self._sock.sendmsg(parts)
            if sent < total:
                for part in parts:
                    if sent < len(part):
                        self._sock.sendall(memoryview(part)[sent:])
                        sent = 0
                    else:
                        sent -= len(part)
        except (OSError, ValueError) as error:
            raise Unreachable(
                f"the peer does not take what is sent: {error or type(error).__name__}"
            ) from None

    def receive(self, view: memoryview, *, deadline: float | None = None) -> None:
        """Fill `view`. `Unreachable` when the peer has gone, is silent, or too slow (`deadline` on the clock)."""
        done, total = 0, len(view)
        limit = deadline if deadline is not None else self._clock() + self._timeout + total / MIN_RATE
        try:
            while done < total:
                want = min(total - done, CHUNK)
                count = self._sock.recv_into(view[done : done + want], want, self._flags)
                if count == 0:
                    raise Unreachable("the peer closed the connection")
                done += count
                if done < total and self._clock() > limit:
                    raise Unreachable("the peer sends too slowly")
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            raise Unreachable(f"the peer was silent for {self._timeout:g} s") from None
        except (OSError, ValueError) as error:
            raise Unreachable(f"the connection broke: {error or type(error).__name__}") from None

    def receive_first(self, count: int) -> bytearray:
        """The first `count` bytes of a message, however long the peer takes to begin it."""
        data = bytearray(count)
        view, done = memoryview(data), 0
        while True:
            try:
                if self._tls:
                    begun = self._begun_tls()
                else:  # one system call, not a peek before it
                    done = self._sock.recv_into(view, count, self._flags)
                    begun = done > 0
            except (TimeoutError, BlockingIOError):
                continue
            except (OSError, ValueError) as error:
                raise Unreachable(f"the connection broke: {error or type(error).__name__}") from None
            if not begun:
                raise Unreachable("the peer closed the connection")
            if done < count:
                self.receive(view[done:])
            return data

    def _begun_tls(self) -> bool:
        """Wait for the first byte, without a limit; False where the peer has closed."""
        if self._sock.pending():  # type: ignore[attr-defined]
            return True
        self._sock.settimeout(None)
        try:
            return self._peek_tls()
        finally:
            self._sock.settimeout(self._timeout)

    def _peek_tls(self) -> bool:
        # TLS cannot peek, but the raw socket below can.
        raw = socket.socket(fileno=self._sock.fileno())
        try:
            return bool(raw.recv(1, socket.MSG_PEEK))
        finally:
            raw.detach()

    def receive_bytes(self, count: int, *, limit: int) -> bytearray:
        """`count` bytes, refused before any room is made if they are more than `limit`."""
        if count > limit:
            raise ProtocolError(f"the peer announces {count} bytes where at most {limit} are allowed")
        data = bytearray(count)
        if count:
            self.receive(memoryview(data))
        return data

    def close(self) -> None:
        """Close, and wake a thread that waits in it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
