"""Parameter servers: replacement, restarts in place, and the number of shards."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from shoal.policy.actions import CreatePod, CreateService, DeletePod, UpdateService
from shoal.policy.model import Refusal, RefusalKind
from shoal.policy.plan import plan
from tests.unit.policy import build
from tests.unit.policy.world import World, running_world


def test_services_are_created_before_pods() -> None:
    made = plan(build.observe(build.job(parameterServers={"replicas": 2})))
    kinds = [type(a).__name__ for a in made.actions]
    assert kinds[:4] == ["CreateSecret", "CreateService", "CreateService", "CreatePod"]
    services = [a.manifest["spec"] for a in made.actions if isinstance(a, CreateService)]
    assert all(s["publishNotReadyAddresses"] for s in services)


def test_deleted_server_is_replaced_after_its_final_snapshot() -> None:
    world = running_world()
    world.delete("digits-ps-0-0")
    assert not [
        a for a in world.reconcile().actions if isinstance(a, CreatePod)
    ]  # it takes its final snapshot first
    world.tick()
    made = world.reconcile()
    assert [a.name for a in made.actions if isinstance(a, CreatePod)] == ["digits-ps-0-1"]
    moved = next(a for a in made.actions if isinstance(a, UpdateService))
    assert moved.selector["shoal.dev/incarnation"] == "1"
    world.settle()
    assert world.status["parameterServers"] == {"desired": 1, "ready": 1, "restarts": 1}
    assert world.status["restarts"]["disruptions"] == 0
    assert world.status["phase"] == "Running"


def test_server_past_its_grace_period_is_replaced() -> None:
    world = running_world()
    world.delete("digits-ps-0-0")
    world.now += timedelta(seconds=10)
    assert world.reconcile().wake_after == pytest.approx(15)
    world.now += timedelta(seconds=16)
    assert [a.name for a in world.reconcile().actions if isinstance(a, CreatePod)] == ["digits-ps-0-1"]


def test_server_on_a_lost_node_is_replaced_at_once() -> None:
    world = running_world()
    world.kill_node("safe-0")
    assert [a.name for a in world.reconcile().actions if isinstance(a, CreatePod)] == ["digits-ps-0-1"]


def deleted(world: World) -> list[str]:
    """What a plan deletes now."""
    return [a.name for a in plan(world.observation()).actions if isinstance(a, DeletePod)]


def test_server_that_is_not_heard_gives_way_where_a_quota_has_no_room_for_the_next_one() -> None:
    """It held the quota until a newer one ran: for ever, where most nodes of its zone were not heard.

    And it was ended at the first refusal, though its node may be heard again in a moment.
    """
    world = running_world()
    world.quota = len(world.pods)
    world.kill_node("safe-0")
    world.reconcile()
    assert "digits-ps-0-1" in world.refusals
    go_on(world, 60)
    assert world.deleted == []
    go_on(world, 20)
    assert world.deleted == ["digits-ps-0-0"]
    for _ in range(70):  # it is Terminating, and no kubelet hears of it
        world.tick(1)
        world.reconcile()
    assert [name for name in world.pods if "-ps-" in name] == ["digits-ps-0-1"]


WAITS = {
    "for its volume on its node": {"node": "safe-1"},
    "in a queue": {"reason": "SchedulingGated"},
    "for a volume of one pod": {"message": "3 node has pod using PersistentVolumeClaim with the same name"},
}


@pytest.mark.parametrize("how", WAITS.values(), ids=WAITS)
def test_server_that_is_not_heard_gives_way_to_one_that_may_wait_for_what_it_holds(
    how: dict[str, str],
) -> None:
    world = running_world()
    world.kill_node("safe-0")
    world.reconcile()
    pod = world.pods["digits-ps-0-1"]
    bound = {"type": "PodScheduled", "status": "True" if "node" in how else "False",
             "lastTransitionTime": build.stamp(world.now), **how}  # fmt: skip
    pod["status"]["conditions"], pod["spec"]["nodeName"] = [bound], how.get("node")
    world.now += timedelta(seconds=59)
    assert plan(world.observation()).wake_after == pytest.approx(1)
    assert deleted(world) == []
    world.now += timedelta(seconds=1)
    assert deleted(world) == ["digits-ps-0-0"]


def test_server_that_is_not_heard_stays_while_the_next_one_has_no_node() -> None:
    """It may be heard again, and go on."""
    world = running_world()
    world.kill_node("safe-0")
    world.reconcile()
    world.now += timedelta(minutes=10)
    assert deleted(world) == []


def cordon(world: World, node: str) -> None:
    world.nodes[node]["spec"]["taints"] = [
        {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    ]


def test_server_on_a_cordoned_node_is_moved() -> None:
    """Its disruption budget refuses every eviction, so `kubectl drain` would not end."""
    world = running_world()
    cordon(world, "safe-0")
    cordon(world, "spot-0")
    world.settle()
    assert world.pods["digits-ps-0-1"]["spec"]["nodeName"] == "safe-1"
    assert "digits-ps-0-0" not in world.pods
    assert "digits-worker-0-0" in world.pods  # a drain evicts it
    assert world.status["parameterServers"]["restarts"] == 1


def deletion(world: World) -> DeletePod | None:
    return next((a for a in plan(world.observation()).actions if isinstance(a, DeletePod)), None)


def test_server_is_moved_off_a_cordoned_node_only_if_the_next_one_would_be_made() -> None:
    """A cordon has no deadline: it was ended while a webhook refused all pods, and nothing trained for as long."""
    world = running_world()
    cordon(world, "safe-0")
    found = deletion(world)
    assert found is not None
    assert found.name == "digits-ps-0-0"
    assert found.successor is not None
    made = found.successor.manifest
    assert made["metadata"]["name"] == found.successor.name == "digits-ps-0-1"
    assert made["metadata"]["labels"]["shoal.dev/incarnation"] == "1"


@pytest.mark.parametrize("what", ["is to be deleted", "shuts down", "is a spot node", "was evicted"])
def test_server_whose_end_has_a_deadline_is_moved_in_any_case(what: str) -> None:
    world = running_world()
    cordon(world, "safe-0")
    node = world.nodes["safe-0"]
    if what == "is to be deleted":
        node["spec"]["taints"].append({"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"})
    elif what == "shuts down":
        world.notice("safe-0")
    elif what == "is a spot node":  # EKS announces it by nothing else
        node["metadata"]["labels"]["eks.amazonaws.com/capacityType"] = "SPOT"
    else:
        evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        world.pods["digits-ps-0-0"]["status"]["conditions"].append(evicted)
    found = deletion(world)
    assert found is not None
    assert (found.name, found.successor) == ("digits-ps-0-0", None)


def test_suspended_job_ends_its_server_on_a_cordoned_node_whether_another_would_be_made_or_not() -> None:
    world = running_world()
    cordon(world, "safe-0")
    world.status = plan(world.observation()).status.model_dump(mode="json", by_alias=True, exclude_none=True)
    world.manifest["spec"]["suspend"] = True
    for name in [name for name in world.pods if "-worker-" in name]:
        world.vanish(name)
        world.asked.add(name)
    found = deletion(world)
    assert found is not None
    assert (found.name, found.successor) == ("digits-ps-0-0", None)


@pytest.mark.parametrize("why", ["other arguments", "an unreadable spec", "no pool"])
def test_server_on_a_cordoned_node_stays_while_it_is_known_that_no_other_is_made(why: str) -> None:
    world = running_world()
    cordon(world, "safe-0")
    if why == "other arguments":
        world.manifest["spec"]["training"]["args"] = {"rate": "0.1"}
    elif why == "no pool":
        world.manifest["spec"]["parameterServers"]["pools"] = ["gone"]
    seen = replace(world.observation(), unread=why == "an unreadable spec")
    assert not [a for a in plan(seen).actions if isinstance(a, DeletePod)]


@pytest.mark.parametrize(
    "toleration", [{"operator": "Exists"}, {"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]
)
def test_server_that_tolerates_a_cordon_stays(toleration: dict[str, str]) -> None:
    world = running_world()
    world.pods["digits-ps-0-0"]["spec"]["tolerations"] = [toleration]
    cordon(world, "safe-0")
    world.settle()
    assert "digits-ps-0-0" in world.pods


def not_ready(world: World, node: str, since: int = 0, message: str = "container runtime is down") -> None:
    """The node's kubelet is heard, and does not know its pods."""
    at = build.stamp(world.now - timedelta(seconds=since))
    taint = {"key": "node.kubernetes.io/not-ready", "effect": "NoExecute", "timeAdded": at}
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": at, "message": message}
    world.nodes[node]["spec"]["taints"] = [taint]
    world.nodes[node]["status"]["conditions"] = [ready]


