"""What the thread that reads ahead does where the data are away, and beside a task."""

import logging

import numpy as np
import pytest

from shoal_trainer import Files
from shoal_trainer.data.batch import Batch
from shoal_trainer.errors import Unreachable
from shoal_trainer.worker import feed as feeds
from shoal_trainer.worker.feed import EndOfFile, Feed, Ready
from shoal_trainer.worker.work import DataWork, Finished, TaskWork

SECONDS = 40
LENGTH = 50


class Flaky(Files):
    """Files of `LENGTH` samples in a store that is away for a while before each of these positions."""

    def away_at(self, positions):
        object.__setattr__(self, "positions", list(positions))
        return self

    def batches(self, name, start, stop, batch_size):
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
def test_reading_goes_on_where_it_ended_when_the_store_is_back(monkeypatch, caplog, positions, start, stop):
    monkeypatch.setattr(feeds, "RETRY_SECONDS", 0.0)
    work = DataWork((0, 1), 0, start, stop, "a", 0)
    given = iter([work, Finished()])
    data = Flaky("*", lambda _path: None).away_at(positions)
    with caplog.at_level(logging.WARNING):
        items = items_of(Feed(data, 16, lambda: next(given), [].append))
    assert not data.positions
    batches = [item for item in items if isinstance(item, Ready)]
    assert np.array_equal(np.concatenate([ready.batch.x for ready in batches]), np.arange(start, LENGTH))
    assert all(item.work is work for item in items)
    assert items[len(batches) :] == ([] if stop else [EndOfFile(work, LENGTH)])
    assert len(caplog.records) == len(set(positions))  # once an outage


def test_nothing_is_asked_for_beside_a_task(monkeypatch):
    monkeypatch.setattr(feeds, "STOP_SECONDS", 0.001)
    story = []
    given = iter([TaskWork((0, 1), "evaluate"), TaskWork((0, 2), "callbacks"), Finished()])

    def ask():
        story.append("asked")
        return next(given)

    feed = Feed(Flaky("*", lambda _path: None), 16, ask, [].append)
    feed.start()
    for kind in ("evaluate", "callbacks"):
        assert feed.get(SECONDS).kind == kind
        assert feed.get(0.05) is None
        story.append(kind)
        feed.go_on()
    assert isinstance(feed.get(SECONDS), Finished)
    feed._thread.join(SECONDS)
    assert story == ["asked", "evaluate", "asked", "callbacks", "asked"]


def test_a_feed_that_waits_for_a_task_hears_that_it_is_to_stop(monkeypatch):
    monkeypatch.setattr(feeds, "STOP_SECONDS", 0.001)
    feed = Feed(Flaky("*", lambda _path: None), 16, lambda: TaskWork((0, 1), "evaluate"), [].append)
    feed.start()
    assert isinstance(feed.get(SECONDS), TaskWork)
    feed.stop()
    feed._thread.join(SECONDS)
    assert not feed._thread.is_alive()


def test_a_feed_that_is_told_to_stop_does_not_wait_for_the_store():
    away = Flaky("*", lambda _path: None).away_at([0] * 10**6)
    feed = Feed(away, 16, lambda: DataWork((0, 1), 0, 0, None, "a", 0), [].append)
    feed.start()
    feed.stop()
    feed._thread.join(SECONDS)
    assert not feed._thread.is_alive()


class Pauses:
    """An event that nobody sets; it is waited for in no time."""

    def __init__(self):
        self.waited = []

    def is_set(self):
        return False

    def wait(self, seconds):
        self.waited.append(seconds)


def test_it_pauses_longer_and_longer_and_says_what_it_cannot_read():
    data = Flaky("*", lambda _path: None).away_at([0] * 10 + [16] * 2)
    said = []
    feed = Feed(data, 16, Finished, [].append, said.append)
    feed._stop = Pauses()
    ends = []
    for item in feed._read(DataWork((0, 1), 0, 0, None, "s3://bucket/part-3", 0)):
        ends.append(item.batch.end if isinstance(item, Ready) else item.length)
        assert said.pop() == ""
        assert set(said) <= {"cannot read s3://bucket/part-3: no answer"}
        said.clear()
    assert ends == [16, 32, 48, LENGTH, LENGTH]
    assert feed._stop.waited == [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30, 30, 0.25, 0.5]


def test_it_says_nothing_of_a_file_without_samples_once_that_is_read():
    said = []
    feed = Feed(Flaky("*", lambda _path: None).away_at([LENGTH]), 16, Finished, [].append, said.append)
    feed._stop = Pauses()
    assert len(list(feed._read(DataWork((0, 1), 0, LENGTH, None, "a", 0)))) == 1
    assert said == ["cannot read a: no answer", ""]
