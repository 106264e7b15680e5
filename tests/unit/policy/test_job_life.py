"""The life of a job: parameter servers, suspension, the end, and what is said about it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from shoal.policy.internal_error import internal_error
from shoal.policy.model import CreatePod, CreateService, DeleteJob, DeletePod, DeleteService, UpdateService
from shoal.policy.plan import plan
from shoal.policy.telemetry import differs_in_telemetry_only
from shoal_trainer.contract import Outcome
from tests.unit.policy import build
from tests.unit.policy.world import World

IMAGE_SAYS = 'Back-off pulling image "nowhere/digits:1"'


def running_world(**how: Any) -> World:
    world = World(**how)
    world.settle()
    return world


def finish(world: World, message: str = "", code: int = 0) -> None:
    world.end("digits-ps-0-0", code, "Completed" if code == 0 else "Error", message)


def condition(world: World, kind: str) -> dict[str, Any]:
    return next((c for c in world.status["conditions"] if c["type"] == kind), {})


# --- parameter servers -----------------------------------------------------------------------------------------------


def test_each_shard_has_a_service_before_it_has_a_pod() -> None:
    made = plan(build.observe(build.job(parameterServers={"replicas": 2})))
    kinds = [type(a).__name__ for a in made.actions]
    assert kinds[:4] == ["CreateSecret", "CreateService", "CreateService", "CreatePod"]
    services = [a.manifest["spec"] for a in made.actions if isinstance(a, CreateService)]
    assert all(s["publishNotReadyAddresses"] for s in services)


def test_a_server_that_was_killed_is_restored_under_the_same_name() -> None:
    world = running_world()
    world.delete("digits-ps-0-0")
    assert not [a for a in world.reconcile().actions if isinstance(a, CreatePod)]  # its last snapshot
    world.tick()
    made = world.reconcile()
    assert [a.name for a in made.actions if isinstance(a, CreatePod)] == ["digits-ps-0-1"]
    moved = next(a for a in made.actions if isinstance(a, UpdateService))
    assert moved.selector["shoal.dev/incarnation"] == "1"
    world.settle()
    assert world.status["parameterServers"] == {"desired": 1, "ready": 1, "restarts": 1}
    assert world.status["restarts"]["disruptions"] == 0
    assert world.status["phase"] == "Running"


def test_a_server_that_outstays_its_grace_period_is_not_waited_for() -> None:
    world = running_world()
    world.delete("digits-ps-0-0")
    world.now += timedelta(seconds=10)
    assert world.reconcile().wake_after == pytest.approx(15)
    world.now += timedelta(seconds=16)
    assert [a.name for a in world.reconcile().actions if isinstance(a, CreatePod)] == ["digits-ps-0-1"]


def test_a_server_on_a_lost_machine_is_replaced_at_once() -> None:
    world = running_world()
    world.kill_node("safe-0")
    assert [a.name for a in world.reconcile().actions if isinstance(a, CreatePod)] == ["digits-ps-0-1"]


def test_restarts_in_place_are_counted_and_failures_among_them_have_a_limit() -> None:
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


def test_the_number_of_shards_changes_while_suspended() -> None:
    world = running_world(servers=2)
    world.manifest["spec"]["suspend"] = True
    world.settle()
    world.manifest["spec"] |= {"suspend": False, "parameterServers": {"replicas": 1}}
    made = world.reconcile()
    assert [a.name for a in made.actions if isinstance(a, DeleteService)] == ["digits-ps-1"]
    world.settle()
    assert [n for n in world.pods if "-ps-" in n] == ["digits-ps-0-1"]


# --- the end ---------------------------------------------------------------------------------------------------------


def test_success_is_the_word_of_server_0() -> None:
    world = running_world()
    finish(
        world, build.last_word(model_uri="file:///m", model_digest="d", step=900, metrics={"accuracy": 0.981})
    )
    made = world.reconcile()
    assert made.actions == ()  # the status first
    assert world.status["phase"] == "Succeeded"
    assert condition(world, "Complete")["status"] == "True"
    assert world.status["output"] == {"uri": "file:///m", "digest": "d"}
    assert world.status["training"]["metrics"] == {"accuracy": "0.981"}
    assert world.status["restarts"]["failures"] == 0
    made = world.reconcile()
    assert sorted(a.name for a in made.actions if isinstance(a, DeletePod)) == [
        f"digits-worker-{i}-0" for i in range(3)
    ]
    assert "CleanedUp" in {e.reason for e in made.events}
    world.settle()
    assert list(world.pods) == ["digits-ps-0-0"]
    assert world.status["workers"]["ready"] == 0


def test_exit_0_of_server_0_without_its_word_is_not_success() -> None:
    world = running_world()
    finish(world)
    world.reconcile()
    world.tick(seconds=31)
    world.reconcile()
    assert world.status["phase"] == "Running"
    assert world.status["restarts"]["failures"] == 1
    assert world.status["lastFailure"]["reason"] == "ExitedEarly"


@pytest.mark.parametrize("code", [0, 2])
def test_the_users_fault_is_told_in_the_trainers_words(code: int) -> None:
    words = build.last_word(
        Outcome.FAILED,
        reason="UserError",
        message="no module named 'digts': check training.entrypoint",
    )
    world = running_world()
    world.kill_pod("digits-worker-1-0", 2)
    world.end("digits-worker-1-0", 2, message=words)
    world.reconcile()
    failed = condition(world, "Failed")
    assert (failed["status"], failed["reason"]) == ("True", "UserError")
    assert "check training.entrypoint" in failed["message"]
    assert world.status["lastFailure"]["exitCode"] == 2


def test_a_server_that_fails_for_the_users_fault_ends_the_job() -> None:
    world = running_world()
    finish(world, build.last_word(Outcome.FAILED, reason="UserError", message="the loss is NaN"))
    world.reconcile()
    assert condition(world, "Failed")["reason"] == "UserError"
    assert world.status["restarts"] == {"failures": 1, "disruptions": 0, "byReason": {}}  # of workers


def test_reasons_that_a_container_makes_up_are_few() -> None:
    world = running_world()
    for number in range(3):
        words = build.last_word(Outcome.FAILED, reason=f"E{number}", message="too warm")
        world.end(f"digits-worker-{number}-0", 1, message=words)
    world.reconcile()
    assert world.status["restarts"]["byReason"] == {"Error": 3}
    assert world.status["lastFailure"]["reason"] == "Error"
    assert world.status["lastFailure"]["message"] == "E2: too warm"


@pytest.mark.parametrize(("policy", "left"), [("None", 4), ("Running", 1), ("All", 0)])
def test_which_pods_are_left(policy: str, left: int) -> None:
    world = running_world(spec={"runPolicy": {"cleanPodPolicy": policy}})
    finish(world, build.last_word())
    world.settle()
    assert len(world.pods) == left


def test_ttl_deletes_the_job_when_it_is_due_and_not_before() -> None:
    world = running_world(spec={"runPolicy": {"ttlSecondsAfterFinished": 60}})
    finish(world, build.last_word())
    world.reconcile()
    world.settle()
    before = world.reconcile()
    assert not [a for a in before.actions if isinstance(a, DeleteJob)]
    assert before.wake_after is not None
    world.now += timedelta(seconds=before.wake_after)
    assert [a for a in world.reconcile().actions if isinstance(a, DeleteJob)]


def test_a_job_that_has_ended_is_not_stalled_by_a_fault_that_is_over() -> None:
    world = running_world()
    finish(world, build.last_word())
    world.settle()
    told = internal_error(world.observation(), ValueError("never mind"))
    assert told is not None
    world.status = told.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert internal_error(world.observation(), ValueError("in other words")) is None
    assert condition(world, "Stalled")["status"] == "True"
    world.settle()
    assert condition(world, "Stalled")["status"] == "False"
    assert world.status["reason"] == condition(world, "Complete")["reason"]


def test_the_active_deadline_does_not_run_while_suspended() -> None:
    world = running_world(spec={"runPolicy": {"activeDeadlineSeconds": 100}})
    world.manifest["spec"]["suspend"] = True
    world.settle()
    world.now += timedelta(hours=1)
    world.manifest["spec"]["suspend"] = False
    world.settle()
    assert world.status["phase"] == "Running"
    world.now += timedelta(seconds=100)
    world.reconcile()
    assert (world.status["phase"], world.status["reason"]) == ("Failed", "DeadlineExceeded")


def test_more_disruptions_than_allowed() -> None:
    world = running_world(spec={"runPolicy": {"maxDisruptions": 0}})
    world.vanish("digits-worker-0-0")
    world.reconcile()
    assert world.status["reason"] == "MaxDisruptionsExceeded"


# --- suspension ------------------------------------------------------------------------------------------------------


def test_an_init_container_that_always_fails_uses_up_the_backoff_limit() -> None:
    world = World(spec={"runPolicy": {"backoffLimit": 2}})
    init = {"name": "fetch", "state": build.ended(1)}
    for _ in range(100):
        world.reconcile()
        for name, pod in world.pods.items():
            if "-worker-" in name and pod["status"]["phase"] == "Running":
                waits = {"state": build.waiting("PodInitializing"), "ready": False}
                pod["status"]["containerStatuses"][0] |= waits
                pod["status"] |= {"phase": "Failed", "initContainerStatuses": [init]}
        world.tick()
        if world.status["phase"] == "Failed":
            break
    assert condition(world, "Failed")["reason"] == "BackoffLimitExceeded"
    assert "init container fetch ended with exit code 1" in condition(world, "Failed")["message"]
    assert world.status["restarts"]["disruptions"] == 0


@pytest.mark.parametrize(
    "field", ["activeDeadlineSeconds", "progressDeadlineSeconds", "ttlSecondsAfterFinished"]
)
def test_more_seconds_than_a_date_can_hold_are_as_good_as_none(field: str) -> None:
    complete = {
        "type": "Complete",
        "status": "True",
        "lastTransitionTime": build.stamp(build.NOW),
        "reason": "x",
    }
    status = {"startTime": build.stamp(build.NOW)}
    if field.startswith("ttl"):
        status |= {"completionTime": build.stamp(build.NOW), "conditions": [complete]}
    made = plan(build.observe(build.job(status, runPolicy={field: 2**63 - 1})))
    assert made.wake_after == pytest.approx(2**31 - 1)
    assert not any(isinstance(a, DeleteJob) for a in made.actions)


def test_a_job_created_suspended_starts_nothing() -> None:
    made = plan(build.observe(build.job(suspend=True)))
    assert made.actions == ()
    assert made.status.phase == "Suspended"


def test_the_other_shards_stay_until_shard_0_has_saved_them() -> None:
    world = running_world(servers=2)
    world.manifest["spec"]["suspend"] = True
    world.reconcile()
    world.tick()
    made = world.reconcile()
    assert [a.name for a in made.actions if isinstance(a, DeletePod)] == ["digits-ps-0-0"]
    world.tick()
    made = world.reconcile()
    assert [a.name for a in made.actions if isinstance(a, DeletePod)] == ["digits-ps-1-0"]


def test_suspending_ends_the_workers_before_the_servers_and_counts_nothing() -> None:
    world = running_world()
    world.manifest["spec"]["suspend"] = True
    made = world.reconcile()
    assert {a.name for a in made.actions if isinstance(a, DeletePod)} == {
        f"digits-worker-{i}-0" for i in range(3)
    }
    world.settle()
    assert not world.pods
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}
    assert condition(world, "Suspended")["reason"] == "Suspended"
    world.manifest["spec"]["suspend"] = False
    assert "Resumed" in {e.reason for e in world.reconcile().events}
    world.settle()
    assert "digits-ps-0-1" in world.pods


# --- what is said ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waiting", "reason", "words"),
    [
        ("ImagePullBackOff", "ImagePullFailed", "check the image"),
        ("CreateContainerConfigError", "ContainerConfigError", "check the volumes"),
    ],
)
def test_a_pod_that_does_not_get_going_says_what_to_do(waiting: str, reason: str, words: str) -> None:
    pod = build.pod(phase="Pending", state=build.waiting(waiting, IMAGE_SAYS))
    made = plan(build.observe(build.job(), pod))
    degraded = made.status.condition("Degraded")
    assert degraded is not None
    assert (degraded.status, degraded.reason) == ("True", reason)
    assert words in degraded.message
    assert IMAGE_SAYS in degraded.message
    assert reason in {e.reason for e in made.events}
    assert made.status.restarts.failures == 0


def test_an_unschedulable_pod_is_news_after_a_minute() -> None:
    unschedulable = [{"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available"}]
    pod = build.pod(phase="Pending", node=None, state={}, conditions=unschedulable)
    first = plan(build.observe(build.job(), pod))
    assert first.status.condition("Degraded") is None
    assert first.wake_after == pytest.approx(60)
    later = plan(build.observe(build.job(), pod, now=build.NOW + timedelta(seconds=60)))
    degraded = later.status.condition("Degraded")
    assert degraded is not None
    assert "0/4 nodes are available" in degraded.message


def test_a_mended_template_mends_the_pods_that_never_ran() -> None:
    world = running_world(workers=2)
    world.manifest["spec"]["workers"]["template"] = {"spec": {"priorityClassName": "low"}}
    world.settle()
    assert {"digits-worker-0-0", "digits-worker-1-0"} <= world.pods.keys()  # what runs is left alone

    waiting = World(workers=2, spot_nodes=0)
    waiting.settle()
    assert {"digits-worker-0-0", "digits-worker-1-0"} <= waiting.pods.keys()
    waiting.manifest["spec"]["workers"]["template"] = {"spec": {"priorityClassName": "low"}}
    waiting.settle()
    workers = {name for name in waiting.pods if "worker" in name}
    assert workers == {"digits-worker-0-1", "digits-worker-1-1"}
    assert "digits-ps-0-0" in waiting.pods
    assert waiting.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}


def test_a_claim_that_is_not_there_is_named() -> None:
    said = 'persistentvolumeclaim "runs" not found'
    unschedulable = [{"type": "PodScheduled", "status": "False", "message": said}]
    pod = build.pod("ps", phase="Pending", node=None, state={}, conditions=unschedulable)
    made = plan(build.observe(build.job(), pod, now=build.NOW + timedelta(seconds=60)))
    degraded = made.status.condition("Degraded")
    assert degraded is not None
    assert f"{said}; create this PersistentVolumeClaim" in degraded.message
    assert "spot label" not in degraded.message


def test_of_a_traceback_the_error_itself_is_told() -> None:
    log = "Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named 'shoal_trainer'\n"
    made = plan(build.observe(build.job(), build.pod(phase="Failed", state=build.ended(1, message=log))))
    failed = next(e for e in made.events if e.reason == "WorkerFailed")
    assert failed.message.startswith("digits-worker-0-0: Error: ModuleNotFoundError: No module named")
    assert "Traceback" not in failed.message


def test_no_progress_is_degraded() -> None:
    world = running_world(spec={"runPolicy": {"progressDeadlineSeconds": 60}})
    world.now += timedelta(seconds=61)
    world.reconcile()
    assert condition(world, "Degraded")["reason"] == "NoProgress"


def test_without_nodes_it_says_so() -> None:
    made = plan(build.observe(build.job(), nodes={}, node_signals=False))
    said = made.status.condition("NodeSignalsUnavailable")
    assert said is not None
    assert said.status == "True"


def test_a_job_of_another_controller_is_left_alone() -> None:
    made = plan(build.observe(build.job(managedBy="kueue.x-k8s.io/multikueue")))
    assert made.actions == ()
    assert made.status == build.job().status


def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    a_job = build.job()
    going = a_job.metadata.model_copy(update={"deletion_timestamp": build.stamp(build.NOW)})
    assert plan(build.observe(a_job.model_copy(update={"metadata": going}))).actions == ()


def test_figures_alone_may_wait() -> None:
    world = running_world()
    seen = world.observation()
    old = plan(seen).status
    told = build.report(step=10, samples=100, loss=0.5, samples_per_second=1234.5, input_wait=0.125)
    new = plan(
        build.observe(
            seen.job, *seen.pods, services=seen.services, nodes=seen.nodes, now=seen.now, report=told
        )
    ).status
    assert new.training.step == 10
    assert new.training.samples_per_second in {"1234", "1235"}
    assert new.training.input_wait == "0.125"
    assert differs_in_telemetry_only(old, new)
    assert not differs_in_telemetry_only(old, new.model_copy(update={"phase": "Failed"}))


def test_how_long_recovery_took() -> None:
    world = running_world()
    world.vanish("digits-worker-0-0")
    world.reconcile()
    world.reconcile()
    assert world.status["lastDisruption"]["replacementCreatedSeconds"] == 0
    world.tick()
    seen = world.observation()
    pushed = world.now.timestamp() + 5
    told = build.report(workers=({"slot": 0, "incarnation": 1, "state": "Active", "first_push_at": pushed},))
    status = plan(build.observe(seen.job, *seen.pods, nodes=seen.nodes, now=seen.now, report=told)).status
    assert status.last_disruption is not None
    assert status.last_disruption.recovered_seconds == 7
