"""The state of a shard: who may write, what is applied once, how it comes back."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shoal_trainer.contract import Staleness
from shoal_trainer.errors import Fenced, ProtocolError, Unreachable, UserError
from shoal_trainer.ps.journal import Log
from shoal_trainer.ps.recovery import LONGEST
from shoal_trainer.ps.shard import AppliedPush, ShardStore, State
from shoal_trainer.ps.values import KEPT_INCARNATIONS
from shoal_trainer.wire.messages import (
    AnswerMeta,
    Entry,
    Journal,
    ModelSpec,
    OptimizerConfig,
    Progress,
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


def grad(value: float = 1.0, n: int = N) -> np.ndarray:
    return np.full(n, value, np.float32)


def ready(model: ModelSpec = MODEL, **arguments) -> ShardStore:
    shard = ShardStore(0, 1, 0, boot=1, **arguments)
    shard.hello(0, 0, model)
    shard.initialize(grad(0.0, model.size))
    return shard


def read(shard: ShardStore) -> np.ndarray:
    out = grad(0.0, shard.size)
    shard.pull(0, out)
    return out


def test_first_writer_wins() -> None:
    shard = ready()
    shard.initialize(grad(7.0))
    np.testing.assert_array_equal(read(shard), 0)


def test_a_push_answers_with_the_parameters_after_it() -> None:
    shard, io = ready(), grad()
    answer = shard.push(0, 0, 1, 0, ONE, io)
    np.testing.assert_array_equal(io, -1)
    assert (answer.version, answer.meta.samples, answer.meta.applied) == (1, 1, {(0, 0): 1})


def test_a_resend_is_answered_and_not_applied_twice() -> None:
    applied: list[AppliedPush] = []
    shard = ready(on_applied=applied.append)
    for _ in range(3):
        io = grad()
        assert shard.push(0, 0, 1, 0, ONE, io).version == 1
        np.testing.assert_array_equal(io, -1)
    assert [push.seq for push in applied] == [1]


def test_a_push_meant_for_another_boot_is_not_applied() -> None:
    shard = ready()
    with pytest.raises(Unreachable, match="before its restart"):
        shard.push(0, 0, 1, 0, ONE, grad(), boot=2)
    assert shard.version == 0


def test_an_older_incarnation_never_writes() -> None:
    shard = ready()
    shard.connect(3, 1)
    shard.push(3, 1, 1, 0, ONE, grad())
    shard.connect(3, 2)
    with pytest.raises(Fenced):
        shard.push(3, 1, 2, 0, ONE, grad())
    with pytest.raises(Fenced):
        shard.connect(3, 1)
    shard.fence(4, 5)
    with pytest.raises(Fenced, match="slot 4 has incarnation 5"):
        shard.hello(4, 4, MODEL)
    assert shard.version == 1


def test_what_no_shard_takes() -> None:
    shard = ready()
    with pytest.raises(ProtocolError, match="holds 8 values, the message 9"):
        shard.push(0, 0, 1, 0, ONE, grad(1.0, 9))
    with pytest.raises(ProtocolError, match="begin at 1"):
        shard.push(0, 0, 0, 0, ONE, grad())
    with pytest.raises(Unreachable, match="empty"):
        ShardStore(0, 1, 0).pull(0, grad(0.0, 0))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (MODEL.model_copy(update={"parameters": 9}), "8 trainable and 0 other values, this worker's 9 and 0"),
        (MODEL.model_copy(update={"fingerprint": "0" * 64}), "names, shapes or types"),
        (MODEL.model_copy(update={"optimizer": OptimizerConfig()}), "optimizer is configured otherwise"),
    ],
)
def test_another_model_is_refused_in_words(other: ModelSpec, says: str) -> None:
    shard = ready()
    with pytest.raises(UserError, match=says):
        shard.hello(1, 0, other)


@pytest.mark.parametrize(
    ("policy", "weight"), [("Constant", 1.0), ("InverseSquareRoot", 0.5), ("Inverse", 0.25)]
)
def test_a_stale_gradient_counts_less(policy: str, weight: float) -> None:
    applied: list[AppliedPush] = []
    shard = ready(staleness=Staleness(policy=policy), on_applied=applied.append)  # type: ignore[arg-type]
    for seq in range(1, 5):
        shard.push(1, 0, seq, seq - 1, ONE, grad(0.0))
    io = grad()
    shard.push(0, 0, 1, 0, ONE, io)
    np.testing.assert_allclose(io, -weight)
    assert applied[-1].staleness == 4
    assert applied[-1].weight == pytest.approx(weight)


def test_pushes_weigh_by_their_samples() -> None:
    shard, io = ready(), grad()
    shard.push(0, 0, 1, 0, PushMeta(samples=3), io)
    np.testing.assert_array_equal(io, -3)


def test_statistics_are_merged_and_not_optimized() -> None:
    model = ModelSpec(fingerprint="f" * 64, parameters=N, statistics=2, optimizer=SGD)
    shard = ready(model)
    io = grad(1.0, N + 2)
    shard.push(0, 0, 1, 0, ONE, io)
    np.testing.assert_array_equal(io, [-1] * N + [1, 1])
    shard.push(0, 0, 2, 1, ONE, grad(0.0, N + 2))
    io = grad(1.0, N + 2)
    shard.push(1, 0, 1, 0, ONE, io)
    np.testing.assert_array_equal(io[N:], 1.5)  # two versions old: half of it


def test_weight_decay_leaves_alone_what_is_excluded() -> None:
    config = OptimizerConfig(
        name="adamw", learning_rate=0.1, weight_decay=0.5, batch_size=1, no_decay=((2, 4), (6, 100))
    )
    shard = ShardStore(0, 1, 0)
    shard.hello(0, 0, MODEL.model_copy(update={"optimizer": config}))
    shard.initialize(grad(1.0))
    io = grad(0.0)
    shard.push(0, 0, 1, 0, ONE, io)
    np.testing.assert_allclose(io, [0.95, 0.95, 1, 1, 0.95, 0.95, 1, 1])


DELTA = OptimizerConfig(name="delta", learning_rate=1.0, batch_size=4)


@pytest.mark.parametrize(
    ("policy", "weight"), [("Constant", 1), ("InverseSquareRoot", 0.5), ("Inverse", 0.25)]
)
def test_what_a_worker_side_optimizer_made_counts_as_gradients_do(policy: str, weight: float) -> None:
    model = MODEL.model_copy(update={"optimizer": DELTA, "parameters": N - 2, "statistics": 2})
    shard = ready(model, staleness=Staleness(policy=policy))
    io = grad()
    shard.push(0, 0, 1, 0, PushMeta(samples=4), io)
    np.testing.assert_array_equal(io, 1)  # added, not subtracted: it is a difference
    for seq in range(2, 5):
        shard.push(0, 0, seq, shard.version, PushMeta(samples=4), grad(0.0))
    io = grad()
    shard.push(1, 0, 1, 0, PushMeta(samples=4), io)  # four updates old
    np.testing.assert_allclose(io, [*[1 + weight] * (N - 2), *[1.25] * 2])
    io = grad()
    shard.push(1, 0, 2, shard.version, PushMeta(samples=2), io)  # half a batch
    np.testing.assert_allclose(io[: N - 2], 1.5 + weight)


def test_a_difference_of_an_outage_counts_as_its_scale_says() -> None:
    shard, io = ready(MODEL.model_copy(update={"optimizer": DELTA})), grad()
    shard.delta(0, 0, 1, 0, PushMeta(samples=4, scale=0.5), io)
    np.testing.assert_array_equal(io, 0.5)


@pytest.mark.parametrize("optimizer", [SGD, SGD.model_copy(update={"momentum": 0.9}), DELTA])
def test_what_is_not_finite_never_reaches_the_parameters_and_is_told_once(
    optimizer: OptimizerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    model = MODEL.model_copy(update={"optimizer": optimizer, "parameters": N - 2, "statistics": 2})
    shard = ready(model)
    for seq in range(1, 4):
        io = np.array([np.nan, np.inf, -np.inf, 1, 1, 1, np.nan, 1], np.float32)
        shard.push(0, 0, seq, shard.version, ONE, io)
        assert np.isfinite(io).all()
        np.testing.assert_array_equal(io[[0, 1, 2, 6]], 0)
        assert io[3] != 0
    for merge in (False, True):
        io = grad(np.nan)
        shard.delta(1, 0, 1 + merge, shard.version, ONE, io, merge=merge)
        assert np.isfinite(io).all()
    assert [record.getMessage() for record in caplog.records] == [
        f"worker {slot}-0 pushed values that are not finite: they were taken as 0" for slot in (0, 1)
    ]


def test_differences_after_an_outage_are_merged_by_adasum() -> None:
    shard = ready(clock=(clock := Clock()))
    same = grad(2.0)
    for slot in range(3):  # three workers went the same way: one of them counts
        io = same.copy()
        shard.delta(slot, 0, 1, 0, ONE, io, merge=True)
    np.testing.assert_allclose(io, 2.0)
    clock.now += 100  # the next outage
    io = same.copy()
    shard.delta(0, 0, 2, 3, ONE, io, merge=True)
    np.testing.assert_allclose(io, 4.0)


def test_the_vector_is_bounded() -> None:
    shard = ready()
    for incarnation in range(20):
        for slot in range(3):
            shard.push(slot, incarnation, 1, shard.version, ONE, grad(0.0))
    assert len(shard.applied) == 3 * KEPT_INCARNATIONS
    assert set(shard.applied) == {
        (slot, inc) for slot in range(3) for inc in range(20 - KEPT_INCARNATIONS, 20)
    }


def test_momentum_is_corrected_for_the_live_workers() -> None:
    config = OptimizerConfig(learning_rate=1.0, momentum=0.9, batch_size=1)
    shard = ready(MODEL.model_copy(update={"optimizer": config}))
    shard.push(0, 0, 1, 0, ONE, grad())  # m = -1
    shard.set_live_workers(2)
    io = grad(0.0)
    shard.push(0, 0, 2, 1, ONE, io)  # m = 0.4 · -1
    np.testing.assert_allclose(io, -1.4, rtol=1e-6)


# --- bounded staleness --------------------------------------------------------------------------------------------


def test_a_fast_worker_waits_for_a_slow_one_but_not_for_a_dead_one() -> None:
    shard = ready(staleness=Staleness(max=2))
    for slot in (0, 1):
        shard.connect(slot, 0)
        shard.pull(slot, grad(0.0))
    for seq in (1, 2):
        shard.wait_admitted(0, seq - 1, 0.0)
        shard.push(0, 0, seq, seq - 1, ONE, grad(0.0))
    passed = threading.Event()

    def third() -> None:
        shard.wait_admitted(0, 2, 30)
        passed.set()

    thread = threading.Thread(target=third)
    thread.start()
    assert not passed.wait(0.05)
    shard.wait_admitted(1, 0, 0.0)  # the oldest never waits
    shard.disconnect(1)  # it dies with its gradient
    assert passed.wait(30)
    thread.join()


def test_a_fenced_worker_is_waited_for_by_nobody() -> None:
    # Its process is stopped: the kernel keeps its connection, and it computes nothing any more.
    shard = ready(staleness=Staleness(max=0))
    for slot in (0, 1):
        shard.connect(slot, 0)
        shard.pull(slot, grad(0.0))
    shard.push(0, 0, 1, 0, ONE, grad(0.0))
    shard.fence(1, 0)  # its own hello fences those before it, not itself
    assert not shard._permits.admits(0, 1, shard.version, 0)
    shard.fence(1, 1)
    assert shard._permits.admits(0, 1, shard.version, 0)


def test_who_has_held_up_a_push_to_the_end_holds_up_no_other() -> None:
    shard = ready(staleness=Staleness(max=0))
    for slot in (0, 1, 2):
        shard.connect(slot, 0)
        shard.pull(slot, grad(0.0))
    shard.wait_admitted(0, 0, 0.0)
    shard.push(0, 0, 1, 0, ONE, grad(0.0))
    shard.wait_admitted(0, 1, 0.0)  # as long as anybody waits
    assert shard._permits.admits(0, 1, shard.version, 0)
    shard.pull(1, grad(0.0))  # from now on it is one of them again
    shard.push(0, 0, 2, 1, ONE, grad(0.0))
    assert not shard._permits.admits(0, 2, shard.version, 0)


def test_a_push_that_comes_after_its_worker_has_said_goodbye_is_refused() -> None:
    # It waited behind another worker's gradient, longer than its worker: its positions are somebody else's by now.
    shard = ready(staleness=Staleness(max=0))
    shard.connect(0, 0)
    shard.leave(0, 0)
    with pytest.raises(Fenced, match="goodbye"):
        shard.push(0, 0, 1, 0, ONE, grad())
    assert shard.version == 0
    shard.connect(0, 0)  # the same process, which stays after all
    shard.push(0, 0, 1, 0, ONE, grad())
    assert shard.version == 1


def test_nobody_waits_for_a_worker_that_computes_nothing() -> None:
    shard = ready(staleness=Staleness(max=0))
    for slot in (0, 1):
        shard.connect(slot, 0)
        shard.pull(slot, grad(0.0))
    shard.push(0, 0, 1, 0, ONE, grad(0.0))
    assert not shard._permits.admits(0, 1, shard.version, 0)
    shard.pull(1, grad(0.0), idle=True)  # it evaluates, or has nothing to do
    for seq in (2, 3):
        assert shard._permits.admits(0, seq - 1, shard.version, 0)
        shard.push(0, 0, seq, seq - 1, ONE, grad(0.0))
    assert shard.version == 3


# --- the journal --------------------------------------------------------------------------------------------------


def test_an_answer_tells_the_pushes_that_its_worker_does_not_know_and_no_snapshot_holds() -> None:
    shard = ready()

    def push(slot: int, seq: int, base: int) -> Journal:
        meta = PushMeta(samples=1, progress=(Progress(0, -1, shard.version, shard.version + 1),))
        return shard.push(slot, 0, seq, base, meta, grad(0.0)).meta.journal

    first = push(0, 1, 0)
    assert first == Journal(0, (Entry(1, 0, 0, 1, 1, 0, -1, 0, 1),))
    push(1, 1, 0)
    second = push(0, 2, 1)
    assert [entry.version for entry in second.entries] == [2, 3]
    worker = Log()
    for answer in (first, second):
        worker.follow(answer)
    assert [entry.version for entry in worker.since(-1).entries] == [1, 2, 3]
    shard.journal.published(2)
    third = push(0, 3, 3)
    assert (third.floor, [entry.version for entry in third.entries]) == (2, [4])
    whole = shard.pull(0, grad(0.0)).meta.journal
    worker.follow(third)
    assert worker.since(-1) == whole
    assert [entry.version for entry in whole.entries] == [3, 4]


def test_a_copy_whose_journal_begins_after_the_snapshot_is_not_adopted() -> None:
    old, copy, new = crashed(10, 6, Clock())
    new.offer(0, 0, old.version, AnswerMeta(old.samples, 1, dict(old.applied), Journal(7)), copy.copy())
    assert new.version == 6


def test_a_copy_that_went_another_way_from_an_earlier_snapshot_is_not_adopted() -> None:
    """Its version 6 is another one than the snapshot's: not all that it has before is in the snapshot."""
    old, copy, new = crashed(10, 6, Clock())
    other = tuple(Entry(version, 3, 0, version, 1, 0, -1, 0, 1) for version in range(1, 11))
    meta = AnswerMeta(old.samples, 1, dict(old.applied), Journal(0, other))
    new.offer(0, 0, old.version, meta, copy.copy())
    assert new.version == 6
    assert new.contents.spans() == ((0, 0, 1, 7),)
    meta = old.pull(0, copy).meta
    new.offer(0, 0, old.version, meta, copy)
    assert new.version == 10
    assert new.contents.spans() == ((0, 0, 1, 11),)


