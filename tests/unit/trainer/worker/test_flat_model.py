"""The flat training function: tracing, exports, and options of optimizers."""

import dataclasses
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import UserError
from shoal_trainer.data.batch import Batch, fill
from shoal_trainer.data.source import Part
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.layout import flatten, layout_of
from shoal_trainer.worker.optimizers import place
from shoal_trainer.worker.tasks import Tasks
from tests.unit.trainer.worker.models import DATA, compiled, functional, job
from tests.unit.trainer.worker.running import on_host
from tests.unit.trainer.worker.trained import BATCHES, SGD, Server, schedules


@pytest.mark.by_day(1)
@pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # from Keras' saving code with NumPy 2
@pytest.mark.parametrize("overwrite", [None, 4])
def test_export_uses_the_ema_weights_as_keras_does(overwrite):
    def make():
        return functional(SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=overwrite))

    server, plain = Server(make()), make()
    tasks = Tasks(job(), server.flat_model, 16)

    def exported():
        path = tasks.export(server.flat()).files["model.keras"]
        return flatten(keras.models.load_model(path), server.flat_model.layout)

    assert np.array_equal(exported(), server.flat())  # no step yet, so no average
    for batch in BATCHES:
        server.step(batch)
        plain.train_on_batch(batch.x, batch.y)
    plain.optimizer.finalize_variable_values(plain.trainable_variables)
    average = exported()
    assert np.abs(average - flatten(plain, server.flat_model.layout)).max() < 2e-5
    assert np.abs(average - server.flat()).max() > 1e-3
    server.step(BATCHES[0])  # training continues from the parameters, not the average
    tasks.close()


def test_weight_decay_exclusions_become_ranges_of_the_flat_vector():
    optimizer = keras.optimizers.AdamW(0.01)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model = functional(optimizer)
    flat_model = FlatModel(model, BATCHES[0], "fp32")
    biases = [(e.offset, e.offset + e.size) for e in flat_model.layout.entries if e.path.endswith("bias")]
    assert list(place(model, flat_model.layout, 16).config.no_decay) == biases


@pytest.mark.parametrize(
    ("boundaries", "values"),
    [(np.array([3, 6]), np.linspace(0.5, 0.1, 3)), ([np.int64(3), 6], list(np.linspace(0.5, 0.1, 3)))],
    ids=["arrays", "numbers of NumPy"],
)
def test_schedule_may_be_made_of_arrays(boundaries, values):
    """Keras takes them, too."""
    model = functional(SGD(schedules.PiecewiseConstantDecay(boundaries, values)))
    rate = place(model, layout_of(model), 16).config.learning_rate
    assert rate.config == {"boundaries": [3, 6], "values": pytest.approx([0.5, 0.3, 0.1])}


def test_mixed_float16_scales_the_loss_and_skips_overflows():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        server = Server(functional(SGD(0.1)))
    finally:
        keras.config.set_dtype_policy("float32")
    losses = [server.step(batch) for batch in BATCHES * 3]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-10:]) < np.mean(losses[:10])
    assert {entry.dtype for entry in server.flat_model.layout.entries} == {"float32"}


@pytest.mark.nightly
def test_short_batch_is_not_retraced_and_averages_its_samples():
    flat_model = FlatModel(functional(), BATCHES[0], "fp32")
    buffer = aligned(flat_model.layout.size)
    buffer[:] = flat_model.initial()
    tensor = flat_model.vector.alias(buffer)
    (short,) = DATA.read(Part(0, 5), 16)
    result = flat_model.step(tensor, short)
    plain = functional()
    assert result.loss == pytest.approx(
        float(plain.train_on_batch(short.x[:5], short.y[:5], return_dict=True)["loss"]), rel=1e-5
    )
    assert len(flat_model._traced) == 1


def by_name():
    """A model with two named inputs of different sizes."""
    keras.utils.set_random_seed(1)
    b, a = keras.Input((3,), name="b"), keras.Input((2,), name="a")
    parts = [keras.layers.Dense(4)(a), keras.layers.Dense(4)(b)]
    return compiled(keras.Model({"b": b, "a": a}, keras.layers.add(parts)))


def test_named_inputs_may_come_in_any_order():
    rng, rows = np.random.default_rng(0), np.arange(8)
    x = {"b": rng.normal(size=(8, 3)).astype("float32"), "a": rng.normal(size=(8, 2)).astype("float32")}
    batch, turned = (
        Batch(inputs, rows % 4, np.ones(8, np.float32), 8, 8) for inputs in (x, dict(sorted(x.items())))
    )
    flat_model = FlatModel(by_name(), batch, "fp32")
    buffer = aligned(flat_model.layout.size)
    buffer[:] = flat_model.initial()
    result, again = (flat_model.step(flat_model.vector.alias(buffer), one) for one in (batch, turned))
    assert np.array_equal(result.update, again.update)
    plain = by_name().train_on_batch(x, rows % 4, return_dict=True)
    assert result.loss == pytest.approx(float(plain["loss"]), rel=1e-5)


def test_a_batch_with_another_key_is_refused_as_by_fit():
    """Its array would be trained under the name of the first one's."""
    a, b = np.ones((8, 2), np.float32), np.ones((8, 3), np.float32)
    first, later = ({"a": a, "b": b}, np.arange(8) % 4), ({"a": a, "c": b}, np.arange(8) % 4)
    with pytest.raises((ValueError, TypeError)):
        by_name().fit(iter([first, later]), steps_per_epoch=2, verbose=0)
    flat_model = FlatModel(by_name(), fill(first, 8, 8), "fp32")
    buffer = aligned(flat_model.layout.size)
    buffer[:] = flat_model.initial()
    with pytest.raises(UserError, match=r"its parts are x\.a, x\.c, y, those of the first x\.a, x\.b, y"):
        flat_model.step(flat_model.vector.alias(buffer), fill(later, 8, 8))


