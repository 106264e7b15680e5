"""Another order in every epoch, batches of other members, and the same sample at a position for every worker."""

import heapq
import random
import re
from itertools import pairwise
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal_trainer import Files, Indexed, Training, UserError
from shoal_trainer.coordinator.ledger import Ledger
from shoal_trainer.coordinator.ranges import Portion
from shoal_trainer.data.adapt import as_source
from shoal_trainer.data.batch import batches
from shoal_trainer.data.rows import count, rebatched
from shoal_trainer.data.shuffle import Blocks, LastBlock, shuffled
from shoal_trainer.data.source import Part
from shoal_trainer.worker.coordination import spec_of

DATA_PAGE = Path(__file__).parents[4] / "docs" / "data.md"


def rows(start, stop):
    for low in range(start, stop, 7):
        yield np.arange(low, min(low + 7, stop))


def order(size, start, stop, blocks, limit):
    def read(low, high):
        return rows(low, size if high is None else min(high, size))

    found = list(shuffled(read, start, stop, blocks, "x", limit))
    return np.concatenate(found).tolist() if found else []


@given(
    size=st.integers(1, 200),
    cuts=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    block=st.integers(2, 60),
    epoch=st.integers(0, 5),
    known=st.booleans(),
)
@settings(max_examples=examples(100), deadline=None)
def test_parts_of_an_epoch_are_the_whole_whoever_reads_them(size, cuts, block, epoch, known):
    blocks, limit = Blocks(block, (3, epoch)), size if known else None
    whole = order(size, 0, size, blocks, limit)
    assert sorted(whole) == list(range(size))
    a, b = sorted(min(cut, size) for cut in cuts)
    parts = [order(size, low, high, blocks, limit) for low, high in ((0, a), (a, b), (b, size)) if low < high]
    assert [n for part in parts for n in part] == whole
    if a < size and not known:  # a file whose length is unknown
        assert order(size, a, None, blocks, None) == whole[a:]


@given(
    size=st.integers(1, 200),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    block=st.integers(2, 60),
    epoch=st.integers(0, 5),
)
@settings(max_examples=examples(100), deadline=None)
def test_who_goes_on_where_it_ended_reads_each_sample_once(size, cuts, block, epoch):
    blocks, last, read = Blocks(block, (3, epoch)), LastBlock(), []

    def counted(low, high):
        read.append((low, high))
        return rows(low, high)

    found, ends = [], sorted({0, *(min(cut, size) for cut in cuts), size})
    for low, high in pairwise(ends):
        parts = shuffled(counted, low, high, blocks, "x", size, last=last)
        found += [int(row) for part in parts for row in part]
    assert found == order(size, 0, size, blocks, size)
    assert [low for low, _ in read] == [0, *(high for _, high in read[:-1])]
    assert read[-1][1] == size


def test_block_of_another_epoch_or_place_is_read_anew():
    last = LastBlock()
    for blocks in (Blocks(8, (3, 0)), Blocks(8, (3, 1)), Blocks(8, (4, 1))):
        for low, high in ((20, 24), (2, 6), (20, 24)):
            found = np.concatenate(list(shuffled(rows, low, high, blocks, "x", 30, last=last))).tolist()
            assert found == order(30, low, high, blocks, 30)


def numbered(start, stop):
    return tf.data.Dataset.range(start, stop).map(lambda n: (n, n))


@pytest.mark.parametrize(
    ("data", "block"),
    [
        (Indexed(4000, numbered), 1024),
        (Indexed(4000, numbered, shuffle=0), 0),
        (Indexed.from_arrays(np.zeros(4000), np.zeros(4000)), 0),
    ],
    ids=["blocks", "no shuffle", "arrays"],
)
def test_coordinator_is_told_what_is_read_together(data, block):
    weighed = Training(model=lambda: None, data=data, class_weight={0: 2.0, 1: 1.0})
    assert weighed.data.block == spec_of(weighed).block == block


@pytest.mark.parametrize(("workers", "times"), [(1, 3), (2, 4)])
def test_small_data_are_read_about_once_in_an_epoch(workers, times):
    """By leases of one batch, of blocks of 32: each was read for every lease in it."""
    read = []

    class Batches(keras.utils.PyDataset):
        num_batches = 62

        def __getitem__(self, index):
            read.append(index)
            return np.full((32, 1), index, np.float32), np.zeros(32, np.float32)

    sources, turn, trained = [as_source(Batches(), "data").placed(0) for _ in range(workers)], 0, []
    size, block = sources[0].describe().size, sources[0].block
    ledger = Ledger(size=size, files=0, batch_size=32, seed="s", epochs=1, block=block)
    read.clear()
    while (lease := ledger.grant((turn, 0), 1, Portion(32, 1 / workers))) is not None:
        _, _, start, stop = lease.segment
        for batch in sources[turn].read(Part(start, stop, 0), 32):
            trained += np.asarray(batch.x)[: batch.samples, 0].tolist()
        ledger.apply(lease.segment)
        turn = (turn + 1) % workers
    assert sorted(trained) == sorted(list(range(62)) * 32)
    assert len(read) <= times * 62


