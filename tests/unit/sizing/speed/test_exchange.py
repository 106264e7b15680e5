"""A step is the longer of compute and exchange: what of it is one worker's own, and what all workers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.sizing.accelerators import catalogue
from shoal.sizing.fleet import FleetJob, FleetPool, Watched, plan_fleet
from shoal.sizing.speed import priors
from shoal.sizing.speed.exchange import Links
from shoal.sizing.speed.measurements import LogMean, Model, Profile, Row, ServerLoad
from shoal.sizing.speed.model import SpeedModel

LARGE = Model("resnet50", 7.7e9, 25_600_000, 161)
COMPUTE = 0.2
IDLE = {1: ServerLoad(busy_seconds=600.0, updates=60_000)}
"""Servers that could do 100 updates a second."""
FULL = {1: ServerLoad(busy_seconds=2500.0, updates=60_000)}
"""Which do 24."""


def row(workers: int, exchange: float, step: float | None = None, count: float = 2000, **more: object) -> Row:
    times = {
        "compute": LogMean.of(COMPUTE, 0.01, count),
        "pull": LogMean.of(0.7 * exchange, 0.02 * exchange, count),
        "push": LogMean.of(0.3 * exchange, 0.02 * exchange, count),
        "step": LogMean.of(step or max(COMPUTE, exchange), count=count),
    }
    same = {"device": "T4", "cores": 4, "batch_size": 64, "workers": workers}
    return Row(**(same | times | more))  # type: ignore[arg-type]


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


@pytest.mark.parametrize("workers", [(1,), (1, 2, 4, 8, 16, 32)])
def test_worker_whose_link_takes_longer_than_its_compute_takes_as_long_as_its_link(
    workers: tuple[int, ...],
) -> None:
    """It was predicted to take 0.2 s, measured, though its steps took 0.58 s."""
    assert worker(rows(own_link, *workers), IDLE) == pytest.approx(0.58, rel=0.03)


def test_worker_behind_servers_that_are_the_limit_has_its_compute_for_itself() -> None:
    assert worker(rows(servers_link, 1, 4, 8, 16, 32), IDLE) == pytest.approx(COMPUTE, rel=0.03)
    assert worker([row(8, 8 / 24)], FULL) == pytest.approx(COMPUTE, rel=0.03)
    assert worker([row(8, 8 / 24)], {}) == pytest.approx(COMPUTE, rel=0.03), "nobody knows whose it is"


@pytest.mark.parametrize("workers", [2, 8, 16, 32])
@pytest.mark.parametrize("unexplained", [0.0, 0.03, 0.1])
def test_queue_that_busy_seconds_nearly_explain_is_not_the_workers_own(
    workers: int, unexplained: float
) -> None:
    """3 % of the exchange of 32 workers that were not explained made 0.78 s of 0.2."""
    load = ServerLoad(busy_seconds=2500.0 * (1 - unexplained), updates=60_000)
    assert worker([row(workers, workers / 24)], {1: load}) == pytest.approx(COMPUTE, rel=0.03)
    assert worker([row(workers, workers / 24)], IDLE) == pytest.approx(COMPUTE, rel=0.03), "a full link"


def test_few_slow_steps_of_a_single_worker_are_not_its_link_where_more_of_them_were_faster() -> None:
    """One pull of 10 s in its 20 steps, and a job that eight workers do could not be done."""
    slow = row(1, 0.55, compute=LogMean.of(COMPUTE, 0.01, 20))
    for more in (
        row(12, 0.07),
        row(4, 0.07, batch_size=128, compute=LogMean.of(0.4, 0.01, 2000)),
        row(4, 0.07, cores=8),
    ):
        assert worker([slow, more], IDLE) == pytest.approx(COMPUTE, rel=0.03)


def test_few_steps_are_no_link_of_a_first_worker() -> None:
    """One pull of 20 s in ten steps, and 61 workers were planned at once for what eight do."""
    assert worker([row(1, 2.0, count=10)], IDLE) == pytest.approx(COMPUTE, rel=0.05)
    assert worker([row(1, 2.0, count=100)], IDLE) == pytest.approx(2.0)
    assert worker([row(1, 2.0, count=100), row(1, 0.05, count=10, batch_size=16)], IDLE) < 0.21


def test_wait_for_slower_workers_is_no_link_of_a_fast_one() -> None:
    """With a limit of staleness it is in the pull: a V100 was as slow as the T4s beside it."""
    fast = row(8, 0.5, device="V100", compute=LogMean.of(0.06, 0.003, 2000))
    found = SpeedModel([Profile(LARGE, (row(8, 0.05, step=0.5), fast), IDLE)])
    assert found.worker(LARGE, "V100", 1, 4, 64).seconds == pytest.approx(0.06, rel=0.03)
    assert found.worker(LARGE, "A100-40GB", 1, 4, 64).seconds < 0.06
    assert found.servers.capacity(LARGE, 1) == capacity((), IDLE)


def test_link_is_no_compute_of_other_batches_devices_and_models() -> None:
    """Four times the batch took ten times as long, and unmeasured models of everybody twice."""
    other = replace(LARGE, fingerprint="other", flops=3.6e9)
    near, far = (SpeedModel([Profile(LARGE, (row(1, link),), IDLE)]) for link in (0.05, 0.58))
    for model, device, batch in (
        (LARGE, "T4", 256),
        (LARGE, "V100", 64),
        (other, "T4", 64),
        (other, "V100", 64),
    ):
        assert far.worker(model, device, 1, 4, batch) == near.worker(model, device, 1, 4, batch)
    assert far.worker(LARGE, "T4", 1, 8, 16).seconds == pytest.approx(0.58), "which no batch makes shorter"
    assert far.worker(LARGE, "Tesla-T4", 1, 4, 16).seconds == pytest.approx(0.58), "by any of its names"
    assert far.worker(LARGE, "T4", 2, 4, 64).seconds < 0.5, "another machine has another link"


def test_link_of_long_ago_is_none_of_today() -> None:
    before = row(1, 0.58, age_seconds=3 * priors.HALF_LIFE)
    assert worker([before], IDLE) == pytest.approx(0.58), "nothing newer is known"
    assert worker([before, row(4, 0.3)], IDLE) == pytest.approx(COMPUTE, rel=0.05)


@given(st.integers(1, 64), st.floats(1e-3, 100.0), st.floats(1e-3, 100.0))
def test_floor_is_what_a_single_worker_exchanged_in_no_more_than_a_step(
    workers: int, exchange: float, step: float
) -> None:
    links = Links([Profile(LARGE, (row(workers, exchange, step),))], catalogue())
    least = min(exchange, step) if workers == 1 else 0.0
    assert links.floor(LARGE, "T4", 1) == pytest.approx(least)


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


@pytest.mark.parametrize("parts", [True, False])
def test_step_that_a_user_measured_counts_whole_whatever_he_says_of_its_parts(parts: bool) -> None:
    """What waits at a server that does 16 a second was in no part: with them, it was said to do 239."""
    table = [row(n, 0.04, step=step) for n, step in ((1, 0.24), (2, 0.25), (4, 0.29), (8, 0.5))]
    if not parts:
        table = [replace(each, compute=None, pull=None, push=None) for each in table]
    assert capacity(table, {})[0] == pytest.approx(16, rel=0.1)


def test_rows_of_jobs_that_push_several_batches_at_once_are_no_link() -> None:
    """Of how many batches a row's pushes were it does not say: another job of the model may push ten at once."""
    several = [row(n, max(0.05, n / 24), step=max(COMPUTE, n / 24)) for n in (1, 4, 8, 16, 32)]
    found, sigma = capacity(several, IDLE)
    assert found == pytest.approx(24, rel=0.05)
    assert sigma < 0.1
    for batches in (1.8, 10):
        load = {1: replace(IDLE[1], batches_per_update=batches)}
        assert capacity(several, load) == capacity((), IDLE)