@pytest.mark.nightly
def test_new_sample_shape_is_traced_once():
    def any_length():
        keras.utils.set_random_seed(1)
        layers = [keras.Input((None, 3)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(4)]
        return compiled(keras.Sequential(layers))

    def batch(length):
        x = np.random.default_rng(length).normal(size=(8, length, 3)).astype("float32")
        return Batch(x, np.arange(8) % 4, np.ones(8, np.float32), 8, 8)

    flat_model = FlatModel(any_length(), batch(5), "fp32")
    buffer = aligned(flat_model.layout.size)
    buffer[:] = flat_model.initial()
    for length in (5, 7, 5, 7):
        sized = batch(length)
        expected = any_length().train_on_batch(sized.x, sized.y, return_dict=True)["loss"]
        assert flat_model.step(flat_model.vector.alias(buffer), sized).loss == pytest.approx(
            float(expected), rel=1e-5
        )
    assert len(flat_model._traced) == 2


def stepped(batch):
    flat_model = FlatModel(functional(), DATA.example(16), "fp32")
    buffer = aligned(flat_model.layout.size)
    buffer[:] = flat_model.initial()
    flat_model.step(flat_model.vector.alias(buffer), DATA.example(16))
    return flat_model.step(flat_model.vector.alias(buffer), batch)


def other(**changes):
    return dataclasses.replace(DATA.example(16), **changes)


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (other(x=np.full((16, 6, 6, 1), "word")), r"The batch has .*\(16, 6, 6, 1\), int64\(16,\); the first one has"),
        (other(x=tf.ones((16, 6, 6, 1), tf.int64)), r"The batch has int64\(16, 6, 6, 1\), int64\(16,\); the first "
         r"one has float32\(16, 6, 6, 1\), int64\(16,\)\. Make all samples alike"),
        (other(x=np.ones((16, 5, 5, 1), np.float32)), r"The batch has float32\(16, 5, 5, 1\)"),
        (other(x=(np.ones((16, 6, 6, 1), np.float32),) * 2), r"has float32\(16, 6, 6, 1\), float32\(16, 6, 6, 1\)"),
        (other(x=np.array([None] * 16, object)), r"The batch has object\(16,\), int64\(16,\); the first one has"),
        (other(y=None), r"The batch has float32\(16, 6, 6, 1\); the first"),
    ],
)  # fmt: skip
def test_batch_that_the_model_cannot_compute_with_is_a_user_error(batch, words):
    refused(batch, words)


@pytest.mark.parametrize("number", [1.5, float("nan"), 2.0**70])
def test_numbers_that_the_type_of_the_first_batch_cannot_hold_are_refused(number):
    """TensorFlow would train on 1 instead of 1.5."""
    y = np.array([1.0] * 15 + [number], np.float32)
    refused(
        other(y=y),
        rf"TypeError: {re.escape(f'{y[15]}')} cannot be int64, .*\. The batch has .* float32\(16,\)",
    )


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int32])
def test_whole_numbers_of_another_type_are_those_of_the_first_batch(dtype):
    assert stepped(other(y=DATA.example(16).y.astype(dtype))).loss == stepped(DATA.example(16)).loss


@on_host  # a GPU, and XLA, give a loss that is not finite
def test_label_that_the_model_does_not_know_is_a_user_error():
    words = "A training step failed: InvalidArgumentError: Received a label value of 7"
    refused(other(y=np.full(16, 7)), words)


def refused(batch, words):
    with pytest.raises(UserError, match=words) as caught:
        stepped(batch)
    assert "node" not in str(caught.value)
    assert len(str(caught.value)) < 900


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            tf.errors.InvalidArgumentError,
            "A training step failed: InvalidArgumentError: Cast string to float .*Check the data",
        ),
        (tf.errors.UnimplementedError, "text instead of numbers"),
    ],
)
def test_tensorflow_error_in_a_step_says_what_to_change(monkeypatch, error, words):
    def fails(*_):
        raise error(None, None, "Cast string to float")

    monkeypatch.setattr(FlatModel, "_call", fails)
    with pytest.raises(UserError, match=words):
        stepped(DATA.example(16))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_non_finite_gradient_with_finite_loss_is_reported(wire, on_host):
    def steep(_labels, predicted):
        return keras.ops.mean(keras.ops.sqrt(predicted * 0), axis=-1)

    def step(loss):
        model = functional()
        model.compile("sgd", loss=loss)
        flat_model = FlatModel(model, BATCHES[0], wire, on_host=on_host)
        buffer = aligned(flat_model.layout.size, flat_model.vector.dtype)
        return flat_model.step(flat_model.vector.alias(buffer), BATCHES[0])

    result = step(steep)
    assert result.loss == 0
    assert not result.finite
    assert step("sparse_categorical_crossentropy").finite


@pytest.mark.nightly
def test_worker_side_schedule_follows_the_jobs_updates():
    flat_model = FlatModel(
        functional(keras.optimizers.Adamax(schedules.PiecewiseConstantDecay([3], [0.1, 0.0]))),
        BATCHES[0], "fp32", (0, 1),
    )  # fmt: skip
    buffer = aligned(flat_model.layout.size)
    buffer[:] = flat_model.initial()
    parameters = flat_model.vector.alias(buffer)
    moved = [
        bool(np.asarray(flat_model.step(parameters, BATCHES[0], updates).update).any())
        for updates in (0, 3, 4, 100, 2)
    ]
    assert moved == [True, True, False, False, True]