def test_pods_that_are_heard_stay_on_nodes_that_are_not_ready() -> None:
    world = running_world()
    for node in world.nodes:
        not_ready(world, node, since=100)
    world.report = build.report(active=[(0, 0), (1, 0), (2, 0)], shards=({"index": 0, "epoch": 0},))
    before = len(world.created)
    world.reconcile()
    assert (len(world.created), world.deleted) == (before, [])
    assert world.status["restarts"]["disruptions"] == world.status["parameterServers"]["restarts"] == 0


def test_server_on_a_node_that_is_not_ready_is_replaced_if_it_is_not_heard() -> None:
    world = running_world()
    world.report = build.report(active=[(0, 0), (1, 0), (2, 0)], shards=())
    not_ready(world, "safe-0", since=2)
    made = world.reconcile()
    assert [a for a in made.actions if isinstance(a, CreatePod | DeletePod)] == []
    assert made.wake_after == pytest.approx(8.0)
    world.now += timedelta(seconds=9)
    world.reconcile()
    world.reconcile()
    assert "digits-ps-0-1" in world.pods
    assert world.deleted == [], "it may work, and its successor waits"


def test_pods_of_a_node_that_shuts_down_leave_it_though_it_is_not_ready() -> None:
    """A server takes its final snapshot first."""
    world = running_world()
    world.report = build.report(active=[(0, 0), (1, 0), (2, 0)])
    not_ready(world, "safe-0", message="node is shutting down")
    world.reconcile()
    assert world.status["parameterServers"]["restarts"] == 1
    assert [s["cause"] for s in world.status["slots"] if s.get("role") == "ps"] == ["NodeShutdown"]


