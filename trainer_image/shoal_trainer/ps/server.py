"""The data port: one thread for each connection, one buffer for each request in flight.

A connection proves itself first, under one deadline for all of it, and only so many may be unproven at once. What a
header states is compared with the size of the shard before a buffer is taken, and buffers come from a pool that bounds
the server's memory: who finds none waits, and TCP makes the worker wait. Blocking calls release the interpreter lock,
kernels do too, so threads are enough for tens of workers.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from shoal_trainer.contract import Role
from shoal_trainer.errors import Fenced, ProtocolError, TrainerError, Unauthorized, Unreachable, UserError
from shoal_trainer.ps.buffers import octets
from shoal_trainer.ps.pool import BufferPool
from shoal_trainer.ps.shard import Answer, ShardStore
from shoal_trainer.security import Credentials
from shoal_trainer.wire import handshake, header
from shoal_trainer.wire.channel import MIN_RATE, Channel
from shoal_trainer.wire.handshake import Peer, Verdict
from shoal_trainer.wire.header import IDLE, Codec, ErrorCode, Header, Op
from shoal_trainer.wire.messages import Hello, decode_answer, decode_json, decode_push, encode_answer

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
MAX_UNPROVEN = 64
MAX_CONNECTIONS = 4096
ADMISSION_SECONDS = 20.0
READY_SECONDS = 20.0
"""How long a request may wait for a recovering shard: shorter than the client's own patience."""


class RefusalLog:
    """Says once a minute for each address that it was refused, and how often."""

    def __init__(self, clock: Callable[[], float], every: float = 60.0, most: int = 1024) -> None:
        self._clock, self._every, self._most = clock, every, most
        self._seen: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def refused(self, address: str, reason: object) -> None:
        """Count one refusal, and perhaps say so."""
        with self._lock:
            now = self._clock()
            last, count = self._seen.get(address, (-self._every, 0))
            if now - last < self._every:
                self._seen[address] = (last, count + 1)
                return
            if len(self._seen) >= self._most:
                self._seen.clear()
            self._seen[address] = (now, 0)
        before = f" ({count} more since the last time)" if count else ""
        log.warning("refused a connection from %s: %s%s", address, reason, before)


