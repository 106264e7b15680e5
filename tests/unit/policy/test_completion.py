"""How a job finishes: success, failure, limits, and the cleanup afterwards."""

from __future__ import annotations

from datetime import timedelta

import pytest

from shoal.manifests import names
from shoal.policy.actions import DeleteJob, DeletePod
from shoal.policy.plan import plan
from shoal.policy.tell.internal_error import internal_error
from shoal_trainer.contract import DataReport, Outcome
from tests.unit.policy import build
from tests.unit.policy.world import World, running_world


def finish(world: World, message: str = "", code: int = 0) -> None:
    world.end("digits-ps-0-0", code, "Completed" if code == 0 else "Error", message)


def test_termination_message_of_server_0_completes_the_job() -> None:
    world = running_world()
    finish(
        world,
        build.termination_message(
            model_uri="file:///m", model_digest="d", step=900, metrics={"accuracy": 0.981}
        ),
    )
    made = world.reconcile()
    assert made.actions == ()  # nothing is deleted before the status is written
    assert world.status["phase"] == "Succeeded"
    assert world.condition("Complete")["status"] == "True"
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


def test_end_of_a_job_without_storage_says_that_the_model_is_gone_and_what_keeps_it() -> None:
    world = running_world()
    world.report = build.report(samples_per_second=154.1, remaining_seconds=9309.0)
    world.reconcile()
    finish(world, build.termination_message(model_uri="file:///m"))
    world.reconcile()
    assert "is gone with its pod (storage.ephemeral)" in world.condition("Complete")["message"]
    assert "set storage.volumeClaim or storage.uri" in world.condition("Complete")["message"]
    assert "samplesPerSecond" not in world.status["training"]  # it has no speed any more


@pytest.mark.parametrize(("batch", "told"), [(5000, True), (1437, False)])
def test_end_of_a_job_whose_batch_no_epoch_filled_says_so(batch: int, told: bool) -> None:
    training = {"entrypoint": "digits:job", "stopAfter": {"epochs": 5}, "batchSize": batch}
    world = running_world(spec={"training": training})
    finish(world, build.termination_message(step=5, data=DataReport(total=1437)))
    world.reconcile()
    words = "an epoch has 1,437 samples and a batch 5,000: each epoch was one step of one worker"
    assert (words in world.condition("Complete")["message"]) == told


def test_exit_0_of_server_0_without_message_is_a_failure() -> None:
    world = running_world()
    finish(world)
    world.reconcile()
    world.tick(seconds=31)
    world.reconcile()
    assert world.status["phase"] == "Running"
    assert world.status["restarts"]["failures"] == 1
    assert world.status["lastFailure"]["reason"] == "ExitedEarly"


def test_server_0_that_wrote_that_it_succeeded_and_then_failed_completes_nothing() -> None:
    """What it does after that may have been cut short."""
    world = running_world()
    finish(world, build.termination_message(model_uri="file:///m", step=900), code=1)
    world.reconcile()
    assert world.status["phase"] == "Running"
    assert world.status["restarts"]["failures"] == 1


@pytest.mark.parametrize("code", [0, 2])
def test_user_error_of_a_worker_fails_the_job_with_its_message(code: int) -> None:
    words = build.termination_message(
        Outcome.FAILED,
        reason="UserError",
        message="no module named 'digts': check training.entrypoint",
    )
    world = running_world()
    world.kill_pod("digits-worker-1-0", 2)
    world.end("digits-worker-1-0", 2, message=words)
    world.reconcile()
    failed = world.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", "UserError")
    assert "check training.entrypoint" in failed["message"]
    assert world.status["lastFailure"]["exitCode"] == 2


def test_user_error_of_server_0_fails_the_job() -> None:
    world = running_world()
    finish(world, build.termination_message(Outcome.FAILED, reason="UserError", message="the loss is NaN"))
    world.reconcile()
    assert world.condition("Failed")["reason"] == "UserError"
    assert world.status["restarts"] == {
        "failures": 1,
        "disruptions": 0,
        "byReason": {},
    }  # byReason counts only workers


def test_unknown_failure_reasons_are_counted_as_error() -> None:
    world = running_world()
    for number in range(3):
        words = build.termination_message(Outcome.FAILED, reason=f"E{number}", message="too warm")
        world.end(f"digits-worker-{number}-0", 1, message=words)
    world.reconcile()
    assert world.status["restarts"]["byReason"] == {"Error": 3}
    assert world.status["lastFailure"]["reason"] == "Error"
    assert world.status["lastFailure"]["message"] == "E2: too warm"


