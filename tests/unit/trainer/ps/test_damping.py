"""How much of a stale or long gradient is applied."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.ps.damping import Damping
from shoal_trainer.ps.usual_length import GROWTH

LENGTHS = st.floats(1e-6, 1e6)


@given(st.lists(st.tuples(st.integers(0, 1), LENGTHS), min_size=1, max_size=50))
def test_one_worker_trains_as_keras(pushes: list[tuple[int, float]]) -> None:
    damping = Damping(0.5)
    for staleness, length in pushes:
        assert damping.apply(staleness, 1, length) == (1.0, 1.0)
        assert damping.apply(staleness, 2) == (1.0, 1.0)  # two that wait for their answers


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 64), LENGTHS | st.just(math.nan)), max_size=80),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_rate_never_rises_and_the_pace_is_that_of_the_workers(
    pushes: list[tuple[int, int, float]], exponent: float
) -> None:
    damping, stalest = Damping(exponent), 1
    for staleness, live, length in pushes:
        stalest = max(stalest, staleness)
        factor, pace = damping.apply(staleness, live, length)
        assert 0 < factor <= 1
        assert max(1, (live - 1) / 2) <= pace <= max(stalest, (live - 1) / 2)


def test_pace_follows_workers_that_join_at_once_and_leave() -> None:
    damping = Damping(0.5)
    for _ in range(50):
        damping.apply(0, 1)
    assert damping.apply(3, 16).pace == 7.5  # before their staleness is seen
    for _ in range(100):
        damping.apply(15, 16)
    for _ in range(100):
        factor, pace = damping.apply(0, 1)
    assert pace == 1
    assert factor == 1


def test_long_gradient_is_shortened_to_the_usual_length() -> None:
    damping = Damping(0.0)
    for _ in range(20):
        assert damping.apply(3, 4, 2.0).factor == 1
    assert damping.apply(3, 4, 8.0).factor == pytest.approx(0.25)
    assert damping.apply(3, 4, math.nan).factor == 1
    assert damping.apply(3, 4, 8.0).factor == pytest.approx(2 * GROWTH / 8)
    for _ in range(1000):
        last = damping.apply(3, 4, 8.0).factor
    assert last == pytest.approx(1, rel=1e-3)  # what stays is usual


def test_gradient_whose_length_is_beyond_fp32_does_nothing_and_is_not_learned_from() -> None:
    """Its values are finite, so nothing else keeps it out: 1e20 where a file has no value."""
    damping = Damping(0.0)
    for _ in range(20):
        assert damping.apply(3, 4, math.inf).factor == 0
    assert damping.apply(3, 4, 2.0).factor == 1
    assert damping.apply(3, 4, math.inf).factor == 0
    assert damping.apply(3, 4, 2.0).factor == 1
    assert Damping(0.0).apply(0, 1, math.inf).factor == 1  # one worker trains as Keras


@pytest.mark.parametrize(("free", "expected"), [(1.0, 0.25), (4.0, 0.5)])
def test_optimizers_that_divide_by_the_size_of_gradients_are_damped_less(
    free: float, expected: float
) -> None:
    damping = Damping(0.5, free)
    assert damping.rate(16.0) == expected
    assert damping.apply(16, 17).factor == expected
    assert damping.rate(free) == 1
    assert damping.rate(1.0) == 1


@given(st.floats(1, 64), st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0]))
def test_gradients_of_adam_that_are_noise_are_damped_only_for_many_workers(
    pace: float, agreement: float, exponent: float
) -> None:
    damping = Damping(exponent, 4.0)
    damping.agreement = 0.0
    noise = damping.rate(pace)
    assert noise == pytest.approx(max(1.0, pace / 4) ** -exponent)
    damping.agreement = agreement
    assert damping.rate(1.0) == 1
    assert 0 < damping.rate(pace) <= noise
    damping.agreement = 1.0  # they go as far as one that is as long as all together
    if pace >= 1.5:
        assert damping.rate(pace) == pytest.approx((1 + 2 * pace) ** -exponent)


@given(st.floats(1, 64), st.floats(0, 1))
def test_rate_of_adam_does_not_jump_where_the_pace_swings(pace: float, agreement: float) -> None:
    damping = Damping(0.5, 4.0)
    damping.agreement = agreement
    assert damping.rate(pace * 1.001) == pytest.approx(damping.rate(pace), rel=0.005)


def test_one_very_stale_gradient_moves_the_pace_by_little() -> None:
    """A worker that was paused, or that returns to a restarted server, does not slow down the others."""
    damping = Damping()
    for _ in range(200):
        usual = damping.apply(3, 4)
    damping.apply(3000, 4)
    assert damping.apply(3, 4).factor > 0.85 * usual.factor
    fresh = Damping()
    fresh.apply(5000, 4)
    assert fresh.apply(3, 4).factor > 0.7 * usual.factor


def test_pace_follows_gradients_that_are_all_stale() -> None:
    damping = Damping()
    for _ in range(60):
        damping.apply(200, 4)
    assert damping.pace(4) > 150
