"""The side of the control plane that asks: one request at a time over one kept connection.

Errors come back as they were raised: `Fenced`, `UserError`, `Unauthorized`, `ProtocolError`; everything that time may
mend is `Unreachable`. Nothing is retried here. Calls may come from any thread.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import ValidationError

from shoal_trainer.contract import Message, Shard
from shoal_trainer.coordinator.http import CODES
from shoal_trainer.coordinator.protocol import (
    MAX_TEXT,
    PURPOSE,
    Alive,
    AskPushes,
    DataSpec,
    Diverged,
    Done,
    Failed,
    FileEnded,
    Given,
    Heartbeat,
    Join,
    Joined,
    Lease,
    Leave,
    Next,
    Pushes,
    RollBackShard,
    ShardReady,
    SnapshotShard,
    TaskDone,
)
from shoal_trainer.errors import ProtocolError, TrainerError, Unreachable
from shoal_trainer.ps.contents import Span
from shoal_trainer.security import Credentials
from shoal_trainer.snapshot.manifest import ShardFile
from shoal_trainer.wire.channel import enable_keepalive
from shoal_trainer.wire.messages import Progress

M = TypeVar("M", bound=Message)
SECONDS = 10.0
UPLOAD_SECONDS = 600.0
MAX_ANSWER = 64 << 20
_ERRORS: Mapping[int, type[Exception]] = {int(code): kind for kind, code in CODES.items()}


class _Connection(http.client.HTTPSConnection):
    """An upload or a snapshot may take minutes: its time-out is no way to see that the peer's machine is gone."""

    def connect(self) -> None:
        super().connect()
        enable_keepalive(self.sock)


