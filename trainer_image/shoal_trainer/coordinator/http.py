"""The control plane's HTTPS server: a thread for each connection, keep-alive, every length and wait bounded.

It checks requests, tokens and sizes. Clients pin the job's certificate and authenticate with a token derived from the
job's key, one per purpose. Errors become status codes, which the client converts back.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import IO, Any
from urllib.parse import unquote

from pydantic import ValidationError

from shoal_trainer.contract import STATUS_PATH, Message
from shoal_trainer.coordinator.bounded_http import BoundedHandler
from shoal_trainer.coordinator.protocol import (
    CODE,
    FILES,
    MAX_BODY,
    MAX_FILE,
    MAX_JOIN,
    PURPOSE,
    REQUESTS,
    Done,
)
from shoal_trainer.errors import (
    BadName,
    FaultyDevice,
    Fenced,
    Overtaken,
    ProtocolError,
    Unauthorized,
    Unreachable,
    UserError,
)
from shoal_trainer.security import Credentials
from shoal_trainer.wire.gate import Visit
from shoal_trainer.wire.listener import Listener

log = logging.getLogger(__name__)

SECONDS = 30.0
"""An idle connection is closed after this time; also the timeout of one read (slow-loris)."""
PROOF_SECONDS = 15.0
"""A connection without a request with a valid token is closed after this time, even if it sends data."""
MAX_CONNECTIONS = 4096
"""Each worker has two, and a third for task files: enough for 1000 workers and their replacements."""
MAX_UNPROVEN = 64
"""Connections without a request with a valid token yet."""
CHUNK = 1 << 20
DISCARD_SECONDS = 600.0
"""The rest of a refused upload is read and discarded for at most this time, which is how long clients wait."""

CODES: Mapping[type[Exception], HTTPStatus] = {
    Unauthorized: HTTPStatus.UNAUTHORIZED,
    Fenced: HTTPStatus.CONFLICT,
    Overtaken: HTTPStatus.GONE,
    BadName: HTTPStatus.NOT_ACCEPTABLE,  # before its base class
    UserError: HTTPStatus.UNPROCESSABLE_ENTITY,
    FaultyDevice: HTTPStatus.FAILED_DEPENDENCY,
    ProtocolError: HTTPStatus.BAD_REQUEST,
    Unreachable: HTTPStatus.SERVICE_UNAVAILABLE,
}

Handler = Callable[[Any], Message | None]
"""Of one kind of request; None: nothing to say."""
Upload = Callable[[int, int, tuple[int, int], str, Iterator[bytes]], None]
"""(slot, incarnation, task's token, name, chunks): writes one file of a task."""
Content = tuple[int, IO[bytes]]
"""The size of a file, and its content."""
Download = Callable[[int, int, tuple[int, int], str], contextlib.AbstractContextManager[Content]]
"""(slot, incarnation, task's token, name): opens a file of an earlier task."""
Code = Callable[[], contextlib.AbstractContextManager[Content]]
"""Opens the job's code."""


class ControlServer:
    """Serves `handlers` (by the names of `protocol.REQUESTS`), `status` and files of tasks on `host`:`port`.

    `waits_for`: why it answers no request yet, which it says instead; empty: it answers all.
    """

    def __init__(
        self,
        credentials: Credentials,
        handlers: Mapping[str, Handler],
        *,
        host: str,
        port: int = 0,
        status: Callable[[], Message] | None = None,
        upload: Upload | None = None,
        download: Download | None = None,
        code: Code | None = None,
        waits_for: Callable[[], str] = lambda: "",
        proof_seconds: float = PROOF_SECONDS,
    ) -> None:
        self.credentials = credentials
        self.handlers = dict(handlers)
        self.status = status
        self.upload = upload
        self.download = download
        self.code = code
        self.waits_for = waits_for
        self.listener = Listener(
            "control",
            host,
            port,
            lambda sock, visit: _Connection(sock, visit, self),
            unproven=MAX_UNPROVEN,
            connections=MAX_CONNECTIONS,
            proof_seconds=proof_seconds,
            context=credentials.server_context(),
        )
        self.port: int = self.listener.port

    def start(self) -> None:
        """Start accepting connections."""
        self.listener.start()

    def close(self) -> None:
        """Stop accepting connections, and close all."""
        self.listener.close()


class _Connection(BoundedHandler, BaseHTTPRequestHandler):
    timeout = SECONDS
    _unread = 0
    """Bytes of an upload that have not been read."""

    def __init__(self, sock: socket.socket, visit: Visit, control: ControlServer) -> None:
        self._control = control
        super().__init__(sock, visit, control.listener)

    def do_GET(self) -> None:
        """The status, the job's code, or a file of an earlier task under the path of `do_PUT`."""
        status = self._control.status
        if self.path != STATUS_PATH or status is None:
            with contextlib.ExitStack() as opened:
                self._reply(lambda: opened.enter_context(self._opened()))
            return

        def answer() -> Message:
            self._authorize("status")
            self._answers()
            return status()

        self._reply(answer)

    def do_POST(self) -> None:
        """One request of `protocol`."""

        def answer() -> Message:
            self._authorize(PURPOSE)
            name = self.path.removeprefix("/v1/")
            body = self.rfile.read(self._length(MAX_JOIN if name == "join" else MAX_BODY))
            self._answers()
            handler = self._control.handlers.get(name)
            if handler is None:
                raise self._unknown()
            try:
                request = REQUESTS[name].model_validate_json(body)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"])
                raise ProtocolError(f"not a valid request {name}: {where}: {first['msg']}") from None
            return handler(request) or Done()

        self._reply(answer)

    def do_PUT(self) -> None:
        """A file of a task."""

        def answer() -> Message:
            self._authorize(PURPOSE)
            self._answers()
            self._unread = self._length(MAX_FILE)
            if (upload := self._control.upload) is None:
                raise self._unknown()
            upload(*self._file(), self._chunks())
            return Done()

        self._reply(answer)

    def _opened(self) -> contextlib.AbstractContextManager[Content]:
        self._authorize(PURPOSE)
        self._answers()
        control = self._control
        if self.path == CODE and control.code is not None:
            return control.code()
        if (download := control.download) is None or self.path == CODE:
            raise self._unknown()
        return download(*self._file())

    def _file(self) -> tuple[int, int, tuple[int, int], str]:
        """(slot, incarnation, token, name) of the path; see `protocol.FILES`."""
        parts = self.path.removeprefix(FILES).split("/", 4)
        if len(parts) != 5 or not all(map(is_number, parts[:4])):
            raise self._unknown()
        slot, incarnation, term, counter = (int(part) for part in parts[:4])
        return slot, incarnation, (term, counter), safe_name(unquote(parts[4]))

    def _unknown(self) -> ProtocolError:
        return ProtocolError(f"unknown path {self.path[:200]!r}")

    # ---

    def _reply(self, answer: Callable[[], Message | Content]) -> None:
        status, body, content = HTTPStatus.OK, b"", None
        try:
            answered = answer()
            if isinstance(answered, Message):
                body = answered.to_json().encode()
            else:
                content = answered
        except tuple(CODES) as error:
            status = next(code for kind, code in CODES.items() if isinstance(error, kind))
            body = str(error).encode()[:4096]
            if isinstance(error, ProtocolError):
                self.listener.refusals.refused(self._visit.address, error)
            # A body may be left unread. That of a POST was read before `Unreachable`, and each worker tries again in a
            # second: a handshake for each would take the processor from what they wait for.
            if self.command == "PUT" or not isinstance(error, Unreachable):
                self.close_connection = True
            self._discard()
        except (OSError, ssl.SSLError):
            self.close_connection = True
            return
        except Exception:
            log.exception("a control request %s failed", self.path[:200])
            status, self.close_connection = HTTPStatus.INTERNAL_SERVER_ERROR, True
        with contextlib.suppress(OSError):
            self.send_response(status)
            kind = "application/json" if status is HTTPStatus.OK else "text/plain"
            self.send_header("Content-Type", kind if content is None else "application/octet-stream")
            self.send_header("Content-Length", str(len(body) if content is None else content[0]))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            if content is None:
                self.wfile.write(body)
            else:
                self._stream(content)

    def _stream(self, content: Content) -> None:
        """Send a file. If it cannot be read to its end, the connection is closed, and the client sees that it lacks."""
        unsent, handle = content
        while unsent:
            try:
                chunk = handle.read(min(CHUNK, unsent))
            except Exception as error:  # each object store raises its own classes
                log.warning("%s cannot be read: %r", self.path[:200], error)
                chunk = b""
            if not chunk:
                self.close_connection = True
                return
            self.wfile.write(chunk)
            unsent -= len(chunk)

    def _authorize(self, purpose: str) -> None:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not self._control.credentials.token_matches(purpose, token.strip()):
            raise Unauthorized("no valid token for this job")
        self.prove()

    def _answers(self) -> None:
        """`Unreachable` while this server answers no request yet."""
        if why := self._control.waits_for():
            raise Unreachable(why)

    def _length(self, limit: int) -> int:
        text = self.headers.get("Content-Length", "")
        if not is_number(text) or int(text) > limit:
            raise ProtocolError(f"Content-Length is {text[:20]!r}, not a number of at most {limit} bytes")
        return int(text)

    def _chunks(self) -> Iterator[bytes]:
        while self._unread:
            chunk = self.rfile.read(min(CHUNK, self._unread))
            if not chunk:
                raise Unreachable(f"the upload ended {self._unread} bytes early")
            self._unread -= len(chunk)
            yield chunk

    def _discard(self) -> None:
        """Read the rest of a refused upload.

        Its client reads the answer after it has sent everything; if the connection were closed before, it would be
        reset, and the client would send the file again and again.
        """
        by = time.monotonic() + DISCARD_SECONDS
        with contextlib.suppress(OSError):
            while self._unread and time.monotonic() < by:
                chunk = self.rfile.read1(min(CHUNK, self._unread))
                if not chunk:
                    return
                self._unread -= len(chunk)


def is_number(text: str) -> bool:
    """Whether these are digits, and no more of them than a number of this protocol has."""
    return text.isdecimal() and len(text) <= 20


def safe_name(name: str) -> str:
    """The name, if it is a relative path without `..`; `ProtocolError` otherwise."""
    invalid = len(name) > 512 or "\\" in name or "\0" in name
    if invalid or any(part in {"", ".", ".."} for part in name.split("/")):
        raise ProtocolError(f"{name[:200]!r} is not a relative file name")
    return name
