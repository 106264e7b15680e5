"""A coordinator that starts again from a snapshot or from another run."""

import pytest

from shoal_trainer.contract import StopAfter
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.protocol import Heartbeat, Join, TaskDone
from shoal_trainer.coordinator.report import ranges
from shoal_trainer.errors import Fenced, UserError
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.shard import State
from shoal_trainer.wire.messages import AnswerMeta, Held, Journal, OptimizerConfig
from tests.unit.trainer.coordinator.bench import MODEL, Bench
from tests.unit.trainer.ps.shards import pull_from


def test_dump_and_load_keep_the_whole_state():
    bench = Bench(validation=True, workers=1)
    lease = bench.ask(0).lease
    bench.push(0, lease, lease.stop)
    saved = bench.coordinator.record.dump()
    other = Bench(validation=True)
    other.coordinator.load(saved)
    assert other.coordinator.record.dump() == saved
    assert other.coordinator.record.counters.steps == 1


def test_journal_advances_the_restored_ledger_to_the_copy():
    old = Bench(workers=1)
    lease = old.ask(0).lease
    old.push(0, lease, lease.stop)
    saved, copy = old.coordinator.record.dump(), old.shard.copy()
    lease = old.ask(0).lease
    old.push(0, lease, lease.stop)
    old.push(0, lease, lease.stop)
    newest = pull_from(old.shard, 0, aligned(4))

    new = Bench()
    new.shard.restore(copy)
    new.coordinator.load(saved)
    assert new.shard.hello(0, 0, MODEL, Held(version=newest.version)).wants_copy
    new.shard.offer(0, 0, aligned(4), newest.version, newest.meta)
    assert new.coordinator.record.ledger.done_samples == 4
    counters = new.coordinator.record.counters
    assert (counters.steps, counters.repeated) == (3, 2)
    assert new.shard.history.journal.since(-1).entries == old.shard.history.journal.since(1).entries


def test_restart_in_place_reuses_no_token():
    """A container restarts under the same epoch, and a surviving worker still holds its leases."""
    old, new = Bench(), Bench(boot=2)
    old.join(0)
    saved = old.coordinator.record.dump()
    held = [old.ask(0).lease for _ in range(2)]
    new.coordinator.load(saved)
    answer = new.join(0, leases=tuple(held))
    assert [one.old for one in answer.renamed] == [lease.token for lease in held]
    new.now += 60.0
    others = []
    while (work := new.ask(0)).kind == "data":
        others.append(work.lease)
    tokens = [one.new for one in answer.renamed] + [lease.token for lease in others]
    assert len(set(tokens) | {lease.token for lease in held}) == len(tokens) + len(held)
    assert sorted(lease.start for lease in [*held, *others]) == [0, 2, 4, 6]


def test_unclaimed_leases_are_free_after_a_restart_in_place():
    old, new = Bench(), Bench(boot=2)
    old.join(0)
    old.ask(0)
    new.coordinator.load(old.coordinator.record.dump())
    new.join(1)
    new.now += 60.0
    new.coordinator.tick()
    assert new.train(1).task == "export"


def test_new_run_drops_leases_and_stop_reason_of_the_old_run():
    first, second = Bench(stop=StopAfter(steps=1)), Bench(boot=2, stop=StopAfter(epochs=2))
    for slot in (0, 1):
        first.join(slot)
    lease = first.ask(0).lease
    first.coordinator.record.stopping = "1 steps are done"
    second.coordinator.load(first.coordinator.record.dump(), other_run=True)
    assert lease.token in first.coordinator.record.ledger.leases
    assert not second.coordinator.course.gathering.on
    second.join(0)
    assert second.train(0).task == "export"
    assert second.coordinator.record.ledger.completed == 2


def with_optimizer(**options):
    return MODEL.model_copy(update={"optimizer": OptimizerConfig(batch_size=2, **options)})


