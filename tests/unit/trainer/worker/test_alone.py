"""`fit` in a script visits the data in the order of the ledger, as a single worker does."""

import uuid

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal_trainer import Files, Indexed, Stream, Training
from shoal_trainer.contract import JobIdentity, StopAfter
from shoal_trainer.coordinator.record import Record
from shoal_trainer.worker.alone import Visits
from shoal_trainer.worker.coordination import spec_of
from tests.unit.trainer.worker.models import tracking


def seen(batches):
    return [int(row) for batch in batches for row in np.asarray(batch.x)[: batch.samples]]


def as_leased(training, batch_size):
    """The first epoch as the coordinator of a job leases it."""
    identity = JobIdentity(namespace="n", name="n", uid=str(uuid.uuid4()))
    ledger = Record(identity, StopAfter(epochs=1), batch_size, 1).blank_ledger(spec_of(training))
    while (lease := ledger.grant((0, 0), 0)) is not None:
        yield lease.segment


@given(size=st.integers(1, 200), batch_size=st.integers(1, 16), seed=st.integers(0, 3))
@settings(max_examples=examples(12), deadline=None)
def test_ranges_are_visited_in_ledger_order(size, batch_size, seed):
    data = Indexed(size, tf.data.Dataset.range, shuffle=0)
    training = Training(model=lambda: None, data=data, seed=seed)
    visit = Visits(training, batch_size)
    leased = as_leased(training, batch_size)
    assert seen(visit(0)) == [row for segment in leased for row in range(segment.start, segment.stop)]
    assert sorted(seen(visit(1))) == list(range(size))


def test_samples_of_a_range_are_in_the_order_of_the_seed_of_the_job():
    """The order of the ranges is of the seed as well: here is one."""

    def first_batch(seed, own=None):
        data = Indexed.from_arrays(np.arange(64), seed=own)
        return seen(Visits(Training(model=lambda: None, data=data, seed=seed), 64)(0))

    assert first_batch(0) == first_batch(0) != first_batch(1)
    assert first_batch(0, own=5) == first_batch(1, own=5)


@pytest.mark.nightly
def test_files_are_visited_in_ledger_order_that_differs_by_epoch(tmp_path):
    for number in range(12):
        (tmp_path / f"{number:02}.txt").write_text(f"{number}\n")
    files = Files(f"{tmp_path}/*", lambda path: tf.data.TextLineDataset(path).map(tf.strings.to_number))
    training = Training(model=lambda: None, data=files, seed=7)
    visit = Visits(training, 4)
    orders = [seen(visit(epoch)) for epoch in range(3)]
    assert orders[0] == [segment.file for segment in as_leased(training, 4)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert seen(visit(0)) == orders[0]


def test_fit_shuffles_training_but_not_validation_data():
    calls = []

    def fn(start, stop):
        calls.append((start, stop))
        return tf.data.Dataset.range(start, stop).map(lambda n: (tf.cast(n, tf.float32)[None], 0.0))

    def model():
        network = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        network.compile(keras.optimizers.SGD(0.0), "mse")
        return network

    judged = []

    def validation(start, stop):
        judged.append((start, stop))
        return fn(start, stop)

    Training(model=model, data=Indexed(24, fn, shuffle=0)).fit(epochs=2, batch_size=2, verbose=0)
    ranges = [call for call in calls if call[1] - call[0] == 2][1:]  # the first call was to build the model
    assert len(ranges) == 24
    assert ranges[:12] != ranges[12:]
    assert sorted(ranges[:12]) == sorted(ranges[12:]) == [(n, n + 2) for n in range(0, 24, 2)]
    Training(model=model, data=Indexed(24, fn, shuffle=0), validation=Indexed(64, validation)).fit(
        batch_size=2, verbose=0
    )
    assert set(judged) == {(0, 64)}


def tokens(sizes):
    rows = [(np.full(size, size % 5, np.int32), np.full(size, size % 3)) for size in sizes]
    return Indexed.from_items(rows, lengths=[3, 8])


@pytest.mark.by_day(1)
@pytest.mark.parametrize("inputs", [True, False], ids=["Input", "no Input"])
@pytest.mark.parametrize("sizes", [[2] * 16 + [7] * 13, [7] * 16 + [2] * 13])
def test_fit_takes_samples_of_several_lengths(sizes, inputs):
    def tagger():
        parts = [keras.layers.Embedding(5, 2), keras.layers.Dense(3, activation="softmax")]
        network = keras.Sequential([keras.Input((None,), dtype="int32"), *parts] if inputs else parts)
        network.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return network

    data = tokens(sizes)
    history = (
        Training(model=tagger, data=data, validation=data).fit(epochs=2, batch_size=8, verbose=0).history
    )
    assert np.isfinite([*history.history["loss"], *history.history["val_loss"]]).all()


def test_fit_knows_by_name_which_input_varies():
    """The one of the model that comes last, and the first one of the data by name."""

    def tagger():
        lengths, ages = keras.Input((None,), name="ids"), keras.Input((5,), name="zip")
        pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Reshape((-1, 1))(lengths))
        network = keras.Model(
            [ages, lengths], keras.layers.Dense(1)(keras.layers.Concatenate()([pooled, ages]))
        )
        network.compile("sgd", "mse")
        return network

    rows = [({"ids": np.ones(size), "zip": np.ones(5)}, np.float32(size)) for size in [2, 7] * 8]
    data = Indexed.from_items(rows, lengths=[3, 8])
    history = Training(model=tagger, data=data, validation=data).fit(batch_size=8, verbose=0).history.history
    assert np.isfinite([*history["loss"], *history["val_loss"]]).all()


