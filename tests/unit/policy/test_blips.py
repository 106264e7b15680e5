"""Correlated silence: a pause of the control plane, stale caches and a new leader delete nothing and count nothing."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from shoal.api.labels import Place
from shoal.policy.actions import ConfirmAbsent, CreatePod, DeletePod, UpdateService
from shoal.policy.common.timers import Timers
from shoal.policy.facts.blip import suspicion
from shoal.policy.model import Plan, Reason
from shoal.policy.plan import plan
from shoal_trainer.contract import EXIT_USER, Outcome
from tests.unit.policy import build
from tests.unit.policy.world import World, running_world

SHARD = {"index": 0, "epoch": 0}


def unknown(world: World, *nodes: str, since: int = 6) -> None:
    """The nodes' kubelets are not heard any more."""
    at = build.stamp(world.now - timedelta(seconds=since))
    for node in nodes or world.nodes:
        world.nodes[node]["status"]["conditions"] = [
            {"type": "Ready", "status": "Unknown", "lastTransitionTime": at}
        ]


def heard(world: World, *workers: tuple[int, int], server: bool = True) -> None:
    world.report = build.report(active=list(workers), shards=(SHARD,) if server else ())


def of_pods(made: Plan) -> list[str]:
    return [f"{type(a).__name__} {a.name}" for a in made.actions if isinstance(a, CreatePod | DeletePod)]


def restarts(world: World) -> Any:
    return world.status["restarts"]


def suspected(
    nodes: int, silent: Sequence[timedelta], back: Sequence[timedelta] = (), since: timedelta | None = None
) -> Reason | None:
    """What is suspected of a node that fell silent then, among so many nodes; all as seen from now."""
    seen = replace(
        build.observe(build.job()),
        nodes={str(number): build.node(str(number)) for number in range(nodes)},
        silent_nodes=[build.NOW + each for each in silent],
        nodes_heard_again=[build.NOW + each for each in back],
    )
    return suspicion(seen, None if since is None else build.NOW + since, Timers(build.NOW))


def test_nodes_that_all_turn_unknown_are_suspected_and_nothing_is_done() -> None:
    world = running_world()
    unknown(world)
    world.report_age = 3600.0
    made = world.reconcile()
    assert of_pods(made) == []
    assert made.wake_after is not None
    suspect = world.condition("NodeSignalsSuspect")
    assert (suspect["status"], suspect["reason"]) == ("True", "ManyNodesUnknown")
    assert "ManyNodesUnknown" in {event.reason for event in made.events}
    assert restarts(world) == {"failures": 0, "disruptions": 0, "byReason": {}}
    for node in world.nodes:
        world.nodes[node] = build.node_manifest(node, spot=node.startswith("spot"))
    assert of_pods(world.reconcile()) == []
    assert world.condition("NodeSignalsSuspect")["status"] == "False"
    assert world.status["parameterServers"]["restarts"] == 0


@pytest.mark.parametrize("since", [61, 3600])
def test_while_nearly_no_node_is_heard_nothing_is_done_however_long(since: int) -> None:
    world = running_world()
    world.now += timedelta(hours=2)
    unknown(world, since=since)
    world.report_age = 3600.0
    assert of_pods(world.reconcile()) == []
    assert "nearly no node was heard" in world.condition("NodeSignalsSuspect")["message"]
    assert restarts(world)["disruptions"] == 0


def test_unknown_nodes_are_believed_after_a_minute_while_others_are_heard() -> None:
    world = running_world()
    lost = list(world.nodes)
    for name in ("other-0", "other-1"):
        world.nodes[name] = build.node_manifest(name)
    world.now += timedelta(minutes=2)
    unknown(world, *lost, since=61)
    world.report_age = 3600.0
    made = world.reconcile()
    assert sorted(of_pods(made)) == [
        "CreatePod digits-ps-0-1",
        *(f"CreatePod digits-worker-{i}-1" for i in range(3)),
    ]
    assert world.deleted == []  # none of the replacements runs


@pytest.mark.parametrize(
    ("heard_again", "seconds", "believed"), [(3, 59, False), (3, 61, True), (2, 2, True)]
)
def test_the_last_nodes_to_be_heard_again_are_waited_for(
    heard_again: int, seconds: int, believed: bool
) -> None:
    """The network is back: kubelets report within ten seconds of each other, and are seen one after another."""
    found = suspected(5, [timedelta(minutes=-5)] * 2, [timedelta(seconds=-seconds)] * heard_again)
    assert (found is None) is believed


@pytest.mark.parametrize(("before", "believed"), [(601, True), (599, False)])
def test_nodes_that_fell_silent_long_before_tell_nothing_of_another_one(before: int, believed: bool) -> None:
    """As of machines that were taken for good, whose nodes nobody deletes: no loss was believed any more."""
    at = timedelta(seconds=-20)
    silent = [at - timedelta(seconds=before)] * 60 + [at]
    assert (suspected(66, silent, since=at) is None) is believed
    assert suspected(66, [at] * 60, since=at) is not None, "as of one partition"
    recent = [*silent[:-1], *[at] * 3]
    assert suspected(66, recent, since=at) is not None, "three of the six that are left"


