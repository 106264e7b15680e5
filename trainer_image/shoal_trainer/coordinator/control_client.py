"""Clients of the control plane: one request at a time over a persistent connection.

The server's errors keep their type: `Fenced`, `UserError`, `Unauthorized`, `ProtocolError`; a temporary failure is
`Unreachable`. Callers retry. Thread-safe.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import quote

from pydantic import ValidationError

from shoal_trainer.contract import Message, Shard, ShardReport
from shoal_trainer.coordinator.http import CHUNK, CODES
from shoal_trainer.coordinator.protocol import (
    FILES,
    PURPOSE,
    REQUESTS,
    Alive,
    AskPushes,
    AskReport,
    Assignment,
    Caller,
    Done,
    FenceWorkers,
    Heartbeat,
    Join,
    Joined,
    Next,
    Pushes,
    RollBackShard,
    SnapshotShard,
    UnsentFiles,
)
from shoal_trainer.errors import DiskFull, ProtocolError, TrainerError, Unreachable, has_no_room
from shoal_trainer.ps.contents import Span, Worker
from shoal_trainer.security import Credentials
from shoal_trainer.snapshot.manifest import ShardFile
from shoal_trainer.wire.channel import enable_keepalive

M = TypeVar("M", bound=Message)
A = TypeVar("A")
R = TypeVar("R")
SECONDS = 10.0
CONNECT_SECONDS = 5.0
SHORTEST = 0.001
"""Seconds: a socket takes 0 for one that does not wait."""
UPLOAD_SECONDS = 600.0
"""Of another shard's part of a snapshot, for so long that nothing of it is written."""
POLL_SECONDS = 5.0
"""Between questions whether a part that takes longer is written."""
SHARD_SECONDS = 2.0
"""Timeout of another shard's answer to what it can answer at once."""
ROLL_BACK_SECONDS = 30.0
"""Timeout of another shard's rollback; then it is asked again."""
MAX_ANSWER = 64 << 20
NAMES = {kind: name for name, kind in REQUESTS.items()}
_ERRORS: Mapping[int, type[Exception]] = {int(code): kind for kind, code in CODES.items()}


class _Connection(http.client.HTTPSConnection):
    """Detects a dead peer by keepalive, and connects in seconds: the timeout of an upload or a snapshot is minutes."""

    def connect(self) -> None:
        timeout = self.timeout
        try:
            self.timeout = min(CONNECT_SECONDS, timeout or CONNECT_SECONDS)
            super().connect()
        finally:
            self.timeout = timeout
        self.sock.settimeout(timeout)
        enable_keepalive(self.sock)

    def within(self, seconds: float) -> None:
        """The timeout of the next request."""
        self.timeout = seconds
        if self.sock is not None:
            self.sock.settimeout(seconds)


class _OnDisk:
    """A file of this worker, which tells an error of its disk from one of the connection: both may be the same.

    A failed read is EIO mostly; a network file system gives ESTALE or ETIMEDOUT, a damaged one EUCLEAN or EBADMSG.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def read(self, size: int = -1) -> bytes:
        """As the file's."""
        return self._noted(self._file.read, size)

    def write(self, data: bytes) -> int:
        """As the file's."""
        return self._noted(self._file.write, data)

    def _noted(self, call: Callable[[A], R], argument: A) -> R:
        try:
            return call(argument)
        except OSError as error:
            self.error = error
            raise


