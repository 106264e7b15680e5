"""A storage that takes no files holds up neither the callbacks nor training: the files follow, and the export waits."""

import contextlib
import errno
import itertools
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal_trainer.contract import JobIdentity, Role, RuntimeConfig, Shard, StopAfter
from shoal_trainer.coordinator import artefacts, report
from shoal_trainer.coordinator.callback_files import CallbackFiles
from shoal_trainer.coordinator.protocol import LATE, DataSpec, Leave, TaskDone, UnsentFiles
from shoal_trainer.coordinator.task_queue import Tasks
from shoal_trainer.errors import BadName, Overtaken, ProtocolError, Unauthorized, Unreachable, UserError
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.serve import ParameterServer
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.wire.messages import Held, Progress, PushMeta
from shoal_trainer.worker.coordination import ControlPlane
from shoal_trainer.worker.late_files import LateFiles
from shoal_trainer.worker.work import About, TaskWork, Wasted
from tests.unit.trainer.coordinator.bench import next_work
from tests.unit.trainer.ps.shards import push_to
from tests.unit.trainer.test_serve import MODEL, config
from tests.unit.trainer.worker.models import job

EPOCHS = 4
FULL = "cannot write it: No space left on device"


class Line:
    """What a worker sends reaches the parameter server of the moment, without a network."""

    def __init__(self, cluster, slot):
        self.cluster, self.slot, self.identity = cluster, slot, {"slot": slot, "incarnation": 0}
        self.old, self.words, self.said = False, itertools.count(1), []

    def upload(self, token, name, path):
        self.cluster.service.upload(self.slot, 0, token, name, iter([path.read_bytes()]))

    def join(self, request):
        data = {"data": self.cluster.data, "batch_size": 2, "number": next(self.words)}
        return self.cluster.service.coordinator.join(request.model_copy(update=data))

    def send(self, request):
        if self.old and isinstance(request, UnsentFiles):
            raise ProtocolError("unknown path /v1/unsent-files")
        if isinstance(request, UnsentFiles):
            request = request.model_copy(update={"number": next(self.words)})
            self.said.append(request)
        name = {UnsentFiles: "unsent-files", TaskDone: "task-done", Leave: "leave"}[type(request)]
        self.cluster.service.handlers()[name](request)

    def close(self):
        pass


class Cluster:
    """Parameter server 0 of a job with callbacks, and two workers. The volume is `full`, or so for `refused` names."""

    def __init__(self, tmp_path, monkeypatch, *, validation=False):
        self.tmp_path, self.full, self.seq = tmp_path, False, {}
        self.server, self.validation, self.refused = None, validation, ()
        self.data = DataSpec(size=8, callbacks=True, validation=validation)
        write = LocalStorage.write

        def attempt(storage, name, chunks, *confirm):
            if self.full or name.endswith(self.refused):
                raise Unreachable(FULL)
            write(storage, name, chunks, *confirm)

        monkeypatch.setattr(LocalStorage, "write", attempt)
        self.folder = tmp_path / "callbacks"
        self.folder.mkdir()
        self.planes = []
        self.start()

    @property
    def service(self):
        return self.server.service

    @property
    def tasks(self):
        return self.service.coordinator.record.tasks

    def start(self):
        """Start the parameter server, with the state of the one before it."""
        before = self.server
        chosen = config(self.tmp_path)
        self.server = ParameterServer(chosen.model_copy(update={"stop_after": StopAfter(epochs=EPOCHS)}))
        shard = self.server.shard
        if before is not None:
            shard.restore(before.shard.copy())
            self.service.coordinator.load(before.service.coordinator.record.dump())
            with shard.lock:
                shard._become_ready()  # the snapshot is as new as any copy
        self.planes = self.planes or [self.plane(slot) for slot in (0, 1)]
        for slot, plane in enumerate(self.planes):
            shard.workers.connect(slot, 0)
            if shard.hello(slot, 0, MODEL, Held()).wants_copy:
                shard.offer(slot, 0, aligned(shard.size))
            plane.join({}, Wasted())

    def plane(self, slot):
        settings = RuntimeConfig(
            job=JobIdentity(namespace="n", name="j", uid="u"), role=Role.WORKER, index=slot, incarnation=0,
            parameter_servers=(Shard(host="127.0.0.1", data_port=1),), entrypoint="a:b", batch_size=2,
            storage_uri="file:///nowhere",
        )  # fmt: skip
        plane = ControlPlane(settings, self.server._credentials, job())
        plane._client.close()
        plane._client = Line(self, slot)
        plane._late.stopped.set()  # no thread is started, and no attempt waits
        return plane

    def next(self, slot):
        return next_work(self.service.coordinator, slot, 0)

    def train(self, slot):
        """Train all that there is; returns the work that is no data."""
        shard = self.server.shard
        while (work := self.next(slot)).kind == "data":
            for at in range(work.lease.start, work.lease.stop, 2):
                self.seq[slot] = self.seq.get(slot, 0) + 1
                meta = PushMeta(samples=2, progress=(Progress(work.lease.epoch, -1, at, at + 2),))
                version = shard.history.version
                push_to(shard, slot, 0, self.seq[slot], version, meta, aligned(shard.size), delta=True)
        return work

    def call(self, work, *, slot=0, stop=False, **files):
        """Run the callbacks: they write these files, with `.` for `__`."""
        for name, text in files.items():
            (self.folder / name.replace("__", ".")).write_text(text)
        task = TaskWork(work.token, work.task, work.epoch, work.history, work.learning_rate)
        written = {f"logs/{path.name}": path for path in sorted(self.folder.iterdir())}
        self.planes[slot].task_done(task, {}, written, stop=stop, message="")

    def send(self, slot=0):
        self.planes[slot]._late._send()

    def stored(self):
        storage = self.server._storage
        return {name: storage.read(f"logs/{name}").decode() for name in storage.names("logs")}

    def work(self, slot):
        """What this worker gets once both have trained all."""
        while (work := self.train(slot)).kind == "idle":
            self.train(1 - slot)
        return work

    def epoch(self, **files):
        """One epoch of both workers, whose callbacks write these files on worker 0."""
        work = self.work(0)
        if self.validation:
            assert (work.kind, work.task) == ("task", "evaluate")
            evaluation = TaskWork(work.token, "evaluate", work.epoch)
            self.planes[0].task_done(evaluation, {"val_loss": 1.0}, {}, stop=False, message="")
            work = self.train(0)
        assert (work.kind, work.task) == ("task", "callbacks")
        self.call(work, **files)


