"""What runs in a pool that overlaps stays, and no plan adds to it: workers are counted, and not nodes."""

from __future__ import annotations

import pytest

from shoal.api.capacity_pool import CapacityPool
from shoal.api.training_job import TrainingJob
from tests.unit.controllers.planning.world import World, job_manifest, pool, report

READY = {
    "type": "Ready",
    "status": "False",
    "reason": "Overlaps",
    "message": "m",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


@pytest.mark.parametrize(("used", "runs"), [(2, 8), (5, 1)])
async def test_as_many_workers_stay_as_run_there_on_however_many_nodes(used: int, runs: int) -> None:
    """Six of eight that shared two nodes were given up; beside the nodes of four servers, workers were added."""
    overlaps = {
        **pool("spot", 0.3, True).model_dump(by_alias=True),
        "status": {"conditions": [READY], "used": used},
    }
    manifest = job_manifest(elasticity={"mode": "Auto", "objective": {"prefer": "MinTime"}})
    manifest["spec"]["workers"] |= {"replicas": runs, "minReplicas": 1, "maxReplicas": 8, "pools": ["spot"]}
    slots = [{"index": n, "pool": "spot", "state": "Running", "node": f"n{n}"} for n in range(runs)]
    job = TrainingJob.model_validate(
        {**manifest, "status": {"slots": slots, "plan": {"pools": {"spot": runs}}}}
    )
    world = World()
    world.add(job, CapacityPool.model_validate(overlaps))
    world.hear(job, report(4e6))
    await world.planner.plan_once()
    found = world.planner.proposal(job.metadata.uid)
    assert found is not None
    assert found.pools == {"spot": runs}
