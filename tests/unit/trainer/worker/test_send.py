"""Statistics in a push, when several workers push at the same time."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.worker.flat_model import Step
from shoal_trainer.worker.layout import Average
from shoal_trainer.worker.send import combined

BATCH = SimpleNamespace(batch=SimpleNamespace(samples=4))


def moved(momentum, behind, steps, pushes, seen=0.0):
    """The history of a statistic that starts at 1; each push is based on its value `behind` pushes before."""
    average = Average(1, 2, momentum)
    then = [1.0] * (behind + 1)
    for _ in range(pushes):
        update = np.array([7.0, (1 - momentum) * (seen - then[-1 - behind])], np.float32)
        update.flags.writeable = False  # like memory owned by TensorFlow
        sent, _, _ = combined([(Step(update, 0.5, True), BATCH)] * steps, (average,), behind)
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
    sent, samples, loss = combined([(Step(update, 0.5, True), BATCH)], (), 9)
    assert sent is update
    assert (samples, loss) == (4, 0.5)
