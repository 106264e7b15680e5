"""An HTTP server whose cost to its process is bounded before a peer has proved anything.

Bounded are the connections (see `Gate`), so also their threads; the time until a request is proved; and the bytes of a
request's head, of which Python's own server would hold 6 MB. It is the base of the control port and of the metrics.
"""

from __future__ import annotations

import http.client
import logging
import socket
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any

from shoal_trainer.ps.server import RefusalLog
from shoal_trainer.wire import bar
from shoal_trainer.wire.gate import Gate, Visit, shut

log = logging.getLogger(__name__)

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


class BoundedServer(ThreadingHTTPServer):
    """Serves `handler` with at most `limit` connections without proof, each for at most `seconds`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(
        self, address: tuple[str, int], handler: type[BoundedHandler], *, limit: int, seconds: float
    ) -> None:
        self.refusals = RefusalLog(time.monotonic)
        self._seconds = seconds
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)
        self._bar = bar.Bar(self.socket)
        self.gate = Gate(limit, bar=self._bar.add)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection."""
        request, client_address = super().get_request()
        bar.free(request)
        return request, client_address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Admit an accepted connection, and serve it in a thread."""
        name = str(client_address[0])
        visit = self.gate.enter(name, partial(shut, request), time.monotonic() + self._seconds)
        if visit is None:
            self.refusals.refused(name, "too many connections")
            self.shutdown_request(request)
            return
        try:
            arguments = request, client_address, visit
            threading.Thread(target=self._serve, args=arguments, name=f"http-{name}", daemon=True).start()
        except BaseException:
            self.gate.leave(visit)
            raise

    def secure(self, request: Any, visit: Visit) -> Any:
        """The connection to serve, after the TLS handshake if there is one; None if it is refused."""
        del visit
        request.settimeout(self._seconds)
        return request

    def proven(self, connection: Any) -> None:
        """A request on this connection has proved that it is of this job."""

    def service_actions(self) -> None:
        """Close the connections that proved nothing in time, and lift bars. Called several times a second."""
        self._bar.lift()
        self.gate.expire(time.monotonic())

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log errors other than broken connections (for example, no thread can be started) as a refusal."""
        if not isinstance(error := sys.exception(), OSError):
            self.refusals.refused(str(client_address[0]), error)
        log.debug("a connection from %s broke", client_address, exc_info=True)

    def _serve(self, request: Any, client_address: Any, visit: Visit) -> None:
        try:
            if (connection := self.secure(request, visit)) is None:
                self.shutdown_request(request)
            else:
                self.process_request_thread(connection, client_address)
            if visit.evicted:
                self.refusals.refused(
                    visit.address, "too many connections without proof, or no proof in time"
                )
        finally:
            self.gate.leave(visit)


class BoundedHandler(BaseHTTPRequestHandler):
    """A connection of a `BoundedServer`."""

    protocol_version = "HTTP/1.1"
    server_version = "shoal"
    sys_version = ""
    # Send a response as one segment: a second one would wait for the client's delayed ACK, up to 40 ms, which limits
    # a worker that leases two batches at a time to 50 steps a second.
    wbufsize = -1
    disable_nagle_algorithm = True
    server: BoundedServer

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
            self.server.refusals.refused(str(self.client_address[0]), error)
            self.close_connection = True

    def prove(self) -> None:
        """This request has proved that it is of this job: its body may be read."""
        self.head.left = None
        self.server.proven(self.connection)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests: several arrive each second."""
