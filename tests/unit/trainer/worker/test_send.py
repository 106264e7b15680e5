"""Statistics in a push, when several workers push at the same time."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.worker.flat_model import Step
from shoal_trainer.worker.layout import Average
from shoal_trainer.worker.on_host import HostMean
from shoal_trainer.worker.send import Pile

BATCH = SimpleNamespace(batch=SimpleNamespace(samples=4))


def pile_of(update, steps=1):
    pile = Pile(HostMean())
    for _ in range(steps):
        pile.add(Step(update, 0.5, True), BATCH)
    return pile


def moved(momentum, behind, steps, pushes, seen=0.0):
    """The history of a statistic that starts at 1; each push is based on its value `behind` pushes before."""
    average = Average(1, 2, momentum)
    then = [1.0] * (behind + 1)
    for _ in range(pushes):
        update = np.array([7.0, (1 - momentum) * (seen - then[-1 - behind])], np.float32)
        sent = pile_of(update, steps).update((average,), behind)
        assert sent[0] == pytest.approx(7)
        then.append(then[-1] + float(sent[1]) / max(1, behind))  # as in `ShardStore.push`
    return then


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_moving_average_is_independent_of_the_worker_count(workers):
    # With momentum 0.99 a push moves it by a hundredth, so several may be in flight.
    then = moved(0.99, workers - 1, 1, 400)
    assert then[-1] == pytest.approx(0.99**400, abs=0.01)


@given(
    st.sampled_from([0.9, 0.99, 0.999]), st.integers(1, 64), st.integers(1, 50), st.floats(0, 0.5, width=32)
)
def test_variance_never_falls_below_the_observed_value(momentum, behind, steps, seen):
    then = moved(momentum, behind, steps, 3 * behind + 20, seen)
    assert min(then) > seen - 1e-5
    assert all(a >= b - 1e-5 for a, b in pairwise(then))


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_updates_without_averages_are_sent_unchanged(dtype):
    update = np.arange(6, dtype=np.float32) if dtype == np.float32 else np.full(6, 0x3F80, np.uint16)
    pile = pile_of(update)
    assert pile.update((), 9) is update
    assert (pile.samples, pile.loss) == (4, 0.5)


@pytest.mark.parametrize("skipped", [(), (0,), (1,), (0, 2)])
def test_mean_of_the_steps_counts_the_samples_of_skipped_ones(skipped):
    pile = Pile(HostMean())
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
