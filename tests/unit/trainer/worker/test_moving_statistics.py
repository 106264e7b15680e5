"""Moving means and variances of a model, as its pushes move them."""

import keras
import numpy as np
import pytest

from shoal_trainer import Indexed
from shoal_trainer.data.source import Part
from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.layout import flatten
from shoal_trainer.worker.send import Pile
from tests.unit.trainer.worker.models import Plain, begin, compiled, functional, subclassed
from tests.unit.trainer.worker.trained import BATCHES, SGD, Server, push, pushed


def statistics(server):
    return server.flat()[server.flat_model.layout.trainable :]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("momentum", [0.5, 0.99])
@pytest.mark.parametrize("late", [False, True], ids=["waits", "overlaps"])
def test_push_moves_statistics_as_far_as_its_steps_would(momentum, late, on_host):
    """All batches are equal, so that their order has no effect. Late: on the parameters before the last push."""

    def make():
        return functional(SGD(0.0), norm=True, momentum=momentum)

    server, plain = Server(make(), on_host=on_host), make()
    before = server.flat()
    for _ in range(4):
        pile, now = Pile(server.flat_model.mean()), server.flat()
        server.buffer[:] = before if late else now
        for _ in range(8):
            pile.add(server.flat_model.step(server.tensor, BATCHES[0]), Ready(None, BATCHES[0]))
            plain.train_on_batch(BATCHES[0].x, BATCHES[0].y)
        push(server, pile)
        before = now
    expected = flatten(plain, server.flat_model.layout)[server.flat_model.layout.trainable :]
    np.testing.assert_allclose(statistics(server), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_discarded_batch_moves_nothing(wire, on_host):
    """Where every batch of a push has a gradient that is not finite, and where one has."""
    server = Server(functional(SGD(0.1), norm=True), wire, on_host=on_host)
    pushed(server, BATCHES[:2])
    before = server.flat()
    server.take()
    pile = Pile(server.flat_model.mean())
    for batch in BATCHES[2:4]:
        step = server.flat_model.step(server.tensor, batch)
        still = server.flat_model.still(server.flat_model.vector.on_devices(server.tensor))
        pile.add(type(step)(still, 0.5, True, skipped=True), Ready(None, batch))
    push(server, pile)
    np.testing.assert_allclose(server.flat(), before, rtol=0 if wire == "fp32" else 2**-8)
    low = server.flat_model.layout.trainable
    np.testing.assert_array_equal(server.flat()[:low], before[:low])


class Centered(keras.layers.Layer):
    """Subtracts a constant that bf16 does not have."""

    def build(self, shape):
        constant = keras.initializers.Constant(20103.4)
        self.mean = self.add_weight(shape=shape[1:], initializer=constant, trainable=False)

    def call(self, x):
        return x - self.mean


@pytest.mark.nightly
@pytest.mark.parametrize("on_host", [True, False])
def test_statistics_of_raw_columns_are_those_of_keras_on_a_wire_of_bf16(on_host):
    """Columns such as years, whose spread is small beside their mean; an odd number of values is trained."""

    def make():
        begin()
        inputs = keras.Input((3,))
        centered = Centered()(inputs + 18093.1)
        normal = keras.layers.BatchNormalization(momentum=0.9)(keras.layers.Concatenate()([inputs, centered]))
        return compiled(keras.Model(inputs, keras.layers.Dense(3)(normal)), SGD(0.05))

    rng = np.random.default_rng(0)
    x = rng.normal(2010.3, 5, (64, 3)).astype("float32")
    data = Indexed.from_arrays(x, (x[:, 0] > 2010).astype("int64"))
    batches = list(data.read(Part(0, 64), 16))
    server, plain = Server(make(), "bf16", on_host=on_host, example=batches[0]), make()
    assert server.flat_model.layout.trainable % 2
    for batch in batches * 5:
        server.step(batch)
        plain.train_on_batch(batch.x, batch.y)
    expected = flatten(plain, server.flat_model.layout)[server.flat_model.layout.trainable :]
    np.testing.assert_allclose(statistics(server), expected, rtol=1e-4)
    after = flatten(plain, server.flat_model.layout)[: server.flat_model.layout.trainable]
    np.testing.assert_allclose(server.flat()[: after.size], after, atol=0.02)


class Tuned(Plain):
    """Keras' idiom of fine-tuning: a part that normalizes as it was trained, in a model that is trained as a whole."""

    def __init__(self):
        super().__init__()
        self.norm = keras.layers.BatchNormalization()

    def call(self, x):
        return super().call(self.norm(x, training=False))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_statistics_that_no_call_moves_stay_as_they_are(wire):
    model = subclassed(Tuned)
    model(BATCHES[0].x)
    model.norm.moving_mean.assign([100.3])
    model.norm.moving_variance.assign([0.01])
    server = Server(model, wire)
    before = statistics(server)
    for batch in BATCHES[:4]:
        server.step(batch)
    np.testing.assert_array_equal(statistics(server), before)
    assert server.flat_model.averages == ()
