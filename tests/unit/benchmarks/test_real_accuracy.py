"""Real workers reach what the virtual ones do that `benchmarks.convergence` plays."""

import numpy as np
import pytest

from benchmarks import jobs, tasks
from benchmarks.real_accuracy import Beside, Trained, error, measure


def row(real, virtual):
    return Beside(2, [Trained(value, 1.0) for value in real], [Trained(value, 1.0) for value in virtual])


def test_difference_and_its_standard_error_are_of_the_means():
    found = [row((0.97, 0.98, 0.99), (0.95, 0.96, 0.97)), row((0.9, 0.9, 0.9), (0.9, 0.9, 0.9))]
    assert [one.difference for one in found] == pytest.approx([0.02, 0.0])
    # Variances of 1e-4, 1e-4, 0, 0: of one run 5e-5, of the difference of two means of three a third of twice that.
    assert error(found) == pytest.approx((2 * 5e-5 / 3) ** 0.5)


def test_real_job_is_that_of_virtual_time_at_its_start():
    """The same network from the same parameters on the same data, with the same optimizer."""
    data, network = tasks.data_of("digits"), tasks.network_of("digits")
    job = jobs.digits(seed=7, milliseconds=0)
    model = job.model()
    first = network.start(np.random.default_rng(7))
    assert np.array_equal(np.concatenate([w.ravel() for w in model.get_weights()]), first)
    accuracy, loss = network.judge(first, data.test_x, data.test_y)
    assert model.evaluate(data.test_x, data.test_y, verbose=0) == pytest.approx([loss, accuracy], rel=1e-4)
    config = tasks.optimizer_of("digits", "momentum")
    made = model.optimizer.get_config()
    assert (made["learning_rate"], made["momentum"]) == pytest.approx((config.learning_rate, config.momentum))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_real_workers_are_as_accurate_as_virtual_ones_within_the_spread_of_seeds():
    found = measure((1, 2, 4), range(3))
    allowed = 3 * error(found)
    assert allowed < 0.02, found  # seeds that vary more would hide a difference
    assert {each.workers: each.difference for each in found if abs(each.difference) > allowed} == {}, found
