"""What a plan says of itself: for how long it has been wished for, and whether it waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.api.elasticity import Stabilization
from shoal.api.kube import Pod
from shoal.controllers.planning.trades import Trade
from shoal.controllers.planning.translate import proposal, wished
from shoal.policy.decide.lasting import lasting
from shoal.sizing.fleet import FleetJob, FleetPlan, JobPlan
from shoal.sizing.speed.measurements import Basis
from tests.unit.controllers.planning.world import NOW, ON_DEMAND, SPOT, World, report, training_job
from tests.unit.policy import build

WAIT = Stabilization(up=30, down=300)


@pytest.mark.parametrize("later", [{"a": 8}, {"a": 9}])
def test_a_clock_that_was_ahead_for_one_plan_holds_no_change_when_it_is_right_again(
    later: Mapping[str, int],
) -> None:
    """It was six hours ahead for one plan, and the change waited for six hours."""
    old: Any = None
    for ahead, counts in ((timedelta(0), {"a": 4}), (timedelta(hours=6), {"a": 8}), (timedelta(0), later)):
        since, before = wished(counts, NOW + ahead, old, WAIT)
        old = SimpleNamespace(pools=counts, since=since, before=before)
    now = NOW + timedelta(seconds=WAIT.up + 1)
    since, before = wished(later, now, old, WAIT)
    wishes = [*((wish.since, wish.pools) for wish in before), (since, later)]
    assert max(start for start, _ in wishes) <= NOW
    assert lasting({"a": 4}, wishes, lambda start: now - start < timedelta(seconds=WAIT.up)) == later


@pytest.mark.parametrize("measured", [True, False])
async def test_only_a_risk_that_was_measured_is_urgent(measured: bool) -> None:
    world, job = World(), training_job()
    said = report(1e12)
    world.add(job, SPOT, ON_DEMAND, said=said if measured else said.model_copy(update={"speed": ()}))
    found = await world.planned(job)
    assert not found.feasible
    assert found.urgent == measured


@pytest.mark.parametrize(("priority", "urgent"), [(0, False), (7, True)])
async def test_nodes_are_given_up_at_once_for_a_higher_priority_only(priority: int, urgent: bool) -> None:
    """Plans of equals change places with every report; what is carried out has held for a while."""
    counts = {"team/digits": {"spot": 2}, "team/other": {"spot": 6}}

    def plans(_pools: object, _profiles: object, jobs: list[FleetJob], **_: object) -> FleetPlan:
        empty = JobPlan({}, 1, 60.0, None, None, 1.0, 0.99, True, None, "", None, None)
        return FleetPlan({job.name: replace(empty, counts=counts[job.name]) for job in jobs})

    world = World(plan=plans)
    slots = [{"index": n, "pool": "spot", "state": "Running", "node": f"n{n}"} for n in range(4)]
    first = training_job(status={"slots": slots})
    other = training_job("other")
    world.add(first, other, SPOT)
    worker = build.pod_manifest()
    worker["metadata"] |= {
        "name": "other-worker-0-0",
        "ownerReferences": [{"uid": "uid-other", "controller": True}],
    }
    worker["metadata"]["labels"]["shoal.dev/job"] = "other"
    world.state.pods.put(Pod.model_validate({**worker, "spec": {"priority": priority}}))
    found = await world.planned(first)
    assert (found.traded, found.urgent) == ({"spot"}, urgent)
    theirs = world.proposal(other)
    assert (theirs.traded, theirs.urgent) == ({"spot"}, False)  # it takes them when they are left


@pytest.mark.parametrize(
    ("pool", "basis", "urgent"), [("spot", Basis.MEASURED, True), ("measured", Basis.DATA_SHEETS, False)]
)
def test_a_deadline_at_risk_is_urgent_once_speeds_are_measured(pool: str, basis: str, urgent: bool) -> None:
    """A pool named `measured` is not."""
    job = training_job()
    late = JobPlan({pool: 2}, 1, 9e4, None, None, 1.0, 0.1, False, "deadline", "", 1.0, None, {pool: basis})
    found = proposal(job, late, Trade(), NOW, None)
    assert (found.urgent, found.basis) == (urgent, f"{pool}: {basis}")


@pytest.mark.parametrize(("asked", "urgent"), [(0.8, False), (0.9, False), (0.95, True)])
def test_a_deadline_is_at_risk_below_the_confidence_that_its_job_asks_for(asked: float, urgent: bool) -> None:
    objective = {"deadlineSeconds": 3600, "confidence": asked}
    job = training_job(elasticity={"mode": "Auto", "objective": objective})
    plan = JobPlan(
        {"spot": 2}, 1, 9e2, None, None, 1.0, 0.9, True, None, "", 1.0, None, {"spot": Basis.MEASURED}
    )
    assert proposal(job, plan, Trade(), NOW, None).urgent == urgent
