"""The status and the events of an active job."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from shoal.api.kube import Pod
from shoal.api.training_job_status import DataStatus, TrainingJobStatus
from shoal.policy.actions import CreatePod
from shoal.policy.decide.cleanup import MOST_KEPT
from shoal.policy.facts.read import read
from shoal.policy.facts.verdict import STEADY
from shoal.policy.model import Images, Refusal, RefusalKind
from shoal.policy.plan import plan
from shoal.policy.tell.progress import final, progress
from shoal.policy.tell.telemetry import differs_in_telemetry_only
from shoal_trainer.contract import DataReport, Outcome, TerminationMessage
from tests.unit.policy import build
from tests.unit.policy.world import World, running_world

IMAGE_ERROR = 'Back-off pulling image "nowhere/digits:1"'


@pytest.mark.parametrize(
    ("waiting", "reason", "words"),
    [
        ("ImagePullBackOff", "ImagePullFailed", "check the image"),
        ("CreateContainerConfigError", "ContainerConfigError", "check the volumes"),
    ],
)
def test_pod_that_cannot_start_degrades_the_job_with_a_hint(waiting: str, reason: str, words: str) -> None:
    pod = build.pod(phase="Pending", state=build.waiting(waiting, IMAGE_ERROR))
    made = plan(build.observe(build.job(), pod))
    degraded = made.status.condition("Degraded")
    assert degraded is not None
    assert (degraded.status, degraded.reason) == ("True", reason)
    assert words in degraded.message
    assert IMAGE_ERROR in degraded.message
    assert reason in {e.reason for e in made.events}
    assert made.status.restarts.failures == 0


def test_tries_to_pull_an_image_and_pauses_between_them_are_told_alike() -> None:
    error = 'rpc error: code = NotFound desc = failed to pull and unpack image "nowhere/digits:1"'
    told = set()
    for reason, message in (
        ("ErrImagePull", error),
        ("ImagePullBackOff", f'Back-off pulling image "nowhere/digits:1": ErrImagePull: {error}'),
    ):
        pod = build.pod(phase="Pending", state=build.waiting(reason, message))
        degraded = plan(build.observe(build.job(), pod)).status.condition("Degraded")
        assert degraded is not None
        told.add(degraded.message)
    assert len(told) == 1
    assert error in told.pop()


def test_unschedulable_pod_degrades_the_job_after_a_minute() -> None:
    unschedulable = [{"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available"}]
    pod = build.pod(phase="Pending", node=None, state={}, conditions=unschedulable)
    first = plan(build.observe(build.job(), pod))
    assert first.status.condition("Degraded") is None
    assert first.wake_after == pytest.approx(60)
    later = plan(build.observe(build.job(), pod, now=build.NOW + timedelta(seconds=60)))
    degraded = later.status.condition("Degraded")
    assert degraded is not None
    assert "0/4 nodes are available" in degraded.message


def test_a_pod_that_no_scheduler_looks_at_degrades_the_job_after_a_minute() -> None:
    """The template names one that does not run, as a gang's may: the pod has no condition at all."""
    manifest = build.pod_manifest(phase="Pending", node=None, state={})
    manifest["spec"]["schedulerName"] = "scheduler-plugins-scheduler"
    pod = Pod.model_validate(manifest)
    first = plan(build.observe(build.job(), pod))
    assert first.status.condition("Degraded") is None
    assert first.wake_after == pytest.approx(60)
    degraded = plan(build.observe(build.job(), pod, now=build.NOW + timedelta(seconds=60))).status.condition(
        "Degraded"
    )
    assert degraded is not None
    assert degraded.reason == "Unschedulable"
    assert "no scheduler has looked at it: is there one named scheduler-plugins-scheduler" in degraded.message


