"""Snapshots during training: a full or unreachable storage stops no training and is logged once."""

import errno
import logging
import threading
from concurrent.futures import Future

import pytest

from shoal_trainer.contract import JobIdentity, ShardReport, SnapshotPolicy
from shoal_trainer.coordinator import snapshotter as snapshotter_module
from shoal_trainer.coordinator.follower import Follower
from shoal_trainer.coordinator.protocol import SnapshotShard
from shoal_trainer.coordinator.snapshotter import Snapshotter
from shoal_trainer.coordinator.task_queue import Tasks
from shoal_trainer.errors import Fenced, SnapshotError, Unreachable
from shoal_trainer.ps import journal
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.snapshot.claims import Claim
from shoal_trainer.snapshot.manifest import Manifest
from shoal_trainer.snapshot.pruning import REFUSALS
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig, PushMeta
from tests.unit.trainer.ps.shards import push_to
from tests.unit.trainer.snapshot.saving import latest

SECONDS = 120
SIZE = 8192
MODEL = ModelSpec(fingerprint="0" * 64, parameters=SIZE, optimizer=OptimizerConfig(batch_size=1))
OFTEN = SnapshotPolicy.model_construct(every_seconds=0.005, retain=2)


class Ledger:
    """The part of a coordinator, and of its record, that a snapshotter needs."""

    job = JobIdentity(namespace="n", name="j", uid="uid")

    data_unknown = False

    def __init__(self, shard):
        self.shard, self.tasks = shard, Tasks()
        self.record = self.beginning = self

    def frozen(self):
        version = self.shard.history.version
        return lambda: {"version": version}


class Reconciler:
    """A reconciler without partial pushes."""

    def manifest_part(self, parts):
        return {"parts": len(parts)}

    def published(self, parts):
        """Do nothing."""


class Free:
    """The control of a shard that writes nothing."""

    def report(self):
        return ShardReport(index=1, epoch=0)


class Disk(LocalStorage):
    """A disk whose writes raise `error` if set; `refused` counts them."""

    def __init__(self, root):
        super().__init__(root)
        self.error = None
        self.refused = 0
        self.writing = None
        self.turn = threading.Condition()

    def write(self, name, chunks):
        self._maybe_refuse(name, chunks)
        if self.writing is not None:
            self.writing()
        super().write(name, chunks)

    def _maybe_refuse(self, name, chunks):
        with self.turn:
            if self.error is None:
                return
            self.refused += 1
            self.turn.notify_all()
            error = self.error

        def broken():
            yield next(iter(chunks))
            raise error

        super().write(name, broken())

    def wait_refused(self, times):
        with self.turn:
            assert self.turn.wait_for(lambda: self.refused >= times, SECONDS)


class Bench:
    def __init__(self, folder, *, shards=1, policy=OFTEN):
        self.shard = ShardStore(0, shards, 0)
        self.shard.workers.connect(0, 0)
        self.shard.hello(0, 0, MODEL)
        self.disk = Disk(folder)
        self.store = SnapshotStore(self.disk)
        self.fenced = Future()
        self.others, self.pauses, self.now = [], [], 0.0
        self.snapshotter = Snapshotter(
            self.shard, self.others, Ledger(self.shard), Reconciler(), self.store, policy,
            fenced=self.fenced.set_result, wall=lambda: 1000.0, clock=lambda: self.now, sleep=self.sleep,
        )  # fmt: skip
        self.seq = 0

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds

    def begin(self):
        self.shard.offer(0, 0, aligned(self.shard.size))
        return self

    def push(self):
        self.seq += 1
        io = aligned(self.shard.size)
        io += 1.0
        return push_to(
            self.shard, 0, 0, self.seq, self.shard.history.version, PushMeta(samples=1), io
        ).version

    def train_until(self, condition):
        """Push until `condition` holds; each push gives the snapshotter something to save."""
        turn = threading.Event()
        for _ in range(int(SECONDS / 0.005)):
            self.push()
            if condition():
                return
            turn.wait(0.005)
        raise AssertionError("it did not happen")


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path / "run").begin()
    yield bench
    bench.snapshotter.stop()


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_snapshot_has_parameters_and_ledger_of_the_same_version(bench):
    bench.push()
    manifest = bench.snapshotter.take()
    assert manifest is not None
    assert (manifest.shards[0].version, manifest.wall_time) == (1, 1000.0)
    assert manifest.ledger == {"version": 1, "partial": {"parts": 1}}
    assert bench.snapshotter.last == manifest
    assert latest(bench.store) == manifest


