"""Random layers: which draws differ between workers and steps."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Indexed
from shoal_trainer.contract import InitialFrom
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.worker.compose import build_flat_model
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.keras_internals import global_seed_generator, layers_of, seed_generators
from tests.unit.trainer.worker.models import compiled, functional, job
from tests.unit.trainer.worker.running import on_host
from tests.unit.trainer.worker.test_compose import CONFIG
from tests.unit.trainer.worker.trained import BATCHES, SGD


def test_dropout_differs_between_workers():
    updates = []
    for worker in [(0, 0), (1, 0), (1, 1), (0, 0)]:
        flat_model = FlatModel(functional(dropout=0.5), BATCHES[0], "fp32", worker)
        buffer = aligned(flat_model.layout.size)
        buffer[:] = flat_model.initial()
        updates.append(np.array(flat_model.step(flat_model.vector.alias(buffer), BATCHES[0]).update))
    assert np.array_equal(updates[0], updates[3])
    assert not np.array_equal(updates[0], updates[1])
    assert not np.array_equal(updates[1], updates[2])


def states(slot, seed, begin=None):
    """Of the generators of a worker of a job, which begins from another run."""
    training = job(lambda: functional(dropout=0.5), seed=seed)
    config = CONFIG.model_copy(update={"index": slot, "initial_from": begin})
    layers = layers_of(build_flat_model(training, config).model)
    generators = [generator for layer in layers for generator in seed_generators(layer)]
    return [tuple(each.state.numpy().tolist()) for each in (*generators, global_seed_generator())]


def test_a_run_that_goes_on_draws_no_numbers_again():
    """Dropout would have the masks of the first steps once more."""
    first, second = (InitialFrom(uri=f"s3://bucket/n/j/{run}") for run in "ab")
    found = [states(slot, 0, begin) for slot in (0, 1) for begin in (None, first, second)]
    assert len(set(itertools.chain(*found))) == 12
    assert states(0, 0, first) == found[1]
    assert states(0, 0, first.model_copy(update={"weights_only": True})) == found[0]


@pytest.mark.nightly
def test_draws_follow_the_seed_of_the_job_on_every_worker():
    """Else runs with several seeds, for error bars, would draw the same masks on all workers but the first."""
    found = [states(slot, seed) for slot in (1, 2) for seed in (0, 1, 2)]
    assert all(len(each) == 2 for each in found)
    assert len(set(itertools.chain(*found))) == 12  # another one for each generator, worker and seed
    assert states(1, 2) == found[2]


def noisy():
    """A model with a layer that draws from Keras' global generator."""

    class Noisy(keras.layers.Layer):
        def call(self, x):
            return keras.random.dropout(x, 0.5) + keras.random.normal((4,))

    keras.utils.set_random_seed(1)
    keras.backend.clear_session(free_memory=False)
    parts = [keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(4), Noisy()]
    return compiled(keras.Sequential(parts), SGD(0.1))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("options", [{}, {"jit_compile": True}])
def test_global_generator_draws_differ_by_step_and_worker(options):
    def losses(worker):
        model = noisy()
        model.compile(SGD(0.1), model.loss, **options)
        flat_model = FlatModel(model, BATCHES[0], "fp32", worker)
        buffer = aligned(flat_model.layout.size)
        buffer[:] = flat_model.initial()
        return [flat_model.step(flat_model.vector.alias(buffer), BATCHES[0]).loss for _ in range(4)]

    first = losses((0, 0))
    assert len(set(first)) == 4
    assert first == losses((0, 0))
    assert not set(first) & set(losses((1, 0)))
    plain = noisy()
    plain.compile(SGD(0.0), plain.loss, **options)
    for loss in first:
        plain.reset_metrics()
        expected = plain.train_on_batch(BATCHES[0].x, BATCHES[0].y, return_dict=True)["loss"]
        assert loss == pytest.approx(float(expected), rel=1e-5)


def hiding(optimizer, **options):
    """A model that draws from generators which it does not hold, in its call and in its loss."""
    generator = keras.random.SeedGenerator(5)
    dropout = keras.layers.Dropout(0.5, seed=3)

    class Hiding(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x, training=False):
            return self.dense(dropout(x, training=training))

    def loss(y, p):
        return keras.ops.mean(keras.ops.square(p - keras.random.normal((2,), seed=generator)), -1)

    keras.utils.set_random_seed(1)
    model = Hiding()
    model.compile(optimizer, loss, **options)
    return model


@pytest.mark.by_day(1)
@pytest.mark.parametrize("options", [{}, pytest.param({"jit_compile": True}, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", [SGD, keras.optimizers.Adamax])
def test_generators_that_the_model_does_not_hold_draw_on_as_in_keras(kind, options, caplog):
    batch = Indexed.from_arrays(np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)).example(4)

    def losses(worker, seed=0):
        flat_model = FlatModel(hiding(kind(0.0), **options), batch, "fp32", worker, seed=seed)
        flat_model.trace()
        flat_model.compile()  # it runs a step, and undoes what that assigns
        tensor = flat_model.vector.alias(flat_model.coded(np.float32))
        return [flat_model.step(tensor, batch).loss for _ in range(2)]

    plain, expected = hiding(kind(0.0), **options), []
    for _ in range(2):
        plain.reset_metrics()
        expected.append(float(plain.train_on_batch(batch.x, batch.y, return_dict=True)["loss"]))
    first = losses((0, 0))
    assert first == pytest.approx(expected, rel=1e-5)
    assert len({*first, *losses((1, 0)), *losses((1, 0), seed=1)}) == 6
    assert "not exchanged" not in caplog.text


def test_other_variables_that_the_model_does_not_hold_are_assigned_and_named(caplog):
    norm = keras.layers.BatchNormalization(name="mine")
    norm.build((None, 3))

    class Hiding(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x, training=False):
            return self.dense(norm(x, training=training))

    model = Hiding()
    model.compile(SGD(0.0), "mse")
    batch = Indexed.from_arrays(np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)).example(4)
    flat_model = FlatModel(model, batch, "fp32")
    for _ in range(2):
        flat_model.step(flat_model.vector.alias(flat_model.coded(np.float32)), batch)
    assert np.asarray(norm.moving_mean) == pytest.approx(1 - 0.99**2)
    assert "moving_mean, mine/moving_variance: not exchanged" in caplog.text


@pytest.mark.nightly
@on_host  # in XLA, tf.random takes no seed
def test_draws_of_tensorflow_differ_between_workers():
    class Noisy(keras.layers.Layer):
        def call(self, x):
            return x + tf.random.normal((4,))

    def loss(worker):
        keras.utils.set_random_seed(1)
        keras.backend.clear_session(free_memory=False)
        parts = [keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(4), Noisy()]
        flat_model = FlatModel(compiled(keras.Sequential(parts), SGD(0.1)), BATCHES[0], "fp32", worker)
        return flat_model.step(flat_model.vector.alias(flat_model.coded(np.float32)), BATCHES[0]).loss

    assert loss((0, 0)) == loss((0, 0))
    assert len({loss(worker) for worker in [(0, 0), (1, 0), (1, 1)]}) == 3