@pytest.mark.parametrize("said", ["{}", "0/4 nodes are available: {}. {} not found"])
def test_missing_volume_claim_is_named_in_the_hint(said: str) -> None:
    message = 'persistentvolumeclaim "runs" not found'
    unschedulable = [{"type": "PodScheduled", "status": "False", "message": said.format(message, "")}]
    pod = build.pod("ps", phase="Pending", node=None, state={}, conditions=unschedulable)
    made = plan(build.observe(build.job(), pod, now=build.NOW + timedelta(seconds=60)))
    degraded = made.status.condition("Degraded")
    assert degraded is not None
    assert f"{message}; create this PersistentVolumeClaim" in degraded.message
    assert "spot label" not in degraded.message


def test_a_claim_without_a_volume_is_not_sent_to_the_nodes() -> None:
    message = "0/4 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found"
    unschedulable = [{"type": "PodScheduled", "status": "False", "message": message}]
    pod = build.pod("ps", phase="Pending", node=None, state={}, conditions=unschedulable)
    job = build.job(storage={"volumeClaim": {"name": "runs"}})
    soon = plan(build.observe(job, pod))
    assert soon.status.condition("Degraded") is None  # a volume takes a while
    later = plan(build.observe(job, pod, now=build.NOW + timedelta(seconds=60)))
    degraded = later.status.condition("Degraded")
    assert degraded is not None
    assert "`kubectl describe pvc runs` says why it has no volume" in degraded.message
    assert "spot label" not in degraded.message


def test_failure_event_has_the_last_line_of_the_traceback() -> None:
    log = "Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named 'shoal_trainer'\n"
    made = plan(build.observe(build.job(), build.pod(phase="Failed", state=build.ended(1, message=log))))
    failed = next(e for e in made.events if e.reason == "WorkerFailed")
    assert failed.message.startswith("digits-worker-0-0: Error: ModuleNotFoundError: No module named")
    assert "Traceback" not in failed.message


def test_a_long_message_is_cut_between_words() -> None:
    made = plan(
        build.observe(
            build.job(), build.pod(phase="Pending", state=build.waiting("ErrImagePull", "pulling " * 99))
        )
    )
    degraded = made.status.condition("Degraded")
    assert degraded is not None
    assert "cannot be pulled: …pulling pulling" in degraded.message


def with_addresses() -> list[Pod]:
    """The pods of a job of three workers, which can be asked."""
    pods = build.pod("ps", node="safe-0"), *(build.pod("worker", index) for index in range(3))
    return [each.model_copy(update={"status": replace(each.status, pod_ip="10.0.0.1")}) for each in pods]


def test_phase_goes_back_only_when_what_was_trained_is_lost() -> None:
    """A start told Running before its first report was read, Starting with it, and Running again with a step."""
    pods = with_addresses()
    status, told = TrainingJobStatus(), []
    for more in (
        {},  # not asked yet
        {"report": build.report(step=0)},
        {"report": build.report(step=1)},
        {"report": build.report(step=0, restarted_from_nothing=1)},
        {"report": build.report(step=0, restarted_from_nothing=1)},
        {"report": build.report(step=1, restarted_from_nothing=1)},
    ):
        status = plan(
            build.observe(build.job(status.model_dump(mode="json", by_alias=True)), *pods, **more)
        ).status
        running = status.condition("Running")
        assert running is not None
        assert (status.phase == "Running") == (running.status == "True")
        told.append(status.phase)
    assert told == ["Starting", "Starting", "Running", "Starting", "Starting", "Running"]


def test_job_whose_coordinator_cannot_be_read_is_taken_to_train_until_it_is_heard_that_it_does_not() -> None:
    pods = with_addresses()
    deaf = build.observe(build.job(), *pods, unreachable_seconds=1.0, unreachable_because="timed out")
    status = plan(deaf).status
    assert status.phase == "Running"
    job = build.job(status.model_dump(mode="json", by_alias=True))
    unasked = plan(build.observe(job, *pods)).status
    assert unasked.phase == "Running", "of a new leader that has not asked yet"
    heard = plan(build.observe(job, *pods, report=build.report(step=0))).status
    running = heard.condition("Running")
    assert running is not None
    assert (heard.phase, running.status) == ("Starting", "False")