ADAM = with_optimizer(name="adam", learning_rate=0.01)


@pytest.mark.parametrize(
    ("first", "second", "rate"),
    [
        (ADAM, with_optimizer(name="adam", learning_rate=0.01, beta_1=0.8), 1e-5),
        (ADAM, with_optimizer(name="adam", learning_rate=0.02), None),
        (ADAM, with_optimizer(name="adamw", learning_rate=0.01), None),
        (MODEL, MODEL, None),
    ],
    ids=["the same optimizer", "another rate", "another optimizer", "on the workers"],
)
def test_new_run_keeps_the_learning_rate_of_a_callback_with_its_optimizer(first, second, rate):
    old, new = Bench(callbacks=True, model=first), Bench(boot=2, stop=StopAfter(epochs=2), model=second)
    old.join(0)
    done = TaskDone(slot=0, incarnation=0, token=old.train(0).token, learning_rate=1e-5)
    old.coordinator.task_done(done)
    new.shard.restore(old.shard.copy(), other_run=True)
    new.coordinator.load(old.coordinator.record.dump(), other_run=True)
    new.join(0)
    new.now += 10.0
    assert new.ask(0).kind == "data"
    assert new.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0)).learning_rate == rate
    assert old.successor().coordinator.record.tasks.learning_rate == 1e-5


def test_run_that_continues_a_finished_one_trains_before_it_exports():
    """The snapshot at the end of training contains the queue of final tasks."""
    first, second = Bench(validation=True), Bench(boot=2, stop=StopAfter(epochs=2), validation=True)
    first.join(0)
    assert first.train(0).task == "evaluate"
    assert [task.kind for task in first.coordinator.record.tasks.queue] == ["evaluate", "export"]
    second.shard.restore(first.shard.copy(), other_run=True)
    second.coordinator.load(first.coordinator.record.dump(), other_run=True)
    second.join(0)
    second.now += 10.0  # it waits for copies
    work, tasks = second.train(0), []
    while work.kind == "task":
        tasks.append((work.task, work.epoch, second.coordinator.record.ledger.completed))
        second.coordinator.task_done(
            TaskDone(slot=0, incarnation=0, token=work.token, metrics={"val_loss": 0.5})
        )
        work = second.train(0)
    assert tasks == [("evaluate", 0, 1), ("evaluate", 1, 2), ("export", 1, 2)]


def test_run_that_continues_within_an_epoch_evaluates_it_at_its_end():
    first = Bench(stop=StopAfter(steps=2), validation=True)
    second = Bench(boot=2, stop=StopAfter(steps=3), validation=True)
    first.join(0)
    assert first.train(0).task == "evaluate"
    assert first.coordinator.record.ledger.completed == 0
    second.shard.restore(first.shard.copy(), other_run=True)
    second.coordinator.load(first.coordinator.record.dump(), other_run=True)
    second.join(0)
    second.now += 10.0
    work = second.train(0)
    assert (work.task, work.epoch, second.coordinator.record.counters.steps) == ("evaluate", 0, 3)


def test_coordinator_restored_from_before_the_first_lease_waits_for_workers():
    old = Bench(workers=1)
    new = old.successor()
    new.shard.hello(1, 0, MODEL, Held(version=0))  # with a copy
    new.join(1)
    new.now += 1.0
    assert new.shard.state is State.READY
    assert new.ask(1, number=5).kind == "idle"  # another worker may hold leases
    new.now += 10.0
    assert new.ask(1, number=5).kind == "idle"  # a late repeat: the worker has read the answer
    assert new.ask(1, number=6).kind == "data"


