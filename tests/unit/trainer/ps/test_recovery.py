"""Shards that restart from a snapshot, a worker's copy, or another run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.errors import UserError
from shoal_trainer.ps.recovery import LONGEST_WAIT
from shoal_trainer.ps.shard import ShardStore, State
from shoal_trainer.wire.messages import AnswerMeta, Entry, Held, Journal, OptimizerConfig, Schedule
from tests.unit.trainer.ps.shards import (
    MODEL,
    ONE,
    Clock,
    N,
    copy_of,
    crashed,
    grad,
    pull_from,
    push_to,
    read,
    ready,
)


def values_of(shard: ShardStore) -> np.ndarray:
    """The parameters of a shard that is not READY, too."""
    assert shard.model is not None
    return shard.model.parameters


def offer(shard: ShardStore, old: ShardStore, slot: int, io: np.ndarray) -> None:
    meta = AnswerMeta(old.history.samples, 1, dict(old.history.applied))
    shard.offer(slot, 0, io, old.history.version, meta)


def test_restored_shard_adopts_a_newer_worker_copy() -> None:
    old, copy, new = crashed(10, 6, Clock())
    welcome = new.hello(0, 0, MODEL, Held(version=10))
    assert (welcome.wants_copy, welcome.ready, welcome.version) == (True, False, 6)
    offer(new, old, 0, copy.copy())
    assert new.state is State.READY  # every worker in the snapshot has answered
    assert (new.history.version, new.history.applied) == (10, {(0, 0): 10})
    np.testing.assert_array_equal(read(new), read(old))


def test_replacement_before_first_snapshot_adopts_worker_copy() -> None:
    clock = Clock()
    old, copy, new = crashed(3, 99, clock)
    assert new.state is State.RECOVERING
    assert new.hello(0, 0, MODEL, Held(version=3)).wants_copy
    offer(new, old, 0, copy.copy())
    np.testing.assert_array_equal(read(new), read(old))


def test_older_copy_is_not_requested_and_recovery_times_out() -> None:
    clock = Clock()
    old, _, new = crashed(10, 8, clock)
    push_to(old, 1, 0, 1, 10, ONE, grad())
    copy = old.copy()
    assert copy is not None
    new = ShardStore(0, 1, 1, clock=clock)
    new.restore(copy)
    assert not new.hello(0, 0, MODEL, Held(version=8)).wants_copy
    assert new.state is State.RECOVERING  # worker 1 was connected and may have a newer copy
    clock.now += 10
    assert new.state is State.READY  # type: ignore[comparison-overlap]  # time has passed
    assert not new.hello(1, 0, MODEL, Held(version=99)).wants_copy  # too late: training has resumed


@pytest.mark.parametrize(("version", "generation", "newer"), [(99, 0, False), (3, 2, True), (99, 1, True)])
def test_copy_from_before_a_rollback_is_older_whatever_its_version(
    version: int, generation: int, newer: bool
) -> None:
    old, _, _ = crashed(10, 6, Clock())
    snapshot = old.copy()
    assert snapshot is not None
    new = ShardStore(0, 1, 1, clock=Clock())
    new.restore(snapshot.model_copy(update={"generation": 1}))
    assert new.hello(0, 0, MODEL, Held(version=version, generation=generation)).wants_copy == newer


def test_recovery_waits_for_a_requested_copy() -> None:
    old, copy, new = crashed(10, 6, clock := Clock())
    new.workers.connect(0, 0)
    new.workers.connect(1, 0)
    assert new.hello(1, 0, MODEL, Held(version=9)).wants_copy
    assert new.hello(0, 0, MODEL, Held(version=10)).wants_copy
    clock.now += 5.0
    assert new.state is State.RECOVERING
    new.disconnect(1)  # it disconnects during its upload
    offer(new, old, 0, copy.copy())
    assert (new.state, new.history.version) == (State.READY, 10)


def test_recovery_gives_up_on_a_missing_copy() -> None:
    _, _, new = crashed(10, 6, clock := Clock())
    new.hello(0, 0, MODEL, Held(version=10))
    clock.now += LONGEST_WAIT - 0.1
    assert new.state is State.RECOVERING
    clock.now += 0.1
    assert (new.state, new.history.version) == (State.READY, 6)


def test_worker_with_another_connection_has_not_left() -> None:
    _, _, new = crashed(10, 6, Clock())
    for _ in range(2):
        new.workers.connect(0, 0)
    assert new.hello(0, 0, MODEL, Held(version=10)).wants_copy
    new.hello(1, 0, MODEL)
    new.disconnect(0)
    assert new.state is State.RECOVERING
    new.disconnect(0)
    assert new.state is State.READY  # type: ignore[comparison-overlap]


def test_restart_without_snapshot_or_copy_starts_empty() -> None:
    clock = Clock()
    shard = ShardStore(0, 1, 2, clock=clock)
    assert not shard.hello(0, 0, MODEL, Held()).wants_copy
    clock.now += 10
    assert shard.hello(0, 0, MODEL, Held()).wants_copy
    shard.offer(0, 0, grad(5.0))
    np.testing.assert_array_equal(read(shard), 5)


def follows(clock: Clock, **arguments: Any) -> ShardStore:
    """A shard that was lost with all of its snapshots."""
    shard = ShardStore(0, 1, 1, clock=clock, **arguments)
    for slot in range(3):
        shard.workers.connect(slot, 0)
    return shard


def send(shard: ShardStore, slot: int, version: int, generation: int = 0) -> None:
    """A worker sends its copy: what came before a snapshot of version 5, which is lost, its journal does not name."""
    meta = AnswerMeta(version, 1, {(slot, 0): version}, Journal(5))
    shard.offer(slot, 0, grad(float(version)), version, meta, generation=generation)


def test_a_survivors_parameters_are_better_than_a_newcomers_although_their_history_has_gaps() -> None:
    shard = follows(clock := Clock())
    assert not shard.hello(1, 0, MODEL).ready  # it replaces a lost worker, and has nothing
    assert shard.hello(0, 0, MODEL, Held(version=10, generation=1)).wants_copy
    send(shard, 0, 10, generation=1)
    clock.now += 1.0  # another may have a copy without gaps
    welcome = shard.hello(1, 0, MODEL)
    assert (welcome.ready, welcome.samples, welcome.generation) == (True, 10, 1)
    shard.offer(0, 0, grad(-1.0))
    np.testing.assert_array_equal(read(shard), 10.0)
    assert (shard.history.version, shard.history.applied, shard.initial_samples) == (0, {}, 10)


def test_of_copies_with_gaps_the_newest_is_taken_and_of_all_one_without() -> None:
    gaps = follows(clock := Clock())
    assert gaps.hello(0, 0, MODEL, Held(version=10)).wants_copy
    assert gaps.hello(1, 0, MODEL, Held(version=12)).wants_copy
    send(gaps, 1, 12)
    send(gaps, 0, 10)
    clock.now += 1.0
    np.testing.assert_array_equal(read(gaps), 12.0)
    assert gaps.history.samples == 12
    complete = follows(Clock())
    complete.hello(0, 0, MODEL, Held(version=10))
    send(complete, 0, 10)
    complete.hello(1, 0, MODEL, Held(version=4))
    complete.offer(1, 0, grad(4.0), 4, AnswerMeta(4, 1, {(1, 0): 4}))
    assert (complete.history.version, complete.history.samples, complete.initial_samples) == (4, 4, 0)


def test_a_copy_with_gaps_is_better_than_another_runs_parameters_but_not_than_a_snapshot() -> None:
    other, own = ready(), ready()
    shard = follows(clock := Clock())
    shard.restore(copy_of(other), weights_only=True)
    shard.hello(0, 0, MODEL, Held(version=10))
    send(shard, 0, 10)
    clock.now += 1.0
    np.testing.assert_array_equal(read(shard), 10.0)
    push_to(own, 0, 0, 1, 0, ONE, grad())
    restored = ShardStore(0, 1, 1, clock=clock)
    restored.restore(copy_of(own))
    restored.hello(0, 0, MODEL, Held(version=10))
    send(restored, 0, 10)
    assert (restored.state, restored.history.version) == (State.READY, 1)


def test_equal_copies_with_gaps_are_sent_once_and_to_a_shard_with_a_snapshot_never() -> None:
    shard = follows(Clock())
    assert shard.hello(0, 0, MODEL, Held(version=10, floor=5)).wants_copy
    assert not shard.hello(1, 0, MODEL, Held(version=10, floor=5)).wants_copy
    send(shard, 0, 10)
    assert not shard.hello(1, 0, MODEL, Held(version=10, floor=5)).wants_copy
    assert shard.hello(2, 0, MODEL, Held(version=11, floor=5)).wants_copy
    _, _, restored = crashed(4, 4, Clock())
    assert not restored.hello(0, 0, MODEL, Held(version=10, floor=5)).wants_copy


def test_of_torn_copies_the_newest_is_taken_as_one_with_gaps() -> None:
    """No worker's first parameters are, nor an older copy that comes first."""
    shard = follows(clock := Clock())
    assert not shard.hello(2, 0, MODEL, Held()).wants_copy
    for slot, version in ((0, 10), (1, 12)):
        assert shard.hello(slot, 0, MODEL, Held(version=version, generation=1, floor=None)).wants_copy
    for slot, version in ((0, 10), (1, 12)):
        meta = AnswerMeta(version, 1, {(slot, 0): version}, torn=True)
        shard.offer(slot, 0, grad(float(version)), version, meta, generation=1)
    clock.now += 10.0  # another may have a whole one
    welcome = shard.hello(2, 0, MODEL, Held())
    assert (welcome.ready, welcome.samples, welcome.generation, welcome.version) == (True, 12, 1, 0)
    assert (shard.history.applied, shard.initial_samples) == ({}, 12)
    np.testing.assert_array_equal(read(shard), 12.0)