def test_a_late_copy_changes_nothing_in_a_shard_that_is_ready() -> None:
    clock = Clock()
    old, copy, new = crashed(10, 6, clock)
    new.hello(1, 0, old.model)
    clock.now += 10.0
    assert new.state is State.READY
    assert not new.hello(0, 0, old.model, old.version).wants_copy
    new.offer(0, 0, old.version, old.pull(0, copy).meta, copy)
    assert (new.version, new.contents.spans()) == (6, ((0, 0, 1, 7),))


def test_a_late_copy_is_taken_by_a_shard_that_is_still_empty() -> None:
    clock = Clock()
    old, copy, new = crashed(10, 0, clock)
    new.hello(1, 0, old.model)
    clock.now += 10.0
    assert new.state is State.EMPTY
    assert new.hello(0, 0, old.model, old.version).wants_copy
    new.offer(0, 0, old.version, old.pull(0, copy).meta, copy)
    assert (new.state, new.version, new.contents.spans()) == (State.READY, 10, ((0, 0, 1, 11),))


# --- recovery -----------------------------------------------------------------------------------------------------


def crashed(pushes: int, snapshot_at: int, clock: Clock) -> tuple[ShardStore, np.ndarray, ShardStore]:
    """A shard that took `pushes` from worker 0, and the one that is started after it from an earlier snapshot."""
    old, copy = ready(), None
    for seq in range(1, pushes + 1):
        io = grad(0.001 * seq)
        old.push(0, 0, seq, seq - 1, ONE, io)
        if seq == snapshot_at:
            copy = old.copy()
    new = ShardStore(0, 1, 1, clock=clock)
    if copy is not None:
        new.restore(copy)
    return old, io, new


