"""Where a stock-out must be planned for, a plan counts on what the operator buys once spot nodes do not come."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.sizing.availability import NEVER_OUT, Stock
from shoal.sizing.fleet import FleetJob, FleetPool, plan_fleet
from shoal.sizing.fleet.problems import job_problem
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.engine import Engine, _lasting
from shoal.sizing.plan.problem import Objective, Pool, Problem, Servers
from shoal.sizing.plan.work import StepWork
from shoal.sizing.speed.model import SpeedModel
from tests.unit.sizing.fleet.tight import JOB as TIGHT
from tests.unit.sizing.fleet.tight import PROFILE, STEADY

SPOT = FleetPool(
    "spot",
    "T4",
    spot=True,
    limit=16,
    price_per_hour=0.9,
    watched_seconds=200_000,
    out_seconds=20_000,
    outs=11,
)


def fallback(job: FleetJob = TIGHT, *pools: FleetPool, promised: int = 0) -> str:
    pools = pools or (SPOT, STEADY)
    limits = {pool.name: pool.limit for pool in pools}
    speeds = SpeedModel([PROFILE])
    return job_problem(job, pools, limits, speeds, promised={"steady": promised}).problem.fallback


def out_of_stock(fallback: str, *, out: float = 1.0, own: int = 8) -> Problem:
    """A spot pool that is out of stock for good, so that half of its nodes are there, and what one may buy."""
    stock = Stock(out, 1e9, np.inf)
    spot = Pool("spot", 8, 1.0, 1.0, 1, startup_seconds=50.0, stock=stock)
    spot = replace(spot, availability=replace(spot.running_out(out_now=out), losses_per_hour=0.0))
    steady = Pool("steady", own, 3.0, 0.5, 2, spot=False, startup_seconds=200.0)
    return Problem(
        [spot, steady], StepWork(samples=8 * 700.0), Servers(interruptions_per_hour=0.0), Objective(deadline=1000.0),
        max_workers=8, fallback=fallback,
    )  # fmt: skip


def test_plan_takes_more_spot_where_what_does_not_come_can_be_bought_in_time() -> None:
    able = plan_fleet([SPOT, STEADY], [PROFILE], [TIGHT]).jobs["a"]
    short = plan_fleet([SPOT, replace(STEADY, limit=15)], [PROFILE], [TIGHT]).jobs["a"]
    assert able.feasible
    assert short.feasible
    assert able.counts["spot"] >= short.counts["spot"] + 2
    assert able.cost is not None
    assert short.cost is not None
    assert able.cost < 0.9 * short.cost


def test_what_is_missing_trains_after_the_wait_that_shows_it_and_a_start() -> None:
    """Half of 8 nodes never come: 4 workers train from 50 s on, and from 300 s on others, four times as fast."""
    with_it, without = (
        np.median(Engine(out_of_stock(name), 1200.0).run((8, 0), 1, "").finish) for name in ("steady", "")
    )
    assert without == pytest.approx(50 + 5600 / 4, rel=0.03)
    assert with_it == pytest.approx(300 + (5600 - 4 * 250) / (4 + 4 * 4), rel=0.03)


def test_it_is_paid_from_the_wait_on() -> None:
    engine = Engine(out_of_stock("steady"), 1200.0)
    runs = engine.run((8, 0), 1, "")
    seconds = float(runs.finish.mean())
    assert runs.cost.mean() == pytest.approx((4 * seconds + 4 * 3 * (seconds - 100)) / 3600, rel=0.03)


def test_the_formula_has_the_mean_of_what_the_runs_get_done_and_pay() -> None:
    problem = out_of_stock("steady", out=0.5)
    steady = replace(problem.pools[1], step_seconds=0.25, batch=1)
    problem = replace(problem, pools=(problem.pools[0], steady))
    engine, (evaluator,) = Engine(problem, 1000.0), ElasticModel(problem).evaluators()
    workers = np.array([[8.0], [0.0]])
    found, wait = evaluator(workers), evaluator.wait(workers)[0]
    done = 5600 / (found.seconds[0] - wait) * (1000 - wait)
    assert engine.done((8, 0), 1).mean() == pytest.approx(done, rel=0.1)
    assert found.cost[0] == pytest.approx(engine.run((8, 0), 1, "").cost.mean(), rel=0.2)


def test_chances_of_many_plans_are_those_of_single_ones() -> None:
    problem = out_of_stock("steady", out=0.5)
    problem = replace(problem, work=StepWork(samples=8 * 540.0))
    engine = Engine(problem, 1250.0)
    plans = np.array([[8, 0], [6, 2], [4, 4]]).T
    single = [float(np.mean(engine.run(each, 1, "").finish <= 1000)) for each in plans.T]
    assert engine.chances(plans, 1, np.ones(3)) == pytest.approx(single, abs=0.02)


def test_pool_without_stock_outs_needs_none() -> None:
    problem = out_of_stock("steady", out=0.0)
    calm = replace(problem.pools[0], stock=NEVER_OUT, availability=None)
    same = [
        Engine(replace(problem, pools=(calm, problem.pools[1]), fallback=name), 1200.0).run((8, 0), 1, "")
        for name in ("steady", "")
    ]
    assert (same[0].finish == same[1].finish).all()
    assert (same[0].cost == same[1].cost).all()


def test_only_a_pool_with_room_for_all_workers_is_one() -> None:
    assert fallback() == "steady"
    assert not fallback(TIGHT, SPOT, replace(STEADY, limit=15))
    assert not fallback(promised=1)  # other jobs count on it
    assert not fallback(replace(TIGHT, min_workers=16, least=16))  # nobody may plan it: its number is fixed
    assert not fallback(replace(TIGHT, deadline_seconds=4000.0))  # a stock-out is answered when it comes
    assert not fallback(TIGHT, SPOT, replace(STEADY, price_per_hour=0.9))
    far = replace(STEADY, zone="b")
    assert not fallback(replace(TIGHT, zone_policy="Same"), replace(SPOT, zone="a"), far)
    assert fallback(TIGHT, replace(SPOT, zone="a"), far) == "steady"


def test_a_pool_that_nobody_has_watched_for_long_is_not_counted_on() -> None:
    """Of 10 jobs on the recorded trace with the fewest nodes, 2 were late where it was."""
    new = replace(SPOT, watched_seconds=7200.0, out_seconds=0.0, outs=0.0)
    found = [
        plan_fleet([new, replace(STEADY, limit=limit)], [PROFILE], [TIGHT]).jobs["a"] for limit in (16, 15)
    ]
    assert found[0].counts == found[1].counts


def test_nobody_is_promised_nodes_that_another_job_falls_back_on() -> None:
    jobs = [replace(TIGHT, name=name, max_workers=8, samples_left=1080 * 8 / 0.1 * 128) for name in "ab"]
    found = plan_fleet([SPOT, replace(STEADY, limit=12)], [PROFILE], jobs).jobs
    first, second = (found[name].counts["spot"] for name in "ab")
    assert first > second


def test_what_lasts_is_the_least_of_a_while() -> None:
    number = np.array([[3.0, 2.0, 4.0, 4.0, 1.0, 5.0, 5.0]])
    for back in range(9):
        brute = [min(number[0, i - back : i + 1]) if i >= back else 0.0 for i in range(7)]
        assert _lasting(number, back)[0].tolist() == brute
