"""The steps of a push, as one update."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from shoal_trainer.wire.messages import MetricSum
from shoal_trainer.worker.flat_model import Step
from shoal_trainer.worker.on_host import HostMean
from shoal_trainer.worker.send import Pile

BATCH = SimpleNamespace(batch=SimpleNamespace(samples=4), work=SimpleNamespace(epoch=0))


def pile_of(update):
    pile = Pile(HostMean(len(update), len(update)))
    pile.add(Step(update, 0.5, True), BATCH)
    return pile


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_single_step_is_sent_as_it_is(dtype):
    update = np.arange(6, dtype=np.float32) if dtype == np.float32 else np.full(6, 0x3F80, np.uint16)
    pile = pile_of(update)
    assert pile.update() is update
    assert (pile.samples, pile.loss) == (4, 0.5)


@pytest.mark.parametrize("skipped", [(), (0,), (1,), (0, 2)])
def test_mean_of_the_steps_counts_the_samples_of_skipped_ones(skipped):
    pile = Pile(HostMean(2, 2))
    updates = [np.zeros(2, np.float32) if n in skipped else np.full(2, n + 1, np.float32) for n in range(3)]
    samples = [1, 2, 5]
    expected = np.average(updates, axis=0, weights=samples)
    for again in range(2):  # nothing is left of the push before, nor of steps that were dropped
        for n in range(3):
            ready = SimpleNamespace(batch=SimpleNamespace(samples=samples[n]))
            pile.add(Step(updates[n].copy(), float(n), True, n in skipped), ready)
        if again:
            np.testing.assert_allclose(pile.update(), expected, rtol=1e-6)
        pile.clear()


def test_statistics_of_a_step_without_a_gradient_count():
    """An overflow in mixed_float16: Keras takes no step, but has moved the statistics."""
    pile = pile_of(np.array([2.0, 0.2], np.float32))
    pile.add(Step(np.array([0.0, 0.4], np.float32), 0.5, True, skipped=True), BATCH)
    np.testing.assert_allclose(pile.update(), [1.0, 0.3], rtol=1e-6)


def test_step_that_was_left_out_has_no_part_in_loss_and_metrics():
    """`on_nan="skip"`, of which the last step of a push may be the only one that was finite."""
    pile = Pile(HostMean(2, 2))
    for loss, left_out in ((1.0, False), (math.nan, True), (2.0, False)):
        metrics = (MetricSum("accuracy", 0.0 if left_out else 4.0, 4.0),)
        step = Step(np.zeros(2, np.float32), loss, True, left_out, metrics, left_out)
        pile.add(step, BATCH)
    assert (pile.loss, pile.metrics) == (1.5, (MetricSum("accuracy", 8.0, 8.0),))
    assert (pile.samples, pile.left_out) == (12, 4)
    alone = Pile(HostMean(2, 2))
    alone.add(replace(step, left_out=True), BATCH)
    assert math.isnan(alone.loss)
    assert alone.metrics == ()


def test_each_epoch_of_a_push_has_its_loss_and_its_metrics():
    """The end of one, a whole one that has no finite loss, and the begin of the next."""
    pile = Pile(HostMean(2, 2))
    for epoch, loss, right in ((4, 1.0, 3.0), (4, 3.0, 1.0), (5, math.inf, 2.0), (6, 2.0, 4.0)):
        step = Step(np.zeros(2, np.float32), loss, True, metrics=(MetricSum("accuracy", right, 4.0),))
        pile.add(step, SimpleNamespace(batch=BATCH.batch, work=SimpleNamespace(epoch=epoch)))
    assert [(name, total, weight) for name, total, weight in pile.metrics] == [
        *(("loss", 16.0, 8.0), ("accuracy", 4.0, 8.0)),
        *(("loss", 0.0, 0.0), ("accuracy", 2.0, 4.0)),
        *(("loss", 8.0, 4.0), ("accuracy", 4.0, 4.0)),
    ]