def offer(shard: ShardStore, old: ShardStore, slot: int, io: np.ndarray) -> None:
    meta = AnswerMeta(old.samples, 1, dict(old.applied))
    shard.offer(slot, 0, old.version, meta, io)


def test_a_restored_shard_takes_a_newer_copy_of_a_worker() -> None:
    old, copy, new = crashed(10, 6, Clock())
    welcome = new.hello(0, 0, MODEL, copy_version=10)
    assert (welcome.wants_copy, welcome.recovering, welcome.version) == (True, True, 6)
    offer(new, old, 0, copy.copy())
    assert new.state is State.READY  # everyone in the snapshot has been heard
    assert (new.version, new.applied) == (10, {(0, 0): 10})
    np.testing.assert_array_equal(read(new), read(old))


def test_without_a_snapshot_a_worker_s_copy_is_all_there_is() -> None:
    clock = Clock()
    old, copy, new = crashed(3, 99, clock)
    assert new.state is State.RECOVERING
    assert new.hello(0, 0, MODEL, copy_version=3).wants_copy
    offer(new, old, 0, copy.copy())
    np.testing.assert_array_equal(read(new), read(old))


def test_an_older_copy_is_not_wanted_and_nobody_is_waited_for_forever() -> None:
    clock = Clock()
    old, _, new = crashed(10, 8, clock)
    old.push(1, 0, 1, 10, ONE, grad())
    copy = old.copy()
    assert copy is not None
    new = ShardStore(0, 1, 1, clock=clock)
    new.restore(copy)
    assert not new.hello(0, 0, MODEL, copy_version=8).wants_copy
    assert new.state is State.RECOVERING  # worker 1 was there and may have more
    clock.now += 10
    assert new.state is State.READY
    assert not new.hello(1, 0, MODEL, copy_version=99).wants_copy  # too late: parameters move on


