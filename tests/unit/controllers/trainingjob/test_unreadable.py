"""A TrainingJob that this operator cannot read says so itself."""

from __future__ import annotations

import asyncio

import pytest

from shoal.controllers.trainingjob.unreadable import AGAIN_SECONDS
from shoal.errors import Unavailable
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


async def test_nothing_is_written_to_it_that_would_conflict() -> None:
    """A rollback of the operator with newer CRDs: a PUT and a list of all jobs each second, without end."""
    rig = Rig()
    rig.apply()
    await rig.reconcile()
    readable = rig.cluster.objects[JOB_PATH]["spec"]
    meta = rig.cluster.change(JOB_PATH, spec={**readable, "fromTheFuture": 1})["metadata"]
    rig.state.jobs.leave_unread(meta["uid"], int(meta["resourceVersion"]))
    lost = rig.cluster.objects.pop("/api/v1/namespaces/ns/pods/digits-worker-0-0")
    rig.state.pods.drop(lost["metadata"]["uid"])
    rig.cluster.requests.clear()
    delay = await rig.reconcile()
    assert rig.cluster.writes("PUT", "trainingjobs") == []
    assert delay is None or delay > 1.0
    rig.cluster.change(JOB_PATH, spec=readable)
    rig.see()
    await rig.reconcile()
    assert rig.cluster.writes("PUT", "trainingjobs") == ["status"]


@pytest.mark.looptime
async def test_complaint_without_an_answer_is_made_again() -> None:
    rig = Rig()
    rig.apply()
    rig.complaints.hear(rig.cluster.objects[JOB_PATH], "spec: no")
    rig.cluster.fault = lambda _method, _path: Unavailable("connection reset")
    rig.woken.clear()
    with pytest.raises(Unavailable):
        await rig.complaints.complain(KEY)
    assert rig.complaints.about(KEY)
    await asyncio.sleep(AGAIN_SECONDS + 0.1)
    assert [key for key, _ in rig.woken] == [KEY]
    rig.cluster.fault = lambda _method, _path: None
    await rig.reconcile()
    assert rig.cluster.objects[JOB_PATH]["status"]["reason"] == "Unreadable"
