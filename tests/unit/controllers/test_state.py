"""Which change wakes which job, with which priority."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from shoal.api.base import ObjectMeta
from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import (
    Condition,
    DisruptionBudget,
    Node,
    NodeStatus,
    OwnedMeta,
    Pod,
    PodSpec,
    PodStatus,
    Service,
    ServiceSpec,
)
from shoal.api.training_job import TrainingJob
from shoal.controllers.belonging import run_of
from shoal.controllers.sources import sources
from shoal.controllers.state import ClusterState, Wakes
from shoal.manifests.names import pod_name
from shoal.manifests.platforms import AUTOPILOT, EKS, GENERIC, KARPENTER, platform_of
from shoal.runtime.controller import Key
from shoal.runtime.work_queue import Priority
from tests.unit.policy import build


@pytest.fixture
def woken() -> list[tuple[Key, Priority]]:
    return []


@pytest.fixture
def state(woken: list[tuple[Key, Priority]]) -> ClusterState:
    return ClusterState(Wakes(jobs=lambda key, priority: woken.append((key, priority))))


def pod(name: str, version: int, node: str | None = "n", phase: str = "Running", job: str = "a") -> Pod:
    """A pod that somebody has labelled as this job's."""
    meta = OwnedMeta(
        name=name, namespace="ns", uid=name, resource_version=str(version), labels={"shoal.dev/job": job}
    )
    return Pod(metadata=meta, spec=PodSpec(node_name=node), status=PodStatus(phase=phase))


def pod_of_the_job(version: int, phase: str = "Running", conditions: tuple[Condition, ...] = ()) -> Pod:
    """A pod of the job a."""
    made = Pod.model_validate(build.pod_manifest("worker", 0))
    assert made.place is not None
    meta = replace(
        made.metadata,
        name=pod_name("a", made.place),
        namespace="ns",
        resource_version=str(version),
        labels={**made.metadata.labels, "shoal.dev/job": "a"},
    )
    status = PodStatus(phase=phase, conditions=conditions)
    return made.model_copy(update={"metadata": meta, "status": status})


def node(version: int, ready: str = "True", name: str = "n", uid: str = "n1") -> Node:
    return Node(
        metadata=ObjectMeta(name=name, uid=uid, resource_version=str(version)),
        status=NodeStatus(conditions=(Condition(type="Ready", status=ready),)),
    )


def test_changed_node_wakes_its_jobs_once_and_a_heartbeat_none(
    state: ClusterState, woken: list[tuple[Key, Priority]]
) -> None:
    state.nodes.put(node(1))
    for number in range(3):
        state.pods.put(pod(f"p{number}", 10 + number))
    state.pods.put(pod("q", 20, job="b"))
    state.pods.put(pod("r", 21, node="elsewhere", job="c"))
    woken.clear()
    state.nodes.put(node(2))
    assert woken == []
    state.nodes.put(node(3, ready="False"))
    assert sorted(woken) == [(("ns", "a"), Priority.URGENT), (("ns", "b"), Priority.URGENT)]
    woken.clear()
    state.nodes.drop("n1")
    assert len(woken) == 2
    assert "n" not in state.nodes_by_name


def test_what_was_derived_from_a_spec_is_known_until_that_changes(state: ClusterState) -> None:
    """The digest of a template of 1.5 MB takes milliseconds, and a job that trains has a new status all the time."""
    derived = []
    for version, generation in ((1, 1), (2, 1), (3, 2)):
        written = build.job_manifest()
        written["metadata"] |= {"resourceVersion": str(version), "generation": generation}
        state.jobs.put(TrainingJob.model_validate(written))
        known = state.jobs.by_uid(build.UID)
        assert known is not None
        derived.append(known.spec)
    assert derived[0] is derived[1]
    assert derived[1] is not derived[2]


def test_a_budget_whose_status_was_written_wakes_no_job(
    state: ClusterState, woken: list[tuple[Key, Priority]]
) -> None:
    """Kubernetes does so whenever a pod of it starts or ends, and nobody reads it."""
    meta = OwnedMeta(name="b", namespace="ns", uid="b", resource_version="1", labels={"shoal.dev/job": "a"})
    state.budgets.put(DisruptionBudget(metadata=meta))
    woken.clear()
    state.budgets.put(DisruptionBudget(metadata=replace(meta, resource_version="2")))
    assert woken == []
    state.budgets.put(DisruptionBudget(metadata=replace(meta, resource_version="3", labels={})))
    assert woken == [(("ns", "a"), Priority.NORMAL)]


