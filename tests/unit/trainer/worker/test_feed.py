"""The read-ahead thread: store outages, tasks, and prefetched files."""

import logging
import os
import sys
import tempfile
import threading
from collections import defaultdict

import fsspec
import numpy as np
import pytest
import tensorflow as tf
from fsspec.implementations.memory import MemoryFileSystem

from shoal_trainer import Files, Indexed, Stream, UserError
from shoal_trainer.data.batch import Batch
from shoal_trainer.errors import Unreachable
from shoal_trainer.worker import feed as feeds
from shoal_trainer.worker.feed import EndOfFile, Failed, Feed, Ready
from shoal_trainer.worker.work import DataWork, Finished, Idle, TaskWork

SECONDS = 120
LENGTH = 50


class Flaky(Files):
    """Files of `LENGTH` samples in a store that fails once before each of `positions`."""

    def away_at(self, positions):
        object.__setattr__(self, "positions", list(positions))
        return self

    def read(self, part, batch_size, local=None):
        name, start, stop = part.file, part.start, part.stop
        end = LENGTH if stop is None else stop
        while True:
            if self.positions and start >= self.positions[0]:
                self.positions.pop(0)
                raise Unreachable(f"{name}: no answer")
            if start >= end:
                return
            rows = np.arange(start, min(start + batch_size, end))
            start = int(rows[-1]) + 1
            yield Batch(rows, None, np.ones(len(rows), np.float32), len(rows), start)


def items_of(feed):
    found = []
    feed.start()
    try:
        while not found or not isinstance(found[-1], Finished):
            item = feed.get(SECONDS)
            assert item is not None, found
            assert not isinstance(item, BaseException), item
            found.append(item)
    finally:
        feed.stop()
    return found[:-1]


@pytest.mark.parametrize("positions", [[], [0, 0, 0], [5, 21], [21, 21, 37], [50], [0, 21, 50, 50]])
@pytest.mark.parametrize(("start", "stop"), [(5, None), (5, LENGTH), (0, None)])
def test_reading_resumes_after_a_store_outage(monkeypatch, caplog, positions, start, stop):
    monkeypatch.setattr(feeds, "FIRST_PAUSE", 0.0)
    work = DataWork((0, 1), 0, start, stop, "a", 0)
    works = iter([work, Finished()])
    data = Flaky("*", lambda _path: None).away_at(positions)
    with caplog.at_level(logging.WARNING):
        items = items_of(Feed(data, 16, lambda: next(works), [].append))
    assert not data.positions
    batches = [item for item in items if isinstance(item, Ready)]
    assert np.array_equal(np.concatenate([ready.batch.x for ready in batches]), np.arange(start, LENGTH))
    assert all(item.work is work for item in items)
    assert items[len(batches) :] == ([] if stop else [EndOfFile(work, LENGTH)])
    assert len(caplog.records) == len(set(positions))  # one message per outage


def test_feed_asks_for_no_work_during_a_task(monkeypatch):
    monkeypatch.setattr(feeds, "STOP_SECONDS", 0.001)
    events = []
    works = iter([TaskWork((0, 1), "evaluate"), TaskWork((0, 2), "callbacks"), Finished()])

    def ask():
        events.append("request")
        return next(works)

    feed = Feed(Flaky("*", lambda _path: None), 16, ask, [].append)
    feed.start()
    for kind in ("evaluate", "callbacks"):
        assert feed.get(SECONDS).kind == kind
        assert feed.get(0.05) is None
        events.append(kind)
        feed.task_finished()
    assert isinstance(feed.get(SECONDS), Finished)
    feed._thread.join(SECONDS)
    assert events == ["request", "evaluate", "request", "callbacks", "request"]


def test_feed_waiting_for_a_task_can_be_stopped(monkeypatch):
    monkeypatch.setattr(feeds, "STOP_SECONDS", 0.001)
    feed = Feed(Flaky("*", lambda _path: None), 16, lambda: TaskWork((0, 1), "evaluate"), [].append)
    feed.start()
    assert isinstance(feed.get(SECONDS), TaskWork)
    feed.stop()
    feed._thread.join(SECONDS)
    assert not feed._thread.is_alive()