def test_a_copy_that_was_asked_for_is_waited_for_however_large_it_is() -> None:
    old, copy, new = crashed(10, 6, clock := Clock())
    new.connect(0, 0)
    new.connect(1, 0)
    assert new.hello(0, 0, MODEL, copy_version=10).wants_copy
    assert new.hello(1, 0, MODEL, copy_version=9).wants_copy
    clock.now += 5.0
    assert new.state is State.RECOVERING
    new.disconnect(1)  # it goes in the middle of it
    offer(new, old, 0, copy.copy())
    assert (new.state, new.version) == (State.READY, 10)


def test_a_copy_that_does_not_come_is_not_waited_for_for_ever() -> None:
    _, _, new = crashed(10, 6, clock := Clock())
    new.hello(0, 0, MODEL, copy_version=10)
    clock.now += LONGEST - 0.1
    assert new.state is State.RECOVERING
    clock.now += 0.1
    assert (new.state, new.version) == (State.READY, 6)


def test_a_worker_that_has_another_connection_has_not_gone() -> None:
    _, _, new = crashed(10, 6, Clock())
    for _ in range(2):
        new.connect(0, 0)
    new.hello(1, 0, MODEL)
    new.disconnect(0)
    assert new.state is State.RECOVERING
    new.disconnect(0)
    assert new.state is State.READY


