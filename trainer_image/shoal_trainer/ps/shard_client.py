"""A worker's connection to one shard: requests, answers, and the errors that the server sends."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal_trainer.contract import Shard
from shoal_trainer.errors import Fenced, ProtocolError, Unreachable, UserError
from shoal_trainer.ps import kernels
from shoal_trainer.ps.aligned import aligned, octets
from shoal_trainer.ps.coding import place
from shoal_trainer.ps.pieces import Payload, parts, section
from shoal_trainer.security import Credentials
from shoal_trainer.wire import handshake, header
from shoal_trainer.wire.channel import MIN_RATE, Channel
from shoal_trainer.wire.header import ASK, Codec, ErrorCode, Header, Op
from shoal_trainer.wire.messages import WorkerIdentity

log = logging.getLogger(__name__)

ASK_BYTES = 4 << 20
"""The client asks before it sends a longer payload: a server may have memory for few of them."""
PIECE = 1 << 17
"""Values that are received and decoded at a time, so that they are decoded while still in the CPU cache."""


@dataclass(slots=True)
class _Link:
    channel: Channel
    server: handshake.Server


class Target(NamedTuple):
    """Where `size` values go that come in `codec`, the first of which are `trainable`: an array, fp32 or coded."""

    array: NDArray[Any]
    size: int
    trainable: int
    codec: Codec

    @property
    def as_sent(self) -> bool:
        """Whether the array takes them as they come."""
        return self.array.dtype == self.codec.dtype

    @property
    def nbytes(self) -> int:
        """The bytes that come."""
        return self.place(self.size) * self.codec.itemsize

    def place(self, value: int) -> int:
        """See `coding`."""
        return place(value, self.trainable, self.codec.dtype)

    def part(self, low: int, high: int) -> Target:
        """That of the values [low, high)."""
        first, last = (self.place(low), self.place(high)) if self.as_sent else (low, high)
        return Target(self.array[first:last], high - low, max(0, self.trainable - low), self.codec)


class ShardClient:
    """The connection to one shard. `minimum_epoch`: the newest epoch that answered at its address."""

    def __init__(
        self,
        index: int,
        address: Shard,
        identity: WorkerIdentity,
        credentials: Credentials,
        *,
        tls: bool = False,
        connect_timeout: float = 3.0,
        timeout: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self.minimum_epoch = 0
        self._address = address
        self._identity = identity
        self._credentials = credentials
        self._tls = tls
        self._connect_timeout = connect_timeout
        self._timeout = timeout
        self._clock = clock
        self._link: _Link | None = None
        self._unasked: tuple[Header, bytes, Payload] | None = None
        """The request that was sent with its payload, until it is answered."""
        self._piece = aligned(0, np.uint16)

    @property
    def server(self) -> handshake.Server:
        """The (epoch, boot) of the connected server."""
        return self._connected().server

    def connect(self) -> None:
        """Open a connection and authenticate. `Unreachable`, or `Fenced` if this worker was replaced.

        Who answers as another than this shard is a stranger, to whom a lost server's address belongs for a while: the
        worker has met its own job's server 0 over the control plane.
        """
        self.close()
        address = (self._address.host, self._address.data_port)
        try:
            sock = socket.create_connection(address, timeout=self._connect_timeout)
        except OSError as error:
            raise Unreachable(f"shard {self.index} at {address[0]}:{address[1]}: {error}") from None
        binding = b""
        try:
            if self._tls:
                sock = self._credentials.client_context().wrap_socket(sock)
                binding = self._credentials.certificate_digest()
            channel = Channel(sock, timeout=self._timeout, clock=self._clock)
        except OSError as error:
            sock.close()
            raise Unreachable(f"shard {self.index}: TLS: {error}") from None
        peer = handshake.Peer(self.index, self._identity.slot, self._identity.incarnation, self.minimum_epoch)
        try:
            server = handshake.connect(
                channel, self._credentials, self._identity.job_uid, peer, binding=binding
            )
        except ProtocolError as error:
            channel.close()
            raise Unreachable(f"shard {self.index} at {address[0]}:{address[1]}: {error}") from None
        except BaseException:
            channel.close()
            raise
        self.minimum_epoch = server.epoch
        self._link = _Link(channel, server)

    def send(self, request: Header, meta: bytes = b"", payload: Payload | None = None) -> int:
        """Send one request; read its answer with `receive`.

        If the client `asks`, the payload is left for `send_payload`, and the server is ready for it.
        Returns the bytes of a piece if the server answers it piece by piece, else 0.
        """
        link = self._connected()
        length = 0 if payload is None else payload.size * request.codec.itemsize
        complete = request._replace(
            shard=self.index,
            slot=self._identity.slot,
            incarnation=self._identity.incarnation,
            boot=link.server.boot,
            meta=len(meta),
            length=length,
        )
        if asks(length):
            return self._ask(link.channel, complete, meta)
        body = [] if payload is None else [octets(values) for _, values in parts(payload)]
        link.channel.send(header.encode(complete) + meta, *body)
        self._unasked = None if payload is None else (complete, meta, payload)
        return 0

    def send_payload(self, payload: Payload) -> None:
        """Send the payload of a request, or a part of it, in the pieces that it has."""
        for _, values in parts(payload):
            self._connected().channel.send(octets(values))

    def receive(self, expected: Op, out: Target | None = None) -> tuple[Header, bytearray]:
        """The answer's header and meta block; its payload is written to `out`."""
        size = 0 if out is None else out.nbytes
        answer, meta = self._next(size, expected, Op.STREAM)
        if out is not None:
            self.receive_payload(out)
        if answer.op is Op.STREAM:
            answer, meta = self._next(0, expected)
        return answer, meta

    def exchange(self, piece: int, payload: Payload, expected: Op, out: Target) -> tuple[Header, bytearray]:
        """Send the payload of a request, and receive its answer as `receive` does, piece by piece from one thread."""
        self._next(out.nbytes, Op.STREAM)
        for low in range(0, out.size, piece):
            high = min(out.size, low + piece)
            self.send_payload(section(payload, out.place(low), out.place(high)))
            self.receive_payload(out.part(low, high))
        return self._next(0, expected)

    def receive_payload(self, out: Target) -> None:
        """Receive a payload, or a part of it."""
        channel = self._connected().channel
        if out.as_sent:
            channel.receive(octets(out.array))
            return
        trainable = min(out.trainable, out.size)
        self._receive_decoded(channel, out.array[:trainable])
        if trainable < out.size:
            if trainable % 2:
                channel.receive_bytes(2, limit=2)  # see `coding`
            channel.receive(octets(out.array[trainable:]))

    def _next(self, size: int, *expected: Op) -> tuple[Header, bytearray]:
        """The next answer's header and meta block: one of the `expected`, with a payload of `size` bytes."""
        answer, meta = self._answer(self._connected().channel)
        if answer.op not in expected or answer.length != size:
            raise ProtocolError(
                f"shard {self.index} answered {answer.op.name} with {answer.length} bytes, "
                f"expected {expected[0].name} with {size}"
            )
        return answer, meta

    def close(self) -> None:
        """Close the connection, if it is open."""
        link, self._link = self._link, None  # another thread may close it, too
        if link is not None:
            link.channel.close()

    def _ask(self, channel: Channel, request: Header, meta: bytes) -> int:
        """Send all but the payload of a request, and wait until the server is ready for that; see `Op.GO.seq`."""
        channel.send(header.encode(request._replace(flags=request.flags | ASK)) + meta)
        answer, _ = self._answer(channel)
        if answer.op is not Op.GO:
            raise ProtocolError(f"shard {self.index} answered {answer.op.name}, expected GO")
        return answer.seq

    def _answer(self, channel: Channel) -> tuple[Header, bytearray]:
        """The next answer's header and meta block. A busy server says so, again and again, and is waited for."""
        waited, (unasked, self._unasked) = False, (self._unasked, None)
        while True:
            answer = header.decode(channel.receive_bytes(header.SIZE, limit=header.SIZE))
            meta = channel.receive_bytes(answer.meta, limit=header.MAX_META_HELLO)
            if answer.op is Op.ERROR:
                raise _error(answer.seq, meta.decode("utf-8", "replace"))
            if answer.op is not Op.BUSY:
                return answer, meta
            if answer.flags & ASK:
                if unasked is None:
                    raise ProtocolError(f"shard {self.index} wants a payload again that it was not sent")
                request, content, payload = unasked
                self._ask(channel, request, content)
                self.send_payload(payload)
            elif not waited:
                log.warning("shard %d is busy: waiting until it has memory for this request", self.index)
                waited = True

    def _receive_decoded(self, channel: Channel, out: NDArray[np.float32]) -> None:
        if not self._piece.size:
            self._piece = aligned(PIECE, np.uint16)
        deadline = self._clock() + self._timeout + 2 * out.size / MIN_RATE
        for low in range(0, out.size, PIECE):
            part = out[low : low + PIECE]
            piece = self._piece[: part.size]
            channel.receive(octets(piece), deadline=deadline)
            kernels.decode(piece, part)

    def _connected(self) -> _Link:
        if (link := self._link) is None:
            raise Unreachable(f"shard {self.index} is not connected")
        return link


def asks(nbytes: int) -> bool:
    """Whether the client asks before it sends a payload of so many bytes."""
    return nbytes > ASK_BYTES


def _error(code: int, text: str) -> Exception:
    types: dict[int, type[Exception]]
    types = {ErrorCode.FENCED: Fenced, ErrorCode.USER: UserError, ErrorCode.NOT_READY: Unreachable}
    return types.get(code, ProtocolError)(text)