def test_feed_stops_without_waiting_for_the_store():
    outage = Flaky("*", lambda _path: None).away_at([0] * 10**6)
    feed = Feed(outage, 16, lambda: DataWork((0, 1), 0, 0, None, "a", 0), [].append)
    feed.start()
    feed.stop()
    feed._thread.join(SECONDS)
    assert not feed._thread.is_alive()


class Pauses:
    """An event that is never set and whose `wait` returns at once."""

    def __init__(self):
        self.waited = []

    def is_set(self):
        return False

    def wait(self, seconds):
        self.waited.append(seconds)


def test_retries_back_off_and_report_the_unreadable_file():
    data = Flaky("*", lambda _path: None).away_at([0] * 10 + [16] * 2)
    messages = []
    feed = Feed(data, 16, Finished, [].append, lambda words: callable(words) or messages.append(words))
    feed._stop = Pauses()
    ends = []
    for item in feed._read(DataWork((0, 1), 0, 0, None, "part-3", 0)):
        ends.append(item.batch.end if isinstance(item, Ready) else item.length)
        assert messages.pop() == ""
        assert set(messages) <= {"cannot read part-3: no answer", ""}
        messages.clear()
    assert ends == [16, 32, 48, LENGTH, LENGTH]
    assert feed._stop.waited == [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30, 30, 0.25, 0.5]


def test_report_is_cleared_after_reading_an_empty_file():
    messages = []
    data = Flaky("*", lambda _path: None).away_at([LENGTH])
    feed = Feed(data, 16, Finished, [].append, lambda words: callable(words) or messages.append(words))
    feed._stop = Pauses()
    assert len(list(feed._read(DataWork((0, 1), 0, LENGTH, None, "a", 0)))) == 1
    assert messages == ["cannot read a: no answer", ""]


def test_hanging_read_is_reported_on_request():
    now, messages = [100.0], []
    data = Flaky("*", lambda _path: None).away_at([])
    feed = Feed(data, 16, Finished, [].append, messages.append, clock=lambda: now[0])
    items = feed._read(DataWork((0, 1), 0, 0, LENGTH, "part-3", 0))
    next(items)
    asked = messages[0]
    assert messages[1] == ""
    assert asked() == ""
    now[0] += 29.0
    assert asked() == ""
    now[0] += 6.0
    assert asked() == "has waited 35 s for part-3"
    next(items)
    assert messages[2]() == ""  # no time has passed since this read began
    assert DataWork((0, 1), 0, 16, 64).source == "samples 16-64"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Indexed.from_arrays(np.arange(32)), "samples 16-32 in the order of epoch 3: wrong"),
        (
            Stream(lambda: iter([np.arange(32)]), samples=32),
            "a batch of a stream, which is read for the samples 16-32 of epoch 3 and has no numbers: wrong",
        ),
    ],
    ids=["arrays", "stream"],
)
def test_a_batch_that_is_refused_is_not_taken_for_the_rows_of_its_positions(data, words):
    """Arrays are shuffled, and each worker reads a stream from a place of its own."""
    work = DataWork((0, 1), 2, 16, 32)
    works = iter([work, Finished()])

    def check(_batch):
        raise UserError("wrong")

    (failed,) = items_of(Feed(data.placed(0), 16, lambda: next(works), [].append, check=check))
    assert isinstance(failed, Failed)
    assert str(failed.error) == words