@pytest.mark.nightly
def test_fit_takes_images_of_several_sizes():
    layers = keras.layers

    def pooled():
        parts = [layers.Conv2D(2, 1), layers.GlobalAveragePooling2D(), layers.Dense(1)]
        network = keras.Sequential([keras.Input((None, None, 3)), *parts])
        network.compile("sgd", "mse")
        return network

    def images():
        for size, rows in ((3, 8), (4, 8), (5, 8), (6, 3)):
            yield np.ones((rows, size, size, 3), np.float32), np.ones((rows, 1), np.float32)

    data = Stream(images, samples=27)
    Training(model=pooled, data=data, validation=data).fit(epochs=2, batch_size=8, verbose=0)


ROWS = np.arange(70, dtype=np.float32)


def linear():
    network = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    network.compile(keras.optimizers.SGD(0.0), "mse")
    return network


def in_batches():
    return tf.data.Dataset.from_tensor_slices((ROWS[:, None], ROWS)).batch(7)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("form", ["arrays", "stream", "range"])
def test_fit_makes_a_step_per_batch(form):
    """Of a data set of unknown length, Keras would count another one per epoch."""
    data = {
        "arrays": (ROWS[:, None], ROWS),
        "stream": Stream(in_batches()),
        "range": Indexed(70, lambda a, b: tf.data.Dataset.from_tensor_slices((ROWS[a:b, None], ROWS[a:b]))),
    }[form]
    trained = Training(model=linear, data=data).fit(epochs=2, batch_size=8, verbose=0)
    assert int(trained.optimizer.iterations) == 2 * 9


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        rows = ROWS[7 * index : 7 * index + 7]
        return rows[:, None], rows


@pytest.mark.by_day(1)
@pytest.mark.parametrize("form", ["dataset", "weighed", "generator", "pydataset", "arrays"])
def test_fit_trains_the_batches_of_the_data_if_no_size_is_named(form):
    data = {
        "dataset": in_batches(),
        "weighed": in_batches(),
        "generator": Stream(lambda: iter(in_batches()), samples=70),
        "pydataset": Sequence(),
        "arrays": (ROWS[:, None], ROWS),
    }[form]
    job = Training(model=linear, data=data, class_weight={0: 2.0} if form == "weighed" else None)
    assert int(job.fit(verbose=0).optimizer.iterations) == (3 if form == "arrays" else 10)


class Recorder(keras.Model):
    """Trains nothing, and keeps the samples of each step."""

    def __init__(self, steps):
        super().__init__()
        self.keep = steps.append

    def train_step(self, data):
        self.keep(np.ravel(data[0] if isinstance(data, tuple) else data).astype(int).tolist())
        return {"loss": tf.constant(0.0)}


def recorder(steps):
    model = Recorder(steps)
    model.compile(run_eagerly=True)
    return model


def numbered(*sizes):
    """A data set of batches with so many rows."""

    def rows():
        end = 0
        for size in sizes:
            yield np.arange(end, end + size, dtype=np.float32)[:, None]
            end += size

    dataset = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec((None, 1), tf.float32))
    return dataset.apply(tf.data.experimental.assert_cardinality(len(sizes)))


IN_BATCHES = {
    "a remainder": lambda: tf.data.Dataset.range(100).batch(32),
    "whole batches": lambda: tf.data.Dataset.range(64).batch(32),
    "repeated": lambda: tf.data.Dataset.range(40).batch(32).repeat(2),
    "a short first batch": lambda: numbered(4, 32, 32, 32),
    "longer ones later": lambda: numbered(4, 4, 32),
}


@pytest.mark.parametrize("form", IN_BATCHES)
def test_fit_makes_the_steps_of_keras_in_each_epoch_of_a_data_set(form):
    dataset, expected, steps = IN_BATCHES[form](), [], []
    recorder(expected).fit(dataset, epochs=3, verbose=0, shuffle=False)
    Training(model=lambda: recorder(steps), data=dataset).fit(epochs=3, verbose=0)
    assert steps == expected