def times_read(size, workers, seed, epochs=3):
    """How often a sample is read in an epoch, by workers of about equal speed."""
    ledger = Ledger(size=size, files=0, batch_size=32, seed=f"s{seed}", epochs=epochs, block=1024)
    draw, read = random.Random(seed), 0

    def counted(low, high):
        nonlocal read
        read += high - low
        yield np.arange(low, high)

    kept, asks = [LastBlock() for _ in range(workers)], [(draw.random(), slot) for slot in range(workers)]
    while True:
        now, slot = heapq.heappop(asks)
        if (lease := ledger.grant((slot, 0), 1, Portion(32, 1 / workers))) is None:
            return read / size / epochs
        epoch, _, start, stop = lease.segment
        for _ in shuffled(counted, start, stop, Blocks(1024, (0, epoch)), "x", size, last=kept[slot]):
            pass
        ledger.apply(lease.segment)
        heapq.heappush(asks, (now + (stop - start) * draw.uniform(0.9, 1.1), slot))


@pytest.mark.parametrize("size", ["2,000", "16,000", pytest.param("1,000,000", marks=pytest.mark.nightly)])
def test_page_says_how_often_samples_are_read(size):
    [row] = re.findall(rf"^\| {size} \|(.*)\|$", DATA_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    said = [float(cell) for cell in row.split("|")]
    number = int(size.replace(",", ""))
    found = [np.mean([times_read(number, workers, seed) for seed in range(3)]) for workers in (1, 2, 4, 8)]
    assert found == pytest.approx(said, abs=0.06)


@given(sizes=st.lists(st.integers(1, 20), max_size=8), size=st.integers(1, 16))
def test_rebatching_keeps_all_rows_in_order(sizes, size):
    ends = np.cumsum([0, *sizes])
    elements = [{"a": np.arange(low, high)} for low, high in pairwise(ends)]
    found = list(rebatched(elements, size))
    assert [count(each) for each in found[:-1]] == [size] * (len(found) - 1)
    assert [int(n) for each in found for n in each["a"]] == list(range(ends[-1]))


def members(source, epoch, batch_size=16, **part):
    stop = source.describe().size
    found = [
        frozenset(np.asarray(batch.x)[: batch.samples].tolist())
        for batch in source.read(Part(0, stop, epoch, **part), batch_size)
    ]
    assert sorted(n for each in found for n in each) == list(range(256))
    return set(found)


@pytest.mark.parametrize("form", ["indexed", "files", "arrays", "items"])
def test_batches_have_other_members_in_each_epoch(form, tmp_path):
    part = {}
    if form == "files":
        (tmp_path / "a.txt").write_text("".join(f"{n}\n" for n in range(256)))
        source = Files(f"{tmp_path}/*", lambda path: tf.data.TextLineDataset(path).map(tf.strings.to_number))
        part = {"file": f"file://{tmp_path}/a.txt"}
    elif form == "indexed":
        source = Indexed(256, tf.data.Dataset.range)
    elif form == "items":
        source = Indexed.from_items(range(256))
    else:
        source = Indexed.from_arrays(np.arange(256))
    first, second = members(source, 0, **part), members(source, 1, **part)
    assert not first & second
    assert members(source, 0, **part) == first  # a lease that is worked on again
    assert members(source.placed(1), 0, **part) != first  # the job's seed
    own_order = next(source.read(Part(0, source.describe().size, None, **part), 16))
    assert np.array_equal(own_order.x, np.arange(16))


def test_shuffle_0_keeps_the_order_of_the_function():
    source = Indexed(64, tf.data.Dataset.range, shuffle=0)
    (batch,) = source.read(Part(0, 64, 3), 64)
    assert np.array_equal(batch.x, np.arange(64))


def test_large_samples_are_shuffled_in_small_blocks():
    calls = []

    def fn(start, stop):
        calls.append(stop - start)
        return tf.data.Dataset.range(start, stop).map(lambda _: tf.zeros((1 << 20,)))  # 4 MB

    assert next(Indexed(1000, fn).read(Part(500, 502, 1), 2)).samples == 2
    assert max(calls) <= 32


def test_function_that_yields_too_much_is_refused():
    source = Indexed(64, lambda start, _stop: tf.data.Dataset.range(start, 10_000))
    with pytest.raises(UserError, match="more than 64 samples"):
        list(source.read(Part(0, 64), 16))


def test_batch_larger_than_expected_is_refused():
    with pytest.raises(UserError, match="at most 4"):
        list(batches(iter([np.arange(8)]), 4, 0, None, "x"))