def test_failed_restarts_in_place_count_against_the_backoff_limit() -> None:
    world = running_world(spec={"runPolicy": {"backoffLimit": 1}})
    container = world.pods["digits-ps-0-0"]["status"]["containerStatuses"][0]
    container |= {"restartCount": 1, "lastState": build.ended(137)}
    world.reconcile()
    world.reconcile()
    assert world.status["parameterServers"]["restarts"] == 1
    assert world.status["restarts"]["failures"] == 0
    container |= {"restartCount": 3, "lastState": build.ended(1)}
    world.reconcile()
    assert world.status["parameterServers"]["restarts"] == 3
    assert world.status["phase"] == "Failed"


@pytest.mark.parametrize(("hours", "fails"), [(24, False), (0.01, True)])
def test_server_that_is_killed_now_and_then_is_no_failure(hours: float, fails: bool) -> None:
    """Nor after a hundred days; one that is killed as soon as it has started is."""
    world = running_world(spec={"runPolicy": {"backoffLimit": 6}})
    container = world.pods["digits-ps-0-0"]["status"]["containerStatuses"][0]
    for time in range(1, 14):
        began = world.now
        world.now += timedelta(hours=hours)
        ended = build.ended(137)["terminated"]
        ended |= {"startedAt": build.stamp(began), "finishedAt": build.stamp(world.now)}
        container |= {"restartCount": time, "lastState": {"terminated": ended}}
        world.reconcile()
    assert world.status["parameterServers"]["restarts"] == (10 if fails else 13)
    assert (world.status["phase"] == "Failed") is fails


def test_fewer_shards_after_suspension_removes_the_service() -> None:
    world = running_world(servers=2)
    world.manifest["spec"]["suspend"] = True
    world.settle()
    assert not world.services  # a suspended job holds no addresses
    world.manifest["spec"] |= {"suspend": False, "parameterServers": {"replicas": 1}}
    world.settle()
    assert list(world.services) == ["digits-ps-0"]
    assert [n for n in world.pods if "-ps-" in n] == ["digits-ps-0-1"]


def shut_out(**how: Any) -> World:
    """A job whose server is gone, and whose place another job took, which has the rest of the quota."""
    world = running_world(**how)
    world.quota = len(world.pods) - 1
    world.vanish("digits-ps-0-0")
    return world


def go_on(world: World, seconds: int) -> None:
    for _ in range(seconds):
        world.reconcile()
        world.tick(1)


def test_server_that_a_quota_refuses_takes_the_place_of_a_worker_that_waits_for_it() -> None:
    """Its workers kept a server of the other job from workers, which kept its place from theirs, for ever."""
    world = shut_out()
    go_on(world, 4)
    assert world.deleted == [], "a quota may be counted some moments later"
    go_on(world, 8)
    assert world.deleted == ["digits-worker-2-0"]
    assert sorted(world.pods) == ["digits-ps-0-1", "digits-worker-0-0", "digits-worker-1-0"]
    assert world.status["restarts"]["disruptions"] == 0
    assert world.condition("QuotaExceeded")["status"] == "True"
    world.quota = None
    go_on(world, 90)
    assert "digits-worker-2-1" in world.pods
    assert len(world.deleted) == 1


def test_workers_give_way_one_after_another_until_there_is_room_for_the_server() -> None:
    """One in a minute: it may be in vain."""
    world = shut_out()
    world.quota = 2
    go_on(world, 60)
    assert world.deleted == ["digits-worker-2-0"]
    go_on(world, 60)
    assert world.deleted == ["digits-worker-2-0", "digits-worker-1-0"]
    assert sorted(world.pods) == ["digits-ps-0-1", "digits-worker-0-0"]


