"""Timers: only the earliest counts."""

from __future__ import annotations

from datetime import timedelta

from shoal.policy.common.timers import Timers
from tests.unit.policy.build import NOW


def test_earliest_of_several_times_is_next() -> None:
    timers = Timers(NOW)
    timers.after(30.0)
    assert timers.pending(NOW + timedelta(seconds=10))
    timers.after(20.0)
    assert timers.next_seconds == 10.0


def test_time_that_has_passed_is_not_pending() -> None:
    timers = Timers(NOW)
    assert not timers.pending(NOW)
    assert not timers.pending(NOW - timedelta(seconds=1))
    assert timers.next_seconds is None


def test_what_is_left_of_a_sum_of_fractions_is_later_than_now() -> None:
    """Time plus 7e-15 s is the same time: a job was planned again and again, and no time passed."""
    timers = Timers(NOW)
    timers.after(30.0 - 29.999999999999993)
    assert timers.next_seconds == 0.01