@pytest.mark.parametrize("flapping", [1, 2])
def test_a_node_that_was_heard_for_a_moment_of_a_long_outage_is_not_believed_gone(flapping: int) -> None:
    """All others had been silent for so long that they were not counted: its server was taken for lost, and ended."""
    at = timedelta(seconds=-70)
    silent = [timedelta(minutes=-20)] * (12 - flapping) + [at] * flapping
    assert suspected(12, silent, since=at) is not None
    assert suspected(18, silent, since=at) is None, "others are heard: as of machines that are gone"


def test_server_is_replaced_and_forced_away_where_nearly_all_nodes_have_been_silent_for_days() -> None:
    """Its machine is gone, as are those of the others. A job that was deleted, or suspended, never ended."""
    world = running_world()
    world.now += timedelta(days=2)
    for number in range(60):
        world.nodes[f"old-{number}"] = build.node_manifest(f"old-{number}")
        unknown(world, f"old-{number}", since=86_400)
    heard(world, (0, 0), (1, 0), (2, 0), server=False)
    world.dead_nodes.add("safe-0")
    unknown(world, "safe-0", since=11)
    for _ in range(4):
        world.reconcile()
        world.tick()
    assert world.deleted == ["digits-ps-0-0"]
    world.now += timedelta(seconds=120)
    world.reconcile()
    assert world.deleted == ["digits-ps-0-0"] * 2
    assert "digits-ps-0-0" not in world.pods


@pytest.mark.parametrize(
    ("seconds", "tainted", "replaced"), [(59, False, False), (61, False, True), (11, True, True)]
)
def test_server_whose_node_is_not_ready_is_replaced_if_kubernetes_never_says_so_by_a_taint(
    seconds: int, tainted: bool, replaced: bool
) -> None:
    """In a small zone where more than half of the nodes are not ready it taints none: nobody replaced the server."""
    world = running_world()
    world.now += timedelta(minutes=2)
    at = build.stamp(world.now - timedelta(seconds=seconds))
    said = {"status": "False", "message": "container runtime is down"}
    for node in ("safe-0", "spot-0"):
        world.nodes[node]["status"]["conditions"] = [{"type": "Ready", "lastTransitionTime": at, **said}]
    if tainted:
        taint = {"key": "node.kubernetes.io/not-ready", "effect": "NoExecute", "timeAdded": at}
        world.nodes["safe-0"]["spec"]["taints"] = [taint]
    heard(world, server=False)
    assert of_pods(world.reconcile()) == (["CreatePod digits-ps-0-1"] if replaced else [])
    assert world.deleted == [], "it may be alive"


def test_first_of_many_nodes_to_turn_unknown_is_not_acted_upon_before_the_others_follow() -> None:
    world = running_world()
    world.report_age = 3600.0
    for index, name in enumerate(world.nodes):
        unknown(world, name, since=1)
        made = world.reconcile()
        assert of_pods(made) == [], name
        assert made.wake_after is not None
        world.now += timedelta(seconds=0.2)
        assert bool(world.condition("NodeSignalsSuspect")) is (index >= 2)
    assert restarts(world)["disruptions"] == 0


def test_two_of_three_unknown_nodes_are_not_many() -> None:
    world = running_world()
    unknown(world, "spot-0", "spot-1")
    world.report_age = 3600.0
    assert of_pods(world.reconcile()) == ["CreatePod digits-worker-0-1", "CreatePod digits-worker-1-1"]


def test_worker_that_the_coordinator_hears_is_kept_on_an_unknown_node() -> None:
    world = running_world()
    unknown(world, "spot-0", "spot-1")
    heard(world, (0, 0), (2, 0))
    assert of_pods(world.reconcile()) == ["CreatePod digits-worker-1-1"]
    assert restarts(world)["byReason"] == {"NodeLost": 1}


def test_worker_on_an_unknown_node_works_until_its_replacement_runs_and_may_return() -> None:
    world = running_world(spot_nodes=3)  # no room for the replacement
    unknown(world, "spot-1")
    heard(world, (0, 0), (2, 0))
    world.reconcile()
    world.tick()
    world.reconcile()
    assert world.deleted == []
    world.nodes["spot-1"] = build.node_manifest("spot-1")
    world.report = None
    world.settle()
    assert world.deleted == ["digits-worker-1-1"]
    assert restarts(world) == {"failures": 0, "disruptions": 1, "withdrawn": 1, "byReason": {"NodeLost": 1}}


