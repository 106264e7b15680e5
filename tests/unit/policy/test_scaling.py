"""Which worker goes when there are too many, and what a finished or suspended job gives back."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.policy.actions import CreatePod, DeleteDisruptionBudget, DeletePod, UpdateService
from shoal.policy.plan import plan
from tests.unit.policy import build
from tests.unit.policy.world import World, running_world


def workers(world: World) -> list[str]:
    return sorted(n for n in world.pods if "-worker-" in n)


def scale(world: World, number: int) -> None:
    world.manifest["spec"]["workers"]["replicas"] = number


def test_draining_worker_goes_first() -> None:
    world = running_world()
    world.notice(world.pods["digits-worker-0-0"]["spec"]["nodeName"])
    world.reconcile()
    scale(world, 2)
    world.settle()
    assert workers(world) == ["digits-worker-1-0", "digits-worker-2-0"]


def test_silent_worker_goes_before_one_at_work() -> None:
    world = running_world(spot_nodes=3)
    world.hush("digits-worker-1-0")
    world.reconcile()
    scale(world, 2)
    world.settle()
    assert workers(world) == ["digits-worker-0-0", "digits-worker-2-0"]
    world.hush("digits-worker-1-0") if "digits-worker-1-0" in world.pods else None
    scale(world, 3)
    world.settle()
    assert len(workers(world)) == 3


def test_worker_whose_pod_failed_keeps_its_slot() -> None:
    """Slot 0 was given up: when worker 2 fails, it is replaced, and worker 0 does not come back for it."""
    world = running_world()
    world.notice(world.pods["digits-worker-0-0"]["spec"]["nodeName"])
    world.reconcile()
    scale(world, 2)
    world.settle()
    world.kill_pod("digits-worker-2-0", 1)
    for _ in range(4):
        world.reconcile()
        world.tick()
    world.settle()
    assert workers(world)[-1] == "digits-worker-2-1"
    assert "digits-worker-0-2" not in world.created
    assert world.status["restarts"]["failures"] == 1


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["", "notice", "vanish"])), max_size=8))
def test_number_of_workers_follows_the_spec(steps: list[tuple[int, str]]) -> None:
    world = running_world(spot_nodes=9)
    for number, fault in steps:
        if fault and workers(world):
            name = workers(world)[0]
            world.notice(world.pods[name]["spec"]["nodeName"]) if fault == "notice" else world.vanish(name)
        scale(world, number)
        world.reconcile()
        assert world.status["workers"]["desired"] == number
        world.heal()
        world.settle()
        assert len(workers(world)) == number


# --- given back -----------------------------------------------------------------------------------------------------


def finish(world: World) -> None:
    world.end("digits-ps-0-0", 0, "Completed", build.termination_message())


def test_finished_job_gives_its_services_back_and_says_so() -> None:
    world = running_world()
    finish(world)
    world.settle()
    assert not world.services
    assert world.status["released"] is True
    # A new leader, which knows nothing of what was deleted, sends nothing.
    again = replace(world.observation(), existing=frozenset())
    assert plan(again).actions == ()


def test_suspended_job_gives_its_services_back_and_is_not_asked_again() -> None:
    world = running_world()
    world.manifest["spec"]["suspend"] = True
    world.reconcile()
    assert world.condition("Suspended")["status"] == "False"
    assert world.status["phase"] == "Running"  # its servers save
    world.settle()
    assert world.condition("Suspended")["status"] == "True"
    assert world.status["phase"] == "Suspended"
    assert not world.services
    again = replace(world.observation(), existing=frozenset())
    assert not any(isinstance(a, DeleteDisruptionBudget) for a in plan(again).actions)
    world.manifest["spec"]["suspend"] = False
    world.settle()
    assert list(world.services) == ["digits-ps-0"]
    assert world.status["phase"] == "Running"


# --- other managers, other signals ----------------------------------------------------------------------------------


def test_fight_about_a_selector_is_bounded_and_told() -> None:
    world = running_world()

    def foreign() -> None:
        world.services["digits-ps-0"]["spec"]["selector"]["mesh"] = "on"

    def updates() -> int:
        return sum(isinstance(a, UpdateService) for a in plan(world.observation()).actions)

    foreign()
    assert updates() == 1
    made = plan(world.observation())
    world.status = made.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert world.condition("Degraded")["reason"] == "FieldConflict"
    assert "Service digits-ps-0" in world.condition("Degraded")["message"]
    assert updates() == 0
    world.now += timedelta(seconds=61)
    assert updates() == 1
    world.settle()
    assert world.condition("Degraded")["status"] == "False"


def test_server_on_a_node_that_karpenter_may_keep_stays_until_the_node_is_deleted() -> None:
    world = running_world()
    for node in ("safe-0", "spot-0"):
        world.nodes[node]["spec"]["taints"] = [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]
    made = world.reconcile()
    assert [a.name for a in made.actions if isinstance(a, CreatePod)] == ["digits-worker-0-1"]
    for _ in range(3):
        world.tick()
        world.reconcile()
    assert world.deleted == []  # Karpenter evicts them, or changes its mind
    for node in ("safe-0", "spot-0"):
        world.nodes[node]["spec"]["taints"] = []
    world.settle()
    assert world.deleted == ["digits-worker-0-0"]  # one of the two is too many
    world.nodes["safe-0"]["metadata"]["deletionTimestamp"] = build.stamp(world.now)
    made = world.reconcile()
    assert [a.name for a in made.actions if isinstance(a, DeletePod)] == ["digits-ps-0-0"]


def test_pod_stuck_on_a_dead_node_is_force_deleted_also_where_nodes_cannot_be_read() -> None:
    world = running_world()
    world.dead_nodes.add("spot-1")
    world.delete("digits-worker-1-0")
    for seconds, forced in ((79, False), (81, True)):
        later = build.NOW + timedelta(seconds=seconds) + (world.now - build.NOW)
        seen = replace(world.observation(), nodes={}, node_signals=False, now=later)
        found = [a for a in plan(seen).actions if isinstance(a, DeletePod) and a.grace_seconds == 0]
        assert [a.name for a in found] == (["digits-worker-1-0"] if forced else [])


def test_job_that_is_being_deleted_waits_for_no_pod_on_a_node_that_is_not_heard() -> None:
    """And for none of a coordinator that nobody asks any more. Kubernetes deletes the others."""
    world = running_world()
    node = world.pods["digits-worker-1-0"]["spec"]["nodeName"]
    world.delete("digits-worker-1-0")
    world.kill_node(node)
    world.manifest["metadata"]["deletionTimestamp"] = build.stamp(world.now)
    found = []
    for seconds in (0, 30, 120):
        later = world.now + timedelta(seconds=seconds)
        made = plan(replace(world.observation(), report=None, now=later))
        assert made.status == world.job.status
        assert made.wake_after is not None or made.actions
        found += [(seconds, each.name, each.grace_seconds) for each in made.actions]
    assert found == [(120, "digits-worker-1-0", 0)]


def test_pods_on_nodes_that_were_announced_to_go_do_not_use_up_max_surge() -> None:
    world = running_world(workers=4, spot_nodes=8, surge=1)
    for index in range(4):
        world.notice(world.pods[f"digits-worker-{index}-0"]["spec"]["nodeName"])
    made = world.reconcile()
    assert [a.name for a in made.actions if isinstance(a, CreatePod)] == [
        f"digits-worker-{index}-1" for index in range(4)
    ]


@pytest.mark.parametrize("phase", ["Pending", "Running"])
def test_phase_says_whether_the_job_trains(phase: str) -> None:
    world = running_world()
    if phase == "Pending":
        scale(world, 0)
        world.settle()
        assert (world.status["phase"], world.status["reason"]) == ("Pending", "NoWorkers")
        assert "raise workers.replicas" in world.condition("Running")["message"]
        return
    fresh = World()
    fresh.report = build.report(step=0)
    fresh.settle()
    assert fresh.status["workers"]["ready"] == 3
    assert fresh.status["phase"] == "Starting"  # containers run, nothing was trained
    fresh.report = build.report(step=1)
    fresh.settle()
    assert fresh.status["phase"] == "Running"


def test_missing_volume_claim_is_told_at_once() -> None:
    message = 'persistentvolumeclaim "runs" not found'
    unschedulable = [{"type": "PodScheduled", "status": "False", "message": message}]
    pod = build.pod("ps", phase="Pending", node=None, state={}, conditions=unschedulable)
    degraded = plan(build.observe(build.job(), pod)).status.condition("Degraded")
    assert degraded is not None
    assert degraded.reason == "Unschedulable"
    assert "create this PersistentVolumeClaim" in degraded.message


def test_restart_from_nothing_is_counted_and_told() -> None:
    world = running_world()
    world.report = build.report(step=8355)
    world.reconcile()
    world.report = build.report(step=12, restarted_from_nothing=1)
    made = world.reconcile()
    assert world.status["training"]["step"] == 12
    assert world.status["training"]["restartsFromNothing"] == 1
    assert "TrainingRestarted" in {event.reason for event in made.events}
    world.report = build.report(step=10, restarted_from_nothing=1)
    world.reconcile()
    assert world.status["training"]["step"] == 12


def test_metrics_of_the_trainer_are_bounded() -> None:
    world = running_world()
    world.report = build.report(metrics={f"m{i:03}": 1.0 for i in range(5000)} | {"x" * 500: 1.0})
    world.reconcile()
    assert len(world.status["training"]["metrics"]) == 64
    assert "m000" in world.status["training"]["metrics"]


def test_status_of_a_large_job_is_small_and_its_conditions_do_not_churn() -> None:
    world = World(workers=200, spot_nodes=0, spec={"workers": {"replicas": 200, "maxSurge": "25%"}})
    world.nodes |= {f"spot-{i}": build.node_manifest(f"spot-{i}") for i in range(200)}
    world.settle()
    text = world.job.status.model_dump_json(by_alias=True, exclude_none=True, include={"slots"})
    assert len(text) < 55 * 201  # bytes
    conditions = world.status["conditions"]
    world.notice("spot-7")
    world.reconcile()
    changed = [c["type"] for c in world.status["conditions"] if c not in conditions]
    assert changed == ["Disrupted", "Reconciling"]


def test_records_to_which_nothing_happened_are_kept_as_they_are() -> None:
    """The cost of a plan follows what changed."""
    world = World(workers=50, spot_nodes=60, spec={"workers": {"replicas": 50, "maxSurge": 1}}).settled()
    world.kill_pod("digits-worker-7-0", 1)
    seen = world.observation()
    before = {slot.place: slot for slot in seen.job.status.slots}
    after = plan(seen).status.slots
    changed = [slot.index for slot in after if slot is not before.get(slot.place)]
    assert changed == [7]
