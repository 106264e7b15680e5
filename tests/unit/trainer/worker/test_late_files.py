"""A storage that takes no files holds up neither the callbacks nor training: the files follow, and the export waits."""

import shutil
from functools import partial
from types import SimpleNamespace

import pytest

from shoal_trainer.contract import JobIdentity, Role, RuntimeConfig, Shard, StopAfter
from shoal_trainer.coordinator import artefacts, report
from shoal_trainer.coordinator.protocol import LATE, DataSpec, Join, Leave, TaskDone, UnsentFiles
from shoal_trainer.errors import BadName, Overtaken, ProtocolError, Unauthorized, Unreachable, UserError
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.serve import ParameterServer
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.wire.messages import Held, Progress, PushMeta
from shoal_trainer.worker.coordination import ControlPlane
from shoal_trainer.worker.work import About, TaskWork
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
        self.old = False

    def upload(self, token, name, path):
        self.cluster.service.upload(self.slot, 0, token, name, iter([path.read_bytes()]))

    def send(self, request):
        if self.old and isinstance(request, UnsentFiles):
            raise ProtocolError("unknown path /v1/unsent-files")
        name = {UnsentFiles: "unsent-files", TaskDone: "task-done", Leave: "leave"}[type(request)]
        self.cluster.service.handlers()[name](request)

    def close(self):
        pass


class Cluster:
    """Parameter server 0 of a job with callbacks, and two workers; its volume is full while `full`."""

    def __init__(self, tmp_path, monkeypatch, *, validation=False):
        self.tmp_path, self.full, self.seq = tmp_path, False, {}
        self.server, self.validation = None, validation
        write = LocalStorage.write

        def attempt(storage, name, chunks, *confirm):
            if self.full:
                raise Unreachable(FULL)
            write(storage, name, chunks, *confirm)

        monkeypatch.setattr(LocalStorage, "write", attempt)
        self.start()
        self.folder = tmp_path / "callbacks"
        self.folder.mkdir()
        self.planes = [self.plane(slot) for slot in (0, 1)]

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
        for slot in (0, 1):
            shard.workers.connect(slot, 0)
            if shard.hello(slot, 0, MODEL, Held()).wants_copy:
                shard.offer(slot, 0, aligned(shard.size))
            data = DataSpec(size=8, callbacks=True, validation=self.validation)
            self.service.coordinator.join(Join(slot=slot, incarnation=0, data=data, batch_size=2))

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
        task = TaskWork(work.token, work.task, work.epoch, work.history, work.learning_rate, work.last)
        written = {f"logs/{path.name}": path for path in sorted(self.folder.iterdir())}
        self.planes[slot].task_done(task, {}, written, stop=stop, message="")

    def send(self, slot=0):
        self.planes[slot]._late._send()

    def stored(self):
        storage = self.server._storage
        return {name: storage.read(f"logs/{name}").decode() for name in storage.names("logs")}

    def epoch(self, **files):
        """One epoch of both workers, whose callbacks write these files on worker 0."""
        work = self.train(0)
        if work.kind == "idle":
            self.train(1)
            work = self.train(0)
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
    assert last.last
    with pytest.raises(Unreachable, match="No space left"):
        cluster.call(last, log__csv="row\n" * EPOCHS)
    assert cluster.stored() == {"log.csv": "1\n"}
    assert cluster.train(1).kind == "idle"
    cluster.full = False
    cluster.send()
    assert cluster.tasks.sender is None
    assert cluster.stored() == {"log.csv": "row\n" * (EPOCHS - 1), "1.keras": "model 1", "2.keras": "model 2"}
    cluster.call(last)
    assert cluster.stored()["log.csv"] == "row\n" * EPOCHS
    assert cluster.train(1).task == "export"
    assert report.succeeded(cluster.service.coordinator).message == "all epochs are complete"


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
        copies.append((LATE, int(cluster.planes[0]._late._copies["logs/best.keras"].name)))
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
    assert cluster.tasks.sender is None


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
        cluster.planes[0].announce(["logs/log.csv"])
    cluster.full = False
    (cluster.folder / "best.keras").unlink()
    cluster.call(cluster.train(1), slot=1, log__csv="1\n2\n")
    assert cluster.stored() == {"log.csv": "1\n2\n"}
    expected = (
        "all epochs are complete; logs/best.keras went with the worker that had written them, before the"
    )
    assert report.succeeded(cluster.service.coordinator).message.startswith(expected)
    saved = cluster.tasks.dump()
    cluster.tasks.lost.clear()
    cluster.tasks.load(saved)
    assert cluster.tasks.lost == {"logs/best.keras"}


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