def test_a_service_whose_selector_changed_wakes_its_job(
    state: ClusterState, woken: list[tuple[Key, Priority]]
) -> None:
    meta = OwnedMeta(name="s", namespace="ns", uid="s", resource_version="1", labels={"shoal.dev/job": "a"})
    state.services.put(Service(metadata=meta, spec=ServiceSpec(selector={"x": "1"})))
    assert woken == [(("ns", "a"), Priority.CALM)], "it may be ours, seen before the answer"
    woken.clear()
    changed = replace(meta, resource_version="2")
    state.services.put(Service(metadata=changed, spec=ServiceSpec(selector={"x": "2"})))
    assert woken == [(("ns", "a"), Priority.NORMAL)]


def test_late_deletion_keeps_the_recreated_node(state: ClusterState) -> None:
    state.nodes.put(node(1))
    state.nodes.put(node(5, uid="n2"))
    state.nodes.drop("n1")  # the deletion of the old node is reported late
    assert state.nodes_by_name["n"].metadata.uid == "n2"


@pytest.mark.parametrize(("phase", "priority"), [("Running", Priority.CALM), ("Failed", Priority.URGENT)])
def test_ended_pod_wakes_its_job_urgently(
    state: ClusterState, woken: list[tuple[Key, Priority]], phase: str, priority: Priority
) -> None:
    state.pods.put(pod_of_the_job(1, phase="Pending"))
    woken.clear()
    state.pods.put(pod_of_the_job(2, phase=phase))
    assert woken == [(("ns", "a"), priority)]


def test_pod_of_which_nothing_changed_that_is_read_wakes_nothing(
    state: ClusterState, woken: list[tuple[Key, Priority]]
) -> None:
    """Kubelets, networks and meshes write conditions and annotations."""
    manifest = build.pod_manifest("worker", 0, node="n")
    manifest["metadata"]["labels"]["shoal.dev/job"] = "digits"

    def put(version: int, *true: str, phase: str = "Running") -> None:
        meta = {**manifest["metadata"], "resourceVersion": str(version), "annotations": {"a": str(version)}}
        conditions = [{"type": each, "status": "True"} for each in true]
        status = {**manifest["status"], "phase": phase, "conditions": conditions}
        state.pods.put(Pod.model_validate({**manifest, "metadata": meta, "status": status}))

    put(1)
    assert len(woken) == 1
    woken.clear()
    put(2)
    put(3, "ContainersReady")
    assert woken == []
    assert state.pods.has_seen(manifest["metadata"]["uid"], 3)
    put(4, "ContainersReady", "Ready")
    assert len(woken) == 1
    put(5, "ContainersReady", "Ready", phase="Failed")
    assert woken[1][1] is Priority.URGENT


@pytest.mark.parametrize("kind", ["DisruptionTarget", "TerminationTarget"])
def test_pod_whose_end_is_announced_wakes_its_job_urgently(
    state: ClusterState, woken: list[tuple[Key, Priority]], kind: str
) -> None:
    state.pods.put(pod_of_the_job(1, conditions=(Condition(type=kind, status="True"),)))
    assert woken == [(("ns", "a"), Priority.URGENT)]


def test_nodes_that_are_unknown_are_known_by_since_when(state: ClusterState) -> None:
    """So that no plan has to look at all nodes."""

    def node(name: str, version: int, since: int | None = None) -> Node:
        manifest = build.node_manifest(name, ready="True" if since is None else "Unknown")
        manifest["metadata"] |= {"resourceVersion": str(version)}
        if since is not None:
            at = build.NOW - timedelta(seconds=since)
            manifest["status"]["conditions"][0]["lastTransitionTime"] = build.stamp(at)
        return Node.model_validate(manifest)

    for index, since in enumerate((8, None, 9, 8)):
        state.nodes.put(node(f"n{index}", index + 1, since))
    assert state.silent_nodes == [build.NOW - timedelta(seconds=since) for since in (9, 8, 8)]
    state.nodes.put(node("n0", 9))
    state.nodes.drop(node("n2", 3, 9).metadata.uid)
    assert state.silent_nodes == build.silent(state.nodes.all())
    assert len(state.silent_nodes) == 1


