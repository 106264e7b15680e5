"""Which silent workers are fenced, and how far a resumed run trains ahead."""

import pytest

from shoal_trainer.contract import StopAfter, WorkerState
from shoal_trainer.coordinator.protocol import DataSpec, Heartbeat
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.wire.messages import Progress, PushMeta, Timings
from tests.unit.trainer.coordinator.bench import Bench, next_work
from tests.unit.trainer.ps.shards import push_to


def begun(workers, **data):
    """A job that these workers have joined."""
    bench = Bench(stop=StopAfter(epochs=50))
    bench.data = DataSpec(**data)
    for slot in range(workers):
        bench.join(slot)
    return bench


def silence(bench, *speaking):
    """Seven seconds in which only these slots send heartbeats."""
    for _ in range(7):
        bench.now += 1.0
        for slot in speaking:
            bench.coordinator.heartbeat(Heartbeat(slot=slot, incarnation=0))
        bench.coordinator.tick()


def kinds(bench, workers):
    return [next_work(bench.coordinator, slot).kind for slot in range(workers)]


def states(bench):
    return [known.state for _, known in sorted(bench.coordinator.members.known.items())]


def test_silent_worker_without_work_is_not_fenced():
    bench = begun(3, files=("a",), callbacks=True)
    bench.coordinator.record.ledger.epochs = 1
    assert kinds(bench, 3) == ["data", "idle", "idle"]
    silence(bench, 0, 1)
    assert next_work(bench.coordinator, 1).kind == "idle"
    assert states(bench) == [WorkerState.ACTIVE, WorkerState.ACTIVE, WorkerState.SILENT]
    bench.coordinator.heartbeat(Heartbeat(slot=2, incarnation=0))
    assert states(bench)[2] is WorkerState.ACTIVE


def test_silent_worker_with_a_lease_is_fenced_when_others_idle():
    bench = begun(2, files=("a",), callbacks=True)
    bench.coordinator.record.ledger.epochs = 1
    assert kinds(bench, 2) == ["data", "idle"]
    silence(bench, 1)
    assert next_work(bench.coordinator, 1).kind == "data"
    assert states(bench) == [WorkerState.FENCED, WorkerState.ACTIVE]


def half_done(timings):
    """A job whose last samples slot 0 has, after a push that took so long; slot 1 is idle."""
    bench = begun(2, size=4, callbacks=True)
    bench.coordinator.record.ledger.epochs = 1
    lease = bench.ask(0).lease
    meta = PushMeta(samples=2, progress=(Progress(0, -1, lease.start, lease.start + 2),), timings=timings)
    push_to(bench.shard, 0, 0, 1, bench.shard.history.version, meta, aligned(4), delta=True)
    assert bench.ask(0).kind == "data"
    return bench


@pytest.mark.parametrize(
    "first", [Timings(step=600.0, input=599.0), Timings(step=600.0, compute=600.0)], ids=["read", "compiled"]
)
def test_worker_whose_first_step_took_long_is_fenced_in_a_minute_when_others_idle(first):
    """Its heartbeats came each second, also while it waited for data or compiled its step."""
    bench = half_done(first)
    lost = bench.now
    while bench.train(1).kind == "idle":
        silence(bench, 1)
        assert bench.now - lost < 70
    assert states(bench)[0] is WorkerState.FENCED


def test_worker_whose_reading_takes_the_processor_from_its_heartbeats_is_not_fenced():
    """One call may read for seconds and let no other thread run."""
    bench = half_done(Timings(step=8.5, input=8.0))
    lost = bench.now
    while bench.now - lost < 14:
        assert bench.train(1).kind == "idle"
        silence(bench, 1)
    assert states(bench)[0] is not WorkerState.FENCED


def test_silent_worker_with_the_first_task_is_fenced_when_others_idle():
    bench = begun(2, size=8, callbacks=True)
    bench.coordinator.record.ledger.epochs = 0
    assert kinds(bench, 2) == ["task", "idle"]
    silence(bench, 1)
    assert next_work(bench.coordinator, 1).kind == "task"
    assert states(bench) == [WorkerState.FENCED, WorkerState.ACTIVE]


def resumed(before, **data):
    """Another run that continues this one."""
    bench = begun(0, size=1000, **data)
    bench.coordinator.load(before.coordinator.record.dump(), other_run=True)
    bench.join(0)
    return bench


def test_run_resumed_with_callbacks_is_at_most_one_epoch_ahead():
    without = begun(1, size=1000)
    assert without.coordinator.record.ledger.ahead > 1
    assert resumed(without, callbacks=True).coordinator.record.ledger.ahead == 1


def test_run_resumed_without_callbacks_may_be_many_epochs_ahead():
    assert resumed(begun(1, size=1000, callbacks=True)).coordinator.record.ledger.ahead > 1
