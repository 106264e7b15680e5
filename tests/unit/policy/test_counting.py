"""What counts against the limits of a job: withdrawn notices, and exits that a node explains, do not."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from shoal.policy.decide.completion import NODE_PATIENCE
from shoal.policy.facts.signals import Meaning, node_signal
from shoal.policy.facts.verdict import PodOutcome, judge
from shoal.policy.plan import plan
from shoal_trainer.contract import Outcome, WorkerReport, WorkerState
from tests.unit.policy import build
from tests.unit.policy.test_disruption import SLOT
from tests.unit.policy.world import World, running_world


def test_withdrawn_notices_do_not_use_up_max_disruptions() -> None:
    world = running_world(spot_nodes=3, spec={"runPolicy": {"maxDisruptions": 1}})
    node = world.pods["digits-worker-1-0"]["spec"]["nodeName"]
    for _ in range(4):  # the container runtime restarts
        world.taint(node)
        world.reconcile()
        world.tick()
        world.taint(node, on=False)
        world.settle()
    assert world.status["phase"] == "Running"
    assert world.status["restarts"]["withdrawn"] == world.status["restarts"]["disruptions"] == 4
    world.kill_pod("digits-worker-0-0", 137)
    world.settle()
    assert world.status["phase"] == "Running"
    world.vanish("digits-worker-1-0")
    world.settle()
    assert world.status["reason"] == "MaxDisruptionsExceeded"


def test_announced_disruption_counts_against_the_limit_when_it_comes() -> None:
    world = running_world(spec={"runPolicy": {"maxDisruptions": 0}})
    world.notice("spot-0")
    world.reconcile()
    assert world.status["phase"] == "Running"
    world.tick()
    world.reconcile()
    assert world.status["reason"] == "MaxDisruptionsExceeded"


def shuts_down(world: World, node: str, at: int) -> None:
    """The node says that it has been shutting down for so many seconds."""
    since = build.stamp(world.now - timedelta(seconds=at))
    world.notice(node)
    world.nodes[node]["status"]["conditions"][0] |= {"lastTransitionTime": since}


@pytest.mark.parametrize(
    ("reason", "seconds", "excused"),
    [
        ("Error", 2, 1),
        ("Error", 90, None),
        ("DiskFull", 2, 1),
        ("CallbackOutage", 2, 1),
        ("OutOfMemory", 2, None),
    ],
)
def test_failure_shortly_before_the_node_ends_is_excused(
    reason: str, seconds: int, excused: int | None
) -> None:
    """Where the node may have caused it."""
    world = running_world(spec={"runPolicy": {"backoffLimit": 0}})
    world.manifest["spec"]["runPolicy"]["backoffLimit"] = 1
    node = world.pods["digits-worker-0-0"]["spec"]["nodeName"]
    world.end("digits-worker-0-0", 1, message=build.termination_message(Outcome.FAILED, reason=reason))
    world.reconcile()
    assert world.status["restarts"]["byReason"] == {reason: 1}
    world.now += timedelta(seconds=seconds)
    shuts_down(world, node, at=0)
    world.reconcile()
    assert world.status["restarts"].get("excused") == excused
    world.settle()
    world.kill_pod("digits-worker-1-0", 1)
    world.reconcile()
    world.now += NODE_PATIENCE
    world.reconcile()
    assert (world.status["phase"] == "Failed") is (excused is None)


@pytest.mark.parametrize(("seconds", "ends"), [(0.5, False), (9.0, False), (11.0, True)])
def test_a_failure_whose_node_may_be_ending_ends_no_job_at_once(seconds: float, ends: bool) -> None:
    """A pod is seen to fail before its node is seen to go, and the end of a job cannot be taken back."""
    world = running_world(spec={"runPolicy": {"backoffLimit": 0}})
    node = world.pods["digits-worker-0-0"]["spec"]["nodeName"]
    world.end("digits-worker-0-0", 1)
    wake = world.reconcile().wake_after
    assert world.status["phase"] != "Failed"
    assert wake is not None
    assert wake <= NODE_PATIENCE.total_seconds()
    world.now += timedelta(seconds=seconds)
    world.reconcile()
    shuts_down(world, node, at=0)
    world.settle()
    assert (world.status["phase"] == "Failed") is ends
    assert world.status["restarts"].get("excused") == (None if ends else 1)


def test_a_leader_that_waits_for_a_node_has_decided_about_no_worker() -> None:
    """A name that an earlier leader may have used, and not recorded, is not used again."""
    world = running_world(spec={"runPolicy": {"backoffLimit": 0}})
    world.end("digits-worker-0-0", 1)
    assert plan(replace(world.observation(), first_look=True)).looked_at == frozenset()


def test_a_failure_that_no_node_causes_ends_a_job_at_once() -> None:
    world = running_world(spec={"runPolicy": {"backoffLimit": 0}})
    world.kill_pod("digits-worker-0-0", 137, reason="OOMKilled")
    world.reconcile()
    assert world.status["phase"] == "Failed"


def test_kills_in_a_row_go_by_how_long_the_container_ran_and_not_by_the_age_of_its_pod() -> None:
    """A pod may wait for its node and its image for longer than what is steady."""
    world = running_world(workers=1)
    for incarnation in range(4):
        name = f"digits-worker-0-{incarnation}"
        world.now += timedelta(minutes=15)
        world.kill_pod(name, 137)
        ended = world.pods[name]["status"]["containerStatuses"][0]["state"]["terminated"]
        ended["startedAt"] = build.stamp(world.now - timedelta(seconds=1))
        ended["finishedAt"] = build.stamp(world.now)
        world.reconcile()
        for seconds in (70, 2, 2):  # it is made, has a node, and runs
            world.tick(seconds)
            world.reconcile()
    assert world.status["restarts"]["byReason"] == {"Killed": 3, "KilledRepeatedly": 1}


def runs_out_of_memory(world: World, pod: str, kernel: bool) -> None:
    message = build.termination_message(Outcome.FAILED, reason="OutOfMemory")
    world.kill_pod(pod, 137, reason="OOMKilled") if kernel else world.end(pod, 1, message=message)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize(("pushed", "excused"), [(None, False), (1.0, True)])
def test_a_worker_without_enough_memory_does_not_end_a_job_that_others_can_run(
    kernel: bool, pushed: float | None, excused: bool
) -> None:
    world = running_world(spec={"runPolicy": {"backoffLimit": 1}})
    for number in range(4):
        others = (WorkerReport(slot=0, incarnation=0, state=WorkerState.ACTIVE, first_push_at=pushed),)
        world.report, world.report_age = build.report().model_copy(update={"workers": others}), 1.0
        newest = f"digits-worker-2-{number}"
        if newest not in world.pods:
            break
        runs_out_of_memory(world, newest, kernel)
        world.reconcile()
        world.now += timedelta(hours=1)
        world.settle()
    assert (world.status["phase"] == "Running") is excused
    reason = "OOMKilled" if kernel else "OutOfMemory"
    counted = 4 if excused else 2
    assert world.status["restarts"]["byReason"] == {reason: counted}
    assert world.status["restarts"].get("excused") == (counted if excused else None)


def test_the_last_one_without_enough_memory_counts() -> None:
    """Nobody else trains."""
    world = running_world(spec={"runPolicy": {"backoffLimit": 0}})
    world.report = build.report().model_copy(
        update={
            "workers": (WorkerReport(slot=2, incarnation=0, state=WorkerState.ACTIVE, first_push_at=1.0),)
        }
    )
    runs_out_of_memory(world, "digits-worker-2-0", kernel=False)
    world.reconcile()
    assert world.status["phase"] == "Failed"


def test_a_server_without_enough_memory_ends_the_job_though_workers_train() -> None:
    """What they have says nothing about what it needs."""
    world = running_world(spec={"runPolicy": {"backoffLimit": 1}})
    trains = WorkerReport(slot=1, incarnation=0, state=WorkerState.ACTIVE, first_push_at=1.0)
    world.report = build.report().model_copy(update={"workers": (trains,)})
    world.report_age = 1.0
    for number in range(4):
        if (newest := f"digits-ps-0-{number}") not in world.pods:
            break
        runs_out_of_memory(world, newest, kernel=True)
        world.reconcile()
        world.now += timedelta(hours=1)
        world.settle()
    assert world.status["phase"] == "Failed"
    assert world.status["restarts"].get("excused") is None


def exit_of(seconds_ago: int, **how: Any) -> Any:
    at = build.stamp(build.NOW - timedelta(seconds=seconds_ago))
    state = build.ended(1, **how)
    state["terminated"]["finishedAt"] = at
    return build.pod(phase="Failed", state=state, created=build.NOW - timedelta(hours=2))


@pytest.mark.parametrize(
    ("seconds_ago", "outcome"),
    [(100, PodOutcome.DISRUPTED), (3600 - 121, PodOutcome.FAILED), (3600 + 61, PodOutcome.FAILED)],
)
def test_old_signal_of_a_node_does_not_explain_an_exit(seconds_ago: int, outcome: PodOutcome) -> None:
    """It explains ends from 120 s after it to 60 s before."""
    since = build.NOW - timedelta(seconds=50 if seconds_ago == 100 else 3600)
    taint = {"key": "node.kubernetes.io/out-of-band", "effect": "NoExecute"}
    ready = {"type": "Ready", "status": "False", "message": "node is shutting down"}
    node = build.node(taints=[taint], conditions=[ready | {"lastTransitionTime": build.stamp(since)}])
    signal = node_signal(node, SLOT)
    assert signal is not None
    assert judge(exit_of(seconds_ago), SLOT, signal).outcome is outcome


def test_pod_that_tolerates_a_taint_is_not_disrupted_by_it() -> None:
    """A user's bug on such a node is a failure, however often it is tried there."""
    key = "aws-node-termination-handler/scheduled-maintenance"
    node = build.node(taints=[{"key": key, "effect": "NoSchedule"}])
    pod = build.pod()
    tolerations = build.Pod.model_validate(
        {**build.pod_manifest(), "spec": {"nodeName": "spot-0", "tolerations": [{"operator": "Exists"}]}}
    ).spec.tolerations
    for given, meaning in ((pod.spec.tolerations, Meaning.LEAVING), (tolerations, Meaning.AT_RISK)):
        signal = node_signal(node, SLOT, given)
        assert signal is not None
        assert signal.meaning is meaning


