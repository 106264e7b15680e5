"""Optimizers that run on the worker: non-finite batches, state that the step assigns, the reported loss."""

from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Indexed
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.layout import flatten
from shoal_trainer.worker.loop import End
from shoal_trainer.worker.optimizers import place, take_average
from tests.unit.trainer.ps.shards import pull_from
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.models import DATA, Plain, X, Y, begin, compiled, functional, job
from tests.unit.trainer.worker.running import Running
from tests.unit.trainer.worker.trained import BATCHES, SGD, Server

NON_FINITE = replace(BATCHES[0], x=BATCHES[0].x * np.nan)


class TwoOptimizers(Plain):
    """A train_step with an optimizer of its own next to that of `compile()`."""

    def __init__(self):
        super().__init__()
        self.other = keras.optimizers.Adamax(0.001)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        variables = self.trainable_variables
        first, *rest = tape.gradient(loss, variables)
        self.optimizer.apply([first], variables[:1])
        self.other.apply(rest, variables[1:])
        return {"loss": loss}


def two_optimizers(**options):
    begin()
    model = TwoOptimizers()
    model(BATCHES[0].x)
    model.other.build(model.trainable_variables[1:])
    return compiled(model, keras.optimizers.Adamax(0.001), **options)


def adamax(**options):
    return functional(keras.optimizers.Adamax(0.001), options=options)


def use_ema(**options):
    return functional(SGD(0.1, use_ema=True), options=options)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("make", "jit"),
    [
        (adamax, False),
        (use_ema, False),
        (two_optimizers, False),
        (two_optimizers, True),
        pytest.param(adamax, True, marks=pytest.mark.nightly),
        pytest.param(use_ema, True, marks=pytest.mark.nightly),
    ],
)
def test_non_finite_batch_leaves_the_optimizer_state_as_it_was(make, jit):
    server, clean = Server(make(jit_compile=jit)), Server(make(jit_compile=jit))
    for one in (server, clean):
        one.step(BATCHES[0])
    server.take()
    assert not server.flat_model.step(server.tensor, NON_FINITE).finite
    for batch in BATCHES[1:4]:
        assert server.step(batch) == clean.step(batch)
    assert np.array_equal(server.flat(), clean.flat())
    states = zip(*(one.flat_model.model.optimizer.variables for one in (server, clean)), strict=True)
    assert all(np.array_equal(own, expected) for own, expected in states)


class OwnSGD(SGD):
    """Of this nobody knows more than of its base."""


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("optimizer", "normalized"),
    [
        (keras.optimizers.Adamax(), True),
        (keras.optimizers.Lamb(), True),
        (keras.optimizers.Adam(use_ema=True), True),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop(centered=True)), True),
        (SGD(0.1, use_ema=True), False),
        (OwnSGD(0.1), False),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_worker_says_whether_its_optimizer_divides_by_the_size_of_gradients(optimizer, normalized):
    model = functional(optimizer)
    config = place(model, FlatModel(model, BATCHES[0], "fp32").layout, 16).config
    assert (config.name, config.normalized) == ("delta", normalized)


def test_optimizers_of_a_multi_optimizer_keep_schedules_and_averages():
    """A schedule follows the updates of the job, and the export has the average of those that have one."""
    steps = keras.optimizers.schedules.PiecewiseConstantDecay([50], [0.1, 0.0])
    averaging = SGD(steps, use_ema=True, ema_momentum=0.5)
    kinds = keras.optimizers.OptimizerMap(SGD(steps), {".*bias": averaging})
    server = Server(functional(keras.optimizers.MultiOptimizer(kinds)))
    model, layout = server.flat_model.model, server.flat_model.layout
    for batch in BATCHES[:2]:
        server.step(batch)
    last = server.flat()
    server.flat_model.load(last)
    take_average(model)
    found = zip(layout.entries, layout.pieces(flatten(model, layout)), layout.pieces(last), strict=True)
    for entry, average, own in found:
        assert np.array_equal(average, own) != entry.path.endswith("bias")
    server.samples = 16 * 100
    server.step(BATCHES[2])
    assert np.array_equal(server.flat(), last)


@pytest.mark.nightly
def test_adamax_trains_on_after_a_skipped_batch(start_servers):
    coordinator = FakeCoordinator(DATA.size, tasks=())
    servers = start_servers(coordinator)
    x = X.copy()
    x[40] = np.nan
    training = replace(
        job(lambda: functional(keras.optimizers.Adamax(0.001)), wire="fp32", on_nan="skip"),
        data=Indexed.from_arrays(x, Y),
    )
    running = Running(training, servers, coordinator)
    before = running.flat_model.initial()
    assert running.start().join() is End.FINISHED
    assert all(np.isfinite(np.asarray(v)).all() for v in running.flat_model.model.optimizer.variables)
    flat = np.zeros(running.flat_model.layout.size, np.float32)
    pull_from(servers.stores[0], 0, flat)
    assert np.isfinite(flat).all()
    assert not np.array_equal(flat, before)


