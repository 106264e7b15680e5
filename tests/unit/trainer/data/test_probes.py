"""The workers of a job find the same sample at a position, or the coordinator is told that they do not."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Indexed, Stream, Training, UserError
from shoal_trainer.contract import JobIdentity, StopAfter
from shoal_trainer.coordinator.record import Record
from shoal_trainer.worker.coordination import spec_of

X = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
Y = np.arange(100)


class Sequence(keras.utils.PyDataset):
    def __init__(self, rows, noise=lambda: 0):
        super().__init__()
        self.rows, self.noise = rows, noise

    def __len__(self):
        return (len(self.rows) + 31) // 32

    def __getitem__(self, index):
        rows = self.rows[index * 32 : (index + 1) * 32]
        return X[rows] + self.noise(), Y[rows]


def indexed(rows, noise=lambda: 0):
    def fn(start, stop):
        data = tf.data.Dataset.from_tensor_slices((X[rows[start:stop]], Y[rows[start:stop]]))
        return data.map(lambda x, y: (x + tf.cast(noise(), x.dtype), y))

    return Indexed(len(rows), fn)


FORMS = {
    "arrays": lambda rows: (X[rows], Y[rows]),
    "items": lambda rows: Indexed.from_items(rows, lambda row: (X[row], Y[row])),
    "items that differ in length": lambda rows: Indexed.from_items(
        rows, lambda row: (X[row], np.arange(row % 5)), lengths=[8]
    ),
    "batches": Sequence,
    "indexed": indexed,
}


def spec(data, **options):
    return spec_of(Training(model=lambda: None, data=data, **options))


def join(*specs):
    record = Record(JobIdentity(namespace="n", name="n", uid="u"), StopAfter(epochs=1), 32, 1)
    for each in specs:
        record.set_data(each, 32)


@pytest.mark.parametrize("form", FORMS)
def test_another_split_is_another_training_set(form):
    here, there = (
        np.random.default_rng(1).permutation(100)[:80],
        np.random.default_rng(2).permutation(100)[:80],
    )
    join(spec(FORMS[form](here)), spec(FORMS[form](here)))
    with pytest.raises(UserError, match="other training samples"):
        join(spec(FORMS[form](here)), spec(FORMS[form](there)))


@pytest.mark.parametrize("size", [1, 7, 9, 31])
@pytest.mark.parametrize("form", FORMS)
def test_few_samples_are_compared_as_well(form, size):
    assert min(size, 8) <= len(spec(FORMS[form](np.arange(size))).probes) <= 16


AUGMENTED = {
    "items": lambda: Indexed.from_items(range(100), lambda row: X[row] + np.random.normal()),
    "batches": lambda: Sequence(np.arange(100), np.random.normal),
    "indexed": lambda: indexed(np.arange(100), lambda: tf.random.normal(())),
}


@pytest.mark.parametrize("form", AUGMENTED)
def test_samples_that_a_script_augments_are_not_compared(form):
    specs = []
    for seed in range(2):  # as of two workers
        keras.utils.set_random_seed(seed)
        specs.append(spec(AUGMENTED[form]()))
    assert [each.probes for each in specs] == [(), ()]
    join(*specs)


def test_worker_of_a_version_that_compares_less_joins():
    new = spec(FORMS["items"](np.arange(80)))
    old = new.model_copy(update={"probes": ()})
    join(old, new)
    join(new, old)


def test_numbers_of_arrays_are_those_of_earlier_versions():
    """A worker of the version before may join the same job."""
    assert spec((X, Y)).probes[:2] == pytest.approx((-0.21216, 7.02839), abs=1e-4)


def test_a_function_that_yields_more_than_its_range_is_refused_at_once():
    with pytest.raises(UserError, match="yields more than 8 samples"):
        spec(Indexed(100, lambda _start, _stop: tf.data.Dataset.range(100)))


def test_weighed_samples_are_compared_too():
    assert spec((X, Y), class_weight={1: 2.0}).probes == spec((X, Y)).probes != ()


def test_a_stream_is_not_read_to_be_compared():
    def batches():
        raise AssertionError

    assert spec(Stream(batches, samples=8)).probes == ()


def test_an_error_of_the_data_is_the_users():
    with pytest.raises(UserError, match=r"The data function failed: KeyError.*test_probes"):
        spec(Indexed.from_items(range(100), lambda row: {0: 0}[row]))
