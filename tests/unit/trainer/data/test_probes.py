"""The workers of a job find the same sample at a position, or the coordinator is told that they do not."""

import threading

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


def join(*specs, begun=False):
    record = Record(JobIdentity(namespace="n", name="n", uid="u"), StopAfter(epochs=1), 32, 1)
    for each in specs:
        record.set_data(each, 32)
        record.pace.begun = begun


@pytest.mark.parametrize("form", FORMS)
def test_another_split_is_another_training_set(form):
    here, there = (
        np.random.default_rng(1).permutation(100)[:80],
        np.random.default_rng(2).permutation(100)[:80],
    )
    join(spec(FORMS[form](here)), spec(FORMS[form](here)))
    with pytest.raises(UserError, match="other training samples"):
        join(spec(FORMS[form](here)), spec(FORMS[form](there)))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "arrays"])
def test_other_samples_end_no_job_that_trains(form, caplog):
    """What a script computes of a sample may be random, as a coin for a batch that fell alike twice."""
    first, *others = (
        spec(FORMS[form](np.random.default_rng(seed).permutation(100)[:80])) for seed in range(3)
    )
    join(first, first, others[0], others[0], others[1], others[0], begun=True)
    words = [record.message for record in caplog.records]
    assert len(words) == 2, "a worker joins again after an outage"
    assert all("% of what was compared) has other training samples than the job" in each for each in words)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "arrays"])
def test_some_other_samples_are_only_told(form, caplog):
    """As of a rare augmentation that was not seen when the samples were read again."""
    rows = np.arange(100)
    some = np.where(rows < 50, rows, rows[::-1])
    join(spec(FORMS[form](rows)), spec(FORMS[form](some)))
    assert "has other training samples than the job" in caplog.text


def image(index, flaws=0.0):
    """A smooth one, as a photograph is: what is added in its number cancels out."""
    across, down = np.mgrid[0:64, 0:64]
    draw, other = np.random.default_rng(index), np.random.default_rng(999 + index)
    grey = 128 + 60 * np.sin(across / draw.uniform(5, 20)) + 40 * np.cos(down / draw.uniform(5, 20))
    grey += draw.normal(0, 6, across.shape) + (other.random(across.shape) < flaws)
    return np.clip(grey, 0, 255).astype(np.uint8)


def test_what_another_machine_computes_a_little_differently_is_the_same_sample(caplog):
    def made(function):
        return spec(Indexed.from_items(range(100), lambda row: (function(row), row % 2)))

    wide = np.random.default_rng(1).normal(size=(100, 768))
    noise = 1 + 2e-3 * np.random.default_rng(2).normal(size=wide.shape)  # as of bfloat16
    join(made(image), made(lambda row: image(row, 0.1)))
    join(made(lambda row: wide[row]), made(lambda row: wide[row] * noise[row]))
    join(made(lambda row: [50.0 + row]), made(lambda row: [50.0 + row + 4 / 24]))  # days since, 4 hours later
    assert not caplog.records
    with pytest.raises(UserError, match="other training samples"):
        join(made(image), made(lambda row: image(row + 100)))


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


def test_samples_are_read_again_in_few_places():
    read = []

    def parse(row):
        read.append(row)
        return X[row]

    spec(Indexed.from_items(range(100), parse))
    assert len(set(read)) == 8
    assert len(read) == 12


def test_batches_are_compared_by_the_threads_of_their_script():
    """In turn, they would keep a worker from its first heartbeat."""
    together = threading.Barrier(4, timeout=10)

    class Slow(Sequence):
        def __getitem__(self, index):
            if threading.current_thread() is not threading.main_thread():
                together.wait()
            return super().__getitem__(index)

    batches = Slow(np.arange(128) % 100)
    batches.workers = 4
    assert len(spec(batches).probes) == 16


def test_worker_of_a_version_that_compares_less_joins():
    new = spec(FORMS["items"](np.arange(80)))
    old = new.model_copy(update={"probes": ()})
    join(old, new)
    join(new, old)
    with pytest.raises(UserError, match="other training samples"):
        join(old, new, spec(FORMS["items"](np.arange(100)[::-1][:80])))


def test_numbers_of_arrays_are_those_of_earlier_versions():
    """A worker of the version before may join the same job."""
    assert spec((X, Y)).probes[:2] == pytest.approx((-0.21216, 7.02839), abs=1e-4)


def test_a_function_that_yields_more_than_its_range_is_refused_at_once():
    with pytest.raises(UserError, match="yields more than 4 samples"):
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