class Taught(keras.Model):
    """A student with a frozen teacher that averages it, or copies it into `target`."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher, self.target = (
            keras.Sequential([keras.Input((36,)), keras.layers.Dense(4)]) for _ in range(3)
        )
        self.teacher.trainable = self.target.trainable = False
        self.frozen = keras.layers.Dense(36, trainable=False)
        self.steps = self.add_weight(shape=(), dtype="int32", trainable=False, name="steps")

    def call(self, x):
        return self.student(self.frozen(keras.ops.reshape(x, (-1, 36))))

    def train_step(self, data):
        logs = super().train_step(data)
        for own, slow, copy in zip(
            self.student.weights, self.teacher.weights, self.target.weights, strict=True
        ):
            slow.assign(0.5 * slow + 0.5 * own)
            copy.assign(own)
        self.steps.assign_add(1)
        return logs


def taught():
    begin()
    return compiled(Taught(), SGD(0.1))


def test_frozen_weights_that_a_train_step_assigns_stay_on_the_worker_and_are_named(caplog):
    server, plain = Server(taught()), taught()
    layout = server.flat_model.layout
    assert len(layout.entries) == 2
    for name in ("sequential_1/dense_1/kernel", "sequential_2/dense_2/bias", "steps"):
        assert name in caplog.text
    assert "not exchanged" in caplog.text
    for batch in BATCHES:
        server.step(batch)
        plain.train_on_batch(batch.x, batch.y)
    server.flat_model.load(server.flat())
    for part in ("student", "teacher", "target"):
        own, expected = (
            np.concatenate([np.ravel(w) for w in getattr(model, part).get_weights()])
            for model in (server.flat_model.model, plain)
        )
        assert np.abs(own - expected).max() < 2e-5


class Averages(keras.layers.Layer):
    """A frozen layer that averages its input."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
        return x - self.mean


@pytest.mark.nightly
def test_state_that_a_frozen_layer_assigns_stays_on_the_worker_and_is_named(caplog):
    def make():
        begin()
        parts = [keras.layers.Flatten(), Averages(trainable=False), keras.layers.Dense(4)]
        return compiled(keras.Sequential([keras.Input((6, 6, 1)), *parts]), SGD(0.1))

    server, plain = Server(make()), make()
    for batch in BATCHES:
        server.step(batch)
        plain.train_on_batch(batch.x, batch.y)
    assert "averages/variable: not exchanged" in caplog.text
    own, expected = (model.layers[1].mean.numpy() for model in (server.flat_model.model, plain))
    assert np.abs(expected).max() > 0.01
    assert np.abs(own - expected).max() < 1e-6
    assert server.flat_model.layout.size == 36 * 4 + 4


class OwnMetrics(Plain):
    """`metrics` as in the Keras guide on `compute_loss`, without the loss tracker."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="mine")

    @property
    def metrics(self):
        return [self.tracker]


@pytest.mark.nightly
def test_loss_of_each_step_is_reported_if_metrics_are_overridden():
    def make():
        begin()
        return compiled(OwnMetrics(), keras.optimizers.Adamax(1e-9))

    server = Server(make())
    losses = [server.step(replace(BATCHES[0], x=BATCHES[0].x * factor)) for factor in (1, 100, 1)]
    assert losses[2] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1] > 2 * losses[0]


@pytest.mark.nightly
def test_spectral_normalization_trains_as_in_keras():
    def make():
        begin()
        parts = [keras.layers.Flatten(), keras.layers.SpectralNormalization(keras.layers.Dense(4))]
        return compiled(keras.Sequential([keras.Input((6, 6, 1)), *parts]), SGD(0.1))

    server, plain = Server(make()), make()
    assert server.placement.reason.startswith("a layer assigns ")
    for batch in BATCHES:
        server.step(batch)
        plain.train_on_batch(batch.x, batch.y)
    assert np.abs(server.flat() - flatten(plain, server.flat_model.layout)).max() < 2e-5


@pytest.mark.nightly
def test_xla_compiles_the_step_of_a_local_optimizer():
    flat_model = FlatModel(
        functional(keras.optimizers.Adamax(), options={"jit_compile": True}), BATCHES[0], "fp32"
    )
    flat_model.trace()
    (traced,) = flat_model._traced.values()
    graph = traced.graph.as_graph_def()
    functions = [
        f for f in graph.library.function if "_XlaMustCompile" in f.attr and f.attr["_XlaMustCompile"].b
    ]
    assert functions


class Decorated(keras.layers.Dense):
    """Its function is traced when the model is built, with the variables of the layer."""

    @tf.function
    def call(self, x, training=None):
        return super().call(x)


@pytest.mark.nightly
def test_layer_whose_call_is_a_tf_function_trains_on_the_worker():
    def make():
        begin()
        layers = [keras.layers.Flatten(), Decorated(8), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((6, 6, 1)), *layers])
        model(X[:1])
        return compiled(model, SGD(0.1))

    server, plain = Server(make()), make()
    assert "is a tf.function" in server.placement.reason
    for batch in BATCHES:
        server.step(batch)
        plain.train_on_batch(batch.x, batch.y)
    assert np.abs(server.flat() - flatten(plain, server.flat_model.layout)).max() < 2e-6


@pytest.mark.nightly
def test_loss_of_a_step_that_returns_other_values_first_is_found():
    class Counts(Plain):
        def train_step(self, data):
            return {"step": tf.constant(7), "a_loss": super().train_step(data)["loss"]}

    begin()
    assert 0 < Server(compiled(Counts(), SGD(0.1))).step(BATCHES[0]) < 7