def test_a_whole_copy_is_awaited_when_a_torn_one_has_come() -> None:
    """A newcomer in between does not shorten the wait either."""
    shard = follows(clock := Clock())
    assert shard.hello(0, 0, MODEL, Held(version=10, floor=None)).wants_copy
    shard.offer(0, 0, grad(10.0), 10, AnswerMeta(10, 1, {(0, 0): 10}, torn=True))
    shard.hello(2, 0, MODEL, Held())
    clock.now += 5.0  # the other worker's step
    assert shard.state is State.RECOVERING
    assert shard.hello(1, 0, MODEL, Held(version=12)).wants_copy
    shard.offer(1, 0, grad(12.0), 12, AnswerMeta(12, 1, {(1, 0): 12}))
    assert (shard.state, shard.history.version, shard.initial_samples) == (State.READY, 12, 0)


@pytest.mark.parametrize("seconds", [0.2, 5.0, 20.0])
def test_shard_with_a_snapshot_begins_although_uploads_break_again_and_again(seconds: float) -> None:
    _, _, new = crashed(10, 6, clock := Clock())
    due, uploads = {0: 0.0, 1: 0.1}, 0
    while new.state is not State.READY and clock.now < 1000.0:
        for slot in [slot for slot, at in due.items() if clock.now >= at]:
            new.disconnect(slot)
            new.workers.connect(slot, 0)
            asked = new.hello(slot, 0, MODEL, Held(version=10)).wants_copy
            due[slot] = clock.now + (seconds if asked else 0.3)
            uploads += asked
        clock.now += 0.1
    assert uploads > 2
    assert LONGEST_WAIT <= clock.now < LONGEST_WAIT + 1.0
    assert new.history.version == 6


