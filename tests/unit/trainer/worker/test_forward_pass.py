"""What layers get from the call of the model in a step, as in Keras: `training`, losses, dtypes, repeated calls."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Indexed
from shoal_trainer.data.source import Part
from shoal_trainer.wire.messages import PushMeta
from shoal_trainer.worker.layout import flatten
from tests.unit.trainer.ps.shards import push_to
from tests.unit.trainer.worker.models import begin
from tests.unit.trainer.worker.trained import SGD, Server, pushed

layers = keras.layers
rng = np.random.default_rng(0)
X = rng.normal(size=(160, 3)).astype(np.float32)
BATCHES = list(Indexed.from_arrays(X, X[:, :1], seed=0).read(Part(0, 160), 16))


class Block(layers.Layer):
    """Its `call` has no argument `training`, as its layers have."""

    def __init__(self):
        super().__init__()
        self.parts = [layers.Dense(3), layers.BatchNormalization(momentum=0.5), layers.Dropout(0.5)]

    def build(self, shape):
        for part in self.parts:
            part.build(shape)

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


class PassesNothingOn(keras.Model):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), layers.Dense(1)

    def call(self, x, training=None):
        return self.head(self.block(x))


class TakesNothing(PassesNothingOn):
    def call(self, x):
        return self.head(self.block(x))


class OwnWeight(keras.Model):
    def __init__(self):
        super().__init__()
        self.kernel = self.add_weight(shape=(3, 1), initializer="ones", name="kernel")

    def call(self, x):
        return tf.matmul(x, self.kernel)


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x**2))
        return x


class OwnLoss(keras.Model):
    """compute_loss as before Keras 3.3, and one that adds up the layers' losses itself."""

    def __init__(self):
        super().__init__()
        self.middle = layers.Dense(3, activity_regularizer="l2", kernel_regularizer="l2")
        self.head = layers.Dense(1)

    def call(self, x):
        return self.head(self.middle(self.middle(x)))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return keras.ops.mean((y - y_pred) ** 2) + 3 * sum(self.losses)


def functional(*parts):
    inputs = x = keras.Input((3,))
    for part in parts:
        x = part(x)
    return keras.Model(inputs, layers.Dense(1)(x))


def twice(*parts):
    return functional(*parts, *parts)


def added_between():
    added = AddsLoss()
    return functional(layers.Dense(3), added, layers.Dense(3), added)


MODELS = {
    "functional": lambda: functional(Block()),
    "sequential": lambda: keras.Sequential([keras.Input((3,)), Block(), layers.Dense(1)]),
    "training not passed on": PassesNothingOn,
    "training not taken": TakesNothing,
    "own weight": OwnWeight,
    "add_loss": lambda: functional(layers.Dense(3), AddsLoss()),
    "add_loss of two layers": lambda: functional(layers.Dense(3), AddsLoss(), AddsLoss()),
    "add_loss of a shared layer": added_between,
    "activity of a shared layer": lambda: twice(layers.Dense(3, activity_regularizer="l2")),
    "compute_loss": OwnLoss,
}


def made(kind, policy="float32", **options):
    begin()
    keras.config.set_dtype_policy(policy)
    try:
        model = kind()
        model.compile(SGD(0.1), "mse", **options)
        model(tf.constant(X[:2]))
    finally:
        keras.config.set_dtype_policy("float32")
    return model


def in_keras(model, batches):
    losses = []
    for batch in batches:
        losses.append(float(model.train_on_batch(tf.constant(batch.x), tf.constant(batch.y))))
        model.reset_metrics()
    return losses


MIXED = list(MODELS)[:5]
"""Keras itself adds no loss of a bfloat16 layer to a float32 one."""


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("name", "policy"),
    [*((name, "float32") for name in MODELS), *((name, "mixed_bfloat16") for name in MIXED)],
)
def test_step_is_that_of_keras(name, policy):
    server, plain = Server(made(MODELS[name], policy), example=BATCHES[0]), made(MODELS[name], policy)
    losses = [server.step(batch) for batch in BATCHES[:3]]
    assert losses == pytest.approx(in_keras(plain, BATCHES[:3]), rel=1e-4 if policy == "float32" else 1e-2)
    exact = flatten(plain, server.flat_model.layout)
    assert np.abs(server.flat() - exact).max() < (2e-5 if policy == "float32" else 2e-2)