def test_server_that_is_heard_is_never_replaced_whatever_its_node_says() -> None:
    world = running_world()
    unknown(world, "safe-0", since=3600)
    heard(world, (0, 0), (1, 0), (2, 0))
    assert of_pods(world.reconcile()) == []
    assert world.status["parameterServers"]["restarts"] == 0


def test_it_is_looked_again_as_soon_as_a_server_on_an_unknown_node_is_not_heard_any_more() -> None:
    """It was looked a minute after the last report, and all workers waited."""
    world = running_world()
    world.now += timedelta(minutes=1)
    unknown(world, "safe-0", since=50)
    heard(world, (0, 0), (1, 0), (2, 0))
    world.report_age = 12.0
    made = world.reconcile()
    assert (of_pods(made), made.wake_after) == ([], 18.0)
    world.now += timedelta(seconds=18)
    world.report_age += 18.0
    assert of_pods(world.reconcile()) == ["CreatePod digits-ps-0-1"]


def test_server_that_is_not_heard_is_replaced_after_a_patience_and_deleted_when_its_successor_runs() -> None:
    world = running_world()
    unknown(world, "safe-0", since=2)
    heard(world, (0, 0), (1, 0), (2, 0), server=False)
    made = world.reconcile()
    assert of_pods(made) == []
    assert made.wake_after == pytest.approx(8.0)
    world.now += timedelta(seconds=9)
    assert of_pods(world.reconcile()) == ["CreatePod digits-ps-0-1"]
    assert (
        world.services["digits-ps-0"]["spec"]["selector"]["shoal.dev/incarnation"] == "0"
    )  # it may be alive
    world.nodes["safe-1"]["spec"]["taints"] = []
    world.dead_nodes.add("safe-0")
    for _ in range(3):
        world.tick()
        world.reconcile()
    assert world.deleted == ["digits-ps-0-0"]
    assert world.services["digits-ps-0"]["spec"]["selector"]["shoal.dev/incarnation"] == "1"


@pytest.mark.parametrize("seen", ["another uid", "another boot", "shuts down"])
@pytest.mark.parametrize("name", ["digits-ps-0-0", "digits-worker-1-0"])
def test_pod_is_not_lost_since_its_node_was_seen_too_late(name: str, seen: str) -> None:
    """A machine came back under its name; the watch of nodes showed the one before it when its pod was bound."""
    world = running_world()
    node = world.pods[name]["spec"]["nodeName"]
    heard(world, (0, 0), (1, 0), (2, 0))
    if seen == "another uid":  # then it need not be heard
        heard(world, (0, 0), (2, 0), server=False)
        world.nodes[node]["metadata"] |= {"uid": "new", "creationTimestamp": build.stamp(build.NOW)}
        world.nodes[node]["status"]["nodeInfo"]["bootID"] = "boot-2"
    elif seen == "another boot":
        world.nodes[node]["status"]["nodeInfo"]["bootID"] = "boot-2"
    else:
        bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": build.stamp(world.now)}
        world.pods[name]["status"]["conditions"] = [bound]
        said = {"status": "False", "message": "node is shutting down"}
        before = build.stamp(world.now - timedelta(minutes=2))
        world.nodes[node]["status"]["conditions"] = [{"type": "Ready", "lastTransitionTime": before, **said}]
    assert of_pods(world.reconcile()) == []
    assert restarts(world)["disruptions"] == world.status["parameterServers"]["restarts"] == 0
    heard(world, (0, 0), (2, 0), server=False)  # it is known from now on
    assert of_pods(world.reconcile()) == []


@pytest.mark.parametrize("name", ["digits-ps-0-0", "digits-worker-1-0"])
def test_pod_that_has_not_started_loses_nothing_by_a_reboot(name: str) -> None:
    """Bound to a machine that is back, while the watch of nodes shows it as it was; it pulls its image for minutes."""
    world = running_world()
    heard(world, (0, 0), (2, 0), server=False)
    world.pods[name]["status"] = {"phase": "Pending"}
    world.nodes[world.pods[name]["spec"]["nodeName"]]["status"]["nodeInfo"]["bootID"] = "boot-2"
    assert of_pods(world.reconcile()) == []
    world.pods[name]["status"] = {"phase": "Running"}
    assert of_pods(world.reconcile()) == [], "it is known from now on"


@pytest.mark.parametrize("name", ["digits-ps-0-0", "digits-worker-1-0"])
def test_pod_of_a_node_that_was_made_after_it_was_bound_is_lost(name: str) -> None:
    world = running_world()
    node, later = world.pods[name]["spec"]["nodeName"], build.stamp(world.now + timedelta(seconds=1))
    world.nodes[node]["metadata"] |= {"uid": "new", "creationTimestamp": later}
    world.nodes[node]["status"]["nodeInfo"]["bootID"] = "boot-2"
    heard(world, (0, 0), (1, 0), (2, 0))
    assert of_pods(world.reconcile()) == [], "the report may be older than the node"
    heard(world, (0, 0), (2, 0), server=False)
    assert f"DeletePod {name}" in of_pods(world.reconcile())


