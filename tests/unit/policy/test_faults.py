"""Invariants of the plan under random sequences of faults."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.policy.decide.completion import NODE_PATIENCE
from tests.unit.policy.world import World

FAULTS = [
    "notice", "kill_node", "remake_node", "exit 1", "exit 137", "exit 143", "exit 0", "oom", "vanish", "evict",
    "hush", "fence", "taint", "crash", "crash_unseen", "suspend", "scale", "quota", "tick", "wait",
]  # fmt: skip
steps = st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 999)), max_size=25)


def do(world: World, fault: str, number: int) -> bool:
    """Inject one fault. False: the operator crashed, so no status was written."""
    pods, nodes = sorted(world.pods), sorted(world.nodes)
    pod = pods[number % len(pods)] if pods else None
    node = nodes[number % len(nodes)]
    match fault.split():
        case ["notice" | "kill_node" | "remake_node"]:
            getattr(world, fault)(node)
        case ["exit", code] if pod and "-worker-" in pod:
            world.kill_pod(pod, int(code))
        case ["oom"] if pod and "-worker-" in pod:
            world.kill_pod(pod, 137, "OOMKilled")
        case ["vanish" | "evict" | "hush"] if pod:
            getattr(world, fault)(pod)
        case ["fence"] if pod and pod in world.silent:
            world.silent.discard(pod)
            world.fenced.add(pod)
        case ["taint"] if node.startswith("spot"):
            world.taint(node, on=not world.nodes[node]["spec"]["taints"])
        case ["crash"]:
            world.reconcile(crash_after=number % 4)
            return False
        case ["crash_unseen"]:
            leader_dies_unseen(world, number % 4)
            return False
        case ["suspend"]:
            world.manifest["spec"]["suspend"] = not world.manifest["spec"].get("suspend", False)
        case ["scale"]:
            world.manifest["spec"]["workers"]["replicas"] = number % 7
            world.manifest["metadata"]["generation"] += 1
        case ["quota"]:
            world.quota = None if world.quota else 2 + number % 4
        case ["tick"]:
            world.tick()
        case ["wait"]:
            world.tick(seconds=61)
    return True


def leader_dies_unseen(world: World, after: int) -> None:
    """The operator crashes after so many actions; the pods that it made vanish before anyone reads them."""
    world.reconcile(crash_after=after)
    for name in sorted(world.unrecorded & world.pods.keys()):
        if "-worker-" in name:
            world.vanish(name)


@pytest.mark.by_day(12)
@pytest.mark.parametrize("first", range(9))
@pytest.mark.parametrize("second", [0, 1, 2, 3])
def test_incarnation_is_never_used_twice(first: int, second: int) -> None:
    """Though a leader dies before it recorded a pod, and the pod vanishes before anyone else reads it; twice."""
    world = World()
    leader_dies_unseen(world, first)
    leader_dies_unseen(world, second)
    world.settle()
    for name in [name for name in world.pods if "-worker-" in name][:2]:
        world.vanish(name)
    leader_dies_unseen(world, first % 5)
    leader_dies_unseen(world, second)
    world.settle()
    assert len([name for name in world.pods if "-worker-" in name]) == world.workers


def test_pod_that_is_gone_before_it_is_recorded_is_not_made_again() -> None:
    """By the same leader: its watch told it."""
    world = World().settled()
    world.vanish("digits-worker-1-0")
    world.asked |= {"digits-worker-1-0", "digits-worker-1-1"}
    assert "digits-worker-1-2" in {getattr(each, "name", "") for each in world.reconcile().actions}


def draining(world: World, name: str) -> bool:
    """Whether the pod is draining, according to what really happened or to its record."""
    pod, node = world.pods[name], world.pods[name]["spec"].get("nodeName")
    slot = slot_of(world, name)
    return (
        pod["metadata"].get("deletionTimestamp") is not None
        or pod["status"]["phase"] in {"Failed", "Succeeded"}
        or name in world.silent | world.fenced
        or name in world.taken
        or (node is not None and (node in world.dead_nodes or world.leaving(node)))
        or bool(slot and slot.get("cause"))
    )


def slot_of(world: World, name: str) -> dict[str, Any] | None:
    _, role, index, incarnation = name.rsplit("-", 3)
    wanted = (role, int(index), int(incarnation))
    found = [s for s in world.slots if (s["role"], s["index"], s["incarnation"]) == wanted]
    return found[0] if found else None


def place(name: str) -> str:
    return name.rsplit("-", 1)[0]


def check(world: World, before: dict[str, Any]) -> None:
    workers = [n for n in world.pods if "-worker-" in n]
    holding = [place(n) for n in workers if not draining(world, n)]
    assert len(holding) == len(set(holding)), f"two active pods of one place: {sorted(world.pods)}"
    assert len(holding) <= world.manifest["spec"]["workers"]["maxReplicas"]

    announced = {n for n in world.nodes if world.leaving(n) or world.nodes[n]["spec"]["taints"]}
    alive = [
        place(n)
        for n in workers
        if world.pods[n]["status"]["phase"] in {"Pending", "Running"}
        and n not in world.ever_lost
        and world.pods[n]["spec"].get("nodeName") not in world.dead_nodes
        and world.pods[n]["spec"].get("nodeName") not in announced  # they do not use up maxSurge
        and n not in world.noticed
    ]
    surplus = len(alive) - len(set(alive))
    assert surplus <= world.surge, f"more than maxSurge surplus pods: {sorted(alive)}"

    servers = [
        place(n)
        for n in world.pods
        if "-ps-" in n
        and world.pods[n]["status"]["phase"] in {"Pending", "Running"}
        and n not in world.ever_lost
        and not world.pods[n]["metadata"].get("deletionTimestamp")
    ]
    assert len(servers) == len(set(servers)), "two live pods of one shard"

    for counter in ("failures", "disruptions"):
        was = before.get("restarts", {}).get(counter, 0)
        assert world.status["restarts"][counter] >= was, f"{counter} went down"
    assert world.status["parameterServers"]["restarts"] >= before.get("parameterServers", {}).get(
        "restarts", 0
    )
    upper_bound = len(world.taken) + own_reason(world, "Silent") + own_reason(world, "ScaledDownByAutoscaler")
    assert counted(world) <= upper_bound, "something was counted twice"


def counted(world: World) -> int:
    return int(sum(world.status["restarts"]["byReason"].values()))


def own_reason(world: World, reason: str) -> int:
    """What is counted without a lost pod."""
    return int(world.status["restarts"]["byReason"].get(reason, 0))


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example([("quota", 0), ("tick", 0), ("notice", 2), ("scale", 1)], 1, 0)  # slot 0 is given up, not 1
@given(steps, st.integers(1, 2), st.integers(0, 2))
def test_invariants_hold_under_random_faults(faults: list[tuple[str, int]], servers: int, surge: int) -> None:
    world = World(servers=servers, surge=surge, spot_nodes=7)
    world.reconcile()
    for fault, number in faults:
        before = world.status
        if do(world, fault, number):
            world.reconcile()
            check(world, before)

    world.heal()
    wanted = world.manifest["spec"]["workers"]["replicas"]
    for _ in range(8):  # back-offs end, stuck pods are force-deleted
        world.tick(seconds=61)
        world.reconcile()
        check(world, world.status)
    world.settle()
    running = [n for n, p in world.pods.items() if p["status"]["phase"] == "Running"]
    assert sorted(place(n) for n in running if "-ps-" in n) == [f"digits-ps-{i}" for i in range(servers)]
    workers = {
        place(n) for n in running if "-worker-" in n
    }  # any slots: those are given up that are missed least
    assert len(workers) == len(running) - servers == wanted
    for shard in range(servers):
        newest = max(int(n.rsplit("-", 1)[1]) for n in running if place(n) == f"digits-ps-{shard}")
        selector = world.services[f"digits-ps-{shard}"]["spec"]["selector"]
        assert selector["shoal.dev/incarnation"] == str(newest)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["notice", "exit 1", "exit 143", "vanish", "evict", "oom"]), st.integers(0, 999)
        ),
        max_size=12,
    )
)
def test_each_lost_worker_is_counted_exactly_once(faults: list[tuple[str, int]]) -> None:
    world = World(surge=2).settled()
    for fault, number in faults:
        do(world, fault, number)
        world.reconcile()
        world.reconcile()
    for _ in range(10):
        world.tick()
        world.reconcile()
    assert counted(world) == sum("-worker-" in n for n in world.taken)


@settings(max_examples=examples(50), deadline=None)
@given(steps)
def test_finished_job_creates_no_pods(faults: list[tuple[str, int]]) -> None:
    world = World(spec={"runPolicy": {"backoffLimit": 0}}).settled()
    world.kill_pod("digits-worker-0-0", 1)
    world.reconcile()
    world.now += NODE_PATIENCE
    world.reconcile()
    assert world.status["phase"] == "Failed"
    created = list(world.created)
    for fault, number in faults:
        do(world, fault, number)
        world.reconcile()
    assert world.created == created
    assert world.status["phase"] == "Failed"
