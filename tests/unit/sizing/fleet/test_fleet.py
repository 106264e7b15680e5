"""Plans for all jobs that share pools."""

from __future__ import annotations

import itertools
import math
import pickle
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.api.capacity_pool import CapacityPool
from shoal.errors import UsageError
from shoal.sizing.availability import Floats
from shoal.sizing.fleet import (
    FleetJob,
    FleetPool,
    JobPlan,
    LogMean,
    Model,
    Profile,
    Row,
    ServerLoad,
    joint,
    plan_fleet,
)
from shoal.sizing.fleet.pace import Watched, at_present_pace, pace_of, samples_per_second
from shoal.sizing.fleet.problems import cores_of, devices_of, job_problem, servers_of
from shoal.sizing.fleet.resources import fleet_pool
from shoal.sizing.fleet.traders import MOST_TRADERS
from shoal.sizing.plan.answer import Plan
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.engine import RUNS, TABLE_RUNS, Engine
from shoal.sizing.plan.problem import Objective, Pool, Problem, Servers
from shoal.sizing.plan.switch import Switch
from shoal.sizing.plan.together import plan_together
from shoal.sizing.plan.work import StepWork
from shoal.sizing.speed.efficiency import Efficiency
from shoal.sizing.speed.measurements import Basis
from shoal.sizing.speed.model import fitted
from shoal.sizing.speed.servers import PsModel

MODEL = Model("resnet32", 5.5e8, 1_857_722, 104)
SPOT = FleetPool("spot", "P100", spot=True, limit=16, price_per_hour=0.5, interruptions_per_hour=0.1)
STEADY = FleetPool("steady", "P100", limit=16, price_per_hour=1.5, startup_seconds=150)
PROFILE = Profile(
    MODEL,
    (Row("P100", batch_size=128, workers=4, compute=LogMean.of(0.083, 0.004, 500)),),
    {1: ServerLoad(60.0, 6000)},
)


def job(name: str = "a", **changes: object) -> FleetJob:
    values: dict[str, object] = {
        "pools": ("spot", "steady"), "model": MODEL, "samples_left": 2e7, "batch_size": 128, "max_workers": 16,
        "deadline_seconds": 3600.0, "least": changes.get("min_workers", 1),
    }  # fmt: skip
    return FleetJob(name, **(values | changes))  # type: ignore[arg-type]


def test_job_gets_cheapest_workers_that_meet_its_deadline() -> None:
    found = plan_fleet([SPOT, STEADY], [PROFILE], [job()]).jobs["a"]
    # 20 million samples in an hour are 5,556 a second; one P100 does 1,542.
    assert found.feasible
    assert found.counts["spot"] >= 4
    assert found.counts["steady"] == 0
    assert found.finish_seconds is not None
    assert found.finish_low is not None
    assert found.finish_high is not None
    assert found.finish_low <= found.finish_seconds <= found.finish_high
    assert found.confidence is not None
    assert found.confidence >= 0.95
    assert found.basis == {"spot": "measured"}
    assert "deadline" in found.reason
    assert pickle.loads(pickle.dumps(found)) == found


def test_on_demand_nodes_that_end_at_once_are_left_sooner_than_those_that_are_paid_on() -> None:
    """Karpenter takes an idle node after 30 s, cluster-autoscaler after 10 minutes: with minutes left, it decides."""
    running = job(samples_left=2.5e6, running={"steady": 4}, deadline_seconds=2400.0)
    pools = [replace(SPOT, startup_seconds=20), STEADY]
    stays = plan_fleet(pools, [PROFILE], [running]).jobs["a"]
    leaves = plan_fleet([pools[0], replace(STEADY, idle_seconds=10)], [PROFILE], [running]).jobs["a"]
    assert stays.counts["steady"] > 0
    assert leaves.counts["steady"] == 0


def test_a_pool_with_figures_that_cannot_be_true_takes_no_plan_from_the_jobs_that_name_it() -> None:
    """An OverflowError, or a number of draws that numpy refuses."""
    body = {
        "metadata": {"name": "hot"},
        "spec": {
            "accelerator": {"name": "P100"},
            "capacityType": "Spot",
            "limits": {"nodes": 16},
            "price": {"perHour": 0.4},
            "interruptionsPerHour": 1e300,
            "startupSeconds": 86_400,
        },
    }
    hot = fleet_pool(CapacityPool.model_validate(body))
    jobs = [
        job("a", pools=("hot", "spot", "steady")),
        job("b"),
        job("c", pools=("hot",), deadline_seconds=None),
    ]
    found = plan_fleet([SPOT, STEADY, hot], [PROFILE], jobs).jobs
    assert [plan.fault for plan in found.values()] == [""] * 3
    assert found["a"].feasible


def test_two_jobs_never_get_more_than_pool_holds() -> None:
    small = replace(SPOT, limit=8)
    both = plan_fleet([small, STEADY], [PROFILE], [job("a"), job("b")]).jobs
    assert both["a"].counts["spot"] + both["b"].counts["spot"] <= 8
    assert both["a"].feasible
    assert both["b"].feasible


def test_higher_priority_takes_pool_first() -> None:
    tight = [replace(SPOT, limit=5), replace(STEADY, limit=0)]
    found = plan_fleet(tight, [PROFILE], [job("low"), job("high", priority=10)]).jobs
    assert found["high"].feasible
    assert not found["low"].feasible


def test_less_slack_goes_first_at_equal_priority() -> None:
    tight = [replace(SPOT, limit=9), replace(STEADY, limit=0)]
    found = plan_fleet(
        tight, [PROFILE], [job("a", deadline_seconds=7200.0), job("b", deadline_seconds=2700.0)]
    ).jobs
    assert found["b"].feasible


def test_of_equal_jobs_the_one_that_was_made_first_goes_first_whatever_its_name() -> None:
    """Who waited in namespace `z` waited for ever: each time that one of `a` ended, its next one had the nodes."""
    four = job(pools=("steady",), deadline_seconds=None, min_workers=4, max_workers=4)
    new = replace(four, name="a/new", created="2026-01-01T12:00:00Z")
    waits = replace(four, name="z/waits", created="2026-01-01T11:00:00Z")
    file = replace(four, name="a/file")  # which is not made yet

    def has(*jobs: FleetJob) -> list[str]:
        plans = plan_fleet([replace(STEADY, limit=4)], [PROFILE], jobs).jobs
        return [name for name, each in plans.items() if each.counts["steady"]]

    assert has(file, new, waits) == ["z/waits"]
    assert has(file, new) == ["a/new"]
    assert has(replace(waits, created=new.created), new) == ["a/new"]


def test_job_that_was_never_measured_takes_no_pool_from_one_that_is_known_to_need_it() -> None:
    """Its slack is a guess. It has what is left until it is measured, minutes later."""
    tight = [replace(SPOT, limit=4), replace(STEADY, limit=12)]
    new = replace(MODEL, fingerprint="new")
    known = job("known", deadline_seconds=4000.0)
    unknown = job("unknown", model=new, deadline_seconds=3400.0)
    found = plan_fleet(tight, [PROFILE], [unknown, known]).jobs
    assert (found["known"].counts["spot"], found["unknown"].counts["spot"]) == (4, 0)
    measured = [PROFILE, replace(PROFILE, model=new)]
    assert plan_fleet(tight, measured, [unknown, known]).jobs["unknown"].counts["spot"] == 4


