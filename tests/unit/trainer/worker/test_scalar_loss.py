"""A loss that is one number for the whole batch: a function that returns it, or an output of one number per sample."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Indexed
from shoal_trainer.data.source import Part
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.weighing import filled, overstated, share_sums, weigh_samples
from tests.unit.trainer.worker.trained import parameters

TOKENS = np.array([[1, 2, 3, 0, 0], [4, 0, 0, 0, 0], [1, 1, 1, 1, 1], [2, 3, 0, 0, 0]] * 2, np.int32)


def masked():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(5, 4, mask_zero=True)(inputs)
    model = keras.Model(inputs, keras.layers.GRU(3, return_sequences=True)(x))
    model.compile(
        keras.optimizers.SGD(0.1), lambda true, predicted: keras.ops.mean(keras.ops.square(true - predicted))
    )
    return model


@pytest.mark.by_day(1)
@pytest.mark.parametrize("length", [5, 8])  # 8: as many steps as samples
def test_scalar_loss_on_masked_sequences_equals_keras(length):
    x = np.resize(TOKENS, (8, length))
    y = np.random.default_rng(0).normal(size=(8, length, 3)).astype("float32")
    data = Indexed.from_arrays(x, y)
    batch = data.example(8)
    flat_model = FlatModel(masked(), batch, "fp32")
    buffer = aligned(flat_model.layout.size)
    buffer[:] = flat_model.initial()
    loss = flat_model.step(flat_model.vector.alias(buffer), batch).loss
    assert loss == pytest.approx(float(masked().train_on_batch(batch.x, batch.y)), rel=1e-5)


X = np.random.default_rng(2).uniform(0.1, 0.9, (8, 3)).astype("float32")
Y = np.random.default_rng(3).integers(0, 2, 8).astype("float32")


def one_number(loss, optimizer="SGD", **options):
    """The output has the shape (batch,), as that of a dot product of two embeddings."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    predicted = keras.layers.Dense(1, activation="sigmoid")(inputs)[:, 0]
    model = keras.Model(inputs, predicted)
    model.compile(getattr(keras.optimizers, optimizer)(0.1), loss, **options)
    return model


OF_ELEMENTS = [
    "mse",
    "mae",
    "mape",
    "msle",
    "huber",
    "log_cosh",
    "hinge",
    "squared_hinge",
    "poisson",
    "binary_crossentropy",
    "binary_focal_crossentropy",
    keras.losses.MeanSquaredError(reduction="sum"),
    keras.losses.BinaryCrossentropy(label_smoothing=0.1, reduction=None),
]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("loss", OF_ELEMENTS)
def test_rows_that_fill_up_a_batch_do_not_count_in_an_output_of_one_number_per_sample(loss):
    agrees_with_keras(loss, Indexed.from_arrays(X, Y))


def test_nor_do_they_count_where_samples_have_weights():
    """By whose mean Keras multiplies the loss of the batch."""
    agrees_with_keras("mse", Indexed.from_arrays(X, Y, np.arange(8, dtype="float32")))


def agrees_with_keras(loss, data):
    """Asserts that loss and gradient are those of Keras, of a full batch and of one that other rows fill up."""
    flat_model = FlatModel(one_number(loss), data.example(8), "fp32")
    given, model = parameters(flat_model), one_number(loss)
    for rows in (8, 5):
        (batch,) = data.read(Part(0, rows), 8)
        result, (x, y, *weights) = flat_model.step(given, batch), batch.as_given()[: batch.parts]
        with tf.GradientTape() as tape:
            expected = model.compute_loss(x, tf.constant(y), model(x), *map(tf.constant, weights))
        gradient = tape.gradient(expected, model.trainable_variables)
        assert result.loss == pytest.approx(float(expected), rel=1e-5)
        found = np.asarray(result.update)[:4]
        np.testing.assert_allclose(found, np.concatenate([np.ravel(each) for each in gradient]), rtol=1e-4)


def test_a_sum_beside_a_column_of_labels_stays_a_sum():
    """Of which a worker takes its share, unlike of a mean: Keras makes a column of the output."""
    model, pad = one_number(keras.losses.MeanSquaredError(reduction="sum")), np.arange(8) % 5
    x, y = tf.constant(X), tf.constant(Y[:, None])
    expected = float(model.compute_loss(x[:5], y[:5], model(x[:5])))
    weigh_samples(model)
    weights = filled(tf.constant((np.arange(8) < 5) * np.float32(8 / 5)), 5)

    def found():
        rows = tf.gather(x, pad)
        return float(model.compute_loss(rows, tf.gather(y, pad), model(rows), weights))

    whole = found()
    assert whole - float(overstated(model)) == pytest.approx(expected, rel=1e-5)
    share_sums(model, 0.25)
    assert found() == pytest.approx(whole / 4)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("optimizer", ["SGD", "Adamax"])  # on the servers; on the worker
def test_nor_do_they_count_in_its_metrics(optimizer):
    data = Indexed.from_arrays(X, Y)
    model = one_number("mse", optimizer, metrics=["mae"])
    flat_model = FlatModel(model, data.example(8), "fp32")
    given = parameters(flat_model)
    for rows in (8, 5):
        (batch,) = data.read(Part(0, rows), 8)
        x, y = batch.as_given()
        expected = keras.losses.mean_absolute_error(y, one_number("mse")(x))
        (found,) = flat_model.step(given, batch).metrics
        assert found.total / found.weight == pytest.approx(float(expected), rel=1e-5)
