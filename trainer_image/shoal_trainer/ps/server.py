"""The server of the data port.

Clients authenticate first; the handshake has one deadline, and the number of unauthenticated connections is bounded.
The length in a header is checked against the size of the shard before memory is taken from the pool. Messages of a
large shard are streams: a piece is received, applied, and its answer sent. Blocking calls and kernels release the GIL,
so threads suffice for tens of workers.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

from shoal_trainer.cgroup import memory_limit
from shoal_trainer.errors import Fenced, OtherVersion, ProtocolError, TrainerError, Unreachable, UserError
from shoal_trainer.ps.aligned import octets
from shoal_trainer.ps.coding import in_memory
from shoal_trainer.ps.kernel_loader import load_kernels
from shoal_trainer.ps.pool import Loan, PiecePool
from shoal_trainer.ps.shard import Answer, ShardStore
from shoal_trainer.ps.streams import Stream
from shoal_trainer.security import Credentials
from shoal_trainer.wire import handshake, header
from shoal_trainer.wire.channel import MIN_RATE, Channel
from shoal_trainer.wire.encoding import decode_answer, decode_json, decode_push, encode_answer
from shoal_trainer.wire.gate import Visit
from shoal_trainer.wire.handshake import Peer, Verdict
from shoal_trainer.wire.header import ALONE, ASK, FOLLOWS, IDLE, Codec, ErrorCode, Header, Op
from shoal_trainer.wire.listener import HANDSHAKE_SECONDS, Listener
from shoal_trainer.wire.messages import Hello

MAX_UNAUTHENTICATED = 64
MAX_CONNECTIONS = 4096
WAIT_SECONDS = 20.0
"""The longest total wait of a request for a recovering shard, for bounded staleness, and, once its payload is on the
way, for memory. The client's timeout is longer, so that it receives the reason."""
BUSY_SECONDS = 5.0
"""How often a request that waits for memory is told so. The client's timeout is longer."""
SCRATCH_BYTES = 64 << 10
"""A payload that is dropped is received in parts of so many bytes."""
PATIENCE_SECONDS = 0.25
"""How long a stream waits in all for the answers of slower ones, which it would tear (see `walks`)."""
PUSHES = {Op.PUSH, Op.PUSH_PULL, Op.DELTA_PULL}