def test_samples_of_another_dtype_are_cast():
    data = Indexed(
        160, lambda a, b: tf.data.Dataset.from_tensor_slices((X[a:b].astype(np.float64), X[a:b, :1]))
    )
    batches = list(data.read(Part(0, 32), 16))
    server, plain = Server(made(OwnWeight), example=batches[0]), made(OwnWeight)
    assert [server.step(batch) for batch in batches] == pytest.approx(in_keras(plain, batches), rel=1e-5)


class SiameseStep(keras.Model):
    """A train_step that calls its normalization once per view."""

    def __init__(self, momentum):
        super().__init__()
        self.norm, self.head = layers.BatchNormalization(momentum=momentum), layers.Dense(1)

    def call(self, x, training=None):
        return self.head(self.norm(x, training=training))

    def train_step(self, data):
        x, y, *_ = data
        with tf.GradientTape() as tape:
            first, second = self(0.1 * x, training=True), self(0.2 * x, training=True)
            loss = keras.ops.mean((first - second - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def shared(calls, momentum):
    norm, inputs = layers.BatchNormalization(momentum=momentum), keras.Input((3,))
    branches = [norm((number + 1) * 0.1 * inputs) for number in range(calls)]
    return keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(branches)))


REPEATED = {
    "once": lambda: shared(1, 0.9),
    "twice": lambda: shared(2, 0.9),
    "three times": lambda: shared(3, 0.99),
    "in a train_step": lambda: SiameseStep(0.9),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("jit", "on_host"),
    [(False, True), (False, False), pytest.param(True, True, marks=pytest.mark.nightly), (True, False)],
)
@pytest.mark.parametrize("name", REPEATED)
def test_averages_move_once_per_call_of_their_layer(name, jit, on_host):
    server = Server(made(REPEATED[name], jit_compile=jit), example=BATCHES[0], on_host=on_host)
    plain = made(REPEATED[name], jit_compile=jit)
    for batch in BATCHES:
        server.step(batch)
    in_keras(plain, BATCHES)
    assert np.abs(server.flat() - flatten(plain, server.flat_model.layout)).max() < 2e-5


@pytest.mark.nightly
@pytest.mark.parametrize("name", REPEATED)
def test_variance_stays_one_that_was_seen_with_many_steps_on_one_version(name):
    """8 workers on the parameters of one version, and 20 steps in one push."""
    rounds, pile = (Server(made(REPEATED[name]), example=BATCHES[0]) for _ in range(2))
    rounds.take()
    updates = [np.array(rounds.flat_model.step(rounds.tensor, batch).update) for batch in BATCHES[:8]]
    for slot, update in enumerate(updates):
        rounds.io[:] = update
        push_to(rounds.store, slot, 0, 1, rounds.version, PushMeta(16), rounds.io)
    pushed(pile, BATCHES * 2)
    for server in (rounds, pile):
        server.flat_model.load(server.flat())
        (norm,) = (each for each in server.flat_model.model.layers if hasattr(each, "moving_variance"))
        assert 0.005 < norm.moving_variance.numpy().min() < norm.moving_variance.numpy().max() < 1


class NeverCalls(keras.Model):
    """Its normalization is built, and called outside of training only."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = layers.BatchNormalization(), layers.Dense(1)

    def build(self, shape):
        self.norm.build(shape)
        self.head.build(shape)

    def call(self, x, training=None):
        return self.head(x if training else self.norm(x))


@pytest.mark.nightly
def test_average_of_a_layer_that_no_step_calls_stays():
    server = Server(made(NeverCalls), example=BATCHES[0])
    before = server.flat()[server.flat_model.layout.trainable :]
    for batch in BATCHES[:3]:
        server.step(batch)
    assert np.array_equal(server.flat()[server.flat_model.layout.trainable :], before)