def test_a_restart_without_anything_begins_anew() -> None:
    clock = Clock()
    shard = ShardStore(0, 1, 2, clock=clock)
    assert not shard.hello(0, 0, MODEL).initialized
    clock.now += 10
    assert shard.state is State.EMPTY
    shard.initialize(grad(5.0))
    np.testing.assert_array_equal(read(shard), 5)


def test_on_ready_tells_what_is_in_the_parameters() -> None:
    heard: list[tuple[int, dict[tuple[int, int], int]]] = []
    _, _, new = crashed(5, 5, clock := Clock())
    new.on_ready = lambda version, applied: heard.append((version, applied))
    new.hello(0, 0, MODEL)
    clock.now += 10
    assert new.state is State.READY
    assert heard == [(5, {(0, 0): 5})]


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("weights_only", [False, True])
def test_after_its_loss_a_shard_that_began_with_another_run_takes_a_worker_s_copy(
    epoch: int, weights_only: bool
) -> None:
    """No snapshot of its own was there yet. `epoch` 0: its container was started again in place."""
    other = ready()
    other.push(0, 0, 1, 0, ONE, grad())
    begun = other.copy()
    assert begun is not None
    first = ShardStore(0, 1, 0, clock=(clock := Clock()))
    first.restore(begun, other_run=True, weights_only=weights_only)
    first.hello(0, 0, MODEL)
    clock.now += 10.0
    np.testing.assert_array_equal(read(first), -1)
    first.push(0, 0, 1, 0, ONE, io := grad())
    second = ShardStore(0, 1, epoch, clock=clock)
    second.restore(begun, other_run=True, weights_only=weights_only)
    welcome = second.hello(1, 0, MODEL)  # a new worker, which has no copy, is the first to come
    assert (welcome.initialized, welcome.recovering) == (True, True)
    assert second.hello(0, 0, MODEL, first.version).wants_copy
    second.offer(0, 0, first.version, first.pull(0, io).meta, io)
    assert (second.state, second.version, second.samples) == (State.READY, 1, first.samples)
    assert second.contents.spans() == ((0, 0, 1, 2),)
    np.testing.assert_array_equal(read(second), -2)


