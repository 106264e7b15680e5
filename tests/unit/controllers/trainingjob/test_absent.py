"""What an answer says about whether an object is gone: only that hides it until the end of the process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.cluster.transport import Answer
from shoal.errors import Unavailable
from shoal.manifests.names import workload_name
from shoal.policy.actions import ConfirmAbsent, DeleteJob, DeleteWorkload, RequeueWorkload, TellWorkload
from tests.unit.controllers.clusters import EVERYTHING, JOB_PATH, KEY, NOW, Rig
from tests.unit.controllers.trainingjob.test_refusals import passes
from tests.unit.controllers.trainingjob.test_workload import admit, path, rig_of
from tests.unit.policy import build

pytestmark = pytest.mark.looptime

NO_SUCH_PATH = Answer(404, b"404 page not found\n")
"""Of an API server that does not know the kind yet, or a proxy on the way."""
CHANGED = Answer(409, b'{"reason": "Conflict", "message": "the object has been modified"}')


def finish(rig: Rig) -> None:
    """Have the job end."""
    at = f"{NOW:%Y-%m-%dT%H:%M:%SZ}"
    done = {"type": "Complete", "status": "True", "reason": "Done", "lastTransitionTime": at}
    status = rig.cluster.objects[JOB_PATH]["status"]
    rig.cluster.change(
        JOB_PATH, status={**status, "phase": "Succeeded", "completionTime": at, "conditions": [done]}
    )


async def test_a_job_whose_path_was_unknown_for_a_moment_is_deleted_later() -> None:
    """A new CRD, of which one of the API servers has not heard: the job was never seen again."""
    rig = Rig()
    rig.apply(runPolicy={"ttlSecondsAfterFinished": 60})
    await passes(rig)
    finish(rig)
    rig.see()
    await rig.pass_time(61)
    rig.cluster.fault = lambda method, path: NO_SUCH_PATH if (method, path) == ("DELETE", JOB_PATH) else None
    await rig.reconcile(KEY)
    assert rig.state.jobs.get("digits", "ns") is not None
    rig.cluster.fault = lambda _method, _path: None
    await asyncio.sleep(1)
    await rig.reconcile(KEY)
    assert JOB_PATH not in rig.cluster.objects


async def test_a_pod_whose_path_was_unknown_for_a_moment_is_not_lost() -> None:
    rig = Rig().applied()
    await passes(rig)
    rig.cluster.fault = lambda method, _path: NO_SUCH_PATH if method == "GET" else None
    with pytest.raises(Unavailable, match="page not found"):
        await rig.applier.carry_out(rig.job, ConfirmAbsent("digits-worker-0-0", "Pod"))
    assert not rig.answers.get(rig.job.metadata.uid).gone_pods


async def test_a_node_whose_path_was_unknown_for_a_moment_is_not_gone() -> None:
    rig = Rig().applied()
    rig.cluster.fault = lambda _method, _path: NO_SUCH_PATH
    with pytest.raises(Unavailable, match="page not found"):
        await rig.applier.carry_out(rig.job, ConfirmAbsent("spot-0", "Node"))


@pytest.mark.parametrize("came", ["after the answer", "before the answer"])
async def test_a_node_that_was_there_since_it_was_asked_for_is_asked_for_again(came: str) -> None:
    """It went twice within a minute: what was said the first time was believed the second."""
    rig = Rig().applied()
    node = build.node("flaps")

    def comes(_method: str, _path: str) -> None:
        rig.state.nodes.put(node)

    if came == "before the answer":
        rig.cluster.fault = comes
    await rig.applier.carry_out(rig.job, ConfirmAbsent("flaps", "Node"))
    seen = rig.observer.observe(KEY)
    assert seen is not None
    if came == "after the answer":
        assert "flaps" in seen.absent_nodes
        comes("", "")
    rig.state.nodes.drop(node.metadata.uid)
    seen = rig.observer.observe(KEY)
    assert seen is not None
    assert "flaps" not in seen.absent_nodes


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        (RequeueWorkload, NO_SUCH_PATH),
        (DeleteWorkload, NO_SUCH_PATH),
        (lambda name, uid: TellWorkload(name, uid, "PodsReady", "True", "Ready", "all run"), NO_SUCH_PATH),
        (lambda name, uid: TellWorkload(name, uid, "PodsReady", "True", "Ready", "all run"), CHANGED),
    ],
)
async def test_a_workload_that_is_there_stays_known(action: Any, answer: Answer) -> None:
    """Kueue is being installed anew; or it wrote at the same moment, again and again."""
    rig = rig_of()
    await passes(rig)
    admit(rig)
    rig.see()
    uid = rig.cluster.objects[path(rig)]["metadata"]["uid"]
    rig.cluster.fault = lambda _method, where: answer if "/workloads/" in where else None
    with pytest.raises(Unavailable):
        await rig.applier.carry_out(rig.job, action(workload_name(rig.job), uid))
    assert rig.state.workloads.by_uid(uid) is not None


async def test_what_a_finalizer_keeps_is_there_until_that_is_gone() -> None:
    """As Kueue's of a Workload, or Argo CD's of a job: the answer is 200 all the same."""
    rig = Rig().applied()
    await passes(rig)
    meta = rig.cluster.objects[JOB_PATH]["metadata"]
    leaving = {
        **rig.cluster.objects[JOB_PATH],
        "metadata": {**meta, "deletionTimestamp": NOW.isoformat(), "finalizers": ["a/b"]},
    }

    def kept(method: str, path: str) -> Answer | None:
        if (method, path) != ("DELETE", JOB_PATH):
            return None
        return rig.cluster._get(path, rig.cluster.add(path, leaving))

    rig.cluster.fault = kept
    await rig.applier.carry_out(rig.job, DeleteJob("digits", meta["uid"], meta["resourceVersion"]))
    known = rig.state.jobs.get("digits", "ns")
    assert known is not None
    assert known.metadata.deletion_timestamp
    assert rig.pods() == EVERYTHING


async def test_what_the_server_says_is_not_there_is_gone() -> None:
    rig = Rig().applied()
    await passes(rig)
    uid, version = rig.job.metadata.uid, rig.job.metadata.resource_version
    del rig.cluster.objects[JOB_PATH]
    job = rig.state.jobs.get("digits", "ns")
    assert job is not None
    await rig.applier.carry_out(job, DeleteJob("digits", uid, version))
    assert rig.state.jobs.by_uid(uid) is None
