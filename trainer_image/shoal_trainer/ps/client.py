"""A worker's side of the data plane: all shards of the job behind a few blocking calls.

It is used from one thread (the worker's exchange thread). Requests go to all shards before any answer is read, and
answers land in slices of the caller's flat buffer. Nothing is retried here: `Unreachable` closes every connection, and
the caller says `hello` again when it wants to, then compares `Welcome.boots` with the ones that it knew. A push that
was cut off is sent again with its old sequence number; a shard that had applied it answers without applying it twice.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal_trainer.contract import Role, Shard
from shoal_trainer.errors import Fenced, ProtocolError, Unreachable, UserError
from shoal_trainer.ps import kernels
from shoal_trainer.ps.buffers import aligned, octets
from shoal_trainer.ps.layout import Bounds, bounds
from shoal_trainer.security import Credentials
from shoal_trainer.wire import handshake, header
from shoal_trainer.wire.channel import MIN_RATE, Channel
from shoal_trainer.wire.header import IDLE, Codec, ErrorCode, Header, Op
from shoal_trainer.wire.messages import (
    AnswerMeta,
    Copy,
    Hello,
    ModelSpec,
    Pulled,
    Push,
    PushMeta,
    ShardWelcome,
    Welcome,
    WorkerIdentity,
    decode_answer,
    decode_json,
    encode_answer,
    encode_push,
)

T = TypeVar("T")

CODECS = {"fp32": Codec.FP32, "bf16": Codec.BF16}
PIECE = 1 << 16
"""Values that are received and decoded at a time: what has just come in is still in the core's cache."""


@dataclass(slots=True)
class _Link:
    channel: Channel
    server: handshake.Server