def test_where_nobody_has_more_than_another_run_s_values_the_shard_goes_on_with_them() -> None:
    begun = ready().copy()
    assert begun is not None
    shard = ShardStore(0, 1, 1, clock=(clock := Clock()))
    shard.restore(begun, other_run=True)
    assert not shard.hello(0, 0, MODEL, copy_version=0).wants_copy
    assert shard.state is State.RECOVERING
    clock.now += 10.0
    assert shard.state is State.READY
    np.testing.assert_array_equal(read(shard), 0)


ADAM = OptimizerConfig(name="adam", learning_rate=0.001, batch_size=1)


def adam_steps(shard: ShardStore, slot: int, count: int = 50) -> float:
    """The mean absolute step of the next pushes, of gradients that are like those before."""
    rng, steps, before = np.random.default_rng(7), [], read(shard)
    done = shard.applied.get((slot, 0), 0)
    for seq in range(done + 1, done + count + 1):
        shard.push(slot, 0, seq, shard.version, ONE, io := rng.normal(1, 1, N).astype(np.float32))
        steps.append(np.abs(io - before).mean())
        before = io
    return float(np.mean(steps))


def test_adam_s_steps_are_of_the_same_size_after_a_worker_s_copy_was_adopted() -> None:
    """Its moments begin at zero then, and so does what corrects them."""
    old = ready(model := MODEL.model_copy(update={"optimizer": ADAM}))
    fresh = adam_steps(old, 0)
    adam_steps(old, 0, 500)
    meta = old.pull(0, io := grad()).meta
    new = ShardStore(0, 1, 1)
    assert new.hello(0, 0, model, old.version).wants_copy
    new.offer(0, 0, old.version, meta, io)
    assert adam_steps(new, 0) < 1.2 * fresh


def test_adam_s_steps_are_of_the_same_size_after_a_copy_beyond_a_snapshot_was_adopted() -> None:
    old = ready(model := MODEL.model_copy(update={"optimizer": ADAM}))
    fresh = adam_steps(old, 0)
    snapshot = old.copy()
    assert snapshot is not None
    adam_steps(old, 0, 500)
    meta = old.pull(0, io := grad()).meta
    new = ShardStore(0, 1, 1)
    new.restore(snapshot)
    new.hello(0, 0, model, old.version)
    new.offer(0, 0, old.version, meta, io)
    assert new.updates == snapshot.updates  # which its moments have seen
    assert adam_steps(new, 0) < 1.2 * fresh