@pytest.mark.parametrize("kind", [Indexed, Files])
def test_sys_exit_in_a_data_function_is_a_user_error(tmp_path, kind):
    path = tmp_path / "a"
    path.write_text("")
    data = Files(str(path), sys.exit) if kind is Files else Indexed(64, lambda *_: sys.exit(3))
    work = DataWork((0, 1), 0, 0, 64, str(path) if kind is Files else None)
    feed = Feed(data, 16, lambda: work, [].append)
    feed.start()
    error = feed.get(SECONDS)
    feed.stop()
    assert isinstance(error, Failed)
    assert error.work is work
    assert "The data function failed: SystemExit" in str(error.error)


def test_a_task_is_requested_after_data_that_cannot_be_read():
    def read(begin, end):
        return tf.data.Dataset.range(begin, end) if begin == 0 else 1 / 0

    works = [DataWork((0, 1), 0, 0, 16), DataWork((0, 2), 0, 16, 64), TaskWork((0, 3), "export")]
    messages = []
    feed = Feed(
        Indexed(64, read, shuffle=0),
        16,
        lambda: works.pop(0) if works else Finished(),
        [].append,
        messages.append,
    )
    feed.start()
    kinds = [type(feed.get(SECONDS)) for _ in range(3)]
    feed.stop()
    feed.task_finished()
    assert kinds == [Ready, Failed, TaskWork]
    assert messages[-1] == ""  # it no longer waits for data


class Stored:
    """Text files with one number per line, in a store that records fetches; a gate delays a file."""

    def __init__(self, monkeypatch, tmp_path, **files):
        self.store = fsspec.filesystem("memory")
        self.fetched, self.gates, self.begun = [], {}, defaultdict(threading.Event)
        self.folder = tmp_path / "here"
        self.folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(self.folder))
        for name, rows in files.items():
            self.store.pipe_file(f"/feed/{name}", "".join(f"{row}\n" for row in rows).encode())
        get = MemoryFileSystem.get_file

        def get_file(store, path, target):
            name = path.rsplit("/")[-1]
            self.fetched.append(name)
            self.begun[name].set()
            if name in self.gates:
                assert self.gates[name].wait(SECONDS)
            get(store, path, target)

        monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
        self.data = Files("memory://feed/*", self.open)

    @staticmethod
    def open(path):
        return tf.data.TextLineDataset(path).map(tf.strings.to_number)

    def work(self, name, token):
        return DataWork((0, token), 0, 0, None, f"memory:///feed/{name}", token)

    def begins(self, name):
        """Whether the fetch of this file has begun, after a wait."""
        return self.begun[name].wait(SECONDS)

    def here(self):
        """The number of files on the worker's disk."""
        return sum(len(files) for _, _, files in os.walk(self.folder))  # tolerates files that disappear

    def none_here(self, feed):
        """Whether no file is left after both threads have ended."""
        feed._thread.join(SECONDS)
        for thread in threading.enumerate():
            if thread.name == "fetch":
                thread.join(SECONDS)
        return not list(self.folder.iterdir())


def test_next_file_is_fetched_while_one_is_read(monkeypatch, tmp_path):
    stored = Stored(monkeypatch, tmp_path, a=range(200), b=range(200, 230), c=[230])
    works = iter([*(stored.work(name, n) for n, name in enumerate("abc")), Idle(0)])
    held = []
    feed = Feed(stored.data, 16, lambda: next(works, Finished()), held.append)
    stored.gates["c"] = threading.Event()
    feed.start()
    first = feed.get(SECONDS)
    assert stored.begins("b")  # while "a" is not read to its end
    assert stored.fetched == ["a", "b"]
    assert [work.file for work in held] == ["memory:///feed/a", "memory:///feed/b"]
    stored.gates["c"].set()
    items = [first]
    while not isinstance(items[-1], Finished):
        items.append(feed.get(SECONDS))
        assert not isinstance(items[-1], BaseException), items[-1]
        assert stored.here() <= 2
    rows = [
        row
        for item in items
        if isinstance(item, Ready)
        for row in np.asarray(item.batch.x)[: item.batch.samples]
    ]
    assert sorted(rows) == list(range(231))
    assert [item.length for item in items if isinstance(item, EndOfFile)] == [200, 30, 1]
    assert stored.fetched == ["a", "b", "c"]
    assert stored.none_here(feed)


