"""Moving means and variances of a model, as its pushes move them."""

import keras
import numpy as np
import pytest

from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.layout import flatten
from shoal_trainer.worker.send import Pile
from tests.unit.trainer.worker.models import Plain, functional, subclassed
from tests.unit.trainer.worker.trained import BATCHES, SGD, Server, push, pushed


def statistics(server):
    return server.flat()[server.flat_model.layout.trainable :]


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
        still = server.flat_model.still(server.flat_model.on_device(server.tensor))
        pile.add(type(step)(still, 0.5, True, skipped=True), Ready(None, batch))
    push(server, pile)
    np.testing.assert_allclose(server.flat(), before, rtol=0 if wire == "fp32" else 2**-8)
    low = server.flat_model.layout.trainable
    np.testing.assert_array_equal(server.flat()[:low], before[:low])


class Tuned(Plain):
    """Keras' idiom of fine-tuning: a part that normalizes as it was trained, in a model that is trained as a whole."""

    def __init__(self):
        super().__init__()
        self.norm = keras.layers.BatchNormalization()

    def call(self, x):
        return super().call(self.norm(x, training=False))


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_statistics_that_no_call_moves_stay_as_they_are(wire):
    model = subclassed(Tuned)
    model.build((None, 6, 6, 1))
    model.norm.moving_mean.assign([100.3])
    model.norm.moving_variance.assign([0.01])
    server = Server(model, wire)
    before = statistics(server)
    for batch in BATCHES[:4]:
        server.step(batch)
    np.testing.assert_array_equal(statistics(server), before)
    assert server.flat_model.averages == ()