def test_missing_progress_degrades_the_job() -> None:
    world = running_world(spec={"runPolicy": {"progressDeadlineSeconds": 60}})
    world.now += timedelta(seconds=61)
    world.reconcile()
    assert world.condition("Degraded")["reason"] == "NoProgress"
    assert "status.training.message" not in world.condition("Degraded")["message"]
    worker = {"slot": 0, "incarnation": 0, "state": "Active", "message": "has waited 31 s for a.csv"}
    world.report = build.report(workers=(worker,))
    world.reconcile()
    assert world.condition("Degraded")["message"].endswith("; see status.training.message")
    assert world.status["training"]["message"] == "worker 0-0: has waited 31 s for a.csv"


def test_steps_that_are_done_again_after_a_rollback_are_progress() -> None:
    world = running_world(spec={"runPolicy": {"progressDeadlineSeconds": 120}})
    active = [(0, 0), (1, 0), (2, 0)]

    def reports(step: int) -> None:
        world.report = build.report(active=active, step=step)
        world.tick(30)
        world.reconcile()

    reports(1000)
    for step in range(500, 800, 30):
        reports(step)
        assert (world.status["training"]["step"], world.status["training"]["regainedStep"]) == (1000, step)
        assert world.condition("Degraded").get("status") != "True"
    for _ in range(5):
        reports(800)
    assert world.condition("Degraded")["reason"] == "NoProgress"
    reports(1001)
    assert "regainedStep" not in world.status["training"]


def test_a_job_that_goes_back_to_one_snapshot_again_and_again_makes_no_progress() -> None:
    world = running_world(spec={"runPolicy": {"progressDeadlineSeconds": 120}})
    for step in (1000, *(500, 530, 560) * 4):
        world.report = build.report(active=[(0, 0), (1, 0), (2, 0)], step=step)
        world.tick(30)
        world.reconcile()
    assert world.condition("Degraded")["reason"] == "NoProgress"


def test_job_without_a_running_worker_does_not_speak_of_fewer_than_none() -> None:
    world = running_world()
    for name in [each for each in world.pods if "-worker-" in each]:
        world.end(name, 1)
    world.reconcile()
    assert world.condition("Degraded")["message"] == "no worker runs"
    assert world.condition("WorkersReady")["message"] == "no worker runs"


def test_snapshots_that_fail_for_minutes_degrade_the_job() -> None:
    world = running_world()
    world.report = build.report(
        snapshots_fail_seconds=299.0, snapshots_fail_because="no space left on device"
    )
    world.reconcile()
    assert world.condition("Degraded").get("reason") != "SnapshotsFail"
    for seconds in (301.0, 7200.0):
        world.report = build.report(
            snapshots_fail_seconds=seconds, snapshots_fail_because="no space left on device"
        )
        world.reconcile()
        assert world.condition("Degraded")["reason"] == "SnapshotsFail"
        assert "5 minutes and longer: no space left on device;" in world.condition("Degraded")["message"]
    world.report = build.report()
    world.reconcile()
    assert world.condition("Degraded")["reason"] == "Healthy"


def test_message_of_the_trainer_ends_with_its_report() -> None:
    world = running_world()
    worker = {"slot": 0, "incarnation": 0, "state": "Active", "message": "has waited 31 s for a.csv"}
    world.report = build.report(workers=(worker,))
    world.reconcile()
    seen = world.observation()
    assert seen.job.status.training.message
    assert progress(read(replace(seen, report=None))).message == ""
    ended = final(seen.job.status, TerminationMessage(outcome=Outcome.SUCCEEDED))
    assert ended["training"].message == ""  # type: ignore[attr-defined]


def test_final_counts_are_exact() -> None:
    """A later comparison of the servers lowered the number of partial samples."""
    before = TrainingJobStatus(data=DataStatus(partial=128, lost=3))
    message = TerminationMessage(outcome=Outcome.SUCCEEDED, data=DataReport(partial=0, lost=3))
    found = final(before, message)["data"]
    assert (found.partial, found.lost) == (0, 3)  # type: ignore[attr-defined]
    failed = final(before, message.model_copy(update={"outcome": Outcome.FAILED}))["data"]
    assert failed.partial == 128  # type: ignore[attr-defined]