@pytest.mark.parametrize(("name", "kept"), [("sgd", 0), ("adamw", 50), ("adam", 50)])
def test_an_optimizer_that_finds_no_moments_in_another_run_begins_at_its_first_step(
    name: str, kept: int
) -> None:
    theirs = ADAM.model_copy(update={"name": name, "momentum": 0.9 if name == "sgd" else 0.0})
    old = ready(MODEL.model_copy(update={"optimizer": theirs}))
    adam_steps(old, 0)
    begun = old.copy()
    assert begun is not None
    assert begun.updates == 50
    model = MODEL.model_copy(update={"optimizer": ADAM})
    shard = ShardStore(0, 1, 0, clock=(clock := Clock()))
    shard.restore(begun, other_run=True)
    shard.hello(0, 0, model)
    clock.now += 10.0
    assert shard.updates == kept
    assert adam_steps(shard, 0) < 1.2 * adam_steps(ready(model), 0)


def test_another_run_s_weights_with_another_optimizer() -> None:
    copy = ready().copy()
    assert copy is not None
    shard = ShardStore(0, 1, 0)
    shard.restore(copy, weights_only=True)
    other = MODEL.model_copy(update={"optimizer": OptimizerConfig(name="adam")})
    assert shard.hello(0, 0, other).initialized
    with pytest.raises(UserError):
        shard.hello(1, 0, MODEL)


# --- any order of anything ----------------------------------------------------------------------------------------


class ShardMachine(RuleBasedStateMachine):
    """Pushes, resends, replaced workers, crashes and restores, against a list of what was applied."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.log: list[tuple[int, int, int]] = []
        self.newest = dict.fromkeys(range(3), 0)
        self.seqs: dict[tuple[int, int], int] = {}
        self.snapshot = None
        self.shard = self.start(0)

    def start(self, epoch: int) -> ShardStore:
        def on_applied(push: AppliedPush) -> None:
            self.log.append((push.slot, push.incarnation, push.seq))

        return ShardStore(0, 1, epoch, clock=self.clock, on_applied=on_applied)

    def hello(self, slot: int) -> None:
        self.shard.connect(slot, self.newest[slot])
        self.shard.hello(slot, self.newest[slot], MODEL)
        self.clock.now += 10
        self.shard.initialize(grad(0.0))

    @rule(slot=st.integers(0, 2))
    def push(self, slot: int) -> None:
        self.hello(slot)
        who = slot, self.newest[slot]
        self.seqs[who] = self.seqs.get(who, 0) + 1
        self.shard.push(*who, self.seqs[who], self.shard.version, ONE, grad(-1.0))

    @rule(slot=st.integers(0, 2), back=st.integers(0, 3))
    def resend(self, slot: int, back: int) -> None:
        who = slot, self.newest[slot]
        seq = self.seqs.get(who, 0) - back
        if seq >= 1 and seq <= self.shard.applied.get(who, 0):
            self.hello(slot)
            before = self.shard.version
            self.shard.push(*who, seq, self.shard.version, ONE, grad(-1.0))
            assert self.shard.version == before

    @rule(slot=st.integers(0, 2))
    def replace(self, slot: int) -> None:
        self.newest[slot] += 1
        self.hello(slot)
        with pytest.raises(Fenced):
            self.shard.push(slot, self.newest[slot] - 1, 1_000_000, 0, ONE, grad(-1.0))

    @rule()
    def save(self) -> None:
        copy = self.shard.copy()
        self.snapshot = None if copy is None else (copy, list(self.log))

    @rule()
    def crash(self) -> None:
        self.shard = self.start(self.shard.epoch + 1)
        self.log.clear()
        if self.snapshot is not None:
            self.shard.restore(self.snapshot[0])
            self.log.extend(self.snapshot[1])
        for who in self.seqs:
            self.seqs[who] = self.shard.applied.get(who, 0)

    @invariant()
    def every_push_is_in_the_parameters_exactly_once(self) -> None:
        assert len(set(self.log)) == len(self.log)
        if self.shard.state is State.READY:
            np.testing.assert_array_equal(read(self.shard), len(self.log))
            assert self.shard.version == len(self.log)
            for (slot, incarnation), seq in self.shard.applied.items():
                assert seq == max(s for a, b, s in self.log if (a, b) == (slot, incarnation))


TestShardMachine = ShardMachine.TestCase
TestShardMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
