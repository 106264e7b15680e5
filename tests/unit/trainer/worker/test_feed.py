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