@pytest.mark.parametrize("code", [139, 137, 143, 1])
def test_reported_user_error_is_fatal_whatever_the_exit_code(code: int) -> None:
    """The interpreter may crash while it ends."""
    words = build.termination_message(
        Outcome.FAILED, reason="UserError", message="my parser met a broken record"
    )
    world = running_world()
    world.end("digits-worker-0-0", code, message=words)
    world.reconcile()
    assert (world.status["phase"], world.status["reason"]) == ("Failed", "UserError")


@pytest.mark.parametrize(
    ("reason", "meaning"),
    [("FreezeScheduled", Meaning.AT_RISK), ("PreemptScheduled", Meaning.LEAVING), ("", Meaning.LEAVING)],
)
def test_frozen_virtual_machine_is_left_alone(reason: str, meaning: Meaning) -> None:
    condition = {"type": "VMEventScheduled", "status": "True", "reason": reason}
    signal = node_signal(build.node(conditions=[condition]), SLOT)
    assert signal is not None
    assert signal.meaning is meaning


def seconds_until(world: World, name: str) -> float:
    """How long it takes until there is a pod of this name, which then runs."""
    began = world.now
    world.reconcile()
    while name not in world.pods:
        world.now += timedelta(seconds=1)
        world.reconcile()
    waited = (world.now - began).total_seconds()
    world.settle()
    return waited


def test_worker_that_fails_again_and_again_waits_at_most_a_minute() -> None:
    world = running_world()
    waits = []
    for incarnation in range(9):
        world.kill_pod(f"digits-worker-0-{incarnation}", 1)
        waits.append(seconds_until(world, f"digits-worker-0-{incarnation + 1}"))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_worker_that_is_preempted_again_and_again_waits_longer() -> None:
    world = running_world()
    waits = []
    for incarnation in range(4):
        name = f"digits-worker-0-{incarnation}"
        world.tick()
        world.pods[name]["status"]["conditions"].append(
            {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
        )
        world.taken.add(name)
        world.end(name, 143)
        world.pods[name]["status"]["conditions"].append(
            {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
        )
        waits.append(seconds_until(world, f"digits-worker-0-{incarnation + 1}"))
    assert waits == [5, 10, 20, 20]  # seconds; the room may come back at any time
    assert world.status["restarts"]["failures"] == 0