class ControlClient:
    """Requests to one control server."""

    def __init__(self, address: Shard, credentials: Credentials, *, timeout: float = SECONDS) -> None:
        self._address = address
        self._context = credentials.client_context()
        self._headers = {"Authorization": f"Bearer {credentials.token(PURPOSE)}"}
        self._timeout = timeout
        self._lock = threading.Lock()
        self._connection: http.client.HTTPSConnection | None = None

    def call(self, name: str, request: Message, answer: type[M]) -> M:
        """POST one message; the answer."""
        with self._lock:
            body = self._send("POST", f"/v1/{name}", request.to_json().encode(), self._timeout)
        try:
            return answer.model_validate_json(body)
        except ValidationError as error:
            raise ProtocolError(f"the answer to {name} cannot be read: {error.errors()[0]['msg']}") from None

    def put(self, path: str, file: Path) -> None:
        """Stream one file, over a connection of its own: it may take long, and heartbeats go on beside it."""
        other = ControlClient.__new__(ControlClient)
        other.__dict__.update(self.__dict__, _lock=threading.Lock(), _connection=None)
        with file.open("rb") as content:
            try:
                other._send("PUT", path, content, UPLOAD_SECONDS, size=file.stat().st_size)
            finally:
                other.close()

    def close(self) -> None:
        """Close the connection, from any thread: a call that is under way ends; the next one opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            _shut(connection)

    def _send(self, method: str, path: str, body: Any, timeout: float, *, size: int | None = None) -> bytes:
        connection = self._connection
        fresh = connection is None
        if connection is None:
            connection = self._connection = _Connection(
                self._address.host, self._address.control_port, timeout=timeout, context=self._context
            )
        try:
            headers = self._headers if size is None else {**self._headers, "Content-Length": str(size)}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            content = response.read(MAX_ANSWER)
            # `read` does not mind a server that is gone in the middle of its answer.
            if response.length and len(content) < MAX_ANSWER:
                raise http.client.IncompleteRead(content, response.length)
        except (
            OSError,
            http.client.HTTPException,
            AttributeError,
        ) as error:  # the last: closed in the middle
            closed = self._connection is not connection  # from another thread: no reason to open one
            self._drop(connection)
            lost = isinstance(error, ConnectionError | ssl.SSLEOFError)
            if lost and not closed and not fresh and size is None:
                return self._send(method, path, body, timeout)  # the server closed a connection that was idle
            where = f"{self._address.host}:{self._address.control_port}"
            raise Unreachable(f"the coordinator at {where} does not answer: {error!r}") from None
        if response.will_close or self._connection is not connection:
            self._drop(connection)
        if response.status == http.client.OK:
            return content
        kind = _ERRORS.get(response.status, Unreachable)
        assert issubclass(kind, TrainerError)
        raise kind(content.decode("utf-8", "replace") or f"HTTP {response.status}")

    def _drop(self, connection: http.client.HTTPSConnection) -> None:
        if self._connection is connection:
            self._connection = None
        _shut(connection)


def _shut(connection: http.client.HTTPSConnection) -> None:
    with contextlib.suppress(OSError):
        connection.close()


class CoordinatorClient:
    """One incarnation of one slot, towards the coordinator."""

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
        self._who = {"slot": slot, "incarnation": incarnation}
        self._asked = 0

    def join(
        self,
        data: DataSpec,
        batch_size: int,
        *,
        node: str = "",
        pool: str = "",
        held: tuple[Lease, ...] = (),
        generation: int = 0,
        wasted_steps: int = 0,
        wasted_told: int = 0,
    ) -> Joined:
        """Say hello; which of the held leases go on, under which tokens."""
        request = Join(
            **self._who,
            data=data,
            batch_size=batch_size,
            node=node,
            pool=pool,
            held=held,
            generation=generation,
            wasted_steps=wasted_steps,
            wasted_told=wasted_told,
        )
        return self._client.call("join", request, Joined)

    def next_work(self, generation: int = 0) -> Given:
        """Ask for something to do; after `Unreachable`, for the same. Not for two threads."""
        request = Next(**self._who, number=self._asked + 1, generation=generation)
        given = self._client.call("next", request, Given)
        self._asked += 1
        return given

    def diverged(self, generation: int, batch: Progress, what: str) -> None:
        """Tell that this batch cannot be trained; once it is answered, shard 0 has gone back."""
        place = dict(zip(Progress._fields, batch, strict=True))
        request = Diverged(**self._who, generation=generation, what=what, **place)
        self._client.call("diverged", request, Done)

    def heartbeat(self, message: str = "") -> bool:
        """Report that this worker is alive, on a separate connection; whether the job has finished."""
        return self._beats.call("heartbeat", Heartbeat(**self._who, message=message), Alive).finished

    def file_ended(self, token: tuple[int, int], length: int) -> None:
        """Tell the length of a leased file."""
        self._client.call("file-ended", FileEnded(**self._who, token=token, length=length), Done)

    def upload(self, token: tuple[int, int], name: str, file: Path) -> None:
        """Stream one file of a task."""
        who = f"{self._who['slot']}/{self._who['incarnation']}/{token[0]}/{token[1]}"
        self._client.put(f"/v1/files/{who}/{quote(name)}", file)

    def task_done(
        self,
        token: tuple[int, int],
        metrics: Mapping[str, float],
        files: tuple[str, ...],
        *,
        stop: bool = False,
        message: str = "",
    ) -> None:
        """Give back a task, after its files were uploaded."""
        request = TaskDone(
            **self._who,
            token=token,
            metrics=dict(metrics),
            files=files,
            stop=stop,
            message=message[:MAX_TEXT],
        )
        self._client.call("task-done", request, Done)

    def leave(self) -> None:
        """Say goodbye."""
        self._client.call("leave", Leave(**self._who), Done)

    def failed(self, message: str) -> None:
        """Tell that the user's code is at fault."""
        self._client.call("failed", Failed(**self._who, message=message[:MAX_TEXT]), Done)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._beats.close()


class ShardControl:
    """Parameter servers among each other."""

    def __init__(self, address: Shard, credentials: Credentials, *, timeout: float = UPLOAD_SECONDS) -> None:
        self._client = ControlClient(address, credentials, timeout=timeout)

    def snapshot(self, number: int, epoch: int, published: int, generation: int = 0) -> ShardFile:
        """Have a shard write its part of a snapshot; `published`: see `SnapshotShard`."""
        request = SnapshotShard(number=number, epoch=epoch, published=published, generation=generation)
        return self._client.call("snapshot", request, ShardFile)

    def roll_back(self, generation: int) -> None:
        """Have a shard go back to the snapshot with which this generation begins."""
        self._client.call("roll-back", RollBackShard(generation=generation), Done)

    def pushes(self, of: Sequence[Span]) -> Pushes:
        """Ask a shard which pushes are in it, and what those of `of` cover."""
        return self._client.call("pushes", AskPushes(of=tuple(of)), Pushes)

    def shard_ready(self, index: int, epoch: int) -> None:
        """Tell the coordinator that a shard came back."""
        self._client.call("shard-ready", ShardReady(index=index, epoch=epoch), Done)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
