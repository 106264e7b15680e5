"""Shards of a small model, and their snapshots."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

from shoal_trainer.ps.kernels import Vector
from shoal_trainer.ps.shard import ShardCopy, ShardStore
from shoal_trainer.ps.shard_bounds import bounds
from shoal_trainer.snapshot import shard_file
from shoal_trainer.snapshot.manifest import Manifest
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig, PushMeta
from tests.unit.trainer.ps.shards import push_to

N, STATISTICS = 70_000, 500
MODEL = ModelSpec(
    fingerprint="f" * 64,
    parameters=N - STATISTICS,
    statistics=STATISTICS,
    optimizer=OptimizerConfig(name="adam", batch_size=1),
)


def shards(count: int, pushes: int = 3) -> list[ShardStore]:
    stores = []
    for index, (low, high) in enumerate(bounds(N, count)):
        shard = ShardStore(index, count, 0)
        shard.hello(0, 0, MODEL)
        shard.offer(0, 0, np.linspace(-1, 1, N, dtype=np.float32)[low:high])
        for seq in range(1, pushes + 1):
            gradient = np.cos(np.arange(N, dtype=np.float32) * seq)[low:high]
            push_to(shard, 0, 0, seq, seq - 1, PushMeta(samples=1), gradient)
        stores.append(shard)
    return stores


def save(store: SnapshotStore, stores: list[ShardStore], epoch: int = 0, **fields: Any) -> Manifest:
    number = store.next_number()
    files = [store.write_shard(number, epoch, copy) for shard in stores if (copy := shard.copy())]
    assert stores[0].model is not None
    model = stores[0].model.spec
    return store.publish(
        Manifest(number=number, epoch=epoch, run="uid", shards=tuple(files), model=model, **fields)
    )


def whole(copies: list[ShardCopy], name: str) -> np.ndarray:
    return np.concatenate([copy.arrays[name] for copy in copies])


def latest(store: SnapshotStore) -> Manifest | None:
    """The newest intact snapshot."""
    found = store.load_newest(0, 1)
    return None if found is None else found[0]


class Alive:
    """How many of the vectors that snapshots are read into are in memory, beside the shard's own: one fits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._made: list[weakref.ref[Vector]] = []
        self.most = 0
        empty = shard_file.empty

        def noted(size: int) -> Vector:
            vector = empty(size)
            self._made.append(weakref.ref(vector))
            self.most = max(self.most, self.now)
            return vector

        patch.setattr(shard_file, "empty", noted)

    @property
    def now(self) -> int:
        return sum(vector() is not None for vector in self._made)