@pytest.mark.parametrize("name", ["digits-ps-0-0", "digits-worker-1-0"])
def test_pod_of_a_node_that_was_registered_again_in_the_same_boot_is_not_lost(name: str) -> None:
    """As after `kubectl delete node`. It was lost as soon as the coordinator was not heard, if days later."""
    world = running_world()
    node, later = world.pods[name]["spec"]["nodeName"], build.stamp(world.now + timedelta(seconds=1))
    world.nodes[node]["metadata"] |= {"uid": "new", "creationTimestamp": later}
    heard(world, (0, 0), (2, 0), server=False)
    assert of_pods(world.reconcile()) == []
    world.report_age = 3600.0
    assert of_pods(world.reconcile()) == []
    assert restarts(world)["disruptions"] == world.status["parameterServers"]["restarts"] == 0


@pytest.mark.parametrize("later", ["planned", "waits for a node", "has a node"])
def test_server_whose_node_is_back_stays_unless_its_successor_has_a_node(later: str) -> None:
    """It was deleted while the successor waited for a node, and the job stood still for nothing."""
    world = running_world()
    world.now += timedelta(minutes=1)
    unknown(world, "safe-0", since=11)
    heard(world, (0, 0), (1, 0), (2, 0), server=False)
    if later == "planned":
        world.status = plan(world.observation()).status.model_dump(mode="json", by_alias=True)
    else:
        assert of_pods(world.reconcile()) == ["CreatePod digits-ps-0-1"]
    if later == "has a node":
        world.pods["digits-ps-0-1"]["spec"]["nodeName"] = "safe-1"
    world.nodes["safe-0"] = build.node_manifest("safe-0", spot=False)
    world.report = None
    world.settle()
    selected = world.services["digits-ps-0"]["spec"]["selector"]["shoal.dev/incarnation"]
    assert world.status["parameterServers"]["restarts"] == 1, "it is counted: counters only grow"
    if later == "has a node":
        assert (world.deleted, selected) == (["digits-ps-0-0"], "1")
    else:
        taken_back = ["digits-ps-0-1"] if later == "waits for a node" else []
        assert (world.deleted, selected) == (taken_back, "0")
        assert world.status["parameterServers"]["ready"] == 1
        assert world.condition("Disrupted")["status"] == "False"


def test_server_that_runs_stays_though_it_was_taken_back_as_it_was_seen_to_wait_for_a_node() -> None:
    """It had fenced its predecessor, and was deleted: no server was left."""
    world = running_world()
    world.now += timedelta(minutes=1)
    unknown(world, "safe-0", since=11)
    heard(world, (0, 0), (1, 0), (2, 0), server=False)
    assert of_pods(world.reconcile()) == ["CreatePod digits-ps-0-1"]
    world.nodes["safe-0"] = build.node_manifest("safe-0", spot=False)
    world.report = None
    made = plan(world.observation())
    world.status = made.status.model_dump(mode="json", by_alias=True)
    assert [
        (s["incarnation"], s["cause"]) for s in world.slots if s.get("role") == "ps" and s.get("cause")
    ] == [(1, "TakenBack")]
    world.pods["digits-ps-0-1"]["metadata"]["resourceVersion"] = "7"
    [removal] = [each for each in plan(world.observation()).actions if isinstance(each, DeletePod)]
    assert (removal.name, removal.version) == ("digits-ps-0-1", "7"), "as it was seen only"
    world.pods["digits-ps-0-1"]["spec"]["nodeName"] = "safe-1"
    world.pods["digits-ps-0-1"]["status"] = {"phase": "Running"}
    world.settle()
    assert world.deleted == ["digits-ps-0-0"]
    assert world.services["digits-ps-0"]["spec"]["selector"]["shoal.dev/incarnation"] == "1"


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(("age", "replaced"), [(45, False), (55, True), (70, True)])
def test_pod_that_was_bound_to_a_node_long_after_it_turned_unknown_proves_that_it_is_back(
    age: int, replaced: bool, told: bool
) -> None:
    """The watch of nodes is behind: the scheduler places no pod on a node that is Unknown."""
    world = running_world()
    unknown(world, "safe-0", since=60)
    world.report_age = 3600.0
    at = build.stamp(world.now - timedelta(seconds=age))
    if told:
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at}
        world.pods["digits-ps-0-0"]["status"]["conditions"] = [scheduled]
    else:
        world.pods["digits-ps-0-0"]["status"]["conditions"] = []
        world.pods["digits-ps-0-0"]["metadata"]["creationTimestamp"] = at
    assert (
        any(each.role == "ps" and each.cause for each in plan(world.observation()).status.slots) is replaced
    )


