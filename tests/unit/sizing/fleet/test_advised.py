"""Jobs have `workers.replicas` whatever is planned, but in mode Auto: what others are planned rests on that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.api.training_job import TrainingJob
from shoal.sizing.fleet import FleetJob, plan_fleet
from shoal.sizing.fleet.jobs import fleet_job
from tests.unit.controllers.planning.world import NOW, job_manifest
from tests.unit.sizing.fleet.test_fleet import MODEL, PROFILE, SPOT, STEADY, job
from tests.unit.sizing.fleet.test_shares import IDLE

POOLS = [replace(SPOT, name="a", spot=False, limit=8), replace(STEADY, name="b", limit=8)]
CHEAP = replace(STEADY, name="cheap", limit=8)


def advised(running: int, replicas: int = 8, most: int = 8, priority: int = 0) -> FleetJob:
    """As the operator reads it, with something to plan: in pool a, from one worker on."""
    body = job_manifest()
    body["spec"]["elasticity"] = {"mode": "Advise"}
    body["spec"]["workers"] |= {"replicas": replicas, "minReplicas": 1, "maxReplicas": most, "pools": ["a"]}
    body["status"] = {
        "slots": [
            {"index": i, "incarnation": 0, "state": "Running", "pool": "a", "node": f"a-{i}"}
            for i in range(running)
        ]
    }
    found = fleet_job(TrainingJob.model_validate(body), None, NOW, priority=priority)
    return replace(found, name="low", model=MODEL, samples_left=2e7, min_workers=1)


def test_no_job_waits_for_nodes_that_one_in_mode_advise_never_gives_up() -> None:
    """It was planned four of them, for ever; where it may use another pool, it runs there."""
    high = job("high", pools=("a",), priority=1, min_workers=4, max_workers=4, deadline_seconds=None)
    found = plan_fleet(POOLS, [IDLE], [advised(8), high]).jobs
    assert sum(found["high"].counts.values()) == 0
    assert "The other jobs leave no node for it" in found["high"].reason
    found = plan_fleet(POOLS, [IDLE], [advised(8), replace(high, pools=("a", "b"))]).jobs
    assert found["high"].counts.get("b", 0) == 4


@pytest.mark.parametrize("mode", ["Off", "Manual", "Advise"])
def test_workers_that_wait_for_a_node_are_not_taken_to_go_where_it_is_cheaper(mode: str) -> None:
    """Their pods are for pool a, and nobody makes others: a job that was planned these nodes had none, for ever."""
    body = job_manifest(elasticity={"mode": mode})
    body["spec"]["workers"] |= {"replicas": 8, "maxReplicas": 8, "pools": ["a", "cheap"]}
    body["status"] = {"slots": [{"index": i, "state": "Starting", "pool": "a"} for i in range(8)]}
    waits = replace(
        fleet_job(TrainingJob.model_validate(body), None, NOW, priority=1), model=MODEL, samples_left=2e9
    )
    pools = [
        replace(each, price_per_hour=n) for each, n in zip([*POOLS, CHEAP], (3.0, 9.0, 0.1), strict=True)
    ]
    other = job("other", pools=("a", "b"), min_workers=4, max_workers=4, deadline_seconds=None)
    found = plan_fleet(pools, [IDLE], [waits, other]).jobs
    assert found["other"].counts == {"a": 0, "b": 4}


@pytest.mark.parametrize(("kept_to", "others"), [(2, {"a": 6, "cheap": 8}), (3, {"a": 5, "cheap": 8})])
@pytest.mark.parametrize("mode", ["Off", "Manual", "Advise"])
def test_job_whose_pods_are_refused_keeps_no_node_where_it_never_goes(
    mode: str, kept_to: int, others: dict[str, int]
) -> None:
    """It was advised the cheap pool, and had six nodes of it for ever. Three: it is its turn to try one more."""
    body = job_manifest(elasticity={"mode": mode})
    body["spec"]["workers"] |= {"replicas": 8, "maxReplicas": 8, "pools": ["a", "cheap"]}
    slots = [{"index": i, "state": "Running", "pool": "a", "node": f"a-{i}"} for i in range(2)]
    body["status"] = {"slots": slots, "plan": {"pools": {"a": 8}, "keptTo": {"a": kept_to}}}
    refused = replace(
        fleet_job(TrainingJob.model_validate(body), None, NOW, priority=1), model=MODEL, samples_left=2e9
    )
    pools = [replace(POOLS[0], price_per_hour=3.0), replace(CHEAP, price_per_hour=0.1)]
    fast = {"max_workers": 16, "prefer": "MinTime", "zone_policy": "Any", "deadline_seconds": None}
    other = job("other", pools=("a", "cheap"), **fast)
    found = plan_fleet(pools, [IDLE], [refused, other]).jobs
    assert found[refused.name].counts.get("cheap", 0) == 8
    assert found["other"].counts == others


def test_advice_may_be_fewer_workers_than_it_has_and_others_are_left_none_of_these() -> None:
    """And they are left what it is only advised to take."""
    low = replace(advised(8, priority=1), pools=("a", "b"))
    pools = [replace(POOLS[0], price_per_hour=3.0), replace(POOLS[1], price_per_hour=0.1, limit=1)]
    other = job("other", pools=("a", "b"), max_workers=1, deadline_seconds=None)
    found = plan_fleet(pools, [IDLE], [low, other]).jobs
    assert found["low"].counts == {"a": 0, "b": 1}
    assert found["other"].counts == {"a": 0, "b": 1}


@pytest.mark.parametrize("stays", [{"keeps": 1}, {"kept_to": {"steady": 1}}])
def test_others_trade_the_nodes_that_a_job_leaves_them_which_stays_as_it_is(stays: dict[str, Any]) -> None:
    """With one node of a job that gives up none, no pool was full, and one of two jobs that trade had no worker."""
    hour = 3600 * 1542.0
    fast = {"pools": ("steady",), "prefer": "MinTime"}
    long = job("long", samples_left=16 * hour, deadline_seconds=3 * 3600.0, **fast)
    short = job("short", samples_left=2 * hour, deadline_seconds=2 * 3600.0, **fast)
    held = job("held", pools=("steady",), running={"steady": 1}, max_workers=1, priority=1, **stays)
    found = plan_fleet([replace(STEADY, limit=17)], [PROFILE], [long, short, held]).jobs
    assert found["long"].feasible
    assert found["short"].feasible


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 8), st.integers(1, 8), st.integers(-1, 1), st.sampled_from(["MinCost", "MinTime"]))
def test_what_others_are_planned_is_there_beside_what_it_has(
    running: int, replicas: int, priority: int, prefer: str
) -> None:
    low = replace(advised(running, replicas, 8, priority), prefer=prefer)
    other = job("other", pools=("a",), max_workers=8, prefer="MinTime", deadline_seconds=None)
    found = plan_fleet(POOLS, [IDLE], [low, other]).jobs
    assert not any(each.fault for each in found.values())
    assert found["other"].counts.get("a", 0) + min(running, replicas) <= 8
    if not running and priority > 0:  # more than replicas is advice only
        assert found["other"].counts.get("a", 0) >= 8 - replicas