@pytest.fixture
def cluster(tmp_path, monkeypatch, request):
    cluster = Cluster(tmp_path, monkeypatch, validation=getattr(request, "param", False))
    yield cluster
    for plane in cluster.planes:
        plane.close()


@pytest.mark.parametrize("cluster", [False, True], indirect=True, ids=["without", "with validation"])
def test_training_goes_on_while_the_storage_takes_no_file(cluster):
    cluster.full = True
    for epoch in range(EPOCHS - 1):
        cluster.epoch(log__csv="row\n" * (epoch + 1))
    assert cluster.tasks.holder is None
    assert cluster.service.coordinator.record.ledger.completed == EPOCHS - 1
    cluster.send()
    assert FULL in cluster.planes[0]._message_text()


def test_the_files_follow_as_they_were_written_and_the_export_waits_for_them(cluster):
    """Those of the last epoch are waited for: nothing else is left to do."""
    cluster.epoch(log__csv="1\n")
    cluster.full = True
    for epoch in range(1, EPOCHS - 1):
        cluster.epoch(log__csv="row\n" * (epoch + 1), **{f"{epoch}__keras": f"model {epoch}"})
        (cluster.folder / f"{epoch}.keras").unlink()  # as callbacks of Keras do before the next epoch
    last = cluster.train(0)
    assert last.task == "callbacks"
    with pytest.raises(Unreachable, match="No space left"):
        cluster.call(last, log__csv="row\n" * EPOCHS)
    assert cluster.stored() == {"log.csv": "1\n"}
    assert cluster.train(1).kind == "idle"
    assert cluster.tasks.holder == (0, 0)
    cluster.full = False
    cluster.send()
    assert cluster.tasks.files.sender is None
    assert cluster.stored() == {"log.csv": "row\n" * EPOCHS, "1.keras": "model 1", "2.keras": "model 2"}
    cluster.call(last)
    assert cluster.train(1).task == "export"
    assert report.succeeded(cluster.service.coordinator).message == "all epochs are complete"


@pytest.mark.parametrize("reader", ["a snapshot", "the export"])
def test_what_waits_is_read_while_no_worker_can_change_it(cluster, monkeypatch, reader):
    """Else a word of its worker is overwritten by what was read before, and the export waits for nobody's file."""
    for _ in range(EPOCHS):
        cluster.epoch(log__csv="1\n")
    snapshotter, shard, work = cluster.service.snapshotter, cluster.server.shard, cluster.work(0)
    assert work.task == "export"
    snapshotter.take()
    cluster.tasks.leave_out({"logs/long": "File name too long"})
    refused, missing = [], CallbackFiles.missing.fget

    def reads(files):
        with ThreadPoolExecutor(1) as another:
            refused.append(not another.submit(shard.lock.acquire, blocking=False).result())
        return missing(files)

    monkeypatch.setattr(CallbackFiles, "missing", property(reads))
    if reader == "a snapshot":
        assert snapshotter.take() is not None
    else:
        with cluster.service.download(0, 0, work.token, "logs/log.csv") as (size, _):
            assert size == 2
    assert refused
    assert all(refused)


def test_a_newer_copy_replaces_the_one_before(cluster, caplog):
    """Also where nothing else was uploaded in between, so that it is not taken for one that is sent again."""
    for text in ("1\n", "1\n2\n"):
        cluster.full = True
        cluster.epoch(log__csv=text)
        cluster.full = False
        cluster.send()
        assert cluster.stored() == {"log.csv": text}
    assert "sent before" not in caplog.text


def test_an_older_copy_never_replaces_a_newer_one(cluster, monkeypatch):
    """A write hung in the storage, or a request on its way: the worker has given it up, and sends what came after."""
    monkeypatch.setattr(artefacts, "AGAIN_SECONDS", 0.0)
    cluster.full, copies = True, []
    for text in ("1", "2"):
        cluster.epoch(best__keras=text)
        copies.append((LATE, int(cluster.planes[0]._late.copies["logs/best.keras"].name)))
    cluster.full, upload = False, partial(cluster.service.upload, 0, 0)

    def slow():
        yield b"1"
        with pytest.raises(Unreachable, match="still being written"):
            upload(copies[1], "logs/best.keras", iter([b"2"]))

    with pytest.raises(Overtaken, match="newer"):
        upload(copies[0], "logs/best.keras", slow())
    upload(copies[1], "logs/best.keras", iter([b"2"]))
    with pytest.raises(Overtaken, match="newer"):
        upload(copies[0], "logs/best.keras", iter([b"1"]))
    cluster.send()
    assert cluster.stored() == {"best.keras": "2"}
    assert cluster.tasks.files.sender is None


def test_callbacks_that_stop_training_wait_for_their_files(cluster):
    cluster.full = True
    work = cluster.train(0)
    with pytest.raises(Unreachable):
        cluster.call(work, stop=True, best__keras="best")
    assert cluster.tasks.holder == (0, 0)


def test_the_next_callbacks_are_of_the_worker_that_has_files(cluster, monkeypatch):
    """Another one would write newer files of these names, which the older ones would replace."""
    cluster.full = True
    cluster.epoch(log__csv="1\n")
    cluster.train(1)
    coordinator = cluster.service.coordinator
    monkeypatch.setattr(coordinator._assigning, "_clock", lambda: coordinator.clock() + 3600)
    assert cluster.train(1).kind == "idle"
    assert cluster.train(0).task == "callbacks"


def test_files_that_are_lost_with_their_worker_are_told_until_they_are_written_again(cluster, caplog):
    cluster.full = True
    cluster.epoch(log__csv="1\n", best__keras="best")
    cluster.planes[0]._client.send(Leave(slot=0, incarnation=0))
    assert "files of callbacks are lost with worker 0-0: logs/best.keras, logs/log.csv" in caplog.text
    assert (
        "logs/best.keras, logs/log.csv went with the worker"
        in report.status(cluster.service.coordinator).message
    )
    with pytest.raises(Overtaken):
        cluster.planes[0]._client.upload((LATE, 0), "logs/log.csv", cluster.folder / "log.csv")
    with pytest.raises(Overtaken):
        cluster.planes[0].announce(["logs/log.csv"], {})
    cluster.full = False
    (cluster.folder / "best.keras").unlink()
    cluster.call(cluster.train(1), slot=1, log__csv="1\n2\n")
    assert cluster.stored() == {"log.csv": "1\n2\n"}
    expected = (
        "all epochs are complete; logs/best.keras went with the worker that had written them, before the"
    )
    assert report.succeeded(cluster.service.coordinator).message.startswith(expected)
    again = Tasks()
    again.load(cluster.tasks.dump())
    assert again.files.missing == {"logs/best.keras": ""}


