"""Files that come later, as a parameter server begins anew, their worker leaves, or others run the callbacks since."""

import contextlib
import os

import pytest

from shoal_trainer.coordinator.callback_files import CallbackFiles
from shoal_trainer.coordinator.protocol import LATE, Leave, TaskDone, UnsentFiles
from shoal_trainer.errors import BadName, Unreachable
from shoal_trainer.worker.work import Wasted
from tests.unit.trainer.worker.callback_cluster import EPOCHS, LOST, exported, fail_once, restarted_from


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
    cluster.planes[0].leave(Wasted(), 1.0)
    assert cluster.tasks.files.missing == dict.fromkeys(late.copies, "")
    assert len(late.copies) == 41 - 3


def fenced(cluster, slot):
    """The coordinator takes this worker for lost."""
    coordinator = cluster.service.coordinator
    with coordinator.lock:
        coordinator.departures.fence(coordinator.members.get((slot, 0)), "silent")


def test_files_that_were_stored_by_the_time_their_worker_is_lost_are_not_told_as_lost(cluster):
    """It has no word left. Up to a sixteenth of many are sent between two words, and best weights may be among them."""
    cluster.full = True
    cluster.epoch(best_weights__npz="1", **{f"{n}__keras": "x" for n in range(40)})
    cluster.full, late = False, cluster.planes[0]._late
    for name, copy in late._next():
        late._send_one(name, copy)
    fenced(cluster, 0)
    assert len(cluster.stored()) == 3
    assert cluster.tasks.files.missing == dict.fromkeys(late.copies, "")
    assert len(late.copies) == 41 - 3


def test_a_stored_file_is_not_lost_though_its_worker_joined_again_before_it_was_told(cluster):
    """A rollback has all workers join, without the numbers of their copies."""
    cluster.full = True
    cluster.epoch(a="1")
    cluster.full, plane = False, cluster.planes[0]
    [(name, copy)] = plane._late._next()
    assert plane.uploaded((LATE, int(copy.name)), name, copy)
    plane.join({}, Wasted())
    fenced(cluster, 0)
    assert cluster.stored() == {"a": "1"}
    assert cluster.tasks.files.missing == {}


def test_a_file_is_lost_with_its_worker_if_only_an_older_copy_is_stored(cluster):
    """The newer one was said while the older one was on its way."""
    cluster.full = True
    cluster.epoch(a="1")
    cluster.full, plane = False, cluster.planes[0]
    [(name, copy)] = plane._late._next()
    number = int(copy.name)
    plane.announce({name: number + 1}, {name: 1})
    assert plane.uploaded((LATE, number), name, copy)
    fenced(cluster, 0)
    assert cluster.stored() == {"a": "1"}
    assert cluster.tasks.files.missing == {name: ""}


def test_a_worker_leaves_with_one_request_whatever_was_stored_since_its_last_word(cluster, monkeypatch):
    """Each takes 10 s while parameter server 0 hangs, and a pod has 20 s to end."""
    cluster.full = True
    cluster.epoch(a="1", b="2")
    cluster.full, plane, asked = False, cluster.planes[0], []
    plane._late._send_one(*plane._late._next()[0])

    def hangs(request, _seconds):
        asked.append(type(request))
        raise Unreachable("no answer")

    with monkeypatch.context() as hanging:
        hanging.setattr(plane._client, "send", hangs)
        with pytest.raises(Unreachable):
            plane.leave(Wasted(), 1.0)
    assert asked == [Leave]
    plane.leave(Wasted(), 1.0)
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
    plane.leave(Wasted(), 1.0)
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
    plane.leave(Wasted(), 1.0)
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