def test_pod_that_was_bound_after_its_node_turned_unknown_has_the_whole_patience() -> None:
    """After a blip of two seconds, the watch of nodes may be a few more behind that of pods."""
    world = running_world()
    world.now += timedelta(minutes=1)
    unknown(world, "spot-1", since=8)
    world.report_age = 3600.0
    at = build.stamp(world.now - timedelta(seconds=2))
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at}
    world.pods["digits-worker-1-0"]["status"]["conditions"] = [scheduled]
    made = world.reconcile()
    assert of_pods(made) == []
    assert made.wake_after == pytest.approx(3.0)
    world.now += timedelta(seconds=3)
    assert of_pods(world.reconcile()) == ["CreatePod digits-worker-1-1"]


@pytest.mark.parametrize("notice", [False, True])
def test_pod_that_was_bound_before_the_clock_was_set_back_is_not_taken_for_bound_since(notice: bool) -> None:
    """For as long as that, no loss of its node was believed, and no notice."""
    world = running_world()
    world.now += timedelta(minutes=1)
    if notice:
        world.notice("safe-0")
        said = world.nodes["safe-0"]["status"]["conditions"][0]
        said["lastTransitionTime"] = build.stamp(world.now - timedelta(seconds=6))
    else:
        unknown(world, "safe-0", since=11)
    heard(world, (0, 0), (1, 0), (2, 0), server=False)
    bound = {"type": "PodScheduled", "status": "True"}
    bound["lastTransitionTime"] = build.stamp(world.now + timedelta(hours=1))
    world.pods["digits-ps-0-0"]["status"]["conditions"] = [bound]
    world.reconcile()
    assert world.status["parameterServers"]["restarts"] == 1


def test_nodes_that_were_heard_again_before_the_clock_was_set_back_are_no_recent_ones() -> None:
    """The loss of one was suspected for as long as that."""
    silent, ahead = [timedelta(minutes=-5)], [timedelta(hours=1)] * 3
    assert suspected(4, silent, ahead) is None
    assert suspected(13, ahead) is None
    moments = [timedelta(seconds=5)] * 3  # as of a clock that somebody sets
    assert suspected(4, silent, moments) is not None


@pytest.mark.parametrize("name", ["safe-0", "spot-0"])
def test_node_that_turned_unknown_before_the_clock_was_set_back_is_not_waited_for_until_then(
    name: str,
) -> None:
    world = running_world()
    world.now += timedelta(minutes=1)
    unknown(world, name, since=-3600)
    world.report_age = 3600.0
    made = of_pods(world.reconcile())
    assert any(each.startswith("CreatePod") for each in made), made


@pytest.mark.parametrize("name", ["digits-ps-0-0", "digits-worker-1-0"])
def test_reboot_of_a_node_that_was_registered_again_is_one(name: str) -> None:
    """The record was of the node before: the new boot was taken for that in which the pod began."""
    world = running_world()
    node, made = world.pods[name]["spec"]["nodeName"], build.stamp(world.now - timedelta(seconds=30))
    world.nodes[node]["metadata"] |= {"uid": "new", "creationTimestamp": made}
    bound = {"type": "PodScheduled", "status": "True"}
    bound["lastTransitionTime"] = build.stamp(world.now - timedelta(seconds=20))
    world.pods[name]["status"]["conditions"] = [bound]
    world.reconcile()
    world.nodes[node]["status"]["nodeInfo"]["bootID"] = "boot-2"
    heard(world, (0, 0), (2, 0), server=False)
    assert f"DeletePod {name}" in of_pods(world.reconcile())


def test_after_a_pause_of_the_api_server_unknown_nodes_are_waited_for() -> None:
    world = running_world()
    unknown(world, "spot-0")
    heard(world, (1, 0), (2, 0))
    seen = replace(world.observation(), api_returned_seconds=5.0)
    made = plan(seen)
    assert of_pods(made) == []
    assert made.wake_after is not None
    assert made.status.condition("NodeSignalsSuspect").reason == "ControlPlaneReturned"  # type: ignore[union-attr]
    late = replace(seen, api_returned_seconds=61.0)
    assert of_pods(plan(late)) == ["CreatePod digits-worker-0-1"]


def test_a_new_leader_asks_the_coordinator_before_it_believes_that_a_node_is_gone() -> None:
    """It had no report yet, and replaced a worker that trained on."""
    world = running_world()
    unknown(world, "spot-1")
    world.pods["digits-ps-0-0"]["status"]["podIP"] = "10.0.0.1"
    first = replace(world.observation(), report=None)
    made = plan(first)
    assert of_pods(made) == []
    assert made.wake_after is not None
    assert made.wake_after <= 1.0
    assert made.status.restarts.disruptions == 0
    timed_out = plan(replace(first, unreachable_because="timed out", unreachable_seconds=3.0))
    assert of_pods(timed_out) == []
    assert timed_out.wake_after == 27.0, "as patient as with a report of that age"
    unreachable = replace(first, unreachable_because="connection refused", unreachable_seconds=30.0)
    assert of_pods(plan(unreachable)) == ["CreatePod digits-worker-1-1"]
    heard(world, (0, 0), (1, 0), (2, 0))
    assert of_pods(plan(world.observation())) == []


