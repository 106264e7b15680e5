"""HTTP on the connections of a `Listener`: the base of the control port and of the metrics.

Before a peer has proved anything, the bytes of a request's head are bounded: Python's own server would hold 6 MB.
"""

from __future__ import annotations

import http.client
import socket
from http.server import BaseHTTPRequestHandler
from io import BufferedIOBase
from typing import Any

from shoal_trainer.wire.gate import Visit
from shoal_trainer.wire.listener import Listener

HEAD_BYTES = 16 << 10
"""The longest request line with all headers."""


class HeadTooLong(http.client.HTTPException):
    """The head of a request exceeds `HEAD_BYTES`; the server answers 431."""


class Head:
    """Reads a connection. While `left` is not None, at most so many bytes more."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self.left: int | None = HEAD_BYTES

    def readline(self, limit: int = -1) -> bytes:
        """A line, as of a file."""
        if self.left is None:
            return self._file.readline(limit)
        line = self._file.readline(self.left + 1 if limit < 0 else min(limit, self.left + 1))
        self.left -= len(line)
        if self.left < 0:
            raise HeadTooLong(f"the head of a request has more than {HEAD_BYTES} bytes")
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class BoundedHandler(BaseHTTPRequestHandler):
    """A connection of a `Listener`; made, it has served all requests of it."""

    protocol_version = "HTTP/1.1"
    server_version = "shoal"
    sys_version = ""
    # Send a response as one segment: a second one would wait for the client's delayed ACK, up to 40 ms, which limits
    # a worker that leases two batches at a time to 50 steps a second.
    wbufsize = -1
    disable_nagle_algorithm = True

    def __init__(self, sock: socket.socket, visit: Visit, listener: Listener) -> None:
        self._visit, self.listener = visit, listener
        super().__init__(sock, (visit.address, 0), None)  # type: ignore[arg-type]  # of the server it uses nothing

    def setup(self) -> None:
        """Bound what is read before a proof."""
        super().setup()
        self.head = Head(self.rfile)
        self.rfile = self.head  # type: ignore[assignment]

    def handle_one_request(self) -> None:
        """Bound the head of each request."""
        self.head.left = HEAD_BYTES
        try:
            super().handle_one_request()
        except HeadTooLong as error:  # in the request line; in the headers, the server answers 431
            self.listener.refusals.refused(self._visit.address, error)
            self.close_connection = True

    def prove(self) -> None:
        """This request has proved that it is of this job: its body may be read."""
        self.head.left = None
        self.listener.gate.proved(self._visit)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests: several arrive each second."""
