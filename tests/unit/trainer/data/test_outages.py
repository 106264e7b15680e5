"""A store that does not answer, at any moment and in any form of data, is waited for."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Indexed, Stream, Training
from shoal_trainer.data import stream as streams
from shoal_trainer.data.rows import count
from shoal_trainer.data.source import Part
from shoal_trainer.data.stream import SKIP_SECONDS
from shoal_trainer.errors import Unreachable
from shoal_trainer.worker import feed as feeds
from shoal_trainer.worker.feed import Feed, Ready
from shoal_trainer.worker.work import DataWork, Finished

X, Y = np.arange(128, dtype=np.float32).reshape(64, 2), np.arange(64) % 3
SECONDS = 120


class Store:
    """Answers, but for the calls of these numbers."""

    def __init__(self, *away):
        self.calls, self.away = 0, away

    def get(self, value):
        self.calls += 1
        if self.calls - 1 in self.away:
            raise ConnectionResetError("reset by peer")
        return value


def rows_of(store):
    def batches():
        for low in range(0, 64, 4):
            yield store.get(X[low : low + 4]), Y[low : low + 4]

    return batches


def data_set(store):
    def batch(number):
        low = int(number) * 4
        return store.get(X[low : low + 4])

    return tf.data.Dataset.range(16).map(
        lambda number: (tf.ensure_shape(tf.py_function(batch, [number], tf.float32), (None, 2)), number[None])
    )


class FromStore(keras.utils.PyDataset):
    def __init__(self, store):
        super().__init__()
        self.store = store

    @property
    def num_batches(self):
        return 16

    def __getitem__(self, index):
        return self.store.get(X[index * 4 : index * 4 + 4]), Y[index * 4 : index * 4 + 4]


class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return index


OUT_OF_STORE = {
    "generator": lambda store: Stream(rows_of(store), samples=64),
    "generator with a seed": lambda store: Stream(lambda _seed: rows_of(store)(), samples=64),
    "tf.data": lambda store: Stream(data_set(store), samples=64),
    "PyDataset": lambda store: Training(model=lambda: None, data=FromStore(store)).data,
    "parse": lambda store: Indexed.from_items(Rows(), lambda row: (store.get(X[row]), Y[row])),
    "parse with lengths": lambda store: Indexed.from_items(
        Rows(), lambda row: (store.get(X[row]), Y[row]), lengths=[2, 4]
    ),
}


@pytest.mark.by_day(15)
@pytest.mark.parametrize("number", range(0, 30, 3))
@pytest.mark.parametrize("form", OUT_OF_STORE)
def test_an_outage_at_any_moment_is_retried(form, number):
    """Before it has joined, a worker describes its data and reads an example; then its feed reads what is leased."""
    store = Store(number, number + 1)
    data = OUT_OF_STORE[form](store)
    failed = 0

    def again(call):
        nonlocal failed
        while True:
            try:
                return call()
            except Unreachable:
                failed += 1

    placed = again(lambda: data.placed(0, (1, 0)))
    assert again(placed.describe).size == 64
    again(lambda: placed.example(8))
    end = 0

    def read():
        nonlocal end
        for batch in placed.read(Part(end, 64), 8):
            end = batch.end

    again(read)
    assert end == 64
    assert (
        store.calls <= number or failed or form == "tf.data"
    )  # which reads ahead, also of what nobody takes


def test_after_an_outage_a_stream_goes_on_where_it_was():
    rows = [(X[low : low + 4], Y[low : low + 4]) for low in range(0, 64, 4)]
    store = Store(5)
    stream = Stream(lambda: ((store.get(x), y) for x, y in rows), samples=64).placed(0, (0, 0))
    assert [batch.samples for batch in itertools.islice(stream.read(Part(0, 64), 4), 5)] == [4] * 5
    with pytest.raises(Unreachable):
        next(stream.read(Part(20, 64), 4))
    assert np.array_equal(next(stream.read(Part(20, 64), 4)).x, rows[5][0])


def test_a_run_that_continues_another_one_goes_on_where_it_was_after_an_outage():
    """In an epoch after that in which it began."""
    rows = [(X[low : low + 4], Y[low : low + 4]) for low in range(0, 64, 4)]
    store = Store(10)
    stream = Stream(lambda: ((store.get(x), y) for x, y in rows), samples=16).placed(0, (0, 0, 5))
    read = [batch.x for batch in stream.read(Part(0, 16, 1), 4)]
    read += [next(stream.read(Part(0, 16, 2), 4)).x, next(stream.read(Part(4, 16, 2), 4)).x]
    with pytest.raises(Unreachable):
        next(stream.read(Part(8, 16, 2), 4))
    read += [batch.x for batch in stream.read(Part(8, 16, 2), 4)]
    assert np.array_equal(np.concatenate(read), X[16:48])


class Slow(keras.utils.PyDataset):
    """Data without an end, each batch of which takes time, by the clock of the stream."""

    num_batches = None

    def __init__(self, monkeypatch, *away):
        super().__init__()
        self.now, self.store = 0.0, Store(*away)
        monkeypatch.setattr(streams.time, "monotonic", lambda: self.now)

    def __getitem__(self, index):
        self.now += SKIP_SECONDS / 15
        rows = slice(index % 16 * 4, index % 16 * 4 + 4)
        return self.store.get(X[rows]), Y[rows]

    def ending(self):
        """The same with an end, of which only reading tells."""
        return map(self.__getitem__, range(16))


@pytest.mark.parametrize("endless", [False, True])
def test_after_an_outage_no_more_is_skipped_than_one_pass(monkeypatch, endless):
    """Not all that was read since the start: the time would be over, somewhere else."""
    slow = Slow(monkeypatch, 165)
    stream = Stream(slow if endless else slow.ending, samples=64).placed(0, (0, 0))
    for epoch in range(10):
        list(stream.read(Part(0, 64, epoch), 4))
    for low in range(0, 20, 4):
        next(stream.read(Part(low, 64, 10), 4))
    with pytest.raises(Unreachable):
        next(stream.read(Part(20, 64, 10), 4))
    began = slow.now
    assert np.array_equal(next(stream.read(Part(20, 64, 10), 4)).x, X[20:24])
    assert slow.now - began < SKIP_SECONDS


class Watched(streams._Rows):
    """Counts what is skipped or taken."""

    read, away = 0, False

    def skip(self, rows):
        found = super().skip(rows)
        Watched.read += count(found)
        return found

    def take(self, rows):
        if Watched.away:
            Watched.away = False
            raise Unreachable("away")
        return super().take(rows)


@pytest.mark.parametrize("made", [False, True], ids=["data set", "function"])
@pytest.mark.parametrize("continued", [(), (5,)])
def test_after_an_outage_of_endless_data_no_more_is_skipped_than_one_epoch(monkeypatch, made, continued):
    """Nor once more what the run before has read."""
    monkeypatch.setattr(streams, "_Rows", Watched)
    data = tf.data.Dataset.range(64).batch(4).repeat()
    stream = Stream((lambda: data) if made else data, samples=64).placed(0, (0, 0, *continued))
    for epoch in range(40, 50):
        list(stream.read(Part(0, 64, epoch), 4))
    Watched.away, before = True, Watched.read
    with pytest.raises(Unreachable):
        next(stream.read(Part(0, 64, 50), 4))
    assert int(next(stream.read(Part(0, 64, 50), 4)).x[0]) == 0
    assert Watched.read - before <= 64 + 4


def places(data, samples, *continued):
    """What four workers read first in epoch 40."""
    placed = [Stream(data, samples=samples).placed(0, (slot, 0, *continued)) for slot in range(4)]
    return [float(next(stream.read(Part(0, 4, 40), 4)).x[0, 0]) for stream in placed]


def test_workers_of_a_run_that_continues_another_one_begin_apart_in_short_passes(monkeypatch):
    """Though nobody skips in time all that the run before has read."""
    monkeypatch.setattr(streams, "SKIP_SECONDS", 3 * SKIP_SECONDS)
    data = Slow(monkeypatch).ending
    assert places(data, 64, 5) == places(data, 64)


def test_workers_of_a_run_that_continues_another_one_begin_apart_in_endless_data(monkeypatch):
    """Where the time is over before they have skipped what the run before has read."""
    assert len(set(places(Slow(monkeypatch), 32, 5))) == 4


def test_an_outage_within_a_batch_loses_no_row_of_it():
    rows = [(X[low : low + 4], Y[low : low + 4]) for low in range(0, 64, 4)]
    store = Store(5)
    stream = Stream(lambda: ((store.get(x), y) for x, y in rows), samples=64).placed(0, (0, 0))
    read = [next(stream.read(Part(low, 64), 8)).x for low in (0, 8)]
    with pytest.raises(Unreachable):
        next(stream.read(Part(16, 64), 8))
    read += [batch.x for batch in stream.read(Part(16, 64), 8)]
    assert np.array_equal(np.concatenate(read), X[:64])


def test_a_pydataset_is_not_read_before_it_is_asked_for_and_each_batch_once():
    store = Store()
    data = Training(model=lambda: None, data=FromStore(store)).data
    assert store.calls == 0
    placed = data.placed(7)
    assert (data.describe().size, placed.describe().size, store.calls) == (64, 64, 6)
    assert data.placed(8).describe().size == 64
    assert store.calls == 6


@pytest.mark.parametrize("form", ["generator", "tf.data"])
def test_the_feed_of_a_stream_outlives_an_outage(monkeypatch, form):
    monkeypatch.setattr(feeds, "FIRST_PAUSE", 0.0)
    works = iter([DataWork((1, 1), 0, 0, 40), Finished()])
    feed = Feed(OUT_OF_STORE[form](Store(3, 6)).placed(0), 4, lambda: next(works), lambda _work: None)
    feed.start()
    items = [feed.get(SECONDS) for _ in range(11)]
    assert all(isinstance(item, Ready) for item in items[:10]), items
    assert isinstance(items[10], Finished)