def test_snapshot_without_changes_is_skipped(tmp_path):
    bench = Bench(tmp_path / "run")
    assert bench.snapshotter.take() is None  # no parameters yet
    bench.begin().push()
    assert bench.snapshotter.take() is not None
    assert bench.snapshotter.take() is None
    bench.push()
    assert bench.snapshotter.take() is not None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_full_disk_is_logged_once_and_snapshots_resume(bench, caplog, code):
    bench.push()
    good = bench.snapshotter.take()
    bench.disk.error = OSError(code, "the disk cannot", "a name that differs each time")
    bench.snapshotter.start()
    bench.train_until(lambda: bench.disk.refused >= 3)
    assert bench.shard.history.version == bench.seq  # every push was applied
    assert latest(bench.store) == good
    failures = [
        message for message in warnings(caplog) if "no snapshot could be taken, training goes on" in message
    ]
    assert len(failures) == 1
    assert "the disk cannot" in failures[0]
    with bench.snapshotter.taking:  # between two attempts
        assert not list(bench.disk.root.rglob("*.part"))

    bench.disk.error = None
    bench.train_until(lambda: any("snapshots can be taken again" in message for message in warnings(caplog)))
    bench.snapshotter.stop()
    newest = latest(bench.store)
    assert newest is not None
    assert newest.number > good.number
    assert newest.shards[0].version > good.shards[0].version
    assert sum("snapshots can be taken again" in message for message in warnings(caplog)) == 1


def test_write_refused_by_the_kernel_leaves_no_file(bench):
    """The kernel refuses a file above the limit in the middle of a write, as on a full disk."""
    import resource
    import signal

    bench.push()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, hard))
        with pytest.raises(Unreachable, match="File too large"):
            bench.snapshotter.take()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert latest(bench.store) is None
    assert not list(bench.disk.root.rglob("*.part"))
    assert bench.push() == 2
    assert bench.snapshotter.take() is not None


def test_unreachable_shard_does_not_stop_training(tmp_path, caplog):
    bench = Bench(tmp_path / "run", shards=2)

    class Away(Free):
        asked = 0

        def snapshot(self, number, epoch, published, generation):
            self.asked += 1
            raise Unreachable("shard 1 does not answer")

    bench.others.append(Away())
    bench.begin().push()
    bench.snapshotter.start()
    bench.train_until(lambda: bench.others[0].asked > 5)  # a second attempt
    bench.snapshotter.stop()
    assert latest(bench.store) is None  # an incomplete snapshot is not published
    because = [message for message in warnings(caplog) if "shard 1 does not answer" in message]
    assert [message.split(",")[0] for message in because] == [
        "a snapshot waits",
        "no snapshot could be taken",
    ]


class Second(Free):
    """A shard that writes its part, but for the first `fails` attempts."""

    def __init__(self, bench, fails=0):
        self.bench, self.fails, self.asked = bench, fails, 0
        self.shard = ShardStore(1, 2, 0)
        self.shard.workers.connect(0, 0)
        self.shard.hello(0, 0, MODEL)
        self.shard.offer(0, 0, aligned(self.shard.size))

    def snapshot(self, number, epoch, published, generation):
        self.asked += 1
        if self.asked <= self.fails:
            raise Unreachable("503 Service Unavailable")
        return SnapshotStore(self.bench.disk).write_shard(number, epoch, self.shard.copy())


def parts_written(bench):
    return len(list(bench.disk.root.rglob("*shard-*")))