def test_stalled_job_is_not_reconciling() -> None:
    """Of several conditions kstatus takes the first: Flux would wait for a job that waits for a person."""
    refusal = Refusal(RefusalKind.INVALID, "digits-worker-0-0", "unknown field", (1, 0), 0.0)
    before = plan(build.observe(build.job())).status
    assert before.condition("Reconciling").status == "True"  # type: ignore[union-attr]
    job = build.job(before.model_dump(mode="json", by_alias=True))
    after = plan(replace(build.observe(job), refusals=(refusal,))).status
    assert after.condition("Stalled").status == "True"  # type: ignore[union-attr]
    assert after.condition("Reconciling").status == "False"  # type: ignore[union-attr]


def test_job_keeps_the_images_it_started_with() -> None:
    """A newer operator must not mix versions of the data plane within a job."""
    world = running_world()
    world.vanish("digits-ps-0-0")
    world.vanish("digits-worker-0-0")
    world.asked = {"digits-ps-0-0", "digits-worker-0-0"}
    newer = Images(ps="ps:2", worker="worker:2", node_selector={"kubernetes.io/arch": "amd64"})
    seen = replace(world.observation(), images=newer)
    made = plan(seen)
    planned = world.job.model_copy(
        update={"status": made.status}
    )  # the epoch of the server is recorded first
    actions = [*made.actions, *plan(replace(seen, job=planned)).actions]
    created = {
        a.name: a.manifest["spec"]["containers"][0]["image"] for a in actions if isinstance(a, CreatePod)
    }
    assert created == {"digits-ps-0-1": build.IMAGES.ps, "digits-worker-0-1": build.IMAGES.worker}
    assert made.status.images is not None
    assert made.status.images.ps == build.IMAGES.ps
    assert made.status.images.node_selector == newer.node_selector, "where its pods are made now"
    assert plan(build.observe(build.job(suspend=True))).status.images is None


def test_unreadable_nodes_set_node_signals_unavailable() -> None:
    made = plan(build.observe(build.job(), nodes={}, node_signals=False))
    condition = made.status.condition("NodeSignalsUnavailable")
    assert condition is not None
    assert condition.status == "True"


def test_changed_template_replaces_only_pods_that_never_ran() -> None:
    world = running_world(workers=2)
    world.manifest["spec"]["workers"]["template"] = {"spec": {"priorityClassName": "low"}}
    world.settle()
    assert {"digits-worker-0-0", "digits-worker-1-0"} <= world.pods.keys()  # running pods are kept

    waiting = World(workers=2, spot_nodes=0).settled()
    assert {"digits-worker-0-0", "digits-worker-1-0"} <= waiting.pods.keys()
    waiting.manifest["spec"]["workers"]["template"] = {"spec": {"priorityClassName": "low"}}
    waiting.settle()
    workers = {name for name in waiting.pods if "worker" in name}
    assert workers == {"digits-worker-0-1", "digits-worker-1-1"}
    assert "digits-ps-0-0" in waiting.pods
    assert waiting.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}


def test_job_being_deleted_is_ignored() -> None:
    a_job = build.job()
    deleting = a_job.metadata.model_copy(update={"deletion_timestamp": build.stamp(build.NOW)})
    assert plan(build.observe(a_job.model_copy(update={"metadata": deleting}))).actions == ()


def test_new_report_differs_in_telemetry_only() -> None:
    world = running_world()
    seen = world.observation()
    old = plan(seen).status
    waiting = (
        {"slot": 0, "incarnation": 0, "state": "Active", "message": "has waited 31 s for a.csv"},
        {"slot": 1, "incarnation": 0, "state": "Left", "message": "was drained"},
        {"slot": 2, "incarnation": 0, "state": "Active", "message": "has waited 32 s for b.csv"},
    )
    report = build.report(
        step=10, samples=100, loss=0.5, samples_per_second=1234.5, input_wait=0.125, workers=waiting
    )
    new = plan(
        build.observe(
            seen.job, *seen.pods, services=seen.services, nodes=seen.nodes, now=seen.now, report=report
        )
    ).status
    assert new.training.step == 10
    assert new.training.samples_per_second in {"1234", "1235"}
    assert new.training.input_wait == "0.125"
    assert new.training.message == "worker 0-0: has waited 31 s for a.csv (and 1 more)"
    assert differs_in_telemetry_only(old, new)
    assert not differs_in_telemetry_only(old, new.model_copy(update={"phase": "Failed"}))