def test_the_best_weights_of_an_earlier_epoch_are_not_taken_for_those_that_were_lost(cluster):
    cluster.epoch(best_weights__npz="1")
    cluster.full = True
    cluster.epoch(best_weights__npz="2")
    cluster.planes[0]._client.send(Leave(slot=0, incarnation=0))
    cluster.full = False
    for _ in range(2, EPOCHS):
        (cluster.folder / "best_weights.npz").unlink(missing_ok=True)
        cluster.call(cluster.train(1), slot=1)
    work = cluster.train(1)
    assert work.task == "export"
    with cluster.service.download(1, 0, work.token, "logs/best_weights.npz") as (size, _):
        assert size == 0


def test_files_that_others_follow_are_dropped_and_written_anew_by_the_next_callbacks(cluster):
    cluster.full = True
    cluster.epoch(log__csv="1\n")
    cluster.tasks.release((0, 0))  # a new process knows of neither files nor who ran callbacks
    cluster.full = False
    cluster.call(cluster.train(1), slot=1, log__csv="1\n2\n")
    cluster.send()
    assert cluster.stored() == {"log.csv": "1\n2\n"}
    assert cluster.planes[0]._late.trouble is None
    cluster.tasks.release((1, 0))
    cluster.call(cluster.train(0))
    assert cluster.stored() == {"log.csv": "1\n2\n"}


def test_a_disk_with_little_room_makes_the_callbacks_wait(cluster, monkeypatch):
    cluster.full = True
    work = cluster.train(0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=7))
    with pytest.raises(Unreachable, match="No space left on device"):
        cluster.call(work, log__csv="1234")
    assert cluster.tasks.holder == (0, 0)
    cluster.send()
    assert cluster.tasks.files.sender is None, "the export would wait for nothing"
    cluster.call(work, log__csv="123")
    assert cluster.tasks.files.sender == (0, 0)


def test_files_that_wait_for_room_are_not_told_as_lost(cluster, monkeypatch):
    """What is told is of the copies that there are: the file of the epoch before waits still."""
    cluster.full = True
    cluster.epoch(a="1")
    work = cluster.work(0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=7))
    with pytest.raises(Unreachable):
        cluster.call(work, a="1", b="x" * 100)
    cluster.send()
    assert cluster.tasks.files.lacking == ""
    assert cluster.planes[0]._client.said[-1].written == {"logs/a": 0}


def test_a_copy_that_was_replaced_while_it_was_sent_is_of_its_own_epoch(cluster, monkeypatch):
    """Given up later, it would else be taken for stored."""
    cluster.full = True
    cluster.epoch(a="1")
    work, line = cluster.work(0), cluster.planes[0]._client
    upload = line.upload

    def slow(*call):
        with monkeypatch.context() as refused:
            refused.setattr(line, "upload", upload)
            cluster.call(work, a="12")
        cluster.full = False
        upload(*call)
        cluster.full = True

    monkeypatch.setattr(line, "upload", slow)
    cluster.planes[0]._late._send_one("logs/a", cluster.planes[0]._late.copies["logs/a"])
    assert cluster.planes[0]._late.written == {"logs/a": 1}


def test_copies_take_at_most_half_of_what_would_be_free_without_them(cluster, monkeypatch):
    late, file = cluster.planes[0]._late, cluster.folder / "x"
    file.write_text("x")

    def taken():
        return 0 if late._folder is None else sum(copy.stat().st_size for copy in late._folder.iterdir())

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=20 - taken()))
    cluster.epoch()
    late.add({f"logs/{number}": file for number in range(6)}, 0, Unreachable(FULL))
    with pytest.raises(Unreachable, match="No space left"):
        late.add({f"logs/{number}": file for number in range(6, 12)}, 0, Unreachable(FULL))
    late.add({f"logs/{number}": file for number in range(6, 10)}, 0, Unreachable(FULL))
    assert taken() == 10


def test_a_copy_that_was_deleted_is_left_out_and_told_until_it_is_written_again(cluster, monkeypatch):
    cluster.full = True
    cluster.epoch(log__csv="1", best__keras="best")
    late, line, attempts = cluster.planes[0]._late, cluster.planes[0]._client, []
    upload = line.upload

    def counted(*call):
        attempts.append(call)
        assert len(attempts) < 9, "it is sent again and again without a pause"
        upload(*call)

    monkeypatch.setattr(line, "upload", counted)
    late.copies["logs/log.csv"].unlink()
    cluster.full = False
    cluster.send()
    assert cluster.stored() == {"best.keras": "best"}
    assert cluster.tasks.files.sender is None
    assert (
        "logs/log.csv is left out: its copy on the disk of the worker is lost: No such file"
        in cluster.tasks.files.lacking
    )
    cluster.epoch()
    assert cluster.stored() == {"log.csv": "1", "best.keras": "best"}
    assert cluster.tasks.files.lacking == ""


def test_an_older_parameter_server_makes_the_callbacks_wait(cluster):
    cluster.full, cluster.planes[0]._client.old = True, True
    with pytest.raises(Unreachable, match="No space left"):
        cluster.call(cluster.train(0), log__csv="1")
    assert cluster.planes[0]._late.trouble is None


def test_copies_are_deleted(cluster, caplog):
    cluster.full = True
    cluster.epoch(log__csv="1\n", a__csv="2")
    late = cluster.planes[0]._late
    assert len(list(late._folder.iterdir())) == 2
    cluster.full = False
    cluster.send()
    assert list(late._folder.iterdir()) == []
    cluster.full = True
    cluster.epoch(log__csv="1\n2\n")
    late.close()
    assert not late._folder.exists()
    assert "files of callbacks are lost with this worker: logs/log.csv" in caplog.text


def test_a_file_that_the_storage_can_never_have_is_left_out_and_told(cluster, caplog):
    """The disk of a worker takes longer names than some storages do."""
    write = LocalStorage.write

    def refuse(storage, name, chunks, *confirm):
        if "long" in name:
            raise BadName(f"cannot write {name}: File name too long. Choose a shorter name.")
        write(storage, name, chunks, *confirm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "write", refuse)
        cluster.epoch(long__csv="1", short__csv="1")
        cluster.epoch(long__csv="12", short__csv="12")
        words = "logs/long.csv is left out: cannot write logs/long.csv: File name too long"
        assert words in report.status(cluster.service.coordinator).message
        assert words in report.succeeded(cluster.service.coordinator).message
        assert [each.message.startswith(words) for each in caplog.records].count(True) == 1
        cluster.full = True
        cluster.epoch(long2__csv="1")
        cluster.full = False
        cluster.send()
    assert cluster.tasks.files.sender is None
    assert list(cluster.tasks.files.left_out) == ["logs/long.csv", "logs/long2.csv"]
    assert cluster.stored() == {"short.csv": "12"}
    cluster.call(cluster.train(0), long__csv="123")
    assert list(cluster.tasks.files.left_out) == ["logs/long2.csv"]


