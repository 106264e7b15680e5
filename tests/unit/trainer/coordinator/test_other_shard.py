"""What shard 0 decides holds for every shard, nothing waits for one that is dead, and each is reported."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shoal_trainer.contract import JobIdentity, Shard, StopAfter
from shoal_trainer.coordinator.control_client import ShardControl
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.http import ControlServer
from shoal_trainer.coordinator.other_shard import TELL_EVERY_SECONDS, OtherShard
from shoal_trainer.coordinator.protocol import DataSpec, FenceWorkers, Heartbeat, Join, Leave
from shoal_trainer.errors import Fenced, Unreachable
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.security import create_secret_dir
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.wire.messages import ModelSpec, PushMeta
from tests.unit.trainer.coordinator.remote_shard import RemoteShard
from tests.unit.trainer.ps.shards import push_to

MODEL = ModelSpec(fingerprint="0" * 64, parameters=40_000)
DATA = DataSpec(size=64)


class Other(RemoteShard):
    """Shard 1; its rollbacks are only noted."""

    def __init__(self, shard: ShardStore, folder: Path) -> None:
        super().__init__(shard, SnapshotStore(LocalStorage(folder)))
        self.rollbacks: list[int] = []
        self.error: Exception | None = None
        """What a rollback raises."""

    def roll_back(self, generation: int) -> None:
        self.rollbacks.append(generation)
        if self.error is not None:
            raise self.error


class Job:
    """Two shards and two workers."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.shards = [ShardStore(index, 2, 0, clock=lambda: self.now) for index in range(2)]
        job = JobIdentity(namespace="n", name="j", uid="u")
        self.coordinator = Coordinator(job, StopAfter(epochs=1), 1, self.shards[0], clock=lambda: self.now)
        self.other = Other(self.shards[1], folder)
        self.follows = OtherShard(self.shards[0], 1, self.other)
        self.coordinator.departures.refused = self.follows.wake
        for shard in self.shards:
            for slot in (0, 1):
                shard.workers.connect(slot, 0)
                shard.hello(slot, 0, MODEL)
            shard.offer(0, 0, aligned(shard.size))
        for slot in (0, 1):
            self.join(slot)
        self.numbers = itertools.count(1)
        assert self.follows.tell() == TELL_EVERY_SECONDS

    def join(self, slot: int, incarnation: int = 0) -> None:
        self.coordinator.join(Join(slot=slot, incarnation=incarnation, data=DATA, batch_size=1))

    def silence(self) -> None:
        """Worker 0 is paused until it counts as lost."""
        for _ in range(70):
            self.now += 1.0
            self.coordinator.heartbeat(Heartbeat(slot=1, incarnation=0))
            self.coordinator.tick()

    def refused_by(self) -> list[int]:
        """The shards that refuse a push of 0-0."""
        refused = []
        for index, shard in enumerate(self.shards):
            try:
                push_to(
                    shard,
                    0,
                    0,
                    next(self.numbers),
                    shard.history.version,
                    PushMeta(1),
                    np.ones(shard.size, np.float32),
                )
            except Fenced:
                refused.append(index)
        return refused


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_silent_worker_is_refused_by_every_shard(job: Job) -> None:
    job.silence()
    job.follows.tell()
    assert job.refused_by() == [0, 1]


def test_a_replaced_worker_is_refused_before_its_successor_has_connected(job: Job) -> None:
    job.join(0, incarnation=1)
    job.follows.tell()
    assert job.refused_by() == [0, 1]


def test_a_worker_that_has_left_is_refused_also_if_it_connects_again(job: Job) -> None:
    job.coordinator.leave(Leave(slot=0, incarnation=0))
    job.follows.tell()
    for shard in job.shards:
        with pytest.raises(Fenced, match="has left"):
            shard.workers.connect(0, 0)
    assert job.refused_by() == [0, 1]


@pytest.mark.parametrize(
    "lose",
    [
        Job.silence,
        lambda job: job.join(0, incarnation=1),
        lambda job: job.coordinator.leave(Leave(slot=0, incarnation=0)),
    ],
    ids=["silent", "replaced", "left"],
)
def test_the_shards_are_told_at_once_of_a_worker_that_is_lost(job: Job, lose: Callable[[Job], None]) -> None:
    woken: list[int] = []
    job.coordinator.departures.refused = lambda: woken.append(1)
    lose(job)
    assert woken == [1]


