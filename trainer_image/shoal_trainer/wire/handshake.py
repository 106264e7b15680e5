"""Both sides prove that they hold the job's key before anything else is sent.

```
client                                             server
hello: key id, job, role, shard, slot, nonce  ->
                                              <-   hello: epoch, boot, nonce, proof(server)
proof(client)                                 ->
                                              <-   verdict
```

Each proof is HMAC-SHA256 over the whole transcript so far, under a key derived for that side alone: so a proof cannot
be replayed (nonces), reflected (two keys), or used for another job, shard, epoch, or TLS connection (all are in the
transcript). All frames have a fixed length: an unproven peer cannot choose one. What follows on a plain socket is not
protected against an attacker on the path; that requires TLS.

A client that has met a newer epoch proves itself to an older server before it leaves: the server then knows that it
was replaced, and ends. With ephemeral storage no claim tells it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum

from shoal_trainer.contract import Role
from shoal_trainer.errors import Fenced, ProtocolError, Unauthorized, Unreachable
from shoal_trainer.security import Credentials, derive, key_digest
from shoal_trainer.wire.channel import Channel

MAGIC = b"SHOALv1\0"
NONCE = 32
_CLIENT = struct.Struct("<8sBxHIII32s32s32s")
_SERVER = struct.Struct("<8sBxxxIQ32s32s")
_VERDICT = struct.Struct("<B7x")
_ROLES = (Role.WORKER, Role.PS)


class Verdict(IntEnum):
    """How a handshake ends."""

    WELCOME = 0
    REFUSED = 1
    FENCED = 2
    SUPERSEDED = 3


@dataclass(frozen=True, slots=True)
class Peer:
    """The proven client. `minimum_epoch` is the newest epoch of this shard that it has met."""

    role: Role
    shard: int
    slot: int
    incarnation: int
    minimum_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Server:
    """The proven server."""

    epoch: int
    boot: int


def job_digest(job_uid: str) -> bytes:
    """The run's uid at a fixed length."""
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
    key_id: str | None = None,
) -> Server:
    """The client's side. `Unauthorized` if either side cannot prove the key, `Fenced` if `peer` has been replaced."""
    name = key_id or credentials.key_id
    key = credentials.keys[name]
    hello = _CLIENT.pack(
        MAGIC,
        _ROLES.index(peer.role),
        peer.shard,
        peer.slot,
        peer.incarnation,
        peer.minimum_epoch,
        key_digest(name),
        job_digest(job_uid),
        secrets.token_bytes(NONCE),
    )
    channel.send(hello)
    answer = bytes(channel.receive_bytes(_SERVER.size, limit=_SERVER.size))
    magic, verdict, epoch, boot, _, proof = _SERVER.unpack(answer)
    if magic != MAGIC:
        raise ProtocolError("the peer is not a parameter server of Shoal")
    if verdict != Verdict.WELCOME:
        raise Unauthorized("the parameter server refused the job's key, or serves another job or shard")
    expected = _proof(key, "server", binding, hello, answer[: -len(proof)])
    if not hmac.compare_digest(expected, proof):
        raise Unauthorized("the parameter server cannot prove the job's key")
    channel.send(_proof(key, "client", binding, hello, answer))
    if epoch < peer.minimum_epoch:
        raise Unreachable(f"an older parameter server answers (epoch {epoch}, wanted {peer.minimum_epoch})")
    (final,) = _VERDICT.unpack(channel.receive_bytes(_VERDICT.size, limit=_VERDICT.size))
    if final == Verdict.FENCED:
        raise Fenced(f"slot {peer.slot} has a newer incarnation than {peer.incarnation}")
    if final != Verdict.WELCOME:
        raise Unauthorized("the parameter server refused this side's proof")
    return Server(epoch, boot)


def read_peer(frame: bytes) -> tuple[Peer, bytes, bytes]:
    """A client's first frame as (peer, key digest, job digest); `ProtocolError` for anything else."""
    if len(frame) != _CLIENT.size:
        raise ProtocolError(f"a client's first frame has {_CLIENT.size} bytes, not {len(frame)}")
    magic, role, shard, slot, incarnation, minimum, key, job, _ = _CLIENT.unpack(frame)
    if magic != MAGIC or role >= len(_ROLES):
        raise ProtocolError("not a client of Shoal's data plane")
    return Peer(_ROLES[role], shard, slot, incarnation, minimum), key, job


def accept(
    channel: Channel,
    credentials: Credentials,
    job_uid: str,
    shard: int,
    server: Server,
    *,
    binding: bytes = b"",
    deadline: float | None = None,
) -> Peer:
    """The server's side up to the client's proof; the caller gives the verdict with `conclude`."""
    frame = bytearray(_CLIENT.size)
    channel.receive(memoryview(frame), deadline=deadline)
    hello = bytes(frame)
    try:
        peer, key_name, job = read_peer(hello)
        if peer.shard != shard or not hmac.compare_digest(job, job_digest(job_uid)):
            raise Unauthorized("a peer asks for another job or shard")
        key = credentials.key_for(key_name)
    except ProtocolError:
        refusal = _SERVER.pack(MAGIC, Verdict.REFUSED, 0, 0, bytes(NONCE), bytes(NONCE))
        channel.send(refusal)
        raise
    nonce = secrets.token_bytes(NONCE)
    head = _SERVER.pack(MAGIC, Verdict.WELCOME, server.epoch, server.boot, nonce, bytes(32))[:-32]
    answer = head + _proof(key, "server", binding, hello, head)
    channel.send(answer)
    proof = bytearray(32)
    channel.receive(memoryview(proof), deadline=deadline)
    if not hmac.compare_digest(bytes(proof), _proof(key, "client", binding, hello, answer)):
        conclude(channel, Verdict.REFUSED)
        raise Unauthorized("a peer could not prove the job's key")
    return peer


def conclude(channel: Channel, verdict: Verdict) -> None:
    """Send the verdict to a proven peer."""
    channel.send(_VERDICT.pack(verdict))