def test_coordinator_waits_for_a_worker_that_joined_after_the_snapshot():
    """A copy of the parameters names it; its leases must not be granted to another."""
    old, new = Bench(), Bench(boot=2, epoch=1)
    old.join(0)
    old.push(0, lease := old.ask(0).lease, lease.stop)
    saved, copy = old.coordinator.record.dump(), old.shard.copy()
    old.join(1)
    lease, held = old.ask(1).lease, old.ask(1).lease
    old.push(1, lease, lease.stop)
    newest = pull_from(old.shard, 0, aligned(4))

    new.shard.restore(copy)
    new.coordinator.load(saved)
    new.shard.hello(0, 0, MODEL, Held(version=newest.version))
    new.shard.offer(0, 0, aligned(4), newest.version, newest.meta)
    new.shard.hello(1, 0, MODEL, Held(version=newest.version))
    assert new.shard.state is State.READY
    new.join(0)
    assert new.ask(0).kind == "idle"
    assert [one.old for one in new.join(1, leases=(held,)).renamed] == [held.token]
    assert new.ask(0).lease.start not in {lease.start, held.start}


def test_replacement_of_new_run_before_first_snapshot_adopts_copies():
    """Pushes in the workers' copies are counted, and their leases are renewed before any lease is granted."""
    first, lost, new = Bench(), Bench(boot=2), Bench(boot=3, epoch=1)
    first.join(0)
    for bench in (lost, new):
        bench.shard.restore(first.shard.copy(), other_run=True)
        bench.coordinator.load(first.coordinator.record.dump(), other_run=True)
    assert not lost.coordinator.course.gathering.on
    lost.join(0)
    lost.now += 10.0
    lease, held = lost.ask(0).lease, lost.ask(0).lease
    lost.finish(0, lease)
    meta = pull_from(lost.shard, 0, copy := aligned(4)).meta
    assert new.coordinator.course.gathering.on
    assert new.shard.hello(0, 0, MODEL, Held(version=1)).wants_copy
    new.shard.offer(0, 0, copy, 1, meta)
    answer = new.join(0, leases=(held,))
    new.join(1)
    assert [one.old for one in answer.renamed] == [held.token]
    assert new.coordinator.record.ledger.counts() == (2, 2)
    assert new.ask(1).kind == "idle"
    new.now += 60.0
    new.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0))
    starts = []
    while (work := new.ask(1)).kind == "data":
        starts.append(work.lease.start)
    assert sorted([lease.start, held.start, *starts]) == [0, 2, 4, 6]
    assert new.coordinator.record.counters.repeated == 0


def test_replaced_incarnation_stays_fenced_after_a_restart():
    old = Bench(workers=1)
    old.push(0, old.ask(0).lease, 2)
    old.join(0, incarnation=1)
    old.push(0, old.ask(0, 1).lease, 4, incarnation=1)
    new = old.successor(epoch=0)
    new.join(1)
    new.now += 60.0
    new.ask(1)
    with pytest.raises(Fenced, match="newer incarnation"):
        new.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0))
    new.coordinator.heartbeat(Heartbeat(slot=0, incarnation=1))


def test_survivors_have_time_to_join_after_a_late_recovery():
    """A large copy may take longer than gathering does; survivors see that the shard is ready at their next hello."""
    old = Bench(workers=1)
    old.join(1)
    lease = old.ask(0).lease
    old.push(0, lease, 1, samples=1)
    saved, copy = old.coordinator.record.dump(), old.shard.copy()
    new = Bench(boot=2, epoch=1)
    new.shard.restore(copy)
    new.coordinator.load(saved)
    for slot in (0, 1):
        new.shard.workers.connect(slot, 0)
        new.coordinator.heartbeat(Heartbeat(slot=slot, incarnation=0))
    assert new.shard.hello(0, 0, MODEL, Held(version=old.shard.history.version + 1)).wants_copy
    new.now += 8.0
    meta = AnswerMeta(1, 1, dict(old.shard.history.applied), old.shard.history.journal.since(-1))
    new.shard.offer(0, 0, aligned(4), old.shard.history.version + 1, meta)
    assert new.ask(1).kind == "idle"
    held = lease.model_copy(update={"start": 1})
    assert new.join(0, leases=(held,)).renamed


