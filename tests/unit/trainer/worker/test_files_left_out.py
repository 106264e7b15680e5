"""A file that a worker cannot read, or not copy, is left out and told, and sent once it can be."""

import errno
import os
import shutil
import tempfile

import pytest

from shoal_trainer.coordinator.protocol import Leave
from shoal_trainer.errors import BadName, Unreachable
from shoal_trainer.worker.work import Wasted
from tests.unit.trainer.worker.callback_cluster import exported, fail_once


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
