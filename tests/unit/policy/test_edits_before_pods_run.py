"""Pods that have not run: what no pod would be made of now is made anew, and nothing else is touched."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from shoal.manifests.platforms import EKS, GENERIC, GKE, KARPENTER, Platform, platform_of
from shoal.policy.actions import CreatePod, DeletePod
from tests.unit.policy import build
from tests.unit.policy.pools import EXHAUSTED, Avoiding, Pools, pool
from tests.unit.policy.test_placement import LABELS, node_of
from tests.unit.policy.world import World, running_world

TEMPLATE = {"metadata": {"annotations": {"a": "b"}}}


def queued(spec: dict[str, Any]) -> None:
    spec["runPolicy"]["schedulingPolicy"] = {"queue": "right"}


EDITS = {
    "workers.capacity": ("worker", lambda spec: spec["workers"].update(capacity="Any")),
    "workers.zonePolicy": ("worker", lambda spec: spec["workers"].update(zonePolicy="Same")),
    "workers.template": ("worker", lambda spec: spec["workers"].update(template=TEMPLATE)),
    "parameterServers.capacity": ("ps", lambda spec: spec["parameterServers"].update(capacity="Any")),
    "parameterServers.template": ("ps", lambda spec: spec["parameterServers"].update(template=TEMPLATE)),
    "queue": ("both", queued),
}
"""Whose pods are made anew by an edit, while they wait for a node."""


@pytest.fixture(params=EDITS)
def edited(request: pytest.FixtureRequest) -> Any:
    return EDITS[request.param]


def removals(world: World) -> list[str]:
    return [each.name for each in world.reconcile().actions if isinstance(each, DeletePod)]


def test_pods_that_wait_for_a_node_are_made_as_the_edited_spec_says(edited: Any) -> None:
    """They waited for ever: only a pod made after the edit could run."""
    role, edit = edited
    world = World(workers=2)
    nodes, world.nodes = world.nodes, {}
    world.settle()
    edit(world.manifest["spec"])
    again = {"digits-worker-0-1", "digits-worker-1-1"}, {"digits-ps-0-1"}
    kept = {"digits-worker-0-0", "digits-worker-1-0"}, {"digits-ps-0-0"}
    world.settle()
    workers, servers = (again if role in {each, "both"} else kept for each in ("worker", "ps"))
    assert set(world.pods) == workers[0] | servers[1]
    number = len(world.created)
    for _ in range(4):
        assert not removals(world)
    world.nodes = nodes
    world.settle()
    assert len(world.created) == number
    assert {each["status"]["phase"] for each in world.pods.values()} == {"Running"}
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}


def test_pods_that_run_stay_whatever_is_edited(edited: Any) -> None:
    _, edit = edited
    world = running_world()
    edit(world.manifest["spec"])
    world.settle()
    assert not world.deleted


@pytest.mark.parametrize("successor", ["waits", "runs"])
def test_a_worker_that_ran_before_its_edit_was_seen_stays_unless_its_successor_runs(successor: str) -> None:
    world = World(workers=1)
    nodes, world.nodes = world.nodes, {}
    world.settle()
    EDITS["workers.template"][1](world.manifest["spec"])
    world.reconcile()
    first, second = "digits-worker-0-0", "digits-worker-0-1"
    assert {first, second} <= world.pods.keys()
    world.nodes = nodes
    for number, name in enumerate([first, second] if successor == "runs" else [first]):
        world.pods[name]["spec"]["nodeName"] = f"spot-{number}"
        world.pods[name]["status"] = {"phase": "Running"}
    assert removals(world) == [first if successor == "runs" else second]
    world.settle()
    assert [name for name in world.pods if "-worker-" in name] == [second if successor == "runs" else first]
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}


def test_pods_with_a_node_keep_it_when_an_edit_would_place_them_elsewhere() -> None:
    world = World(workers=2)
    world.reconcile()
    world.tick()  # they are bound
    world.manifest["spec"]["workers"]["capacity"] = "Any"
    world.manifest["spec"]["parameterServers"]["capacity"] = "Any"
    world.settle()
    assert not world.deleted


@pytest.mark.parametrize("edit", [None, EDITS["workers.capacity"][1]])
def test_pods_of_a_version_that_said_nothing_of_their_placement_stay(edit: Any) -> None:
    """An upgrade must not cost them their place in a queue."""
    world = World(workers=2)
    world.nodes = {}
    world.settle()
    for each in world.pods.values():
        for said in ("placement", "platform"):
            del each["metadata"]["labels"][f"shoal.dev/{said}"]
    if edit is not None:
        edit(world.manifest["spec"])
    world.settle()
    assert not world.deleted


OWN = Platform("own", spot={"node-lifecycle": ("spot",)}, taints={"reclaimable": "yes"})
CHANGES = {
    "somebody says it": (EKS, KARPENTER),
    "somebody says it, and no node can be read": (EKS, platform_of([], KARPENTER).unread),
    "the first node has joined": (GENERIC, GKE),
    "a label of its own": (EKS, platform_of([], EKS, replace(OWN, taints={}))),
    "a taint of its own": (EKS, platform_of([], EKS, replace(OWN, spot={}))),
    "a label of its own, of nodes of no platform": (GENERIC, platform_of([], GENERIC, OWN)),
    "nodes of another cloud have joined": (
        EKS,
        platform_of([node_of(**LABELS[name]) for name in ("eks", "gke")]),
    ),
}


@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES)
def test_pods_that_wait_for_a_node_follow_the_platform(before: Platform, after: Platform) -> None:
    """They waited for ever for nodes with the spot labels of another."""
    world = World(workers=2)
    world.nodes, world.platform = {}, before
    world.settle()
    world.platform = after
    world.settle()
    assert {"digits-worker-0-1", "digits-worker-1-1"} <= world.pods.keys()
    number = len(world.created)
    for _ in range(4):
        assert not removals(world)
    assert len(world.created) == number


def waits_in_its_queue(world: World) -> None:
    """Kueue may have queues for pods that name none."""
    for each in world.pods.values():
        gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
        each["status"]["conditions"] = [gated]


@pytest.mark.parametrize("spec", [{"runPolicy": {"schedulingPolicy": {"queue": "team"}}}, {}])
def test_pods_with_a_place_in_a_queue_keep_it_whatever_the_platform_becomes(spec: dict[str, Any]) -> None:
    world = World(workers=2, spec=spec)
    world.nodes, world.platform = {}, EKS
    world.settle()
    if not spec:
        waits_in_its_queue(world)
    world.platform = KARPENTER
    for _ in range(4):
        assert not removals(world)


STAYS = {
    "nodes of Karpenter have joined": (
        EKS,
        platform_of([node_of(**LABELS[name]) for name in ("karpenter", "eks")]),
    ),
    "no node is read yet": (EKS, GENERIC.unread),
    "not all nodes are read yet": (
        platform_of([node_of(**LABELS[name]) for name in ("karpenter", "eks")]),
        KARPENTER.unread,
    ),
}


@pytest.mark.parametrize(("before", "after"), STAYS.values(), ids=STAYS)
def test_pods_that_wait_stay_where_all_nodes_that_the_platform_asks_for_are_theirs(
    before: Platform, after: Platform
) -> None:
    """Nodes come and go, and an operator that has just begun may have pods before nodes."""
    world = World(workers=2)
    world.nodes, world.platform = {}, before
    world.settle()
    world.platform = after
    for _ in range(4):
        assert not removals(world)


def test_labels_that_somebody_else_wrote_end_no_plan() -> None:
    world = World(workers=1)
    world.nodes = {}
    world.settle()
    world.pods["digits-worker-0-0"]["metadata"]["labels"]["shoal.dev/avoids-until"] = "9" * 40
    world.settle()
    assert not world.deleted


@pytest.mark.parametrize(
    ("wrong", "role"),
    [
        ({"nodeSelector": {"pool": "typo"}}, "worker"),
        ({"tolerations": []}, "worker"),
        ({"accelerator": {"name": "T4", "count": 8}}, "worker"),
        ({"zone": "z9"}, "worker"),
        ({"nodeSelector": {"pool": "typo"}, "accelerator": None}, "ps"),
    ],
)
def test_pods_that_wait_for_a_node_follow_a_pool_that_is_corrected(wrong: dict[str, Any], role: str) -> None:
    right = {"accelerator": None} if role == "ps" else {}
    world = Pools(pool("odd", **wrong), pool("good"), nodes={}, replicas=1)
    where = {"worker": "workers", "ps": "parameterServers"}[role]
    other = {"worker": "parameterServers", "ps": "workers"}[role]
    world.manifest["spec"][where]["pools"], world.manifest["spec"][other]["pools"] = ["odd"], ["good"]
    world.settle()
    world.pools["odd"] = pool("odd", price=7, limit=3, **wrong)  # nothing about its nodes
    world.settle()
    assert not world.deleted
    world.pools["odd"] = pool("odd", **right)
    world.add("odd-0", "odd")
    world.settle()
    assert world.deleted == [f"digits-{role}-0-0"]
    assert world.pods[f"digits-{role}-0-1"]["spec"]["nodeName"] == "odd-0"


# --- parameter servers ------------------------------------------------------------------------------------------------


def servers_of(*names: str, nodes: dict[str, int] | None = None, **more: Any) -> Pools:
    pools = [pool(name, "OnDemand", accelerator=None) for name in ("od-a", "od-b")]
    world = Pools(
        pool("gpu"),
        *pools,
        nodes={"gpu": 2, **(nodes or {})},
        replicas=2,
        servers={"pools": [*names], **more},
    )
    world.manifest["spec"]["workers"]["pools"] = ["gpu"]
    return world


def exhaust(world: Pools, name: str, *, on: bool = True) -> None:
    world.pools[name] = pool(name, "OnDemand", accelerator=None, status=EXHAUSTED if on else {})


def live(world: World, shard: int = 0) -> list[str]:
    return [name for name in world.pods if f"-ps-{shard}-" in name]


def pool_of(world: World, name: str) -> str:
    labels: dict[str, str] = world.pods[name]["metadata"]["labels"]
    return labels["shoal.dev/pool"]


def test_a_server_that_waits_goes_to_the_pool_that_the_edited_spec_names() -> None:
    world = servers_of("od-a", nodes={"od-b": 1}).settled()
    world.manifest["spec"]["parameterServers"]["pools"] = ["od-b"]
    world.settle()
    assert live(world) == ["digits-ps-0-1"]
    assert world.pods["digits-ps-0-1"]["spec"]["nodeName"] == "od-b-0"


def test_a_server_that_waits_for_an_exhausted_pool_tries_the_next_one() -> None:
    world = servers_of("od-a", "od-b", replicas=2, nodes={"od-a": 1, "od-b": 2}).settled()
    waits = next(name for name, each in world.pods.items() if each["status"]["phase"] == "Pending")
    exhaust(world, "od-a")
    for _ in range(12):
        made = world.reconcile()
        assert all(len(live(world, shard)) <= 1 for shard in range(2)), "two servers of one shard"
        for each in made.actions:
            assert not isinstance(each, CreatePod) or each.role != "ps" or each.incarnation == 1
        world.tick()
    assert world.deleted == [waits]
    assert sorted(pool_of(world, name) for name in live(world, 0) + live(world, 1)) == ["od-a", "od-b"]
    assert world.status["parameterServers"]["ready"] == 2
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}


def test_a_server_stays_in_its_pool_while_no_other_is_better() -> None:
    world = servers_of("od-a", "od-b").settled()
    exhaust(world, "od-a")
    world.settle()
    assert [pool_of(world, name) for name in live(world)] == ["od-b"]
    for name, on in (("od-a", False), ("od-a", True), ("od-b", True), ("od-a", False)):
        assert live(world) == ["digits-ps-0-1"], "od-b may get a node as soon as od-a"
        exhaust(world, name, on=on)
        world.settle()
    assert live(world) == ["digits-ps-0-2"], "od-a has nodes again, and od-b has none"


@pytest.mark.parametrize("why", ["has a node", "waits in a queue"])
def test_a_server_stays_in_an_exhausted_pool_of_which_it_waits_for_no_node(why: str) -> None:
    world = servers_of("od-a", "od-b", nodes={"od-a": 1})
    world.reconcile()
    if why == "has a node":
        world.tick()
    else:
        del world.nodes["od-a-0"]
        gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
        world.pods["digits-ps-0-0"]["status"]["conditions"] = [gated]
    exhaust(world, "od-a")
    for _ in range(4):
        assert not removals(world)


def test_a_server_that_waits_stays_while_its_pools_cannot_be_read() -> None:
    world = servers_of("od-a").settled()
    del world.pools["od-a"]
    world.settle()
    assert live(world) == ["digits-ps-0-0"]


# --- excluded nodes ---------------------------------------------------------------------------------------------------


def failing(world: World, times: int) -> None:
    for _ in range(times):
        name = next(n for n, p in world.pods.items() if "-worker-" in n and p["status"]["phase"] == "Running")
        world.kill_pod(name, 1)
        for _ in range(6):
            world.reconcile()
            world.tick(5)


def test_a_pod_that_waits_runs_on_a_node_that_is_excluded_no_longer() -> None:
    """It was made while the node was excluded, and avoided it for ever: there is no other."""
    rule = {"failuresBeforeExclude": 2, "cooldownSeconds": 600}
    world = Avoiding(pool("a", limit=1), nodes={"a": 1}, replicas=1, nodeExclusion=rule).settled()
    failing(world, 2)
    assert world.by_pool() == {}
    number = len(world.created)
    made = world.reconcile()
    assert made.wake_after is not None
    world.now += timedelta(seconds=601)
    world.settle()
    assert world.by_pool() == {"a": 1}
    assert len(world.created) == number + 1


def test_pods_that_wait_are_not_made_anew_for_each_node_that_is_excluded() -> None:
    rule = {"failuresBeforeExclude": 1, "cooldownSeconds": 600}
    world = Avoiding(pool("a"), nodes={"a": 5}, replicas=8, nodeExclusion=rule).settled()
    waiting = {name for name, each in world.pods.items() if each["status"]["phase"] == "Pending"}
    failing(world, 1)
    failing(world, 1)
    assert len(world.status["excludedNodes"]) == 2
    assert waiting <= world.pods.keys()
    number = len(world.created)
    for _ in range(30):
        world.reconcile()
        world.tick(20)
    assert len(world.created) - number <= len(waiting), "once in a cooldown at most"


def test_a_pod_that_is_outdated_is_told_by_no_failure() -> None:
    world = World(workers=1)
    world.nodes = {name: build.node_manifest(name, spot=False) for name in ("plain-0", "plain-1")}
    world.settle()
    world.manifest["spec"]["workers"]["capacity"] = "Any"
    made = world.reconcile()
    assert not [each for each in made.events if each.type == "Warning"]
