"""Which workers a recovering shard waits for."""

import pytest

from shoal_trainer.errors import UserError
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.recovery import (
    BEGIN_SECONDS,
    FIRST_COPY_SECONDS,
    JITTER,
    LONGEST_PAUSE,
    Origin,
    Recovery,
    Worth,
    longest_pause,
)
from shoal_trainer.ps.shard import ShardStore, State
from shoal_trainer.wire.messages import Held, ModelSpec, OptimizerConfig, PushMeta
from tests.unit.trainer.ps.shards import copy_of, pull_from, push_to

MODEL = ModelSpec(fingerprint="0" * 64, parameters=8)


def copy(version: int) -> Worth:
    return Worth(0, Origin.KNOWN, version)


def test_connection_without_hello_leaves_the_worker_expected() -> None:
    old = ShardStore(0, 1, 0)
    old.workers.connect(0, 0)
    old.hello(0, 0, MODEL)
    old.offer(0, 0, aligned(8))
    push_to(old, 0, 0, 1, 0, PushMeta(samples=1), aligned(8), delta=True)
    new = ShardStore(0, 1, 1)
    new.restore(copy_of(old))
    new.workers.connect(0, 0)
    new.disconnect(0)
    new.workers.connect(1, 0)
    assert not new.hello(1, 0, MODEL).ready
    new.workers.connect(0, 0)
    assert new.hello(0, 0, MODEL, Held(version=2)).wants_copy
    assert new.state is State.RECOVERING


def test_snapshot_from_before_the_first_push_yields_to_a_workers_copy() -> None:
    old = ShardStore(0, 1, 0)
    old.hello(0, 0, MODEL)
    old.offer(0, 0, aligned(8))
    new = ShardStore(0, 1, 1)
    new.restore(copy_of(old))
    io = aligned(8)
    push_to(old, 0, 0, 1, 0, PushMeta(samples=1), io, delta=True)
    answer = pull_from(old, 0, io)
    assert not new.hello(1, 0, MODEL).ready
    assert new.hello(0, 0, MODEL, Held(version=1)).wants_copy
    new.offer(0, 0, io, answer.version, answer.meta)
    assert new.history.version == 1


def test_worker_that_joined_after_the_snapshot_is_awaited() -> None:
    """Worker 0's copy contains its push, so it may have pushed again after that copy was made."""
    old = ShardStore(0, 1, 0)
    old.hello(0, 0, MODEL)
    old.offer(0, 0, aligned(8))
    io, later = aligned(8), aligned(8)
    push_to(old, 0, 0, 1, 0, PushMeta(samples=1), io, delta=True)
    snapshot = copy_of(old)
    old.hello(1, 0, MODEL)
    push_to(old, 1, 0, 1, 1, PushMeta(samples=1), io, delta=True)
    first = push_to(old, 0, 0, 2, 2, PushMeta(samples=1), io, delta=True)
    second = push_to(old, 1, 0, 2, 2, PushMeta(samples=1), later, delta=True)

    new = ShardStore(0, 1, 1)
    new.restore(snapshot)
    assert new.hello(0, 0, MODEL, Held(version=first.version)).wants_copy
    new.offer(0, 0, io, first.version, first.meta._replace(applied={(0, 0): 2, (1, 0): 1}))
    assert new.state is State.RECOVERING
    assert new.hello(1, 0, MODEL, Held(version=second.version)).wants_copy
    new.offer(1, 0, later, second.version, second.meta._replace(applied={(0, 0): 2, (1, 0): 2}))
    assert (new.state, new.history.version) == (State.READY, second.version)


def test_copy_that_names_its_own_worker_only_does_not_end_the_wait() -> None:
    """The snapshot is from before the first push: worker 1 was cut off since, and others have trained."""
    recovery = Recovery(0.75, follows=True)
    recovery.restored(copy(0), set())
    assert recovery.hello(1, copy(3), 0.0, whole=True)
    recovery.adopted(copy(3), {1}, 0.0)
    recovery.sent(1, 0.0)
    assert not recovery.over(0.4)
    assert recovery.hello(2, copy(40), 0.4, whole=True)
    recovery.adopted(copy(40), {1, 2}, 0.5)
    recovery.sent(2, 0.5)
    assert recovery.over(0.75)


def test_worker_disconnected_before_its_copy_arrives_is_not_awaited() -> None:
    recovery = Recovery(1.0, follows=True)
    recovery.restored(copy(0), {0})
    assert recovery.hello(0, copy(1), 0.0, whole=True)
    recovery.disconnected(0, 0.0)
    assert recovery.over(0.0)


