"""Losses with one value per sample, and losses without a gradient for some variables."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Indexed, Training
from shoal_trainer.data.source import Part
from shoal_trainer.errors import UserError
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.layout import flatten
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.models import Plain, X, Y, begin, compiled, functional
from tests.unit.trainer.worker.running import Running
from tests.unit.trainer.worker.trained import BATCHES, SGD, Server

crossentropy = keras.losses.sparse_categorical_crossentropy


class ComputesLoss(Plain):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return crossentropy(y, y_pred, from_logits=True)


class Steps(Plain):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = crossentropy(y, self(x), from_logits=True)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def unreduced(optimizer):
    model = functional(optimizer)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None))
    return model


def made(kind):
    begin()
    return compiled(kind(), SGD(0.01))


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "make",
    [
        lambda: unreduced(SGD(0.01)),
        lambda: unreduced(keras.optimizers.Adamax(0.001)),
        lambda: made(ComputesLoss),
    ],
    ids=["reduction=None", "worker-side", "compute_loss"],
)
def test_loss_with_one_value_per_sample_equals_keras(make):
    server, plain = Server(make()), make()
    for batch in BATCHES:
        plain.reset_metrics()
        expected = plain.train_on_batch(batch.x, batch.y, return_dict=True)["loss"]
        assert server.step(batch) == pytest.approx(float(expected), rel=1e-4)
    assert np.abs(server.flat() - flatten(plain, server.flat_model.layout)).max() < 2e-5


@pytest.mark.nightly
def test_vector_loss_of_a_train_step_is_reported_as_its_mean():
    server, plain = Server(made(Steps)), made(Steps)
    expected = crossentropy(BATCHES[0].y, plain(BATCHES[0].x), from_logits=True)
    assert server.step(BATCHES[0]) == pytest.approx(float(np.mean(expected)), rel=1e-5)


def test_loss_without_any_gradient_is_refused():
    model = functional()
    model.compile("sgd", lambda _, predicted: keras.ops.mean(keras.ops.stop_gradient(predicted), axis=-1))
    with pytest.raises(UserError, match=r"^The loss has no gradient for any variable"):
        FlatModel(model, BATCHES[0], "fp32").trace()


def heads():
    begin()
    inputs = keras.Input((6, 6, 1))
    x = keras.layers.Flatten()(inputs)
    model = keras.Model(
        inputs, [keras.layers.Dense(4, name="used")(x), keras.layers.Dense(4, name="unused")(x)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(SGD(0.1, weight_decay=0.1), [loss, None])
    return model


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
def test_variables_without_gradient_do_not_decay_and_are_named(caplog):
    data = Indexed.from_arrays(X[:64], [Y[:64], Y[:64]])
    batch = data.example(16)
    server, plain = Server(heads(), example=batch), heads()
    assert "unused/kernel, unused/bias: not trained" in caplog.text
    for _ in range(5):
        server.step(batch)
        plain.train_on_batch(batch.x, batch.y)
    assert np.abs(server.flat() - flatten(plain, server.flat_model.layout)).max() < 1e-6


def test_placement_of_a_worker_excludes_variables_without_gradient_from_decay(start_servers):
    data = Indexed.from_arrays(X[:64], [Y[:64], Y[:64]])
    servers = start_servers(FakeCoordinator(64, epochs=1, tasks=()))
    running = Running(Training(model=heads, data=data), servers, FakeCoordinator(64, epochs=1, tasks=()))
    layout = running.flat_model.layout
    unused = [(e.offset, e.offset + e.size) for e in layout.entries if "unused" in e.path]
    assert list(running.worker.spec.optimizer.no_decay) == unused
    running.worker.close()


def test_sum_over_a_short_batch_is_reported_as_its_own():
    """Its gradient is that of a full batch, because the push weighs by its samples."""

    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3,))
        parts = {name: keras.layers.Dense(1, name=name, kernel_regularizer="l2")(inputs) for name in "ab"}
        model = keras.Model(inputs, parts)
        losses = {"a": keras.losses.MeanSquaredError(reduction="sum"), "b": "mse"}
        model.compile(SGD(0.01), losses, loss_weights={"a": 0.5, "b": 2.0})
        return model

    x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
    data = Indexed.from_arrays(x, {"a": x[:, :1], "b": x[:, 1:2]}, seed=0)
    full, short = data.read(Part(0, 24), 16)
    server, plain = Server(make(), example=full), make()
    assert server.step(full) == pytest.approx(
        float(plain.compute_loss(y=full.y, y_pred=plain(full.x))), rel=1e-5
    )
    server.flat_model.load(server.flat())
    now = server.flat_model.model
    x, y = short.as_given()
    expected = float(now.compute_loss(y=y, y_pred=now(x)))
    assert server.step(short) == pytest.approx(expected, rel=1e-5)
