"""The worker's client of the data plane: blocking calls to all shards of the job.

Use it from one thread. Answers are received into slices of the caller's buffer. Small requests are sent to all shards
before any answer is read. The answer to a large one is read while it is sent, as the server answers each piece at once;
with TLS, whose connections one thread may use at a time, after each piece.

Nothing is retried: `Unreachable` closes every connection; the caller then calls `hello` again and compares
`Welcome.boots`. To resend a push, keep its sequence number: no shard applies it twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import cache
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal_trainer.contract import Shard
from shoal_trainer.errors import Fenced, Unreachable, UserError
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.coding import encode, place
from shoal_trainer.ps.pieces import InPieces, Payload, section
from shoal_trainer.ps.shard_bounds import Bounds, bounds
from shoal_trainer.ps.shard_client import ShardClient, Target, asks
from shoal_trainer.security import Credentials
from shoal_trainer.wire.encoding import decode_answer, decode_json, encode_answer, encode_push
from shoal_trainer.wire.header import ALONE, FOLLOWS, IDLE, Codec, Header, Op
from shoal_trainer.wire.messages import (
    AnswerMeta,
    Copy,
    Hello,
    ModelSpec,
    Pulled,
    Push,
    ShardWelcome,
    Welcome,
    WorkerIdentity,
)


class Parted(InPieces, Protocol):
    """A vector that is read in pieces while it is sent."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its values: that of the wire."""


Vector = NDArray[Any] | Parted

UNCONNECTED = "not connected: call hello first"

CODECS = {"fp32": Codec.FP32, "bf16": Codec.BF16}


