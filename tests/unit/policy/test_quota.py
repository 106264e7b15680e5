"""A job that waits in Kueue as one Workload: when it is held, what its pods are, and when its quota is given back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.api.labels import Place
from shoal.manifests.names import workload_name
from shoal.manifests.pods import QUEUE
from shoal.policy.actions import CreatePod, CreateWorkload, DeletePod, RequeueWorkload, TellWorkload
from shoal.policy.model import Refusal, RefusalKind
from shoal.policy.plan import plan
from tests.unit.policy import build
from tests.unit.policy.world import World

AS_WORKLOAD = {"schedulingPolicy": {"queue": "team", "queueAs": "Workload"}, "backoffLimit": 10_000}
WORKERS = {"replicas": 3, "minReplicas": 2, "maxSurge": 1}


def queued_world(**spec: Any) -> World:
    """A job of which one parameter server and two of three workers are to be admitted together."""
    return World(spec={"runPolicy": AS_WORKLOAD, "workers": WORKERS, **spec})


def admitted_world(**spec: Any) -> World:
    world = queued_world(**spec)
    run(world)
    assert world.status["phase"] == "Running"
    return world


def run(world: World, most: int = 40) -> None:
    """Let the operator, Kueue and time go on until nothing changes."""
    for _ in range(most):
        before = world.status
        world.reconcile()
        moved = world.queue.decide()
        if not (world.tick() or moved) and world.status == before:
            return
    raise AssertionError(f"does not settle: {world.last_plan}")


def test_a_job_has_no_pods_before_it_is_admitted() -> None:
    world = queued_world()
    world.queue.room = False
    run(world)
    assert not world.pods
    assert world.status["phase"] == "Suspended"
    assert world.status["reason"] == "Queued"
    told = world.condition("QuotaReserved")
    assert (told["status"], told["reason"], told["message"]) == ("False", "Pending", "no room")
    [workload] = world.queue.workloads.values()
    assert [(s["name"], s["count"]) for s in workload["spec"]["podSets"]] == [("ps", 1), ("worker", 2)]
    assert workload["metadata"]["ownerReferences"][0]["uid"] == build.UID
    assert "finalizers" not in workload["metadata"]


def test_an_admitted_job_runs_and_only_workers_above_the_least_are_queued_pods() -> None:
    world = admitted_world()
    labels = {name: QUEUE in pod["metadata"]["labels"] for name, pod in world.pods.items()}
    assert labels == {
        "digits-ps-0-0": False, "digits-worker-0-0": False, "digits-worker-1-0": False, "digits-worker-2-0": True,
    }  # fmt: skip
    assert world.condition("QuotaReserved")["reason"] == "Admitted"
    [workload] = world.queue.seen()
    assert workload.says("PodsReady")


def test_pods_have_the_flavors_labels_and_tolerations_and_what_checks_add() -> None:
    world = queued_world()
    world.reconcile()
    world.queue.decide()
    [workload] = world.queue.workloads.values()
    update = {"name": "worker", "annotations": {"provisioned": "yes"}, "nodeSelector": {"rack": "1"}}
    workload["status"]["admissionChecks"] = [{"name": "capacity", "podSetUpdates": [update]}]
    made = [a for a in plan(world.observation()).actions if isinstance(a, CreatePod)]
    by_role = {a.role: a.manifest for a in made if QUEUE not in a.manifest["metadata"]["labels"]}
    assert by_role["ps"]["spec"]["nodeSelector"] == {"gpu": "t4"}
    assert by_role["worker"]["spec"]["nodeSelector"] == {"gpu": "t4", "rack": "1"}
    assert by_role["worker"]["metadata"]["annotations"]["provisioned"] == "yes"
    assert {"key": "gpu", "operator": "Exists"} in by_role["worker"]["spec"]["tolerations"]


def test_pods_wait_for_the_flavor_to_be_read() -> None:
    world = queued_world()
    world.queue.flavors = {}
    run(world)
    assert not world.pods
    assert "ResourceFlavors" in world.condition("QuotaReserved")["message"]


def test_a_preempted_job_drains_with_a_snapshot_gives_its_quota_back_and_resumes() -> None:
    world = admitted_world()
    world.queue.preempt()
    made = world.reconcile()
    assert {a.name.rpartition("-")[0] for a in made.actions if isinstance(a, DeletePod)} == {
        f"digits-worker-{i}" for i in range(3)
    }  # the server is the last, with the snapshot
    assert ("Warning", "Evicted") in {(e.type, e.reason) for e in made.events}
    assert world.queue.reserved
    run(world)
    assert not world.pods
    assert not world.queue.reserved
    assert world.condition("Suspended")["reason"] == "Queued"
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}
    [workload] = world.queue.seen()
    assert workload.says("Requeued")
    assert workload.says("PodsReady", "False")
    world.queue.room = True
    world.queue.decide()
    assert {"Admitted", "Resumed"} <= {e.reason for e in world.reconcile().events}
    run(world)
    assert "digits-ps-0-1" in world.pods
    assert world.status["phase"] == "Running"


def test_pace_of_the_workers_is_kept_while_the_queue_holds_the_job() -> None:
    """It is planned meanwhile: by its profile, for a minute without quota, three workers that had to be seven."""
    world = admitted_world()
    said = {"samplesPerSecond": "100", "relativeError": "2", "watchedSeconds": 90, "basis": ""}
    world.status["prediction"] = said
    world.queue.room = False
    world.queue.preempt()
    run(world)
    assert not world.pods
    assert world.status["prediction"] == said


@pytest.mark.parametrize("how", ["hidden", "unreadable", "deleted"])
def test_a_workload_that_is_not_seen_suspends_no_job_that_runs(how: str) -> None:
    world = admitted_world()
    world.queue.room = False
    match how:
        case "hidden":
            world.queue.hidden = True
        case "unreadable":
            world.queue.hidden, world.queue.unreadable = True, "Workloads cannot be listed"
        case _:
            world.queue.workloads.clear()
    for _ in range(3):  # Kueue looks at nothing meanwhile
        assert not [a for a in world.reconcile().actions if isinstance(a, DeletePod)]
        world.tick()
    assert world.condition("QuotaReserved")["status"] == "False"
    assert world.status["phase"] == "Running"
    degraded = world.condition("Degraded")
    assert (degraded.get("reason") == "NoWorkload") == (how == "unreadable")


def test_a_workload_deleted_by_hand_is_made_again_and_the_job_goes_on_if_there_is_room() -> None:
    world = admitted_world()
    pods = set(world.pods)
    world.queue.workloads.clear()
    run(world)
    assert set(world.pods) == pods
    assert world.queue.reserved
    assert not world.deleted
    assert world.condition("QuotaReserved")["status"] == "True"


def test_a_workload_deleted_by_hand_whose_room_is_taken_suspends_the_job() -> None:
    world = admitted_world()
    world.queue.workloads.clear()
    world.queue.room = False
    run(world)
    assert not world.pods
    assert world.condition("Suspended")["reason"] == "Queued"


def test_a_suspended_job_asks_for_no_quota() -> None:
    world = admitted_world()
    world.manifest["spec"]["suspend"] = True
    world.reconcile()
    assert world.queue.reserved  # its pods run
    run(world)
    assert not world.queue.workloads
    assert world.condition("Suspended")["reason"] == "Suspended"
    world.manifest["spec"]["suspend"] = False
    run(world)
    assert world.status["phase"] == "Running"


def test_who_asks_for_something_else_is_queued_again() -> None:
    world = admitted_world()
    [before] = world.queue.workloads
    world.manifest["spec"]["workers"] = {**WORKERS, "minReplicas": 3}
    world.manifest["metadata"]["generation"] = 2
    world.reconcile()
    assert list(world.queue.workloads) == [before]
    run(world)
    [after] = world.queue.workloads
    assert after != before
    assert not any(QUEUE in pod["metadata"]["labels"] for pod in world.pods.values())
    assert world.status["restarts"]["disruptions"] == 0


def test_more_workers_and_another_image_are_no_reason_to_queue_again() -> None:
    template = {"spec": {"containers": [{"name": "worker", "image": "x:2", "env": [{"name": "A"}]}]}}
    bare = {"spec": {"containers": [{"name": "worker"}]}}
    before = build.job(runPolicy=AS_WORKLOAD, workers={**WORKERS, "template": bare})
    after = build.job(runPolicy=AS_WORKLOAD, workers={**WORKERS, "replicas": 9, "template": template})
    assert workload_name(before) == workload_name(after)
    template["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "2"}}
    larger = build.job(runPolicy=AS_WORKLOAD, workers={**WORKERS, "template": template})
    assert workload_name(larger) != workload_name(before)
    assert len(workload_name(before)) <= 63


def test_the_workers_with_quota_are_the_last_to_go() -> None:
    world = admitted_world()
    world.pods["digits-worker-0-0"]["status"]["phase"] = "Pending"
    world.manifest["spec"]["workers"] = {**WORKERS, "replicas": 2}
    run(world)
    assert {n for n in world.pods if "-worker-" in n} == {"digits-worker-0-0", "digits-worker-1-0"}


def test_a_lost_worker_is_replaced_and_kueue_is_told_nothing() -> None:
    world = admitted_world()
    world.vanish("digits-worker-0-0")
    made = world.reconcile()
    assert not [a for a in made.actions if isinstance(a, (TellWorkload, RequeueWorkload))]
    run(world)
    assert QUEUE not in world.pods["digits-worker-0-1"]["metadata"]["labels"]


def test_quota_is_not_given_back_while_pods_are_being_made() -> None:
    """A POST that is slow, beside a preemption: the pod would run without quota."""
    world = admitted_world()
    world.queue.preempt()
    seen = replace(world.observation(), pods=())
    for in_flight in (frozenset[Place](), frozenset({Place("worker", 0, 0)})):
        made = plan(replace(seen, in_flight=in_flight))
        assert any(isinstance(each, RequeueWorkload) for each in made.actions) is (not in_flight)


def test_a_finished_job_gives_its_quota_back() -> None:
    world = admitted_world()
    world.end("digits-ps-0-0", 0, message=build.termination_message())
    world.reconcile()
    world.reconcile()
    [workload] = world.queue.seen()
    assert workload.says("Finished")
    finished = workload.condition("Finished")
    assert finished is not None
    assert finished.reason == "Succeeded"
    assert not [a for a in plan(world.observation()).actions if isinstance(a, TellWorkload)]


def test_without_kueue_a_job_waits_and_says_why() -> None:
    job = build.job(runPolicy=AS_WORKLOAD, workers=WORKERS)
    made = plan(build.observe(job, no_workloads="the chart's value kueue.enabled is false"))
    assert made.actions == ()
    degraded = made.status.condition("Degraded")
    assert degraded is not None
    assert degraded.reason == "NoWorkload"
    assert "kueue.enabled" in degraded.message


def test_a_refused_workload_is_told_and_asked_for_again() -> None:
    job = build.job(runPolicy=AS_WORKLOAD, workers=WORKERS)
    name = workload_name(job)
    refusal = Refusal(RefusalKind.FORBIDDEN, name, 'priorityclasses "high" not found', (1, 0), 0.0)
    made = plan(build.observe(job, refusals=(refusal,)))
    assert not [a for a in made.actions if isinstance(a, CreateWorkload)]
    assert made.wake_after is not None
    degraded = made.status.condition("Degraded")
    assert degraded is not None
    assert 'priorityclasses "high" not found' in degraded.message


def test_time_in_the_queue_does_not_count_as_active() -> None:
    world = queued_world(runPolicy={**AS_WORKLOAD, "activeDeadlineSeconds": 100})
    run(world)
    world.queue.preempt()
    run(world)
    world.tick(1000)
    world.queue.room = True
    run(world)
    assert world.status["phase"] == "Running"
    assert world.status["suspendedSeconds"] >= 1000


STEPS = st.sampled_from(
    ["reconcile", "tick", "decide", "crash", "preempt", "room", "delete", "hide", "show", "suspend", "resume", "kill",
     "least", "blind", "sight"]
)  # fmt: skip


@settings(max_examples=examples(150))
@given(st.booleans(), st.lists(st.tuples(STEPS, st.integers(0, 3)), max_size=30))
def test_quota_is_kept_while_pods_run_and_the_job_runs_in_the_end(
    admitted: bool, steps: list[tuple[str, int]]
) -> None:
    """`Queue.check` and `World` assert at each step: no pod without quota, none given back while a pod runs."""
    world = admitted_world() if admitted else queued_world()
    for step, number in steps:
        _take(world, step, number)
    world.heal()
    for _ in range(5):  # back-offs end
        world.reconcile()
        world.queue.decide()
        world.tick(61.0)
    run(world)
    assert world.status["phase"] == "Running", world.status
    assert len(world.queue.reserved) == 1 == len(world.queue.workloads)
    assert world.status["restarts"]["disruptions"] + world.status["restarts"]["failures"] <= len(world.taken)


def _take(world: World, step: str, number: int) -> None:
    queue = world.queue
    match step:
        case "reconcile":
            world.reconcile()
        case "crash":
            world.reconcile(crash_after=number)
        case "tick":
            world.tick()
        case "decide":
            queue.decide()
        case "preempt":
            queue.preempt()
        case "room":
            queue.room = True
        case "delete":
            queue.workloads.clear()
        case "hide" | "show":
            queue.hidden = step == "hide"
        case "blind" | "sight":
            queue.unreadable = "forbidden" if step == "blind" else ""
        case "suspend" | "resume":
            world.manifest["spec"]["suspend"] = step == "suspend"
        case "least":
            world.manifest["spec"]["workers"] = {**WORKERS, "minReplicas": number}
            world.manifest["metadata"]["generation"] += 1
        case "kill":
            live = sorted(name for name in world.pods if "-worker-" in name)
            if live:
                world.vanish(live[number % len(live)])


def test_job_that_its_queue_holds_is_not_said_to_want_no_workers() -> None:
    world = World(spec={"runPolicy": AS_WORKLOAD})
    world.queue.room = False
    world.settle()
    assert world.condition("Running")["reason"] == "Queued"
    assert world.status["reason"] == "Queued"
    world.queue.room = True
    world.settle()
    world.queue.preempt()
    world.reconcile()
    assert world.condition("Running")["reason"] == "Queued"
    assert world.status["reason"] != "NoWorkers"
