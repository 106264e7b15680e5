"""A TrainingJob that this operator cannot read says so itself."""

from __future__ import annotations

from tests.unit.controllers.clusters import JOB_PATH, KEY, Rig


async def test_unreadable_job_is_stalled_and_what_runs_goes_on() -> None:
    """B23: it existed in the operator's log only."""
    rig = Rig()
    rig.apply()
    await rig.reconcile()
    pods = rig.pods()
    assert pods
    raw = rig.cluster.change(JOB_PATH, spec={**rig.cluster.objects[JOB_PATH]["spec"], "fromTheFuture": 1})
    assert rig.complaints.hear(raw, "spec.workers.replicas: must be a number") == KEY
    await rig.reconcile()
    status = rig.cluster.objects[JOB_PATH]["status"]
    [stalled] = [c for c in status["conditions"] if c["type"] == "Stalled"]
    assert (stalled["status"], stalled["reason"], status["reason"]) == ("True", "Unreadable", "Unreadable")
    assert "spec.workers.replicas" in stalled["message"]
    assert any(c["type"] == "Initialized" for c in status["conditions"]), "the other conditions stay"
    assert rig.pods() == pods


async def test_it_is_written_once() -> None:
    rig = Rig()
    rig.apply()
    for _ in range(3):
        rig.complaints.hear(rig.cluster.objects[JOB_PATH], "spec: no")
        await rig.complaints.complain(KEY)
    writes = [path for method, path in rig.cluster.requests if method == "PATCH"]
    assert len(writes) == 1


async def test_readable_again_it_is_not_stalled() -> None:
    rig = Rig()
    rig.apply()
    rig.complaints.hear(rig.cluster.objects[JOB_PATH], "spec: no")
    await rig.complaints.complain(KEY)
    rig.see()
    await rig.reconcile()
    [stalled] = [c for c in rig.job.status.conditions if c.type == "Stalled"]
    assert stalled.status == "False"
