"""Losses with several values per sample, against plain Keras without padding rows."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Indexed, Training, UserError
from shoal_trainer.data.source import Part
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.worker.alone import as_keras
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.keras_internals import evaluate
from shoal_trainer.worker.optimizers import place
from tests.unit.trainer.worker.trained import parameters

L = keras.layers
SPARSE = keras.losses.SparseCategoricalCrossentropy
rng = np.random.default_rng(0)
IMAGES = rng.uniform(size=(8, 6, 6, 1)).astype("float32")
PIXELS = (IMAGES[..., 0] > 0.5).astype("int32")


def tokens(length):
    result = rng.integers(0, 5, (8, length + 1)).astype("int32")
    return result[:, :-1], result[:, 1:] % 4


def segmentation():
    i = keras.Input((6, 6, 1))
    return keras.Model(i, L.Conv2D(2, 3, padding="same", activation="softmax")(i))


def autoencoder():
    i = keras.Input((6, 6, 1))
    return keras.Model(i, L.Conv2D(1, 3, padding="same")(L.Conv2D(3, 3, padding="same")(i)))


def language(mask=False, recurrent=False):
    i = keras.Input((None,), dtype="int32")
    # A dense layer is traced in a fraction of the time, and passes masks on as well.
    hidden = L.GRU(6, return_sequences=True) if recurrent else L.Dense(6, activation="tanh")
    return keras.Model(i, L.Dense(4)(hidden(L.Embedding(5, 4, mask_zero=mask)(i))))


def outputs():
    i = keras.Input((6, 6, 1))
    pixels = L.Conv2D(2, 3, padding="same", activation="softmax", name="pixels")(i)
    whole = L.Dense(3, name="whole")(L.Flatten()(i))
    return keras.Model(i, {"pixels": pixels, "whole": whole})


def summed():
    model = autoencoder()

    class Summed(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = model

        def call(self, x):
            self.add_loss(0.01 * keras.ops.sum(keras.ops.square(self.inner.layers[1].kernel)))
            return self.inner(x)

    return Summed()


LABELS = {"pixels": PIXELS, "whole": rng.integers(0, 3, 8)}
LOSSES = {"pixels": "sparse_categorical_crossentropy", "whole": SPARSE(from_logits=True)}
CASES = {
    "segmentation": (segmentation, (IMAGES, PIXELS), "sparse_categorical_crossentropy"),
    "autoencoder": (autoencoder, (IMAGES, IMAGES), "mse"),
    "add_loss": (summed, (IMAGES, IMAGES), "mse"),
    "T = B": (language, tokens(8), SPARSE(from_logits=True)),
    "T != B": (language, tokens(5), SPARSE(from_logits=True)),
    "masked": (lambda: language(mask=True, recurrent=True), tokens(5), SPARSE(from_logits=True)),
    "masked, T = B": (lambda: language(mask=True), tokens(8), SPARSE(from_logits=True)),
    "ignored": (language, tokens(5), SPARSE(from_logits=True, ignore_class=0)),
    "by weights": (language, tokens(5), SPARSE(from_logits=True, reduction="mean_with_sample_weight")),
    "outputs": (outputs, (IMAGES, LABELS), LOSSES),
}


def make(build, loss, optimizer="sgd", **options):
    keras.utils.set_random_seed(1)
    keras.backend.clear_session(free_memory=False)
    model = build()
    model.compile(
        optimizer, loss, weighted_metrics=["accuracy"] if "outputs" not in build.__name__ else None, **options
    )
    return model


class Stepped:
    """A model traced once, for whole batches of 8 and for those with 3 rows of padding."""

    def __init__(self, model, data):
        self.arrays = Indexed.from_arrays(*data)
        self.flat_model = FlatModel(model, self.arrays.example(8), "fp32")
        self.trainable = self.flat_model.layout.trainable
        self.initial = self.flat_model.initial()

    def step(self, rows):
        """The step's result from the initial parameters, and the batch as Keras gets it."""
        (batch,) = self.arrays.read(Part(0, rows), 8)
        buffer = aligned(self.flat_model.layout.size)
        buffer[:] = self.initial
        return self.flat_model.step(self.flat_model.vector.alias(buffer), batch), batch.as_given()