def test_a_name_that_the_protocol_refuses_is_left_out_and_a_wrong_token_is_not(cluster):
    work, line = cluster.train(0), cluster.planes[0]._client
    line.upload = lambda *_: (_ for _ in ()).throw(Unauthorized("no valid token for this job"))
    with pytest.raises(Unauthorized):
        cluster.call(work, a="1")
    line.upload = lambda *_: (_ for _ in ()).throw(ProtocolError("'a\\\\b' is not a relative file name"))
    cluster.call(work, a="1")
    assert "is not a relative file name" in cluster.tasks.files.lacking


def test_a_file_of_the_model_is_never_left_out(cluster):
    line = cluster.planes[0]._client
    line.upload = lambda *_: (_ for _ in ()).throw(BadName("cannot write model/x: File name too long"))
    (cluster.folder / "x").write_text("model")
    with pytest.raises(UserError, match="model/x: File name too long"):
        cluster.planes[0].task_done(
            TaskWork((1, 1), "export"), {}, {"x": cluster.folder / "x"}, stop=False, message=""
        )


def test_the_message_of_files_comes_last(cluster):
    plane = cluster.planes[0]
    plane.set_message("files wait", About.FILES)
    plane.set_message("a step takes long", About.STEP)
    assert plane._message_text() == "a step takes long"


def exported(cluster, slot):
    """What the export gets as the best weights, after all callbacks that are left, which write nothing."""
    for path in cluster.folder.iterdir():
        path.unlink()
    while (work := cluster.work(slot)).task != "export":
        cluster.call(work, slot=slot)
    with cluster.service.download(slot, 0, work.token, "logs/best_weights.npz") as (_, content):
        return content.read()


LOST = "logs/best_weights.npz went with the worker that had written them"


def test_files_that_wait_when_all_pods_end_are_told_by_the_job_that_resumes(cluster):
    """The copies end with their worker, and the snapshot is what is left. The storage has older best weights."""
    cluster.epoch(best_weights__npz="1")
    cluster.full = True
    cluster.epoch(best_weights__npz="2")
    cluster.full = False
    cluster.planes[0].close()
    cluster.planes[0] = cluster.plane(0)
    cluster.start()
    assert LOST in report.status(cluster.service.coordinator).message
    assert exported(cluster, 1) == b""
    assert LOST in report.succeeded(cluster.service.coordinator).message


def test_a_snapshot_names_the_files_that_wait_as_the_version_before_reads_it(cluster):
    cluster.full = True
    cluster.epoch(log__csv="1\n", best__keras="1")
    saved = cluster.tasks.dump()
    assert (saved["lost"], saved["leftOut"]) == (["logs/best.keras", "logs/log.csv"], {})


def test_a_rollback_does_not_tell_of_files_that_were_stored_since_the_snapshot(cluster):
    cluster.full = True
    cluster.epoch(log__csv="1\n")
    saved = cluster.service.coordinator.record.dump()
    cluster.full = False
    cluster.send()
    cluster.service.coordinator.record.rewind(saved)
    assert cluster.tasks.files.lacking == ""


def test_a_snapshot_follows_when_the_last_file_is_stored(cluster, monkeypatch):
    """The one before it tells that these files are lost, which a new parameter server would believe."""
    asked = []
    monkeypatch.setattr(
        cluster.service.coordinator.course, "snapshot_soon", lambda: asked.append(cluster.stored())
    )
    cluster.full = True
    cluster.epoch(log__csv="1\n", best__keras="1")
    cluster.full = False
    cluster.send()
    assert asked == [{"log.csv": "1\n", "best.keras": "1"}]


@pytest.mark.parametrize("cluster", [True], indirect=True, ids=["with validation"])
def test_the_last_evaluation_waits_for_no_file(cluster):
    cluster.full = True
    for epoch in range(EPOCHS - 1):
        cluster.epoch(log__csv=f"{epoch}")
    with pytest.raises(Unreachable, match="No space left"):
        cluster.epoch(log__csv="1\n")
    assert (cluster.tasks.queue[0].kind, cluster.tasks.holder) == ("callbacks", (0, 0))
    assert "val_loss" in cluster.tasks.history[-1]


def test_what_no_message_told_is_lost_until_its_worker_is_heard(cluster):
    """A worker of an earlier version says it before it sends the files, and nothing as it joins."""
    cluster.full = True
    cluster.epoch(log__csv="1\n")
    cluster.tasks.release((0, 0))
    assert cluster.tasks.files.lacking
    cluster.full = False
    cluster.send()
    assert cluster.stored() == {"log.csv": "1\n"}
    assert cluster.tasks.files.lacking == ""


@pytest.mark.parametrize("refused", ["large.keras", "small.csv"])
def test_a_file_that_the_storage_refuses_holds_back_no_other(cluster, refused):
    """A checkpoint that does not fit, or a name that only its owner may write."""
    cluster.refused = (refused,)
    files = {"large.keras": "x" * 100, "log.csv": "1\n", "small.csv": ""}
    cluster.epoch(**{name.replace(".", "__"): text for name, text in files.items()})
    cluster.send()
    cluster.send()
    expected = {name: text for name, text in files.items() if name != refused}
    assert cluster.stored() == expected
    cluster.epoch(log__csv="1\n2\n")
    cluster.send()
    assert cluster.stored() == expected | {"log.csv": "1\n2\n"}
    assert cluster.train(1).kind == "idle", "the export waits for the last one"
    cluster.refused = ()
    cluster.send()
    assert cluster.stored()[refused] == files[refused]
    assert cluster.tasks.files.sender is None


def test_a_storage_that_takes_nothing_is_sent_one_file_in_each_attempt(cluster, monkeypatch):
    cluster.full = True
    cluster.epoch(a="1", b="22", c="333")
    sent, line = [], cluster.planes[0]._client
    upload = line.upload
    monkeypatch.setattr(line, "upload", lambda *call: (sent.append(call[1]), upload(*call)))
    for _ in range(4):
        cluster.send()
    assert sent == ["logs/a", "logs/b", "logs/c", "logs/a"]


