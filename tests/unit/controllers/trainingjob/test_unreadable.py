"""A TrainingJob that this operator cannot read says so itself."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from shoal.cluster.transport import Answer
from shoal.controllers.trainingjob.unreadable import LONGEST_PAUSE, Complaints
from shoal.errors import Unavailable
from tests.unit.controllers.clusters import JOB_PATH, KEY, NOW, Cluster, Rig
from tests.unit.docs.test_health_check import health


async def test_unreadable_job_is_stalled_and_what_runs_goes_on() -> None:
    """B23: it existed in the operator's log only."""
    rig = Rig().applied()
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


@pytest.mark.parametrize("made", [False, True], ids=["new", "edited"])
async def test_who_waits_for_its_health_is_told(made: bool) -> None:
    """Argo CD, Flux and kstatus read no condition before the status is of the newest generation."""
    rig = Rig().applied()
    if made:
        await rig.reconcile()
        rig.cluster.change(JOB_PATH, spec={**rig.cluster.objects[JOB_PATH]["spec"], "fromTheFuture": 1})
    for generation in (2, 3):  # edited once more, with the same fault
        rig.cluster.change(
            JOB_PATH, metadata={**rig.cluster.objects[JOB_PATH]["metadata"], "generation": generation}
        )
        rig.complaints.hear(rig.cluster.objects[JOB_PATH], "spec.fromTheFuture: no such field")
        await rig.complaints.complain(KEY)
        found = rig.cluster.objects[JOB_PATH]
        status, message = health(found, found["status"])
        assert (status, "fromTheFuture" in message) == ("Degraded", True)


async def test_it_is_written_once() -> None:
    rig = Rig().applied()
    for _ in range(3):
        rig.complaints.hear(rig.cluster.objects[JOB_PATH], "spec: no")
        await rig.complaints.complain(KEY)
    writes = [path for method, path in rig.cluster.requests if method == "PATCH"]
    assert len(writes) == 1


async def test_readable_again_it_is_not_stalled() -> None:
    rig = Rig().applied()
    rig.complaints.hear(rig.cluster.objects[JOB_PATH], "spec: no")
    await rig.complaints.complain(KEY)
    rig.see()
    await rig.reconcile()
    [stalled] = [c for c in rig.job.status.conditions if c.type == "Stalled"]
    assert stalled.status == "False"


async def test_nothing_is_written_to_it_that_would_conflict() -> None:
    """A rollback of the operator with newer CRDs: a PUT and a list of all jobs each second, without end."""
    rig = Rig().applied()
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
@pytest.mark.parametrize(
    "fault",
    [
        Unavailable("connection reset"),
        Answer(403, b'{"message": "trainingjobs/status is forbidden"}'),
        Answer(422, b'{"message": "denied by a policy"}'),
        Answer(404, b"404 page not found"),
    ],
    ids=["no answer", "forbidden", "denied", "no such path"],
)
async def test_complaint_that_could_not_be_made_is_made_again(fault: Answer | Unavailable) -> None:
    """Refused once, as while a role was missing, nobody ever told of the job."""
    rig = Rig().applied()
    rig.complaints.hear(rig.cluster.objects[JOB_PATH], "spec: no")
    rig.cluster.fault = lambda method, _path: fault if method == "PATCH" else None
    rig.on_wake = lambda key, _priority: rig.tasks.start(key, rig.complaints.complain(key))
    await rig.complaints.complain(KEY)
    await asyncio.sleep(3600)
    assert rig.complaints.about(KEY)
    assert 12 <= len(rig.cluster.writes("PATCH", "trainingjobs")) <= 40, "ever more seldom"
    rig.cluster.fault = lambda _method, _path: None
    await asyncio.sleep(1.2 * LONGEST_PAUSE)
    assert rig.cluster.objects[JOB_PATH]["status"]["reason"] == "Unreadable"
    assert not rig.complaints.about(KEY)


def test_a_standby_keeps_little_of_a_job_and_nothing_of_one_that_is_gone() -> None:
    """Whoever made and deleted large jobs that cannot be read filled the standby's memory: it never complains."""
    unread = set[str]()
    complaints = Complaints(
        Cluster(), wake=lambda _key, _priority: None, wall=lambda: NOW, unread=unread.__contains__
    )
    large = {"spec": {"template": "y" * 20_000}, "status": {"slots": ["x" * 20_000]}}
    for number in range(100):
        name = f"x{number}"
        unread |= {name}
        meta = {"namespace": "ns", "name": name, "uid": name, "annotations": {"a": "z" * 20_000}}
        complaints.hear({"metadata": meta, **large}, f"spec.{'f' * 20_000}: no such field")
        unread -= {name} if number % 10 else set()
    assert complaints.keys() == [("ns", f"x{number}") for number in range(0, 100, 10)] + [("ns", "x99")]
    assert len(pickle.dumps(complaints._untold)) < 20 * 1024


def test_what_is_told_already_is_not_kept() -> None:
    complaints = Complaints(Cluster(), wake=lambda _key, _priority: None, wall=lambda: NOW)
    meta = {"namespace": "ns", "name": "x", "uid": "u"}
    complaints.hear({"metadata": meta}, "spec: no")
    message = complaints._untold["ns", "x"].message
    told = {"type": "Stalled", "status": "True", "reason": "Unreadable", "message": message}
    complaints.hear({"metadata": meta, "status": {"conditions": [told]}}, "spec: no")
    assert complaints.keys() == []
