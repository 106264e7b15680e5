"""A storage that takes no files holds up neither the callbacks nor training: the files follow, and the export waits."""

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal_trainer.coordinator import artefacts, report
from shoal_trainer.coordinator.callback_files import CallbackFiles
from shoal_trainer.coordinator.protocol import LATE, Leave
from shoal_trainer.coordinator.task_queue import Tasks
from shoal_trainer.errors import BadName, Overtaken, ProtocolError, Unauthorized, Unreachable, UserError
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.worker.late_files import LateFiles
from shoal_trainer.worker.work import About, TaskWork
from tests.unit.trainer.worker.callback_cluster import EPOCHS, FULL, LOST, exported


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
        cluster.planes[0].announce({"logs/log.csv": 0}, {})
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
