"""Workers: replaced early within maxSurge, and counted once."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.api.labels import Place
from shoal.policy.actions import CreatePod
from shoal.policy.decide.completion import NODE_PATIENCE
from shoal.policy.decide.workers import MOST_NEW, max_surge
from shoal.policy.facts.coordinator import FRESH_REPORT_SECONDS
from shoal.policy.model import NameConflict, Plan, Refusal, RefusalKind
from shoal.policy.plan import plan
from shoal_trainer.contract import Outcome, WorkerReport, WorkerState
from tests.unit.policy import build
from tests.unit.policy.world import World, running_world


def names(made: Plan, kind: type = CreatePod) -> list[str]:
    return [a.name for a in made.actions if isinstance(a, kind) and "-worker-" in a.name]


def node_of(world: World, pod: str) -> str:
    return str(world.pods[pod]["spec"]["nodeName"])


@pytest.mark.parametrize(
    ("value", "replicas", "pods"),
    [(2, 10, 2), (0, 10, 0), ("25%", 10, 3), ("0%", 10, 0), ("25%", 1, 1), ("100%", 4, 4)],
)
def test_max_surge_rounds_up(value: int | str, replicas: int, pods: int) -> None:
    assert max_surge(value, replicas) == pods


def test_new_job_creates_all_workers() -> None:
    made = plan(build.observe(build.job()))
    assert names(made) == [f"digits-worker-{i}-0" for i in range(3)]


def test_notice_creates_a_replacement_at_once() -> None:
    world = running_world()
    node = node_of(world, "digits-worker-1-0")
    world.notice(node)
    made = world.reconcile()
    assert names(made) == ["digits-worker-1-1"]
    assert world.status["restarts"] == {"failures": 0, "disruptions": 1, "byReason": {"NodeShutdown": 1}}
    assert world.status["lastDisruption"]["node"] == node
    assert "WorkerDisrupted" in {e.reason for e in made.events}


class OneNode(World):
    """Workers that share a node, as one with eight accelerators."""

    def _room_for(self, pod: dict[str, Any]) -> str | None:
        role = pod["metadata"]["labels"]["shoal.dev/role"]
        return "spot-0" if role == "worker" else super()._room_for(pod)


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_workers_that_come_back_to_a_node_that_is_announced_to_go_are_not_moved_again(seconds: float) -> None:
    """Nothing kept them off, and a job with `maxDisruptions` had failed by its own moves before the node went."""
    world = OneNode().settled()
    event = {"type": "VMEventScheduled", "status": "True", "lastTransitionTime": build.stamp(world.now)}
    world.nodes["spot-0"]["status"]["conditions"].append(event)
    for _ in range(60):
        world.reconcile()
        world.tick(seconds)
    assert world.status["restarts"]["byReason"] == {"VMEventScheduled": 3}
    assert sorted(world.deleted) == [f"digits-worker-{index}-0" for index in range(3)]


def test_notice_is_counted_once_until_the_pod_is_gone() -> None:
    world = running_world()
    world.notice(node_of(world, "digits-worker-1-0"))
    for _ in range(6):
        world.reconcile()
        world.tick()
    assert "digits-worker-1-0" not in world.pods
    assert world.status["restarts"]["disruptions"] == 1
    assert world.status["workers"]["ready"] == 3


def test_second_notice_beyond_max_surge_waits_for_the_old_pod() -> None:
    world = running_world(surge=1)
    for worker in (0, 1):
        world.evict(f"digits-worker-{worker}-0")
    assert names(world.reconcile()) == ["digits-worker-0-1"]
    assert world.status["restarts"]["disruptions"] == 2
    world.end("digits-worker-1-0", 143)
    assert names(world.reconcile()) == ["digits-worker-1-1"]


def test_without_surge_the_replacement_waits_for_the_old_pod() -> None:
    world = running_world(surge=0)
    world.evict("digits-worker-0-0")
    assert names(world.reconcile()) == []
    world.tick()
    assert names(world.reconcile()) == ["digits-worker-0-1"]


def test_worker_that_does_not_end_is_not_waited_for_beyond_its_grace_period() -> None:
    world = running_world()  # maxSurge 1
    world.stuck = {"digits-worker-0-0"}
    world.delete("digits-worker-0-0")
    world.stuck |= {"digits-worker-1-0"}
    world.delete("digits-worker-1-0")
    world.settle()
    assert "digits-worker-1-1" not in world.pods  # the surge is in use
    world.now += timedelta(seconds=26)
    world.settle()
    assert {"digits-worker-0-1", "digits-worker-1-1"} <= world.pods.keys()
    world.now += timedelta(seconds=60)
    world.settle()
    degraded = world.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "StuckTerminating")
    assert "digits-worker-0-0" in degraded["message"]
    assert "kubelet of node spot-0" in degraded["message"]


def test_pod_on_a_lost_node_is_replaced_and_force_deleted() -> None:
    world = running_world(surge=0)
    node = node_of(world, "digits-worker-2-0")
    world.kill_node(node)
    made = world.reconcile()
    assert names(made) == ["digits-worker-2-1"]
    assert world.deleted == []  # it may run on, where only its kubelet is not heard
    world.tick(seconds=0)
    world.tick(seconds=0)
    world.reconcile()
    assert world.deleted == ["digits-worker-2-0"]  # its replacement runs
    world.tick(seconds=30)
    assert world.reconcile().wake_after == pytest.approx(30)
    world.tick(seconds=31)
    world.reconcile()
    assert "digits-worker-2-0" not in world.pods
    assert world.status["restarts"]["byReason"] == {"NodeLost": 1}


def test_replacement_of_a_silent_worker_is_deleted_if_it_recovers() -> None:
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


def test_replacement_prefers_another_node_than_its_predecessor() -> None:
    world = running_world()
    world.hush("digits-worker-0-0")
    (create,) = world.reconcile().actions
    assert isinstance(create, CreatePod)
    affinity = create.manifest["spec"]["affinity"]
    (preferred,) = affinity["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    selected = preferred["podAffinityTerm"]["labelSelector"]["matchLabels"].items()
    labels_by_pod = {name: pod["metadata"]["labels"].items() for name, pod in world.pods.items()}
    assert {name for name, labels in labels_by_pod.items() if selected <= labels} == {
        "digits-worker-0-0",
        "digits-worker-0-1",
    }


def test_first_incarnation_has_no_pod_anti_affinity() -> None:
    made = plan(build.observe(build.job()))
    affinities = [a.manifest["spec"]["affinity"] for a in made.actions if isinstance(a, CreatePod)]
    assert [affinity.keys() for affinity in affinities] == [{"nodeAffinity"}] * 4


def test_affinities_name_no_node() -> None:
    """Karpenter provisions no node for a pod whose affinity names nodes (at least before mid-2025)."""
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


def test_silent_worker_is_counted_when_its_replacement_runs() -> None:
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


def test_fenced_worker_is_replaced_without_a_node_signal() -> None:
    seen = running_world().observation()
    fenced = WorkerReport(slot=0, incarnation=0, state=WorkerState.FENCED)
    report = build.report().model_copy(update={"workers": (fenced,)})
    now = build.observe(
        seen.job, *seen.pods, services=seen.services, existing=seen.existing, nodes=seen.nodes, report=report
    )
    assert names(plan(now)) == ["digits-worker-0-1"]


def test_silence_in_an_old_report_is_ignored() -> None:
    world = running_world()
    seen = world.observation()
    late = build.observe(
        seen.job, *seen.pods, services=seen.services, existing=seen.existing, nodes=seen.nodes,
        report=build.report([(0, 0)]), report_age=FRESH_REPORT_SECONDS + 1,
    )  # fmt: skip
    assert names(plan(late)) == []


def test_vanished_pod_is_counted_once() -> None:
    world = running_world()
    world.vanish("digits-worker-1-0")
    made = world.reconcile()
    assert names(made) == ["digits-worker-1-1"]
    assert world.status["restarts"]["byReason"] == {"Gone": 1}
    world.settle()
    assert world.status["restarts"]["disruptions"] == 1


def test_early_exit_0_is_a_failure() -> None:
    world = running_world()
    world.kill_pod("digits-worker-0-0", 0)
    assert names(world.reconcile()) == []  # the job may be ending
    world.tick(seconds=31)
    assert names(world.reconcile()) == ["digits-worker-0-1"]
    assert world.status["restarts"] == {"failures": 1, "disruptions": 0, "byReason": {"ExitedEarly": 1}}


def test_done_workers_are_not_replaced_while_the_model_is_exported() -> None:
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


def test_failure_backs_off_and_counts_against_the_limit() -> None:
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
    assert [event.reason for event in made.events] == ["WorkerFailed"]
    assert made.wake_after == pytest.approx(NODE_PATIENCE.total_seconds())
    world.tick(seconds=NODE_PATIENCE.total_seconds() - 1)
    assert names(world.reconcile()) == [], "it may be the end"
    world.tick(seconds=1)
    made = world.reconcile()
    assert world.status["phase"] == "Failed"
    assert world.status["reason"] == "BackoffLimitExceeded"
    assert [event.reason for event in made.events] == ["Failed"]
    assert "2 failures" in made.events[-1].message


@pytest.mark.parametrize("reason", ["DiskFull", "CallbackOutage"])
@pytest.mark.parametrize("rule", [None, {}], ids=["anywhere", "excluded"])
def test_worker_without_room_or_whose_callback_reaches_nothing_is_replaced_anywhere_unless_the_job_says(
    rule: dict[str, int] | None, reason: str
) -> None:
    """Schedulers ignore the pod that failed, so nothing else keeps its replacement from its node."""
    workers = {"replicas": 3, "nodeExclusion": rule}
    world = running_world(spec={"workers": workers, "runPolicy": {"backoffLimit": 2}})
    words = build.termination_message(Outcome.FAILED, reason=reason, message="no room, or no route")
    node = node_of(world, "digits-worker-0-0")
    for incarnation in range(2):
        assert node_of(world, f"digits-worker-0-{incarnation}") == node
        world.end(f"digits-worker-0-{incarnation}", 1, message=words)
        world.reconcile()
        world.tick(seconds=10)
        (create,) = (each for each in world.reconcile().actions if isinstance(each, CreatePod))
        assert create.name == f"digits-worker-0-{incarnation + 1}"
        world.settle()
    assert world.status["restarts"] == {"failures": 2, "disruptions": 0, "byReason": {reason: 2}}
    assert (f"'{node}'" in str(create.manifest["spec"]["affinity"])) is (rule is not None)
    world.end("digits-worker-0-2", 1, message=words)
    world.reconcile()
    world.tick(seconds=NODE_PATIENCE.total_seconds())
    world.reconcile()
    assert (world.status["phase"], world.status["reason"]) == ("Failed", "BackoffLimitExceeded")


def test_fourth_kill_in_a_row_is_a_failure() -> None:
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


def test_exceeded_quota_waits_and_never_fails_the_job() -> None:
    world = running_world()
    world.quota = len(world.pods)
    world.notice(node_of(world, "digits-worker-0-0"))
    world.reconcile()
    made = world.reconcile()
    assert names(made) == []
    assert 0 < (made.wake_after or 0) <= 5
    assert world.condition("QuotaExceeded")["status"] == "True"
    for _ in range(8):
        world.tick()
        world.reconcile()
    assert "digits-worker-0-1" in world.pods
    assert world.status["restarts"] == {"failures": 0, "disruptions": 1, "byReason": {"NodeShutdown": 1}}
    quota = world.condition("QuotaExceeded")
    assert (quota["status"], quota["reason"]) == ("False", "QuotaAvailable")


def test_invalid_pod_stalls_the_job_and_is_asked_for_again_when_the_spec_has_changed() -> None:
    words = 'Pod in version "v1" cannot be handled: unknown field "spec.containers[0].imagee"'
    refusal = Refusal(RefusalKind.INVALID, "digits-worker-0-0", words, (1, 0), 0.0)
    made = plan(build.observe(build.job(), refusals=(refusal,)))
    assert names(made) == []
    stalled = made.status.condition("Stalled")
    assert stalled is not None
    assert stalled.status == "True"
    assert words in stalled.message
    changed = build.job()
    changed = changed.model_copy(update={"metadata": changed.metadata.model_copy(update={"generation": 2})})
    assert len(names(plan(build.observe(changed, refusals=(refusal,))))) == 3


@given(at=st.floats(0, 1e6), early=st.floats(0, 1e-2) | st.floats(0, 10))
@settings(max_examples=examples(50))
def test_what_waits_is_due_when_the_clock_has_moved(at: float, early: float) -> None:
    """A wait of a rounding error was over before the clock had moved, and planned again, without end."""
    refusal = Refusal(RefusalKind.QUOTA, "digits-worker-0-0", "exceeded quota: pods", (1, 0), at)
    made = plan(build.observe(build.job(), at=at + 5.0 - early, refusals=(refusal,)))
    asked = "digits-worker-0-0" in names(made)
    assert asked == (early < 0.0005) or 0.0004 < early < 0.0006
    assert made.wake_after is None or made.wake_after == 0 or made.wake_after >= 0.001


def test_no_pod_is_made_with_other_arguments_than_the_job_began_with() -> None:
    world = running_world()
    world.manifest["spec"]["training"]["args"] = {"rate": 0.1}
    world.status.pop("argsDigest")  # as of a job that an earlier Shoal began
    world.settle()
    world.manifest["spec"]["training"]["args"] = {"momentum": 0.1}
    before = set(world.pods)
    world.settle()
    assert world.condition("Stalled")["reason"] == "ArgumentsChanged"  # before a pod is missing
    world.kill_pod("digits-worker-0-0", 143)
    world.settle()
    assert set(world.pods) <= before
    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "ArgumentsChanged")
    assert "set it back" in stalled["message"]
    world.manifest["spec"]["training"]["args"] = {"rate": 0.1}
    world.settle()
    assert "digits-worker-0-1" in world.pods
    assert world.condition("Stalled")["status"] == "False"


@pytest.mark.parametrize(("terminating", "reason"), [(False, "NameCollision"), (True, None)])
def test_name_conflict_stalls_unless_terminating(terminating: bool, reason: str | None) -> None:
    made = plan(
        build.observe(
            build.job(), name_conflicts={"digits-worker-1-0": NameConflict(terminating=terminating)}
        )
    )
    assert names(made) == ["digits-worker-0-0", "digits-worker-2-0"]
    stalled = made.status.condition("Stalled")
    assert (stalled.reason if stalled else None) == reason
    assert (made.wake_after == 1.0) is terminating


def test_scaling_down_is_not_a_disruption() -> None:
    world = running_world()
    world.manifest["spec"]["workers"]["replicas"] = 1
    made = world.reconcile()
    assert "ScaledDown" in {e.reason for e in made.events}
    world.settle()
    assert sorted(n for n in world.pods if "-worker-" in n) == ["digits-worker-0-0"]
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}
    world.manifest["spec"]["workers"]["replicas"] = 2
    world.settle()
    assert "digits-worker-1-1" in world.pods  # an incarnation is never reused


def running_40() -> World:
    """A job whose 40 workers run."""
    return World(spot_nodes=40, spec={"workers": {"replicas": 40, "maxSurge": "100%"}}).settled()


def test_replacements_of_lost_workers_are_asked_for_all_at_once() -> None:
    world = running_40()
    for i in range(40):
        world.kill_node(f"spot-{i}")
    assert len(names(world.reconcile())) == 40


def test_replacements_that_wait_for_a_higher_priority_are_bounded() -> None:
    world = running_40()
    world.now += timedelta(minutes=2)
    for i in range(40):
        name = f"digits-worker-{i}-0"
        preempted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
        world.pods[name]["status"]["conditions"].append(preempted)
        world.delete(name)
    world.quota = len(world.pods) + 100
    assert len(names(world.reconcile())) == 16
    world.reconcile()
    assert len([n for n in world.pods if n.endswith("-1")]) == 16


@pytest.mark.parametrize("way", ["suspended", "scaled down"])
def test_what_was_given_up_and_is_wanted_again_is_made_at_once(way: str) -> None:
    """It replaces nothing that was lost: neither bounded nor urgent, as when the job began."""
    world = World(spot_nodes=40, spec={"workers": {"replicas": 40}}).settled()
    given_up = {"suspend": True} if way == "suspended" else {"workers": {"replicas": 0}}
    before = dict(world.manifest["spec"])
    world.manifest["spec"] |= given_up
    world.settle()
    assert not any("-worker-" in name for name in world.pods)
    world.manifest["spec"] = before
    made = [a for a in world.reconcile().actions if isinstance(a, CreatePod) and a.role == "worker"]
    assert [a.incarnation for a in made] == [1] * 40
    assert not any(a.replaces for a in made)


def test_plan_begins_no_more_pods_than_are_made_until_the_next_one() -> None:
    """All of a large job's were a quarter of each plan of its ramp, and nearly all of them planned again."""
    job = build.job(workers={"replicas": 1000, "maxReplicas": 1000})
    asked = frozenset({Place("worker", index, 0) for index in (990, 995)})
    made = plan(build.observe(job, in_flight=asked))
    created = [
        action.place for action in made.actions if isinstance(action, CreatePod) and action.role == "worker"
    ]
    assert len(created) == MOST_NEW
    assert asked <= set(created), "what is asked for already is not taken back"
    assert made.status.workers.desired == 1000