def test_step_limit_reached_while_gathering_fences_no_survivor():
    stop = StopAfter(steps=2)
    old = Bench(stop=stop)
    for slot in (0, 1):
        old.join(slot)
    leases = [old.ask(slot).lease for slot in (0, 1)]
    old.push(0, leases[0], leases[0].stop)
    saved, copy = old.coordinator.record.dump(), old.shard.copy()
    new = Bench(stop=stop, boot=2, epoch=1)
    new.now = 5000.0
    new.shard.restore(copy)
    new.coordinator.load(saved)
    for slot in (0, 1):
        new.shard.workers.connect(slot, 0)
        new.shard.hello(slot, 0, MODEL)
    new.now += 5.0
    new.coordinator.join(Join(slot=0, incarnation=0, data=new.data, batch_size=2))
    new.seq[0, 0] = 1
    new.push(0, leases[0], leases[0].stop)
    assert new.coordinator.course.gathering.on
    new.now += 0.25
    new.coordinator.tick()
    new.join(1)
    new.ask(0)
    assert new.coordinator.record.stopping


def test_final_tasks_wait_for_last_pushes_after_a_restart():
    stop = StopAfter(epochs=9, metric="accuracy", value=0.9)
    old = Bench(stop=stop, workers=1)
    held = old.ask(0).lease
    saved, copy = old.coordinator.record.dump(), old.shard.copy()
    new = Bench(stop=stop, boot=2, epoch=1)
    new.shard.restore(copy)
    new.coordinator.load(saved | {"stopping": "accuracy reached 0.9"})
    new.shard.workers.connect(0, 0)
    new.shard.hello(0, 0, MODEL, Held(version=0))
    new.now += 5.0
    new.join(0, leases=(held,))
    new.join(1)
    assert new.ask(1).kind == "idle"
    assert not new.coordinator.course.gathering.on
    new.push(0, held, held.start + 2)
    assert new.ask(1).kind == "task"


def test_leases_wait_for_a_worker_that_is_alive_but_has_not_joined_again():
    """It may still connect to another lost server, or notice the loss only after several steps."""
    old = Bench()
    for slot in range(2):
        old.join(slot)
    held = old.ask(0).lease
    new = old.successor()
    for slot in range(2):
        new.shard.hello(slot, 0, MODEL, Held(version=0))
    new.join(1)
    for _ in range(12):
        new.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0))
        assert new.ask(1).kind == "idle"
        new.now += 2.0
    assert [one.old for one in new.join(0, leases=(held,)).renamed] == [held.token]
    assert new.ask(1).lease.start != held.start


def test_leases_wait_a_minute_at_most():
    old = Bench()
    for slot in range(2):
        old.join(slot)
    new = old.successor()
    for slot in range(2):
        new.shard.hello(slot, 0, MODEL, Held(version=0))
    new.join(1)
    while new.ask(1).kind == "idle":
        new.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0))
        new.now += 1.0
    assert 60.0 <= new.now <= 62.0


def test_live_workers_are_those_connected_to_the_shard():
    """The other shards count connections, and momentum must be the same on all."""
    bench = Bench(workers=1)
    bench.coordinator.heartbeat(Heartbeat(slot=1, incarnation=0))  # it still traces its model
    bench.coordinator.tick()
    assert bench.shard.workers.live == 1
    bench.join(1)
    bench.coordinator.tick()
    assert bench.shard.workers.live == 2


def test_ranges_of_the_epoch_that_is_not_complete_do_not_count():
    bench = Bench(stop=StopAfter(epochs=2), workers=1)
    while bench.coordinator.record.ledger.completed < 1:
        bench.finish(0, bench.ask(0).lease)
        bench.coordinator.tick()
    bench.coordinator.record.counters.repeated_ranges = {(1, 0)}
    bench.coordinator.record.counters.partial_ranges = {(0, 0), (1, 1)}
    found = ranges(bench.coordinator.record)
    assert (found.once, found.repeated, found.partial) == (
        bench.coordinator.record.ledger.ranges.per_epoch - 1,
        0,
        1,
    )