def test_task_given_instead_of_the_next_file_runs_at_once(monkeypatch, tmp_path):
    stored = Stored(monkeypatch, tmp_path, a=range(64), b=range(64, 80))
    events = []
    works = [stored.work("a", 1), TaskWork((0, 2), "evaluate"), stored.work("b", 3), Idle(0)]

    def ask():
        events.append("request")
        return works.pop(0) if works else Finished()

    feed = Feed(stored.data, 16, ask, [].append)
    feed.start()
    kinds = []
    while not isinstance(item := feed.get(SECONDS), Finished):
        kinds.append(type(item).__name__)
        if isinstance(item, TaskWork):
            assert feed.get(0.05) is None
            assert events == ["request"] * 2
            feed.task_finished()
    assert kinds == ["TaskWork", *["Ready"] * 4, "EndOfFile", "Ready", "EndOfFile"]


def test_fetched_but_unread_files_are_removed(monkeypatch, tmp_path):
    stored = Stored(monkeypatch, tmp_path, a=range(320), b=range(8), c=range(8))
    monkeypatch.setattr(feeds, "STOP_SECONDS", 0.01)
    works = iter([stored.work(name, n) for n, name in enumerate("abac")])
    void = {1}
    feed = Feed(
        stored.data,
        16,
        lambda: next(works, Finished()),
        [].append,
        holds=lambda work: work.token[1] not in void,
    )
    stored.gates["c"] = threading.Event()
    feed.start()
    assert stored.begins("b")
    read = []
    while 2 not in read:
        item = feed.get(SECONDS)
        assert isinstance(item, Ready | EndOfFile), item
        read.append(item.work.token[1])
    assert stored.begins("c")
    assert stored.fetched == list("abac")
    assert set(read) <= {0, 2}  # nothing of the revoked lease
    feed.stop()
    stored.gates["c"].set()
    assert stored.none_here(feed)


def test_failed_prefetch_is_retried_when_the_file_is_due(monkeypatch, tmp_path):
    monkeypatch.setattr(feeds, "FIRST_PAUSE", 0.0)
    stored = Stored(monkeypatch, tmp_path, a=range(20), b=range(20, 30))
    get = MemoryFileSystem.get_file
    errors = [None, RuntimeError("EndpointConnectionError"), TimeoutError("no answer"), None]

    def get_file(store, path, target):
        error = errors.pop(0)
        if error is not None:
            raise error
        get(store, path, target)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    works = iter([stored.work("a", 1), stored.work("b", 2), Idle(0)])
    messages = []
    items = items_of(Feed(stored.data, 16, lambda: next(works, Finished()), [].append, messages.append))
    assert [item.length for item in items if isinstance(item, EndOfFile)] == [20, 10]
    assert [words for words in messages if words and not callable(words)] == [
        "cannot read memory:///feed/b: EndpointConnectionError",
        "cannot read memory:///feed/b: no answer",
    ]


def test_finished_job_stops_reading_its_file(monkeypatch, tmp_path):
    stored = Stored(monkeypatch, tmp_path, a=range(10_000))
    works = iter([stored.work("a", 1)])
    assert len(items_of(Feed(stored.data, 16, lambda: next(works, Finished()), [].append))) == 0


def test_what_comes_next_is_known_once_it_is_read(monkeypatch):
    works = iter([DataWork((0, 1), 0, 0, None, "a", 0), Finished()])
    monkeypatch.setattr(feeds, "is_remote", lambda _: False)
    feed = Feed(Flaky("*", lambda _path: None).away_at([]), LENGTH, lambda: next(works), [].append)
    assert feed.upcoming() is None
    feed.start()
    feed._thread.join(SECONDS)
    upcoming = feed.upcoming()
    assert feed.get(SECONDS).batch is upcoming
    assert feed.upcoming() is None  # the end of the file is next
