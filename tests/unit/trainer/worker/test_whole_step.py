"""Models of which no part can be computed apart from Keras' own step, as their first trace shows."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import UserError
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.layout import flatten
from shoal_trainer.worker.optimizers import place
from tests.unit.trainer.worker.models import begin, compiled
from tests.unit.trainer.worker.trained import BATCHES, SGD, Server

L, ops = keras.layers, keras.ops
both = pytest.mark.parametrize("engine", ["host", "gpu"], indirect=True)


class Around(L.Layer):
    """`function` of the layer's parts and its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.dense, self.norm = L.Dense(6, activation="tanh"), L.BatchNormalization()
        self.drop, self.seed = L.Dropout(0.3, seed=1), keras.random.SeedGenerator(1)
        self.count = self.add_weight(shape=(), trainable=False, initializer="zeros")
        self.share = self.add_weight(shape=(), trainable=False, initializer="ones")

    def build(self, shape):
        self.dense.build(shape)
        self.norm.build(shape)

    def compute_output_shape(self, shape):
        return shape

    def call(self, x, training=False):
        training_of = SimpleNamespace(norm=lambda x: self.norm(x, training=training))
        return self.function(self, x, training_of)


class Cell(L.Layer):
    state_size = output_size = 6

    def __init__(self):
        super().__init__()
        self.dense, self.drop = L.Dense(6, activation="tanh"), L.Dropout(0.2, seed=1)

    def build(self, shape):
        self.dense.build((None, shape[-1] + 6))

    def call(self, x, states, training=False):
        out = self.drop(self.dense(ops.concatenate([x, states[0]], -1)), training=training)
        return out, [out]


def with_its_own_gradient(layer, x, _):
    @tf.custom_gradient
    def function(x):
        kernel = tf.convert_to_tensor(layer.dense.kernel)

        def gradient(upstream, variables=()):
            of_kernel = tf.matmul(x, upstream, transpose_a=True)
            found = [of_kernel if v.shape.rank == 2 else tf.zeros_like(v) for v in variables]
            of_x = tf.matmul(upstream, kernel, transpose_b=True)
            return (of_x, found) if variables else of_x

        return tf.matmul(x, kernel), gradient

    return function(x)


def reversed_gradient(layer, x, _):
    @tf.custom_gradient
    def function(x):
        share = tf.convert_to_tensor(layer.share)
        return tf.identity(x), lambda upstream: -share * upstream

    return function(x)


def counted(layer, x):
    layer.count.assign_add(1.0)
    return x


def noisy(layer, x):
    return x + keras.random.normal(ops.shape(x), seed=layer.seed)


def counted_in_tensorflow(layer, x, _):
    layer.count.value.assign_add(1.0)
    return x


def descending(layer, x, parts):
    """A gradient by TensorFlow's variable within the step, as one that is a part of the loss."""
    with tf.GradientTape() as tape:
        energy = ops.sum(layer.dense(x) ** 2)
    return x - 0.1 * ops.mean(tape.gradient(energy, layer.dense.kernel.value))


def branch(of):
    return lambda layer, x, parts: ops.cond(ops.mean(x) > -99, lambda: of(layer, x, parts), lambda: x)


def loop(function, x):
    step = lambda count, x: (count + 1, function(x))  # noqa: E731
    return tf.while_loop(lambda count, _: count < 2, step, [0, x], maximum_iterations=2)[1]


LOOP = "in a loop or a branch"
FUNCTIONS = {
    "keras.remat": (lambda layer, x, _: keras.remat(layer.dense.call)(x), "a tf.custom_gradient uses"),
    "tf.recompute_grad": (lambda layer, x, _: tf.recompute_grad(layer.dense.call)(x), "uses .*/(kernel|bias)"),
    "tf.custom_gradient": (with_its_own_gradient, "a tf.custom_gradient uses .*/kernel"),
    "a count of TensorFlow": (counted_in_tensorflow, "no part .* apart .*SymbolicTensor.*assign_add"),
    "a gradient by TensorFlow's variable": (descending, "no part .* apart .*None values"),
    "a count in keras.remat": (lambda layer, x, _: keras.remat(lambda x: counted(layer, x))(x), "assigns"),
    "a statistic in a branch": (branch(lambda _layer, x, parts: parts.norm(x)), f"assigns .*moving_.* {LOOP}"),
    "a count in a branch": (branch(lambda layer, x, _: counted(layer, x)), LOOP),
    "noise in a branch": (branch(lambda layer, x, _: noisy(layer, x)), f"assigns .*seed_generator_state {LOOP}"),
    "a statistic in a loop": (lambda _layer, x, parts: loop(parts.norm, x), LOOP),
    "noise of each row": (lambda layer, x, _: tf.map_fn(lambda row: noisy(layer, row), x), LOOP),
}  # fmt: skip


def around(function, optimizer=None, **options):
    begin()
    layers = [keras.Input((6, 6, 1)), L.Flatten(), L.Dense(6), Around(function), L.Dense(4)]
    return compiled(keras.Sequential(layers), optimizer or SGD(0.1), **options)