def flat(tensors):
    return np.concatenate([np.asarray(tf.convert_to_tensor(t)).ravel() for t in tensors])


def agrees_with_keras(stepped, model, rows):
    """Asserts that loss and gradient of `rows` samples are those of Keras, with the weights if there are any."""
    result, (x, *others) = stepped.step(rows)
    y, *weights = (keras.tree.map_structure(tf.constant, given) for given in others)
    with tf.GradientTape() as tape:
        expected = model.compute_loss(x, y, model(x, training=True), *weights)
    gradient = flat(tape.gradient(expected, model.trainable_variables))
    assert result.loss == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(np.asarray(result.update)[: stepped.trainable], gradient, rtol=1e-4, atol=1e-6)
    return result, (x, *others)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_keras_without_padding_rows(name):
    build, data, loss = CASES[name]
    stepped, model = Stepped(make(build, loss), data), make(build, loss)
    for rows in (8, 5):
        agrees_with_keras(stepped, model, rows)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("rows", [8, 5])
@pytest.mark.parametrize("name", ["segmentation", "masked, T = B", "outputs"])
def test_worker_side_step_equals_keras_without_padding_rows(name, rows):
    build, data, loss = CASES[name]
    stepped = Stepped(make(build, loss, keras.optimizers.Adamax(0.01)), data)
    result, (x, y) = stepped.step(rows)
    model = make(build, loss, keras.optimizers.Adamax(0.01))
    before = flat(model.trainable_variables)
    expected = model.train_on_batch(x, y, return_dict=True)["loss"]
    assert result.loss == pytest.approx(float(expected), rel=1e-5)
    moved = flat(model.trainable_variables) - before
    np.testing.assert_allclose(np.asarray(result.update)[: stepped.trainable], moved, rtol=1e-2, atol=1e-5)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("jit", [False, True])
def test_sample_weight_applies_to_all_values_of_the_sample(jit):
    build, data, loss = CASES["T = B"]
    weights = np.arange(8, dtype="float32")  # a sample of weight 0 still counts as a sample
    stepped, plain = Stepped(make(build, loss, jit_compile=jit), (*data, weights)), make(build, loss)
    for rows in (8, 5):
        result, (x, y, weights) = stepped.step(rows)
        spread = np.repeat(weights[:, None], 8, axis=1)
        with tf.GradientTape() as tape:
            expected = plain.compute_loss(x, tf.constant(y), plain(x), tf.constant(spread))
        gradient = flat(tape.gradient(expected, plain.trainable_variables))
        assert result.loss == pytest.approx(float(expected), rel=1e-5)
        np.testing.assert_allclose(
            np.asarray(result.update)[: stepped.trainable], gradient, rtol=1e-4, atol=1e-6
        )
    batches = list(Indexed.from_arrays(x, y, weights).read(Part(0, rows), 8))
    found = evaluate(stepped.flat_model.model, map(as_keras, batches))
    whole = plain.evaluate(x, y, sample_weight=spread, return_dict=True, verbose=0)
    assert {name: float(value) for name, value in found.items()} == pytest.approx(whole, rel=1e-5)


