"""The control plane's HTTPS server: a thread for each connection, keep-alive, every length and wait bounded.

It checks requests, tokens and sizes; handlers do the rest. Clients pin the job's own certificate, and prove the key by
a token derived from it, a different one for each purpose. Errors become status codes, which the client turns back into
the same errors.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from pydantic import ValidationError

from shoal_trainer.contract import STATUS_PATH, Message
from shoal_trainer.coordinator.protocol import MAX_BODY, MAX_FILE, MAX_JOIN, PURPOSE, REQUESTS
from shoal_trainer.errors import Fenced, Overtaken, ProtocolError, Unauthorized, Unreachable, UserError
from shoal_trainer.ps.server import RefusalLog
from shoal_trainer.security import Credentials

log = logging.getLogger(__name__)

SECONDS = 30.0
"""An idle connection is closed after this time; also the timeout of one read (slow-loris)."""
HANDSHAKE_SECONDS = 5.0
PROOF_SECONDS = 15.0
"""A connection without a request with a valid token is closed after this time, even if it sends data."""
MAX_CONNECTIONS = 4096
"""Each worker has two, and a third for the files of a task: enough for 1000 workers and their replacements."""
MAX_UNPROVEN = 512
"""Connections without a request with a valid token yet."""
CHUNK = 1 << 20

CODES: Mapping[type[Exception], HTTPStatus] = {
    Unauthorized: HTTPStatus.UNAUTHORIZED,
    Fenced: HTTPStatus.CONFLICT,
    Overtaken: HTTPStatus.GONE,
    UserError: HTTPStatus.UNPROCESSABLE_ENTITY,
    ProtocolError: HTTPStatus.BAD_REQUEST,
    Unreachable: HTTPStatus.SERVICE_UNAVAILABLE,
}

Handler = Callable[[Any], Message]
Upload = Callable[[int, int, tuple[int, int], str, Iterator[bytes]], None]
"""(slot, incarnation, task's token, name, chunks): writes one file of a task."""


class ControlServer:
    """Serves `handlers` (by the names of `protocol.REQUESTS`), `status` and `upload` on `host`:`port`."""

    def __init__(
        self,
        credentials: Credentials,
        handlers: Mapping[str, Handler],
        *,
        host: str,
        port: int = 0,
        status: Callable[[], Message] | None = None,
        upload: Upload | None = None,
        proof_seconds: float = PROOF_SECONDS,
    ) -> None:
        self.credentials = credentials
        self.handlers = dict(handlers)
        self.status = status
        self.upload = upload
        self.proof_seconds = proof_seconds
        self._server = _Server((host, port), self)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="control", daemon=True
        )

    def start(self) -> None:
        """Start to accept."""
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, and end all connections."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(5)
        self._server.server_close()
        self._server.end_connections()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], control: ControlServer) -> None:
        self.control = control
        self.refusals = RefusalLog(time.monotonic)
        self._context = control.credentials.server_context()
        self._open: dict[ssl.SSLSocket, float] = {}  # until when a valid token must have come
        self._open_lock = threading.Lock()
        self._places = self._unproven = 0
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Connection)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The TLS handshake runs in the connection's thread: a client that stalls delays no other."""
        with self._open_lock:
            full = self._places >= MAX_CONNECTIONS or self._unproven >= MAX_UNPROVEN
            if not full:
                self._places, self._unproven = self._places + 1, self._unproven + 1
        if full:
            self.refusals.refused(str(client_address[0]), "too many connections")
            self.shutdown_request(request)
            return
        until = 0.0
        try:
            request.settimeout(HANDSHAKE_SECONDS)
            try:
                secured = self._context.wrap_socket(request, server_side=True)
            except (ssl.SSLError, OSError) as error:
                self.refusals.refused(str(client_address[0]), f"no TLS: {error}")
                self.shutdown_request(request)
                return
            secured.settimeout(SECONDS)
            with self._open_lock:
                self._open[secured] = time.monotonic() + self.control.proof_seconds
            try:
                super().process_request_thread(secured, client_address)
            finally:
                with self._open_lock:
                    until = self._open.pop(secured)
        finally:
            with self._open_lock:
                self._places -= 1
                self._unproven -= until != math.inf

    def proven(self, connection: ssl.SSLSocket) -> None:
        """A request with a valid token arrived on this connection."""
        with self._open_lock:
            self._unproven -= self._open[connection] != math.inf
            self._open[connection] = math.inf

    def service_actions(self) -> None:
        """Called several times a second: close the connections that did not prove themselves in time."""
        self.end_connections(by=time.monotonic())

    def end_connections(self, by: float = math.inf) -> None:
        """Close the connections whose proof was due by this time."""
        with self._open_lock:
            connections = [connection for connection, until in self._open.items() if until <= by]
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Broken connections are normal; anything else (no thread is left) is logged as a refusal."""
        if not isinstance(error := sys.exception(), OSError):
            self.refusals.refused(str(client_address[0]), error)
        log.debug("a control connection from %s broke", client_address, exc_info=True)


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "shoal"
    sys_version = ""
    # Send an answer as one segment. As two, the second waits until the client's kernel acknowledges the first, up to
    # 40 ms: a worker that leases two batches at a time could do no more than 50 steps a second.
    wbufsize = -1
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        """The status."""

        def answer() -> Message:
            if self.path != STATUS_PATH or self.server.control.status is None:
                raise ProtocolError(f"unknown path {self.path}")
            self._authorize("status")
            return self.server.control.status()

        self._reply(answer)

    def do_POST(self) -> None:
        """One request of `protocol`."""

        def answer() -> Message:
            self._authorize(PURPOSE)
            name = self.path.removeprefix("/v1/")
            handler = self.server.control.handlers.get(name)
            if handler is None:
                raise ProtocolError(f"unknown path {self.path}")
            body = self.rfile.read(self._length(MAX_JOIN if name == "join" else MAX_BODY))
            try:
                request = REQUESTS[name].model_validate_json(body)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"])
                raise ProtocolError(f"not a valid request {name}: {where}: {first['msg']}") from None
            return handler(request)

        self._reply(answer)

    def do_PUT(self) -> None:
        """A file of a task: `/v1/files/<slot>/<incarnation>/<term>/<counter>/<name>`."""

        def answer() -> Message:
            self._authorize(PURPOSE)
            upload = self.server.control.upload
            parts = self.path.removeprefix("/v1/files/").split("/", 4)
            if upload is None or len(parts) != 5 or not all(part.isdecimal() for part in parts[:4]):
                raise ProtocolError(f"unknown path {self.path[:200]}")
            slot, incarnation, term, counter = (int(part) for part in parts[:4])
            upload(slot, incarnation, (term, counter), safe_name(unquote(parts[4])), self._chunks())
            return Message()

        self._reply(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests: several arrive each second."""

    # ---

    def _reply(self, answer: Callable[[], Message]) -> None:
        status, body = HTTPStatus.OK, b""
        try:
            body = answer().to_json().encode()
        except tuple(CODES) as error:
            status = next(code for kind, code in CODES.items() if isinstance(error, kind))
            body = str(error).encode()[:4096]
            if isinstance(error, ProtocolError):
                self.server.refusals.refused(str(self.client_address[0]), error)
            self.close_connection = True  # a body may be left unread
        except (OSError, ssl.SSLError):
            self.close_connection = True
            return
        except Exception:
            log.exception("a control request %s failed", self.path[:200])
            status, self.close_connection = HTTPStatus.INTERNAL_SERVER_ERROR, True
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json" if status is HTTPStatus.OK else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

    def _authorize(self, purpose: str) -> None:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not self.server.control.credentials.token_matches(purpose, token.strip()):
            raise Unauthorized("no valid token for this job")
        self.server.proven(self.connection)

    def _length(self, most: int) -> int:
        text = self.headers.get("Content-Length", "")
        if not text.isdecimal() or int(text) > most:
            raise ProtocolError(f"Content-Length must be a number of at most {most} bytes")
        return int(text)

    def _chunks(self) -> Iterator[bytes]:
        left = self._length(MAX_FILE)
        while left:
            chunk = self.rfile.read(min(CHUNK, left))
            if not chunk:
                raise Unreachable("the upload broke off")
            left -= len(chunk)
            yield chunk


def safe_name(name: str) -> str:
    """The name, if it is relative and stays below its folder; `ProtocolError` otherwise."""
    parts = name.split("/")
    if not name or len(name) > 512 or name.startswith("/") or "\\" in name or "\0" in name:
        raise ProtocolError("not a file name")
    if any(part in {"", ".", ".."} for part in parts):
        raise ProtocolError("not a file name")
    return name
