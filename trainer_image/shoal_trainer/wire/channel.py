"""Sends and receives whole messages over a TCP or TLS connection.

Plain sockets are blocking, with kernel timeouts and MSG_WAITALL: one system call per `CHUNK`, without the GIL. Python's
own timeouts would make the socket non-blocking and add a poll for every 64 KiB; only TLS uses them.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable

from shoal_trainer.errors import ProtocolError, TooSlow, Unreachable

CHUNK = 4 << 20
"""Bytes per receive call; the deadline is checked before each."""
TLS_CHUNK = 1 << 20
"""Bytes per encrypted send: Python's timeout is for a whole call, and the deadline is checked after each."""
DEAD_SECONDS = 25.0
"""A connection is closed after this long without an acknowledgment. The same timeout closes it if the peer stops
reading, so it is longer than a server lets a request wait (20 s)."""
_TIMEVAL = struct.Struct("ll")
SHORTEST_TIMEOUT = 0.001
"""0 would mean none."""
MIN_RATE = 1 << 20
"""Bytes per second: a message may take `timeout` plus its size divided by this."""


def enable_keepalive(sock: socket.socket) -> None:
    """Let the kernel close the connection when the peer's machine has not answered for `DEAD_SECONDS`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe = max(1, int(DEAD_SECONDS / 4))
    options = {"TCP_KEEPIDLE": probe, "TCP_KEEPINTVL": probe, "TCP_KEEPCNT": 3}
    for option, value in {**options, "TCP_USER_TIMEOUT": int(DEAD_SECONDS * 1000)}.items():
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class Channel:
    """A connected socket, plain or TLS. Only `close` is thread-safe."""

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
        """Set how long one read or write may make no progress."""
        self._timeout = seconds
        if self._tls:
            self._sock.settimeout(seconds)
            return
        self._sock.settimeout(None)
        value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all parts in order, with one system call if possible.

        `Unreachable` if the peer stops reading, `TooSlow` if it reads so slowly that it misses the deadline, which is
        the same as in `receive`.
        """
        views = deque(memoryview(part).cast("B") for part in parts)
        deadline = self._clock() + self._timeout + sum(map(len, views)) / MIN_RATE
        try:
            while views:
                # A call returns when a part is sent, or has timed out: the kernel's timeout is for a whole call.
                sent = self._sock.send(views[0][:TLS_CHUNK]) if self._tls else self._sock.sendmsg(views)
                while views and sent >= len(views[0]):
                    sent -= len(views.popleft())
                if views:
                    views[0] = views[0][sent:]
                    if self._clock() > deadline:
                        raise TooSlow("the peer reads too slowly")
        except (OSError, ValueError, TooSlow) as error:
            self.close()  # what follows would be read as the rest of this message
            if isinstance(error, TooSlow):
                raise
            raise Unreachable(f"cannot send to the peer: {error or type(error).__name__}") from None

    def receive(self, view: memoryview, *, deadline: float | None = None) -> None:
        """Fill `view` by `deadline`, in seconds on the clock.

        `Unreachable` if the peer closes the connection, `TooSlow` if it stops sending or misses the deadline.
        """
        done, total = 0, len(view)
        if deadline is None:
            deadline = self._clock() + self._timeout + total / MIN_RATE
        try:
            while done < total:
                if self._clock() > deadline:
                    raise TooSlow("the peer sent too slowly")
                size = min(total - done, CHUNK)
                count = self._sock.recv_into(view[done : done + size], size, self._flags)
                if count == 0:
                    raise Unreachable("the peer closed the connection")
                done += count
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            raise TooSlow(f"the peer sent nothing for {self._timeout:g} s") from None
        except (OSError, ValueError) as error:
            raise Unreachable(f"the connection broke: {error or type(error).__name__}") from None

    def receive_by(self, view: memoryview, deadline: float) -> None:
        """Fill `view`. Unlike in `receive`, a read ends at the deadline too; it becomes the timeout of later reads."""
        self.set_timeout(max(SHORTEST_TIMEOUT, deadline - self._clock()))
        self.receive(view, deadline=deadline)

    def receive_first(self, count: int) -> bytearray:
        """The first `count` bytes of a message; waits without a limit for the first byte."""
        data = bytearray(count)
        view, done = memoryview(data), 0
        while True:
            try:
                if self._tls:
                    started = self._wait_tls()
                else:  # no peek first, which would be a second system call
                    done = self._sock.recv_into(view, count, self._flags)
                    started = done > 0
            except (TimeoutError, BlockingIOError):
                continue
            except (OSError, ValueError) as error:
                raise Unreachable(f"the connection broke: {error or type(error).__name__}") from None
            if not started:
                raise Unreachable("the peer closed the connection")
            if done < count:
                self.receive(view[done:])
            return data

    def _wait_tls(self) -> bool:
        """Wait without a limit for the first byte; False if the peer has closed the connection."""
        if self._sock.pending():  # type: ignore[attr-defined]
            return True
        self._sock.settimeout(None)
        try:
            return self._peek_tls()
        finally:
            self._sock.settimeout(self._timeout)

    def _peek_tls(self) -> bool:
        # TLS sockets cannot peek, so use the raw socket.
        raw = socket.socket(fileno=self._sock.fileno())
        try:
            return bool(raw.recv(1, socket.MSG_PEEK))
        finally:
            raw.detach()

    def receive_bytes(self, count: int, *, limit: int) -> bytearray:
        """Receive `count` bytes; `ProtocolError` before any allocation if `count` exceeds `limit`."""
        if count > limit:
            raise ProtocolError(f"the peer announces {count} bytes, at most {limit} are allowed")
        data = bytearray(count)
        if count:
            self.receive(memoryview(data))
        return data

    def close(self) -> None:
        """Close the connection, and wake a thread that waits on it."""
        with contextlib.suppress(OSError):
            # Not TLS's own, after which a thread that receives would read what is encrypted.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        self._sock.close()
