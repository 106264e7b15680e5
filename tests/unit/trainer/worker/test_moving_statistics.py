"""Moving means and variances of a push that holds several steps."""

from dataclasses import replace

import numpy as np
import pytest

from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.layout import flatten
from shoal_trainer.worker.send import Pile
from tests.unit.trainer.worker.models import functional
from tests.unit.trainer.worker.trained import BATCHES, SGD, Server, push, pushed


def test_push_moves_statistics_as_far_as_its_steps_would():
    """All batches are equal, so that their order has no effect."""

    def make():
        return functional(SGD(0.0), norm=True, momentum=0.99)

    server, plain = Server(make()), make()
    for _ in range(4):
        pushed(server, BATCHES[:1] * 8)
        for _ in range(8):
            plain.train_on_batch(BATCHES[0].x, BATCHES[0].y)
    low = server.flat_model.layout.trainable
    assert np.abs(server.flat()[low:] - flatten(plain, server.flat_model.layout)[low:]).max() < 1e-5


@pytest.mark.parametrize("momentum", [0.999, 0.99, 0.9])
def test_moving_variance_stays_non_negative_with_many_steps_per_push(momentum):
    """Each push is computed while the previous one is in flight, and the data vary less than the initial variance."""
    server = Server(functional(SGD(0.0), norm=True, momentum=momentum))
    low, still = server.flat_model.layout.trainable, replace(BATCHES[0], x=BATCHES[0].x * 1e-3)
    before = server.flat()
    for _ in range(60):
        now = server.flat()
        server.buffer[:] = before
        pile, step = Pile(server.flat_model.mean()), server.flat_model.step(server.tensor, still)
        for _ in range(200):
            pile.add(step, Ready(None, still))
        push(server, pile)
        before = now
        assert (server.flat()[low:] >= -1e-4).all()  # means and variances of data close to zero
    assert server.flat()[low:].max() < 0.01