class _Interrupted(Exception):
    """A stream cannot go on. Nothing can be sent but the rest of it."""

    def __init__(self, reason: TrainerError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class DataServer:
    """Serves `shard` on `host`:`port` (0: any free port, then in `port`).

    Calls `on_superseded(epoch)` when an authenticated client has connected to a newer incarnation of this shard.
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
        self._binding = credentials.certificate_digest() if tls else b""
        self._on_superseded = on_superseded
        self._clock = clock
        self._pool = PiecePool(memory=memory_limit(), clock=clock)
        self.listener = Listener(
            "data",
            host,
            port,
            self._serve,
            unproven=MAX_UNAUTHENTICATED,
            connections=MAX_CONNECTIONS,
            context=credentials.server_context() if tls else None,
            clock=clock,
        )
        self.listener.handshake_seconds = handshake_seconds
        self.port: int = self.listener.port

    def start(self) -> None:
        """Start accepting connections."""
        load_kernels()  # without a cache it takes seconds, too long for the first push
        self.listener.start()

    def close(self) -> None:
        """Stop accepting, and close all connections."""
        self.listener.close()

    # --- connections ----------------------------------------------------------------------------------------------

    def _serve(self, sock: socket.socket, visit: Visit) -> None:
        seconds = self.listener.handshake_seconds
        channel = Channel(sock, timeout=seconds, clock=self._clock)
        peer = self._authenticate(channel, visit.begun + seconds)
        self.listener.gate.proved(visit)
        if peer is not None:
            self._serve_peer(channel, peer)

    def _authenticate(self, channel: Channel, deadline: float) -> Peer | None:
        """The authenticated client, or None if it was refused."""
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
        verdict = self._verdict(peer)
        try:
            handshake.conclude(channel, verdict)
        except Unreachable:
            if verdict is Verdict.WELCOME:
                self._shard.disconnect(peer.slot)
            raise
        channel.set_timeout(10.0)
        return peer if verdict is Verdict.WELCOME else None

    def _verdict(self, peer: Peer) -> Verdict:
        """The verdict on an authenticated client; if it is WELCOME, the worker is registered as connected."""
        if peer.minimum_epoch > self._shard.epoch:
            if (
                self._on_superseded is not None
            ):  # before sending the verdict: the client may have left already
                self._on_superseded(peer.minimum_epoch)
            return Verdict.SUPERSEDED
        try:
            self._shard.workers.connect(peer.slot, peer.incarnation)
        except Fenced:
            return Verdict.FENCED
        return Verdict.WELCOME

    def _serve_peer(self, channel: Channel, peer: Peer) -> None:
        identity = peer.slot, peer.incarnation, peer.shard
        try:
            while True:
                request = self._receive(channel)
                meta = channel.receive_bytes(request.meta, limit=header.MAX_META_HELLO)
                if (request.slot, request.incarnation, request.shard) != identity:
                    raise ProtocolError("the request names another worker or shard than its connection")
                if request.op is Op.BYE:
                    return
                self._answer(channel, peer, request, meta)
        finally:
            self._shard.disconnect(peer.slot)

    def _receive(self, channel: Channel) -> Header:
        """The next request. A peer of another version is answered in its own: it would wait for ever."""
        try:
            return header.decode(channel.receive_first(header.SIZE))
        except OtherVersion as error:
            why = f"parameter server {self._shard.index}: {error}".encode()
            told = self._header(Op.ERROR, len(why), seq=ErrorCode.NOT_READY)
            channel.send(header.encode(told, error.version) + why)
            raise

    # --- requests -------------------------------------------------------------------------------------------------

    def _answer(self, channel: Channel, peer: Peer, request: Header, meta: bytearray) -> None:
        try:
            if request.op is Op.HELLO and not request.length:
                hello = decode_json(Hello, meta)
                worker = peer.slot, peer.incarnation
                welcome = self._shard.hello(*worker, hello.model, hello.held)
                self._send(channel, Op.WELCOME, welcome.to_json().encode())
            else:
                self._exchange(channel, peer, request, meta)
        except _Interrupted as interrupted:
            raise interrupted.reason from None  # the client waits for the rest of a payload
        except TrainerError as error:
            code = _code(error)
            self._send(channel, Op.ERROR, str(error).encode()[:4096], seq=code)
            if code is not ErrorCode.USER:
                raise  # close the connection: an unread payload would be parsed as the next header

    def _exchange(self, channel: Channel, peer: Peer, request: Header, meta: bytearray) -> None:
        """Handle a request with a payload in either direction."""
        shard, size, codec = self._shard, self._shard.size, request.codec
        if shard.model is None:
            raise ProtocolError(f"{request.op.name} before HELLO")
        nbytes = shard.model.coded_bytes(codec, 0, size)
        expected = 0 if request.op is Op.PULL else nbytes
        if codec is Codec.NONE or request.length != expected:
            raise ProtocolError(
                f"{request.op.name} has {request.length} bytes, shard {shard.index} expects {expected}"
            )
        deadline = self._clock() + WAIT_SECONDS
        request = request._replace(waited=self._wait(peer, request, deadline))
        if shard.piece and (request.op is Op.PULL or request.op in PUSHES):
            made = self._exchange_stream(channel, peer, request, meta)
        else:
            made = self._exchange_whole(channel, peer, request, meta, nbytes, deadline)
        if made is not None:  # the memory of the message is given back: another one may need it for its push
            if not request.flags & ALONE:
                shard.workers.wait_round(peer.slot, deadline - self._clock())
            self._send(channel, Op.OK, version=made, waited=request.waited)

    def _exchange_whole(
        self, channel: Channel, peer: Peer, request: Header, meta: bytearray, nbytes: int, deadline: float
    ) -> int | None:
        """Receive a request into one loan and answer it from there; returns the version that a PUSH has made."""
        shard, waits = self._shard, request.flags & ASK or not request.length
        assert shard.model is not None
        try:
            patience = deadline - self._clock()
            with self._pool.lend(nbytes, shard.model.nbytes, patience=patience) as loan:
                if waits:
                    self._await_memory(channel, request, loan)
                if waits or loan.granted(min(BUSY_SECONDS, patience), whole=False):
                    receive_by = self._clock() + 10 + request.length / MIN_RATE
                    for piece in loan.take():
                        if request.length:
                            channel.receive(octets(piece), deadline=receive_by + loan.waited)
                    return self._apply(channel, peer, request, meta, loan)
        finally:
            if request.op in PUSHES:
                shard.workers.push_ended(peer.slot)
        self._put_off(channel, request.length)
        return None

    def _put_off(self, channel: Channel, length: int) -> None:
        """Drop a payload that came without asking when there was no memory; its client asks, and sends it again.

        Unread, it would fill the connection, which the client's kernel soon takes for dead.
        """
        self._shard.load.busy()
        receive_by, scratch = self._clock() + 10 + length / MIN_RATE, memoryview(bytearray(SCRATCH_BYTES))
        for start in range(0, length, SCRATCH_BYTES):
            channel.receive(scratch[: length - start], deadline=receive_by)
        self._send(channel, Op.BUSY, flags=ASK)

    def _exchange_stream(self, channel: Channel, peer: Peer, request: Header, meta: bytearray) -> int | None:
        """Handle a pull or push of a large shard: one piece after another is received, applied and answered.

        Returns the version that a PUSH has made, of which no piece is answered.
        """
        shard, codec = self._shard, request.codec
        assert shard.model is not None
        size = shard.piece * (4 if shard.model.trainable < shard.size else codec.itemsize)
        try:
            if request.op is not Op.DELTA_PULL:
                # Amid a payload nothing could tell it, and its worker would take the server for lost, again and again.
                shard.check_rate(None if request.op is Op.PULL else decode_push(meta), request.ahead)
            with self._pool.lend(size, shard.model.nbytes) as loan:
                self._await_memory(channel, request, loan, piece=0 if request.op is Op.PUSH else shard.piece)
                # Only now: what a waiting request has not begun holds up nobody.
                with contextlib.closing(self._begin(peer, request, meta)) as stream:
                    try:
                        return self._send_stream(channel, request, stream, loan)
                    except TrainerError as error:
                        raise _Interrupted(error) from error
        finally:
            if request.op in PUSHES:
                shard.workers.push_ended(peer.slot)

    def _begin(self, peer: Peer, request: Header, meta: bytearray) -> Stream[Answer]:
        shard, boot, worker = self._shard, request.boot, (peer.slot, peer.incarnation)
        if request.op is Op.PULL:
            idle, known = bool(request.flags & IDLE), request.version if request.flags & FOLLOWS else -1
            return shard.pulling(*worker, boot=boot, idle=idle, ahead=request.ahead, known=known)
        told = decode_push(meta)
        timings = told.timings._replace(wait=request.waited / max(1, told.steps))
        push = *worker, request.seq, request.version, told._replace(timings=timings)
        delta = request.op is Op.DELTA_PULL
        return shard.pushing(*push, delta=delta, boot=boot, ahead=0.0 if delta else request.ahead)

    def _send_stream(
        self, channel: Channel, request: Header, stream: Stream[Answer], loan: Loan
    ) -> int | None:
        codec, model = request.codec, self._shard.model
        assert model is not None
        nbytes = model.coded_bytes(codec, 0, self._shard.size)
        answers = request.op is not Op.PUSH
        if answers:
            channel.send(header.encode(self._header(Op.STREAM, 0, codec=codec, length=nbytes)))
        receive_by, patience = self._clock() + 10 + request.length / MIN_RATE, PATIENCE_SECONDS
        memory = next(loan.take())
        for low, high in stream.spans():
            piece = memory[: model.coded_bytes(codec, low, high)]
            if request.length:
                channel.receive(octets(piece), deadline=receive_by)
            received = self._clock()
            stream.wait(patience)
            patience = max(0.0, patience - (self._clock() - received))
            stream.step(in_memory([piece], max(0, model.trainable - low), codec.dtype))
            if answers:
                channel.send(octets(piece))
            receive_by += self._clock() - received  # the client had to wait for this
        if not answers:
            return stream.result.version
        answer = encode_answer(stream.result.meta)
        fields = _answered(request, stream.result)
        head = self._header(Op.PARAMETERS, len(answer), **fields)
        channel.send(header.encode(head) + answer)
        return None

    def _await_memory(self, channel: Channel, request: Header, loan: Loan, *, piece: int = 0) -> None:
        """Make a client wait that sends nothing meanwhile, for as long as it takes: the queue moves.

        Every request in it has a deadline. If it were refused, its worker would take the server for lost.
        """
        self._check_needed(request)
        while not loan.granted(BUSY_SECONDS, whole=not request.length):
            self._shard.load.busy()
            self._send(channel, Op.BUSY)
            self._check_needed(request)
        if request.flags & ASK:
            self._check_needed(request)
            self._send(channel, Op.GO, seq=piece)

    def _check_needed(self, request: Header) -> None:
        if request.op is Op.OFFER:
            self._shard.check_wanted(request.slot)

    def _wait(self, peer: Peer, request: Header, deadline: float) -> float:
        """Wait until the shard can serve this request; `Unreachable` if it has no parameters by `deadline`.

        Returns for how many seconds slower workers held it up.
        """
        shard = self._shard
        if request.op is Op.PULL or request.op in PUSHES:
            if not shard.wait_ready(deadline - self._clock()):
                raise Unreachable(f"shard {shard.index} has no parameters yet")
            if request.op in PUSHES:
                return shard.workers.wait_admitted(peer.slot, request.version, deadline - self._clock())
        return 0.0

    def _apply(
        self, channel: Channel, peer: Peer, request: Header, meta: bytearray, loan: Loan
    ) -> int | None:
        # Nothing here may keep the payload: its pieces are given back while the reply is sent.
        shard, codec = self._shard, request.codec
        assert shard.model is not None
        values = loan.payload(codec, shard.model.trainable)
        match request.op:
            case Op.OFFER:
                copy = (request.version, decode_answer(meta)) if meta else ()
                welcome = shard.offer(peer.slot, peer.incarnation, values, *copy, generation=request.seq)
                self._send(channel, Op.WELCOME, welcome.to_json().encode())
            case op if op is Op.PULL or op in PUSHES:
                reply = shard.run(self._begin(peer, request, meta), values)
                if op is Op.PUSH:
                    return reply.version
                self._reply(channel, request, reply, loan)
            case _:
                raise ProtocolError(f"{request.op.name} is not a request")
        return None

    def _reply(self, channel: Channel, request: Header, reply: Answer, loan: Loan) -> None:
        meta = encode_answer(reply.meta)
        fields = _answered(request, reply)
        head = self._header(Op.PARAMETERS, len(meta), length=loan.nbytes, **fields)
        first = [header.encode(head) + meta]
        for piece in loan.return_after_use():
            channel.send(*first, octets(piece))
            first = []
        if first:
            channel.send(*first)

    def _send(self, channel: Channel, op: Op, meta: bytes = b"", **fields: Any) -> None:
        channel.send(header.encode(self._header(op, len(meta), **fields)) + meta)

    def _header(self, op: Op, meta: int, **fields: Any) -> Header:
        shard = self._shard
        return Header(op, shard=shard.index, boot=shard.boot, meta=meta, **fields)


def _answered(request: Header, answer: Answer) -> dict[str, Any]:
    """The header's fields of the parameters that answer a request."""
    said = {"version": answer.version, "filled": answer.filled}
    return said | {"codec": request.codec, "waited": request.waited}


def _code(error: TrainerError) -> ErrorCode:
    if isinstance(error, Fenced):
        return ErrorCode.FENCED
    if isinstance(error, UserError):
        return ErrorCode.USER
    return ErrorCode.NOT_READY if isinstance(error, Unreachable) else ErrorCode.PROTOCOL