def test_jobs_trade_pools_where_all_together_cost_less() -> None:
    """The one with less slack would take the spot nodes, though it has others that cost little more."""
    small = replace(SPOT, limit=4)
    own = replace(STEADY, name="own", price_per_hour=0.6)
    urgent = job("urgent", pools=("spot", "own"), deadline_seconds=3700.0)
    other = job("other", pools=("spot", "steady"), deadline_seconds=3900.0)
    found = plan_fleet([small, own, STEADY], [PROFILE], [urgent, other]).jobs
    assert all(plan.feasible for plan in found.values())
    assert (found["urgent"].counts["spot"], found["other"].counts["spot"]) == (0, 4)
    dear = replace(own, price_per_hour=1.4)  # little is won
    kept = plan_fleet([small, dear, STEADY], [PROFILE], [urgent, other]).jobs
    assert (kept["urgent"].counts["spot"], kept["other"].counts["spot"]) == (4, 0)
    running = [replace(urgent, running=found["urgent"].counts), replace(other, running=found["other"].counts)]
    stays = plan_fleet([small, dear, STEADY], [PROFILE], running).jobs
    assert (stays["urgent"].counts["spot"], stays["other"].counts["spot"]) == (0, 4)
    begun = [replace(each, running={}, planned=each.running) for each in running]  # their nodes start
    goes_on = plan_fleet([small, dear, STEADY], [PROFILE], begun).jobs
    assert (goes_on["urgent"].counts["spot"], goes_on["other"].counts["spot"]) == (0, 4)


@pytest.mark.parametrize("least", [3, 4])
def test_jobs_that_cannot_spare_a_worker_do_not_plan_to_change_places(least: int) -> None:
    """Each of two full pools is the other job's better one. Who cannot spare a worker would wait for ever."""
    pools = [
        FleetPool(f"all-{name}", name, limit=4, price_per_hour=1.0, startup_seconds=30)
        for name in ("P100", "V100")
    ]
    models = [replace(MODEL, fingerprint=name) for name in ("a", "b")]
    rows = [
        tuple(Row(name, batch_size=128, workers=4, compute=LogMean.of(t, 0.0, 500)) for name, t in times)
        for times in ((("P100", 0.3), ("V100", 0.1)), (("P100", 0.1), ("V100", 0.3)))
    ]
    jobs = [
        job(f"{at}", pools=("all-P100", "all-V100"), model=model, samples_left=1e7, deadline_seconds=9e3,
            min_workers=least, max_workers=4, running={f"all-{at}": 4})
        for model, at in zip(models, ("P100", "V100"), strict=True)
    ]  # fmt: skip
    found = plan_fleet(pools, [Profile(m, r) for m, r in zip(models, rows, strict=True)], jobs).jobs
    for name, other in (("P100", "V100"), ("V100", "P100")):
        at = other if least < 4 else name
        assert found[name].counts[f"all-{at}"] >= least
        assert ("neither can spare a worker" in found[name].reason) == (least == 4)


def test_nearly_done_job_does_not_go_on_for_long_with_few_workers_to_save_pennies() -> None:
    """Four workers end it in a minute and a half; one would take six, and save what servers lose to contention."""
    slow_server = replace(PROFILE, server_load={1: ServerLoad(120.0, 6000)})
    ending = job(samples_left=5e5, running={"spot": 4}, deadline_seconds=900.0)
    pools = [replace(SPOT, idle_seconds=0.0), STEADY]
    assert plan_fleet(pools, [slow_server], [ending]).jobs["a"].counts["spot"] < 4
    assert plan_fleet(pools, [slow_server], [replace(ending, spent=2.0)]).jobs["a"].counts["spot"] >= 4


def test_pool_without_price_is_no_offer_and_is_said_so() -> None:
    found = plan_fleet([replace(SPOT, price_per_hour=None), STEADY], [PROFILE], [job()]).jobs["a"]
    assert found.counts.get("spot", 0) == 0
    assert "spot has no price" in found.reason


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model": None}, "model is not known"),
        ({"samples_left": None}, "ends by a metric"),
        ({"deadline_seconds": -5.0}, "deadline has passed"),
        ({"budget_left": 0.0}, "budget is spent"),
        ({"pools": ("nowhere",)}, "no CapacityPool nowhere"),
    ],
)
def test_every_job_gets_an_answer(changes: dict[str, object], word: str) -> None:
    found = plan_fleet([SPOT, STEADY], [PROFILE], [job(**changes)]).jobs["a"]
    assert not found.feasible
    assert word in found.reason


def test_unknown_accelerator_is_left_out_and_named() -> None:
    odd = FleetPool("odd", "Abacus", limit=4, price_per_hour=0.01)
    found = plan_fleet([odd, STEADY], [PROFILE], [job(pools=("odd", "steady"))]).jobs["a"]
    assert found.counts.get("odd", 0) == 0
    assert "Abacus" in found.reason


def test_exhausted_pool_gets_no_new_workers_where_there_is_no_time_to_wait() -> None:
    out = replace(SPOT, exhausted=True, exhausted_seconds=3600.0)
    tight = job(
        running={"spot": 1}, deadline_seconds=2400.0
    )  # half an hour is how long a stock-out is taken to last
    found = plan_fleet([out, STEADY], [PROFILE], [tight]).jobs["a"]
    assert found.counts["spot"] <= 1
    assert found.counts["steady"] > 0
    assert found.feasible
    steady = replace(STEADY, exhausted=True)
    found = plan_fleet([SPOT, steady], [PROFILE], [job(running={"steady": 1})]).jobs["a"]
    assert found.counts["steady"] <= 1


def test_workers_that_run_in_a_pool_that_is_out_of_stock_are_counted_on() -> None:
    """Half of them were taken to be lost at once: 5 of 8 were kept, and 4 on demand bought, for twice the price."""
    out = replace(
        SPOT, exhausted=True, exhausted_seconds=600.0, interruptions_per_hour=0.05, node_hours=2000.0,
        interruptions_seen=100, watched_seconds=1e6, out_seconds=2e4, outs=12,
    )  # fmt: skip
    eight = job(samples_left=3e7, running={"spot": 8}, planned={"spot": 8})
    found = plan_fleet([out, replace(STEADY, limit=4)], [PROFILE], [eight]).jobs["a"]
    assert found.feasible
    assert found.counts["spot"] >= 7
    assert found.counts["steady"] == 0


def test_exhausted_spot_pool_is_waited_for_while_on_demand_could_still_keep_the_deadline() -> None:
    out = replace(SPOT, exhausted=True)
    patient = plan_fleet([out, STEADY], [PROFILE], [job(deadline_seconds=3 * 3600.0)]).jobs["a"]
    assert patient.counts["spot"] > 0
    assert patient.counts["steady"] == 0
    assert patient.feasible
    assert patient.finish_seconds is not None
    assert patient.finish_seconds > 600
    long = replace(out, exhausted_seconds=1200.0)  # it may well take as long again
    later = plan_fleet([long, STEADY], [PROFILE], [job(deadline_seconds=3 * 3600.0)]).jobs["a"]
    assert later.finish_seconds is not None
    assert later.finish_seconds > patient.finish_seconds
    at_once = plan_fleet([SPOT, STEADY], [PROFILE], [job(deadline_seconds=3 * 3600.0)]).jobs["a"]
    assert patient.cost == pytest.approx(at_once.cost, rel=0.1)  # what is waited for is not paid
    whenever = plan_fleet([out, STEADY], [PROFILE], [job(deadline_seconds=None)]).jobs["a"]
    assert whenever.counts["spot"] == 0  # without a deadline it would wait for ever


