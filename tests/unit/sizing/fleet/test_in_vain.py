"""Jobs of which workers wait in vain leave the nodes of these to others, and are planned as all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from shoal.sizing.fleet import FleetJob, plan_fleet
from shoal.sizing.fleet.jobs import fleet_job
from tests.unit.controllers.planning.world import NOW, training_job
from tests.unit.sizing.fleet.test_fleet import PROFILE, STEADY, job

HOUR = 3600 * 1542.0


@pytest.mark.parametrize("in_vain", [{}, {"steady": 1}])
def test_job_trades_its_nodes_though_one_of_its_workers_waits_in_vain(in_vain: Mapping[str, int]) -> None:
    """It counted as one whose pods are refused, and kept a pool from jobs that were late for want of it."""
    fast = {"pools": ("steady",), "prefer": "MinTime"}
    has = job("has", samples_left=16 * HOUR, deadline_seconds=3 * 3600.0, planned={"steady": 16},
              running={"steady": 15}, in_vain=in_vain, **fast)  # fmt: skip
    late = job("late", samples_left=2 * HOUR, deadline_seconds=2 * 3600.0, **fast)
    found = plan_fleet([replace(STEADY, limit=16)], [PROFILE], [has, late]).jobs
    assert all(each.feasible for each in found.values())


@pytest.mark.parametrize("in_vain", [0, 1, 4])
def test_plans_that_are_carried_out_stay_where_one_has_the_nodes_of_workers_in_vain_of_the_other(
    in_vain: int,
) -> None:
    fast = {"pools": ("steady",), "prefer": "MinTime", "deadline_seconds": None, "samples_left": 16 * HOUR}
    waits = job(
        "waits", planned={"steady": 8}, running={"steady": 8 - in_vain}, in_vain={"steady": in_vain}, **fast
    )
    other = job("other", planned={"steady": 8 + in_vain}, running={"steady": 8 + in_vain}, **fast)
    found = plan_fleet([replace(STEADY, limit=16)], [PROFILE], [waits, other]).jobs
    assert {name: each.counts["steady"] for name, each in found.items()} == {"waits": 8, "other": 8 + in_vain}


@pytest.mark.parametrize("in_vain", [0, 1])
def test_job_keeps_the_nodes_of_workers_that_it_lost_beside_one_that_waits_in_vain(in_vain: int) -> None:
    """Fourteen workers, of which two of pool b were lost a moment ago: others were planned their nodes."""
    one = FleetJob("x", ("a", "b"), min_workers=14, max_workers=14, keeps=14, planned={"a": 10, "b": 2},
                   in_vain={"a": in_vain})  # fmt: skip
    assert one.holds({"a": 10, "b": 4}) == {"a": 10 - in_vain, "b": 4}


def test_of_fewer_workers_those_in_vain_end_first_and_of_more_they_are_as_many() -> None:
    one = FleetJob("x", ("a",), planned={"a": 10}, in_vain={"a": 4})
    assert [one.holds({"a": count})["a"] for count in (2, 6, 8, 10, 12)] == [2, 6, 6, 6, 8]
    assert replace(one, kept_to={"a": 8}).holds({"a": 10}) == {"a": 4}


def test_plan_that_a_job_with_a_worker_in_vain_carries_out_is_no_dead_end() -> None:
    one = job("one", pools=("steady",), planned={"steady": 4}, running={"steady": 3}, in_vain={"steady": 1})
    found = plan_fleet([replace(STEADY, limit=16)], [PROFILE], [one]).jobs["one"]
    assert "neither can spare a worker" not in found.reason


@pytest.mark.parametrize(
    ("mode", "nodes"), [("Auto", {"a": 2}), ("Manual", {"a": 2})], ids=["a plan of six", "two have pods"]
)
def test_others_are_left_the_nodes_of_workers_whose_pods_a_queue_may_hold_back(
    mode: str, nodes: dict[str, int]
) -> None:
    """Before its pods were made, the whole plan of a queued job was kept from others."""
    slots = [
        {"role": "worker", "index": n, "state": "Running", "pool": "a", "node": f"a-{n}"} for n in range(2)
    ]
    slots += [{"role": "worker", "index": 2, "state": "Starting", "pool": "a", "queued": True}]
    queued = training_job(
        status={"slots": slots, "plan": {"pools": {"a": 6}, "inVain": {"a": 1}}},
        workers={"replicas": 3, "pools": ["a"]},
        elasticity={"mode": mode},
        runPolicy={"schedulingPolicy": {"queue": "team"}},
    )
    found = fleet_job(queued, None, NOW)
    assert found.holds(found.under_way) == nodes


def test_job_of_a_queue_that_moves_keeps_the_nodes_that_it_moves_to() -> None:
    """They were planned for others, of a lower priority, too, as if the queue held its workers back."""
    states: list[dict[str, Any]] = [
        {},
        {"state": "Ended", "cause": "Error", "ran": True},
        {"state": "Planned"},
    ]
    slots = [{"role": "worker", "index": n, "pool": "od", **each} for n, each in enumerate(states)]
    moves = training_job(
        status={"slots": slots, "plan": {"pools": {"a": 4}}},
        workers={"replicas": 4, "pools": ["a", "od"]},
        elasticity={"mode": "Auto"},
        runPolicy={"schedulingPolicy": {"queue": "team"}},
    )
    found = fleet_job(moves, None, NOW)
    assert found.holds(found.under_way) == {"a": 2}, "the two that ran: the queue may hold back the others"


def waits(hours: float, **slot: Any) -> dict[str, Any]:
    made = (NOW - timedelta(hours=hours)).isoformat()
    return {"role": "worker", "state": "Starting", "pool": "spot", "createdAt": made, **slot}


@pytest.mark.parametrize(
    ("slots", "in_vain", "asked"),
    [
        ([waits(1)], 0, {"spot": 3600.0}),
        ([waits(1, queued=True)], 1, {}),
        ([waits(1)], 1, {}),
        ([waits(1), waits(0.5)], 1, {"spot": 1800.0}),
        ([waits(1), waits(0.5, queued=True)], 1, {"spot": 3600.0}),
    ],
    ids=["for a node", "in a queue", "in vain", "one of two in vain", "one of two in a queue"],
)
def test_pool_is_not_out_of_stock_for_a_worker_that_waits_for_no_node_of_it(
    slots: list[dict[str, Any]], in_vain: int, asked: dict[str, float]
) -> None:
    """A pod that a queue held back for an hour had dear nodes bought in place of a pool that has all it wants."""
    status = {
        "slots": [{**each, "index": n} for n, each in enumerate(slots)],
        "plan": {"inVain": {"spot": in_vain}},
    }
    assert fleet_job(training_job(status=status), None, NOW).asked == asked