@pytest.mark.parametrize("name", ["names", "size", "create"])
def test_parts_that_are_written_stand_while_the_storage_refuses_the_manifest(
    tmp_path, caplog, monkeypatch, name
):
    """They are of gigabytes, and a 503 had all of them written anew."""
    bench = Bench(tmp_path / "run", shards=2)
    bench.others.append(second := Second(bench))
    bench.begin().push()
    call, refused, told = getattr(bench.disk, name), [], []

    def busy(*arguments):
        if parts_written(bench) == 2 and len(refused) < 2:
            refused.append(arguments)
            raise Unreachable("503 Service Unavailable")
        return call(*arguments)

    def sleep(seconds):
        told.append((seconds, bench.snapshotter.trouble()[1]))

    monkeypatch.setattr(bench.disk, name, busy)
    bench.snapshotter._sleep = sleep
    assert bench.snapshotter._try()
    assert (second.asked, parts_written(bench), len(refused)) == (1, 2, 2)
    assert latest(bench.store).shards[0].version == 1
    assert told == [(1.0, "503 Service Unavailable"), (2.0, "503 Service Unavailable")]
    assert sum("what else is written of it stands: 503" in message for message in warnings(caplog)) == 1
    assert bench.snapshotter.trouble() == (0.0, "")


def test_only_the_part_of_which_the_storage_refuses_something_is_written_anew(tmp_path):
    bench = Bench(tmp_path / "run", shards=2)
    bench.others.append(second := Second(bench, fails=2))
    bench.begin().push()
    written, write = [], bench.store.write_shard
    bench.store.write_shard = lambda *about: written.append(about) or write(*about)
    assert bench.snapshotter.take().shards[0].version == 1
    assert (len(written), second.asked, bench.pauses) == (1, 3, [1.0, 2.0])


def test_a_storage_that_goes_on_refusing_holds_up_a_snapshot_for_seconds_only(tmp_path, caplog):
    bench = Bench(tmp_path / "run", shards=2)
    bench.others.append(Second(bench, fails=99))
    bench.begin().push()
    assert not bench.snapshotter._try()
    assert bench.pauses == [1.0, 2.0, 4.0, 8.0]
    assert not bench.snapshotter._try()
    assert sum("503" in message for message in warnings(caplog)) == 2


def test_a_part_that_is_refused_after_it_was_written_for_long_goes_into_no_snapshot(tmp_path):
    """It would be of another time than the others: what was pushed meanwhile would be in one shard only."""
    bench = Bench(tmp_path / "run", shards=2)

    class Slow(Second):
        def snapshot(self, *about):
            bench.now += snapshotter_module.STANDING_SECONDS
            return super().snapshot(*about)

    bench.others.append(second := Slow(bench, fails=1))
    bench.begin().push()
    with pytest.raises(Unreachable, match="503"):
        bench.snapshotter.take()
    assert (second.asked, bench.pauses) == (1, [])


def test_a_server_that_stops_waits_for_no_storage(tmp_path):
    """Its final snapshot, which has little time, waits for the one under way."""
    bench = Bench(tmp_path / "run", shards=2)
    bench.others.append(second := Second(bench, fails=99))
    bench.begin().push()
    bench.snapshotter._sleep = lambda _: bench.snapshotter.stop()
    with pytest.raises(Unreachable, match="503"):
        bench.snapshotter.take()
    assert second.asked == 1


def test_why_there_is_no_snapshot_is_what_the_attempt_failed_with(tmp_path):
    """A refusal that was over was told in its place."""
    bench = Bench(tmp_path / "run", shards=2)
    bench.others.append(Second(bench, fails=1))
    bench.begin().push()

    def replaced(_parts):
        raise SnapshotError("shard 1 was replaced")

    bench.store.check = replaced
    assert not bench.snapshotter._try()
    assert bench.snapshotter.trouble() == (1.0, "shard 1 was replaced")


def test_snapshot_with_a_part_of_a_replaced_shard_is_not_published(tmp_path):
    """The old server is reached over an open connection; its successor started without this part."""
    bench = Bench(tmp_path / "run", shards=2)
    older = ShardStore(1, 2, 0)
    older.workers.connect(0, 0)
    older.hello(0, 0, MODEL)
    older.offer(0, 0, aligned(older.size))

    class Replaced(Free):
        def snapshot(self, number, epoch, published, generation):
            part = bench.store.write_shard(number, epoch, older.copy())
            Claim(bench.disk, 1, 1).make()
            return part

    bench.others.append(Replaced())
    bench.begin().push()
    with pytest.raises(SnapshotError, match="shard 1 was replaced"):
        bench.snapshotter.take()
    assert latest(bench.store) is None