def test_pool_that_ran_out_is_tried_with_one_worker_before_others_are_left_for_it() -> None:
    """It went back and forth: each time all nodes were given up, and others bought when none came."""
    running = job(running={"steady": 4}, samples_left=1.5e7, deadline_seconds=3000.0)
    tried, back = (
        plan_fleet([replace(SPOT, doubted=doubted), STEADY], [PROFILE], [running]).jobs["a"]
        for doubted in (True, False)
    )
    assert (tried.counts["spot"], back.counts["steady"]) == (1, 0)
    assert tried.counts["steady"] >= 3
    nothing_to_leave = replace(running, running={})
    assert (
        plan_fleet([replace(SPOT, doubted=True), STEADY], [PROFILE], [nothing_to_leave]).jobs["a"].counts
        == plan_fleet([SPOT, STEADY], [PROFILE], [nothing_to_leave]).jobs["a"].counts
    )


def test_one_worker_measures_a_pool_that_may_be_cheaper_and_no_more_than_may_be() -> None:
    other = FleetPool("other", "A10G", limit=16, price_per_hour=0.9, startup_seconds=60)
    long = {
        "pools": ("steady", "other"),
        "samples_left": 2e8,
        "deadline_seconds": 8 * 3600.0,
        "now": Watched({"steady": [128 / 0.083]}, 90.0),
    }
    known = replace(STEADY, price_per_hour=0.7)
    found = plan_fleet([known, other], [PROFILE], [job(**long)]).jobs["a"]
    assert found.counts["other"] == 1
    assert "One worker more measures other, where the model never ran" in found.reason
    row = Row("A10G", batch_size=128, workers=4, compute=LogMean.of(0.2, 0.004, 500))
    slow = replace(PROFILE, rows=(*PROFILE.rows, row))
    told = plan_fleet([known, other], [slow], [job(**long)]).jobs["a"]
    assert told.counts["other"] == 0
    assert "measures other" not in told.reason
    many = [job(name, **long, max_workers=6) for name in "abc"]
    tried = plan_fleet([replace(known, limit=32), other], [PROFILE], many).jobs
    assert sum(plan.counts["other"] for plan in tried.values()) == 1, (
        "one job measures it for all of its model"
    )
    begun = next(name for name in "abc" if not tried[name].counts["other"])
    many = [
        replace(each, running={"steady": 5} | ({"other": 1} if each.name == begun else {})) for each in many
    ]
    on = plan_fleet([replace(known, limit=32), other], [PROFILE], many).jobs
    assert {name: plan.counts["other"] for name, plan in on.items() if plan.counts["other"]} == {begun: 1}
    fixed = plan_fleet([known, other], [PROFILE], [job(**long, min_workers=16)]).jobs["a"]
    assert sum(fixed.counts.values()) == 16


def test_no_worker_measures_on_money_that_the_plan_needs() -> None:
    """A plan of 12.00 was told to keep 12.70 in 97.3 % of the runs, with 0.34 more to pay for a measurement."""
    other = FleetPool("other", "L4", limit=8, price_per_hour=2.0, startup_seconds=600)
    long = job(
        pools=("steady", "other"), samples_left=128 / 0.083 * 8 * 3600, deadline_seconds=None, max_workers=8,
        running={"steady": 2}, planned={"steady": 2}, now=Watched({"steady": [128 / 0.083] * 2}, 90.0),
    )  # fmt: skip
    short, ample, begun = (
        plan_fleet([STEADY, other], [PROFILE], [each]).jobs["a"]
        for each in (
            replace(long, budget_left=12.7),
            replace(long, budget_left=16.0),
            replace(long, budget_left=12.7, asked={"other": 60.0}),
        )
    )
    assert [each.counts["other"] for each in (short, ample, begun)] == [0, 1, 1], (
        "what has begun is not given up"
    )
    assert short.feasible
    assert short.confidence is not None
    assert begun.confidence is not None
    assert begun.confidence < 0.95 < short.confidence, "what it costs is no more in the budget"


@pytest.mark.by_day(1)
@pytest.mark.parametrize("deadline", [5400.0, -1.0])
def test_job_that_is_late_wherever_it_was_measured_tries_another_pool_with_one_worker(
    deadline: float,
) -> None:
    """By its data sheet a T4 is slower, which does not say that this model is: it stays late for sure otherwise."""
    l4 = FleetPool("spot-l4", "L4", spot=True, limit=8, price_per_hour=0.28)
    t4, steady = replace(l4, name="spot-t4", accelerator="T4"), replace(l4, name="on-demand-l4", spot=False)
    row = Row("L4", batch_size=128, workers=4, compute=LogMean.of(0.16, 0.004, 500))
    measured = replace(PROFILE, rows=(row,))
    late = job(
        pools=("spot-l4", "spot-t4", "on-demand-l4"), samples_left=2e7, max_workers=4, deadline_seconds=deadline,
        running={"spot-l4": 4},
    )  # fmt: skip
    pools = [l4, t4, steady]
    found = plan_fleet(pools, [measured], [late]).jobs["a"]
    assert not found.feasible
    assert found.counts == {"spot-l4": 3, "spot-t4": 1, "on-demand-l4": 0}
    assert (
        "One worker in place of one from spot-l4 measures spot-t4, where the model never ran" in found.reason
    )
    on = replace(late, running={"spot-l4": 3, "spot-t4": 1}, planned=found.counts)
    assert plan_fleet(pools, [measured], [on]).jobs["a"].counts == found.counts
    slow = Row("T4", batch_size=128, workers=4, compute=LogMean.of(0.2, 0.004, 500))
    known = replace(measured, rows=(row, slow))
    assert plan_fleet(pools, [known], [on]).jobs["a"].counts["spot-t4"] == 0
    nothing = replace(late, running={}, deadline_seconds=5400.0)  # what is slower than what is a guess
    assert "where the model never ran" not in plan_fleet(pools, [], [nothing]).jobs["a"].reason


