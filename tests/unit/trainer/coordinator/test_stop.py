"""The end of training reaches the workers with the answers to their pushes."""

import pytest

from shoal_trainer.contract import JobIdentity, StopAfter
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.protocol import DataSpec, Join, TaskDone
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.wire.encoding import decode_answer, encode_answer
from shoal_trainer.wire.messages import ModelSpec, Progress, PushMeta
from shoal_trainer.worker.leases import Leases
from shoal_trainer.worker.work import DataWork
from tests.unit.trainer.coordinator.bench import next_work
from tests.unit.trainer.ps.shards import push_to

MODEL = ModelSpec(fingerprint="0" * 64, parameters=4)
TERM = 7


class Bench:
    """A coordinator with workers that push one batch of 2 samples at a time, each with its own `Leases`."""

    def __init__(self, stop, workers, boot=TERM, **data):
        self.shard = ShardStore(0, 1, 0, boot=boot)
        self.coordinator = Coordinator(JobIdentity(namespace="n", name="j", uid="u"), stop, 2, self.shard)
        self.shard.hello(0, 0, MODEL)
        self.shard.offer(0, 0, aligned(4))
        self.leases = [Leases() for _ in range(workers)]
        self.at, self.works, self.seq = [0] * workers, [None] * workers, 0
        for slot in range(workers):
            self.shard.workers.connect(slot, 0)
            self.coordinator.join(Join(slot=slot, incarnation=0, data=DataSpec(**data), batch_size=2))

    def ask(self, slot):
        assignment = next_work(self.coordinator, slot, 0)
        if assignment.kind == "data":
            lease = assignment.lease
            self.at[slot] = lease.start
            self.works[slot] = DataWork(
                lease.token, lease.epoch, lease.start, lease.stop, lease.file, lease.number
            )
            self.leases[slot].grant(self.works[slot])
        return assignment.kind

    def push(self, slot):
        """One batch, if the worker still holds its lease; the answer as the wire carries it."""
        work = self.works[slot]
        if self.leases[slot].token(work.token) is None:
            return None
        self.seq += 1
        mark = Progress(work.epoch, work.number, self.at[slot], self.at[slot] + 2)
        self.at[slot] += 2
        meta = PushMeta(samples=2, progress=(mark,))
        answer = push_to(self.shard, slot, 0, self.seq, self.shard.history.version, meta, aligned(4))
        found = decode_answer(encode_answer(answer.meta))
        self.leases[slot].void(found.stopped)
        return found.stopped


def test_step_limit_with_unknown_lengths_exceeds_by_one_batch_per_worker():
    bench = Bench(StopAfter(steps=10), 3, files=("a", "b", "c", "d"))
    assert [bench.ask(slot) for slot in range(3)] == ["data"] * 3
    for _ in range(100):
        for slot in range(3):
            bench.push(slot)
    assert 10 <= bench.coordinator.record.counters.steps <= 10 + 3
    assert not any(leases.held() for leases in bench.leases)
    assert bench.ask(0) == "task"


def test_reached_metric_voids_leases_of_other_workers():
    stop = StopAfter(epochs=50, metric="accuracy", value=0.9)
    bench = Bench(stop, 2, size=8, validation=True)
    while bench.ask(0) == "data":
        assert bench.push(0) == 0
    assert bench.ask(1) == "data"
    token = bench.coordinator.record.tasks.queue[0].token
    bench.coordinator.task_done(TaskDone(slot=0, incarnation=0, token=token, metrics={"val_accuracy": 0.95}))
    assert bench.push(1) == TERM
    assert bench.leases[1].held() == {}
    assert bench.push(1) is None


def test_coordinator_restored_after_stop_reports_its_own_term():
    old = Bench(StopAfter(steps=1), 1, size=8)
    old.ask(0)
    assert old.push(0) == TERM
    saved, copy = old.coordinator.record.dump(), old.shard.copy()
    shard = ShardStore(0, 1, 1, boot=TERM + 1)
    shard.restore(copy)
    Coordinator(JobIdentity(namespace="n", name="j", uid="u"), StopAfter(steps=1), 2, shard).load(saved)
    assert shard.hello(0, 0, MODEL).stopped == TERM + 1


@pytest.mark.parametrize(("term", "left"), [(0, 2), (1, 1), (2, 1), (3, 2)])
def test_void_forgets_the_leases_of_that_term_only(term, left):
    leases = Leases()
    for n in (1, 2):
        leases.grant(DataWork((n, n), 0, 8 * n, 8 * n + 8))
    leases.void(term)
    assert len(leases.held()) == left
    assert leases.token((term, term)) is None


@pytest.mark.parametrize("stop", [StopAfter(epochs=1), StopAfter(steps=2)])
def test_snapshot_is_taken_before_the_final_tasks(stop):
    """A shard that is lost between the final evaluation and the export returns with what was evaluated."""
    bench, versions = Bench(stop, 1, size=8, validation=True), []
    bench.coordinator.course.snapshot_soon = lambda: versions.append(bench.shard.history.version)
    while bench.ask(0) == "data":
        assert not versions
        bench.push(0)
    bench.coordinator.tick()
    assert versions == [4 if stop.epochs else 2]