def test_what_was_refused_is_not_asked_for_again() -> None:
    """The HELLO does not tell that a copy has diverged from the snapshot."""
    _, _, new = crashed(10, 6, Clock())
    other = tuple(Entry(version, 3, 0, version, 1, 0, -1, 0, 1) for version in range(1, 11))
    assert new.hello(1, 0, MODEL, Held(version=10)).wants_copy
    new.offer(1, 0, grad(9.0), 10, AnswerMeta(10, 1, {(3, 0): 10}, Journal(0, other)))
    assert not new.hello(1, 0, MODEL, Held(version=10)).wants_copy
    assert new.hello(1, 0, MODEL, Held(version=11)).wants_copy


def test_a_worker_with_a_copy_that_is_of_no_use_shortens_the_wait() -> None:
    """The others have come as soon as it, also the one that the snapshot names."""
    _, _, new = crashed(10, 6, clock := Clock())
    assert not new.hello(1, 0, MODEL, Held(version=50, floor=40)).wants_copy
    clock.now += 0.75
    assert new.state is State.READY


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_copy_from_after_a_rollback_is_better_whatever_is_known_of_it(order: tuple[int, int]) -> None:
    """Worker 0 was cut off before it. No snapshot is left."""
    shard = follows(clock := Clock())
    copies = {
        0: (Held(version=99), AnswerMeta(99, 1, {(0, 0): 99})),
        1: (Held(version=300, generation=1, floor=100), AnswerMeta(300, 1, {(1, 0): 200}, Journal(100))),
    }
    asked = [shard.hello(slot, 0, MODEL, copies[slot][0]).wants_copy for slot in order]
    assert asked == [True, order == (0, 1)]
    for slot in order:
        held, meta = copies[slot]
        shard.offer(slot, 0, grad(float(slot)), held.version, meta, generation=held.generation)
    clock.now += 10.0
    assert shard.state is State.READY
    np.testing.assert_array_equal(read(shard), 1.0)
    history = shard.history
    assert (history.generation, history.samples, history.version, history.applied) == (1, 300, 0, {})
    assert (history.contents.spans(), history.journal.since(-1).entries) == ((), ())
    assert shard.initial_samples == 300


