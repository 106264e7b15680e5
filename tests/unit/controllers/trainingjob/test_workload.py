"""A job's Workload in Kueue: with which priority it is made, and what is written to it."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.api.kueue import KUEUE
from shoal.cluster.transport import Answer
from shoal.errors import Unavailable
from shoal.manifests.names import PRIORITY_CLASS, workload_name
from shoal.policy.actions import CreatePod, DeleteWorkload, RequeueWorkload
from tests.unit.controllers.clusters import Json, Rig
from tests.unit.controllers.trainingjob.test_refusals import condition, passes

pytestmark = pytest.mark.looptime

QUEUED = {"runPolicy": {"schedulingPolicy": {"queue": "team", "queueAs": "Workload"}}}
LOW = {"template": {"spec": {"priorityClassName": "low"}}}
PRIORITY_CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


def rig_of(labels: dict[str, str] | None = None, **spec: Any) -> Rig:
    """A rig with some priority classes and a job that waits as a whole."""
    rig = Rig()
    rig.cluster.add(f"{PRIORITY_CLASSES}/low", {"metadata": {"name": "low"}, "value": 1})
    usual = {"metadata": {"name": "usual"}, "value": 7, "globalDefault": True}
    rig.cluster.add(
        PRIORITY_CLASSES, {"metadata": {"name": ""}, "items": [usual, {"metadata": {"name": "low"}}]}
    )
    flavor = {"metadata": {"name": "t4"}, "spec": {"nodeLabels": {"gpu": "t4"}}}
    rig.cluster.add(f"/apis/{KUEUE}/resourceflavors/t4", flavor)
    team = {"metadata": {"name": "team"}, "value": 50}
    rig.cluster.add(f"/apis/{KUEUE}/workloadpriorityclasses/team", team)
    rig.apply(labels=labels, **QUEUED, **spec)
    return rig


def path(rig: Rig) -> str:
    return f"/apis/{KUEUE}/namespaces/ns/workloads/{workload_name(rig.job)}"


def conditions(rig: Rig) -> dict[str, Json]:
    return {each["type"]: each for each in rig.cluster.objects[path(rig)]["status"]["conditions"]}


def admit(rig: Rig) -> None:
    """What Kueue writes."""
    sets = [{"name": name, "flavors": {"cpu": "t4"}} for name in ("ps", "worker")]
    told = {"status": "True", "reason": "x", "lastTransitionTime": "2026-01-01T11:59:30Z"}
    status = {
        "admission": {"clusterQueue": "all", "podSetAssignments": sets},
        "conditions": [{**told, "type": "QuotaReserved"}, {**told, "type": "Admitted"}],
    }
    rig.cluster.change(path(rig), status=status)


@pytest.mark.parametrize(
    ("labels", "spec", "priority"),
    [
        ({PRIORITY_CLASS: "team"}, {}, (("kueue.x-k8s.io", "WorkloadPriorityClass", "team"), 50)),
        ({}, {"workers": {"replicas": 2, **LOW}}, (("scheduling.k8s.io", "PriorityClass", "low"), 1)),
        ({}, {}, (("scheduling.k8s.io", "PriorityClass", "usual"), 7)),
    ],
)
async def test_priority_is_that_of_the_label_or_of_a_template_or_the_clusters(
    labels: dict[str, str], spec: Json, priority: tuple[tuple[str, str, str], int]
) -> None:
    rig = rig_of(labels, **spec)
    await passes(rig)
    made = rig.cluster.objects[path(rig)]["spec"]
    assert (tuple(made["priorityClassRef"].values()), made["priority"]) == priority
    assert rig.cluster.writes("POST", "workloads") == ["workloads"]
    assert rig.pods() == set()


async def test_without_any_priority_class_it_is_0() -> None:
    rig = rig_of()
    rig.cluster.objects[PRIORITY_CLASSES]["items"] = []
    await passes(rig)
    made = rig.cluster.objects[path(rig)]["spec"]
    assert made["priority"] == 0
    assert "priorityClassRef" not in made


async def test_a_class_that_is_not_there_is_told_and_asked_for_again() -> None:
    rig = rig_of({PRIORITY_CLASS: "absent"})
    await passes(rig)
    assert condition(rig, "Degraded")[1] == "NoWorkload"
    absent = {"metadata": {"name": "absent"}, "value": 5}
    rig.cluster.add(f"/apis/{KUEUE}/workloadpriorityclasses/absent", absent)
    await rig.pass_time(31)
    await passes(rig)
    assert rig.cluster.objects[path(rig)]["spec"]["priority"] == 5
    assert condition(rig, "Degraded")[0] == "False"


async def test_quota_is_given_back_as_kueue_does_it_when_the_last_pod_has_ended() -> None:
    rig = rig_of()
    await passes(rig)
    admit(rig)
    await passes(rig)
    rig.run_pods()
    await passes(rig)
    assert conditions(rig)["PodsReady"]["status"] == "True"
    assert rig.pod("digits-worker-0-0")["spec"]["nodeSelector"] == {"gpu": "t4"}
    admit(rig)
    evicted = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "to make room",
               "lastTransitionTime": "2026-01-01T12:00:00Z"}  # fmt: skip
    rig.cluster.objects[path(rig)]["status"]["conditions"].append(evicted)
    rig.cluster.change(path(rig))
    rig.cluster.requests.clear()
    await passes(rig, 8)
    assert rig.pods() == set()
    seen = conditions(rig)
    assert {kind: seen[kind]["status"] for kind in ("QuotaReserved", "Admitted", "Requeued")} == {
        "QuotaReserved": "False", "Admitted": "False", "Requeued": "True",
    }  # fmt: skip
    assert rig.cluster.objects[path(rig)]["status"]["accumulatedPastExecutionTimeSeconds"] == 30
    last = ("DELETE", "/api/v1/namespaces/ns/pods/digits-ps-0-0")
    assert rig.cluster.requests.index(last) < rig.cluster.requests.index(("PATCH", f"{path(rig)}/status"))


@pytest.mark.parametrize("action", [RequeueWorkload, DeleteWorkload])
async def test_quota_is_not_given_back_while_a_pod_runs_that_was_not_seen(action: Any) -> None:
    """The watch of pods is behind that of Workloads, or the answer to a POST was lost."""
    rig = rig_of()
    await passes(rig)
    admit(rig)
    await passes(rig)
    rig.run_pods()
    rig.cluster.requests.clear()
    for pod in list(rig.state.pods.all()):
        rig.state.pods.drop(pod.metadata.uid, 0)
    uid = rig.cluster.objects[path(rig)]["metadata"]["uid"]
    with pytest.raises(Unavailable, match="has not ended"):
        await rig.applier.carry_out(rig.job, action(workload_name(rig.job), uid))
    assert rig.cluster.writes("PATCH", "workloads") == rig.cluster.writes("DELETE", "workloads") == []
    assert rig.state.pods.get("digits-ps-0-0", "ns") is not None, "the next plan knows of it"


@pytest.mark.parametrize(
    ("became", "told"), [("other", "has changed"), ("gone", "has changed"), ("forbidden", ""), ("same", "")]
)
async def test_a_leader_asks_for_the_workload_before_the_first_pod_of_a_job_that_others_began(
    became: str, told: str
) -> None:
    """Its watch of Workloads may show the quota of a job that was preempted since."""
    rig = rig_of()
    await passes(rig)
    admit(rig)
    await passes(rig)
    answers = rig.answers.get(rig.job.metadata.uid)
    answers.stored, answers.made_before, answers.quota_confirmed = True, True, False
    known = rig.state.workloads.get(workload_name(rig.job), "ns")
    assert known is not None
    if became == "other":
        rig.cluster.change(path(rig), status={})
    elif became == "gone":
        del rig.cluster.objects[path(rig)]
    rig.cluster.fault = lambda verb, where: (
        Answer(403, b"{}") if became == "forbidden" and (verb, where) == ("GET", path(rig)) else None
    )
    rig.cluster.requests.clear()
    create = CreatePod("p", lambda: {"metadata": {"name": "p"}, "spec": {}}, "worker", 0, 9)
    if told:
        with pytest.raises(Unavailable, match=told):
            await rig.applier.carry_out(rig.job, create)
        assert rig.state.workloads.get(workload_name(rig.job), "ns") != known
    else:
        await rig.applier.carry_out(rig.job, create)
    assert ("GET", path(rig)) in rig.cluster.requests
    assert bool(rig.cluster.writes("POST", "pods")) is not bool(told)
    assert answers.quota_confirmed is not bool(told)


async def test_a_copy_of_a_pod_by_hand_does_not_keep_the_quota() -> None:
    rig = rig_of()
    await passes(rig)
    admit(rig)
    await passes(rig)
    rig.run_pods()
    pods = "/api/v1/namespaces/ns/pods"
    for name in list(rig.pods()):
        copied = rig.cluster.objects.pop(f"{pods}/{name}")
    meta = {**copied["metadata"], "name": "mine", "uid": "mine"}
    rig.cluster.add(f"{pods}/mine", {**copied, "metadata": meta})
    uid = rig.cluster.objects[path(rig)]["metadata"]["uid"]
    assert await rig.applier.carry_out(rig.job, DeleteWorkload(workload_name(rig.job), uid))
    assert path(rig) not in rig.cluster.objects