class ShardClient:
    """One shard: its address, its connection while there is one, and the newest epoch that was met there."""

    def __init__(
        self,
        index: int,
        address: Shard,
        identity: WorkerIdentity,
        credentials: Credentials,
        *,
        role: Role = Role.WORKER,
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
        self._role = role
        self._tls = tls
        self._connect_timeout = connect_timeout
        self._timeout = timeout
        self._clock = clock
        self._link: _Link | None = None
        self._piece = aligned(0, np.uint16)

    @property
    def server(self) -> handshake.Server:
        """The (epoch, boot) at the other end of the connection."""
        return self._connected().server

    def connect(self) -> None:
        """Open a connection and do the handshake, once for each valid key until one is taken."""
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
        peer = handshake.Peer(
            self._role, self.index, self._identity.slot, self._identity.incarnation, self.minimum_epoch
        )
        try:
            server = handshake.connect(
                channel, self._credentials, self._identity.job_uid, peer, binding=binding
            )
        except BaseException:
            channel.close()
            raise
        self.minimum_epoch = server.epoch
        self._link = _Link(channel, server)

    def send(self, request: Header, meta: bytes = b"", payload: NDArray[Any] | None = None) -> None:
        """Send one request; its answer is due to `receive`."""
        link = self._connected()
        body = memoryview(b"") if payload is None else octets(payload)
        whole = request._replace(
            shard=self.index,
            slot=self._identity.slot,
            incarnation=self._identity.incarnation,
            epoch=link.server.epoch,
            boot=link.server.boot,
            meta=len(meta),
            length=len(body),
        )
        link.channel.send(header.encode(whole) + meta, *((body,) if len(body) else ()))

    def receive(
        self, expected: Op, out: NDArray[Any] | None = None, codec: Codec = Codec.FP32
    ) -> tuple[Header, bytearray]:
        """The answer's header and description; its payload, which comes in `codec`, fills `out`."""
        channel = self._connected().channel
        answer = header.decode(channel.receive_bytes(header.SIZE, limit=header.SIZE))
        meta = channel.receive_bytes(answer.meta, limit=header.MAX_META_HELLO)
        if answer.op is Op.ERROR:
            raise _error(answer.seq, meta.decode("utf-8", "replace"))
        size = 0 if out is None else out.size * codec.itemsize
        if answer.op is not expected or answer.length != size:
            raise ProtocolError(
                f"shard {self.index} answers {answer.op.name} with {answer.length} bytes, "
                f"expected {expected.name} with {size}"
            )
        if out is not None and out.dtype == codec.dtype:
            channel.receive(octets(out))
        elif out is not None:
            self._receive_decoded(channel, out)
        return answer, meta

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._link is not None:
            self._link.channel.close()
            self._link = None

    def _receive_decoded(self, channel: Channel, out: NDArray[np.float32]) -> None:
        if not self._piece.size:
            self._piece = aligned(PIECE, np.uint16)
        limit = self._clock() + self._timeout + 2 * out.size / MIN_RATE
        for low in range(0, out.size, PIECE):
            part = out[low : low + PIECE]
            piece = self._piece[: part.size]
            channel.receive(octets(piece), deadline=limit)
            kernels.decode(piece, part)

    def _connected(self) -> _Link:
        if self._link is None:
            raise Unreachable(f"shard {self.index} is not connected")
        return self._link


def _error(code: int, text: str) -> Exception:
    kinds: dict[int, type[Exception]]
    kinds = {ErrorCode.FENCED: Fenced, ErrorCode.USER: UserError, ErrorCode.NOT_READY: Unreachable}
    return kinds.get(code, ProtocolError)(text)


class PSClient:
    """All shards of a job, as one worker (identity: slot and incarnation) uses them.

    Flat vectors have `ModelSpec.size` values, fp32; or uint16 holding bf16 bits, which then travel as they are.
    Every call raises `Unreachable` (try `hello` again), `Fenced` (stop), `UserError` (worker and parameter server
    disagree about the model) or `Unauthorized`.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        identity: WorkerIdentity,
        credentials: Credentials,
        *,
        dtype: Literal["bf16", "fp32"] = "bf16",
        tls: bool = False,
        connect_timeout: float = 3.0,
        timeout: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.codec = CODECS[dtype]
        self._clock = clock
        self._shards = [
            ShardClient(
                index,
                shard,
                identity,
                credentials,
                tls=tls,
                connect_timeout=connect_timeout,
                timeout=timeout,
                clock=clock,
            )
            for index, shard in enumerate(shards)
        ]
        self._bounds: tuple[Bounds, ...] = ()
        self._outgoing = aligned(0, np.uint16)

    @property
    def bounds(self) -> tuple[Bounds, ...]:
        """Which range of the flat vector each shard holds; known after `hello`."""
        return self._bounds

    def hello(self, model: ModelSpec, copy: Copy | None = None) -> Welcome:
        """Connect to all shards, agree on the model, and offer `copy` to shards that lost their parameters.

        Where some shards are away the others get the copy all the same: they wait for it only for a moment.
        """
        self._bounds = bounds(model.size, len(self._shards))
        if self.codec is Codec.BF16 and self._outgoing.size != model.size:
            self._outgoing = aligned(model.size, np.uint16)
        away: list[Unreachable] = []

        def each(
            what: Callable[[ShardClient], T], shards: Sequence[ShardClient]
        ) -> list[tuple[ShardClient, T]]:
            done = []
            for shard in shards:
                try:
                    done.append((shard, what(shard)))
                except Unreachable as error:
                    away.append(error)
            return done

        try:
            # A shard's moment begins with its first hello, so nobody says it while another one may still time out.
            here = [shard for shard, _ in each(ShardClient.connect, self._shards)]
            here = [shard for shard, _ in each(lambda shard: self._say_hello(shard, model, copy), here)]
            found = each(lambda shard: decode_json(ShardWelcome, shard.receive(Op.WELCOME)[1]), here)
            if copy is not None:
                welcomes = {shard.index: welcome for shard, welcome in found}
                found = each(
                    lambda shard: self._offer(welcomes[shard.index], copy), [shard for shard, _ in found]
                )
            if away:
                raise away[0]
        except BaseException:
            self.close()
            raise
        return Welcome(tuple(welcome for _, welcome in found))

    def probe(self, model: ModelSpec) -> Welcome:
        """The state of the shards, without parameters. `Unreachable` also after a rollback."""
        try:
            for shard in self._shards:
                self._say_hello(shard, model, None)
            found = [decode_json(ShardWelcome, shard.receive(Op.WELCOME)[1]) for shard in self._shards]
            if [welcome.boot for welcome in found] != [shard.server.boot for shard in self._shards]:
                raise Unreachable("a shard has gone back to a snapshot")
        except BaseException:
            self.close()
            raise
        return Welcome(tuple(found))

    def initialize(self, flat: NDArray[np.float32]) -> None:
        """Give the shards their first values; where another worker was first, its values stay."""
        self._check(flat)
        self._call(Op.INITIALIZE, Op.OK, flat, None, codec=Codec.FP32)

    def pull(self, out: NDArray[Any], *, idle: bool = False, exact: bool = False) -> Pulled:
        """Fill `out` with the parameters, with `exact` in fp32. `idle`: bounded staleness waits for no gradient."""
        self._check(out)
        codec = Codec.FP32 if exact else None
        return self._call(Op.PULL, Op.PARAMETERS, None, out, codec=codec, flags=IDLE if idle else 0)

    def push_pull(self, gradient: NDArray[Any], out: NDArray[Any], push: Push) -> Pulled:
        """Apply the mean gradient of `push.samples` samples, and fill `out` with the parameters after it."""
        self._check(gradient)
        self._check(out)
        return self._call(Op.PUSH_PULL, Op.PARAMETERS, gradient, out, push)

    def push_delta(
        self, delta: NDArray[Any], out: NDArray[Any], push: Push, *, scale: float = 1.0, merge: bool = False
    ) -> Pulled:
        """Parameters += scale * delta, and fill `out` with the parameters after it.

        `merge=True`: with what other workers brought since the shard came back, by Adasum (arXiv 2006.02924).
        """
        self._check(delta)
        self._check(out)
        op = Op.MERGE_PULL if merge else Op.DELTA_PULL
        return self._call(op, Op.PARAMETERS, delta, out, push, scale=scale)

    def close(self) -> None:
        """Close all connections. `hello` opens them again."""
        for shard in self._shards:
            shard.close()

    # ---

    def _say_hello(self, shard: ShardClient, model: ModelSpec, copy: Copy | None) -> None:
        hello = Hello(model=model)
        if copy is not None:
            version = copy.pulled.versions[shard.index]
            hello = Hello(model=model, copy_version=version, generation=copy.generation)
        shard.send(Header(Op.HELLO), hello.to_json().encode())

    def _offer(self, welcome: ShardWelcome, copy: Copy) -> ShardWelcome:
        if not welcome.wants_copy:
            return welcome
        shard, (low, high) = self._shards[welcome.index], self._bounds[welcome.index]
        part, pulled = self._encode(copy.flat)[low:high], copy.pulled
        meta = AnswerMeta(
            pulled.shard_samples[shard.index],
            pulled.live_workers,
            pulled.applied[shard.index],
            pulled.journals[shard.index],
        )
        request = Header(Op.OFFER, self.codec, seq=copy.generation, version=pulled.versions[shard.index])
        shard.send(request, encode_answer(meta), part)
        return decode_json(ShardWelcome, shard.receive(Op.WELCOME)[1])

    def _call(
        self,
        op: Op,
        expected: Op,
        given: NDArray[Any] | None,
        out: NDArray[Any] | None,
        push: Push | None = None,
        *,
        scale: float = 1.0,
        codec: Codec | None = None,
        flags: int = 0,
    ) -> Pulled:
        begin = self._clock()
        coding = codec or self.codec
        payload = given if given is None or coding is Codec.FP32 else self._encode(given)
        meta = b"" if push is None else encode_push(_push_meta(push, scale))
        try:
            for shard, (low, high) in zip(self._shards, self._bounds, strict=True):
                base = 0 if push is None else push.base_versions[shard.index]
                sent_as = coding if payload is not None or out is not None else Codec.NONE
                request = Header(op, sent_as, seq=0 if push is None else push.seq, version=base, flags=flags)
                shard.send(request, meta, None if payload is None else payload[low:high])
            sent = self._clock()
            answers = [
                shard.receive(expected, None if out is None else out[low:high], coding)
                for shard, (low, high) in zip(self._shards, self._bounds, strict=True)
            ]
        except BaseException:
            self.close()
            raise
        metas = [decode_answer(meta) if expected is Op.PARAMETERS else AnswerMeta() for _, meta in answers]
        return Pulled(
            versions=tuple(answer.version for answer, _ in answers),
            applied=tuple(meta.applied for meta in metas),
            samples=metas[0].samples,
            live_workers=metas[0].live_workers,
            shard_samples=tuple(meta.samples for meta in metas),
            push_seconds=sent - begin,
            pull_seconds=self._clock() - sent,
            journals=tuple(meta.journal for meta in metas),
            stopped=metas[0].stopped,
        )

    def _encode(self, flat: NDArray[Any]) -> NDArray[Any]:
        if self.codec is Codec.FP32 or flat.dtype == np.uint16:
            return flat
        kernels.encode(flat, self._outgoing)
        return self._outgoing

    def _check(self, flat: NDArray[Any]) -> None:
        size = self._bounds[-1][1] if self._bounds else -1
        if size < 0:
            raise Unreachable("say hello first")
        kinds = (np.float32, np.uint16) if self.codec is Codec.BF16 else (np.float32,)
        if flat.shape != (size,) or flat.dtype not in kinds or not flat.flags.c_contiguous:
            raise ValueError(f"a flat vector has shape ({size},) in fp32, not {flat.shape} in {flat.dtype}")


def _push_meta(push: Push, scale: float) -> PushMeta:
    rate = math.nan if push.learning_rate is None else push.learning_rate
    return PushMeta(push.samples, push.steps, push.loss, rate, scale, push.timings, push.progress)
