"""A worker's state changes only on evidence: exit code 0, silence, fences, withdrawn notices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.api.kube import Pod
from shoal.policy.actions import CreatePod
from shoal.policy.facts.coordinator import FRESH_REPORT_SECONDS
from shoal.policy.model import Plan
from shoal.policy.plan import plan
from tests.unit.policy import build
from tests.unit.policy.world import World, running_world


def made(plan_: Plan) -> list[str]:
    return [a.name for a in plan_.actions if isinstance(a, CreatePod)]


def slot(world: World, index: int, incarnation: int = 0) -> dict[str, Any]:
    key = ("worker", index, incarnation)
    return next(s for s in world.slots if (s["role"], s["index"], s["incarnation"]) == key)


def by_reason(world: World) -> dict[str, int]:
    return dict(world.status["restarts"]["byReason"])


# --- exit 0 ----------------------------------------------------------------------------------------------------------


def test_exit_0_without_a_fresh_report_is_not_a_failure() -> None:
    world = running_world(workers=8, spot_nodes=8, spec={"runPolicy": {"backoffLimit": 3}})
    for i in range(3):
        world.kill_pod(f"digits-worker-{i}-0", 0)
    world.report_age = FRESH_REPORT_SECONDS + 1
    world.reconcile()
    for _ in range(10):
        world.tick(seconds=31)
        assert made(world.reconcile()) == []
    assert world.status["phase"] == "Running"
    assert world.status["restarts"]["failures"] == 0

    world.report_age, world.report = 0.0, build.report(phase="Training")  # it reports again, and work remains
    assert made(world.reconcile()) == [f"digits-worker-{i}-1" for i in range(3)]
    assert by_reason(world) == {"ExitedEarly": 3}


def test_exit_0_is_early_only_after_the_patience() -> None:
    world = running_world()
    world.kill_pod("digits-worker-0-0", 0)
    world.reconcile()
    world.tick(seconds=29)
    world.reconcile()
    assert by_reason(world) == {}


def test_pod_of_the_last_failure_is_kept_for_its_logs_though_it_was_killed() -> None:
    """The status names it, and says to look at them."""
    world = running_world(workers=1)
    for incarnation in range(4):
        world.kill_pod(f"digits-worker-0-{incarnation}", 137)
        world.reconcile()
        for seconds in (70, 2, 2):  # it is made, has a node, and runs
            world.tick(seconds)
            world.reconcile()
    last = world.status["lastFailure"]
    assert (last["reason"], last["pod"]) == ("KilledRepeatedly", "digits-worker-0-3")
    killed = {name for name, pod in world.pods.items() if pod["status"]["phase"] == "Failed"}
    assert killed == {last["pod"]}


@pytest.mark.parametrize("age", [0.0, 3600.0])
def test_exit_0_of_server_0_is_early_after_the_patience(age: float) -> None:
    world = running_world()
    world.end("digits-ps-0-0", 0, "Completed")
    world.report_age = age
    world.reconcile()
    world.tick(seconds=31)
    world.reconcile()
    assert world.status["lastFailure"]["reason"] == "ExitedEarly"


# --- silence ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coordinator", ["unreachable", "restarted"])
def test_silent_worker_stays_silent_until_reported_active(coordinator: str) -> None:
    world = running_world(spot_nodes=3)  # no room for the replacement
    world.hush("digits-worker-0-0")
    assert made(world.reconcile()) == ["digits-worker-0-1"]
    if coordinator == "unreachable":
        world.report_age = FRESH_REPORT_SECONDS + 1
    else:
        world.report = build.report(phase="Starting")
    for _ in range(3):
        world.tick()
        world.reconcile()
    assert world.deleted == []
    assert slot(world, 0)["state"] == "Silent"
    assert slot(world, 0, 1).get("cause", "") == ""

    world.report, world.report_age = build.report(active=[(0, 0), (1, 0), (2, 0)]), 0.0
    world.reconcile()
    assert world.deleted == ["digits-worker-0-1"]
    assert slot(world, 0)["state"] == "Running"


def test_active_replacement_does_not_make_the_silent_worker_active() -> None:
    world = running_world(spot_nodes=3)
    world.hush("digits-worker-0-0")
    world.reconcile()
    world.report = build.report(active=[(0, 1), (1, 0), (2, 0)])
    world.reconcile()
    assert slot(world, 0)["state"] == "Silent"


# --- fences ---------------------------------------------------------------------------------------------------------


def test_fenced_worker_is_deleted_before_its_replacement_runs() -> None:
    world = running_world(spot_nodes=3)
    world.fenced.add("digits-worker-0-0")
    world.reconcile()
    assert "digits-worker-0-0" in world.deleted
    assert by_reason(world) == {"Silent": 1}
    world.settle()
    assert "digits-worker-0-0" not in world.pods
    assert world.pods["digits-worker-0-1"]["status"]["phase"] == "Running"
    assert by_reason(world) == {"Silent": 1}
    assert world.deleted == ["digits-worker-0-0"]


def test_silent_worker_is_kept_until_its_replacement_runs() -> None:
    world = running_world(spot_nodes=3)
    world.hush("digits-worker-0-0")
    for _ in range(5):
        world.reconcile()
        world.tick()
    assert world.deleted == []
    assert by_reason(world) == {}


def test_fenced_worker_with_a_counted_notice_is_not_counted_again() -> None:
    world = running_world(spot_nodes=3)
    node = world.pods["digits-worker-0-0"]["spec"]["nodeName"]
    world.taint(node)
    world.reconcile()
    world.fenced.add("digits-worker-0-0")
    world.taint(node, on=False)
    world.reconcile()
    assert "digits-worker-0-0" in world.deleted
    assert by_reason(world) == {"ScaledDownByAutoscaler": 1}


# --- withdrawn notices --------------------------------------------------------------------------------------


def test_withdrawn_notice_keeps_the_worker_and_deletes_its_replacement() -> None:
    world = running_world(spot_nodes=3)  # no room for the replacement but on the worker's node
    node = world.pods["digits-worker-1-0"]["spec"]["nodeName"]
    world.taint(node)
    assert made(world.reconcile()) == ["digits-worker-1-1"]
    assert slot(world, 1)["cause"] == "ScaledDownByAutoscaler"
    world.tick()
    world.taint(node, on=False)
    world.reconcile()
    world.settle()
    assert "digits-worker-1-0" in world.pods
    assert "digits-worker-1-1" not in world.pods
    assert slot(world, 1)["state"] == "Running"
    assert "endedAt" not in slot(world, 1)
    assert by_reason(world) == {"ScaledDownByAutoscaler": 1}
    assert world.status["workers"]["ready"] == 3
    assert world.deleted == ["digits-worker-1-1"]


def test_withdrawn_notice_is_ignored_once_the_replacement_runs() -> None:
    world = running_world(spot_nodes=5)
    node = world.pods["digits-worker-1-0"]["spec"]["nodeName"]
    world.taint(node)
    world.reconcile()
    world.tick()
    world.tick()
    assert world.pods["digits-worker-1-1"]["status"]["phase"] == "Running"
    world.taint(node, on=False)
    world.reconcile()
    world.settle()
    assert "digits-worker-1-0" not in world.pods
    assert world.deleted == ["digits-worker-1-0"]
    assert by_reason(world) == {"ScaledDownByAutoscaler": 1}


def test_unreadable_nodes_do_not_withdraw_a_notice() -> None:
    world = running_world(spot_nodes=3)
    world.taint(world.pods["digits-worker-1-0"]["spec"]["nodeName"])
    world.reconcile()
    seen = world.observation()
    more = {"services": seen.services, "existing": seen.existing, "now": world.now, "report": seen.report}
    blind = plan(build.observe(seen.job, *seen.pods, nodes={}, node_signals=False, **more))
    assert blind.actions == ()
    assert [s.cause for s in blind.status.slots if (s.role, s.index, s.incarnation) == ("worker", 1, 0)] == [
        "ScaledDownByAutoscaler"
    ]


flaps = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 3)), max_size=12)


@settings(max_examples=examples(100), deadline=None)
@given(flaps, st.integers(0, 2), st.integers(3, 5))
def test_flapping_taint_creates_and_deletes_at_most_one_pod_each_time(
    steps: list[tuple[int, bool, int]], surge: int, nodes: int
) -> None:
    world = running_world(surge=surge, spot_nodes=nodes)
    before, tainted, times = len(world.created), set[str](), 0
    for node, on, ticks in steps:
        name = f"spot-{node}"
        workers = sum(p["spec"]["nodeName"] == name for p in world.pods.values())
        times += workers if on and name not in tainted else 0
        (tainted.add if on else tainted.discard)(name)
        world.taint(name, on=on)
        world.reconcile()
        for _ in range(ticks):
            world.tick()
            world.reconcile()
    for name in tainted:
        world.taint(name, on=False)
    world.settle()
    assert len(world.created) - before <= times
    assert len(world.deleted) == len(set(world.deleted)) == len(world.created) - before
    workers = [n for n in world.pods if "-worker-" in n]
    assert sorted(n.rsplit("-", 1)[0] for n in workers) == [f"digits-worker-{i}" for i in range(3)]
    assert by_reason(world).get("ScaledDownByAutoscaler", 0) <= times
    assert world.status["workers"]["ready"] == 3


def test_coordinator_that_cannot_be_reached_is_a_condition() -> None:
    """B14: a NetworkPolicy silently removed the detection of silent workers."""
    job = build.job(status={"startTime": build.stamp(build.NOW)})
    pods = (build.pod("ps"), build.pod("worker"))
    reached = plan(build.observe(job, *pods, unreachable_seconds=59.0, unreachable_because="timeout"))
    degraded = reached.status.condition("Degraded")
    assert degraded is None or degraded.status == "False"
    lost = plan(build.observe(job, *pods, unreachable_seconds=61.0, unreachable_because="timeout"))
    degraded = lost.status.condition("Degraded")
    assert degraded is not None
    assert (degraded.status, degraded.reason) == ("True", "CoordinatorUnreachable")
    assert "7071" in degraded.message
    assert "timeout" in degraded.message


def test_server_that_serves_nothing_yet_waits_for_the_storage() -> None:
    """Its port is closed to everybody, so the NetworkPolicies of the namespace are not to blame."""
    job = build.job(status={"startTime": build.stamp(build.NOW)})
    server = build.pod_manifest("ps")
    server["status"]["conditions"][0]["status"] = "False"
    pods = (Pod.model_validate(server), build.pod("worker"))
    words = "waiting for the storage: there is no such bucket"
    made = plan(build.observe(job, *pods, unreachable_seconds=61.0, unreachable_because=words))
    degraded = made.status.condition("Degraded")
    assert degraded is not None
    assert (degraded.status, degraded.reason) == ("True", "WaitingForStorage")
    assert "kubectl logs digits-ps-0-0 -c ps" in degraded.message
    assert words in degraded.message, "only the log said it"