def test_job_that_misses_only_its_budget_is_as_cheap_as_it_can_be_and_tries_what_may_be_cheaper() -> None:
    """A budget that is missed is missed by as little as possible: not by the fastest plan, which was run before."""
    known, new = (
        replace(STEADY, name="known"),
        replace(STEADY, name="new", accelerator="V100", price_per_hour=2.2),
    )
    pools = [known, new]
    over = job(pools=("known", "new"), deadline_seconds=None, budget_left=4.0, running={"known": 1})
    least = plan_fleet([known], [PROFILE], [replace(over, budget_left=None, pools=("known",))]).jobs["a"]
    alone = plan_fleet([known], [PROFILE], [replace(over, pools=("known",))]).jobs["a"]
    assert not alone.feasible
    assert alone.binding == "budget"
    assert alone.counts == least.counts
    assert "The budget of 4.00 is too small for every plan. The cheapest plan is 1 worker" in alone.reason
    assert "raise the budget to at least that" in alone.reason.lower()
    found = plan_fleet(pools, [PROFILE], [over]).jobs["a"]
    assert (found.counts["known"], found.counts["new"]) == (1, 1)
    assert "One worker more measures new, where the model never ran" in found.reason
    assert plan_fleet(pools, [PROFILE], [replace(over, prefer="MinTime")]).jobs["a"].counts == found.counts
    spent = replace(over, prefer="MinTime", budget_left=0.0)
    assert plan_fleet([known], [PROFILE], [replace(spent, pools=("known",))]).jobs["a"].counts == alone.counts
    both = replace(over, deadline_seconds=4 * 3600.0)
    in_time = plan_fleet(pools, [PROFILE], [both]).jobs["a"]
    assert (
        "the deadline was kept in 100.0% and the budget was kept in 0.1% and both in 0.1%" in in_time.reason
    )
    assert in_time.confidence == 0.001
    assert in_time.counts["known"] < 8
    assert in_time.counts["new"] == 1
    sure = plan_fleet([known, replace(new, price_per_hour=9.0)], [PROFILE], [over]).jobs["a"]
    assert sure.counts["new"] == 0, "it would have to be six times as fast"


def test_late_job_does_not_pay_any_price_for_the_last_seconds() -> None:
    quick = replace(STEADY, startup_seconds=170.0)
    late = job(deadline_seconds=900.0)  # sixteen workers take longer
    found = plan_fleet([SPOT, quick], [PROFILE], [late]).jobs["a"]
    assert not found.feasible
    assert found.binding == "deadline"
    assert found.counts["steady"] == 0
    assert "The very fastest, " in found.reason


@pytest.mark.nightly
def test_where_no_plan_is_sure_the_likeliest_is_taken_and_stays() -> None:
    """Spot nodes are as fast in the mean: they were taken at 80 %, and once one was lost the deadline was, too."""
    light = replace(PROFILE, server_load={1: ServerLoad(0.6, 6000)})
    pools = [replace(SPOT, interruptions_per_hour=1.0, startup_seconds=150.0), STEADY]
    tight = job(samples_left=1.15e7, deadline_seconds=1200.0, max_workers=8)

    def plan(**changes: object) -> JobPlan:
        return plan_fleet(pools, [light], [replace(tight, **changes)]).jobs["a"]  # type: ignore[arg-type]

    found, sure, spot = plan(), plan(pools=("steady",)), plan(pools=("spot",))
    assert not found.feasible
    assert found.binding == "confidence"
    assert (found.confidence or 0) >= (sure.confidence or 0) - 0.04
    assert (found.confidence or 0) >= (spot.confidence or 0) + 0.08
    # What is under way is as likely, and left for nothing that costs hardly less.
    assert plan(planned={"steady": 8}).counts == {"spot": 0, "steady": 8}


def test_job_on_spot_nodes_ends_early_where_that_costs_little() -> None:
    """The work costs the same with few workers and with many; what is done cannot be hit by a stock-out."""
    lazy = plan_fleet([SPOT, STEADY], [PROFILE], [job(deadline_seconds=4 * 3600.0)]).jobs["a"]
    assert lazy.finish_seconds is not None
    assert lazy.finish_seconds < 2 * 3600


def test_cpu_pool_is_a_pool_like_any_other() -> None:
    cpu = FleetPool("cpu", None, cores=8, limit=4, price_per_hour=0.2)
    profile = Profile(
        MODEL, (Row("CPU", cores=8, batch_size=128, workers=2, compute=LogMean.of(2.0, 0.1, 50)),)
    )
    found = plan_fleet([cpu], [profile], [job(pools=("cpu",), samples_left=1e5)]).jobs["a"]
    assert found.basis == {"cpu": "measured"}
    assert found.samples_per_second == pytest.approx(found.counts["cpu"] * 64, rel=0.1)


def test_a_worker_whose_cpu_is_limited_is_no_faster_on_a_larger_node() -> None:
    """Measured on 2 cores, it was foreseen 4 times as fast on nodes with 8, and nodes with 16 were paid for ever."""
    small, large = (
        FleetPool(f"{cores}", None, cores=cores, limit=8, price_per_hour=cores / 20) for cores in (4, 16)
    )
    row = Row("CPU", cores=2, batch_size=128, workers=2, compute=LogMean.of(0.8, 0.1, 5000))
    limited = job(pools=("4", "16"), samples_left=1e6, cpu_limit=2.0)
    found = plan_fleet([small, large], [Profile(MODEL, (row,))], [limited]).jobs["a"]
    assert found.basis == {"4": "measured"}
    assert found.speeds == pytest.approx({"4": 160, "16": 160}, rel=0.05)
    one = job_problem(limited, [small], {"4": 8}, fitted([Profile(MODEL, (row,))])[0])
    assert [each.accelerator for each in one.problem.pools] == ["CPU x 2"]
    for half, expected in ((0.5, 0.5), (0.0, 4.0), (32.0, 4.0)):
        assert cores_of(replace(limited, cpu_limit=half), small) == expected


def test_a_worker_whose_template_asks_for_one_gpu_is_no_faster_on_a_node_of_four() -> None:
    """Measured with one, it was foreseen more than twice as fast with four, and such nodes were paid for ever."""
    one = FleetPool("one", "T4", limit=16, price_per_hour=0.6, startup_seconds=150)
    four = FleetPool("four", "V100", devices=4, limit=4, price_per_hour=2.4, startup_seconds=150)
    rows = (
        Row("T4", batch_size=128, workers=4, compute=LogMean.of(0.2, 0.01, 5000)),
        Row("V100", batch_size=128, workers=1, compute=LogMean.of(0.083, 0.004, 5000)),
    )
    profile = Profile(MODEL, rows, {1: ServerLoad(0.6, 6000)})
    limited = job(
        pools=("one", "four"), samples_left=4.1e7, deadline_seconds=8 * 3600.0, gpu_limit=1,
        running={"one": 3, "four": 1}, planned={"one": 3, "four": 1},
    )  # fmt: skip
    found = plan_fleet([one, four], [profile], [limited]).jobs["a"]
    assert found.counts["four"] == 0
    assert plan_fleet([one, four], [profile], [replace(limited, gpu_limit=None)]).jobs["a"].counts["four"] > 0
    problem = job_problem(limited, [one, four], {"one": 16, "four": 4}, fitted([profile])[0])
    assert problem.basis == {"one": Basis.MEASURED, "four": Basis.MEASURED}
    assert [each.accelerator for each in problem.problem.pools] == ["T4 x 1", "V100 x 1"]
    for asked, expected in ((None, 4), (0, 1), (1, 1), (2, 2), (8, 4)):
        assert devices_of(replace(limited, gpu_limit=asked), four) == expected
    large = replace(limited, bytes_per_sample=4e8)  # 51 GB a step: on four GPUs of 16 GB it fits
    assert "four is left out" in plan_fleet([one, four], [profile], [large]).jobs["a"].reason
    all_four = plan_fleet([one, four], [profile], [replace(large, gpu_limit=None)]).jobs["a"]
    assert (+Counter(all_four.counts)).keys() == {"four"}


