"""What pods that wait for nodes say of their pool, before it is found out of stock; and a pool that nobody used."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shoal.sizing.availability import Markov, Stock
from shoal.sizing.fleet import FleetPool, JobPlan, plan_fleet
from shoal.sizing.plan.engine import STEPS, Engine
from shoal.sizing.plan.problem import Objective, Pool, Problem, Servers
from shoal.sizing.plan.work import StepWork
from tests.unit.sizing.fleet.tight import JOB, PROFILE, STEADY

SPOT = FleetPool("spot", "T4", spot=True, limit=16, price_per_hour=0.9, interruptions_per_hour=0.1)


def planned(**changes: Any) -> JobPlan:
    return plan_fleet([SPOT, STEADY], [PROFILE], [replace(JOB, **changes)]).jobs["a"]


def test_a_pool_that_nobody_used_is_not_all_that_a_deadline_rests_on() -> None:
    """Of jobs that asked it for 16 nodes, 61 % were in time on the recorded traces where 97 % were promised."""
    found = planned()
    assert found.feasible
    assert found.counts["steady"] >= found.counts["spot"] > 0


def test_pods_that_wait_make_a_stock_out_likely_before_it_is_found() -> None:
    """Four of 16 nodes have not come; twice the start would have to pass before the pool counts as out of stock."""
    at_work = {"running": {"spot": 12}, "planned": {"spot": 16}, "samples_left": 1080 * 15 / 0.1 * 128}

    def after(seconds: float) -> JobPlan:
        return planned(**at_work, deadline_seconds=1250.0, asked={"spot": seconds})

    early, late = after(5.0), after(300.0)
    assert early.counts == {"spot": 16, "steady": 0}
    assert late.counts["steady"] > 0


@pytest.mark.parametrize("unmet", [1.0, 0.5, 0.1, 0.01, 0.0])
def test_what_a_wait_says_is_by_the_rule_of_bayes(unmet: float) -> None:
    """As often as in draws: out of stock in a part of them, when half of the nodes that are asked for come."""
    pool = Markov(shock_size=0.5, stock=Stock(0.2, 1800, 10))
    known = pool.waited(unmet)
    rng = np.random.default_rng(0)
    out, kind, late = rng.random((3, 400_000))
    none = (out < 0.2) & (kind < 0.5)
    waits = none | (late < unmet)
    assert known.out_now == pytest.approx(np.mean(out[waits] < 0.2), abs=0.01)
    some = waits & (out < 0.2)
    assert known.coming == pytest.approx(np.mean(~none[some]), abs=0.01)
    assert Markov().waited(unmet).out_now == 0.0


def test_of_a_pool_that_is_out_of_stock_the_nodes_that_a_job_has_stay_and_others_do_not_come() -> None:
    def held(running: int, coming: float) -> float:
        process = Markov(0.0, math.inf, stock=Stock(0.2, 1e9, math.inf), out_now=1.0, coming=coming)
        pool = Pool("spot", 16, 1.0, 0.1, 128, running=running, availability=process)
        problem = Problem([pool], StepWork(steps=1e6), Servers(), Objective(deadline=3600.0))
        engine = Engine(problem, 3600.0)
        return float(engine.done([8], 1).mean()) / (STEPS * engine.step / 0.1)

    assert held(3, 0.0) == pytest.approx(3, abs=0.01)
    assert held(0, 0.0) == 0
    assert held(4, 0.5) == pytest.approx(6, abs=0.1)
    assert held(8, 0.0) == pytest.approx(8, abs=0.01)
