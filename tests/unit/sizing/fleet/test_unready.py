"""A pool that is not Ready: what runs there stays, and a job is told what is wrong, and not to raise a limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.api.capacity_pool import CapacityPool
from shoal.sizing.fleet import FleetPool, plan_fleet
from shoal.sizing.fleet.resources import fleet_pool
from tests.unit.sizing.fleet.test_fleet import PROFILE, STEADY, job


def unready(reason: str) -> FleetPool:
    ready = {"type": "Ready", "status": "False", "reason": reason, "message": "m",
             "lastTransitionTime": "2026-01-01T00:00:00Z"}  # fmt: skip
    spec = {"accelerator": {"name": "P100"}, "limits": {"nodes": 16}, "price": {"perHour": 0.5}}
    body = {"metadata": {"name": "spot"}, "spec": spec, "status": {"conditions": [ready]}}
    return fleet_pool(CapacityPool.model_validate(body))


@pytest.mark.parametrize("reason", ["NodesLackAccelerator", "Overlaps"])
def test_a_job_is_told_why_a_pool_that_is_not_ready_has_no_node_for_it(reason: str) -> None:
    """It was told to raise the limit, which is 16."""
    told = (
        f"CapacityPool spot is not Ready ({reason}): see its status, or name another pool in workers.pools."
    )
    pool = unready(reason)
    found = plan_fleet([pool], [PROFILE], [job(pools=("spot",))]).jobs["a"]
    assert found.reason == f"{told} Run no worker."
    both = [pool, replace(STEADY, limit=2)]
    found = plan_fleet(both, [PROFILE], [job(min_workers=4)]).jobs["a"]
    assert told in found.reason
    assert "limit" not in found.reason


def test_jobs_have_no_more_workers_in_a_pool_that_is_not_ready_than_run_there() -> None:
    pool = unready("Overlaps")
    assert (pool.limit, pool.room(2)) == (16, 2)
    jobs = [
        job(name, pools=("spot",), running={"spot": 1}, prefer="MinTime", deadline_seconds=None)
        for name in "ab"
    ]
    found = plan_fleet([pool], [PROFILE], jobs).jobs
    assert [each.counts for each in found.values()] == [{"spot": 1}] * 2
    assert "The other jobs leave" not in found["a"].reason
    assert unready("NodesLackAccelerator").room(2) == 0, "no worker could run"
    assert unready("NoPrice").room(2) == 16


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("priority", [0, 5])
@pytest.mark.parametrize("deadline", [None, 3600.0])
def test_no_job_is_given_the_workers_of_another_in_a_pool_that_is_not_ready(
    deadline: float | None, priority: int, known: bool
) -> None:
    """One with a deadline was planned three of another's four, onto nodes that an older pool selects."""
    has = {"running": {"spot": 4}, "planned": {"spot": 4}, "max_workers": 4}
    old = job("old", pools=("spot",), prefer="MinTime", deadline_seconds=None, **has)
    new = job("new", pools=("spot",), priority=priority, max_workers=4, deadline_seconds=deadline)
    new = new if known else replace(new, model=None)
    found = plan_fleet([unready("Overlaps")], [PROFILE], [old, new]).jobs
    assert found["old"].counts == {"spot": 4}
    assert not found["new"].counts.get("spot", 0)
    assert "CapacityPool spot is not Ready (Overlaps)" in found["new"].reason or not known