def test_a_later_copy_without_a_history_does_not_replace_a_snapshot() -> None:
    _, _, new = crashed(10, 6, clock := Clock())
    assert not new.hello(0, 0, MODEL, Held(version=10, generation=1, floor=8)).wants_copy
    new.offer(0, 0, grad(9.0), 10, AnswerMeta(10, 1, {(0, 0): 10}, Journal(8)), generation=1)
    clock.now += 10.0
    assert (new.state, new.history.version, new.history.generation) == (State.READY, 6, 0)


def test_no_first_parameters_are_asked_for_while_a_worker_with_a_copy_may_come_back() -> None:
    """It was put off, and says HELLO every 3 s in a large job; the one that was asked is lost."""
    shard = follows(clock := Clock())
    assert shard.hello(0, 0, MODEL, Held(version=10)).wants_copy
    clock.now = 3.9
    assert not shard.hello(1, 0, MODEL, Held(version=10)).wants_copy
    clock.now = 4.0
    shard.disconnect(0)
    clock.now = 7.5
    assert not shard.hello(2, 0, MODEL, Held()).wants_copy
    assert shard.hello(1, 0, MODEL, Held(version=10)).wants_copy
    clock.now = 20.0
    shard.disconnect(1)
    assert not shard.hello(2, 0, MODEL, Held()).wants_copy
    clock.now = 25.0
    assert shard.hello(2, 0, MODEL, Held()).wants_copy


def test_a_torn_copy_is_none_to_a_shard_with_a_snapshot() -> None:
    """It waits as for workers without a copy: others that joined after the snapshot may have one."""
    _, _, new = crashed(10, 6, clock := Clock())
    assert not new.hello(0, 0, MODEL, Held(version=10, floor=None)).wants_copy
    assert new.state is State.RECOVERING
    assert new.hello(1, 0, MODEL, Held(version=9)).wants_copy
    new.disconnect(1)
    clock.now += 0.75
    assert new.state is State.READY  # type: ignore[comparison-overlap]  # time has passed


@given(
    st.lists(st.tuples(st.sampled_from(["first", "torn", "gaps", "whole"]), st.integers(1, 9)), max_size=8)
)
def test_in_any_order_of_offers_the_best_is_taken(offers: list[tuple[str, int]]) -> None:
    """Each is sent only if it is better than what is there and than what is on its way."""
    shard = follows(clock := Clock())
    ranks = {"first": 0, "torn": 1, "gaps": 1, "whole": 2}
    best, sent = (-1, 0), 0
    for slot, (kind, version) in enumerate(offers):
        held = Held(version=version, floor={"torn": None, "gaps": 5, "whole": 0}.get(kind))
        rank = ranks[kind], 0 if kind == "first" else version
        wanted = shard.hello(slot, 0, MODEL, Held() if kind == "first" else held).wants_copy
        assert wanted == (rank > best and kind != "first")  # nobody's first ones while copies may come
        if wanted:
            best, sent = rank, sent + 1
            meta = AnswerMeta(version, 1, {(slot, 0): 1}, Journal(held.floor or 0), torn=kind == "torn")
            shard.offer(slot, 0, grad(float(slot)), version, meta)
            np.testing.assert_array_equal(values_of(shard), slot)
        if shard.state is State.READY:
            break
    clock.now += 60.0
    assert (shard.state is State.READY) == bool(sent)
    assert (shard.history.version > 0) == (best[0] == 2)