def test_leader_that_follows_one_that_died_amid_a_ramp_makes_the_rest_at_once() -> None:
    job = build.job(workers={"replicas": 100, "maxReplicas": 100})
    first = [build.pod("worker", index, 0, phase="Pending", node=None) for index in range(20)]
    ahead = plan(build.observe(job, *first, first_look=True))  # it numbers what its predecessor may have made
    made = plan(build.observe(job.model_copy(update={"status": ahead.status}), *first))
    created = [a for a in made.actions if isinstance(a, CreatePod) and a.role == "worker"]
    assert [a.index for a in created] == list(range(20, 100))
    assert not any(a.replaces for a in created)


def test_worker_whose_back_off_lasts_when_a_leader_looks_first_is_numbered_ahead_when_it_is_over() -> None:
    """The leader before may have known less of its end, and have made the next one at once."""
    world = running_world()
    world.kill_pod("digits-worker-1-0", 1)
    world.reconcile()
    first = plan(replace(world.observation(), first_look=True))
    assert first.looked_at == {0, 2}
    assert not [slot for slot in first.status.slots if slot.state == "Planned"]
    world.now += timedelta(minutes=10)
    later = plan(replace(world.observation(), unseen=frozenset({1})))
    assert [(s.index, s.incarnation) for s in later.status.slots if s.state == "Planned"] == [(1, 2)]
    assert later.looked_at == {0, 1, 2}


def test_plan_after_an_executed_plan_is_empty() -> None:
    world = running_world()
    world.tick(seconds=0)
    assert world.reconcile().actions == ()
    before = world.status
    world.reconcile()
    assert world.status == before


def test_slots_are_bounded_after_many_replacements() -> None:
    world = running_world()
    for incarnation in range(30):
        world.vanish(f"digits-worker-0-{incarnation}")
        world.reconcile()
        world.tick()
        world.tick()
        world.settle()
    assert len(world.slots) == 4
    assert world.status["restarts"]["disruptions"] == 30


def test_status_is_unchanged_after_five_idle_minutes() -> None:
    world = running_world()
    first = world.status["workers"]
    world.now += timedelta(minutes=5)
    world.reconcile()
    assert world.status["workers"] == first


def test_unreadable_nodes_disrupt_no_worker() -> None:
    world = running_world()
    seen = world.observation()
    more = {"services": seen.services, "existing": seen.existing, "now": world.now}
    made = plan(build.observe(seen.job, *seen.pods, nodes={}, node_signals=False, **more))
    assert made.actions == ()
    assert made.status.restarts.disruptions == 0
