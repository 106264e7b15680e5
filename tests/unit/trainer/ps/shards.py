"""A small shard, a manual clock, and a crashed shard with its successor."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal_trainer.ps.pieces import Payload
from shoal_trainer.ps.shard import Answer, ShardCopy, ShardStore
from shoal_trainer.ps.streams import Stream
from shoal_trainer.wire.messages import (
    ModelSpec,
    OptimizerConfig,
    PushMeta,
)

N = 8
SGD = OptimizerConfig(learning_rate=1.0, batch_size=1)
MODEL = ModelSpec(fingerprint="f" * 64, parameters=N, optimizer=SGD)
ONE = PushMeta(samples=1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def copy_of(shard: ShardStore) -> ShardCopy:
    copy = shard.copy()
    assert copy is not None
    return copy


def grad(value: float = 1.0, n: int = N) -> np.ndarray:
    return np.full(n, value, np.float32)


def ready(model: ModelSpec = MODEL, **arguments: Any) -> ShardStore:
    shard = ShardStore(0, 1, 0, boot=1, **arguments)
    shard.hello(0, 0, model)
    shard.offer(0, 0, grad(0.0, model.size))
    return shard


def pull_from(shard: ShardStore, slot: int, io: Payload, **options: Any) -> Answer:
    """Write the parameters to `io`, for the newest worker of a slot. `options`: of `ShardStore.pulling`."""
    newest = dict(shard.workers.refused()[0]).get(slot, 0)
    return shard.run(shard.pulling(slot, newest, **options), io)


def push_to(
    shard: ShardStore,
    slot: int,
    incarnation: int,
    seq: int,
    base: int,
    meta: PushMeta,
    io: Payload,
    **options: Any,
) -> Answer:
    """Apply what is in `io`, and write the parameters to it. `options`: of `ShardStore.pushing`."""
    return shard.run(shard.pushing(slot, incarnation, seq, base, meta, **options), io)


def read(shard: ShardStore) -> np.ndarray:
    out = grad(0.0, shard.size)
    pull_from(shard, 0, out)
    return out


DELTA = OptimizerConfig(name="delta", learning_rate=1.0, batch_size=4)


def crashed(pushes: int, snapshot_at: int, clock: Clock) -> tuple[ShardStore, np.ndarray, ShardStore]:
    """A shard after `pushes` from worker 0, its last answer, and a successor restored from version `snapshot_at`."""
    old, copy = ready(), None
    for seq in range(1, pushes + 1):
        io = grad(0.001 * seq)
        push_to(old, 0, 0, seq, seq - 1, ONE, io)
        if seq == snapshot_at:
            copy = old.copy()
    new = ShardStore(0, 1, 1, clock=clock)
    if copy is not None:
        new.restore(copy)
    return old, io, new


def held_up(stream: Stream[Any]) -> bool:
    """Whether the next piece would tear the answer of another walk, which moves on."""
    return bool(stream._walks.held_up(stream._walk))


def blocked(stream: Stream[Any]) -> bool:
    """Whether `step` would wait: for another thread's work on the piece, or for a snapshot."""
    return stream._must_wait()