def test_a_new_parameter_server_hears_of_the_files_before_it_lets_others_run_callbacks(cluster):
    """Whoever asks first; the pause between two attempts to send the files may be long."""
    cluster.epoch(best_weights__npz="1")
    cluster.full = True
    cluster.epoch(best_weights__npz="2")
    cluster.full = False
    cluster.start()
    assert cluster.train(1).kind == "idle"
    cluster.send()
    assert cluster.stored() == {"best_weights.npz": "2"}
    assert exported(cluster, 0) == b"2"
    assert cluster.tasks.files.lacking == ""


def test_lost_best_weights_are_not_taken_from_an_earlier_epoch_when_the_copy_was_deleted(cluster):
    cluster.epoch(best_weights__npz="1")
    cluster.full = True
    cluster.epoch(best_weights__npz="2")
    cluster.planes[0]._late.copies["logs/best_weights.npz"].unlink()
    cluster.full = False
    cluster.send()
    assert exported(cluster, 0) == b""


def test_a_copy_that_the_disk_cannot_read_is_told_and_holds_up_no_other(cluster, monkeypatch):
    cluster.full = True
    cluster.epoch(a="1", b="2")
    cluster.full, line = False, cluster.planes[0]._client
    upload = line.upload

    def read(token, name, path):
        if name == "logs/a":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        upload(token, name, path)

    monkeypatch.setattr(line, "upload", read)
    cluster.send()
    assert cluster.stored() == {"b": "2"}
    assert (
        cluster.tasks.files.lacking
        == "logs/a is left out: its copy on the disk of the worker is lost: Input/output error"
    )


def test_a_file_that_was_left_out_and_follows_later_is_told_no_more(cluster):
    cluster.full = True
    cluster.epoch(log__csv="1")
    cluster.planes[0]._late.copies["logs/log.csv"].unlink()
    cluster.full = False
    cluster.send()
    assert cluster.tasks.files.lacking
    cluster.full = True
    cluster.epoch(log__csv="12")
    cluster.full = False
    cluster.send()
    assert cluster.stored() == {"log.csv": "12"}
    assert cluster.tasks.files.lacking == ""


def test_a_folder_of_copies_that_was_deleted_is_made_again(cluster):
    cluster.full = True
    cluster.epoch(log__csv="1")
    shutil.rmtree(cluster.planes[0]._late._folder)
    cluster.epoch(log__csv="12")
    cluster.full = False
    cluster.send()
    assert cluster.stored() == {"log.csv": "12"}


def test_many_files_are_named_a_few_times_each_and_no_copy_is_measured_again(cluster, tmp_path, monkeypatch):
    told, measured = [], []
    plane = SimpleNamespace(
        announce=lambda names, _: told.extend(names),
        uploaded=lambda *_: True,
        set_message=lambda *_: None,
    )
    late, count = LateFiles(plane), 300
    files = {f"logs/{number}": tmp_path / str(number) for number in range(count)}
    for path in files.values():
        path.touch()
    stat = Path.stat

    def counted(path, **options):
        measured.append(path)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", counted)
    late.add(files, 0, Unreachable(FULL))
    assert len(measured) < 10 * count
    late._send()
    late.close()
    assert len(told) < 20 * count


def test_a_wait_for_room_on_the_disk_writes_nothing(cluster, monkeypatch):
    copied, copy = [], shutil.copyfile
    monkeypatch.setattr(shutil, "copyfile", lambda *paths: (copied.append(paths), copy(*paths)))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=20))
    cluster.full = True
    work = cluster.train(0)
    with pytest.raises(Unreachable):
        cluster.call(work, a="x" * 9, b="y" * 9)
    assert copied == []


def test_of_two_workers_with_copies_the_one_of_the_newer_epoch_sends_them(cluster):
    """Two new parameter servers in a row, and a worker that the first of them did not hear of before it went on."""
    cluster.full = True
    cluster.epoch(log__csv="1\n")
    cluster.tasks.release((0, 0))
    cluster.call(cluster.work(1), slot=1, log__csv="1\n2\n")
    cluster.start()
    cluster.full = False
    cluster.send(0)
    cluster.send(1)
    cluster.send(0)
    assert cluster.stored() == {"log.csv": "1\n2\n"}
    assert cluster.tasks.files.lacking == ""
    cluster.start()


def test_copies_of_two_workers_are_not_taken_for_the_same(cluster):
    """A new process numbers its tasks anew, and each worker its copies."""
    for slot, text in enumerate("12"):
        assert cluster.tasks.sends_later((slot, 0), ["logs/log.csv"])
        cluster.service.upload(slot, 0, (LATE, 0), "logs/log.csv", iter([text.encode()]))
        assert cluster.stored() == {"log.csv": text}
        cluster.tasks.release((slot, 0))


def test_after_the_end_of_training_callbacks_wait_and_one_refused_file_holds_back_no_other(cluster):
    """Nobody would write these files again, if they were lost with their worker. While it waits, the next one does."""
    for _ in range(EPOCHS - 1):
        cluster.epoch()
    cluster.refused = ("best.keras",)
    last = cluster.train(0)
    assert last.task == "callbacks"
    for _ in range(2):
        with pytest.raises(Unreachable, match="No space left"):
            cluster.call(last, log__csv="1\n", best__keras="best")
        cluster.send()
    assert cluster.stored() == {"log.csv": "1\n"}
    cluster.planes[0]._client.send(Leave(slot=0, incarnation=0))
    again = cluster.train(1)
    assert again.task == "callbacks"
    cluster.refused = ()
    cluster.call(again, slot=1)
    assert cluster.stored() == {"log.csv": "1\n", "best.keras": "best"}
    assert cluster.tasks.files.lacking == ""


def restarted_from(cluster, monkeypatch, saved):
    """The next parameter server 0, whose newest snapshot has this record."""
    monkeypatch.setattr(cluster.service.coordinator.record, "dump", lambda: saved)
    cluster.start()


@pytest.mark.parametrize("refused", [(), ("big.keras",)], ids=["none", "another one"])
def test_files_that_were_stored_since_the_snapshot_are_not_lost_with_the_parameter_server(
    cluster, monkeypatch, refused
):
    """Their worker says which still wait. The best weights were taken for lost, and the last parameters exported."""
    cluster.epoch(best_weights__npz="1")
    cluster.full = True
    cluster.epoch(best_weights__npz="2", big__keras="B")
    saved = cluster.service.coordinator.record.dump()
    cluster.full, cluster.refused = False, refused
    for _ in range(3):
        cluster.planes[0]._late._backoff.reset()
        with contextlib.suppress(Unreachable):
            cluster.send()
    restarted_from(cluster, monkeypatch, saved)
    assert set(cluster.tasks.files.missing) == {f"logs/{name}" for name in refused}
    cluster.refused = ()
    cluster.send()
    assert exported(cluster, 0) == b"2"
    assert cluster.tasks.files.lacking == ""