def test_a_new_parameter_server_hears_of_the_files_again(cluster):
    cluster.full = True
    cluster.epoch(log__csv="1\n")
    cluster.start()
    assert cluster.tasks.sender is None
    cluster.full = False
    cluster.send()
    assert cluster.stored() == {"log.csv": "1\n"}
    assert cluster.tasks.sender is None


def test_files_that_others_follow_are_dropped_and_written_anew_by_the_next_callbacks(cluster):
    cluster.full = True
    cluster.epoch(log__csv="1\n")
    cluster.tasks.sender = cluster.tasks.caller = None  # a new process knows neither
    cluster.full = False
    cluster.call(cluster.train(1), slot=1, log__csv="1\n2\n")
    cluster.send()
    assert cluster.stored() == {"log.csv": "1\n2\n"}
    assert cluster.planes[0]._late.trouble is None
    assert cluster.planes[0]._uploaded == {}
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
    assert cluster.tasks.sender is None, "the export would wait for nothing"
    cluster.call(work, log__csv="123")
    assert cluster.tasks.sender == (0, 0)


def test_copies_take_at_most_half_of_what_would_be_free_without_them(cluster, monkeypatch):
    late, file = cluster.planes[0]._late, cluster.folder / "x"
    file.write_text("x")

    def taken():
        return 0 if late._folder is None else sum(copy.stat().st_size for copy in late._folder.iterdir())

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=20 - taken()))
    cluster.epoch()
    late.add({f"logs/{number}": file for number in range(6)}, Unreachable(FULL))
    with pytest.raises(Unreachable, match="No space left"):
        late.add({f"logs/{number}": file for number in range(6, 12)}, Unreachable(FULL))
    late.add({f"logs/{number}": file for number in range(6, 10)}, Unreachable(FULL))
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
    late._copies["logs/log.csv"].unlink()
    cluster.full = False
    cluster.send()
    assert cluster.stored() == {"best.keras": "best"}
    assert cluster.tasks.sender is None
    assert "logs/log.csv is left out: its copy was deleted" in cluster.tasks.lacking
    cluster.epoch()
    assert cluster.stored() == {"log.csv": "1", "best.keras": "best"}
    assert cluster.tasks.lacking == ""


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
    assert cluster.tasks.sender is None
    assert list(cluster.tasks.left_out) == ["logs/long.csv", "logs/long2.csv"]
    assert cluster.stored() == {"short.csv": "12"}
    cluster.call(cluster.train(0), long__csv="123")
    assert list(cluster.tasks.left_out) == ["logs/long2.csv"]


def test_a_name_that_the_protocol_refuses_is_left_out_and_a_wrong_token_is_not(cluster):
    work, line = cluster.train(0), cluster.planes[0]._client
    line.upload = lambda *_: (_ for _ in ()).throw(Unauthorized("no valid token for this job"))
    with pytest.raises(Unauthorized):
        cluster.call(work, a="1")
    line.upload = lambda *_: (_ for _ in ()).throw(ProtocolError("'a\\\\b' is not a relative file name"))
    cluster.call(work, a="1")
    assert "is not a relative file name" in cluster.tasks.lacking


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