def test_own_link_is_no_limit_of_the_servers() -> None:
    for workers in ((1, 4, 8, 16), (4, 8, 16)):
        assert capacity(rows(lambda _: 0.58, *workers), IDLE)[0] == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize(
    ("workers", "count", "exchange"), [(16, 3, 3.0), (2, 5, 2.0), (6, 20, 0.5), (3, 10, 0.26), (2, 40, 0.3)]
)
def test_few_steps_of_a_slow_exchange_limit_nothing(workers: int, count: int, exchange: float) -> None:
    """Three steps beside a restart of a server, and it was said to do 23 a second, though it had done 60 for hours."""
    known = rows(lambda _: 0.06, 1, 4, 8, 12)
    same = capacity(known, IDLE)
    assert capacity([*known, row(workers, exchange, count=count)], IDLE) == same
    varies = LogMean.of(exchange, exchange, count)
    assert capacity([*known, row(workers, exchange, count=count, pull=varies)], IDLE) == same
    alone = row(1, 0.06)
    assert capacity([alone, row(workers, exchange, count=count)], IDLE) == same, "no others were measured"


def test_what_came_through_for_longer_tells_what_the_servers_can_do() -> None:
    """Ten bad minutes of 16 workers, beside a day in which twelve made 60 steps a second, were the limit for weeks."""
    day = [row(n, 0.06, count=20_000) for n in (4, 12)]
    assert capacity([*day, row(16, 3.0, count=300)], IDLE) == capacity(day, IDLE)
    assert capacity([row(1, 0.06), row(16, 3.0, count=300)], IDLE)[0] < 10, "no others were measured"
    lasting = row(16, 3.0, count=20_000)
    assert capacity([*rows(lambda _: 0.06, 4, 12), lasting], IDLE)[0] < 60
    before = [replace(each, age_seconds=priors.HALF_LIFE) for each in day]
    assert capacity([*before, lasting], IDLE)[0] < 60, "the link of today is another one"