def test_servers_without_a_common_storage_publish_nothing_that_nobody_could_load(tmp_path):
    """`storage.ephemeral`: a folder for each pod. The workers' copies are all there is, so journals begin at 0."""
    bench = Bench(tmp_path / "ps-0", shards=2)
    other = ShardStore(1, 2, 0)
    other.workers.connect(0, 0)
    other.hello(0, 0, MODEL)
    other.offer(0, 0, aligned(other.size))
    own = LocalStorage(tmp_path / "ps-1")
    follower = Follower(other, SnapshotStore(own)).handlers()["snapshot"]

    class Other(Free):
        def snapshot(self, number, epoch, published, generation):
            request = {"number": number, "epoch": epoch, "published": published, "generation": generation}
            return follower(SnapshotShard.model_validate(request))

    bench.others.append(Other())
    bench.begin()
    for _ in range(3):
        bench.push()
        with pytest.raises(
            SnapshotError, match=r"shard 1 .* not in the storage of shard 0.*storage\.ephemeral"
        ):
            bench.snapshotter.take()
    assert latest(bench.store) is None
    assert bench.snapshotter.last is None
    assert (bench.shard.history.journal.snapshot, other.history.journal.snapshot) == (0, 0)
    assert len(list(own.root.rglob("*shard-*"))) == 1, "what is in vain must not fill the disk"


def test_push_is_applied_while_a_snapshot_is_written(bench):
    bench.push()
    begun, go = threading.Event(), threading.Event()

    def slow(name, chunks):
        begun.set()
        assert go.wait(SECONDS)

    bench.disk._maybe_refuse = slow
    taken = []
    taking = threading.Thread(target=lambda: taken.append(bench.snapshotter.take()))
    taking.start()
    assert begun.wait(SECONDS)
    assert bench.push() == 2  # while the file is being written
    go.set()
    taking.join(SECONDS)
    assert taken[0].shards[0].version == 1


def test_newer_epoch_in_the_storage_fences_the_server(bench):
    bench.push()
    bench.store.publish(
        Manifest(number=1, epoch=1, run="uid", shards=bench.snapshotter.take().shards, model=MODEL)
    )
    bench.snapshotter.start()
    bench.train_until(bench.fenced.done)
    assert isinstance(bench.fenced.result(), Fenced)
    assert latest(bench.store).epoch == 1


def test_snapshots_beyond_retain_are_removed(bench):
    for _ in range(5):
        bench.push()
        bench.snapshotter.take()
    assert [manifest.number for manifest in bench.store.manifests()] == [5, 4]


def test_scheduled_snapshot_is_taken_at_once_and_again_until_it_succeeds(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshotter_module, "RETRY_SECONDS", 0.01)
    bench = Bench(tmp_path / "run", policy=SnapshotPolicy(every_seconds=3600, retain=2)).begin()
    bench.snapshotter.start()
    bench.push()
    bench.disk.error = OSError(errno.EIO, "the disk cannot")
    bench.snapshotter.schedule()
    bench.disk.wait_refused(2)
    assert not bench.snapshotter.settled(0)
    assert latest(bench.store) is None
    bench.disk.error = None
    assert bench.snapshotter.settled(20)
    assert latest(bench.store).shards[0].version == 1
    bench.snapshotter.stop()


def test_pauses_between_attempts_at_a_scheduled_snapshot_double(bench, monkeypatch):
    """Up to the usual interval, which follows a success."""
    bench.snapshotter._policy = SnapshotPolicy(every_seconds=30, retain=2)
    bench.push()
    bench.disk.error = OSError(errno.EIO, "the disk cannot")
    bench.snapshotter.schedule()
    assert [bench.snapshotter._take_again() for _ in range(5)] == [5, 10, 20, 30, 30]
    bench.disk.error = None
    assert [bench.snapshotter._take_again() for _ in range(2)] == [30, 30]
    assert bench.snapshotter.settled(0)