@pytest.mark.parametrize(("node", "role"), [("spot-1", "worker"), ("safe-0", "ps")])
def test_new_leader_that_has_not_asked_the_coordinator_withdraws_no_loss(node: str, role: str) -> None:
    """It counted it again a moment later, when it had."""
    world = running_world()
    world.now += timedelta(seconds=120)
    unknown(world, node, since=60)
    world.report_age = 3600.0
    counted = plan(world.observation()).status
    assert (counted.restarts.disruptions, counted.parameter_servers.restarts) == (
        (1, 0) if role == "worker" else (0, 1)
    )
    recorded = world.job.model_copy(update={"status": counted})
    world.pods["digits-ps-0-0"]["status"]["podIP"] = "10.0.0.1"
    first = plan(replace(world.observation(), job=recorded, report=None, first_look=True)).status
    assert [slot.cause for slot in first.slots if slot.cause] == ["NodeLost"]
    assert first.restarts.withdrawn is None


# --- absence is weak evidence -----------------------------------------------------------------------------------------


def test_recorded_pods_that_are_not_in_the_cache_are_asked_for_before_they_count() -> None:
    world = running_world()
    seen = world.observation()
    stale = replace(seen, pods=tuple(p for p in seen.pods if "-worker-" not in p.metadata.name))
    made = plan(stale)
    assert made.actions == tuple(ConfirmAbsent(f"digits-worker-{i}-0") for i in range(3))
    assert made.status.restarts.disruptions == 0
    assert made.status.slots == seen.job.status.slots
    gone = plan(replace(stale, gone_pods={"digits-worker-1-0": ""}))
    assert of_pods(gone) == ["CreatePod digits-worker-1-1"]
    assert gone.status.restarts.by_reason == {"Gone": 1}


def test_node_that_is_not_in_the_cache_is_asked_for_before_its_pods_are_lost() -> None:
    world = running_world()
    seen = world.observation()
    stale = replace(seen, nodes={k: v for k, v in seen.nodes.items() if k != "safe-0"})
    made = plan(stale)
    assert made.actions == (ConfirmAbsent("safe-0", "Node"),)
    assert made.status.parameter_servers.restarts == 0
    gone = plan(replace(stale, absent_nodes=frozenset({"safe-0"})))
    assert "DeletePod digits-ps-0-0" in of_pods(gone)


USER_ERROR = build.termination_message(Outcome.FAILED, reason="UserError", message="the mount is gone")


@pytest.mark.parametrize("phase", ["Running", "Failed"])
@pytest.mark.parametrize(
    ("code", "why", "message", "judged"),
    [
        (EXIT_USER, "Error", USER_ERROR, "UserError"),
        (137, "OOMKilled", "", "OOMKilled"),
        (143, "Error", "", "Killed"),
        (1, "Error", "", "Error"),
    ],
)
def test_the_end_of_a_pod_is_judged_once_it_is_known_whether_its_node_is_gone(
    code: int, why: str, message: str, judged: str, phase: str
) -> None:
    """`phase`: a sidecar may run on, or the kubelet be behind with it."""
    world = running_world()
    world.manifest["spec"]["runPolicy"] = {"backoffLimit": 0}
    world.reconcile()
    name = "digits-worker-0-0"
    world.end(name, code, why, message)
    world.pods[name]["status"]["phase"] = phase
    node = world.pods[name]["spec"]["nodeName"]
    seen = world.observation()
    asked = replace(seen, nodes={k: v for k, v in seen.nodes.items() if k != node})
    made = plan(asked)
    assert made.actions == (ConfirmAbsent(node, "Node"),)
    assert (made.status.phase, made.status.restarts.by_reason) == ("Running", {})
    gone = plan(replace(asked, absent_nodes=frozenset({node})))
    assert (gone.status.phase, gone.status.restarts.by_reason) == ("Running", {"NodeDeleted": 1})
    assert plan(seen).status.restarts.by_reason == {judged: 1}, "it is there"


def test_a_job_is_complete_though_the_node_of_server_0_is_being_asked_for() -> None:
    world = running_world()
    world.end("digits-ps-0-0", 0, "Completed", build.termination_message())
    seen = world.observation()
    made = plan(replace(seen, nodes={k: v for k, v in seen.nodes.items() if k != "safe-0"}))
    assert made.status.phase == "Succeeded"


# --- epochs -----------------------------------------------------------------------------------------------------------


def test_epoch_of_a_server_is_recorded_before_its_pod_is_created() -> None:
    world = running_world()
    world.kill_pod("digits-ps-0-0", 137)
    world.vanish("digits-ps-0-0")
    world.asked = {"digits-ps-0-0"}
    first = plan(world.observation())
    assert of_pods(first) == []
    assert [(s.incarnation, s.state) for s in first.status.slots if s.role == "ps"] == [(1, "Planned")]
    assert first.wake_after == 0.0
    recorded = world.job.model_copy(update={"status": first.status})
    second = plan(replace(world.observation(), job=recorded))
    assert of_pods(second) == ["CreatePod digits-ps-0-1"]


