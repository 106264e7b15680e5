"""Training against plain Keras: the same numbers, bit for bit where the order of operations allows it."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Indexed
from shoal_trainer.data.source import Part
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.worker.compose import steps_per_push
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.layout import flatten
from shoal_trainer.worker.optimizers import why_worker
from tests.unit.trainer.worker.models import OwnStep, Plain, X, Y, begin, body, functional, job, subclassed
from tests.unit.trainer.worker.trained import ADAM, BATCHES, SGD, Server, pushed, schedules


@functools.cache
def trained(name, engine, wire="fp32", *, on_host=None):
    """The losses of 10 steps, the parameters after them, and their layout, of one of the models below."""
    server = Server((EXACT | CLOSE)[name](), wire, on_host=on_host)
    return [server.step(batch) for batch in BATCHES], server.flat(), server.flat_model.layout


@functools.cache
def in_keras(name, engine):
    """The losses and the model of the same in plain Keras."""
    plain, losses = (EXACT | CLOSE)[name](), []
    for batch in BATCHES:
        plain.reset_metrics()
        losses.append(float(plain.train_on_batch(batch.x, batch.y, return_dict=True)["loss"]))
    return losses, plain


def mixed_float16(optimizer):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return functional(optimizer)
    finally:
        keras.config.set_dtype_policy("float32")


def of_weights(kind, optimizer):
    keras.config.set_dtype_policy(kind)
    try:
        return functional(optimizer)
    finally:
        keras.config.set_dtype_policy("float32")


class Falling(schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 / (1 + keras.ops.cast(step, "float32"))

    def get_config(self):
        return {}


class AddsLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * keras.ops.mean(x**2))
        return x


def own_loss(y_true, y_pred):
    return 2 * keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)


def own_metric(y_true, y_pred):
    return keras.ops.max(y_pred, -1)


def own_parts():
    """What a model may add to its loss, and an optimizer that leaves out some variables."""
    optimizer = SGD(0.1, momentum=0.9, weight_decay=0.01)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    begin()
    parts = [keras.Input((6, 6, 1)), *body(dropout=0.3, regularizer="l2"), AddsLoss()]
    model = keras.Sequential(parts)
    model.compile(optimizer, own_loss, metrics=[own_metric])
    return model


MULTI, MAP = keras.optimizers.MultiOptimizer, keras.optimizers.OptimizerMap
EXACT = {
    "own parts": own_parts,
    "sgd": lambda: functional(SGD(0.1)),
    "momentum": lambda: functional(SGD(0.1, momentum=0.9)),
    "nesterov": lambda: functional(SGD(0.1, momentum=0.9, nesterov=True)),
    "dropout": lambda: functional(SGD(0.1), dropout=0.3),
    "regularizer": lambda: functional(SGD(0.1), regularizer="l2"),
    "clipnorm": lambda: functional(SGD(0.1, clipnorm=0.1)),
    "clipvalue": lambda: functional(SGD(0.1, clipvalue=0.01)),
    "weight_decay": lambda: functional(SGD(0.1, momentum=0.9, weight_decay=0.01)),
    "PiecewiseConstantDecay": lambda: functional(
        SGD(schedules.PiecewiseConstantDecay([3, 6], [0.1, 0.05, 0.01]))
    ),
    "loss_scale_factor": lambda: functional(SGD(0.1, loss_scale_factor=1024.0)),
}
CLOSE = {
    "own schedule": lambda: functional(SGD(Falling())),
    "adagrad": lambda: functional(keras.optimizers.Adagrad(0.05)),
    "global_clipnorm": lambda: functional(SGD(0.1, global_clipnorm=0.1)),
    "adam": lambda: functional(ADAM(0.01)),
    "adamw": lambda: functional(keras.optimizers.AdamW(0.01, weight_decay=0.01)),
    "cosine": lambda: functional(SGD(schedules.CosineDecay(0.1, 8, warmup_target=0.2, warmup_steps=3))),
    "exponential": lambda: functional(SGD(schedules.ExponentialDecay(0.1, 3, 0.5))),
    "batch_normalization": lambda: functional(SGD(0.1, momentum=0.9), norm=True),
    "subclassed": lambda: subclassed(optimizer=SGD(0.1)),
    "xla": lambda: functional(SGD(0.1), options={"jit_compile": True}),
    "mixed_float16": lambda: mixed_float16(SGD(0.1)),
    "mixed_float16 with overflows": lambda: mixed_float16(
        keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=2.0**20, dynamic_growth_steps=2)
    ),
    "float64": lambda: of_weights("float64", SGD(0.1)),
    "rmsprop": lambda: functional(keras.optimizers.RMSprop(0.001, momentum=0.5)),
    "nadam": lambda: functional(keras.optimizers.Nadam(0.01)),
    "lion": lambda: functional(keras.optimizers.Lion(0.001)),
    "mixed_float16 (worker)": lambda: mixed_float16(keras.optimizers.Adamax(0.001)),
    "rmsprop (worker)": lambda: functional(keras.optimizers.RMSprop(0.001, centered=True)),
    "lamb (worker)": lambda: functional(keras.optimizers.Lamb(0.01)),
    "adafactor (worker)": lambda: functional(keras.optimizers.Adafactor(0.01)),
    "muon (worker)": lambda: functional(keras.optimizers.Muon(0.01)),
    "adadelta (worker)": lambda: functional(keras.optimizers.Adadelta(1.0)),
    "adamax (worker)": lambda: functional(keras.optimizers.Adamax(0.01)),
    "several optimizers (worker)": lambda: functional(MULTI(MAP(ADAM(0.01), {".*bias": SGD(0.1)}))),
    "amsgrad (worker)": lambda: functional(ADAM(0.01, amsgrad=True)),
    "use_ema (worker)": lambda: functional(SGD(0.1, use_ema=True)),
    "constraint (worker)": lambda: functional(SGD(0.1), constraint=keras.constraints.MaxNorm(0.5)),
    "train_step (worker)": lambda: subclassed(OwnStep, SGD(0.1)),
}


@pytest.mark.by_day(2)
@pytest.mark.parametrize("name", EXACT)
def test_training_equals_keras_bit_for_bit(name, engine):
    losses, flat, layout = trained(name, engine, on_host=True)
    on_accelerator, other, _ = trained(name, engine, on_host=False)
    expected, plain = in_keras(name, engine)
    exact = flatten(plain, layout)
    if engine == "gpu":  # XLA adds in another order
        assert losses == pytest.approx(expected, rel=1e-5)
        assert on_accelerator == pytest.approx(expected, rel=1e-5)
        np.testing.assert_allclose([flat, other], [exact, exact], rtol=0, atol=1e-5)
        return
    assert losses == on_accelerator == expected
    assert np.array_equal(flat, exact)
    assert np.array_equal(other, exact)


@pytest.mark.by_day(3)
@pytest.mark.parametrize("name", CLOSE)
def test_training_equals_keras_within_rounding(name, engine):
    losses, flat, layout = trained(name, engine)
    expected, plain = in_keras(name, engine)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert np.abs(flat - flatten(plain, layout)).max() < 2e-5


@pytest.mark.parametrize("kind", ["float64", "bfloat16"])
def test_other_weights_are_said_to_be_held_in_float32(kind, caplog):
    Server(of_weights(kind, SGD(0.1)))
    assert f"weights in {kind}; they are held and exchanged in float32" in caplog.text
    caplog.clear()
    Server(EXACT["sgd"]())
    assert "float32" not in caplog.text


@pytest.mark.by_day(2)
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("optimizer", [SGD, keras.optimizers.Adamax])
def test_step_is_compiled_by_xla_only_with_jit_compile(optimizer, jit):
    flat_model = Server(functional(optimizer(0.001), options={"jit_compile": jit})).flat_model
    (traced,) = flat_model._traced.values()
    functions = traced.graph.as_graph_def().library.function
    assert any(function.attr["_XlaMustCompile"].b for function in functions) == jit


@pytest.mark.by_day(1)
@pytest.mark.parametrize("wire", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "name", ["momentum", "adam", "batch_normalization", "rmsprop (worker)", "train_step (worker)"]
)
def test_host_and_accelerator_paths_give_the_same_updates(name, wire, engine):
    losses, flat, layout = trained(name, engine, wire, on_host=True)
    others, other, _ = trained(name, engine, wire, on_host=False)
    if (name, engine) == ("batch_normalization", "gpu"):
        # XLA adds up the samples' losses in the kernel that gathers the step's numbers, or, in the program that also
        # tells whether the update is finite, computes them in one of their own: it rounds at other places. The gradient
        # comes from the probabilities, not from the loss.
        np.testing.assert_array_max_ulp(np.float32(losses), np.float32(others), 2)
    else:
        assert losses == others
    # XLA makes one instruction of the multiplication and the addition of a moving average, which rounds once, in one of
    # the programs and not in the other. (Without FMA, XLA_FLAGS=--xla_cpu_max_isa=AVX, all bits are equal.)
    assert np.array_equal(flat[: layout.trainable], other[: layout.trainable])
    np.testing.assert_array_max_ulp(flat, other, 4)
    if wire == "bf16" and "worker" not in name:
        expected, plain = in_keras(name, engine)
        assert losses == pytest.approx(expected, rel=0.05)
        assert np.abs(flat - flatten(plain, layout)).max() < 0.2


@pytest.mark.by_day(12)
@pytest.mark.parametrize("name", EXACT | CLOSE)
def test_only_unsupported_optimizers_run_on_the_worker(name):
    assert bool(why_worker((EXACT | CLOSE)[name]())) == ("worker" in name)


def test_reason_names_the_unsupported_optimizer_or_option():
    assert why_worker(CLOSE["rmsprop (worker)"]()) == "RMSprop(centered=True)"
    assert why_worker(CLOSE["lamb (worker)"]()) == "the parameter servers do not implement Lamb"
    assert why_worker(CLOSE["use_ema (worker)"]()) == "SGD(use_ema=True)"


class Unpacks(Plain):
    """A train_step as in the Keras guides."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Rebuilds(keras.Model):
    """A train_step whose data are x alone."""

    def __init__(self):
        super().__init__()
        self.middle, self.out = keras.layers.Dense(3), keras.layers.Dense(36)

    def call(self, x):
        return self.out(self.middle(keras.ops.reshape(x, (-1, 36))))

    def train_step(self, images):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(images) - keras.ops.reshape(images, (-1, 36))))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("kind", "given", "plain"),
    [
        (Unpacks, (X, Y), lambda x, y: (x, y)),
        (Rebuilds, (X,), lambda x, _: x),
    ],
)
def test_custom_train_step_gets_the_data_unpadded(kind, given, plain, engine):
    data = Indexed.from_arrays(*given)
    (whole,), (short,) = data.read(Part(0, 16), 16), data.read(Part(16, 21), 16)

    def make():
        keras.utils.set_random_seed(1)
        result = kind()
        result.compile(SGD(0.1), loss="sparse_categorical_crossentropy" if kind is Unpacks else None)
        return result

    flat_model = FlatModel(make(), whole, "fp32")
    buffer = aligned(flat_model.layout.size)
    buffer[:] = flat_model.initial()
    model = make()
    flat_model.load(buffer)
    model(whole.x)
    for own, other in zip(model.variables, flat_model.model.variables, strict=True):
        own.assign(other)
    for batch in (whole, short):
        result = flat_model.step(flat_model.vector.alias(buffer), batch)
        n = batch.samples
        logs = model.train_step(plain(batch.x[:n], None if batch.y is None else batch.y[:n]))
        assert result.loss == pytest.approx(float(logs["loss"]), rel=1e-5)
        buffer += result.update
        assert np.abs(buffer - flatten(model, flat_model.layout)).max() < (1e-6 if engine == "host" else 1e-5)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("optimizer", "clip"),
    [
        (SGD, {"clipnorm": 0.02}),
        (SGD, {}),
        (ADAM, {}),
        (ADAM, {"global_clipnorm": 0.05}),
        (ADAM, {"clipvalue": 0.005}),
        pytest.param(ADAM, {"clipnorm": 0.02}, marks=pytest.mark.nightly),
        pytest.param(SGD, {"global_clipnorm": 0.05}, marks=pytest.mark.nightly),
        pytest.param(SGD, {"clipvalue": 0.005}, marks=pytest.mark.nightly),
    ],
)
def test_accumulated_gradients_are_one_push(optimizer, clip):
    """Of which the mean is clipped."""

    def make():
        rate = schedules.ExponentialDecay(0.1, 5, 0.5)  # counted in batches
        return functional(optimizer(rate, gradient_accumulation_steps=5, **clip))

    plain = make()
    for batch in BATCHES:
        plain.train_on_batch(batch.x, batch.y)
    for on_host in (True, False):
        server = Server(make(), on_host=on_host)
        assert server.placement.on_server
        assert steps_per_push(job(make), server.flat_model.model) == 5
        for first in (0, 5):
            pushed(server, BATCHES[first : first + 5])
        assert np.abs(server.flat() - flatten(plain, server.flat_model.layout)).max() < 2e-5, on_host
