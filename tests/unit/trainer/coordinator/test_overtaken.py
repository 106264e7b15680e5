"""Shard 0 restarts and cannot read its part of the snapshot that the job has rolled back to; the others can."""

from pathlib import Path

import pytest

from shoal_trainer.contract import JobIdentity, SnapshotPolicy, StopAfter
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.other_shard import OtherShard
from shoal_trainer.coordinator.protocol import DataSpec, Diverged, Join
from shoal_trainer.coordinator.reconciler import Reconciler
from shoal_trainer.coordinator.rollback import Rollback
from shoal_trainer.coordinator.snapshotter import Snapshotter
from shoal_trainer.errors import Unreachable
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig, Progress, PushMeta, Welcome
from tests.unit.trainer.coordinator.bench import next_work
from tests.unit.trainer.coordinator.remote_shard import RemoteShard
from tests.unit.trainer.ps.shards import push_to

MODEL = ModelSpec(
    fingerprint="0" * 64, parameters=40_000, optimizer=OptimizerConfig(name="delta", batch_size=2)
)


class Servers:
    """Both shards of a job of 16 samples in batches of 2, at this epoch; and one worker."""

    def __init__(self, folder: Path, epoch: int = 0) -> None:
        self.store, self.now = SnapshotStore(LocalStorage(folder)), 0.0
        self.shards = [ShardStore(index, 2, epoch, clock=lambda: self.now) for index in range(2)]
        job = JobIdentity(namespace="n", name="j", uid="u")
        self.coordinator = Coordinator(job, StopAfter(epochs=2), 2, self.shards[0], clock=lambda: self.now)
        for shard in self.shards:
            if (found := self.store.load_settled(shard.index, 2)) is not None:
                shard.restore(found[1])
                if shard.index == 0:
                    self.coordinator.load(found[0].ledger)
        control, fenced = RemoteShard(self.shards[1], self.store), []
        reconciler = Reconciler(self.shards[0], [control], self.coordinator)
        self.snapshotter = Snapshotter(
            self.shards[0], [control], self.coordinator, reconciler, self.store, SnapshotPolicy(), fenced=fenced.append,
            sleep=lambda _: None,
        )  # fmt: skip
        self.rollback = Rollback(
            self.shards[0], self.coordinator, self.store, self.snapshotter, fenced=fenced.append
        )
        self.other = OtherShard(self.shards[0], 1, control, overtaken=self.rollback.overtaken)
        self.coordinator.join(Join(slot=0, incarnation=0, data=DataSpec(size=16), batch_size=2))
        self.greet()
        for shard in self.shards:
            shard.offer(0, 0, aligned(shard.size))

    def greet(self) -> Welcome:
        """A worker says HELLO, again when the servers have waited for copies."""
        for _ in range(2):
            welcome = Welcome(tuple(shard.hello(0, 0, MODEL) for shard in self.shards))
            self.now += 10.0
        return welcome

    def lease(self):
        return next_work(self.coordinator, 0).lease

    def train(self, seq: int) -> None:
        lease = self.lease()
        meta = PushMeta(2, progress=(Progress(lease.epoch, -1, lease.start, lease.start + 2),))
        for shard in self.shards:
            push_to(shard, 0, 0, seq, shard.history.version, meta, aligned(shard.size), delta=True)

    def diverge(self) -> None:
        lease = self.lease()
        place = {"epoch": lease.epoch, "start": lease.start, "stop": lease.start + 2}
        generation = self.shards[0].history.generation
        self.rollback.diverged(
            Diverged(slot=0, incarnation=0, generation=generation, reason="loss nan", **place)
        )


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A run with two snapshots and a rollback to the second, of which the file of shard 0 is damaged."""
    first = Servers(tmp_path)
    for seq in (1, 2):
        first.train(seq)
        newest = first.snapshotter.take()
    first.diverge()
    first.other.tell()
    assert first.greet().ready
    file = tmp_path / "snapshots" / newest.shards[0].file
    file.write_bytes(bytes(newest.shards[0].size))
    return tmp_path


def test_all_shards_return_to_the_snapshot_that_shard_0_can_read(damaged: Path) -> None:
    again = Servers(damaged, epoch=1)
    assert not again.greet().ready
    again.other.tell()
    welcome = again.greet()
    assert welcome.ready
    assert [shard.history.version for shard in again.shards] == [1, 1]
    assert welcome.generation == 2
    again.coordinator.beginning._course.gathering.end()
    again.train(3)
    assert again.snapshotter.take().generation == 2
    status = report.status(again.coordinator)
    assert (status.step, status.rollbacks, status.data.repeated, status.data.partial) == (2, 1, 0, 0)


def test_shard_0_waits_for_a_worker_with_a_copy_of_the_later_generation(damaged: Path) -> None:
    again = Servers(damaged, epoch=1)
    again.shards[0] = waiting = ShardStore(0, 2, 1, clock=lambda: again.now)
    waiting.restore(again.store.load_settled(0, 2)[1])
    OtherShard(waiting, 1, again.other._control, overtaken=pytest.fail).tell()


def test_rollback_that_is_under_way_is_not_overtaken(damaged: Path) -> None:
    """A shard that restarts meanwhile may be of its generation before shard 0 is."""
    again = Servers(damaged, epoch=1)
    with again.snapshotter.taking, pytest.raises(Unreachable):
        again.other.tell()
    again.other.tell()
    number = again.store.next_number()
    again.rollback.overtaken(2)
    assert again.store.next_number() == number


def test_without_a_snapshot_that_shard_0_can_read_its_log_says_so(damaged: Path, caplog) -> None:
    for file in damaged.rglob("*.shard-0-*"):
        file.write_bytes(bytes(file.stat().st_size))
    again = Servers(damaged, epoch=1)
    with pytest.raises(Unreachable):
        again.other.tell()
    assert "shard 0 can read no snapshot, and others are of generation 1" in caplog.text