def test_first_server_that_an_earlier_leader_may_have_made_has_the_next_epoch() -> None:
    """Nothing tells of one that was deleted by force before a status was written: its process may run on."""
    job = build.job(parameterServers={"replicas": 2})
    assert {n for n in of_pods(plan(build.observe(job))) if "-ps-" in n} == {
        "CreatePod digits-ps-0-0",
        "CreatePod digits-ps-1-0",
    }
    first = build.pod("ps", 0, 0)
    asks = plan(build.observe(job, first, first_look=True))
    assert [a.name for a in asks.actions if isinstance(a, ConfirmAbsent)] == ["digits-ps-1-0"]
    assert [s.index for s in asks.status.slots if s.role == "ps"] == [0]
    ahead = plan(build.observe(job, first, first_look=True, gone_pods={"digits-ps-1-0": None}))
    assert not [each for each in of_pods(ahead) if "-ps-" in each]
    servers = [(s.index, s.incarnation, s.state) for s in ahead.status.slots if s.role == "ps"]
    assert servers == [(0, 0, "Running"), (1, 1, "Planned")]
    recorded = job.model_copy(update={"status": ahead.status})
    made = plan(build.observe(recorded, first))
    assert [each for each in of_pods(made) if "-ps-" in each] == ["CreatePod digits-ps-1-1"]


def test_first_server_that_is_being_made_is_waited_for() -> None:
    """It was recorded as given up, and deleted at work."""
    job = build.job()
    place = Place("ps", 0, 0)
    seen = plan(build.observe(job, first_look=True, in_flight=frozenset({place})))
    assert not [a for a in seen.actions if isinstance(a, ConfirmAbsent)]
    assert not [s for s in seen.status.slots if s.role == "ps"]


def test_new_leader_turns_no_service_before_it_has_stored_a_status() -> None:
    """The one that it read may be older, and the server to which it sent clients back is gone."""
    world = running_world()
    world.services["digits-ps-0"]["spec"]["selector"]["shoal.dev/incarnation"] = "1"
    seen = world.observation()
    first = plan(replace(seen, first_look=True))
    assert not [a for a in first.actions if isinstance(a, UpdateService)]
    assert first.wake_after is not None
    assert 0 < first.wake_after <= 1.0, "not in a loop, where the status needs no write"
    [turned] = [a for a in plan(seen).actions if isinstance(a, UpdateService)]
    assert (turned.name, turned.back_to) == ("digits-ps-0", "digits-ps-0-0")


def test_service_is_not_turned_back_to_a_server_that_is_not_there() -> None:
    """Another leader turned it to the next one, and died before the status said so."""
    world = running_world()
    world.services["digits-ps-0"]["spec"]["selector"]["shoal.dev/incarnation"] = "1"
    world.vanish("digits-ps-0-0")  # which the API server has not confirmed yet
    assert not [a for a in plan(world.observation()).actions if isinstance(a, UpdateService)]


def test_server_of_a_list_that_is_older_than_the_record_is_lost_to_nobody() -> None:
    """It was given up, its successor is recorded, and a new leader's watch of pods shows it still."""
    world = running_world()
    earlier = deepcopy(world.pods["digits-ps-0-0"])
    world.kill_pod("digits-ps-0-0", 137)
    world.vanish("digits-ps-0-0")
    world.asked = {"digits-ps-0-0"}
    first = plan(world.observation())
    counted = first.status.parameter_servers.restarts
    world.status = first.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    world.pods["digits-ps-0-0"] = earlier
    stale = plan(world.observation())
    assert [(s.incarnation, s.cause) for s in stale.status.slots if s.role == "ps"] == [
        (0, "TakenBack"),
        (1, ""),
    ]
    world.status = stale.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    world.vanish("digits-ps-0-0")
    world.settle()
    assert world.status["parameterServers"]["restarts"] == counted
    assert [n for n in world.pods if "-ps-" in n] == ["digits-ps-0-1"]


@pytest.mark.parametrize("ends", [True, False])
def test_worker_of_a_list_that_is_older_than_the_record_is_lost_to_nobody(ends: bool) -> None:
    """Whoever recorded its successor knew why it ended; a new leader's watch of pods shows it still."""
    world = running_world()
    earlier = deepcopy(world.pods["digits-worker-1-0"])
    world.vanish("digits-worker-1-0")
    world.settle()
    assert (world.status["restarts"]["disruptions"], "digits-worker-1-1" in world.pods) == (1, True)
    if ends:
        earlier["metadata"]["deletionTimestamp"] = build.stamp(world.now)
    world.pods["digits-worker-1-0"] = earlier
    del world.pods["digits-worker-1-1"]  # of which the watch has not told yet
    world.hush("digits-worker-1-0")
    stale = plan(world.observation()).status
    assert [(s.incarnation, s.cause) for s in stale.slots if s.index == 1] == [(0, "TakenBack"), (1, "")]
    assert stale.restarts.disruptions == 1