def test_a_new_process_of_the_same_name_does_not_say_that_files_were_stored(cluster, monkeypatch):
    """As where a later job continues the run: its incarnations begin anew."""
    cluster.full = True
    cluster.epoch(best_weights__npz="1")
    saved = cluster.service.coordinator.record.dump()
    cluster.full = False
    cluster.planes[0].close()
    cluster.planes[0] = cluster.plane(0)
    restarted_from(cluster, monkeypatch, saved)
    (cluster.folder / "best_weights.npz").unlink()
    cluster.epoch(log__csv="1\n")
    assert "best_weights.npz" in cluster.tasks.files.lacking


def test_a_snapshot_is_taken_for_files_that_were_stored_though_nothing_was_trained_since(cluster):
    cluster.refused = ("best.npz",)
    cluster.epoch(best__npz="1")
    take = cluster.service.snapshotter.take
    assert take().ledger["tasks"]["lost"] == ["logs/best.npz"]
    assert take() is None
    cluster.refused = ()
    cluster.send()
    assert take().ledger["tasks"]["lost"] == []


def test_a_join_without_an_answer_makes_no_worker_wait_for_files_that_are_stored(cluster, monkeypatch):
    cluster.full = True
    for _ in range(EPOCHS - 1):
        cluster.epoch(log__csv="1\n")
    line = cluster.planes[0]._client
    join = line.join

    def late(request):
        monkeypatch.setattr(line, "join", join)
        cluster.full = False
        cluster.send()
        join(request)
        raise Unreachable("the answer is lost")

    monkeypatch.setattr(line, "join", late)
    with pytest.raises(Unreachable):
        cluster.planes[0].join({}, Wasted())
    cluster.planes[0].join({}, Wasted())
    assert cluster.tasks.files.sender is None
    cluster.epoch(log__csv="2\n")


def test_what_others_have_stored_newer_is_not_lost_with_an_overtaken_copy(cluster):
    cluster.full = True
    cluster.epoch(best_weights__npz="1", log__csv="1\n")
    cluster.tasks.release((0, 0))  # a new parameter server, which it reaches late
    cluster.full = False
    (cluster.folder / "log.csv").unlink()
    cluster.call(cluster.work(1), slot=1, best_weights__npz="2")
    cluster.planes[0].join({}, Wasted())
    assert set(cluster.tasks.files.missing) == {"logs/log.csv"}


def fail_once(monkeypatch, line):
    """One read of `a` fails for its disk, and one of `b` since too much is open."""
    upload, errors = line.upload, {"logs/a": [errno.ESTALE], "logs/b": [errno.EMFILE]}

    def read(token, name, path):
        if errors.get(name):
            raise OSError(found := errors[name].pop(), os.strerror(found))
        upload(token, name, path)

    monkeypatch.setattr(line, "upload", read)


def test_a_copy_that_stays_unreadable_holds_up_no_other_whatever_the_error(cluster, monkeypatch):
    cluster.full = True
    cluster.epoch(a="1", b="2", c="3")
    cluster.full, line = False, cluster.planes[0]._client
    fail_once(monkeypatch, line)
    for _ in range(2):
        cluster.send()
    assert cluster.stored() == {"b": "2", "c": "3"}
    assert "logs/a is left out" in cluster.tasks.files.lacking


def test_files_that_were_stored_by_the_time_their_worker_leaves_are_not_told_as_lost(cluster):
    """One word is said for several files. The word for these is of before they were sent."""
    cluster.full = True
    cluster.epoch(best_weights__npz="1", **{f"{n}__keras": "x" for n in range(40)})
    cluster.full = False
    late = cluster.planes[0]._late
    for name, copy in late._next():
        late._send_one(name, copy)
    stored = {f"logs/{name}" for name in cluster.stored()}
    assert len(stored) == 3
    cluster.planes[0].leave(Wasted())
    assert cluster.tasks.files.missing == dict.fromkeys(late.copies, "")
    assert len(late.copies) == 41 - 3


def test_a_worker_leaves_with_one_request_whatever_was_stored_since_its_last_word(cluster, monkeypatch):
    """Each takes 10 s while parameter server 0 hangs, and a pod has 20 s to end."""
    cluster.full = True
    cluster.epoch(a="1", b="2")
    cluster.full, plane, asked = False, cluster.planes[0], []
    plane._late._send_one(*plane._late._next()[0])

    def hangs(request):
        asked.append(type(request))
        raise Unreachable("no answer")

    with monkeypatch.context() as hanging:
        hanging.setattr(plane._client, "send", hangs)
        with pytest.raises(Unreachable):
            plane.leave(Wasted())
    assert asked == [Leave]
    plane.leave(Wasted())
    assert cluster.tasks.files.missing == {"logs/b": ""}


def test_a_worker_that_leaves_before_it_joins_a_restarted_server_says_what_is_stored(cluster):
    cluster.full = True
    cluster.epoch(a="1")
    saved = cluster.tasks.files.dump()
    cluster.full, plane = False, cluster.planes[0]
    for name, copy in plane._late._next():
        plane._late._send_one(name, copy)
    cluster.tasks.files = CallbackFiles().rewound(saved, EPOCHS)
    assert cluster.tasks.files.missing == {"logs/a": ""}
    plane.leave(Wasted())
    assert cluster.stored() == {"a": "1"}
    assert cluster.tasks.files.missing == {}


@pytest.mark.parametrize("late", [True, False])
def test_a_worker_that_leaves_asks_for_a_snapshot_if_its_last_late_file_is_stored(cluster, monkeypatch, late):
    """One before it may say that the file is lost."""
    cluster.full = late
    cluster.epoch(a="1")
    cluster.full, plane, asked = False, cluster.planes[0], []
    for name, copy in plane._late._next():
        plane._late._send_one(name, copy)
    monkeypatch.setattr(cluster.service.coordinator.course, "snapshot_soon", lambda: asked.append(True))
    plane.leave(Wasted())
    assert asked == [True] * late
    assert cluster.tasks.files.missing == {}