def test_restart_from_nothing_is_counted_with_what_is_trained_again():
    """Ephemeral storage: with shard 0 its snapshots are gone, so a worker's journal does not reach back far enough."""
    new = Bench(boot=2, epoch=1)
    new.shard.workers.connect(0, 0)
    new.shard.hello(0, 0, MODEL)
    new.now += 60.0
    new.shard.offer(0, 0, aligned(4), 3, AnswerMeta(6, torn=True))
    for slot, known in ((0, 6), (1, 7), (0, 6)):
        new.join(slot, known_samples=known)
    status = report.status(new.coordinator)
    assert (status.restarted_from_nothing, status.data.repeated) == (1, 6)


def test_restart_with_the_parameters_of_a_copy_alone_says_what_is_left_of_the_whole_training() -> None:
    """The learning rate goes on, and so does the count of samples in the parameters; the data begin anew."""
    new = Bench(boot=2, epoch=1)
    new.shard.workers.connect(0, 0)
    new.shard.hello(0, 0, MODEL, Held(version=900))
    new.shard.offer(0, 0, aligned(4), 900, AnswerMeta(3600, journal=Journal(500)))
    new.now += 60.0
    new.join(0, known_samples=3600)
    new.now += 60.0
    for _ in range(3):
        new.now += 10.0
        new.finish(0, new.ask(0).lease)
    status = report.status(new.coordinator)
    assert (status.restarted_from_nothing, status.data.repeated) == (1, 3600)
    assert status.samples > 3600
    assert status.remaining_seconds == pytest.approx(status.samples_left / status.samples_per_second)


def test_restart_from_nothing_with_new_parameters_repeats_nothing_in_them():
    new = Bench(boot=2, epoch=1, workers=1)
    new.now += 60.0
    new.join(0)
    new.join(1, known_samples=7)  # its copy came too late
    status = report.status(new.coordinator)
    assert (status.restarted_from_nothing, status.data.repeated) == (1, 0)


def test_restart_before_training_or_from_a_snapshot_is_not_one_from_nothing():
    fresh = Bench(boot=2, epoch=1, workers=1)
    old = Bench(workers=1)
    lease = old.ask(0).lease
    old.push(0, lease, lease.stop)
    resumed = old.successor()
    resumed.join(0, known_samples=4)
    first = Bench()
    first.join(0, known_samples=4)
    for bench in (fresh, resumed, first):
        assert bench.coordinator.record.counters.restarted_from_nothing == 0
        assert bench.coordinator.record.counters.repeated == 0


def test_data_are_unknown_after_a_restart_until_a_worker_joins():
    """A snapshot would lack the positions in the copies that the shards have adopted."""
    assert not Bench().coordinator.beginning.data_unknown
    restarted = Bench(epoch=1)
    assert restarted.coordinator.beginning.data_unknown
    restarted.join(0)
    assert not restarted.coordinator.beginning.data_unknown


def test_another_model_than_that_of_the_run_it_starts_from_says_how_to_take_its_weights():
    """Layers that were frozen there and are trained here, for one."""
    first, second = Bench(), Bench(boot=2)
    first.join(0)
    second.shard.restore(first.shard.copy(), other_run=True, weights_only=True)
    unfrozen = MODEL.model_copy(update={"parameters": MODEL.parameters + 1})
    with pytest.raises(UserError) as told:
        second.shard.hello(0, 0, unfrozen)
    assert str(told.value).startswith("the run that this one starts from has 4 trainable")
    assert "leave initialFrom out and load that run's model/model.keras" in str(told.value)
    assert "start a new run" not in str(told.value), "it is one"
