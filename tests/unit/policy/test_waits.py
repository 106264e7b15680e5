"""For what a pod waits: whether it says that its pool has no node for it, or has only itself to blame."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.api.kube import Node, Pod
from shoal.policy.facts.waits import Rooms, Wait, wait_of
from tests.unit.policy import build

GPU = "nvidia.com/gpu"
FULL = "0/21 nodes are available: 10 Insufficient cpu, 11 node(s) didn't match Pod's node affinity/selector."
APART = "0/21 nodes are available: 1 Insufficient cpu, 9 node(s) didn't match pod anti-affinity rules."
UNDESCRIBED = "0/21 nodes are available: 21 node(s) had untolerated taint {gpu: }."


def node(name: str = "n", taints: list[dict[str, str]] | None = None, **has: str) -> Node:
    room = {"cpu": "4", "memory": "16Gi", GPU: "1"} | has
    metadata, spec = {"name": name, "uid": name}, {"taints": taints or []}
    return Node.model_validate({"metadata": metadata, "spec": spec, "status": {"allocatable": room}})


def pod(words: str | None = FULL, *, on: str | None = None, cpu: str = "1", **spec: Any) -> Pod:
    conditions = [{"type": "PodScheduled", "status": "False", "message": words}] if words else []
    made = build.pod("worker", phase="Pending", node=on, state={}, conditions=conditions)
    manifest = made.model_dump(by_alias=True)
    manifest["spec"] = {
        "nodeName": on,
        "containers": [{"name": "worker", "resources": {"requests": {"cpu": cpu, GPU: "1"}}}],
        **spec,
    }
    return Pod.model_validate(manifest)


def waits(waiting: Pod, *nodes: Node, there: tuple[Pod, ...] = ()) -> bool:
    rooms = Rooms.of(nodes, lambda name: [each for each in there if each.spec.node_name == name])
    return wait_of(waiting, rooms) is Wait.NODE


def test_pod_waits_for_a_node_where_all_are_full_or_there_is_none() -> None:
    assert waits(pod())
    assert waits(pod(words=None))
    assert waits(pod(), node(), there=(pod(on="n"),))
    assert waits(pod(APART), node(), there=(pod(on="n"),))


@pytest.mark.parametrize(
    "spec",
    [
        {"initContainers": [{"name": "prepare", "resources": {"requests": {"cpu": "64"}}}]},
        {
            "initContainers": [
                {"name": "beside", "restartPolicy": "Always", "resources": {"limits": {"cpu": "3500m"}}}
            ]
        },
        {"overhead": {"cpu": "3500m"}},
        {"resources": {"requests": {"cpu": "5"}}},
    ],
)
def test_pod_that_no_node_could_take_waits_for_none(spec: dict[str, Any]) -> None:
    """An init container for 64 cores marked a pool with nine free nodes exhausted for everybody."""
    assert not waits(pod(**spec), node("a"), node("b"), there=(pod(on="a"),))


@pytest.mark.parametrize(
    "words", [APART, UNDESCRIBED, None], ids=["anti-affinity", "a taint of others", "unseen"]
)
def test_pod_beside_a_node_with_room_has_itself_to_blame(words: str | None) -> None:
    """It is not to be beside others, or names a scheduler that is none."""
    assert not waits(pod(words), node("a"), node("b"), there=(pod(on="a"),))


def test_nodes_that_pods_of_others_fill_are_full() -> None:
    assert waits(pod(), node("a"), node("b"), there=(pod(on="a"),))
    assert not waits(
        pod(cpu="3900m"), node("a"), node("b"), there=(pod(on="a"),)
    )  # what daemons have of each


def cpu_pod(cpu: str, words: str = "0/2 nodes are available: 2 Insufficient cpu.", **how: Any) -> Pod:
    made = build.pod_manifest(
        node=how.get("on"), phase="Pending", role=how.get("role", "worker"),
        conditions=[{"type": "PodScheduled", "status": "False", "message": words}],
    )  # fmt: skip
    made["spec"]["containers"] = [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]
    return Pod.model_validate(made)


def test_pod_that_leaves_no_room_for_what_runs_on_each_node_has_itself_to_blame() -> None:
    """It asked for all that an empty node says to have, and had a pool of idle nodes Exhausted for everybody."""
    idle = node("a"), node("b")
    assert not waits(cpu_pod("4"), *idle)
    assert not waits(cpu_pod("4"), *idle, there=(cpu_pod("1", on="a"),)), "one of another size shows nothing"
    assert waits(cpu_pod("4"), *idle, there=(cpu_pod("4", on="a"),)), (
        "a node took one: others have the second"
    )
    assert waits(cpu_pod("3"), *idle, there=(cpu_pod("3", on="a", role="ps"),)), "a server shows it, too"
    assert waits(cpu_pod("2"), *idle), "no daemon leaves so little"
    assert waits(pod("0/2 nodes are available: 2 Insufficient nvidia.com/gpu."), *idle), "no daemon has a GPU"


def test_node_that_the_pod_does_not_tolerate_has_no_room() -> None:
    going = node("b", [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}])
    assert waits(pod(UNDESCRIBED), node("a"), going, there=(pod(on="a"),))
    mild = node("b", [{"key": "busy", "effect": "PreferNoSchedule"}])
    assert not waits(pod(UNDESCRIBED), node("a"), mild, there=(pod(on="a"),))