def test_worker_that_works_is_kept_though_only_its_successor_is_recorded() -> None:
    """Another leader made it moments before, and its successor waits for a node."""
    world = running_world()
    [slot] = [s for s in world.status["slots"] if s.get("role") != "ps" and s["index"] == 1]
    slot |= {"incarnation": 1, "state": "Starting"}
    seen = world.observation()
    waiting = build.pod(index=1, incarnation=1, node="", phase="Pending")
    made = plan(replace(seen, pods=(*seen.pods, waiting)))
    assert [a.name for a in made.actions if isinstance(a, DeletePod)] == ["digits-worker-1-1"]


def test_epoch_that_may_have_been_used_by_another_leader_is_not_used_again() -> None:
    world = running_world()
    world.vanish("digits-ps-0-0")
    world.asked = {"digits-ps-0-0"}
    planned = plan(world.observation()).status
    world.status = planned.model_dump(mode="json", by_alias=True, exclude_none=True)
    world.now += timedelta(seconds=11)  # its leader died; the pod was created and lost, or not
    world.reconcile()
    assert [n for n in world.pods if "-ps-" in n] == ["digits-ps-0-2"]


def test_planned_server_waits_for_the_quota_and_keeps_its_epoch() -> None:
    world = running_world()
    world.quota = 1
    world.vanish("digits-ps-0-0")
    world.reconcile()
    assert "digits-ps-0-1" not in world.pods
    made = world.reconcile()
    assert of_pods(made) == []  # not tried again at once
    assert 0 < (made.wake_after or 0) <= 5
    world.quota = None
    world.tick(seconds=30)
    world.settle()
    assert [n for n in world.pods if "-ps-" in n] == ["digits-ps-0-1"]


@pytest.mark.parametrize(
    "pod", [{}, {"phase": "Pending"}, {"phase": "Failed", "state": build.ended(1)}], ids=str
)
def test_pod_that_an_earlier_leader_made_and_that_appears_when_its_successor_runs_is_no_loss(
    pod: dict[str, Any],
) -> None:
    """Its request was under way when the new leader listed the pods, and left its number out."""
    world = running_world()
    for slot in world.status["slots"]:
        if slot.get("role") != "ps" and slot["index"] == 1:
            slot["incarnation"] = 1
    seen = world.observation()
    others = tuple(each for each in seen.pods if each.metadata.name != "digits-worker-1-0")
    successor = build.pod(index=1, incarnation=1, node="spot-1")
    made = plan(replace(seen, pods=(*others, build.pod(index=1, node="spot-4", **pod), successor)))
    assert made.status.restarts.disruptions == made.status.restarts.failures == 0
    assert not [each for each in made.actions if isinstance(each, CreatePod)]
    assert {(s.incarnation, s.cause) for s in made.status.slots if (s.role, s.index) == ("worker", 1)} == {
        (0, "TakenBack"),
        (1, ""),
    }


@pytest.mark.parametrize("deleting", [False, True], ids=["finished", "being deleted"])
def test_node_of_a_pod_that_is_stuck_is_asked_for_also_at_the_end_of_its_job(deleting: bool) -> None:
    """Nobody asked: the pod stayed, and with it the job."""
    slot = {"role": "worker", "index": 0, "incarnation": 0, "state": "Draining", "cause": "Unwanted"}
    slot |= {"node": "gone-0", "machine": "uid-gone-0/boot-1"}
    status = {
        "phase": "Running",
        "observedGeneration": 1,
        "slots": [slot],
        "startTime": build.stamp(build.NOW),
    }
    if not deleting:
        done = {"type": "Complete", "status": "True", "reason": "Trained", "message": ""}
        done["lastTransitionTime"] = status["completionTime"] = build.stamp(build.NOW)
        status |= {"phase": "Succeeded", "conditions": [done]}
    job = build.job(status)
    if deleting:
        ends = {"deletion_timestamp": build.stamp(build.NOW)}
        job = job.model_copy(update={"metadata": job.metadata.model_copy(update=ends)})
    pod = build.pod("worker", 0, 0, node="gone-0", deleting=build.NOW + timedelta(seconds=20))
    later = build.NOW + timedelta(hours=1)
    asks = plan(build.observe(job, pod, now=later))
    assert ConfirmAbsent("gone-0", "Node") in asks.actions
    knows = plan(build.observe(job, pod, now=later, absent_nodes=frozenset({"gone-0"})))
    assert [a.grace_seconds for a in knows.actions if isinstance(a, DeletePod)] == [0]