def test_a_worker_whose_template_asks_for_no_gpu_computes_on_the_cores_of_its_node() -> None:
    """Its steps take 1.2 s there; it was planned with all eight GPUs of its node."""
    node = FleetPool("eight", "V100", devices=8, cores=8.0, limit=4, price_per_hour=2.4)
    rows = (
        Row("CPU", cores=8.0, batch_size=128, compute=LogMean.of(1.2, 0.01, 5000)),
        Row("V100", devices=8, batch_size=128, compute=LogMean.of(0.02, 0.001, 5000)),
    )
    speeds, _ = fitted([Profile(MODEL, rows)])
    without = job(pools=("eight",), gpu_limit=0, gpu_image=False, bytes_per_sample=1e12)
    found = job_problem(without, [node], {"eight": 4}, speeds)
    assert found.basis == {"eight": Basis.MEASURED}
    [pool] = found.problem.pools
    assert (pool.accelerator, pool.step_seconds) == ("CPU x 8", pytest.approx(1.2, rel=0.05))
    unseen = job_problem(replace(without, cpu_limit=8.0), [replace(node, cores=0.0)], {"eight": 4}, speeds)
    assert unseen.problem.pools[0].accelerator == "CPU x 8"
    with pytest.raises(UsageError, match="no node of it was seen"):
        job_problem(without, [replace(node, cores=0.0)], {"eight": 4}, speeds)


@pytest.mark.parametrize("on_demand", [0.0, 0.1, 2.0])
def test_a_node_costs_what_its_pool_says(on_demand: float) -> None:
    """Nodes of one's own at a price of 0 beside them do not make spot nodes free."""
    spot = replace(SPOT, price_per_hour=0.35)
    steady = replace(STEADY, price_per_hour=on_demand)
    speeds, _ = fitted([PROFILE])
    one = job_problem(job(deadline_seconds=None), [spot, steady], {"spot": 4, "steady": 4}, speeds)
    assert [each.price for each in one.problem.pools] == [0.35, on_demand]


def test_workers_are_planned_where_the_servers_are_and_what_crosses_counts() -> None:
    near, far = (replace(SPOT, name=zone, zone=zone, transfer_per_gib=0.02, limit=8) for zone in "ab")
    far = replace(far, price_per_hour=0.4)
    wide = job(pools=("a", "b"), zone_policy="Any")
    assert plan_fleet([near, far], [PROFILE], [wide]).jobs["a"].counts["b"] > 0
    placed = replace(wide, servers_zone="a")
    found = plan_fleet([near, far], [PROFILE], [placed]).jobs["a"]
    assert (found.counts["a"] > 0, found.counts["b"]) == (True, 0)
    there = replace(placed, running={"b": 6}, planned={"b": 6})
    moved = plan_fleet([near, far], [PROFILE], [there]).jobs["a"]
    assert moved.counts["b"] == 0


def test_what_crosses_zones_once_in_several_batches_costs_so_much_less() -> None:
    several = fitted([replace(PROFILE, server_load={1: ServerLoad(60.0, 6000, batches_per_update=10)})])[0]
    once, seldom, own = (
        servers_of(MODEL, speeds, (1,), batches).bytes_per_step
        for speeds, batches in ((fitted([PROFILE])[0], 0.0), (several, 0.0), (several, 4.0))
    )
    assert once == pytest.approx(10 * seldom)
    assert once == pytest.approx(4 * own)


@pytest.mark.parametrize(("told", "own"), [(10.0, 0.0), (1.0, 10.0), (0.0, 10.0)])
def test_job_of_several_batches_a_push_is_not_told_to_add_servers(told: float, own: float) -> None:
    """16 workers had done 320 a second, and 200 were no plan: the servers' 100 pushes were taken for batches."""
    quick = LogMean.of(0.05, 0.002, 20_000)
    rows = tuple(Row("P100", batch_size=128, workers=n, compute=quick, step=quick) for n in (1, 4, 8, 16))
    profile = Profile(MODEL, rows, {1: ServerLoad(1000.0, 100_000, batches_per_update=told)})
    wanted = job(pools=("steady",), samples_left=200 * 128 * 3300.0, batches_per_update=own)
    found = plan_fleet([STEADY], [profile], [wanted]).jobs["a"]
    assert found.feasible
    assert 11 <= found.counts["steady"] <= 12


def test_job_of_one_batch_a_push_has_not_the_servers_of_one_of_a_hundred() -> None:
    """After one of the model with a hundred, its servers were foreseen to do 50 times what they do."""
    profile = replace(PROFILE, server_load={1: ServerLoad(1e4, 2e5, batches_per_update=100)})
    wanted = job(samples_left=2e7, deadline_seconds=7200.0, max_workers=30)
    one, hundred = (
        plan_fleet([SPOT, STEADY], [profile], [replace(wanted, batches_per_update=batches)]).jobs["a"]
        for batches in (1.0, 100.0)
    )
    assert (one.feasible, hundred.feasible) == (False, True)
    assert one.samples_per_second is not None
    assert one.samples_per_second < 20 * 128 * 1.05


def test_a_plan_that_is_kept_does_not_call_itself_the_cheapest() -> None:
    """It was compared with one other, and that may be the cheapest."""
    running = job(samples_left=2e6, running={"steady": 4}, planned={"steady": 4}, deadline_seconds=2400.0)
    kept = plan_fleet([SPOT, STEADY], [PROFILE], [running]).jobs["a"]
    assert kept.counts["steady"] == 4
    assert "What runs is kept" in kept.reason
    assert not {"cheapest", "combinations", "least cost"} & set(kept.reason.replace(",", "").split())
    assert "least cost" not in kept.reason


def test_confidence_is_that_of_all_limits_also_of_a_budget_alone() -> None:
    found = plan_fleet([SPOT, STEADY], [PROFILE], [job(deadline_seconds=None, budget_left=5.0)]).jobs["a"]
    assert found.confidence is not None


def test_workers_that_are_slower_now_than_measured_need_help_to_keep_the_deadline() -> None:
    """Measurements of weeks do not outvote the present: the deadline would be lost before they had moved."""
    usual = 128 / 0.083
    wanted = job(pools=("spot",), samples_left=1.8e7, running={"spot": 4})
    [as_ever, slow] = [
        plan_fleet(
            [SPOT], [PROFILE], [replace(wanted, now=Watched({"spot": [usual * share] * 4}, 60.0))]
        ).jobs["a"]
        for share in (1.0, 0.6)
    ]
    assert as_ever.pace is not None
    assert slow.pace is not None
    assert as_ever.pace.error == pytest.approx(0.0, abs=0.05)
    assert "now than" not in as_ever.reason
    assert slow.pace.error == pytest.approx(1 / 0.6 - 1, abs=0.1)
    assert "slower now than the measurements so far say" in slow.reason
    assert slow.feasible
    assert as_ever.counts["spot"] == 4
    assert slow.counts["spot"] >= 6
    alike = slow.samples_per_second or 0.0
    assert alike == pytest.approx(0.6 * usual * slow.counts["spot"], rel=0.15)


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_plan_stays_while_no_worker_can_be_watched(share: float) -> None:
    """The operator or the parameter servers begin again: what was found before holds until there is more."""
    wanted = job(samples_left=1.8e7, running={"spot": 5})
    watched = replace(wanted, now=Watched({"spot": [share * 128 / 0.083] * 5}, 90.0))
    before = plan_fleet([SPOT, STEADY], [PROFILE], [watched]).jobs["a"]
    meanwhile = plan_fleet([SPOT, STEADY], [PROFILE], [replace(wanted, pace_before=before.pace)]).jobs["a"]
    assert meanwhile == before