PER_TOKEN = rng.uniform(0, 2, (8, 5)).astype("float32")
PER_TOKEN[:, 3:] = 0  # padding
MASKED = "per token, masked"
WEIGHTS = {
    "per token": (language, (*tokens(5), PER_TOKEN), SPARSE(from_logits=True)),
    MASKED: (lambda: language(mask=True), (*tokens(5), PER_TOKEN), SPARSE(from_logits=True)),
    "per token, by weights": (
        language,
        (*tokens(5), PER_TOKEN),
        SPARSE(from_logits=True, reduction="mean_with_sample_weight"),
    ),
    "per output": (
        outputs,
        (IMAGES, LABELS, {"pixels": rng.uniform(0, 2, (8, 6, 6)), "whole": np.arange(8.0)}),
        LOSSES,
    ),
    "per token, a column": (language, (*tokens(5), PER_TOKEN[..., None]), SPARSE(from_logits=True)),
    "per output, a column": (
        outputs,
        (IMAGES, LABELS, {"pixels": rng.uniform(0, 2, (8, 6, 6)), "whole": np.arange(8.0)[:, None]}),
        LOSSES,
    ),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("name", "jit"),
    [
        *((name, False) for name in WEIGHTS),
        *(pytest.param(name, True, marks=[pytest.mark.nightly] * (name != MASKED)) for name in WEIGHTS),
    ],
)
def test_weights_of_any_rank_are_those_of_keras(name, jit):
    build, data, loss = WEIGHTS[name]
    stepped, model = Stepped(make(build, loss, jit_compile=jit), data), make(build, loss)
    for rows in (8, 5):
        result, (x, y, weights) = agrees_with_keras(stepped, model, rows)
        if "output" not in name:
            model.reset_metrics()
            judged = model.test_on_batch(x, y, weights, return_dict=True)["accuracy"]
            (accuracy,) = result.metrics
            assert accuracy.total / accuracy.weight == pytest.approx(float(judged), rel=1e-5)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("without", LABELS)
def test_output_without_weights_beside_one_that_has_some_is_that_of_keras(without):
    build, data, loss = CASES["outputs"]
    weights = WEIGHTS["per output"][1][2] | {without: None}
    stepped, model = Stepped(make(build, loss), (*data, weights)), make(build, loss)
    for rows in (8, 5):
        result, (x, y, weights) = stepped.step(rows)
        given = {name: None if name == without else tf.constant(each) for name, each in weights.items()}
        with tf.GradientTape() as tape:
            expected = model.compute_loss(x, keras.tree.map_structure(tf.constant, y), model(x), given)
        gradient = flat(tape.gradient(expected, model.trainable_variables))
        assert result.loss == pytest.approx(float(expected), rel=1e-5)
        np.testing.assert_allclose(
            np.asarray(result.update)[: stepped.trainable], gradient, rtol=1e-4, atol=1e-6
        )


def test_weights_that_do_not_fit_the_loss_are_refused():
    build, data, loss = CASES["segmentation"]
    with pytest.raises(UserError, match=r"sample_weight has the shape \(3,\) per sample"):
        Stepped(make(build, loss), (*data, np.ones((8, 3))))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("one_hot", [False, True])
def test_class_weight_is_that_of_fit(one_hot):
    x, labels = rng.normal(size=(32, 4)).astype("float32"), rng.integers(0, 3, 32)
    y = np.eye(3, dtype="float32")[labels] if one_hot else labels

    def model():
        keras.utils.set_random_seed(0)
        network = keras.Sequential([keras.Input((4,)), L.Dense(3, activation="softmax")])
        network.compile(
            keras.optimizers.SGD(0.5),
            "categorical_crossentropy" if one_hot else "sparse_categorical_crossentropy",
        )
        return network

    weights = {0: 0.2, 2: 5.0}
    plain = model()
    plain.fit(x, y, class_weight=weights, epochs=1, batch_size=32, verbose=0)
    of_json = {str(number): weight for number, weight in weights.items()}
    job = Training(model=model, data=(x, y), class_weight=of_json)
    ours = FlatModel(model(), job.data.example(32), "fp32")
    buffer = aligned(ours.layout.size)
    buffer[:] = ours.initial()
    update = np.asarray(ours.step(ours.vector.alias(buffer), next(job.data.read(Part(0, 32), 32))).update)
    np.testing.assert_allclose(buffer - 0.5 * update, flat(plain.trainable_variables), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", None])
@pytest.mark.parametrize(("rows", "size"), [(8, 8), (5, 8), (16, 16), (64, 64)])
def test_samples_count_alike_in_batches_of_any_size(reduction, rows, size):
    """A push moves the parameters as the same samples in batches of the reference size do, as Keras counts them."""
    reference = 16
    x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), L.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(1.0), keras.losses.MeanSquaredError(reduction=reduction))
    batch = next(iter(Indexed.from_arrays(x, x[:, :1]).read(Part(0, rows), size)))
    flat_model = FlatModel(model, batch, "fp32", reference=reference)
    flat_model.trace()
    config = place(model, flat_model.layout, reference).config
    step = flat_model.step(parameters(flat_model), batch)
    seen = batch.x[:rows]
    per_sample = -2 * seen[:, :1] * np.hstack([seen, np.ones((rows, 1))])
    share = 1 if reduction != "sum_over_batch_size" else 1 / reference
    np.testing.assert_allclose(
        config.weight(rows) * np.asarray(step.update), share * per_sample.sum(0), rtol=1e-4, atol=1e-4
    )
    mean = (seen[:, 0] ** 2).mean()
    loss = mean * reference * rows / size if reduction == "sum" else mean
    assert step.loss == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("reduction", ["sum", None])