def stalled(seconds: float, stall: float, workers: int, count: int) -> LogMean:
    """Of as many steps, one of each worker stood still for so long."""
    logs = [math.log(stall)] * workers + [math.log(seconds)] * (count - workers)
    mean = sum(logs) / count
    variance = sum((each - mean) ** 2 for each in logs) / count
    return LogMean(mean, variance, count, (stall * workers + seconds * (count - workers)) / count)


@pytest.mark.parametrize("part", ["pull", "push"])
@pytest.mark.parametrize(("stall", "count"), [(5.0, 3000), (25.0, 3000), (25.0, 5000), (25.0, 10_000)])
def test_server_that_stood_still_once_is_no_link(part: str, stall: float, count: int) -> None:
    """25 s of it in half a minute of three workers, and servers of 2,000 a second were said to do 204 for weeks."""
    load, computed = {1: ServerLoad(30.0, 60_000)}, LogMean.of(0.01, 0.001, count)
    once = row(3, 0.008, count=count, step=stalled(0.01, stall, 3, count).seconds, compute=computed)
    paused = replace(once, **{part: stalled(0.004, stall, 3, count)})  # type: ignore[arg-type]
    assert capacity([row(1, 0.008, step=0.01, compute=computed), paused], load) == capacity((), load)


def test_steps_that_are_slow_again_and_again_are_a_link() -> None:
    often = stalled(0.1, 4.0, 2000, 20_000)
    found, _ = capacity([row(1, 0.05), row(3, 0.1, step=0.6, count=20_000, pull=often)], IDLE)
    assert found < 7


@pytest.mark.parametrize("count", [200, 1000, 5000, 20_000, 100_000])
def test_more_workers_that_bring_less_are_believed_once_that_lasts(count: int) -> None:
    """Fewer were always the surer ones: 16 that did 20 a second were planned with 160 after each restart."""
    slow = LogMean.of(0.4, 0.4 * math.sqrt(math.expm1(0.3)), count)
    computed = LogMean.of(0.1, 0.005, 50_000)
    crowd = row(16, 0.8, count=count, pull=slow, push=slow, compute=computed)
    few = [row(n, 0.05, step=0.1, count=50_000, compute=computed) for n in (1, 4)]
    found, _ = capacity([*few, crowd], IDLE)
    if count > 10_000:
        assert found < 35
    else:  # an hour of 16 workers at most
        assert found == capacity((), IDLE)[0]


def test_larger_cluster_refutes_a_slow_smaller_one_that_lasted() -> None:
    slow, fast = row(4, 1.0, count=20_000), row(16, 0.3, count=20_000)
    assert capacity([row(1, 0.05), slow], IDLE)[0] < 5
    assert capacity([row(1, 0.05), slow, fast], IDLE)[0] > 30


def test_link_that_was_full_long_ago_limits_nothing_now() -> None:
    """A year later, with 24 workers at full speed, a job that 12 could do was said to need more servers."""
    before = [row(n, n / 24, age_seconds=3 * priors.HALF_LIFE) for n in (8, 16, 32)]
    assert capacity([row(1, 0.05, age_seconds=3 * priors.HALF_LIFE), *before], IDLE)[0] < 30, (
        "nothing newer is known"
    )
    assert capacity([*before, *rows(lambda _: 0.05, 1, 4, 24)], IDLE) == capacity((), IDLE)


def test_full_link_counts_by_its_age() -> None:
    before, now = row(16, 16 / 12, age_seconds=priors.HALF_LIFE), rows(servers_link, 1, 16)
    same, _ = capacity([replace(before, age_seconds=0.0), *now], IDLE)
    found, _ = capacity([before, *now], IDLE)
    assert same * 1.05 < found < 24
    ages = [replace(each, age_seconds=1e12) for each in now]
    assert capacity(ages, IDLE) == capacity((), IDLE), "as old as a row may be"


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
