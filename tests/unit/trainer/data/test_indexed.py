"""Indexed data: order, ranges, short batches, weights, and errors of the data function."""

import h5py
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_trainer import Indexed, UserError
from shoal_trainer.data.batch import fill
from shoal_trainer.data.source import Part
from shoal_trainer.errors import Unreachable


def numbers(start, stop):
    return tf.data.Dataset.range(start, stop).map(lambda n: (tf.cast(n, tf.float32), n % 10))


def seen(batches):
    return [int(value) for batch in batches for value in np.asarray(batch.x)[: batch.samples]]


@given(size=st.integers(1, 300), cut=st.integers(0, 300), batch=st.integers(1, 64), epoch=st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_interrupted_range_is_continued_exactly(size, cut, batch, epoch):
    cut = min(cut, size)
    data = Indexed.from_arrays(np.arange(size))
    first = seen(data.read(Part(0, cut, epoch), batch))
    rest = seen(data.read(Part(cut, size, epoch), batch))
    assert sorted(first + rest) == list(range(size))
    assert first + rest == seen(data.read(Part(0, size, epoch), batch))


def test_order_differs_by_epoch_and_is_the_same_in_all_processes():
    data, other = Indexed.from_arrays(np.arange(100)), Indexed.from_arrays(np.arange(100))
    orders = [seen(data.read(Part(0, 100, epoch), 32)) for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert orders[1] == seen(other.read(Part(0, 100, 1), 32))


@given(samples=st.integers(1, 16), size=st.integers(16, 20))
def test_short_batch_keeps_its_shape_and_mean(samples, size):
    x = np.arange(1, samples + 1, dtype=np.float32)
    batch = fill((x, {"a": x}), size, 7)
    assert batch.x.shape == batch.y["a"].shape == batch.weights.shape == (size,)
    assert batch.samples == samples
    assert np.sum(batch.x * batch.weights) / size == pytest.approx(x.mean(), rel=1e-5)


def test_full_batch_has_unit_weights_and_is_not_copied():
    x = np.arange(8)
    batch = fill(x, 8, 8)
    assert batch.x is x
    assert np.all(batch.weights == 1)


def test_user_weights_are_kept():
    batch = fill((np.ones(2), np.ones(2), np.array([1.0, 3.0])), 4, 2)
    assert list(batch.weights) == [2, 6, 0, 0]


def test_function_range_is_batched():
    batches = list(Indexed(100, numbers, shuffle=0).read(Part(30, 95), 32))
    assert [b.samples for b in batches] == [32, 32, 1]
    assert [b.end for b in batches] == [62, 94, 95]
    assert seen(batches) == list(range(30, 95))


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda a, b: numbers(a, b - 5), "only 59 samples instead of 64"),
        (lambda a, b: numbers(a, b + 5), "more than 64 samples"),
        (lambda a, b: numbers(a, b).batch(8), "only 8 samples"),
        (lambda a, b: numbers(a, b).repeat(), "more than 64 samples"),
        (lambda _a, _b: [1, 2], "must return a tf.data.Dataset; it returned list"),
        (lambda a, b: numbers(a, b).map(lambda x, y: (x, y, x, y)), "tuples of length 4"),
    ],
)
def test_invalid_data_function_is_a_user_error(fn, words):
    with pytest.raises(UserError, match=words):
        list(Indexed(64, fn).read(Part(0, 64), 16))


def test_invalid_sizes_are_refused():
    with pytest.raises(UserError, match="at least one sample"):
        Indexed(0, numbers)
    with pytest.raises(UserError, match=r"different numbers of samples: \[3, 4\]"):
        Indexed.from_arrays(np.ones(3), np.ones(4))


def a_series(values):
    shuffled = np.random.default_rng(0).permutation(len(values))
    return pd.Series(values, index=shuffled)


def in_a_file(values):
    return h5py.File.in_memory().create_dataset("values", data=values)


@pytest.mark.parametrize("made", [a_series, tf.constant, in_a_file, np.asarray])
def test_array_likes_give_rows_by_position(made):
    x = np.arange(40)
    data = Indexed.from_arrays({"a": x, "b": made(-x)}, made(2 * x))
    for batch in data.read(Part(0, 40, 1), 16):
        assert np.array_equal(np.ravel(batch.x["b"]), -batch.x["a"])  # a Series becomes a column
        assert np.array_equal(np.ravel(batch.y), 2 * batch.x["a"])


def test_table_becomes_an_array_and_memmap_stays_mapped(tmp_path):
    table = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]}, index=[7, 3])
    assert np.array_equal(Indexed.from_arrays(table).x, [[1, 3], [2, 4]])
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(4, 2))
    assert Indexed.from_arrays(mapped).x is mapped


@pytest.mark.parametrize("given", [[1, 2, 3], [[0.5], [1.0], [2.0]], ["a", "b", "c"], 3.0])
def test_list_of_numbers_is_refused(given):
    with pytest.raises(UserError, match=r"np\.asarray\(y\)"):
        Indexed.from_arrays(np.ones(3), given)


@pytest.mark.parametrize("weights", [(np.full(64, 2.0), None), (None, np.full(64, 2.0)), (None, None)])
def test_an_output_without_weights_among_others_counts_each_sample_alike(weights):
    (batch,) = Indexed.from_arrays(np.arange(64), (np.ones(64), np.ones(64)), weights).read(Part(0, 5), 8)
    for found, weighed in zip(batch.weights, weights, strict=True):
        each = 8 / 5 if weighed is None else 2 * 8 / 5
        assert np.allclose(found, [each] * 5 + [0] * 3)
    assert batch.size == 8


def test_weights_per_output_and_per_token_are_kept():
    weights = {"a": np.arange(64.0), "b": np.ones((64, 3))}
    (batch,) = Indexed.from_arrays(np.arange(64), np.ones(64), weights).read(Part(0, 5), 8)
    assert np.allclose(batch.weights["a"][:5], batch.x[:5] * 8 / 5)
    assert batch.weights["b"].shape == (8, 3)
    assert not batch.weights["b"][5:].any()
    assert np.allclose(batch.as_given()[2]["a"], batch.x[:5])


def failing(error):
    def rows():
        yield 1.0
        raise error

    return lambda *_: tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec((), tf.float32))


def raising(error):
    def fn(*_):
        raise error

    return fn


@pytest.mark.parametrize("made", [failing, raising])
@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(104, "reset"),
        TimeoutError("late"),
        ConnectionError("x"),
        OSError(5, "Input/output error"),
    ],
)
def test_network_error_in_a_data_function_is_unreachable(made, error):
    with pytest.raises(Unreachable, match="samples 16-64: "):
        list(Indexed(64, made(error)).read(Part(16, 64), 1))


@pytest.mark.parametrize("kind", [tf.errors.UnavailableError, tf.errors.DeadlineExceededError])
def test_tensorflow_outage_in_a_data_function_is_unreachable(kind):
    with pytest.raises(Unreachable, match="samples 0-64: Socket closed"):
        list(Indexed(64, raising(kind(None, None, "Socket closed"))).read(Part(0, 64), 1))


@pytest.mark.parametrize("made", [failing, raising])
@pytest.mark.parametrize("error", [PermissionError(13, "denied"), KeyError("label"), ValueError("x")])
def test_other_data_function_errors_are_raised_unchanged(made, error):
    with pytest.raises((type(error), tf.errors.OpError)):
        list(Indexed(64, made(error)).read(Part(0, 64), 1))