class DataServer:
    """Serves `shard` on `host`:`port` (0: any free one; then see `port`).

    `on_superseded(epoch)`: a client has met a newer incarnation of this shard.
    """

    def __init__(
        self,
        shard: ShardStore,
        job_uid: str,
        credentials: Credentials,
        *,
        host: str,
        port: int = 0,
        tls: bool = False,
        on_superseded: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        self._shard = shard
        self._job_uid = job_uid
        self._credentials = credentials
        self._context = credentials.server_context() if tls else None
        self._binding = credentials.certificate_digest() if tls else b""
        self._on_superseded = on_superseded
        self._clock = clock
        self._handshake_seconds = handshake_seconds
        self._pool = BufferPool(clock=clock)
        self._refusals = RefusalLog(clock)
        self._unproven = threading.Semaphore(MAX_UNPROVEN)
        self._open: set[Channel | socket.socket] = set()
        self._open_lock = threading.Lock()
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="data-accept", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._acceptor.start()

    def close(self) -> None:
        """Stop accepting and end all connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._open_lock:
            channels = list(self._open)
        for channel in channels:
            channel.close()
        if self._acceptor.is_alive():
            self._acceptor.join(5)

    # --- connections ----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, address = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # out of descriptors: those who are served go on
                continue
            name = str(address[0])
            with self._open_lock:
                full = len(self._open) >= MAX_CONNECTIONS
            if full or not self._unproven.acquire(blocking=False):
                self._refusals.refused(name, "too many connections")
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock, name), name=f"data-{name}", daemon=True).start()

    def _serve(self, sock: socket.socket, address: str) -> None:
        channel: Channel | None = None
        try:
            try:
                channel, peer = self._prove(sock)
            finally:
                self._unproven.release()
            if peer is not None:
                self._serve_peer(channel, peer)
        except (ProtocolError, Fenced) as error:
            self._refusals.refused(address, error)
        except Unreachable as error:
            log.debug("%s: %s", address, error)
        except Exception:
            log.exception("a connection from %s ended by an error of this server", address)
        finally:
            with self._open_lock:
                self._open.discard(sock)
                if channel is not None:
                    self._open.discard(channel)
            (channel or sock).close()

    def _prove(self, sock: socket.socket) -> tuple[Channel, Peer | None]:
        with self._open_lock:
            self._open.add(sock)
        deadline = self._clock() + self._handshake_seconds
        try:
            if self._context is not None:
                sock.settimeout(self._handshake_seconds)
                sock = self._context.wrap_socket(sock, server_side=True)
            channel = Channel(sock, timeout=self._handshake_seconds, clock=self._clock)
        except ssl.SSLError as error:
            raise Unauthorized(f"no TLS: {error.reason}") from None
        except OSError as error:
            raise Unreachable(str(error)) from None
        with self._open_lock:
            self._open.add(channel)
            if self._closed:
                raise Unreachable("closed")
        server = handshake.Server(self._shard.epoch, self._shard.boot)
        peer = handshake.accept(
            channel,
            self._credentials,
            self._job_uid,
            self._shard.index,
            server,
            binding=self._binding,
            deadline=deadline,
        )
        verdict = Verdict.WELCOME
        if peer.minimum_epoch > self._shard.epoch:
            verdict = Verdict.SUPERSEDED
        elif peer.role is not Role.WORKER:
            verdict = Verdict.REFUSED
        else:
            try:
                self._shard.connect(peer.slot, peer.incarnation)
            except Fenced:
                verdict = Verdict.FENCED
        try:
            handshake.conclude(channel, verdict)
        except Unreachable:
            if verdict is Verdict.WELCOME:
                self._shard.disconnect(peer.slot)
            raise
        if verdict is Verdict.SUPERSEDED and self._on_superseded is not None:
            self._on_superseded(peer.minimum_epoch)
        channel.set_timeout(10.0)
        return channel, peer if verdict is Verdict.WELCOME else None

    def _serve_peer(self, channel: Channel, peer: Peer) -> None:
        try:
            while True:
                channel.wait()
                request = header.decode(channel.receive_bytes(header.SIZE, limit=header.SIZE))
                meta = channel.receive_bytes(request.meta, limit=header.MAX_META_HELLO)
                if (request.slot, request.incarnation, request.shard) != (
                    peer.slot,
                    peer.incarnation,
                    peer.shard,
                ):
                    raise ProtocolError("a peer speaks in another one's name")
                if request.op is Op.BYE:
                    return
                self._answer(channel, peer, request, meta)
        finally:
            self._shard.disconnect(peer.slot)

    # --- requests -------------------------------------------------------------------------------------------------

    def _answer(self, channel: Channel, peer: Peer, request: Header, meta: bytearray) -> None:
        try:
            if request.op is Op.HELLO and not request.length:
                hello = decode_json(Hello, meta)
                who = (peer.slot, peer.incarnation)
                welcome = self._shard.hello(*who, hello.model, hello.copy_version, hello.generation)
                self._send(channel, Op.WELCOME, welcome.to_json().encode())
            else:
                self._exchange(channel, peer, request, meta)
        except TrainerError as error:
            code = _code(error)
            self._send(channel, Op.ERROR, str(error).encode()[:4096], seq=code)
            if code is not ErrorCode.USER:
                raise  # a payload that was not read would be taken for a header

    def _exchange(self, channel: Channel, peer: Peer, request: Header, meta: bytearray) -> None:
        """A request with a payload in either direction: through one buffer, there and back."""
        shard, size = self._shard, self._shard.size
        if shard.model is None:
            raise ProtocolError("say hello first")
        codec = request.codec
        expected = 0 if request.op is Op.PULL else size * codec.itemsize
        if codec is Codec.NONE or request.length != expected:
            raise ProtocolError(
                f"{request.op.name} states {request.length} bytes, shard {shard.index} takes {expected}"
            )
        if request.op in {Op.PULL, Op.PUSH_PULL, Op.DELTA_PULL, Op.MERGE_PULL}:
            if not shard.wait_ready(READY_SECONDS):
                raise Unreachable(f"shard {shard.index} has no parameters yet")
            if request.op is not Op.PULL:
                shard.wait_admitted(peer.slot, request.version, ADMISSION_SECONDS)
        elif request.op is Op.INITIALIZE:
            shard.wait_ready(READY_SECONDS)  # another worker may bring newer values than first ones
        largest = size * (4 if codec is Codec.FP32 else 2)
        with self._pool.lend(size, codec, largest) as io:
            if request.length:
                channel.receive(octets(io), deadline=self._clock() + 10 + request.length / MIN_RATE)
            match request.op:
                case Op.INITIALIZE if codec is Codec.FP32:
                    shard.initialize(io)
                    self._send(channel, Op.OK)
                    return
                case Op.OFFER:
                    answer = decode_answer(meta)
                    who = (peer.slot, peer.incarnation)
                    welcome = shard.offer(*who, request.version, answer, io, generation=request.seq)
                    self._send(channel, Op.WELCOME, welcome.to_json().encode())
                    return
                case Op.PULL:
                    reply = shard.pull(peer.slot, io, boot=request.boot, idle=bool(request.flags & IDLE))
                case Op.PUSH_PULL:
                    arguments = (
                        peer.slot,
                        peer.incarnation,
                        request.seq,
                        request.version,
                        decode_push(meta),
                        io,
                    )
                    reply = shard.push(*arguments, boot=request.boot)
                case Op.DELTA_PULL | Op.MERGE_PULL:
                    arguments = (
                        peer.slot,
                        peer.incarnation,
                        request.seq,
                        request.version,
                        decode_push(meta),
                        io,
                    )
                    reply = shard.delta(*arguments, merge=request.op is Op.MERGE_PULL, boot=request.boot)
                case _:
                    raise ProtocolError(f"{request.op.name} is no request")
            self._reply(channel, codec, reply, io)

    def _reply(self, channel: Channel, codec: Codec, reply: Answer, io: NDArray[Any]) -> None:
        meta = encode_answer(reply.meta)
        head = self._header(Op.PARAMETERS, len(meta))
        head = head._replace(codec=codec, version=reply.version, length=io.nbytes)
        body = (octets(io),) if io.nbytes else ()
        channel.send(header.encode(head) + meta, *body)

    def _send(self, channel: Channel, op: Op, meta: bytes = b"", *, seq: int = 0) -> None:
        channel.send(header.encode(self._header(op, len(meta))._replace(seq=seq)) + meta)

    def _header(self, op: Op, meta: int) -> Header:
        shard = self._shard
        return Header(op, shard=shard.index, epoch=shard.epoch, boot=shard.boot, meta=meta)


def _code(error: TrainerError) -> ErrorCode:
    if isinstance(error, Fenced):
        return ErrorCode.FENCED
    if isinstance(error, UserError):
        return ErrorCode.USER
    return ErrorCode.NOT_READY if isinstance(error, Unreachable) else ErrorCode.PROTOCOL