def test_a_snapshot_asked_for_while_another_is_written_is_not_forgotten(bench):
    """The one in progress may lack what it was asked for, and the next may fail."""
    bench.push()
    bench.snapshotter.schedule()
    bench.disk.writing = bench.snapshotter.schedule
    bench.snapshotter._take_again()
    bench.disk.writing = None
    assert not bench.snapshotter.settled(0)
    bench.push()
    bench.disk.error = OSError(errno.EIO, "the disk cannot")
    assert bench.snapshotter._take_again() == min(
        bench.snapshotter._policy.every_seconds, snapshotter_module.RETRY_SECONDS
    )
    assert not bench.snapshotter.settled(0)
    bench.disk.error = None
    bench.snapshotter._take_again()
    assert bench.snapshotter.settled(0)


def test_how_long_snapshots_fail_and_why_is_told(bench):
    now = [0.0]
    bench.snapshotter._clock = lambda: now[0]
    bench.push()
    assert bench.snapshotter.trouble() == (0.0, "")
    bench.disk.error = OSError(errno.ENOSPC, "No space left on device")
    bench.snapshotter._try()
    now[0] = 500.0
    seconds, because = bench.snapshotter.trouble()
    assert seconds == 500.0
    assert "No space left on device" in because
    bench.disk.error, seen = None, []
    bench.disk.writing = lambda: seen.append(bench.snapshotter.trouble()[0])  # it might hang
    bench.snapshotter._try()
    assert seen == [500.0]
    assert bench.snapshotter.trouble() == (0.0, "")


def test_snapshot_of_the_end_replaces_one_of_the_same_version(tmp_path):
    """The earlier one has leases, but neither the reason to stop nor the final tasks."""
    bench = Bench(tmp_path / "run").begin()
    bench.push()
    assert bench.snapshotter.take() is not None
    bench.snapshotter._coordinator.record.tasks.export(0)
    assert bench.snapshotter.take() is not None
    assert bench.snapshotter.take() is None


def test_parameters_that_are_not_finite_are_not_published(bench, caplog):
    """A job could neither be rolled back to such a snapshot nor continue from it."""
    bench.push()
    good = bench.snapshotter.take()
    bench.push()
    bench.shard.model.parameters[5] = float("nan")
    assert not bench.snapshotter._try()
    assert warnings(caplog) == [
        "no snapshot could be taken, training goes on: parameters of shard 0 have values that are not finite"
    ]
    assert latest(bench.store) == good
    with pytest.raises(Unreachable, match="not finite"):
        Follower(bench.shard, bench.store).handlers()["snapshot"](
            SnapshotShard(number=2, epoch=0, published=1)
        )


def test_what_a_dead_server_has_written_is_removed_before_the_next_snapshot_is_written(bench):
    """A volume that has room for one more snapshot would not have it for two."""
    bench.push()
    bench.snapshotter.take()
    bench.push()
    bench.store.write_shard(2, 0, bench.shard.copy())
    successor = Bench(bench.disk.root).begin()
    successor.push()
    successor.shard.epoch = 1
    Claim(successor.disk, 0, 1).make()
    found = []
    successor.disk.writing = lambda: found.extend(
        name[:12] for name in bench.disk.names("snapshots") if name[0] == "0"
    )
    assert successor.snapshotter.take() is not None
    assert found == ["0000000001-0"]