@pytest.mark.parametrize("origin", [Origin.COPY, Origin.KNOWN])
def test_another_worker_is_asked_where_the_first_one_has_gone_without_a_word(origin: Origin) -> None:
    """Its connection stands until the kernel takes it for dead, and its process may hang: 60 s for nothing."""
    recovery, offered = Recovery(0.75, follows=True), Worth(0, origin, 7)
    assert recovery.hello(0, offered, 0.0, whole=True)
    assert not recovery.hello(1, offered, BEGIN_SECONDS - 0.1, whole=True)
    assert recovery.hello(1, offered, BEGIN_SECONDS, whole=True)
    assert not recovery.hello(2, offered, BEGIN_SECONDS, whole=True)
    assert recovery.begins(1, BEGIN_SECONDS)
    recovery.adopted(offered, {0, 1}, BEGIN_SECONDS + 1)
    recovery.sent(1, BEGIN_SECONDS + 1)
    assert recovery.over(BEGIN_SECONDS + 1)


def test_no_other_worker_is_asked_while_one_sends() -> None:
    """Parameters may be gigabytes."""
    recovery = Recovery(0.75, follows=True)
    assert recovery.hello(0, copy(7), 0.0, whole=True)
    assert recovery.begins(0, BEGIN_SECONDS - 1)
    assert not recovery.hello(1, copy(7), 3 * BEGIN_SECONDS, whole=True)


@pytest.mark.parametrize("workers", [1, 10, 200, 5000])
def test_shard_waits_longer_than_workers_pause(workers: int) -> None:
    recovery = Recovery(0.75, follows=True)
    recovery.restored(copy(0), range(workers))
    recovery.hello(workers, copy(0), 0.0, whole=True)
    assert longest_pause(workers) <= LONGEST_PAUSE
    assert not recovery.over(longest_pause(workers) * (1 + JITTER))
    assert recovery.over(0.75 if workers < 50 else 5.0)


def test_worker_without_a_copy_leaves_time_for_those_with_one() -> None:
    old = ShardStore(0, 1, 0)
    old.hello(0, 0, MODEL)
    old.offer(0, 0, aligned(8))
    io, now = aligned(8), [0.0]
    push_to(old, 0, 0, 1, 0, PushMeta(samples=1), io, delta=True)
    snapshot = copy_of(old)
    push_to(old, 0, 0, 2, 1, PushMeta(samples=1), io, delta=True)
    answer = pull_from(old, 0, io)
    new = ShardStore(0, 1, 1, clock=lambda: now[0])
    new.restore(snapshot)
    assert not new.hello(1, 0, MODEL).ready  # it replaces a lost worker
    now[0] = 5.0  # of connecting to another lost shard
    assert new.hello(0, 0, MODEL, Held(version=answer.version)).wants_copy
    new.offer(0, 0, io, answer.version, answer.meta)
    now[0] = 6.0
    assert (new.state, new.history.version) == (State.READY, answer.version)


def test_copies_are_awaited_although_the_workers_of_the_snapshot_were_replaced() -> None:
    old = ShardStore(0, 1, 0)
    old.hello(0, 0, MODEL)
    old.offer(0, 0, aligned(8))
    io, now = aligned(8), [0.0]
    push_to(old, 0, 0, 1, 0, PushMeta(samples=1), io, delta=True)
    snapshot = copy_of(old)
    old.hello(1, 0, MODEL)
    push_to(old, 1, 0, 1, 1, PushMeta(samples=1), io, delta=True)
    answer = pull_from(old, 1, io)
    new = ShardStore(0, 1, 1, clock=lambda: now[0])
    new.restore(snapshot)
    assert not new.hello(0, 1, MODEL).ready  # the successor of the only worker that the snapshot names
    now[0] = 0.7
    assert new.hello(1, 0, MODEL, Held(version=answer.version)).wants_copy
    new.offer(1, 0, io, answer.version, answer.meta)
    now[0] = 1.0
    assert (new.state, new.history.version) == (State.READY, answer.version)


def test_replaced_workers_alone_are_not_kept_waiting() -> None:
    recovery = Recovery(0.75, follows=True)
    recovery.restored(copy(0), {0})
    assert not recovery.hello(0, Worth(origin=Origin.FIRST), 0.0, whole=False)
    assert recovery.remaining(0.0) == 0.75
    assert recovery.over(0.75)


@pytest.mark.parametrize(("slots", "seconds"), [({0, 1}, FIRST_COPY_SECONDS), (None, 0.75)])
def test_wait_without_any_copy_is_bounded(slots: set[int] | None, seconds: float) -> None:
    """A snapshot of another run awaits no copy."""
    recovery = Recovery(0.75, follows=True)
    recovery.restored(Worth(origin=Origin.COPY) if slots is None else copy(0), slots or ())
    for now in (0.0, 0.5):
        recovery.hello(0, Worth(origin=Origin.FIRST), now, whole=False)
    assert not recovery.over(seconds - 0.01)
    assert recovery.over(seconds)


def test_only_the_first_worker_after_another_run_may_change_the_optimizer() -> None:
    old = ShardStore(0, 1, 0)
    old.hello(0, 0, MODEL)
    old.offer(0, 0, aligned(8))
    new = ShardStore(0, 1, 0)
    new.restore(copy_of(old), other_run=True)
    new.hello(0, 0, MODEL)
    with pytest.raises(UserError, match="optimizer"):
        new.hello(1, 0, MODEL.model_copy(update={"optimizer": OptimizerConfig(learning_rate=1.0)}))