def test_a_word_that_a_later_one_overtook_holds_up_no_export(cluster):
    """Its worker gave it up, and the network had it still. All tasks were that worker's from then on, for ever."""
    cluster.full = True
    cluster.epoch(best__keras="1")
    first = cluster.planes[0]._client.said[-1]
    assert first.names == ("logs/best.keras",)
    cluster.full = False
    cluster.send()
    with pytest.raises(Unreachable, match="since"):
        cluster.service.coordinator.unsent_files(first)
    for _ in range(1, EPOCHS):
        cluster.epoch()
    assert cluster.work(0).task == "export"


def test_a_copy_that_reaches_a_new_parameter_server_before_its_workers_word_waits_for_it(
    cluster, monkeypatch
):
    """A snapshot says that the file comes, and not whether it still does. The copy was deleted as if others had it."""
    cluster.full = True
    cluster.epoch(best_weights__npz="1")
    cluster.full = False
    late = cluster.planes[0]._late
    (waiting,) = late._next()
    with monkeypatch.context() as patched:
        patched.setattr(cluster.planes[0], "join", lambda *_: None)
        cluster.start()
    with pytest.raises(Unreachable, match="has not said"):
        late._send_one(*waiting)
    cluster.planes[0].join({}, Wasted())
    cluster.send()
    assert cluster.stored() == {"best_weights.npz": "1"}
    assert cluster.tasks.files.missing == {}


def test_a_word_that_a_later_one_overtook_loses_no_files(cluster, monkeypatch):
    cluster.full = True
    cluster.epoch(best__keras="1")
    cluster.full = False
    cluster.send()
    line = cluster.planes[0]._client
    old, upload = line.said[-1], line.upload
    assert old.names == ()
    cluster.full = True
    cluster.epoch(best__keras="2")
    cluster.full = False

    def on_its_way(*call):
        with contextlib.suppress(Unreachable):
            cluster.service.coordinator.unsent_files(old)
        upload(*call)

    monkeypatch.setattr(line, "upload", on_its_way)
    cluster.send()
    assert cluster.stored() == {"best.keras": "2"}


def lost_while_others_went_on(cluster, monkeypatch):
    """Best weights wait on worker 0, and a new parameter server 0 hears of worker 1 first."""
    cluster.epoch(best_weights__npz="1")
    cluster.full = True
    cluster.epoch(best_weights__npz="2")
    cluster.full = False
    with monkeypatch.context() as patched:
        patched.setattr(cluster.planes[0], "join", lambda *_: None)
        cluster.start()
    cluster.service.coordinator.course.gathering.end()
    for path in cluster.folder.iterdir():
        path.unlink()
    return cluster.train(1)


@pytest.mark.parametrize("files_first", [False, True], ids=["joins first", "files are told first"])
def test_what_a_worker_gave_up_before_it_joined_is_not_taken_for_stored(cluster, monkeypatch, files_first):
    """Best weights of an earlier epoch were exported, and nothing was told."""
    cluster.call(lost_while_others_went_on(cluster, monkeypatch), slot=1)
    plane = cluster.planes[0]
    for said in (cluster.send, lambda: plane.join({}, Wasted()))[:: 1 if files_first else -1]:
        said()
    assert LOST in cluster.tasks.files.lacking
    plane.join({}, Wasted())
    assert exported(cluster, 1) == b""


def test_a_copy_that_others_have_overtaken_stays_so_when_they_are_gone(cluster, monkeypatch):
    """Its worker runs the next callbacks, and sends it after them."""
    work = lost_while_others_went_on(cluster, monkeypatch)
    cluster.call(work, slot=1, best_weights__npz="3")
    cluster.planes[0].join({}, Wasted())
    cluster.planes[1]._client.send(Leave(slot=1, incarnation=0))
    (cluster.folder / "best_weights.npz").unlink()
    last = cluster.train(0)
    with pytest.raises(Unreachable):  # the last callbacks wait for their files
        cluster.call(last, log__csv="4")
    cluster.send()
    cluster.call(last)
    assert cluster.stored() == {"best_weights.npz": "3", "log.csv": "4"}
    assert cluster.tasks.files.missing == {}


def test_a_file_that_others_have_overtaken_is_not_uploaded_again_as_it_is(cluster, monkeypatch):
    """It is still in the folder of its worker, which runs callbacks again: the older best weights were exported."""
    work = lost_while_others_went_on(cluster, monkeypatch)
    cluster.call(work, slot=1, best_weights__npz="of epoch 3")
    older = cluster.folder / "best_weights.npz"
    older.write_text("2")
    os.utime(older, ns=(cluster.planes[0]._uploaded["logs/best_weights.npz"][1],) * 2)
    cluster.planes[0].join({}, Wasted())
    cluster.send()
    cluster.planes[1]._client.send(Leave(slot=1, incarnation=0))
    cluster.call(cluster.train(0))
    assert cluster.stored() == {"best_weights.npz": "of epoch 3"}


def test_best_weights_that_nobody_has_overtaken_are_sent_though_others_ran_callbacks(cluster, monkeypatch):
    cluster.call(lost_while_others_went_on(cluster, monkeypatch), slot=1)
    cluster.planes[1]._client.send(Leave(slot=1, incarnation=0))
    cluster.planes[0].join({}, Wasted())
    cluster.send()
    assert cluster.stored() == {"best_weights.npz": "2"}
    assert cluster.tasks.files.lacking == ""


@pytest.mark.parametrize("said", ["with its task", "with a word of what waits"])
def test_a_file_that_another_worker_has_stored_since_is_not_left_out(cluster, said):
    cluster.epoch(log__csv="1")
    about = {"left_out": {"logs/log.csv": "the worker cannot read it"}, "written": {"logs/log.csv": -1}}
    if said == "with its task":
        done = TaskDone(**cluster.planes[0]._client.identity, token=cluster.work(0).token, **about)
        assert cluster.service.coordinator.task_done(done).kind == "callbacks"
    else:
        cluster.planes[0]._client.send(UnsentFiles(**cluster.planes[0]._client.identity, called=0, **about))
    assert cluster.tasks.files.lacking == ""


def test_a_name_that_the_storage_refused_later_is_not_taken_for_stored(cluster, monkeypatch):
    cluster.full = True
    cluster.epoch(long__csv="1")
    saved = cluster.service.coordinator.record.dump()
    line = cluster.planes[0]._client
    upload = line.upload

    def refused(*_):
        raise BadName("File name too long")

    monkeypatch.setattr(line, "upload", refused)
    cluster.send()
    monkeypatch.setattr(line, "upload", upload)
    restarted_from(cluster, monkeypatch, saved)
    assert list(cluster.tasks.files.missing) == ["logs/long.csv"]