class ControlClient:
    """Requests to one control server."""

    def __init__(self, address: Shard, credentials: Credentials, *, timeout: float = SECONDS) -> None:
        self._address = address
        self._context = credentials.client_context()
        self._headers = {"Authorization": f"Bearer {credentials.token(PURPOSE)}"}
        self._timeout = timeout
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._closed = False
        self._separate_ones: set[ControlClient] = set()

    def call(self, name: str, request: Message, answer: type[M], seconds: float | None = None) -> M:
        """POST one message and return the answer, which may take so many `seconds`."""
        with self._lock:
            timeout = self._timeout if seconds is None else seconds
            body = self._send("POST", f"/v1/{name}", request.to_json().encode(), timeout)
        try:
            return answer.model_validate_json(body)
        except ValidationError as error:
            raise ProtocolError(f"invalid answer to {name}: {error.errors()[0]['msg']}") from None

    def put(self, path: str, file: Path) -> None:
        """Stream one file over a separate connection, so that other requests continue."""
        with file.open("rb") as content, self._separate() as upload:
            upload._send("PUT", path, _OnDisk(content), UPLOAD_SECONDS, size=file.stat().st_size)

    def get(self, path: str, file: Path) -> None:
        """The reverse of `put`: write the answer to `file`. Raises `DiskFull` if it does not fit."""
        try:
            with file.open("wb") as content, self._separate() as download:
                download._send("GET", path, None, UPLOAD_SECONDS, into=_OnDisk(content))
        except OSError as error:
            if not has_no_room(error):
                raise
            raise DiskFull(
                f"{file.name} does not fit on the worker's disk: {error}. Raise ephemeral-storage in the resources of "
                "container worker (spec.workers.template)."
            ) from error

    def call_beside(self, name: str, request: Message, answer: type[M], timeout: float) -> M:
        """`call` over a separate connection: for what takes longer than other requests may wait."""
        with self._separate() as beside:
            return beside.call(name, request, answer, timeout)

    @contextlib.contextmanager
    def _separate(self) -> Iterator[ControlClient]:
        """A client of the same server with a connection of its own, which is closed with this one."""
        other = ControlClient.__new__(ControlClient)
        other.__dict__.update(self.__dict__, _lock=threading.Lock(), _connection=None, _separate_ones=set())
        self._separate_ones.add(other)
        if self._closed:  # meanwhile, by another thread
            other.close()
        try:
            yield other
        finally:
            self._separate_ones.discard(other)
            other.close()

    def close(self) -> None:
        """Close the connection for good, from any thread: a call in flight, and each that follows, is `Unreachable`."""
        # Before the connection is taken: what is opened meanwhile is closed by who opens it.
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            _shut(connection)
        for other in list(self._separate_ones):
            other.close()

    def _send(
        self,
        method: str,
        path: str,
        body: Any,
        timeout: float,
        *,
        size: int | None = None,
        into: _OnDisk | None = None,
    ) -> bytes:
        connection = self._connection
        fresh = connection is None
        if connection is None:
            connection = self._connection = _Connection(
                self._address.host, self._address.control_port, timeout=timeout, context=self._context
            )
        if self._closed:
            self._drop(connection)
            raise Unreachable("this client was closed")
        until = time.monotonic() + timeout
        try:
            connection.within(timeout)
            if connection.sock is None:
                connection.connect()
                connection.within(_left(until))
                if self._closed:
                    raise ConnectionAbortedError("this client was closed")
            headers = self._headers if size is None else {**self._headers, "Content-Length": str(size)}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            if into is not None and response.status == http.client.OK:
                shutil.copyfileobj(response, into, CHUNK)
            content = response.read(MAX_ANSWER)
            # `read` with a limit does not raise for a truncated body.
            if response.length and len(content) < MAX_ANSWER:
                raise http.client.IncompleteRead(content, response.length)
        except (
            OSError,
            http.client.HTTPException,
            AttributeError,
            ValueError,
        ) as error:  # AttributeError: `close` was called during the request; ValueError: a negative chunk size
            closed = self._connection is not connection
            self._drop(connection)
            lost = isinstance(error, ConnectionError | ssl.SSLEOFError)
            if lost and not closed and not fresh and size is None:
                return self._send(method, path, body, _left(until))  # the server closed the idle connection
            if any(error is disk.error for disk in (body, into) if isinstance(disk, _OnDisk)):
                raise
            where = f"{self._address.host}:{self._address.control_port}"
            raise Unreachable(f"the coordinator at {where} does not answer: {error!r}") from None
        if response.will_close or self._connection is not connection:
            self._drop(connection)
        if response.status == http.client.OK:
            return content
        kind = _ERRORS.get(response.status, Unreachable)
        assert issubclass(kind, TrainerError)
        raise kind(content.decode("utf-8", "replace") or f"HTTP {response.status}")

    def _drop(self, connection: _Connection) -> None:
        if self._connection is connection:
            self._connection = None
        _shut(connection)


def _left(until: float) -> float:
    return max(SHORTEST, until - time.monotonic())


