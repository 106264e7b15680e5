"""Mutual authentication: client and server prove that they have the job's key before anything else is sent.

```
client                                       server
hello: key id, job, shard, slot, nonce  ->
                                        <-   hello: epoch, boot, nonce, proof(server)
proof(client)                           ->
                                        <-   verdict
```

Each proof is HMAC-SHA256 over the transcript so far, with a key derived for that side. It cannot be replayed (nonces),
reflected (two keys), or used for another job, shard, epoch or, under TLS, certificate (all in the transcript). It is
not bound to the TLS connection itself: Python's `ssl` has no exporter of TLS 1.3. Who could relay it has the
certificate's private key, which lies beside the job's key. Frames have fixed lengths, which an unauthenticated peer
cannot choose. Later messages on a plain socket are not authenticated: use TLS.

A client that knows a newer epoch of the server still sends its proof before it disconnects, so that the old server
learns that it was replaced and exits. With ephemeral storage there is no other way to learn it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum

from shoal_trainer.errors import Fenced, ProtocolError, TooSlow, Unauthorized, Unreachable
from shoal_trainer.security import Credentials, derive, key_digest
from shoal_trainer.wire.channel import Channel

MAGIC = b"SHOALv1\0"
NONCE = 32
_CLIENT = struct.Struct("<8sxxHIII32s32s32s")
_SERVER = struct.Struct("<8sBxxxIQ32s32s")
_VERDICT = struct.Struct("<B7x")


class Verdict(IntEnum):
    """The result of a handshake."""

    WELCOME = 0
    REFUSED = 1
    FENCED = 2
    SUPERSEDED = 3


@dataclass(frozen=True, slots=True)
class Peer:
    """The authenticated client. `minimum_epoch`: the newest epoch of this shard to which it has connected."""

    shard: int
    slot: int
    incarnation: int
    minimum_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Server:
    """The authenticated server."""

    epoch: int
    boot: int


def job_digest(job_uid: str) -> bytes:
    """SHA-256 of the run's uid, which has a fixed length."""
    return hashlib.sha256(b"shoal/v1/job\0" + job_uid.encode()).digest()


def _proof(key: bytes, side: str, binding: bytes, *frames: bytes) -> bytes:
    return hmac.new(derive(key, f"data/{side}"), binding + b"".join(frames), hashlib.sha256).digest()


def connect(
    channel: Channel,
    credentials: Credentials,
    job_uid: str,
    peer: Peer,
    *,
    binding: bytes = b"",
) -> Server:
    """The client's side of the handshake.

    `Unauthorized` if either side cannot prove that it has the key, `Fenced` if `peer` was replaced, `Unreachable` if
    the server is older than `peer.minimum_epoch`.
    """
    key = credentials.key
    hello = _CLIENT.pack(
        MAGIC,
        peer.shard,
        peer.slot,
        peer.incarnation,
        peer.minimum_epoch,
        key_digest(credentials.key_id),
        job_digest(job_uid),
        secrets.token_bytes(NONCE),
    )
    channel.send(hello)
    answer = bytes(channel.receive_bytes(_SERVER.size, limit=_SERVER.size))
    magic, verdict, epoch, boot, _, proof = _SERVER.unpack(answer)
    if magic != MAGIC:
        raise ProtocolError("the peer is not a Shoal parameter server")
    if verdict != Verdict.WELCOME:
        raise Unauthorized("the parameter server has another key, or serves another job or shard")
    expected = _proof(key, "server", binding, hello, answer[: -len(proof)])
    if not hmac.compare_digest(expected, proof):
        raise Unauthorized("the parameter server cannot prove that it has the job's key")
    channel.send(_proof(key, "client", binding, hello, answer))
    if epoch < peer.minimum_epoch:
        raise Unreachable(
            f"an older parameter server answered: epoch {epoch}, expected at least {peer.minimum_epoch}"
        )
    (final,) = _VERDICT.unpack(channel.receive_bytes(_VERDICT.size, limit=_VERDICT.size))
    if final == Verdict.FENCED:
        raise Fenced(f"slot {peer.slot} has a newer incarnation than {peer.incarnation}")
    if final != Verdict.WELCOME:
        raise Unauthorized("the parameter server refused this worker's proof")
    return Server(epoch, boot)


def read_peer(frame: bytes) -> tuple[Peer, bytes, bytes]:
    """Decode a client's first frame into (peer, key digest, job digest); `ProtocolError` if it is invalid."""
    if len(frame) != _CLIENT.size:
        raise ProtocolError(f"a client's first frame has {_CLIENT.size} bytes, not {len(frame)}")
    magic, shard, slot, incarnation, minimum, key, job, _ = _CLIENT.unpack(frame)
    if magic != MAGIC:
        raise ProtocolError("the peer is not a Shoal data-plane client")
    return Peer(shard, slot, incarnation, minimum), key, job


def accept(
    channel: Channel,
    credentials: Credentials,
    job_uid: str,
    shard: int,
    server: Server,
    *,
    binding: bytes = b"",
    deadline: float,
) -> Peer:
    """The server's side up to the client's proof; the caller sends the verdict with `conclude`.

    `Unauthorized` if the client has another key, asks for another job or shard, misses the deadline, or sends no proof;
    `Unreachable` if it closes the connection before that, as health probes do.
    """
    frame = bytearray(_CLIENT.size)
    try:
        channel.receive_by(memoryview(frame), deadline)
    except TooSlow as error:
        raise Unauthorized(f"no handshake: {error}") from None
    hello = bytes(frame)
    try:
        peer, key_name, job = read_peer(hello)
        if peer.shard != shard or not hmac.compare_digest(job, job_digest(job_uid)):
            raise Unauthorized("the peer asks for another job or shard")
        if not hmac.compare_digest(key_name, key_digest(credentials.key_id)):
            raise Unauthorized("the peer uses another key than this job's")
    except ProtocolError:
        refusal = _SERVER.pack(MAGIC, Verdict.REFUSED, 0, 0, bytes(NONCE), bytes(NONCE))
        channel.send(refusal)
        raise
    key, nonce = credentials.key, secrets.token_bytes(NONCE)
    head = _SERVER.pack(MAGIC, Verdict.WELCOME, server.epoch, server.boot, nonce, bytes(32))[:-32]
    answer = head + _proof(key, "server", binding, hello, head)
    channel.send(answer)
    proof = bytearray(32)
    try:
        channel.receive_by(memoryview(proof), deadline)
    except Unreachable as error:  # a client with another key of the same id closes the connection
        raise Unauthorized(f"the peer sent no proof that it has the job's key: {error}") from None
    if not hmac.compare_digest(bytes(proof), _proof(key, "client", binding, hello, answer)):
        conclude(channel, Verdict.REFUSED)
        raise Unauthorized("the peer cannot prove that it has the job's key")
    return peer


def conclude(channel: Channel, verdict: Verdict) -> None:
    """Send the verdict to an authenticated client."""
    channel.send(_VERDICT.pack(verdict))
