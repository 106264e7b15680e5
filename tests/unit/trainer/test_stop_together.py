"""Two parameter servers on loopback that are stopped: the final snapshot contains both shards."""

import logging
import threading
import time

import pytest

from shoal_trainer import serve
from shoal_trainer.contract import EXIT_DRAINED, Role
from shoal_trainer.coordinator.protocol import DataSpec, Join
from shoal_trainer.errors import Fenced
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.snapshot.storage import open_storage
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig, Progress, PushMeta
from tests.unit.trainer.coordinator.bench import next_work
from tests.unit.trainer.ps.shards import push_to
from tests.unit.trainer.snapshot.saving import latest
from tests.unit.trainer.threads import Job

MODEL = ModelSpec(fingerprint="0" * 64, parameters=64, optimizer=OptimizerConfig(name="delta", batch_size=2))


class Stopped(Job):
    """Two parameter servers; a test pushes to their shards directly."""

    def __init__(self, folder):
        super().__init__(folder, shards=2, epochs=100, batch_size=2)
        # All ports are open.
        self.wait(lambda: all(server._watch._thread.is_alive() for server in self.servers.values()))

    def train(self, pushes):
        """Initialize the parameters of both shards, and push to both."""
        for server in self.servers.values():
            server.shard.workers.connect(0, 0)
            server.shard.hello(0, 0, MODEL)
            server.shard.offer(0, 0, aligned(server.shard.size))
        join = Join(slot=0, incarnation=0, data=DataSpec(size=1000), batch_size=2)
        self.coordinator.join(join)
        next_work(self.coordinator, 0, 0)
        for seq in range(1, pushes + 1):
            self.push(seq)

    def push(self, seq):
        meta = PushMeta(samples=2, progress=(Progress(0, -1, 2 * seq - 2, 2 * seq),))
        for server in self.servers.values():
            push_to(server.shard, 0, 0, seq, seq - 1, meta, aligned(server.shard.size), delta=True)

    def exit_code(self, index):
        self.serving[index].join(30)
        return self.codes[index]

    def manifest(self):
        store = SnapshotStore(
            open_storage((self.folder / "storage").as_uri(), self.config(Role.PS, 0).job.prefix)
        )
        return latest(store)

    def close(self):
        for server in self.servers.values():
            server._on_fenced(Fenced("the test has ended"))
        for thread in self.serving.values():
            thread.join(30)


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "serve_metrics", lambda *_: None)
    monkeypatch.setattr(serve, "TICK_SECONDS", 0.02)
    job = Stopped(tmp_path)
    yield job
    job.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_servers_stopped_together_save_the_newest_version(job, order, caplog):
    job.train(3)
    assert job.servers[0].service.snapshotter.take().shards[1].version == 3
    job.push(4)
    job.servers[order[0]].stop()
    job.serving[order[0]].join(0.2)  # shard 1 still serves then, if it is the first
    job.servers[order[1]].stop()
    assert [job.exit_code(index) for index in (0, 1)] == [EXIT_DRAINED] * 2
    manifest = job.manifest()
    assert (manifest.number, [part.version for part in manifest.shards]) == (2, [4, 4])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_shard_stopped_alone_serves_until_its_part_of_a_snapshot(job):
    job.train(1)
    job.servers[0].service.snapshotter.take()
    job.servers[1].stop()
    job.serving[1].join(0.2)
    job.push(2)
    assert job.servers[0].service.snapshotter.take().shards[1].version == 2
    assert job.exit_code(1) == EXIT_DRAINED


def test_shard_stopped_alone_exits_after_the_limit(job, monkeypatch):
    monkeypatch.setattr(serve, "MANIFEST_SECONDS", 59.7)
    job.train(1)
    job.servers[0].service.snapshotter.take()
    begin = time.monotonic()
    job.servers[1].stop()
    assert job.exit_code(1) == EXIT_DRAINED
    assert time.monotonic() - begin >= 0.3
    assert job.serving[0].is_alive()


def test_shard_that_writes_its_part_at_the_limit_goes_on(job, monkeypatch):
    """Of a large model it takes longer than the limit; the pod's grace period ends it."""
    monkeypatch.setattr(serve, "MANIFEST_SECONDS", 60.0)
    job.train(1)
    store, begun, goes_on = job.servers[1]._store, threading.Event(), threading.Event()
    write = store.write_shard

    def slow(*arguments):
        begun.set()
        assert goes_on.wait(30)
        return write(*arguments)

    monkeypatch.setattr(store, "write_shard", slow)
    job.servers[0].stop()
    assert begun.wait(30)
    job.servers[1].stop()
    job.serving[1].join(0.3)
    assert job.serving[1].is_alive()
    goes_on.set()
    assert [job.exit_code(index) for index in (0, 1)] == [EXIT_DRAINED] * 2
    assert [part.version for part in job.manifest().shards] == [1, 1]


def test_shard_without_parameters_exits_at_once(job):
    job.servers[1].stop()
    assert job.exit_code(1) == EXIT_DRAINED


def test_shard_exits_at_once_after_shard_0(job):
    """As when the job has ended, or is suspended."""
    job.train(1)
    job.servers[0].stop()
    assert job.exit_code(0) == EXIT_DRAINED
    job.servers[1].stop()
    assert job.exit_code(1) == EXIT_DRAINED


def test_replaced_shard_exits_at_once_while_stopping(job):
    job.train(1)
    job.servers[1].stop()
    job.servers[1]._on_fenced(Fenced("another server has claimed this shard"))
    assert job.exit_code(1) is not None