def test_worker_that_ends_anyway_makes_room_for_the_server_before_another_does() -> None:
    world = shut_out()
    world.quota = 2
    world.taint(world.pods["digits-worker-0-0"]["spec"]["nodeName"])
    go_on(world, 3)
    assert world.deleted == ["digits-worker-0-0"], "at once"
    go_on(world, 40)
    assert world.deleted == ["digits-worker-0-0", "digits-worker-2-0"]


def test_worker_whose_node_is_not_heard_makes_room_for_the_server() -> None:
    """Its pod was kept until its successor ran, which was not made before the server was there."""
    world = shut_out()
    world.kill_node(world.pods["digits-worker-0-0"]["spec"]["nodeName"])
    go_on(world, 140)
    assert set(world.deleted) == {"digits-worker-0-0"}
    assert "digits-ps-0-1" in world.pods


FULL = {
    "a place": ("pods=1", "pods=4", "pods=4", True),
    "more places than workers have": ("count/pods=1", "count/pods=7", "count/pods=4", False),
    "more than all workers have": (
        "requests.memory=64Gi",
        "requests.memory=1Ti",
        "requests.memory=1Ti",
        False,
    ),
    "what no worker asks for": ("nvidia.com/gpu=1", "nvidia.com/gpu=2", "nvidia.com/gpu=2", False),
    "what they have, and what not": ("fpga=1,pods=1", "fpga=2,pods=4", "fpga=2,pods=4", False),
    "limits, which are not read": ("limits.cpu=1", "limits.cpu=4", "limits.cpu=4", True),
}


@pytest.mark.parametrize(("requested", "used", "limited", "goes"), FULL.values(), ids=FULL)
def test_no_worker_gives_way_in_vain(requested: str, used: str, limited: str, goes: bool) -> None:
    """All of them went, one after another, for a server that had room no sooner."""
    world = shut_out()
    world.quota_says = f"exceeded quota: team, requested: {requested}, used: {used}, limited: {limited}"
    go_on(world, 30)
    assert world.deleted == (["digits-worker-2-0"] if goes else [])


@pytest.mark.parametrize("resource", ["count/pods", "pods"])
def test_pod_that_is_kept_for_its_log_goes_where_it_has_the_place_of_a_server(resource: str) -> None:
    """A worker at work gave way in place of it."""
    world = running_world()
    world.end("digits-worker-0-0", 1)
    world.settle()
    assert world.pods["digits-worker-0-0"]["status"]["phase"] == "Failed"
    world.quota = len(world.pods) - 1
    world.vanish("digits-ps-0-0")
    world.quota_says = (
        f"exceeded quota: team, requested: {resource}=1, used: {resource}=4, limited: {resource}=4"
    )
    go_on(world, 3)
    assert world.deleted == (["digits-worker-0-0"] if resource == "count/pods" else [])


def test_worker_gives_way_where_a_finalizer_holds_the_server_of_a_dead_node() -> None:
    """It was awaited without an end."""
    world = running_world()
    world.quota = len(world.pods)
    world.kill_node("safe-0")
    world.pods["digits-ps-0-0"]["metadata"] |= {
        "deletionTimestamp": build.stamp(world.now), "deletionGracePeriodSeconds": 0, "finalizers": ["a/b"],
    }  # fmt: skip
    world.reconcile()
    waits = Refusal(RefusalKind.QUOTA, "digits-ps-0-1", "exceeded", (1, 0), build.at(world.now), 3)
    for seconds, gone in ((64, []), (1, ["digits-worker-2-0"])):
        world.now += timedelta(seconds=seconds)
        world.refusals[waits.name] = replace(waits, at=build.at(world.now))
        slots = plan(world.observation()).status.slots
        assert [f"digits-worker-{each.index}-0" for each in slots if each.cause == "GaveWay"] == gone


def test_no_worker_is_made_in_the_place_of_a_server_that_a_quota_refuses() -> None:
    world = World(servers=2)
    world.quota = 1
    world.reconcile()
    go_on(world, 120)
    assert sorted(world.pods) == ["digits-ps-0-0"]
    world.quota = 3
    go_on(world, 70)
    assert sorted(world.pods) == ["digits-ps-0-0", "digits-ps-1-0", "digits-worker-0-0"]


def test_servers_that_run_need_no_room() -> None:
    """What a quota refused was the next one of a server whose node was heard again."""
    world = running_world()
    world.quota = len(world.pods)
    world.reconcile()
    at = build.at(world.now)
    world.refusals["digits-ps-0-1"] = Refusal(RefusalKind.QUOTA, "digits-ps-0-1", "exceeded", (1, 0), at, 3)
    world.vanish("digits-worker-0-0")
    go_on(world, 20)
    assert world.deleted == []
    assert "digits-worker-0-1" in world.pods