@pytest.mark.parametrize("size", [8, 32])
def test_a_sum_whose_optimizer_runs_on_the_worker_is_that_of_its_batch(reduction, size):
    """A push of differences does not count by its samples."""
    x = np.random.default_rng(0).normal(size=(size, 3)).astype("float32")
    model = keras.Sequential([keras.Input((3,)), L.Dense(1, kernel_initializer="zeros")])
    model.compile(
        keras.optimizers.SGD(0.01, use_ema=True), keras.losses.MeanSquaredError(reduction=reduction)
    )
    batch = next(iter(Indexed.from_arrays(x, x[:, :1]).read(Part(0, size), size)))
    flat_model = FlatModel(model, batch, "fp32", reference=16)
    step = flat_model.step(parameters(flat_model), batch)
    moved = 0.01 * 2 * (x[:, :1] * np.hstack([x, np.ones((size, 1))])).sum(0)
    np.testing.assert_allclose(np.asarray(step.update)[:4], moved, rtol=1e-4, atol=1e-6)
    values = x[:, 0] ** 2
    assert step.loss == pytest.approx(values.sum() if reduction else values.mean(), rel=1e-4)


class Adds(L.Layer):
    def __init__(self, reduce):
        super().__init__(name="adds")
        self.reduce = reduce

    def call(self, x):
        self.add_loss(0.1 * self.reduce(x**2))
        return x


def adding(layer):
    i = keras.Input((6, 6, 1))
    model = keras.Model(i, layer(L.Conv2D(1, 3, padding="same")(i)))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("devices", "reference", "said"),
    [(1, 4, "adds: .* counts 2 times"), (2, None, "adds: .* counts 0.5 times"), (1, None, ""), (2, 4, "")],
)
def test_a_sum_that_a_layer_adds_is_told_where_it_counts_otherwise_than_in_fit(
    devices, reference, said, caplog
):
    """It cannot be told from a mean, which counts as in fit."""
    example = next(iter(Indexed.from_arrays(IMAGES, IMAGES).read(Part(0, 8), 8)))
    layer = Adds(keras.ops.sum)
    flat_model = FlatModel(
        adding(layer), example, "fp32", reference=reference, on_host=False, devices=["/CPU:0"] * devices
    )
    flat_model.trace()
    assert bool(said) == ("add_loss" in caplog.text)
    assert re.search(said, caplog.text)


def test_a_regularizer_of_activities_is_a_mean_over_samples(caplog):
    example = next(iter(Indexed.from_arrays(IMAGES, IMAGES).read(Part(0, 8), 8)))
    layer = L.Dense(1, activity_regularizer="l2")
    FlatModel(adding(layer), example, "fp32", reference=4).trace()
    assert "add_loss" not in caplog.text