class PSClient:
    """All shards of a job, for the worker `identity`.

    Flat vectors have shape (`ModelSpec.size`,) and dtype fp32, or are coded in uint16 (`ps/coding`) and sent as they
    are. Every call may raise `Unreachable` (call `hello` again), `Fenced` (stop) or `UserError` (the model differs from
    the job's).
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
        self._tls = tls
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
        self._model: ModelSpec | None = None
        self._bounds: tuple[Bounds, ...] = ()
        self._trainable = 0
        self._outgoing = aligned(0, np.uint16)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="answers")

    def hello(self, model: ModelSpec, copy: Copy | None = None) -> Welcome:
        """Connect to all shards, agree on the model, and send `copy` to those that ask for it.

        Each gets the copy as soon as it asks, also if others are unreachable, before `Unreachable` is raised: it waits
        only briefly. First parameters are sent once all shards have answered and none prefers another worker's: those
        of a model belong together.
        """
        self._model, self._bounds = model, bounds(model.size, len(self._shards))
        self._trainable = model.parameters
        size = place(model.size, model.parameters, np.uint16)
        if self.codec is Codec.BF16 and self._outgoing.size != size:
            self._outgoing = aligned(size, np.uint16)
        welcomes: dict[int, ShardWelcome] = {}
        errors: dict[int, Unreachable] = {}

        def greet(shard: ShardClient) -> ShardWelcome:
            shard.connect()
            self._send_hello(shard, model, copy)
            return _welcome(shard)

        trained = copy is not None and copy.pulled is not None

        @cache
        def payload() -> Payload:
            assert copy is not None
            self._check(flat := copy.flat())
            return self._encode(flat) if trained else flat

        def keep(shard: ShardClient, welcome: Callable[[], ShardWelcome]) -> None:
            try:
                welcomes[shard.index] = welcome()
            except Unreachable as error:
                errors[shard.index] = error

        def send(shard: ShardClient) -> None:
            if copy is not None and shard.index in welcomes and welcomes[shard.index].wants_copy:
                keep(shard, lambda: self._offer(shard, copy, payload()))

        try:
            # At once: those on a lost node take seconds each, and another one may wait for copies briefly meanwhile.
            with ThreadPoolExecutor(len(self._shards), thread_name_prefix="hello") as pool:
                greeted = {pool.submit(greet, shard): shard for shard in self._shards}
                for future in as_completed(greeted):
                    keep(shard := greeted[future], future.result)
                    if trained:
                        send(shard)
            if (
                not errors
                and not trained
                and all(welcome.ready or welcome.wants_copy for welcome in welcomes.values())
            ):
                for shard in self._shards:
                    send(shard)
            if errors:
                raise errors[min(errors)]
        except BaseException:
            self.close()
            raise
        return Welcome(tuple(welcomes[shard.index] for shard in self._shards))

    def probe(self) -> Welcome:
        """The state of the shards, without a transfer of parameters. `Unreachable` also after a rollback."""
        if self._model is None:
            raise Unreachable(UNCONNECTED)
        try:
            for shard in self._shards:
                self._send_hello(shard, self._model, None)
            found = [_welcome(shard) for shard in self._shards]
            if [welcome.boot for welcome in found] != [shard.server.boot for shard in self._shards]:
                raise Unreachable("a shard was rolled back to a snapshot")
        except BaseException:
            self.close()
            raise
        return Welcome(tuple(found))

    def pull(
        self,
        out: NDArray[Any],
        *,
        idle: bool = False,
        exact: bool = False,
        ahead: float = 0.0,
        known: tuple[int, ...] = (),
    ) -> Pulled:
        """Write the parameters to `out`; those expected after `ahead` more updates.

        `idle`: no gradient will be computed on them, so bounded staleness waits for none. `exact`: transfer them in
        fp32. `known`: the versions up to which the worker has the journals; empty: it has none.
        """
        self._check(out)
        codec = Codec.FP32 if exact else None
        flags = (IDLE if idle else 0) | (FOLLOWS if known else 0)
        return self._call(
            Op.PULL, Op.PARAMETERS, None, out, codec=codec, flags=flags, ahead=ahead, known=known
        )

    def push_pull(self, gradient: Vector, out: NDArray[Any], push: Push) -> Pulled:
        """Apply the mean gradient of a push, and write the parameters to `out`, `push.ahead` later."""
        self._check(gradient)
        self._check(out)
        return self._call(Op.PUSH_PULL, Op.PARAMETERS, gradient, out, push, ahead=push.ahead)

    def push_round(self, gradient: Vector, out: NDArray[Any], push: Push) -> Pulled:
        """As `push_pull`, but the parameters are those after the other workers' pushes (`ps/rounds`).

        The wait for these is in `Pulled.wait_seconds`, too.
        """
        self._check(gradient)
        pushed = self._call(Op.PUSH, Op.OK, gradient, None, push)
        pulled = self.pull(out, ahead=push.ahead, known=push.base_versions)
        sent, waited = pushed.push_seconds, pushed.pull_seconds + pushed.wait_seconds
        return replace(pulled, push_seconds=sent, wait_seconds=waited, made=pushed.versions[0])

    def push(self, gradient: Vector, push: Push) -> Pulled:
        """Apply the mean gradient of a push, and receive nothing but the versions: a `pull` follows."""
        self._check(gradient)
        return self._call(Op.PUSH, Op.OK, gradient, None, push, flags=ALONE)

    def push_delta(self, delta: Vector, out: NDArray[Any], push: Push) -> Pulled:
        """Parameters += `push.meta.scale` * delta, and write the new parameters to `out`."""
        self._check(delta)
        self._check(out)
        return self._call(Op.DELTA_PULL, Op.PARAMETERS, delta, out, push)

    def close(self) -> None:
        """Close all connections. `hello` opens them again."""
        for shard in self._shards:
            shard.close()

    def _send_hello(self, shard: ShardClient, model: ModelSpec, copy: Copy | None) -> None:
        held = None if copy is None else copy.held(shard.index)
        shard.send(Header(Op.HELLO), Hello(model=model, held=held).to_json().encode())

    def _offer(self, shard: ShardClient, copy: Copy, payload: Payload) -> ShardWelcome:
        codec = Codec.FP32 if copy.pulled is None else self.codec
        meta, version = copy.meta(shard.index), copy.held(shard.index).version
        part = section(payload, *self._places(shard.index, codec))
        request = Header(Op.OFFER, codec, seq=copy.generation, version=version or 0)
        shard.send(request, b"" if meta is None else encode_answer(meta), part)
        if asks(part.size * codec.itemsize):
            shard.send_payload(part)
        return _welcome(shard)

    def _call(
        self,
        op: Op,
        expected: Op,
        values: Vector | None,
        out: NDArray[Any] | None,
        push: Push | None = None,
        *,
        codec: Codec | None = None,
        flags: int = 0,
        ahead: float = 0.0,
        known: tuple[int, ...] = (),
    ) -> Pulled:
        begin = self._clock()
        coding = codec or self.codec
        payload = values if values is None or coding is Codec.FP32 else self._encode(values)
        payload_codec = coding if payload is not None or out is not None else Codec.NONE
        seq = 0 if push is None else push.seq
        meta = b"" if push is None else encode_push(push.meta)

        versions = known if push is None else push.base_versions
        sending = 0.0

        def send(index: int) -> int:
            nonlocal sending
            start, (low, high) = self._clock(), self._places(index, coding)
            base = versions[index] if versions else 0
            request = Header(op, payload_codec, seq=seq, version=base, flags=flags, ahead=ahead)
            part = None if payload is None else section(payload, low, high)
            piece = self._shards[index].send(request, meta, part)
            sending += self._clock() - start
            return piece

        def send_payload(index: int) -> None:
            nonlocal sending
            start, (low, high) = self._clock(), self._places(index, coding)
            assert payload is not None
            self._shards[index].send_payload(section(payload, low, high))
            sending += self._clock() - start

        def receive(index: int) -> tuple[Header, bytearray]:
            into = None if out is None else self._target(out, index, coding)
            return self._shards[index].receive(expected, into)

        def large(index: int) -> bool:
            low, high = self._places(index, coding)
            return asks((high - low) * coding.itemsize)

        def exchange(index: int, out: NDArray[Any]) -> tuple[Header, bytearray]:
            """One large request: nothing of another one is sent meanwhile, as they would share the worker's link."""
            piece = send(index)
            if payload is None or not large(index):
                return receive(index)
            if piece and self._tls:
                part, into = section(payload, *self._places(index, coding)), self._target(out, index, coding)
                return self._shards[index].exchange(piece, part, expected, into)
            if not piece:
                send_payload(index)
                return receive(index)
            return self._overlapped(lambda: send_payload(index), lambda: receive(index))

        order = range(len(self._shards))
        try:
            if out is not None and any(map(large, order)):
                answers = [exchange(index, out) for index in order]
            else:
                for index in order:
                    send(index)
                    if payload is not None and large(index):
                        send_payload(index)
                answers = [receive(index) for index in order]
        except BaseException:
            self.close()
            raise
        asked, waits = any(map(large, order)), [answer.waited for answer, _ in answers]
        waited, rest = sum(waits) if asked else max(waits), self._clock() - begin - sending
        # A worker that asks waits before it sends; else the connection takes what is sent, or most of it, meanwhile.
        before = waited if asked else max(0.0, waited - rest)
        return Pulled(
            versions=tuple(answer.version for answer, _ in answers),
            answers=tuple(
                decode_answer(meta) if expected is Op.PARAMETERS else AnswerMeta() for _, meta in answers
            ),
            push_seconds=max(0.0, sending - before),
            pull_seconds=max(0.0, rest + before - waited),
            wait_seconds=waited,
            filled=answers[0][0].filled,
        )

    def _overlapped(
        self, send: Callable[[], None], receive: Callable[[], tuple[Header, bytearray]]
    ) -> tuple[Header, bytearray]:
        """Read the answer while the payload is sent."""
        reading = self._reader.submit(receive)
        try:
            send()
            return reading.result()
        except BaseException:
            self.close()
            # Wait for it, because it writes to the caller's buffer.
            if isinstance(reason := reading.exception(), (Fenced, UserError)):
                raise reason from None  # why the server closed the connection during `send`
            raise

    def _places(self, index: int, codec: Codec) -> tuple[int, int]:
        """The range of a coded vector that one shard holds."""
        low, high = (place(bound, self._trainable, codec.dtype) for bound in self._bounds[index])
        return low, high

    def _target(self, out: NDArray[Any], index: int, codec: Codec) -> Target:
        """Where the answer of one shard goes."""
        start, end = self._bounds[index]
        low, high = self._places(index, codec) if out.dtype == codec.dtype else (start, end)
        return Target(out[low:high], end - start, max(0, self._trainable - start), codec)

    def _encode(self, flat: Vector) -> Payload:
        if self.codec is Codec.FP32 or flat.dtype == np.uint16 or not isinstance(flat, np.ndarray):
            return flat
        encode(flat, self._outgoing, self._trainable)
        return self._outgoing

    def _check(self, flat: Vector) -> None:
        size = self._bounds[-1][1] if self._bounds else -1
        if size < 0:
            raise Unreachable(UNCONNECTED)
        contiguous = not isinstance(flat, np.ndarray) or flat.flags.c_contiguous
        dtypes = (np.float32, np.uint16) if self.codec is Codec.BF16 else (np.float32,)
        expected = place(size, self._trainable, flat.dtype)
        if flat.shape != (expected,) or flat.dtype not in dtypes or not contiguous:
            raise ValueError(
                f"a flat vector has shape ({size},) in float32, not {flat.shape} in {flat.dtype}"
            )


def _welcome(shard: ShardClient) -> ShardWelcome:
    return decode_json(ShardWelcome, shard.receive(Op.WELCOME)[1])
