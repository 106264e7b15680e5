"""A restored shard refuses the incarnations that its predecessor refused."""

from __future__ import annotations

import numpy as np
import pytest

from shoal_trainer.errors import Fenced
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.wire.messages import Held, ModelSpec, PushMeta
from tests.unit.trainer.ps.shards import pull_from, push_to

MODEL = ModelSpec(fingerprint="0" * 64, parameters=8)


def push(shard: ShardStore, incarnation: int, seq: int) -> None:
    push_to(
        shard,
        3,
        incarnation,
        seq,
        shard.history.version,
        PushMeta(samples=1),
        np.ones(8, np.float32),
        delta=True,
    )


@pytest.fixture
def before() -> ShardStore:
    """Slot 3 was replaced: incarnations 0 and 1 have pushed."""
    shard = ShardStore(0, 1, 0)
    shard.hello(3, 0, MODEL)
    shard.offer(0, 0, aligned(8))
    for incarnation in (0, 1):
        shard.workers.connect(3, incarnation)
        push(shard, incarnation, 1)
    return shard


def test_restored_shard_refuses_a_replaced_incarnation(before: ShardStore) -> None:
    copy = before.copy()
    assert copy is not None
    shard = ShardStore(0, 1, 1)
    shard.restore(copy)
    with pytest.raises(Fenced, match="incarnation 1"):
        shard.workers.connect(3, 0)
    shard.workers.connect(3, 1)


def test_shard_that_adopted_a_copy_refuses_a_replaced_incarnation(before: ShardStore) -> None:
    io = aligned(8)
    before.workers.connect(4, 0)
    answer = pull_from(before, 4, io)
    shard = ShardStore(0, 1, 1)
    shard.workers.connect(4, 0)
    assert shard.hello(4, 0, MODEL, Held(version=answer.version)).wants_copy
    shard.offer(4, 0, io, answer.version, answer.meta)
    assert shard.history.version == before.history.version
    with pytest.raises(Fenced, match="incarnation 1"):
        shard.workers.connect(3, 0)


def test_shard_of_another_run_refuses_no_incarnation(before: ShardStore) -> None:
    copy = before.copy()
    assert copy is not None
    shard = ShardStore(0, 1, 0)
    shard.restore(copy, other_run=True)
    shard.workers.connect(3, 0)