def test_a_fence_waits_for_no_dead_shard_which_is_told_when_it_is_back(job: Job) -> None:
    job.other.down = True
    job.silence()
    with pytest.raises(Unreachable):
        job.follows.tell()
    assert job.refused_by() == [0]  # what the other takes counts as partial
    job.other.down = False
    job.follows.tell()
    assert job.refused_by() == [0, 1]


def test_what_was_told_is_told_again_to_a_shard_that_restarted(job: Job, tmp_path: Path) -> None:
    job.silence()
    job.follows.tell()
    restarted = ShardStore(1, 2, 1, follows=False)
    job.other.handlers = Other(restarted, tmp_path).handlers
    job.follows.tell()
    with pytest.raises(Fenced):
        restarted.workers.check(0, 0)


def test_a_shard_returns_to_each_generation_once_and_again_after_its_restart(
    job: Job, tmp_path: Path
) -> None:
    job.shards[0].history.generation = 1
    job.follows.tell()
    job.follows.tell()
    assert job.other.rollbacks == [1]
    job.shards[0].history.generation = 2
    job.other.error = Unreachable("it is still writing a snapshot")
    with pytest.raises(Unreachable):
        job.follows.tell()
    job.other.error = None
    job.follows.tell()
    assert job.other.rollbacks == [1, 2, 2]
    job.other.handlers = Other(ShardStore(1, 2, 1, follows=False), tmp_path).handlers
    job.follows.tell()
    assert job.other.rollbacks == [1, 2, 2, 2]


def test_restart_of_a_shard_is_noticed_once_it_is_ready(job: Job, tmp_path: Path) -> None:
    restarts: list[int] = []
    follows = OtherShard(job.shards[0], 1, job.other, lambda: restarts.append(1))
    follows.tell()
    follows.tell()
    restarted = ShardStore(1, 2, 1, follows=False)
    job.other.handlers = Other(restarted, tmp_path).handlers
    follows.tell()
    assert restarts == []
    restarted.workers.connect(0, 0)
    restarted.hello(0, 0, MODEL)
    restarted.offer(0, 0, aligned(restarted.size))
    for _ in range(2):
        follows.tell()
    assert restarts == [1]


def test_a_replaced_server_0_that_keeps_running_fences_nobody(job: Job) -> None:
    """It reaches no worker, so all are silent; they train with its successor and this shard."""
    OtherShard(ShardStore(0, 2, 1, follows=False), 1, job.other).tell()
    job.silence()
    with pytest.raises(Fenced, match="parameter server 0 has an incarnation 1"):
        job.follows.tell()
    assert job.refused_by() == [0]


def test_why_a_shard_has_not_returned_yet_is_logged_once(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.shards[0].history.generation = 1
    job.other.error = Unreachable("it is still writing a snapshot")
    for _ in range(2):
        with pytest.raises(Unreachable):
            job.follows.tell()
    assert [record.getMessage() for record in caplog.records] == [
        "shard 1 has not rolled back yet: it is still writing a snapshot"
    ]


def test_a_shard_that_never_answered_is_not_reported(job: Job) -> None:
    follows = OtherShard(job.shards[0], 1, job.other)
    job.other.down = True
    with pytest.raises(Unreachable):
        follows.tell()
    assert follows.report is None


def test_a_shard_that_stops_answering_keeps_its_counters_and_is_not_ready(job: Job) -> None:
    update = {"updates": 3, "snapshot_idle_seconds": 40.0}
    assert job.follows.report is not None
    known = job.follows.report = job.follows.report.model_copy(update=update)
    job.other.down = True
    with pytest.raises(Unreachable):
        job.follows.tell()
    assert job.follows.report == known.model_copy(update={"ready": False, "snapshot_idle_seconds": 0.0})
    job.other.down = False
    job.follows.tell()
    assert job.follows.report == job.other.report()


def test_over_the_control_port_in_a_thread(job: Job, tmp_path: Path) -> None:
    credentials = create_secret_dir(tmp_path / "secret")
    told = threading.Event()

    def fence(request: FenceWorkers) -> None:
        job.other.handlers["fence"](request)
        told.set()

    server = ControlServer(credentials, {"fence": fence}, host="127.0.0.1")
    server.start()
    control = ShardControl(Shard(host="127.0.0.1", control_port=server.port), credentials)
    try:
        follows = OtherShard(job.shards[0], 1, control)
        job.silence()
        follows.start()
        assert told.wait(30)
        follows.stop()
    finally:
        control.close()
        server.close()
    assert job.refused_by() == [0, 1]