def test_a_copy_that_comes_late_is_taken_while_nobody_has_sent_first_parameters() -> None:
    """Also of a large shard, whose first parameters another worker is to send: it waits for the copy."""
    shard = follows(clock := Clock(), large=0, piece=4)
    shard.hello(1, 0, MODEL, Held())
    clock.now += 10.0
    assert shard.hello(1, 0, MODEL, Held()).wants_copy  # it is to send them
    assert shard.hello(2, 0, MODEL, Held(version=10, floor=5)).wants_copy
    assert not shard.hello(1, 0, MODEL, Held()).wants_copy
    send(shard, 2, 10)
    assert shard.state is State.READY
    np.testing.assert_array_equal(read(shard), 10.0)


def test_the_learning_rate_goes_on_where_the_parameters_do() -> None:
    """One schedule for all shards, whichever of them has lost its snapshots."""
    decay = Schedule(name="CosineDecay", config={"initial_learning_rate": 1.0, "decay_steps": 1000})
    model = MODEL.model_copy(update={"optimizer": OptimizerConfig(learning_rate=decay, batch_size=1)})
    shard = ShardStore(0, 1, 1, clock=(clock := Clock()))
    shard.hello(0, 0, model)
    clock.now += 10.0
    shard.offer(0, 0, grad(0.0), 5, AnswerMeta(950, torn=True))
    push_to(shard, 0, 0, 1, 0, ONE, step := grad())
    np.testing.assert_allclose(step, -0.5 * (1 + np.cos(np.pi * 0.95)), rtol=1e-3)
    assert shard.history.samples == 951


def test_on_ready_reports_version_and_applied_pushes() -> None:
    reports: list[tuple[int, dict[tuple[int, int], int]]] = []
    _, _, new = crashed(5, 5, clock := Clock())
    new.on_ready = lambda version, applied: reports.append((version, applied))
    new.hello(0, 0, MODEL)
    clock.now += 10
    assert new.state is State.READY
    assert reports == [(5, {(0, 0): 5})]


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("weights_only", [False, True])
def test_shard_restarted_from_another_run_adopts_worker_copy(epoch: int, weights_only: bool) -> None:
    """The run has no snapshot of its own yet. `epoch` 0: the container restarted in place."""
    other = ready()
    push_to(other, 0, 0, 1, 0, ONE, grad())
    other_copy = other.copy()
    assert other_copy is not None
    first = ShardStore(0, 1, 0, clock=(clock := Clock()))
    first.restore(other_copy, other_run=True, weights_only=weights_only)
    first.hello(0, 0, MODEL)
    clock.now += 10.0
    np.testing.assert_array_equal(read(first), -1)
    push_to(first, 0, 0, 1, 0, ONE, io := grad())
    second = ShardStore(0, 1, epoch, clock=clock)
    second.restore(other_copy, other_run=True, weights_only=weights_only)
    welcome = second.hello(1, 0, MODEL)  # a new worker without a copy connects first
    assert not welcome.ready
    assert second.hello(0, 0, MODEL, Held(version=first.history.version)).wants_copy
    second.offer(0, 0, io, first.history.version, pull_from(first, 0, io).meta)
    assert (second.state, second.history.version, second.history.samples) == (
        State.READY,
        1,
        first.history.samples,
    )
    assert second.history.contents.spans() == ((0, 0, 1, 2),)
    np.testing.assert_array_equal(read(second), -2)


def test_shard_without_newer_copies_keeps_values_of_another_run() -> None:
    other_copy = ready().copy()
    assert other_copy is not None
    shard = ShardStore(0, 1, 1, clock=(clock := Clock()))
    shard.restore(other_copy, other_run=True)
    assert not shard.hello(0, 0, MODEL, Held(version=0)).wants_copy
    assert shard.state is State.RECOVERING
    clock.now += 10.0
    assert shard.state is State.READY  # type: ignore[comparison-overlap]  # time has passed
    np.testing.assert_array_equal(read(shard), 0)


ADAM = OptimizerConfig(name="adam", learning_rate=0.001, batch_size=1)


def adam_steps(shard: ShardStore, slot: int, count: int = 50) -> float:
    """The mean absolute step of the next `count` pushes with gradients of the same distribution."""
    rng, steps, before = np.random.default_rng(7), [], read(shard)
    done = shard.history.applied.get((slot, 0), 0)
    for seq in range(done + 1, done + count + 1):
        push_to(shard, slot, 0, seq, shard.history.version, ONE, io := rng.normal(1, 1, N).astype(np.float32))
        steps.append(np.abs(io - before).mean())
        before = io
    return float(np.mean(steps))


