"""Which silent workers are fenced, and how far a resumed run trains ahead."""

from shoal_trainer.contract import JobIdentity, StopAfter, WorkerState
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.protocol import DataSpec, Heartbeat, Join
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.wire.messages import ModelSpec
from tests.unit.trainer.coordinator.bench import next_work


class Bench:
    def __init__(self, workers, uid="u", **data):
        self.now = 0.0
        self.shard = ShardStore(0, 1, 0, clock=lambda: self.now)
        self.shard.hello(0, 0, ModelSpec(fingerprint="0" * 64, parameters=4))
        self.shard.initialize(aligned(4))
        job = JobIdentity(namespace="n", name="j", uid=uid)
        self.coordinator = Coordinator(job, StopAfter(epochs=50), 2, self.shard, clock=lambda: self.now)
        self.data, self.workers = DataSpec(**data), workers

    def join(self):
        for slot in range(self.workers):
            self.coordinator.join(Join(slot=slot, incarnation=0, data=self.data, batch_size=2))
        return self

    def silence(self, *speaking):
        """Seven seconds in which only these slots send heartbeats."""
        for _ in range(7):
            self.now += 1.0
            for slot in speaking:
                self.coordinator.heartbeat(Heartbeat(slot=slot, incarnation=0))
            self.coordinator.tick()

    def states(self):
        return [self.coordinator.members.get((slot, 0)).state for slot in range(self.workers)]


def test_silent_worker_without_work_is_not_fenced():
    bench = Bench(3, files=("a",), callbacks=True).join()
    bench.coordinator.record.ledger.epochs = 1
    assert [next_work(bench.coordinator, slot, 0).kind for slot in range(3)] == ["data", "idle", "idle"]
    bench.silence(0, 1)
    assert next_work(bench.coordinator, 1, 0).kind == "idle"
    assert bench.states() == [WorkerState.ACTIVE, WorkerState.ACTIVE, WorkerState.SILENT]
    bench.coordinator.heartbeat(Heartbeat(slot=2, incarnation=0))
    assert bench.states()[2] is WorkerState.ACTIVE


def test_silent_worker_with_a_lease_is_fenced_when_others_idle():
    bench = Bench(2, files=("a",), callbacks=True).join()
    bench.coordinator.record.ledger.epochs = 1
    assert [next_work(bench.coordinator, slot, 0).kind for slot in range(2)] == ["data", "idle"]
    bench.silence(1)
    assert next_work(bench.coordinator, 1, 0).kind == "data"
    assert bench.states() == [WorkerState.FENCED, WorkerState.ACTIVE]


def test_silent_worker_with_the_first_task_is_fenced_when_others_idle():
    bench = Bench(2, size=8, callbacks=True).join()
    bench.coordinator.record.ledger.epochs = 0
    assert [next_work(bench.coordinator, slot, 0).kind for slot in range(2)] == ["task", "idle"]
    bench.silence(1)
    assert next_work(bench.coordinator, 1, 0).kind == "task"
    assert bench.states() == [WorkerState.FENCED, WorkerState.ACTIVE]


def test_run_resumed_with_callbacks_is_at_most_one_epoch_ahead():
    without = Bench(1, size=1000).join()
    assert without.coordinator.record.ledger.ahead > 1
    resumed = Bench(1, uid="v", size=1000, callbacks=True)
    resumed.coordinator.load(without.coordinator.record.dump(), other_run=True)
    resumed.join()
    assert resumed.coordinator.record.ledger.ahead == 1


def test_run_resumed_without_callbacks_may_be_many_epochs_ahead():
    without = Bench(1, size=1000, callbacks=True).join()
    resumed = Bench(1, uid="v", size=1000)
    resumed.coordinator.load(without.coordinator.record.dump(), other_run=True)
    resumed.join()
    assert resumed.coordinator.record.ledger.ahead > 1
