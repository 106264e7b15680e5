"""Which workers a recovering shard waits for."""

import pytest

from shoal_trainer.ps.buffers import aligned
from shoal_trainer.ps.recovery import JITTER, LONGEST_PAUSE, Recovery, longest_pause
from shoal_trainer.ps.shard import ShardStore, State
from shoal_trainer.wire.messages import ModelSpec, PushMeta

MODEL = ModelSpec(fingerprint="0" * 64, parameters=8)


def test_connection_without_hello_leaves_the_worker_expected():
    old = ShardStore(0, 1, 0)
    old.connect(0, 0)
    old.hello(0, 0, MODEL)
    old.initialize(aligned(8))
    old.delta(0, 0, 1, 0, PushMeta(samples=1), aligned(8))
    new = ShardStore(0, 1, 1)
    new.restore(old.copy())
    new.connect(0, 0)
    new.disconnect(0)
    new.connect(1, 0)
    assert new.hello(1, 0, MODEL).recovering
    new.connect(0, 0)
    assert new.hello(0, 0, MODEL, copy_version=2).wants_copy
    assert new.state is State.RECOVERING


def test_snapshot_from_before_the_first_push_yields_to_a_workers_copy():
    old = ShardStore(0, 1, 0)
    old.hello(0, 0, MODEL)
    old.initialize(aligned(8))
    new = ShardStore(0, 1, 1)
    new.restore(old.copy())
    io = aligned(8)
    old.delta(0, 0, 1, 0, PushMeta(samples=1), io)
    answer = old.pull(0, io)
    assert new.hello(1, 0, MODEL).recovering
    assert new.hello(0, 0, MODEL, copy_version=1).wants_copy
    new.offer(0, 0, answer.version, answer.meta, io)
    assert new.version == 1


def test_worker_that_joined_after_the_snapshot_is_awaited():
    """Worker 0's copy contains its push, so it may have pushed again after that copy was made."""
    old = ShardStore(0, 1, 0)
    old.hello(0, 0, MODEL)
    old.initialize(aligned(8))
    io, later = aligned(8), aligned(8)
    old.delta(0, 0, 1, 0, PushMeta(samples=1), io)
    snapshot = old.copy()
    old.hello(1, 0, MODEL)
    old.delta(1, 0, 1, 1, PushMeta(samples=1), io)
    first = old.delta(0, 0, 2, 2, PushMeta(samples=1), io)
    second = old.delta(1, 0, 2, 2, PushMeta(samples=1), later)

    new = ShardStore(0, 1, 1)
    new.restore(snapshot)
    assert new.hello(0, 0, MODEL, copy_version=first.version).wants_copy
    new.offer(0, 0, first.version, first.meta, io)
    assert new.state is State.RECOVERING
    assert new.hello(1, 0, MODEL, copy_version=second.version).wants_copy
    new.offer(1, 0, second.version, second.meta, later)
    assert (new.state, new.version) == (State.READY, second.version)


def test_worker_disconnected_before_its_copy_arrives_is_not_awaited():
    recovery = Recovery(1.0)
    recovery.restored({0})
    recovery.begin(0.0)
    recovery.requested(0)
    recovery.disconnected(0)
    assert recovery.over(0.0)


@pytest.mark.parametrize("workers", [1, 10, 200, 5000])
def test_shard_waits_longer_than_workers_pause(workers):
    recovery = Recovery(0.75)
    recovery.restored(range(workers))
    recovery.begin(0.0)
    assert longest_pause(workers) <= LONGEST_PAUSE
    assert not recovery.over(longest_pause(workers) * (1 + JITTER))
    assert recovery.over(0.75 if workers < 50 else 5.0)
