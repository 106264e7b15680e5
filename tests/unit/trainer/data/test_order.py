"""The order of single samples in an epoch: exact, new in every epoch, and of any number of samples."""

import hashlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer import Indexed
from shoal_trainer.data import order
from shoal_trainer.data.adapt import as_source
from shoal_trainer.data.order import order_name, samples_at
from shoal_trainer.data.shuffle import Blocks
from shoal_trainer.data.source import Part


@pytest.fixture(params=[0, order.MOST_DRAWN], ids=["scattered", "drawn"])
def way(request, monkeypatch):
    monkeypatch.setattr(order, "MOST_DRAWN", request.param)


@pytest.mark.usefixtures("way")
@given(size=st.integers(1, 3000), seed=st.integers(0, 9), epoch=st.integers(0, 9), data=st.data())
def test_each_sample_is_at_one_position(size, seed, epoch, data):
    whole = samples_at(0, size, size, seed, epoch)
    assert sorted(whole.tolist()) == list(range(size))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    assert samples_at(start, stop, size, seed, epoch).tolist() == whole[start:stop].tolist()


@pytest.mark.usefixtures("way")
def test_an_order_is_as_good_as_drawn():
    size = 40_000
    own = np.arange(size)
    first, next_epoch, other_seed = (
        samples_at(0, size, size, *key).astype(float) for key in ((7, 3), (7, 4), (8, 3))
    )
    pairs = [(own, first), (first[1:], first[:-1]), (first, next_epoch), (first, other_seed)]
    for one, two in pairs:
        assert abs(np.corrcoef(one, two)[0, 1]) < 4 / size**0.5
    batches = first.reshape(-1, 40)
    assert batches.mean(1).std() == pytest.approx(size / 12**0.5 / 40**0.5, rel=0.1)
    places = [samples_at(0, 1, 1000, seed, epoch)[0] for seed in range(20) for epoch in range(50)]
    counts, _ = np.histogram(places, bins=10, range=(0, 1000))
    assert ((counts - 100) ** 2 / 100).sum() < 27.9  # 0.1 % of chi-squared with 9 degrees of freedom


class Huge:
    """A data set as Hugging Face's largest, of which one is never held."""

    def __len__(self):
        return 3_000_000_000

    def __getitem__(self, index):
        return np.int64(index % 7)


def test_data_of_any_size_need_no_memory_for_their_order():
    source = Indexed.from_items(Huge()).placed(5)
    tracemalloc.start()
    batch = next(source.read(Part(1_500_000_000, 1_500_000_064, 2), 64))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch.samples == 64
    assert peak < 8 << 20


def digest(values):
    return hashlib.sha256(np.asarray(values, "<i8").tobytes()).hexdigest()[:16]


def test_orders_stay_what_they_were_or_have_another_name():
    """A job that goes on with a newer image, or a newer numpy, continues its epoch at a position of it."""
    blocks = Blocks(100, (7, 3))
    found = {
        order_name(50_000): digest(samples_at(0, 50_000, 50_000, 7, 3)),
        order_name(5_000_000): digest(samples_at(4_900_000, 5_000_000, 5_000_000, 7, 3)),
        "blocks": digest([blocks.first, *blocks.order(blocks.first, 100)]),
    }
    assert found == {
        "": "3512db304bef6207",
        ", scattered": "9dce83728b9df706",
        "blocks": "fd56ca2bad70b070",
    }


@pytest.mark.parametrize("size", [1000, order.MOST_DRAWN + 1])
def test_workers_of_versions_that_order_samples_in_other_ways_are_told_apart(size):
    small = np.broadcast_to(np.float32(0), (size,))
    words = {
        as_source((small, small), "data").describe().order,
        Indexed.from_items(range(size)).describe().order,
    }
    assert {", scattered" in each for each in words} == {size > order.MOST_DRAWN}
