"""A step is the longer of compute and exchange: what of it is one worker's own, and what all workers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.sizing.fleet import FleetJob, FleetPool, Watched, plan_fleet
from shoal.sizing.speed import priors
from shoal.sizing.speed.exchange import alone
from shoal.sizing.speed.measurements import LogMean, Model, Profile, Row, ServerLoad
from shoal.sizing.speed.model import SpeedModel

LARGE = Model("resnet50", 7.7e9, 25_600_000, 161)
COMPUTE = 0.2
IDLE = {1: ServerLoad(busy_seconds=600.0, updates=60_000)}
"""Servers that could do 100 updates a second."""
FULL = {1: ServerLoad(busy_seconds=2500.0, updates=60_000)}
"""Which do 24."""


def row(workers: int, exchange: float, step: float | None = None, **more: object) -> Row:
    times = {
        "compute": LogMean.of(COMPUTE, 0.01, 2000),
        "pull": LogMean.of(0.7 * exchange, 0.02 * exchange, 2000),
        "push": LogMean.of(0.3 * exchange, 0.02 * exchange, 2000),
        "step": LogMean.of(step or max(COMPUTE, exchange), count=2000),
    }
    return Row("T4", cores=4, batch_size=64, workers=workers, **(times | more))  # type: ignore[arg-type]


def rows(exchange: Callable[[int], float], *workers: int) -> tuple[Row, ...]:
    return tuple(row(n, exchange(n)) for n in workers)


def own_link(workers: int) -> float:
    """51 MB each way take 0.58 s over a link of 1 Gb/s (docs/benchmarks/flows.md); the servers' carries 24 a second."""
    return max(0.58, workers / 24)


def servers_link(workers: int) -> float:
    return max(0.05, workers / 24)


def worker(known: Sequence[Row], loads: dict[int, ServerLoad]) -> float:
    return SpeedModel([Profile(LARGE, tuple(known), loads)]).worker(LARGE, "T4", 1, 4, 64).seconds


def capacity(known: Sequence[Row], loads: dict[int, ServerLoad]) -> tuple[float, float]:
    return SpeedModel([Profile(LARGE, tuple(known), loads)]).servers.capacity(LARGE, 1)


@pytest.mark.parametrize("workers", [(1,), (1, 2, 4, 8, 16, 32), (4, 8)])
def test_worker_whose_link_takes_longer_than_its_compute_takes_as_long_as_its_link(
    workers: tuple[int, ...],
) -> None:
    """It was predicted to take 0.2 s, measured, though its steps took 0.58 s."""
    assert worker(rows(own_link, *workers), IDLE) == pytest.approx(0.58, rel=0.03)


def test_worker_behind_servers_that_are_the_limit_has_its_compute_for_itself() -> None:
    assert worker(rows(servers_link, 1, 4, 8, 16, 32), IDLE) == pytest.approx(COMPUTE, rel=0.03)
    assert worker([row(8, 8 / 24)], FULL) == pytest.approx(COMPUTE, rel=0.03)
    assert worker([row(8, 8 / 24)], {}) == pytest.approx(COMPUTE, rel=0.03), "nobody knows whose it is"


def test_worker_that_has_a_slower_link_now_is_not_what_it_was_alone_long_ago() -> None:
    before = row(1, 0.05, age_seconds=3 * priors.HALF_LIFE)
    assert worker([before, row(4, 0.58)], IDLE) == pytest.approx(0.58, rel=0.05)


@given(st.integers(1, 64), st.floats(1e-3, 100.0), st.floats(1e-3, 100.0), st.sampled_from([{}, IDLE, FULL]))
def test_time_alone_is_between_the_compute_and_the_longer_of_both(
    workers: int, exchange: float, step: float, loads: dict[int, ServerLoad]
) -> None:
    ((_, time),) = alone(Profile(LARGE, (row(workers, exchange, step),), loads))
    assert COMPUTE <= time.seconds <= max(COMPUTE, min(exchange, step)) * (1 + 1e-9)


def test_servers_do_the_least_of_what_their_arithmetic_and_their_link_allow() -> None:
    """They were predicted to do 100 steps a second, give or take 5 %, where 24 came through."""
    measured = rows(servers_link, 1, 4, 8, 16, 32)
    found, sigma = capacity(measured, IDLE)
    assert found == pytest.approx(24, rel=0.05)
    assert sigma < 0.1
    found, sigma = capacity(measured, {1: ServerLoad(busy_seconds=6000.0, updates=60_000)})
    assert found == pytest.approx(10, rel=0.05)
    assert sigma < 0.1


def test_waits_for_other_workers_are_no_limit_of_the_servers() -> None:
    """In rounds a fast worker's step is as long as a slow one's; its exchange is not."""
    waits = [row(8, 0.05, step=0.8), row(16, 0.05, step=0.8)]
    assert worker(waits, IDLE) == pytest.approx(COMPUTE, rel=0.03)
    assert capacity(waits, IDLE) == capacity((), IDLE)


def test_clusters_of_one_model_do_not_move_the_servers_of_another_that_has_loads() -> None:
    other = Profile(replace(LARGE, fingerprint="other"), (), IDLE)
    here = Profile(LARGE, rows(servers_link, 1, 8, 16), IDLE)
    found, _ = SpeedModel([here, other]).servers.capacity(other.model, 1)
    assert found == pytest.approx(100, rel=0.05)


def test_no_more_workers_are_bought_than_a_full_link_lets_through() -> None:
    """As none made it faster, the plan had 11, 15 and 27 of them, and said in time again and again."""
    pool = FleetPool("t4", "T4", cores=4, limit=64, price_per_hour=0.5, startup_seconds=60)
    profile = Profile(LARGE, rows(servers_link, 1, 2, 4, 8), IDLE)
    left, workers = 24 * 64 * 3600.0 * 1.2, 8
    for now in range(0, 3600, 600):
        speed = 64 / max(COMPUTE, workers / 24)
        there = {"t4": workers}
        one = FleetJob(
            "a", ("t4",), model=LARGE, samples_left=left, batch_size=64, max_workers=64, running=there, planned=there,
            deadline_seconds=3600.0 - now, now=Watched({"t4": [speed] * workers}, 90.0),
        )  # fmt: skip
        found = plan_fleet([pool], [profile], [one]).jobs["a"]
        assert not found.feasible
        workers = found.counts["t4"]
        assert 5 <= workers <= 8
        left -= 600 * workers * 64 / max(COMPUTE, workers / 24)