def test_what_a_failed_attempt_has_written_is_removed_before_the_next_one(tmp_path):
    """Not under a shard that still writes its part: PS 0 would write its own in vain as well."""
    bench, idle, parts = Bench(tmp_path / "run", shards=2), [0.0], []

    class Slow:
        def report(self):
            return ShardReport(index=1, epoch=0, snapshot_idle_seconds=idle[0])

        def snapshot(self, number, epoch, published, generation):
            idle[0] = 1.0
            raise Unreachable("the connection broke off")

    bench.others.append(Slow())
    bench.begin().push()
    with pytest.raises(Unreachable, match="broke off"):
        bench.snapshotter.take()
    parts = list(bench.disk.root.rglob("*shard-*"))
    assert len(parts) == 1
    with pytest.raises(Unreachable, match="shard 1 is still writing its part of an earlier snapshot"):
        bench.snapshotter.take()
    assert list(bench.disk.root.rglob("*shard-*")) == parts
    idle[0] = 0.0
    with pytest.raises(Unreachable, match="broke off"):
        bench.snapshotter.take()
    assert len(left := list(bench.disk.root.rglob("*shard-*"))) == 1
    assert left != parts


def test_calls_that_remove_do_not_grow_where_nothing_may_be_removed(tmp_path, caplog):
    """And none comes before a snapshot, whose time may be short: the one of the end has a minute."""
    bench, calls, before = Bench(tmp_path / "run").begin(), [], []

    def refuse(name):
        calls.append(name)
        raise Unreachable(f"cannot remove s3://b/run/{name}: AccessDenied on arn:aws:s3:::b/run/{name}")

    bench.disk.remove = refuse
    bench.disk.writing = lambda: before.append(len(calls))
    for _ in range(12):
        calls.clear()
        bench.push()
        bench.snapshotter.take()
        assert len(calls) <= REFUSALS
    assert before == [0] * 12
    reason = "cannot remove s3://b/run/snapshots: AccessDenied on arn:aws:s3:::b/run/snapshots"
    assert warnings(caplog) == [
        f"old snapshots cannot be removed, and take up space in the storage: {reason}"
    ]
    assert bench.snapshotter.not_removed == reason
    del bench.disk.remove  # it may be removed now
    bench.push()
    bench.snapshotter.take()
    assert [manifest.number for manifest in bench.store.manifests()] == [13, 12]
    assert bench.snapshotter.not_removed == ""


def test_snapshot_from_which_a_process_began_stays_until_it_has_published_one(tmp_path):
    """The newer one is damaged: nothing else could be loaded."""
    policy = SnapshotPolicy(every_seconds=60, retain=1)
    bench = Bench(tmp_path / "run", policy=policy).begin()
    bench.push()
    good = bench.snapshotter.take()
    bench.snapshotter._prune = lambda: None  # it is killed before
    bench.push()
    (bench.disk.root / "snapshots" / bench.snapshotter.take().shards[0].file).write_bytes(b"damaged")
    successor = Bench(tmp_path / "run", policy=policy).begin()
    assert successor.store.load_newest(0, 1)[0] == good
    successor.push()
    successor.disk.error = OSError(errno.ENOSPC, "No space left on device")
    assert not successor.snapshotter._try()
    assert latest(SnapshotStore(bench.disk)) == good
    successor.disk.error = None
    assert successor.snapshotter._try()
    assert [manifest.number for manifest in successor.store.manifests()] == [3]


def test_storage_that_keeps_old_snapshots_gets_new_ones(bench, caplog, monkeypatch):
    def refuse(name):
        if (bench.disk.root / name).exists():
            raise Unreachable("cannot remove it: AccessDenied")

    monkeypatch.setattr(bench.disk, "remove", refuse)
    for version in (1, 2, 3, 4):
        bench.push()
        assert bench.snapshotter._try()
        assert bench.snapshotter.last.shards[0].version == version
    assert warnings(caplog) == [
        "old snapshots cannot be removed, and take up space in the storage: cannot remove it: AccessDenied"
    ]


def test_journal_that_fills_brings_the_next_snapshot_forward(tmp_path, monkeypatch):
    """Beyond its end, the loss of a server would cost all that was trained since the last snapshot."""
    monkeypatch.setattr(journal, "NEARLY_FULL", 5)
    bench = Bench(tmp_path, policy=SnapshotPolicy.model_construct(every_seconds=1e6, retain=2)).begin()
    bench.snapshotter.start()
    for _ in range(5):
        bench.push()
    assert bench.snapshotter.settled(SECONDS)
    assert bench.snapshotter.last.shards[0].version == 5
    bench.snapshotter.stop()