def _shut(connection: http.client.HTTPSConnection) -> None:
    sock = connection.sock  # once: another thread may take it
    with contextlib.suppress(OSError):
        if sock is not None:  # wakes a thread that waits for an answer
            socket.socket.shutdown(sock, socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        connection.close()


class CoordinatorClient:
    """A worker's requests to the coordinator, as messages."""

    def __init__(
        self,
        address: Shard,
        credentials: Credentials,
        slot: int,
        incarnation: int,
        *,
        timeout: float = SECONDS,
    ) -> None:
        self._client = ControlClient(address, credentials, timeout=timeout)
        self._beats = ControlClient(address, credentials, timeout=timeout)
        self._goodbye = ControlClient(address, credentials)
        self.identity = {"slot": slot, "incarnation": incarnation}
        """The fields of `Caller`."""
        self._requests = 0
        self._term, self._generation, self._history = 0, 0, tuple[dict[str, float], ...]()
        """The logs of epochs, and which process told them for which generation: it tells the others only."""
        self._words = itertools.count(1)

    def join(self, request: Join) -> Joined:
        """Join; returns the new tokens of the leases that continue. A long list of files is sent if it is wanted."""
        brief = {"data": request.data.brief(), "number": next(self._words)}
        joined = self._client.call("join", request.model_copy(update=brief), Joined)
        if joined.wants_files:
            whole = request.model_copy(update={"number": next(self._words)})
            joined = self._client.call("join", whole, Joined)
        return joined

    def next_work(self, generation: int = 0, stopped: int | None = None) -> Assignment:
        """Request work; a call after `Unreachable` repeats the request. Not thread-safe.

        The history of what it returns is whole.
        """
        told = self._term, len(self._history) if generation == self._generation else 0
        request = Next(
            **self.identity, number=self._requests + 1, generation=generation, stopped=stopped, told=told
        )
        assignment = self._client.call("next", request, Assignment)
        self._requests += 1
        if not assignment.since and not assignment.history:
            return assignment
        self._term, self._generation = assignment.token[0], generation
        self._history = self._history[: assignment.since] + assignment.history
        return assignment.model_copy(update={"history": self._history, "since": 0})

    def heartbeat(self, beat: Heartbeat) -> Alive:
        """Send a heartbeat over a separate connection."""
        return self._beats.call("heartbeat", beat, Alive)

    def send(self, request: Caller, seconds: float | None = None) -> None:
        """Send what needs no answer; of a report of a non-finite batch it comes when shard 0 has rolled back.

        `seconds`: in all, beside requests under way, and after `end_requests`: this worker leaves.
        """
        if isinstance(request, UnsentFiles):
            request = request.model_copy(update={"number": next(self._words)})
        client = self._client if seconds is None else self._goodbye
        client.call(NAMES[type(request)], request, Done, seconds)

    def upload(self, token: tuple[int, int], name: str, file: Path) -> None:
        """Stream one file of a task."""
        self._client.put(self._file(token, name), file)

    def download(self, token: tuple[int, int], name: str, file: Path) -> bool:
        """Get a file that an earlier task of the run uploaded, for an export; False if there is none."""
        self._client.get(self._file(token, name), file)
        return file.stat().st_size > 0

    def _file(self, token: tuple[int, int], name: str) -> str:
        slot, incarnation = self.identity.values()
        return f"{FILES}{slot}/{incarnation}/{token[0]}/{token[1]}/{quote(name)}"

    def end_requests(self) -> None:
        """Requests and uploads under way, and those that follow, are `Unreachable`: this worker leaves now."""
        self._client.close()

    def close(self) -> None:
        """Close the connections."""
        for client in (self._client, self._beats, self._goodbye):
            client.close()


class ShardControl:
    """Requests from one parameter server to another."""

    def __init__(
        self,
        address: Shard,
        credentials: Credentials,
        *,
        timeout: float = SHARD_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = ControlClient(address, credentials, timeout=timeout)
        self._clock, self._sleep = clock, sleep

    def snapshot(self, number: int, epoch: int, published: int, generation: int = 0) -> ShardFile:
        """Make a shard write its part of a snapshot, however long it takes; `published`: see `SnapshotShard`."""
        request = SnapshotShard(number=number, epoch=epoch, published=published, generation=generation)
        began = self._clock()
        try:
            return self._client.call_beside("snapshot", request, ShardFile, UPLOAD_SECONDS)
        except Unreachable:
            if self._clock() - began < UPLOAD_SECONDS:
                raise
            while 0 < self._idle_seconds() < UPLOAD_SECONDS:
                self._sleep(POLL_SECONDS)
            again = request.model_copy(update={"again": True})
            return self._client.call_beside("snapshot", again, ShardFile, SECONDS)

    def _idle_seconds(self) -> float:
        """See `ShardReport`."""
        report = self._client.call_beside("report", AskReport(), ShardReport, SECONDS)
        return report.snapshot_idle_seconds

    def roll_back(self, generation: int) -> None:
        """Make a shard roll back to the snapshot with which this generation begins."""
        self._client.call_beside("roll-back", RollBackShard(generation=generation), Done, ROLL_BACK_SECONDS)

    def pushes(self, wanted: Sequence[Span]) -> Pushes:
        """Ask a shard for the pushes that it holds, and for the journal entries of the `wanted` ones."""
        return self._client.call("pushes", AskPushes(wanted=tuple(wanted)), Pushes)

    def report(self) -> ShardReport:
        """Ask a shard for its entry in the status report."""
        return self._client.call("report", AskReport(), ShardReport)

    def fence(self, epoch: int, older: Sequence[Worker], left: Sequence[Worker]) -> None:
        """Tell a shard which workers to refuse. `Fenced` if PS 0 was replaced since this `epoch`."""
        self._client.call("fence", FenceWorkers(epoch=epoch, older=tuple(older), left=tuple(left)), Done)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