def test_longer_a_job_is_watched_the_surer_is_its_end() -> None:
    """From what another day changes, before anything was seen, to a few percent; nowhere does it jump."""
    wanted = job(pools=("steady",), running={"steady": 4}, min_workers=4, max_workers=4)
    widths = []
    for seconds in (0.0, 1.0, 10.0, 30.0, 90.0):
        watched = Watched({"steady": [128 / 0.083] * 4} if seconds else {}, seconds)
        found = plan_fleet([STEADY], [PROFILE], [replace(wanted, now=watched)]).jobs["a"]
        assert found.finish_low is not None
        assert found.finish_high is not None
        widths.append(math.log(found.finish_high / found.finish_low) / (2 * 1.6449))
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == pytest.approx(0.1, abs=0.015)
    assert widths[1] > 0.8 * widths[0]
    assert widths[-1] < 0.04


@given(share=st.floats(0.4, 2.5), counts=st.tuples(st.integers(1, 8), st.integers(0, 8)))
def test_corrected_problem_predicts_what_the_workers_do(share: float, counts: tuple[int, int]) -> None:
    pools = (Pool("a", 8, 1.0, 0.1, 128, running=counts[0]), Pool("b", 8, 1.0, 0.3, 64, running=counts[1]))
    for update_seconds in (0.0, 0.02):  # servers that never, and that soon, are the limit
        problem = Problem(
            pools=pools,
            work=StepWork(samples=1e6),
            servers=Servers((1,), model=PsModel(update_seconds, 4.0, 1.0)),
            objective=Objective(),
        )
        everyone = samples_per_second(problem, counts)
        alone = sum(n * p.batch / p.step_seconds for n, p in zip(counts, pools, strict=True))
        each = {
            p.name: [share * p.batch / p.step_seconds * everyone / alone] * n
            for n, p in zip(counts, pools, strict=True)
        }
        pace = pace_of(problem, Watched(each, 30.0))
        corrected, words = at_present_pace(problem, pace)
        assert samples_per_second(corrected, counts) == pytest.approx(share * everyone, rel=0.15)
        assert ("slower" in words) == (share < 0.85) or 0.8 < share < 0.95
        assert ("faster" in words) == (share > 1.15) or 1.05 < share < 1.2
        first = {name: found[:1] for name, found in each.items()}
        some = pace_of(problem, Watched(first, 30.0, {name: len(found) for name, found in each.items()}))
        assert some is not None
        assert pace is not None
        assert some.error == pytest.approx(pace.error, abs=0.01)  # some of the workers tell as much as all


def test_the_slower_the_workers_are_the_less_is_promised_however_slow() -> None:
    """A GPU that others share, or an input that stalls: there is no factor from which it is forgotten again."""
    wanted = job(pools=("steady",), running={"steady": 2}, samples_left=6e6, deadline_seconds=3600.0)
    found = []
    for times in range(1, 21):
        watched = Watched({"steady": [128 / 0.083 / times] * 2}, 90.0)
        found.append(plan_fleet([STEADY], [PROFILE], [replace(wanted, now=watched)]).jobs["a"])
    workers = [sum(plan.counts.values()) for plan in found]
    assert workers == sorted(workers)
    late = [plan for plan in found if not plan.feasible]
    assert found[-len(late) :] == late
    ends, sure = [plan.finish_high or 0 for plan in late], [plan.confidence or 0 for plan in late]
    assert ends == sorted(ends)
    assert sure == sorted(sure, reverse=True)
    assert sure[-1] < 0.2
    assert "slower now" in found[9].reason
    assert ["fault" in plan.reason for plan in found] == [False] * 3 + [True] * 17


def test_reading_that_cannot_be_moves_no_plan_beyond_bounds() -> None:
    problem = Problem(
        pools=(Pool("a", 8, 1.0, 0.1, 128, running=2),), work=StepWork(samples=1e6), objective=Objective()
    )
    unseen = at_present_pace(problem, None)
    assert unseen[0].pools[0].step_seconds == 0.1
    for found in ({}, {"a": []}, {"other": [5.0]}):
        assert at_present_pace(problem, pace_of(problem, Watched(found, 90.0))) == unseen
    for each, slower in ((1e-300, 100), (1e-9, 100), (1e9, 1 / 3)):
        pool = at_present_pace(problem, pace_of(problem, Watched({"a": [each]}, 90.0)))[0].pools[0]
        assert pool.step_seconds == pytest.approx(0.1 * slower, rel=0.01)
        assert pool.step_sigma > 0.3


@settings(max_examples=examples(16), deadline=None)
@given(
    limits=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    sizes=st.lists(st.floats(1e5, 5e7), min_size=1, max_size=3),
    least=st.integers(1, 3),
)
def test_limits_hold_for_any_jobs(limits: tuple[int, int], sizes: list[float], least: int) -> None:
    pools = [replace(SPOT, limit=limits[0]), replace(STEADY, limit=limits[1])]
    jobs = [job(str(i), samples_left=size, min_workers=least, priority=i % 2) for i, size in enumerate(sizes)]
    found = plan_fleet(pools, [PROFILE], jobs).jobs
    for pool in pools:
        assert sum(each.counts.get(pool.name, 0) for each in found.values()) <= pool.limit
    for each in found.values():
        assert each.reason
        assert sum(each.counts.values()) <= 16
        assert all(math.isfinite(x) for x in (each.finish_seconds, each.cost) if x is not None)


@pytest.mark.nightly
def test_only_numbers_of_workers_that_a_job_may_have_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty jobs of eight workers: how large the pools are is no matter."""
    simulated = Counter[str]()
    follow = Engine._followed

    def counted(self: Engine, pool: Pool, n: int, ready: float) -> tuple[Floats, Floats]:
        held, working = follow(self, pool, n, ready)
        simulated["numbers"] += 1
        simulated["runs"] += len(working)
        return held, working

    monkeypatch.setattr(Engine, "_followed", counted)
    others = [replace(pool, name=f"{pool.name}-2", price_per_hour=2.0) for pool in (SPOT, STEADY)]
    pools = [replace(pool, limit=400) for pool in (SPOT, STEADY, *others)]
    names = tuple(pool.name for pool in pools)
    jobs = [job(f"{n}", pools=names, max_workers=8, samples_left=(1 + n / 20) * 1e7) for n in range(20)]
    assert all(plan.feasible for plan in plan_fleet(pools, [PROFILE], jobs).jobs.values())
    assert simulated["numbers"] <= 20 * 4 * (9 + 1)
    assert simulated["runs"] <= 20 * 2 * (9 * TABLE_RUNS + RUNS) + 20 * 2 * (9 + 1)


def test_planner_imports_numpy_only_and_stays_small() -> None:
    script = """
