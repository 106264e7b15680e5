"""Which silent workers are fenced, and how far a resumed run trains ahead."""

from shoal_trainer.contract import StopAfter, WorkerState
from shoal_trainer.coordinator.protocol import DataSpec, Heartbeat
from tests.unit.trainer.coordinator.bench import Bench, next_work


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