def test_pods_that_a_job_had_are_remembered_with_the_reason_that_they_announced(state: ClusterState) -> None:
    """Of those that went without a word, or lost their labels, None: they may run on."""
    manifest = build.job_manifest()
    manifest["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    state.jobs.put(TrainingJob.model_validate(manifest))

    def come(index: int, uid: str = "u", *, phase: str = "Running", stopped: bool = False) -> Pod:
        made = build.pod_manifest("worker", index, phase=phase)
        made["metadata"]["labels"]["shoal.dev/job"] = "digits"
        made["metadata"]["ownerReferences"][0]["uid"] = uid
        made["metadata"] |= {"uid": f"{uid}-{index}", "resourceVersion": "2"}
        if stopped:
            made["status"]["conditions"].append({"type": "TerminationTarget", "status": "True"})
        state.pods.put(found := Pod.model_validate(made))
        return found

    gone = [come(0, stopped=True), come(0, "u2", stopped=True), come(1, phase="Failed"), come(2)]
    for each in gone:
        state.pods.drop(each.metadata.uid)
    unlabelled = come(3)
    state.pods.put(
        unlabelled.model_copy(
            update={"metadata": replace(unlabelled.metadata, resource_version="3", labels={})}
        )
    )
    come(4)
    assert state.gone_pods("u") == {
        "digits-worker-0-0": "EvictedByKueue",
        "digits-worker-1-0": "",
        "digits-worker-2-0": None,
        "digits-worker-3-0": None,
    }
    assert state.gone_pods("u2") == {}  # of no job that is known
    state.jobs.drop("u")
    assert state.gone_pods("u") == {}


@pytest.mark.parametrize("false", [{"namespace": "evil"}, {"labels": {"shoal.dev/job": "other"}}])
def test_pod_of_another_namespace_or_name_is_of_no_job_whatever_uid_its_owner_has(
    state: ClusterState, false: dict[str, Any]
) -> None:
    """Whoever may make pods anywhere chooses their labels and the uid of their owner."""
    manifest = build.job_manifest()
    manifest["metadata"] |= {"resourceVersion": "1"}
    state.jobs.put(TrainingJob.model_validate(manifest))

    def put(uid: str, version: int, **meta: Any) -> Pod:
        made = build.pod_manifest("worker", 0, deleting=build.NOW)
        labels = made["metadata"]["labels"] | meta.pop("labels", {}) | {"shoal.dev/pool": "spot"}
        name = f"{labels['shoal.dev/job']}-worker-0-0"
        made["metadata"] |= {
            "uid": uid,
            "resourceVersion": f"{version}",
            "name": name,
            "labels": labels,
            **meta,
        }
        state.pods.put(found := Pod.model_validate(made))
        return found

    stranger = put("stranger", 2, **false)
    assert run_of(stranger) is not None
    assert state.job_of(stranger) is None
    assert not state.others_on("another's", {("spot", "spot-0")})
    state.pods.drop("stranger")
    assert state.gone_pods(build.UID) == {}
    own = put("own", 3)
    assert state.job_of(own) is state.jobs.by_uid(build.UID)
    state.pods.drop("own")
    assert [*state.gone_pods(build.UID)] == ["digits-worker-0-0"]


def test_few_names_of_gone_pods_are_remembered_of_a_job(
    state: ClusterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans walk them, and whoever may make pods in the job's namespace chooses how many there are."""
    monkeypatch.setattr("shoal.controllers.state.MOST_GONE", 3)
    manifest = build.job_manifest()
    manifest["metadata"] |= {"resourceVersion": "1"}
    state.jobs.put(TrainingJob.model_validate(manifest))
    for number in range(5):
        made = build.pod_manifest("worker", 0, number)
        made["metadata"] |= {"resourceVersion": f"{number + 2}"}
        state.pods.put(Pod.model_validate(made))
        state.pods.drop(made["metadata"]["uid"])
    assert [*state.gone_pods(build.UID)] == [f"digits-worker-0-{number}" for number in (2, 3, 4)]


def test_sources_of_one_or_all_namespaces() -> None:
    assert {name: source.path for name, source in sources("").items()} == {
        "trainingjobs": "/apis/shoal.dev/v1alpha1/trainingjobs",
        "pods": "/api/v1/pods",
        "services": "/api/v1/services",
        "poddisruptionbudgets": "/apis/policy/v1/poddisruptionbudgets",
        "nodes": "/api/v1/nodes",
        "capacitypools": "/apis/shoal.dev/v1alpha1/capacitypools",
        "speedprofiles": "/apis/shoal.dev/v1alpha1/speedprofiles",
    }
    assert {
        source.path for name, source in sources("ml", kueue=True).items() if name not in sources("ml")
    } == {
        "/apis/kueue.x-k8s.io/v1beta2/namespaces/ml/workloads",
        "/apis/kueue.x-k8s.io/v1beta2/resourceflavors",
    }
    within = sources("ml")
    assert within["pods"].path == "/api/v1/namespaces/ml/pods"
    assert within["pods"].query == {"labelSelector": "shoal.dev/job"}
    assert within["capacitypools"].path == "/apis/shoal.dev/v1alpha1/capacitypools"  # cluster-scoped


def test_own_writes_wake_nothing_and_their_watch_events_are_no_news(
    state: ClusterState, woken: list[tuple[Key, Priority]]
) -> None:
    """B4: a status write led to three plans."""
    manifest = build.job_manifest()
    manifest["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    state.jobs.put(TrainingJob.model_validate(manifest))
    assert len(woken) == 1
    manifest["metadata"]["resourceVersion"] = "2"
    written = TrainingJob.model_validate(manifest)
    state.jobs.put(written, ours=True)
    state.jobs.put(written)  # the watch reports it
    assert len(woken) == 1
    manifest["metadata"]["resourceVersion"] = "3"
    state.jobs.put(TrainingJob.model_validate(manifest))
    assert len(woken) == 2


def test_changed_pool_wakes_the_jobs_that_name_it(
    state: ClusterState, woken: list[tuple[Key, Priority]]
) -> None:
    for name, pools in (("a", ["spot"]), ("b", ["other"])):
        manifest = build.job_manifest()
        manifest["metadata"] |= {"name": name, "uid": name, "resourceVersion": "1"}
        manifest["spec"]["workers"]["pools"] = pools
        state.jobs.put(TrainingJob.model_validate(manifest))
    woken.clear()
    pool: dict[str, object] = {"metadata": {"name": "spot", "uid": "p", "resourceVersion": "5"}}
    state.pools.put(CapacityPool.model_validate({**pool, "spec": {"limits": {"nodes": 2}}}))
    assert [key[1] for key, _ in woken] == ["a"]
    assert state.pools_by_name["spot"].spec.limits.nodes == 2
    state.pools.drop("p")
    assert not state.pools_by_name


def test_a_pool_that_cannot_be_parsed_is_known_while_it_is_there(
    state: ClusterState, woken: list[tuple[Key, Priority]]
) -> None:
    manifest = build.job_manifest()
    manifest["metadata"] |= {"name": "a", "uid": "a", "resourceVersion": "1"}
    manifest["spec"]["workers"]["pools"] = ["spot"]
    state.jobs.put(TrainingJob.model_validate(manifest))
    woken.clear()

    def broken(version: int) -> None:  # as a reflector does
        state.pools.leave_unread("p", version)
        found = {"metadata": {"name": "spot", "uid": "p", "resourceVersion": f"{version}"}}
        state.hear_unreadable_pool(found, "spec.limits: too many")

    broken(5)
    assert state.unreadable_pools == {"spot": "spec.limits: too many"}
    assert [key[1] for key, _ in woken] == ["a"]
    meta = {"name": "spot", "uid": "p", "resourceVersion": "6"}
    state.pools.put(CapacityPool.model_validate({"metadata": meta, "spec": {"limits": {"nodes": 2}}}))
    assert not state.unreadable_pools
    broken(7)
    assert state.unreadable_pools
    state.pools.drop("p", 8)
    assert not state.unreadable_pools


def test_what_somebody_said_of_the_platform_holds_whatever_nodes_join() -> None:
    state = ClusterState(Wakes(), AUTOPILOT)
    said = platform_of([], AUTOPILOT)
    assert state.platform == said
    state.nodes.put(build.node())
    assert state.platform == said


def test_the_platform_is_that_of_all_nodes_that_were_seen(state: ClusterState) -> None:
    """Where a group of nodes came and went, all pods that waited were made anew each time."""

    def join(name: str, version: int, **labels: str) -> None:
        manifest = build.node_manifest(name)
        manifest["metadata"] |= {"labels": labels, "uid": name, "resourceVersion": f"{version}"}
        state.nodes.put(Node.model_validate(manifest))

    assert state.platform == GENERIC
    join("a", 1, **{"karpenter.sh/nodepool": "a"})
    assert state.platform == KARPENTER
    join("b", 2)
    assert state.platform == KARPENTER
    join("b", 3, **{"eks.amazonaws.com/nodegroup": "b"})  # who labels a node may come after it
    both = state.platform
    assert both.spot.keys() == KARPENTER.spot.keys() | EKS.spot.keys()
    state.nodes.drop("b", 4)
    join("c", 5, **{"karpenter.sh/nodepool": "a"})
    assert state.platform == both


def test_jobs_with_pods_for_pools_on_a_node_are_counted_once_each_and_only_while_they_are_there(
    state: ClusterState,
) -> None:
    def begin(name: str, namespace: str, **status: Any) -> None:
        manifest = build.job_manifest() | {"status": status}
        manifest["metadata"] |= {"name": name, "namespace": namespace, "uid": name, "resourceVersion": "1"}
        state.jobs.put(TrainingJob.model_validate(manifest))

    def run(job: str, namespace: str, index: int = 0, version: int = 1, **more: Any) -> None:
        manifest = build.pod_manifest("ps", index, node="od-0", **more)
        name = f"{job}-ps-{index}-0"
        manifest["metadata"] |= {
            "name": name,
            "namespace": namespace,
            "uid": name,
            "resourceVersion": f"{version}",
        }
        manifest["metadata"]["labels"] |= {"shoal.dev/job": job, "shoal.dev/pool": "od"}
        manifest["metadata"]["ownerReferences"][0]["uid"] = job
        state.pods.put(Pod.model_validate(manifest))

    complete = {
        "type": "Complete",
        "status": "True",
        "reason": "Done",
        "lastTransitionTime": build.stamp(build.NOW),
    }
    both = {("od", "od-0"), ("od", "od-1")}
    pays: dict[str, Any] = {
        "countedUntil": build.stamp(build.NOW),
        "slots": [{"role": "ps", "index": 0, "pool": "od", "node": "od-0", "state": "Running"}],
    }
    begin("mine", "team", **pays)
    begin("theirs", "other", **pays)
    begin("over", "team", conditions=[complete], **pays)
    begin("free", "evil")  # no status says that it has a node
    begin("elsewhere", "evil", **pays | {"slots": [{**pays["slots"][0], "pool": "anything"}]})
    begin("uncounted", "evil", slots=pays["slots"])  # it names no pools
    run("mine", "team")
    assert not state.others_on("mine", both)
    run("theirs", "other", 0)
    run("theirs", "other", 1)  # two servers of one job pay once
    run("gone", "team", 0)  # of a job that is gone
    run("over", "team", 0)
    for pays_nothing in ("free", "elsewhere", "uncounted"):
        run(pays_nothing, "evil", 0)
    assert state.others_on("mine", both) == state.others_on("theirs", both) == {("od", "od-0"): 1}
    assert state.others_on("over", both) == {("od", "od-0"): 2}
    assert not state.others_on("mine", {("od", "od-1")})
    for index, left in ((0, {("od", "od-0"): 1}), (1, {})):
        run("theirs", "other", index, 2, phase="Succeeded")
        assert state.others_on("mine", both) == left


def test_stranger_with_a_jobs_label_wakes_it_after_all_others(
    state: ClusterState, woken: list[tuple[Key, Priority]]
) -> None:
    """Anybody may label any number of pods: at their end they are not urgent, as one of a run is."""
    state.pods.put(pod("w", 1))
    state.pods.drop("w")
    assert woken == [(("ns", "a"), Priority.CALM)] * 2