def copies_fail(monkeypatch, code, *names):
    """The disk refuses to read these files for a copy."""
    copy = shutil.copyfile

    def copyfile(source, target):
        copy(source, target)
        if source.name in names:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(shutil, "copyfile", copyfile)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_file_that_cannot_be_copied_is_left_out_and_told(cluster, monkeypatch, code):
    """It ended the worker, and all copies were lost with it. The copy of the epoch before would pass for this one."""
    cluster.full = True
    cluster.epoch(a="1", b="2")
    with monkeypatch.context() as patched:
        copies_fail(patched, code, "b", "d")
        cluster.epoch(a="12", b="23", c="3", d="4")
    assert len(list(cluster.planes[0]._late._folder.iterdir())) == 2
    cluster.full = False
    cluster.send()
    assert cluster.stored() == {"a": "12", "c": "3"}
    why = f"is left out: the worker cannot read it: {os.strerror(code)}"
    assert cluster.tasks.files.lacking == f"logs/b {why}; logs/d {why}"
    (cluster.folder / "b").write_text("234")
    cluster.epoch()
    assert cluster.stored() == {"a": "12", "b": "234", "c": "3", "d": "4"}
    assert cluster.tasks.files.missing == {}


def test_a_worker_with_too_much_open_waits_with_the_callbacks(cluster, monkeypatch):
    """It has too much open for the upload, and then for the copies as well."""
    work, line = cluster.train(0), cluster.planes[0]._client

    def busy(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(line, "upload", busy)
        for module, opens in ((tempfile, "mkdtemp"), (shutil, "copyfile")):
            with monkeypatch.context() as full:
                full.setattr(module, opens, busy)
                with pytest.raises(Unreachable, match="Too many open files"):
                    cluster.call(work, a="1")
    assert cluster.tasks.holder == (0, 0)
    cluster.call(work, a="1")
    assert cluster.stored() == {"a": "1"}


@pytest.mark.parametrize("full", [False, True], ids=["storage", "outage"])
def test_a_file_that_is_gone_before_it_is_looked_at_is_left_out_and_told(cluster, full):
    """Threads of callbacks go on, and delete files."""
    cluster.full = full
    (cluster.folder / "gone").symlink_to("nothing")
    cluster.epoch(a="1")
    cluster.full = False
    cluster.send()
    assert cluster.stored() == {"a": "1"}
    assert cluster.tasks.files.lacking == (
        "logs/gone is left out: the worker cannot read it: No such file or directory"
    )


def test_a_file_of_callbacks_that_the_disk_cannot_read_is_left_out_and_told(cluster, monkeypatch):
    """It ended the worker, with nothing that named it."""
    line = cluster.planes[0]._client
    fail_once(monkeypatch, line)
    cluster.epoch(a="1", b="2", c="3")
    cluster.send()
    assert cluster.stored() == {"b": "2", "c": "3"}
    assert cluster.tasks.files.lacking == "logs/a is left out: the worker cannot read it: Stale file handle"
    (cluster.folder / "a").write_text("12")
    cluster.epoch()
    assert cluster.stored()["a"] == "12"
    assert cluster.tasks.files.lacking == ""


@pytest.mark.parametrize("outage", [False, True], ids=["not sent", "not copied"])
def test_an_unchanged_file_that_could_not_be_read_once_is_sent_with_the_next_callbacks(
    cluster, monkeypatch, outage
):
    """Best weights that stay the best are written once: a disk in a network that failed for a moment lost them."""
    cluster.full = outage
    with monkeypatch.context() as patched:
        if outage:
            copies_fail(patched, errno.ESTALE, "a")
        else:
            fail_once(patched, cluster.planes[0]._client)
        cluster.epoch(a="1", c="3")
    cluster.full = False
    cluster.send()
    assert cluster.stored() == {"c": "3"}
    assert "logs/a is left out" in cluster.tasks.files.lacking
    cluster.epoch()
    assert cluster.stored() == {"a": "1", "c": "3"}
    assert cluster.tasks.files.lacking == ""


def test_a_worker_says_of_which_epoch_a_file_is_that_it_could_not_copy(cluster, monkeypatch):
    """Else what another one has stored since is left out, whenever this one says so again."""
    cluster.full = True
    with monkeypatch.context() as patched:
        copies_fail(patched, errno.EIO, "best_weights.npz")
        cluster.epoch(best_weights__npz="1", log__csv="1")
    cluster.full = False
    cluster.send()
    with monkeypatch.context() as patched:
        patched.setattr(cluster.planes[0], "join", lambda *_: None)
        cluster.start()
    cluster.service.coordinator.course.gathering.end()
    cluster.call(cluster.train(1), slot=1, best_weights__npz="22")
    cluster.planes[0].join({}, Wasted())
    cluster.planes[1]._client.send(Leave(slot=1, incarnation=0))
    for path in cluster.folder.iterdir():
        path.unlink()
    cluster.call(cluster.train(0))
    assert cluster.tasks.files.lacking == ""
    assert exported(cluster, 0) == b"22"


def test_a_worker_says_of_which_epoch_a_file_is_that_it_leaves_out(cluster, monkeypatch):
    line = cluster.planes[0]._client

    def refused(*_):
        raise BadName("File name too long")

    with monkeypatch.context() as patched:
        patched.setattr(line, "upload", refused)
        cluster.epoch(log__csv="1")
    assert cluster.tasks.files.lacking
    with monkeypatch.context() as patched:
        patched.setattr(cluster.planes[0], "join", lambda *_: None)
        cluster.start()
    cluster.service.coordinator.course.gathering.end()
    cluster.call(cluster.train(1), slot=1, log__csv="2")
    assert cluster.tasks.files.lacking == ""
    cluster.planes[0].join({}, Wasted())
    cluster.planes[1]._client.send(Leave(slot=1, incarnation=0))
    (cluster.folder / "log.csv").unlink()
    cluster.call(cluster.train(0))
    assert cluster.tasks.files.lacking == ""
    assert cluster.stored() == {"log.csv": "2"}


def test_a_result_is_sent_while_a_file_that_was_left_out_is_stored(cluster):
    """It ended the worker: the thread that sends files took one away between two looks at what is written."""

    class Sending(dict):
        def __contains__(self, name):
            self.pop(name, None)
            return True

    plane = cluster.planes[0]
    plane.leave_out("logs/a", "the worker cannot read it")
    plane._late.written = Sending({"logs/a": 0})
    cluster.epoch(b="1")
    assert cluster.stored() == {"b": "1"}