def test_adam_step_size_is_kept_after_adopting_a_worker_copy() -> None:
    """The moments restart at zero, and so does their bias correction."""
    old = ready(model := MODEL.model_copy(update={"optimizer": ADAM}))
    fresh = adam_steps(old, 0)
    adam_steps(old, 0, 500)
    meta = pull_from(old, 0, io := grad()).meta
    new = ShardStore(0, 1, 1)
    assert new.hello(0, 0, model, Held(version=old.history.version)).wants_copy
    new.offer(0, 0, io, old.history.version, meta)
    assert adam_steps(new, 0) < 1.2 * fresh


def test_adam_step_size_is_kept_after_adopting_a_copy_over_a_snapshot() -> None:
    old = ready(model := MODEL.model_copy(update={"optimizer": ADAM}))
    fresh = adam_steps(old, 0)
    snapshot = old.copy()
    assert snapshot is not None
    adam_steps(old, 0, 500)
    meta = pull_from(old, 0, io := grad()).meta
    new = ShardStore(0, 1, 1)
    new.restore(snapshot)
    new.hello(0, 0, model, Held(version=old.history.version))
    new.offer(0, 0, io, old.history.version, meta)
    assert new.model is not None
    assert new.model.updates == snapshot.updates  # the updates in its moments
    assert adam_steps(new, 0) < 1.2 * fresh


@pytest.mark.parametrize(("name", "kept"), [("sgd", 0), ("adamw", 50), ("adam", 50)])
def test_optimizer_steps_are_kept_only_with_their_moments(name: str, kept: int) -> None:
    theirs = ADAM.model_copy(update={"name": name, "momentum": 0.9 if name == "sgd" else 0.0})
    old = ready(MODEL.model_copy(update={"optimizer": theirs}))
    adam_steps(old, 0)
    other_copy = old.copy()
    assert other_copy is not None
    assert other_copy.updates == 50
    model = MODEL.model_copy(update={"optimizer": ADAM})
    shard = ShardStore(0, 1, 0, clock=(clock := Clock()))
    shard.restore(other_copy, other_run=True)
    shard.hello(0, 0, model)
    clock.now += 10.0
    assert shard.model is not None
    assert shard.model.updates == kept
    assert adam_steps(shard, 0) < 1.2 * adam_steps(ready(model), 0)


VELOCITY = OptimizerConfig(learning_rate=0.1, momentum=0.9, batch_size=1)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (VELOCITY, OptimizerConfig(name="rmsprop", learning_rate=0.001, momentum=0.9, batch_size=1)),
        (OptimizerConfig(name="lion", batch_size=1), ADAM),
        (OptimizerConfig(name="rmsprop", batch_size=1), ADAM),
    ],
    ids=["velocity", "first moment", "second moment"],
)
def test_state_of_another_kind_is_not_taken_for_its_own(
    theirs: OptimizerConfig, ours: OptimizerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """A velocity of SGD has the learning rate in it, by which that of RMSprop is multiplied later."""

    def first_update(shard: ShardStore) -> float:
        before = float(read(shard)[0])
        push_to(shard, 0, 0, 1000, shard.history.version, ONE, io := grad())
        return before - float(io[0])

    old = ready(MODEL.model_copy(update={"optimizer": theirs}))
    for seq in range(1, 51):
        push_to(old, 0, 0, seq, seq - 1, ONE, grad())
    model = MODEL.model_copy(update={"optimizer": ours})
    shard = ShardStore(0, 1, 0, clock=(clock := Clock()))
    shard.restore(copy_of(old), other_run=True)
    shard.hello(0, 0, model)
    clock.now += 10.0
    assert first_update(shard) == pytest.approx(first_update(ready(model)), rel=1e-3)
    assert f"the state of {theirs.name} is dropped" in caplog.text


def test_weights_of_another_run_accept_another_optimizer() -> None:
    copy = ready().copy()
    assert copy is not None
    shard = ShardStore(0, 1, 0)
    shard.restore(copy, weights_only=True)
    other = MODEL.model_copy(update={"optimizer": OptimizerConfig(name="adam")})
    shard.hello(0, 0, other)
    with pytest.raises(UserError):
        shard.hello(1, 0, MODEL)


def test_snapshot_names_the_pushes_in_it() -> None:
    shard = ready()
    for seq in (1, 2):
        push_to(shard, 0, 0, seq, seq - 1, ONE, grad())
    copy = shard.copy()
    assert copy is not None
    assert copy.pushes == ((0, 0, 1, 3),)
