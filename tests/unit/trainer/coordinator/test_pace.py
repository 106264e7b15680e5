"""The rate of samples over the last pushes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.coordinator.pace import RATE_SECONDS, Pace


def test_pace_discards_old_pushes_without_being_read():
    pace = Pace()
    for second in range(10_000):
        pace.pushed(float(second), 32, 0.5)
    assert len(pace._recent) == RATE_SECONDS + 1
    assert pace.samples_per_second(9_999.0) == 32


@given(st.floats(0.1, 300.0), st.lists(st.floats(0.9, 1.1), min_size=5, max_size=20), st.floats(0.0, 1.0))
def test_the_rate_is_that_of_the_job_however_far_apart_its_pushes_are(every, varies, phase):
    """1,000 samples a second, read at any time between two pushes."""
    pace, now = Pace(), 0.0
    pace.pushed(now, 0, 0.5, every)
    for factor in varies:
        now += factor * every
        pace.pushed(now, round(1e6 * factor * every), 0.5, every)
        assert pace.samples_per_second(now + phase * every) == pytest.approx(1e6, rel=1e-3)


@pytest.mark.parametrize("every", [3.0, 9.5, 40.0, 200.0])
def test_workers_that_push_together_do_not_count_their_first_pushes(every):
    pace, seen = Pace(), []
    for turn in range(8):
        for worker in range(8):
            pace.pushed(turn * every + 0.01 * worker, 100, 0.5, every)
        seen.append(pace.samples_per_second((turn + 1) * every - 0.1))
    assert seen[0] is None
    assert seen[1:] == pytest.approx([800 / every] * 7, rel=0.05)


@pytest.mark.parametrize("every", [0.0, 1.0, 40.0])
def test_there_is_no_rate_while_training_stands_and_the_time_does_not_count_later(every):
    pace, now, step = Pace(), 0.0, every or 1.0
    for _ in range(100):
        now += step
        pace.pushed(now, 1000, 0.5, every)
    patience = max(RATE_SECONDS, 2 * every)
    assert pace.samples_per_second(now + patience) == pytest.approx(1000 / step)
    assert pace.samples_per_second(now + patience + 1) is None
    now += 3600.0
    for _ in range(2):
        now += step
        pace.pushed(now, 1000, 0.5, every)
    assert pace.samples_per_second(now) == pytest.approx(1000 / step)