def test_repeated_init_container_failure_exceeds_the_backoff_limit() -> None:
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
    assert world.condition("Failed")["reason"] == "BackoffLimitExceeded"
    assert "init container fetch ended with exit code 1" in world.condition("Failed")["message"]
    assert world.status["restarts"]["disruptions"] == 0


def test_exceeding_max_disruptions_fails_the_job() -> None:
    world = running_world(spec={"runPolicy": {"maxDisruptions": 0}})
    world.vanish("digits-worker-0-0")
    world.reconcile()
    assert world.status["reason"] == "MaxDisruptionsExceeded"


def test_active_deadline_excludes_suspended_time() -> None:
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


@pytest.mark.parametrize(("policy", "left"), [("None", 4), ("Running", 1), ("All", 0)])
def test_clean_pod_policy_decides_which_pods_remain(policy: str, left: int) -> None:
    world = running_world(spec={"runPolicy": {"cleanPodPolicy": policy}})
    finish(world, build.termination_message())
    world.settle()
    assert len(world.pods) == left


def test_a_pod_whose_containers_have_ended_keeps_its_log_though_its_phase_is_behind() -> None:
    """A real kubelet reports the end of the container first, and the phase Succeeded seconds later."""
    world = running_world()
    finish(world, build.termination_message())
    world.pods["digits-ps-0-0"]["status"]["phase"] = "Running"
    world.settle()
    assert list(world.pods) == ["digits-ps-0-0"]
    sidecar = {"name": "proxy", "ready": True, "restartCount": 0, "state": {}, "lastState": {}}
    world.pods["digits-ps-0-0"]["status"]["containerStatuses"].append(sidecar)
    world.settle()
    assert not world.pods, "a sidecar that runs holds the node"


def test_ttl_deletes_the_job_only_when_due() -> None:
    world = running_world(spec={"runPolicy": {"ttlSecondsAfterFinished": 60}})
    finish(world, build.termination_message())
    world.reconcile()
    world.settle()
    before = world.reconcile()
    assert not [a for a in before.actions if isinstance(a, DeleteJob)]
    assert before.wake_after is not None
    world.now += timedelta(seconds=before.wake_after)
    assert [a for a in world.reconcile().actions if isinstance(a, DeleteJob)]


@pytest.mark.parametrize(
    "field", ["activeDeadlineSeconds", "progressDeadlineSeconds", "ttlSecondsAfterFinished"]
)
def test_stored_seconds_beyond_the_bound_are_clamped(field: str) -> None:
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


def test_finished_job_claims_no_pods_and_has_no_disruption_budget() -> None:
    world = running_world()
    finish(world, build.termination_message())
    world.settle()
    for kind in ("ParameterServersReady", "WorkersReady", "Running"):
        assert world.condition(kind)["status"] == "False"
    assert not world.existing & {names.budget_name(world.job)}


def test_failed_job_stays_stalled() -> None:
    """It is all that kstatus (Flux) looks at."""
    world = running_world(spec={"runPolicy": {"activeDeadlineSeconds": 100}})
    world.now += timedelta(seconds=101)
    world.settle()
    assert world.status["phase"] == "Failed"
    failed = internal_error(world.observation(), ValueError("never mind"))
    assert failed is not None
    world.status = failed.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    world.settle()
    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "DeadlineExceeded")
    assert world.condition("Reconciling").get("status") != "True"


def test_internal_error_of_a_finished_job_is_cleared() -> None:
    world = running_world()
    finish(world, build.termination_message())
    world.settle()
    failed = internal_error(world.observation(), ValueError("never mind"))
    assert failed is not None
    world.status = failed.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert internal_error(world.observation(), ValueError("in other words")) is None
    assert world.condition("Stalled")["status"] == "True"
    world.settle()
    assert world.condition("Stalled")["status"] == "False"
    assert world.status["reason"] == world.condition("Complete")["reason"]


def test_finished_job_observes_later_generations() -> None:
    """Flux waits for the generation."""
    world = running_world()
    finish(world, build.termination_message())
    world.settle()
    world.manifest["metadata"]["generation"] = 7
    world.reconcile()
    assert world.status["observedGeneration"] == 7
    world.manifest["metadata"]["generation"] = 8
    failed = internal_error(world.observation(), ValueError("never mind"))
    assert failed is not None
    assert failed.status.observed_generation == 8