import sys
from pathlib import Path
from shoal.sizing.fleet import FleetJob, FleetPool, Model, plan_fleet
pool = FleetPool("spot", "T4", spot=True, limit=16, price_per_hour=0.4, interruptions_per_hour=0.1)
job = FleetJob("a", ("spot",), model=Model("m", 1e9, 10**6, 50), samples_left=1e6, batch_size=64, max_workers=16)
plan_fleet([pool], [], [job])
heavy = {"pandas", "scipy", "sklearn", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
print(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 70 * 1024  # KiB


def test_what_runs_is_kept_unless_the_gain_is_sure() -> None:
    """A few workers more or less cost about the same: no change for that; a much dearer fleet is left."""
    best = plan_fleet([SPOT, STEADY], [PROFILE], [job()]).jobs["a"].counts["spot"]
    near = plan_fleet([SPOT, STEADY], [PROFILE], [job(running={"spot": best + 1})]).jobs["a"]
    assert near.counts["spot"] == best + 1
    assert "What runs is kept" in near.reason
    dear = plan_fleet([SPOT, STEADY], [PROFILE], [job(running={"steady": best + 1})]).jobs["a"]
    assert dear.counts["spot"] >= best
    assert dear.counts["steady"] == 0


def test_what_runs_is_left_where_the_job_may_no_longer_run_it() -> None:
    """Its onDemandBase was raised, or a pool's zone was corrected: there is a plan, and it keeps to that."""
    raised = job(running={"spot": 8}, on_demand_base=1)
    found = plan_fleet([SPOT, STEADY], [PROFILE], [raised]).jobs["a"]
    assert found.feasible
    assert found.counts["steady"] >= 1
    together = plan_fleet([SPOT, STEADY], [PROFILE], [raised, job("b", running={"spot": 5})]).jobs
    assert together["a"].counts["steady"] >= 1
    apart = [replace(SPOT, zone="a"), replace(STEADY, zone="b", price_per_hour=0.55)]
    found = plan_fleet(apart, [PROFILE], [job(running={"spot": 5, "steady": 1})]).jobs["a"]
    assert found.feasible
    assert 0 in found.counts.values()


def test_pool_that_runs_out_gets_on_demand_workers_beside_it_where_there_is_no_reserve() -> None:
    scarce = replace(SPOT, watched_seconds=360_000, out_seconds=180_000, outs=100)
    tight = job(samples_left=7.5e7, deadline_seconds=3900.0)  # on-demand alone could not make it any more
    sure, unsure = (plan_fleet([pool, STEADY], [PROFILE], [tight]).jobs["a"] for pool in (SPOT, scarce))
    assert unsure.counts["steady"] > sure.counts["steady"] or not unsure.feasible


def test_jobs_trade_pools_where_one_of_them_has_no_other() -> None:
    pools = [replace(SPOT, limit=6), replace(STEADY, limit=16)]
    flexible = job("a", deadline_seconds=3500.0)
    bound = job("b", pools=("spot",), deadline_seconds=3600.0)
    found = plan_fleet(pools, [PROFILE], [flexible, bound]).jobs
    assert found["b"].feasible
    assert found["a"].feasible
    assert found["a"].counts["spot"] + found["b"].counts["spot"] <= 6


def test_model_that_was_measured_elsewhere_is_no_unknown() -> None:
    """Where it runs teaches nothing more of the pool that it is to move to: it must not wait for that."""
    pools = [replace(SPOT, limit=1), replace(STEADY, accelerator="V100")]
    found = plan_fleet(pools, [PROFILE], [job(running={"spot": 1})]).jobs["a"]
    assert found.basis["steady"] is not Basis.MEASURED
    assert found.measured
    assert not plan_fleet(pools, [], [job(running={"spot": 1})]).jobs["a"].measured


def test_sixteen_workers_of_a_job_that_ends_by_a_loss_are_not_four_times_as_fast_as_four() -> None:
    """They need more samples for the same loss; a job that ends by samples has no such loss."""

    def seconds(workers: int, **changes: object) -> float:
        fixed = {
            "min_workers": workers,
            "max_workers": workers,
            "deadline_seconds": None,
            "prefer": "MinTime",
        }
        idle = replace(PROFILE, server_load={1: ServerLoad(1.0, 6000)})
        found = plan_fleet([STEADY], [idle], [job(pools=("steady",), **(fixed | changes))]).jobs["a"]
        assert found.finish_seconds is not None
        return found.finish_seconds

    assert seconds(4) / seconds(16) > 3.3  # the start-up
    ends = {
        "efficiency": Efficiency(0.3, 0.3, reference=4),
        "samples_sigma": 0.2,
        "work_note": "the job ends by a loss",
    }
    assert seconds(4, **ends) / seconds(16, **ends) < 1.6
    found = plan_fleet([STEADY], [PROFILE], [job(pools=("steady",), **ends)]).jobs["a"]
    assert "workers need" in found.reason
    assert "times the samples of one" in found.reason


def test_uncertain_work_makes_a_deadline_less_sure() -> None:
    sure = plan_fleet([STEADY], [PROFILE], [job(pools=("steady",))]).jobs["a"]
    unsure = plan_fleet([STEADY], [PROFILE], [job(pools=("steady",), samples_sigma=0.3)]).jobs["a"]
    assert unsure.counts["steady"] > sure.counts["steady"]
    assert unsure.confidence is not None
    assert unsure.confidence >= 0.95


def test_parameter_servers_that_limit_a_plan_are_named_with_what_one_more_would_bring() -> None:
    slow = replace(
        PROFILE, server_load={1: ServerLoad(120.0, 6000)}
    )  # 50 updates a second; 8 workers make 96
    many = {"pools": ("steady",), "min_workers": 8, "max_workers": 8, "deadline_seconds": None}
    held = plan_fleet([STEADY], [slow], [job(**many)]).jobs["a"]
    assert "The parameter servers are the limit: 2 in place of 1 would make" in held.reason
    idle = replace(PROFILE, server_load={1: ServerLoad(1.0, 6000)})
    assert "are the limit" not in plan_fleet([STEADY], [idle], [job(**many)]).jobs["a"].reason


@pytest.mark.nightly
def test_a_job_that_is_late_with_all_nodes_has_none_of_many_others_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All jobs were planned twice each minute, and then seven of them. That others make late: see `test_many`."""
    asked: list[int] = []

    def counted(problems: Sequence[Problem], *more: Any) -> list[Plan | None]:
        asked.append(len(problems))
        return plan_together(problems, *more)

    monkeypatch.setattr(joint, "plan_together", counted)
    pools = [replace(SPOT, limit=24), replace(STEADY, limit=24)]
    fine = [job(f"j{i}", samples_left=1e7 + i, deadline_seconds=7200.0, max_workers=4) for i in range(12)]
    late = job("late", deadline_seconds=200.0)
    assert not plan_fleet(pools, [PROFILE], [*fine, late]).jobs["late"].feasible
    assert not asked
    assert not plan_fleet(pools, [PROFILE], [*fine[:6], late]).jobs["late"].feasible
    assert len(asked) == 1
    assert 1 < asked[0] <= MOST_TRADERS


@pytest.mark.parametrize("work", [{"samples_left": 2e7}, {"samples_left": None, "steps_left": 2e7 / 128}])
def test_on_demand_nodes_are_a_reserve_only_as_far_as_the_servers_and_the_work_let_them(
    work: dict[str, object],
) -> None:
    """It was one for work in steps whatever there was to do, and at any number of workers behind full servers."""

    def prepared(deadline: float, profile: Profile) -> bool:
        speeds, _ = fitted([profile])
        one = job(deadline_seconds=deadline, **work)
        made = job_problem(one, [SPOT, STEADY], {"spot": 16, "steady": 16}, speeds)
        return made.problem.pools[0].availability is not None

    # 20 million samples take 16 P100 810 s, 150 s to start, and 300 s are to spare.
    quick = replace(PROFILE, server_load={1: ServerLoad(6.0, 6000)})
    assert prepared(1200.0, quick)
    assert not prepared(1350.0, quick)
    assert prepared(
        1900.0, PROFILE
    )  # its server makes 100 steps/s, of the 193 of 16 workers: they take 1,560 s
    assert not prepared(2200.0, PROFILE)


@pytest.mark.parametrize("most", [8, 32])
def test_reserve_is_the_fewest_on_demand_nodes_whatever_the_most_would_do(most: int) -> None:
    """32 workers of a job that ends by a metric are slower than 4: where they were too slow, none was a reserve."""
    speeds, _ = fitted([replace(PROFILE, server_load={1: ServerLoad(120.0, 6000)})])
    ends = job(
        samples_left=6e7, efficiency=Efficiency(0.17, 0.0, 1.0), deadline_seconds=24_000.0, max_workers=most
    )
    pools = [replace(each, limit=64) for each in (SPOT, STEADY)]
    made = job_problem(ends, pools, {"spot": 64, "steady": 64}, speeds)
    assert made.reserve == {"spot": 0, "steady": 3}
    assert made.problem.pools[0].availability is None
    seconds = [ElasticModel(made.problem).seconds((0, n), 1) for n in (2, 3, most)]
    assert seconds[0] > 0.95 * 24_000 > seconds[1]
    assert most < 32 or seconds[2] > 24_000


def test_job_to_which_the_others_leave_no_node_trades_for_some_and_is_told_why_else() -> None:
    """It was told to raise the limit, and waited until the other one ended, though both could keep their deadlines."""
    hour = 3600 * 1542.0  # samples of one worker
    pool = replace(STEADY, limit=16)
    fast = {"pools": ("steady",), "prefer": "MinTime"}
    first = job("a", samples_left=16 * hour, deadline_seconds=3 * 3600.0, **fast)
    second = job("b", samples_left=2 * hour, deadline_seconds=2 * 3600.0, **fast)
    found = plan_fleet([pool], [PROFILE], [first, second]).jobs
    assert all(plan.feasible for plan in found.values())
    assert found["a"].counts["steady"] + found["b"].counts["steady"] <= 16
    above = replace(first, priority=1, samples_left=40 * hour)  # it needs all of them
    squeezed = plan_fleet([pool], [PROFILE], [above, second]).jobs["b"]
    assert (squeezed.counts, squeezed.feasible, squeezed.binding) == ({"steady": 0}, False, "pools")
    assert squeezed.reason.startswith("The other jobs leave no node for it.")


def test_trade_by_which_one_job_would_never_end_is_not_made_for_another_that_now_never_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = itertools.cycle(Switch(np.full(10, saved), kept=True) for saved in (math.inf, -math.inf))
    monkeypatch.setattr(joint, "switch", lambda *_: next(changes))
    fast = {"pools": ("steady",), "prefer": "MinTime", "deadline_seconds": None}
    jobs = [job(name, running={"steady": n}, **fast) for name, n in (("a", 7), ("b", 1))]
    found = plan_fleet([replace(STEADY, limit=8)], [PROFILE], jobs).jobs
    assert [found[name].counts["steady"] for name in "ab"] == [7, 1]


def test_job_with_a_deadline_goes_before_one_without_if_neither_was_measured() -> None:
    """It got nothing for as long as the other one ran, and so was never measured."""
    new = [replace(MODEL, fingerprint=name) for name in ("x", "y")]
    one = replace(STEADY, limit=16)
    fast = {"pools": ("steady",), "prefer": "MinTime"}
    endless = job("a", model=new[0], deadline_seconds=None, **fast)
    urgent = job("b", model=new[1], deadline_seconds=3600.0, priority=0, **fast)
    found = plan_fleet([one], [PROFILE], [endless, urgent]).jobs
    assert found["b"].feasible
    assert found["b"].counts["steady"] >= found["a"].counts["steady"]


def test_what_another_day_changes_adds_to_the_doubt_of_the_profile_before_anything_is_watched() -> None:
    one = Problem((Pool("p", 4, 1.0, 0.1, 8, step_sigma=0.08),), StepWork(steps=1000))
    before, _ = at_present_pace(one, None)
    assert before.pools[0].step_sigma == pytest.approx(math.hypot(0.08, 0.1), rel=0.01)


def test_on_demand_nodes_are_the_reserve_of_as_many_jobs_as_they_are_enough_for() -> None:
    """Eight jobs were each promised to be in time because of the same nodes, and two of them were when spot was out."""
    pools = [replace(SPOT, limit=64), replace(STEADY, limit=8)]
    jobs = [job(f"j{number}", max_workers=8) for number in range(8)]
    found = plan_fleet(pools, [PROFILE], jobs).jobs.values()
    assert all(plan.feasible for plan in found)
    # 20 million samples take 4 P100 3,242 s, and start-up and spare 450 s: each needs five.
    sure = [plan.confidence for plan in found if plan.confidence is not None and plan.confidence > 0.985]
    assert len(sure) == 1


@pytest.mark.nightly
def test_fifty_pools_take_a_plan_about_as_many_times_as_long_as_ten() -> None:
    """They took 3.8 s of the processor, 23 times as long: where the search begins is judged in `plan/test_local`."""
    kinds = ("P100", "T4", "V100", "K80", "A100", "L4")
    pools = [
        replace(
            SPOT if i % 2 else STEADY, name=f"p{i}", accelerator=kinds[i % 6], price_per_hour=0.3 + i / 20
        )
        for i in range(50)
    ]

    def seconds(number: int) -> float:
        some, began = pools[:number], time.thread_time()
        assert plan_fleet(some, [PROFILE], [job(pools=tuple(pool.name for pool in some))]).jobs["a"].feasible
        return time.thread_time() - began

    ten = min(seconds(10) for _ in range(3))
    assert seconds(50) < 20 * ten


def test_higher_confidence_never_buys_less_safety() -> None:
    def at(confidence: float) -> JobPlan:
        return plan_fleet([SPOT, STEADY], [PROFILE], [job(confidence=confidence)]).jobs["a"]

    plans = [at(each) for each in (0.5, 0.8, 0.95, 0.99)]
    for less, more in itertools.pairwise(plans):
        assert less.feasible
        assert more.feasible
        assert more.confidence is not None
        assert less.confidence is not None
        assert more.confidence >= less.confidence
    for asked, found in zip((0.5, 0.8, 0.95, 0.99), plans, strict=True):
        assert found.confidence is not None
        assert found.confidence >= asked
