"""What PS 0 asks of the other shards: their part of a snapshot."""

from __future__ import annotations

from shoal_trainer.contract import Role, Shard
from shoal_trainer.ps.client import ShardClient
from shoal_trainer.security import Credentials
from shoal_trainer.snapshot.manifest import ShardFile
from shoal_trainer.wire.header import Header, Op
from shoal_trainer.wire.messages import WorkerIdentity, decode_json


def request_snapshot(
    shard: int,
    address: Shard,
    *,
    number: int,
    epoch: int,
    job_uid: str,
    credentials: Credentials,
    tls: bool = False,
    timeout: float = 600.0,
) -> ShardFile:
    """Let `shard` write its file of snapshot `number`, at `epoch` of PS 0; blocks until it has."""
    identity = WorkerIdentity(job_uid, 0, epoch)
    client = ShardClient(shard, address, identity, credentials, role=Role.PS, tls=tls, timeout=timeout)
    client.connect()
    try:
        client.send(Header(Op.SNAPSHOT, seq=number))
        return decode_json(ShardFile, client.receive(Op.OK)[1])
    finally:
        client.close()