def test_no_speed_is_told_while_training_stands() -> None:
    """While an evaluation takes hours, or the storage is away, the speed before it is not that of the job."""
    world = running_world()
    world.report = build.report(step=10, samples_per_second=1234.5, remaining_seconds=60.0)
    world.reconcile()
    assert world.status["training"].keys() >= {"samplesPerSecond", "remainingSeconds"}
    world.report = build.report(step=10)
    world.reconcile()
    assert not world.status["training"].keys() & {"samplesPerSecond", "remainingSeconds"}


def test_a_clock_that_is_ahead_leaves_no_last_snapshot_in_the_future() -> None:
    """Parameter server 0 was on a node a day ahead, and moved: neither later snapshots nor their lack would show."""
    world = running_world()

    def saved(at: datetime) -> datetime | None:
        shard = {"index": 0, "epoch": 0, "lastSnapshotAt": at.timestamp()}
        world.report = build.report(shards=(shard,))
        world.reconcile()
        return TrainingJobStatus.model_validate(world.status).parameter_servers.last_snapshot_time

    hour = timedelta(hours=1)
    assert saved(world.now + 24 * hour) == world.now
    world.now += hour
    right = world.now - timedelta(minutes=1)
    assert saved(right) == right
    world.status["parameterServers"]["lastSnapshotTime"] = (
        world.now + 23 * hour
    ).isoformat()  # of an older operator
    assert saved(right) == right
    assert saved(right - hour) == right


def test_recovery_times_are_recorded() -> None:
    world = running_world()
    world.vanish("digits-worker-0-0")
    world.reconcile()
    world.reconcile()
    assert world.status["lastDisruption"]["replacementCreatedSeconds"] == 0
    world.tick()
    seen = world.observation()
    pushed = world.now.timestamp() + 5
    report = build.report(
        workers=({"slot": 0, "incarnation": 1, "state": "Active", "first_push_at": pushed},)
    )
    status = plan(build.observe(seen.job, *seen.pods, nodes=seen.nodes, now=seen.now, report=report)).status
    assert status.last_disruption is not None
    assert status.last_disruption.recovered_seconds == 7


def test_job_without_workers_on_purpose_is_not_degraded() -> None:
    world = running_world()
    world.manifest["spec"]["workers"] |= {"replicas": 0, "minReplicas": 0}
    world.settle()
    assert world.status["workers"]["ready"] == 0
    assert not any(c["type"] == "Degraded" and c["status"] == "True" for c in world.status["conditions"])


def test_failed_worker_with_a_running_sidecar_is_deleted() -> None:
    """It holds its accelerator; a failed pod without one is kept for its logs."""
    for phase, kept in (("Running", False), ("Failed", True)):
        world = running_world()
        world.end("digits-worker-0-0", 1)
        world.pods["digits-worker-0-0"]["status"]["phase"] = phase
        world.settle()
        assert world.status["lastFailure"]["pod"] == "digits-worker-0-0"
        assert ("digits-worker-0-0" in world.pods) is kept


def test_the_last_failed_pods_are_kept_for_their_logs() -> None:
    """As many as MOST_KEPT: of a job that fails more often, the oldest is deleted, and all the same runs again."""
    world = running_world(workers=2)
    failed = []
    for incarnation in range(MOST_KEPT + 3):
        failed.append(f"digits-worker-0-{incarnation}")
        world.end(failed[-1], 1)
        world.settle()
        world.now += STEADY  # it is replaced soon after the next failure, too
    ended = sorted(name for name, pod in world.pods.items() if pod["status"]["phase"] == "Failed")
    assert ended == sorted(failed[-MOST_KEPT:])
    assert world.status["restarts"]["failures"] == len(failed)
    assert world.status["workers"]["ready"] == 2
