"""Whose objects are: those of an earlier run and of others are left alone, and a run that goes takes its own along."""

from __future__ import annotations

import json

import pytest

from shoal.api.kube import Pod
from shoal.api.training_job import TrainingJob
from shoal.controllers.trainingjob.objects import SERVICES
from tests.unit.controllers.clusters import JOB_PATH, KEY, NOW, Rig
from tests.unit.controllers.trainingjob.test_reconcile import running, settled

pytestmark = pytest.mark.looptime


async def test_pod_of_an_earlier_run_of_the_same_name_is_not_taken_for_its_own() -> None:
    """It has the labels of the job, which was deleted and applied again; only the uid of its owner differs."""
    rig = await running()
    path = "/api/v1/namespaces/ns/pods/digits-worker-0-0"
    before = rig.cluster.objects[path]
    rig.cluster.objects.clear()
    rig.cluster.add(path, before)
    rig.apply()
    rig.state.pods.drop(before["metadata"]["uid"], 0)  # the watch is late
    assert rig.job.metadata.uid != before["metadata"]["ownerReferences"][0]["uid"]
    await rig.reconcile(KEY)
    assert rig.state.pods.get("digits-worker-0-0", "ns") is None
    rig.cluster.objects.pop(path)
    await rig.pass_time(60)
    await settled(rig)
    assert rig.pod("digits-worker-0-0")["metadata"]["ownerReferences"][0]["uid"] == rig.job.metadata.uid


@pytest.mark.parametrize("successor", [False, True], ids=["being deleted", "another run of the name"])
async def test_nothing_more_is_made_for_a_run_that_goes(successor: bool) -> None:
    """The cache has the same name, of a job that is being deleted or that was applied after it."""
    rig = Rig().applied()

    def goes(method: str, path: str) -> None:
        if method == "POST" and path.endswith("/services"):
            meta = dict(rig.cluster.objects[JOB_PATH]["metadata"])
            if successor:
                del meta["uid"]
            else:
                meta["deletionTimestamp"] = "2026-01-01T12:00:00Z"
            rig.state.jobs.put(TrainingJob.model_validate(rig.cluster.change(JOB_PATH, metadata=meta)))

    rig.cluster.fault = goes
    await rig.once(KEY)
    await rig.tasks.idle()
    assert rig.cluster.requests[-1] == ("POST", "/api/v1/namespaces/ns/services")


async def test_nothing_is_sent_for_a_run_that_another_one_of_its_name_has_followed() -> None:
    """A create that waited long enough: by its name, its job is there."""
    rig = Rig().applied()
    ended, meta = rig.job, dict(rig.cluster.objects[JOB_PATH]["metadata"])
    del meta["uid"]
    rig.state.jobs.put(TrainingJob.model_validate(rig.cluster.change(JOB_PATH, metadata=meta)))
    before = len(rig.cluster.requests)
    assert not await rig.applier._objects.create(ended, SERVICES, "digits-ps-0", {})
    assert len(rig.cluster.requests) == before


async def test_what_a_finished_job_had_goes_with_it() -> None:
    rig = Rig()
    rig.apply(runPolicy={"ttlSecondsAfterFinished": 60})
    await settled(rig)
    ended = {"type": "Complete", "status": "True", "reason": "Done", "lastTransitionTime": NOW.isoformat()}
    done = {
        **rig.cluster.objects[JOB_PATH]["status"],
        "completionTime": NOW.isoformat(),
        "conditions": [ended],
    }
    rig.cluster.change(JOB_PATH, status=done)
    await settled(rig)
    assert rig.job.status.finished
    assert any("/secrets/" in path for path in rig.cluster.objects)
    await rig.pass_time(61)
    await rig.reconcile(KEY)
    assert {path for path in rig.cluster.objects if "/events/" not in path} == set()


async def test_job_of_another_controller_is_left_alone() -> None:
    rig = Rig()
    rig.apply(managedBy="kueue.x-k8s.io/multikueue")
    assert await rig.reconcile(KEY) is None
    assert not rig.cluster.requests


async def test_coordinator_of_a_job_that_is_being_deleted_is_asked_no_more() -> None:
    """Foreground deletion, or a finalizer of somebody: it may be there for long."""
    rig = await running()
    uid = rig.job.metadata.uid
    assert uid in rig.poller._followed
    rig.cluster.change(
        JOB_PATH, metadata={**rig.cluster.objects[JOB_PATH]["metadata"], "deletionTimestamp": NOW.isoformat()}
    )
    rig.see()
    rig.cluster.requests.clear()
    assert await rig.reconcile(KEY) is None
    assert uid not in rig.poller._followed
    assert not rig.cluster.requests


async def test_coordinator_is_one_that_is_recorded() -> None:
    """Whoever may create pods is not sent the job's token."""
    rig = await running()
    path = "/api/v1/namespaces/ns/pods/digits-ps-0-0"
    stranger = json.loads(json.dumps(rig.cluster.objects[path]).replace("digits-ps-0-0", "digits-ps-0-7"))
    stranger["metadata"]["labels"]["shoal.dev/incarnation"] = "7"
    del stranger["metadata"]["uid"]
    stranger["status"]["podIP"] = "10.0.0.66"
    rig.cluster.add(path.replace("0-0", "0-7"), stranger)
    await settled(rig)
    followed = rig.poller._followed[rig.job.metadata.uid]
    assert followed.endpoint.address == "10.0.0.1"
    assert not rig.cluster.writes("DELETE", "pods")


async def test_service_of_somebody_else_with_a_servers_name_is_not_changed() -> None:
    rig = await running()
    path = "/api/v1/namespaces/ns/services/digits-ps-0"
    selector = {"app": "somebody's"}
    rig.cluster.add(
        path, {"metadata": {"name": "digits-ps-0", "namespace": "ns"}, "spec": {"selector": selector}}
    )
    failed = rig.cluster.change("/api/v1/namespaces/ns/pods/digits-ps-0-0", status={"phase": "Failed"})
    rig.state.pods.put(Pod.model_validate(failed))  # of the Service nothing is heard yet
    await rig.reconcile(KEY)
    assert ("PATCH", path) in rig.cluster.requests
    assert rig.cluster.objects[path]["spec"]["selector"] == selector


async def test_job_deleted_during_a_reconcile_gets_no_pods() -> None:
    rig = Rig().applied()
    uid = rig.job.metadata.uid

    def gone(method: str, path: str) -> None:
        if method == "POST" and path.endswith("/services"):
            rig.cluster.objects.pop(JOB_PATH, None)
            rig.state.jobs.drop(uid)

    rig.cluster.fault = gone
    assert await rig.reconcile(KEY) is None
    assert not rig.pods()


async def test_answers_about_a_deleted_run_are_dropped() -> None:
    rig = Rig().applied()
    await settled(rig)
    uid = rig.job.metadata.uid
    assert rig.answers.get(uid).existing
    rig.cluster.objects.clear()
    rig.see()
    assert await rig.reconcile(KEY) is None
    assert not rig.answers.get(uid).existing