@pytest.mark.parametrize("sizes", [(0, 4, 4), (4, 0, 4), (4, 4, 0)])
def test_fit_leaves_a_batch_without_rows_out(sizes):
    steps = []
    Training(model=lambda: recorder(steps), data=numbered(*sizes)).fit(epochs=2, verbose=0)
    assert steps == 2 * [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_fit_leaves_out_a_batch_that_a_function_has_emptied():
    """The number of batches was promised to Keras, whose error said nothing of the cause."""

    def small(x):
        return tf.boolean_mask(x, (x < 4) | (x > 7))

    steps = []
    dataset = tf.data.Dataset.range(12).batch(4).map(small)
    Training(model=lambda: recorder(steps), data=dataset).fit(epochs=2, verbose=0)
    assert steps == 2 * [[0, 1, 2, 3], [8, 9, 10, 11]]


def test_fit_refuses_a_fraction_where_the_first_batch_has_whole_numbers():
    """As a worker does: TensorFlow would train 0 in its place."""
    rows = [([1, 2], 0.0)] * 4 + [([0.5, 0.25], 1.0)] * 4
    data = Indexed.from_items(rows, lengths=[4])
    with pytest.raises(TypeError, match=r"0\.5 cannot be int64, the type in the first batch"):
        Training(model=lambda: recorder([]), data=data).fit(epochs=1, batch_size=1, verbose=0)


@pytest.mark.parametrize("other", [{"b": np.full(4, 0.5)}, {"a": np.ones(4, int)}])
def test_fit_names_the_parts_of_a_batch_that_has_others(other):
    """Not those of another part, at whose place one stands."""
    x, first = np.ones((4, 3), np.float32), {"a": np.ones(4, int), "b": np.full(4, 0.5)}
    data = Stream(lambda: iter([(x, first), (x, other)]), samples=8)
    with pytest.raises(tf.errors.InvalidArgumentError, match="did not match the expected structure"):
        Training(model=lambda: recorder([]), data=data).fit(epochs=1, batch_size=4, verbose=0)


def test_fit_trains_a_data_set_of_samples_once_in_each_epoch():
    steps = []
    dataset = tf.data.Dataset.range(70)
    Training(model=lambda: recorder(steps), data=dataset).fit(epochs=2, batch_size=32, verbose=0)
    assert steps == 2 * [[*range(32)], [*range(32, 64)], [*range(64, 70)]]


@pytest.mark.parametrize("data", [tf.data.Dataset.range(100).batch(32), numbered(*[32] * 3, 4)])
def test_fit_goes_on_in_a_stream_where_the_epoch_before_has_ended(data):
    """Also over its end; nothing that is read ahead is lost."""
    steps = []
    Training(model=lambda: recorder(steps), data=Stream(data, samples=64)).fit(epochs=3, verbose=0)
    assert [row for step in steps for row in step] == [n % 100 for n in range(192)]
    assert [len(step) for step in steps] == [32] * 6


def test_fit_trains_every_sample_of_batches_of_several_shapes():
    """Which cannot be joined, so there are more of them than samples tell."""

    def batches():
        for size in (2, 3, 4, 5):
            yield np.full((8, size), size, np.float32)

    steps = []
    data = Stream(batches, samples=32)
    Training(model=lambda: recorder(steps), data=data).fit(epochs=2, batch_size=5, verbose=0)
    assert [step[0] for step in steps] == 2 * [2, 2, 3, 3, 4, 4, 5, 5]


def spec(x, y=None, *, seed=0, own=None):
    return spec_of(Training(model=lambda: None, data=Indexed.from_arrays(x, y, seed=own), seed=seed))


def test_workers_tell_each_other_what_decides_which_sample_is_at_a_position():
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    assert not spec(x).differing(spec(x))
    assert spec(x, seed=1).order != spec(x).order
    assert spec(x, seed=1, own=5).order == spec(x, seed=2, own=5).order
    stream = Stream(tf.data.Dataset.range(8).batch(2), samples=8)
    assert spec_of(Training(model=lambda: None, data=stream)).order == ""


@pytest.mark.parametrize("kind", ["features", "labels", "text", "pictures"])
def test_another_split_is_other_samples_and_another_rounding_is_not(kind):
    random = np.random.default_rng(0)
    x = {
        "features": random.normal(size=(1000, 3)),
        "labels": np.eye(10)[random.integers(10, size=1000)],
        "text": np.array([f"sentence {i}" for i in range(1000)]),
        "pictures": random.integers(0, 256, size=(1000, 8, 8, 3), dtype=np.uint8),
    }[kind]
    first, second = (np.random.default_rng(seed).permutation(1000)[:800] for seed in (1, 2))
    assert spec(x[first]).differing(spec(x[second]))
    if kind == "features":
        assert not spec(x[first]).differing(spec((x[first] * (1 + 1e-6)).astype(np.float32)))


@pytest.mark.parametrize("known", [True, False])
def test_fit_counts_each_batch_once_in_the_means_that_a_model_tracks(known, tmp_path):
    """In training and validation data of known length, and of a length that only reading tells."""
    rows = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    for part in range(3):
        np.save(tmp_path / f"{part}.npy", rows[4 * part : 4 * part + 4])

    def dataset(path):
        return tf.data.Dataset.from_tensor_slices(np.load(path))

    data = Indexed.from_arrays(rows) if known else Files(f"{tmp_path}/*.npy", dataset, shuffle=0)
    history = (
        Training(model=tracking, data=data, validation=data).fit(epochs=2, batch_size=4, verbose=0).history
    )
    expected = [pytest.approx(np.square(rows).mean(), rel=1e-5)] * 2
    assert history.history == {"loss": expected, "val_loss": expected}
