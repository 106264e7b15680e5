"""Workers: replaced before they are gone, within maxSurge, and counted once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from shoal.policy.model import CreatePod, NameConflict, Plan, Refusal, RefusalKind
from shoal.policy.plan import plan
from shoal.policy.workers import max_surge
from shoal_trainer.contract import WorkerReport, WorkerState
from tests.unit.policy import build
from tests.unit.policy.world import World


def names(made: Plan, kind: type = CreatePod) -> list[str]:
    return [a.name for a in made.actions if isinstance(a, kind) and "-worker-" in a.name]


def running_world(**how: Any) -> World:
    world = World(**how)
    world.settle()
    return world


def node_of(world: World, pod: str) -> str:
    return str(world.pods[pod]["spec"]["nodeName"])


@pytest.mark.parametrize(
    ("value", "replicas", "pods"),
    [(2, 10, 2), (0, 10, 0), ("25%", 10, 3), ("0%", 10, 0), ("25%", 1, 1), ("100%", 4, 4)],
)
def test_max_surge_rounds_up(value: int | str, replicas: int, pods: int) -> None:
    assert max_surge(value, replicas) == pods


def test_a_job_begins_with_all_its_workers() -> None:
    made = plan(build.observe(build.job()))
    assert names(made) == [f"digits-worker-{i}-0" for i in range(3)]


def test_at_the_notice_the_replacement_is_created_at_once() -> None:
    world = running_world()
    node = node_of(world, "digits-worker-1-0")
    world.notice(node)
    made = world.reconcile()
    assert names(made) == ["digits-worker-1-1"]
    assert world.status["restarts"] == {"failures": 0, "disruptions": 1, "byReason": {"NodeShutdown": 1}}
    assert world.status["lastDisruption"]["node"] == node
    assert "WorkerDisrupted" in {e.reason for e in made.events}


def test_the_same_notice_is_not_counted_again_when_the_pod_ends_and_is_gone() -> None:
    world = running_world()
    world.notice(node_of(world, "digits-worker-1-0"))
    for _ in range(6):
        world.reconcile()
        world.tick()
    assert "digits-worker-1-0" not in world.pods
    assert world.status["restarts"]["disruptions"] == 1
    assert world.status["workers"]["ready"] == 3


def test_two_notices_with_one_surge_the_second_follows_the_old_pods_end() -> None:
    world = running_world(surge=1)
    for worker in (0, 1):
        world.notice(node_of(world, f"digits-worker-{worker}-0"))
    assert names(world.reconcile()) == ["digits-worker-0-1"]
    assert world.status["restarts"]["disruptions"] == 2
    world.end("digits-worker-1-0", 143)
    assert names(world.reconcile()) == ["digits-worker-1-1"]


def test_without_surge_a_replacement_follows_the_old_pods_end() -> None:
    world = running_world(surge=0)
    world.notice(node_of(world, "digits-worker-0-0"))
    assert names(world.reconcile()) == []
    world.tick()
    assert names(world.reconcile()) == ["digits-worker-0-1"]


def test_a_pod_on_a_lost_machine_holds_nothing_and_is_removed_by_force() -> None:
    world = running_world(surge=0)
    node = node_of(world, "digits-worker-2-0")
    world.kill_node(node)
    made = world.reconcile()
    assert names(made) == ["digits-worker-2-1"]
    assert world.pods["digits-worker-2-0"]["metadata"]["deletionTimestamp"]
    world.tick(seconds=30)
    assert world.reconcile().wake_after == pytest.approx(30)
    world.tick(seconds=31)
    world.reconcile()
    assert "digits-worker-2-0" not in world.pods
    assert world.status["restarts"]["byReason"] == {"NodeLost": 1}


def test_a_silent_worker_gets_a_replacement_that_is_taken_back_if_it_speaks() -> None:
    world = running_world()
    world.hush("digits-worker-0-0")
    assert names(world.reconcile()) == ["digits-worker-0-1"]
    assert world.status["restarts"]["disruptions"] == 0
    world.hush("digits-worker-0-0")
    world.reconcile()
    world.settle()
    assert "digits-worker-0-1" not in world.pods
    assert "digits-worker-0-0" in world.pods
    assert world.status["restarts"]["disruptions"] == 0


def test_a_replacement_would_rather_not_go_where_its_predecessor_still_is() -> None:
    world = running_world()
    world.hush("digits-worker-0-0")
    (create,) = world.reconcile().actions
    assert isinstance(create, CreatePod)
    affinity = create.manifest["spec"]["affinity"]
    (rather,) = affinity["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert rather["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    selected = rather["podAffinityTerm"]["labelSelector"]["matchLabels"].items()
    there = {name: pod["metadata"]["labels"].items() for name, pod in world.pods.items()}
    assert {name for name, labels in there.items() if selected <= labels} == {
        "digits-worker-0-0",
        "digits-worker-0-1",
    }


def test_who_has_no_predecessor_burdens_no_scheduler_with_one() -> None:
    made = plan(build.observe(build.job()))
    affinities = [a.manifest["spec"]["affinity"] for a in made.actions if isinstance(a, CreatePod)]
    assert [affinity.keys() for affinity in affinities] == [{"nodeAffinity"}] * 4


def test_no_affinity_names_a_node() -> None:
    """Karpenter makes no node for such a pod, before the middle of 2025 at least."""
    world = running_world(servers=2)
    world.notice(node_of(world, "digits-worker-1-0"))
    world.evict("digits-ps-1-0")
    made = [*world.reconcile().actions]
    world.tick()
    made += world.reconcile().actions
    manifests = [str(a.manifest) for a in made if isinstance(a, CreatePod)]
    assert len(manifests) == 2
    assert not any("matchFields" in text or "metadata.name" in text for text in manifests)
    assert not any(f"'{node}'" in text for node in world.nodes for text in manifests)


def test_a_silent_worker_is_fenced_and_counted_once_its_replacement_runs() -> None:
    world = running_world()
    world.hush("digits-worker-0-0")
    world.reconcile()
    world.tick()
    world.tick()
    world.reconcile()
    assert world.status["restarts"]["byReason"] == {"Silent": 1}
    world.settle()
    assert "digits-worker-0-0" not in world.pods
    assert world.status["restarts"]["disruptions"] == 1


def test_a_worker_that_ps_0_has_given_up_is_replaced_before_its_node_says_anything() -> None:
    seen = running_world().observation()
    fenced = WorkerReport(slot=0, incarnation=0, state=WorkerState.FENCED)
    report = build.report().model_copy(update={"workers": (fenced,)})
    now = build.observe(
        seen.job, *seen.pods, services=seen.services, existing=seen.existing, nodes=seen.nodes, report=report
    )
    assert names(plan(now)) == ["digits-worker-0-1"]


def test_what_an_old_report_says_of_silence_is_not_believed() -> None:
    world = running_world()
    seen = world.observation()
    late = build.observe(
        seen.job, *seen.pods, services=seen.services, existing=seen.existing, nodes=seen.nodes,
        report=build.report([(0, 0)]), report_age=16.0,
    )  # fmt: skip
    assert names(plan(late)) == []


def test_a_pod_that_vanished_while_nobody_looked_counts_once() -> None:
    world = running_world()
    world.vanish("digits-worker-1-0")
    made = world.reconcile()
    assert names(made) == ["digits-worker-1-1"]
    assert world.status["restarts"]["byReason"] == {"Gone": 1}
    world.settle()
    assert world.status["restarts"]["disruptions"] == 1


def test_exit_0_before_the_end_is_not_success() -> None:
    world = running_world()
    world.kill_pod("digits-worker-0-0", 0)
    assert names(world.reconcile()) == []  # the job may be ending
    world.tick(seconds=31)
    assert names(world.reconcile()) == ["digits-worker-0-1"]
    assert world.status["restarts"] == {"failures": 1, "disruptions": 0, "byReason": {"ExitedEarly": 1}}


def test_workers_that_were_told_that_the_work_is_done_are_not_replaced_while_the_model_is_exported() -> None:
    world = running_world()
    world.kill_pod("digits-worker-0-0", 0)
    world.reconcile()
    world.tick(seconds=300)
    seen = world.observation()
    finishing = build.report(phase="Finishing")
    more = {"services": seen.services, "nodes": seen.nodes, "now": world.now}
    made = plan(build.observe(seen.job, *seen.pods, report=finishing, **more))
    assert names(made) == []
    assert made.status.restarts.failures == 0


def test_a_failure_backs_off_and_counts_against_the_limit() -> None:
    world = running_world(spec={"runPolicy": {"backoffLimit": 1}})
    world.kill_pod("digits-worker-0-0", 1)
    made = world.reconcile()
    assert names(made) == []
    assert made.wake_after == pytest.approx(1.0)
    world.tick()
    assert names(world.reconcile()) == ["digits-worker-0-1"]
    world.settle()
    world.kill_pod("digits-worker-0-1", 1)
    made = world.reconcile()
    assert world.status["phase"] == "Failed"
    assert world.status["reason"] == "BackoffLimitExceeded"
    assert [event.reason for event in made.events] == ["WorkerFailed", "Failed"]
    assert "2 failures" in made.events[-1].message


def test_kills_without_a_reason_are_forgiven_three_times() -> None:
    world = running_world()
    for incarnation in range(4):
        world.kill_pod(f"digits-worker-0-{incarnation}", 137)
        world.reconcile()
        world.tick(seconds=70)
        world.settle()
    assert world.status["restarts"] == {
        "failures": 1,
        "disruptions": 3,
        "byReason": {"Killed": 3, "KilledRepeatedly": 1},
    }


def test_a_quota_makes_it_wait_and_never_fails_the_job() -> None:
    world = running_world()
    world.quota = len(world.pods)
    world.notice(node_of(world, "digits-worker-0-0"))
    world.reconcile()
    made = world.reconcile()
    assert names(made) == []
    assert 0 < (made.wake_after or 0) <= 5
    assert {c["type"]: c["status"] for c in world.status["conditions"]}["QuotaExceeded"] == "True"
    for _ in range(8):
        world.tick()
        world.reconcile()
    assert "digits-worker-0-1" in world.pods
    assert world.status["restarts"] == {"failures": 0, "disruptions": 1, "byReason": {"NodeShutdown": 1}}
    assert {c["type"]: c["status"] for c in world.status["conditions"]}["QuotaExceeded"] == "False"


def test_what_the_server_refuses_is_terminal_until_the_spec_changes() -> None:
    words = 'Pod in version "v1" cannot be handled: unknown field "spec.containers[0].imagee"'
    refusal = Refusal(RefusalKind.INVALID, "digits-worker-0-0", words, 1, build.NOW)
    made = plan(build.observe(build.job(), refusals=(refusal,)))
    assert names(made) == []
    stalled = made.status.condition("Stalled")
    assert stalled is not None
    assert stalled.status == "True"
    assert words in stalled.message
    changed = build.job()
    changed = changed.model_copy(update={"metadata": changed.metadata.model_copy(update={"generation": 2})})
    assert len(names(plan(build.observe(changed, refusals=(refusal,))))) == 3


@pytest.mark.parametrize(("going_away", "reason"), [(False, "NameCollision"), (True, None)])
def test_a_name_that_is_taken(going_away: bool, reason: str | None) -> None:
    made = plan(
        build.observe(build.job(), name_conflicts={"digits-worker-1-0": NameConflict(terminating=going_away)})
    )
    assert names(made) == ["digits-worker-0-0", "digits-worker-2-0"]
    stalled = made.status.condition("Stalled")
    assert (stalled.reason if stalled else None) == reason
    assert (made.wake_after == 1.0) is going_away


def test_scaling_down_is_no_disruption() -> None:
    world = running_world()
    world.manifest["spec"]["workers"]["replicas"] = 1
    made = world.reconcile()
    assert "ScaledDown" in {e.reason for e in made.events}
    world.settle()
    assert sorted(n for n in world.pods if "-worker-" in n) == ["digits-worker-0-0"]
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}
    world.manifest["spec"]["workers"]["replicas"] = 2
    world.settle()
    assert "digits-worker-1-1" in world.pods  # an incarnation is never used twice


def test_of_the_replacements_without_room_only_a_bounded_number_waits() -> None:
    world = World(workers=6, spot_nodes=6, surge=6, spec={"workers": {"replicas": 40, "maxSurge": "100%"}})
    world.spot_nodes = 40
    world.nodes |= {f"spot-{i}": build.node_manifest(f"spot-{i}") for i in range(40)}
    world.settle()
    for i in range(40):
        world.kill_node(f"spot-{i}")
    assert len(names(world.reconcile())) == 16
    world.reconcile()
    assert len([n for n in world.pods if n.endswith("-1")]) == 16


def test_a_plan_carried_out_leaves_nothing_to_do() -> None:
    world = running_world()
    world.tick(seconds=0)
    assert world.reconcile().actions == ()
    before = world.status
    world.reconcile()
    assert world.status == before


def test_slots_stay_few() -> None:
    world = running_world()
    for incarnation in range(30):
        world.vanish(f"digits-worker-0-{incarnation}")
        world.reconcile()
        world.tick()
        world.tick()
        world.settle()
    assert len(world.status["slots"]) == 4
    assert world.status["restarts"]["disruptions"] == 30


def test_a_second_look_after_five_minutes_of_quiet_forgets_nothing() -> None:
    world = running_world()
    first = world.status["workers"]
    world.now += timedelta(minutes=5)
    world.reconcile()
    assert world.status["workers"] == first


def test_losing_the_right_to_read_nodes_changes_nothing() -> None:
    world = running_world()
    seen = world.observation()
    more = {"services": seen.services, "existing": seen.existing, "now": world.now}
    made = plan(build.observe(seen.job, *seen.pods, nodes={}, node_signals=False, **more))
    assert made.actions == ()
    assert made.status.restarts.disruptions == 0