def recurrent():
    begin()
    return compiled(
        keras.Sequential([keras.Input((6, 6, 1)), L.Reshape((6, 6)), L.RNN(Cell()), L.Dense(4)]), SGD(0.1)
    )


def trains_as_in_keras(make, words):
    server, plain = Server(make()), make()
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(server.placement.reason)
    for batch in BATCHES:
        server.step(batch)
        plain.train_on_batch(batch.x, batch.y)
    assert np.abs(server.flat() - flatten(plain, server.flat_model.layout)).max() < 2e-6


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_keras_can_only_compute_whole_trains_as_in_keras(name):
    function, words = FUNCTIONS[name]
    trains_as_in_keras(lambda: around(function), words)


def test_random_cell_of_a_recurrent_layer_trains_as_in_keras():
    trains_as_in_keras(recurrent, f"assigns .*seed_generator_state {LOOP}")


def test_layer_that_assigns_a_trainable_variable_trains_as_in_keras():
    class Halves(L.Dense):
        def call(self, x):
            self.bias.assign(self.bias * 0.5)
            return super().call(x)

    def make():
        begin()
        layers = [keras.Input((6, 6, 1)), L.Flatten(), Halves(4, name="halves")]
        return compiled(keras.Sequential(layers), SGD(0.1))

    trains_as_in_keras(make, r"^a layer assigns \S*halves/bias in its call\(\)$")


APART = {
    "a gradient of its own that uses its arguments": lambda _layer, x, _: ops.silu(x),
    "a gradient of its own that uses a frozen weight": reversed_gradient,
    "a loop that assigns nothing": lambda layer, x, _: tf.map_fn(layer.dense.call, x[:, None])[:, 0],
    "a branch that assigns nothing": branch(lambda layer, x, _: layer.dense(x)),
    "a function that is traced apart": lambda layer, x, _: tf.function(lambda x: x + layer.count)(x),
}


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("name", APART)
def test_optimizer_of_other_models_stays_on_the_servers(name):
    flat_model = FlatModel(around(APART[name]), BATCHES[0], "fp32")
    flat_model.trace()
    assert (flat_model.found.whole, flat_model.on_server) == ("", True)


@both
@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("name", ["keras.remat", "a statistic in a loop"])
def test_step_is_that_of_a_model_with_a_train_step(name):
    """Whatever the trace of a part has left behind: the loss of a sum, schedules, a compiled program."""

    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    def stepped(kind):
        begin()
        layers = [keras.Input((6, 6, 1)), L.Flatten(), L.Dense(6), Around(FUNCTIONS[name][0]), L.Dense(4)]
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        model = kind(layers)
        model.compile(SGD(rate), keras.losses.SparseCategoricalCrossentropy(True, reduction="sum"))
        flat_model = FlatModel(model, BATCHES[0], "fp32", reference=64)
        flat_model.trace()
        flat_model.compile()
        start = flat_model.vector.alias(flat_model.coded(flat_model.vector.dtype))
        return np.asarray(flat_model.step(start, BATCHES[0], updates=6).update), flat_model.found.counts

    (update, counts), (expected, as_many) = stepped(keras.Sequential), stepped(Own)
    np.testing.assert_allclose(update, expected, rtol=1e-4, atol=1e-6)
    assert counts == as_many


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
def test_accumulation_on_the_worker_is_refused_with_the_reason():
    model = around(FUNCTIONS["keras.remat"][0], SGD(0.1, gradient_accumulation_steps=2))
    flat_model = FlatModel(model, BATCHES[0], "fp32")
    flat_model.trace()
    with pytest.raises(UserError, match=r"not supported: keras.remat or a tf.custom_gradient uses"):
        place(model, flat_model.layout, 16, (), flat_model.found.whole)


def test_scales_of_float8_are_each_workers_own():
    """A step overwrites them: the sum of what several workers change would be as many times as far."""

    def network(rate):
        keras.utils.set_random_seed(1)
        layers = [keras.Input((6, 6, 1)), L.Flatten(), L.Dense(8, activation="relu"), L.Dense(4)]
        model = keras.Sequential(layers)
        for layer in model.layers[1:]:
            layer.quantize("float8")
        return compiled(model, SGD(rate))

    workers = [FlatModel(network(0.1), BATCHES[0], "fp32") for _ in range(2)]
    assert not [entry.path for entry in workers[0].layout.entries if "scale" in entry.path]
    for worker in workers:
        worker.trace()
    plain, flat = network(0.2), aligned(workers[0].layout.size)
    flat[:] = workers[0].initial()
    for batch in BATCHES[:6]:
        loss = float(plain.train_on_batch(batch.x, batch.y, return_dict=True)["loss"])
        steps = [worker.step(worker.vector.alias(flat), batch) for worker in workers]
        assert [step.loss for step in steps] == pytest.approx([loss] * 2, rel=1e-5)
        flat += sum(np.array(step.update) for step in steps)
    for worker in workers:
        for ours, keras_own in zip(worker.model.trainable_variables, plain.trainable_variables, strict=True):
            if keras_own.overwrite_with_gradient:
                np.testing.assert_allclose(ours.numpy(), keras_own.numpy(), rtol=1e-4)
