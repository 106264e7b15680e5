"""Suspending and resuming a job."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from shoal.api.labels import Place
from shoal.manifests import names
from shoal.policy.actions import DeletePod
from shoal.policy.plan import plan
from tests.unit.policy import build
from tests.unit.policy.world import running_world


def test_job_created_suspended_creates_no_pods() -> None:
    made = plan(build.observe(build.job(suspend=True)))
    assert made.actions == ()
    assert made.status.phase == "Suspended"


def test_suspending_deletes_workers_before_servers_and_counts_nothing() -> None:
    world = running_world()
    world.manifest["spec"]["suspend"] = True
    made = world.reconcile()
    assert {a.name for a in made.actions if isinstance(a, DeletePod)} == {
        f"digits-worker-{i}-0" for i in range(3)
    }
    assert made.status.reason == ""
    assert world.condition("Running")["reason"] == "Suspended", "nobody has to raise workers.replicas"
    world.settle()
    assert not world.pods
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}
    assert world.condition("Suspended")["reason"] == "Suspended"
    world.manifest["spec"]["suspend"] = False
    assert "Resumed" in {e.reason for e in world.reconcile().events}
    world.settle()
    assert "digits-ps-0-1" in world.pods


def test_what_was_given_up_and_is_wanted_again_replaces_nothing() -> None:
    """Suspended and resumed, or scaled down and up; a loss meanwhile is told as ever."""
    world = running_world()
    told: list[str] = []

    def settle() -> None:
        for _ in range(20):
            told.extend(event.reason for event in world.reconcile().events)
            assert world.condition("Disrupted").get("status", "False") == "False"
            world.tick()

    world.manifest["spec"]["suspend"] = True
    settle()
    world.manifest["spec"]["suspend"] = False
    settle()
    world.manifest["spec"]["workers"]["replicas"] = 1
    settle()
    world.manifest["spec"]["workers"]["replicas"] = 3
    settle()
    assert sorted(told) == ["Resumed", "ScaledDown", "ScaledUp", "Suspended"]
    world.vanish("digits-worker-2-2")
    made = world.settle()
    assert "digits-worker-2-3" in world.pods
    assert made.status.restarts.disruptions == 1


def test_suspending_deletes_shard_0_before_the_other_shards() -> None:
    world = running_world(servers=2)
    world.manifest["spec"]["suspend"] = True
    world.reconcile()
    world.tick()
    made = world.reconcile()
    assert [a.name for a in made.actions if isinstance(a, DeletePod)] == ["digits-ps-0-0"]
    world.tick()
    made = world.reconcile()
    assert [a.name for a in made.actions if isinstance(a, DeletePod)] == ["digits-ps-1-0"]


def test_shard_0_that_does_not_end_does_not_block_the_suspension() -> None:
    world = running_world(servers=2)
    world.stuck = {"digits-ps-0-0"}
    world.manifest["spec"]["suspend"] = True
    world.settle()
    assert not world.pods["digits-ps-1-0"]["metadata"].get("deletionTimestamp")  # it may still save
    world.now += timedelta(seconds=150)
    world.settle()
    assert world.pods.keys() == {"digits-ps-0-0"}


def test_job_is_not_suspended_while_pods_are_being_made() -> None:
    world = running_world()
    nothing = replace(world.observation(), pods=(), services={}, existing=frozenset())
    nothing = replace(nothing, job=build.job(world.status, suspend=True))
    for made, told in ((frozenset[Place](), "Suspended"), (frozenset({Place("worker", 0, 0)}), "Suspending")):
        suspended = plan(replace(nothing, in_flight=made)).status.condition("Suspended")
        assert suspended is not None
        assert suspended.reason == told


def test_suspended_job_has_no_disruption_budget() -> None:
    world = running_world(servers=2)
    budget = names.budget_name(world.job)
    assert budget in world.existing
    world.manifest["spec"]["suspend"] = True
    world.reconcile()
    assert budget in world.existing  # servers run
    world.settle()
    assert budget not in world.existing
    world.manifest["spec"] |= {"suspend": False}
    world.settle()
    assert budget in world.existing


def test_worker_that_does_not_end_does_not_block_the_suspension() -> None:
    world = running_world()
    world.stuck = {"digits-worker-0-0"}
    world.manifest["spec"]["suspend"] = True
    world.settle()
    assert "digits-ps-0-0" in world.pods  # the worker may still push
    world.now += timedelta(seconds=26)
    world.settle()
    assert world.pods.keys() == {"digits-worker-0-0"}


def test_suspended_job_has_no_speed() -> None:
    world = running_world()
    world.report = build.report(step=10, samples_per_second=100.0, remaining_seconds=60.0, input_wait=0.5)
    world.reconcile()
    assert world.status["training"]["samplesPerSecond"] == "100"
    world.manifest["spec"]["suspend"] = True
    world.settle()
    assert not world.status["training"].keys() & {"samplesPerSecond", "remainingSeconds", "inputWait"}
    assert world.status["training"]["step"] == 10


def test_pod_kept_for_its_logs_does_not_keep_the_job_suspending() -> None:
    world = running_world()
    world.end("digits-worker-0-0", 1)
    world.settle()
    world.manifest["spec"]["suspend"] = True
    world.settle()
    assert set(world.pods) == {"digits-worker-0-0"}
    assert world.condition("Suspended")["reason"] == "Suspended"


def test_resumed_job_has_its_whole_progress_deadline() -> None:
    world = running_world(spec={"runPolicy": {"progressDeadlineSeconds": 60}})
    world.manifest["spec"]["suspend"] = True
    world.settle()
    world.tick(2 * 86400)
    world.manifest["spec"]["suspend"] = False
    assert "NoProgress" not in {event.reason for event in world.reconcile().events}
    assert world.condition("Degraded").get("reason") != "NoProgress"
