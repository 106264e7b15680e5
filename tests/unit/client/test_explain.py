"""Each thing that can hold a job up has a sentence and, where something can be done, a way out."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from shoal.api.training_job import MANAGED_BY
from shoal.client.explain import WORKERS_START, Seen, explain
from shoal.client.story import moments
from shoal.words import no_scheduler
from tests.unit.policy.build import NOW, job, pod_manifest, stamp


def condition(kind: str, reason: str, message: str) -> dict[str, Any]:
    return {
        "type": kind,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": stamp(NOW),
    }


def pending(message: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "digits-worker-0-0"},
        "status": {
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "status": "False", "message": message}],
        },
    }


RUNNING = {"observedGeneration": 1, "phase": "Running", "workers": {"ready": 3}}


@pytest.mark.parametrize(
    ("status", "pods", "why", "help_"),
    [
        (
            {"observedGeneration": 1, "conditions": [condition("Stalled", "Invalid", 'unknown field "resourcez"')]},
            [], 'Stalled, Invalid: unknown field "resourcez"', "correct the template",
        ),
        (
            {"observedGeneration": 1, "conditions": [condition("Failed", "UserError", "no job 'jobb'")]},
            [], "no job 'jobb'", "shoal-trainer check",
        ),
        (
            {"observedGeneration": 1, "conditions": [condition("Stalled", "Forbidden", 'account "a" not found')]},
            [], 'account "a" not found', "name in the template what there is",
        ),
        (
            {"observedGeneration": 1, "conditions": [condition("Degraded", "PoolNotFound", "pool a: create it")]},
            [], "pool a", "kubectl get capacitypools",
        ),
        (
            {"observedGeneration": 1, "conditions": [condition("Degraded", "StuckTerminating", "pod a")]},
            [], "pod a", "if the machine is gone; or wait: it may pass by itself",
        ),
        (
            {"observedGeneration": 1, "conditions": [condition("Degraded", "FieldConflict", "service a")]},
            [], "service a", "exempt the Service from it",
        ),
        (
            {"observedGeneration": 1, "phase": "Starting"},
            [pending("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")],
            "digits-worker-0-0: 0/3 nodes", "all GPUs are taken",
        ),
        (
            {"observedGeneration": 1, "phase": "Starting"},
            [pending("0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.")],
            "didn't match", "workers.capacity",
        ),
        (RUNNING, [], "no report from parameter server 0", "port 7071"),
        (RUNNING | {"training": {"phase": "Training", "step": 0}}, [], "no step is done yet", ""),
        (
            RUNNING | {"training": {"phase": "Training", "step": 9, "samplesPerSecond": "100", "inputWait": "0.4"}},
            [], "workers wait 40% of their time for input", "more CPU",
        ),
        (
            RUNNING | {"training": {"phase": "Training", "step": 9, "samplesPerSecond": "100"},
                       "prediction": {"relativeError": "1", "basis": "12 measurements"}},
            [], "its workers are 50% slower than expected (12 measurements)", "input wait",
        ),
        (
            RUNNING | {"workers": {"ready": 1}, "training": {"phase": "Training", "step": 9, "samplesPerSecond": "1"}},
            [], "2 workers of 3 are not there", "",
        ),
        (
            RUNNING | {"training": {"phase": "Training", "step": 9},
                       "cost": {"perHour": "1.5", "accumulated": "12", "savedVersusOnDemand": "30"}},
            [], "12.00 so far, 1.50 an hour now; on-demand nodes would have cost 30.00 more", "",
        ),
        (
            {"phase": "Suspended", "conditions": [
                {"type": "QuotaReserved", "status": "False", "lastTransitionTime": stamp(NOW), "reason": "Pending",
                 "message": "insufficient unused quota for cpu"}]},
            [], "Kueue has given no quota, Pending: insufficient unused quota for cpu", "describe localqueue",
        ),
        (
            RUNNING | {"training": {"phase": "Training", "step": 9}, "data": {"repeated": 5, "partial": 3}},
            [], "5 samples were trained twice, after the loss of a parameter server", "guarantees.md",
        ),
        (
            RUNNING | {"training": {"phase": "Training", "step": 9}, "data": {"repeated": 5, "partial": 3}},
            [], "3 samples were trained on some shards only", "guarantees.md",
        ),
        (
            RUNNING | {"training": {"phase": "Training", "step": 9}, "data": {"lost": 64}},
            [], "64 samples were left out: their loss or gradient was not finite", "shoal logs digits",
        ),
        (
            {"observedGeneration": 1, "conditions": [condition("Failed", "BackoffLimitExceeded", "7 failures")]},
            [], "7 failures", "shoal logs digits --slot N",
        ),
        *(
            (
                {"observedGeneration": 1, "conditions": [condition("Failed", reason, "7 failures")],
                 "lastFailure": {"pod": f"digits-{pod}", "reason": "Error", "time": stamp(NOW)}},
                [], "7 failures", f"shoal logs digits {options}",
            )
            for reason, pod, options in [
                ("BackoffLimitExceeded", "worker-12-3", "--slot 12 shows"), ("Error", "ps-0-1", "--slot 0 --ps has"),
                ("FailJob", "worker-1-0", "--slot 1 has"),
            ]
        ),
        (
            {"observedGeneration": 1, "phase": "Starting"},
            [pending("0/3 nodes are available: 3 node(s) had volume node affinity conflict.")],
            "volume node affinity conflict", "its volume is in another zone",
        ),
        (
            {"observedGeneration": 1, "phase": "Starting"},
            [pending("0/3 nodes are available: 3 node(s) had untolerated taint {node.kubernetes.io/not-ready: }.")],
            "untolerated taint", "kubectl describe node says why",
        ),
        (
            {"observedGeneration": 1, "phase": "Starting"},
            [pending("0/3 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/not-ready: }, "
                     "2 node(s) had untolerated taint {team: vision}.")],
            "untolerated taint", "add tolerations to the template: team",
        ),
    ],
)  # fmt: skip
def test_finding(status: dict[str, Any], pods: list[dict[str, Any]], why: str, help_: str) -> None:
    findings = explain(Seen(job(status), pods, NOW))
    [found] = [each for each in findings if why in each.why]
    assert help_ in found.help
    assert bool(help_) == bool(found.help)


def lacks(reasons: str, preemption: str = "3 Preemption is not helpful for scheduling") -> str:
    """Kubernetes 1.34 to 1.36: "not helpful" of a node that has less than is asked for, with no pod on it."""
    start = "0/3 nodes are available: "
    return f"{start}{reasons}. no new claims to deallocate, preemption: {start}{preemption}."


@pytest.mark.parametrize(
    ("words", "help_"),
    [
        (lacks("3 Insufficient memory"), "none of the nodes that are there, and that it may run on, has as much"),
        (lacks("3 Insufficient memory", "3 No preemption victims found for incoming pod"), "the nodes are full"),
        (lacks("3 Insufficient memory", "1 No preemption victims found for incoming pod, 2 Preemption is not helpful "
               "for scheduling"), "the nodes are full"),
        (lacks("3 Insufficient memory", "not eligible due to preemptionPolicy=Never."), "the nodes are full"),
        (lacks("1 node(s) were unschedulable, 2 Insufficient memory"), "the nodes are full"),
        (lacks("1 node(s) had untolerated taint(s), 2 Insufficient memory"), "or add tolerations"),
        (lacks("1 node(s) had untolerated taint {node.kubernetes.io/unreachable: }, 2 Insufficient memory"), "away"),
        (lacks("3 Insufficient nvidia.com/gpu"), "all GPUs are taken, or no node has any: add nodes"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("told", [False, True])
def test_requests_that_no_node_can_meet_are_told_from_full_nodes(words: str, help_: str, told: bool) -> None:
    """900 GiB on nodes of 24: no node was full, and one more of them no help."""
    conditions = [condition("Degraded", "Unschedulable", f"pod digits-worker-0-0: {words}; it needs a node")]
    status = {"observedGeneration": 1, "phase": "Starting", "conditions": conditions if told else []}
    helps = [each.help for each in explain(Seen(job(status), [pending(words)], NOW))]
    assert any(help_ in each for each in helps) or (told and "as much as" not in help_)


def test_samples_that_on_nan_leaves_out_are_no_loss_of_a_server() -> None:
    of = job(RUNNING | {"training": {"phase": "Training", "step": 9}, "data": {"lost": 64}})
    [found] = explain(Seen(of, [pod_manifest()], NOW))
    assert "server" not in found.why + found.help


@pytest.mark.parametrize("error", ["0", "-1", "0.2", "0.24"])
def test_a_healthy_job_needs_no_explanation(error: str) -> None:
    """One that did what was predicted was slow while more workers were planned, or advised, than it had."""
    status = RUNNING | {
        "training": {"phase": "Training", "step": 9, "samplesPerSecond": "100", "goodput": "1"},
        "prediction": {"samplesPerSecond": "200", "relativeError": error},
    }
    assert explain(Seen(job(status), [pod_manifest()], NOW)) == []


@pytest.mark.parametrize(
    ("phase", "told"), [("", True), ("Pending", True), ("Starting", True), ("Running", False)]
)
def test_pods_that_may_not_be_read_are_said_to_be_unknown(phase: str, told: bool) -> None:
    """Not: "nothing needs an explanation", of a job that waits."""
    training = {"phase": "Training", "step": 9}
    of = job({"observedGeneration": 1, "phase": phase, "workers": {"ready": 3}, "training": training})
    findings = explain(Seen(of, (), NOW, unread='pods is forbidden: User "a" cannot list'))
    assert [each.why for each in findings] == (
        ['its pods cannot be read, which would say why it waits: pods is forbidden: User "a" cannot list']
        if told
        else []
    )


STOOD = RUNNING | {"training": {"phase": "Training", "step": 9, "lastProgressTime": stamp(NOW)}}


def test_a_command_that_helps_names_the_job() -> None:
    [found] = explain(Seen(job(STOOD), [pod_manifest()], NOW + timedelta(minutes=10)))
    assert "shoal logs digits --slot N" in found.help


@pytest.mark.parametrize(
    ("generation", "status", "minutes", "words"),
    [
        (1, {}, 0, "no operator has looked at this job"),
        (2, {"observedGeneration": 1}, 1, ""),
        (2, {"observedGeneration": 1}, 10, "has not seen the newest change of this job"),
        (1, STOOD, 1, ""),
        (1, STOOD, 10, "no step is known for 10m00s"),
    ],
)
def test_nobody_watches_is_said_after_a_while(
    generation: int, status: dict[str, Any], minutes: int, words: str
) -> None:
    seen = job(status)
    changes = {"creation_timestamp": stamp(NOW), "generation": generation}
    seen = seen.model_copy(update={"metadata": seen.metadata.model_copy(update=changes)})
    findings = explain(Seen(seen, (), NOW + timedelta(minutes=minutes)))
    assert [words in each.why and "shoal doctor" in each.help for each in findings] == (
        [True] if words else []
    )


@pytest.mark.parametrize(
    ("manager", "others"), [(None, False), (MANAGED_BY, False), ("kueue.x-k8s.io/mk", True)]
)
def test_only_another_controllers_job_is_said_to_be_one(manager: str | None, others: bool) -> None:
    findings = explain(Seen(job({"observedGeneration": 1}, managedBy=manager), (), NOW))
    assert any("another controller manages this job" in each.why for each in findings) is others


def test_a_batch_that_no_epoch_fills_is_named() -> None:
    training = {"entrypoint": "digits:job", "stopAfter": {"epochs": 3}, "batchSize": 5000}
    status = {"observedGeneration": 1, "phase": "Succeeded", "data": {"total": 1437}}
    [finding] = explain(Seen(job(status, training=training), (), NOW))
    assert (
        finding.why == "an epoch has 1,437 samples and a batch 5,000: each epoch was one step of one worker"
    )
    assert "training.batchSize" in finding.help


@pytest.mark.parametrize(
    ("stop", "metrics", "words"),
    [
        (
            {"metric": "accuracy", "value": "0.97"},
            {"accuracy": "0.99", "val_accuracy": "0.93"},
            "val_accuracy rises to 0.97; after 51 epochs it is 0.93",
        ),
        ({"metric": "val_loss", "value": "0"}, {"val_loss": "0.2"}, "falls to 0; after 51 epochs it is 0.2"),
        ({"metric": "gain", "value": "9", "mode": "Max"}, {}, "rises to 9, and was not evaluated yet"),
        ({"metric": "val_loss", "value": "0", "epochs": 60}, {"val_loss": "0.2"}, ""),
    ],
)
def test_a_job_that_ends_by_a_metric_alone_says_how_far_it_is(
    stop: dict[str, str], metrics: dict[str, str], words: str
) -> None:
    training = {"phase": "Training", "step": 9, "epoch": 51, "metrics": metrics}
    of = job(RUNNING | {"training": training}, training={"entrypoint": "digits:job", "stopAfter": stop})
    found = [each for each in explain(Seen(of, (), NOW)) if "training ends when" in each.why]
    assert [words in each.why and "stopAfter.epochs" in each.help for each in found] == (
        [True] if words else []
    )


def test_no_workers_is_named() -> None:
    [finding] = explain(
        Seen(job({"observedGeneration": 1, "phase": "Pending"}, workers={"replicas": 0}), (), NOW)
    )
    assert (finding.why, finding.help) == ("no workers are wanted", "shoal scale digits 1")


def test_a_failed_job_has_one_reason_and_a_suspended_one_says_how_to_resume() -> None:
    told = [condition("Failed", "UserError", "no job"), condition("Stalled", "UserError", "no job")]
    [finding] = explain(Seen(job({"observedGeneration": 1, "phase": "Failed", "conditions": told}), (), NOW))
    assert finding.why.startswith("Failed, UserError")
    [finding] = explain(Seen(job({"observedGeneration": 1, "phase": "Suspended"}, suspend=True), (), NOW))
    assert (finding.why, finding.help) == ("spec.suspend is true", "shoal resume digits")


@pytest.mark.parametrize(
    ("kind", "reason", "message", "help_"),
    [
        ("Stalled", "NameCollision", "digits-ps-0-0 exists and does not belong to this job", "rename the job"),
        (
            "Stalled", "NameCollision", "pod digits-ps-0-0 should have been deleted and is still being deleted",
            "wait until the cloud removes the Node",
        ),
        ("Failed", "UserError", "A training step failed: InvalidArgumentError: 10 is not in [0, 10)", "labels outside"),
        (
            "Degraded", "NotStarting", "its volumes are PersistentVolumeClaim runs",
            'kubectl describe pod POD has the kubelet\'s words. "Multi-Attach"',
        ),
    ],
)  # fmt: skip
def test_advice_is_for_what_a_message_says(kind: str, reason: str, message: str, help_: str) -> None:
    status = {"observedGeneration": 1, "conditions": [condition(kind, reason, message)]}
    [finding] = explain(Seen(job(status), (), NOW))
    assert help_ in finding.help


@pytest.mark.parametrize(("mode", "told"), [("Off", 1), ("Manual", 1), ("Advise", 1), ("Auto", 0)])
def test_workers_that_are_missing_are_told_where_a_person_wants_them(mode: str, told: int) -> None:
    """In mode Auto it is Shoal that says how many there are to be."""
    training = {"phase": "Training", "step": 9, "samplesPerSecond": "1"}
    made = job(RUNNING | {"workers": {"ready": 1}, "training": training}, elasticity={"mode": mode})
    found = [each for each in explain(Seen(made, (), NOW)) if each.why == "2 workers of 3 are not there"]
    assert len(found) == told


def test_a_missing_claim_is_not_sent_to_the_nodes() -> None:
    words = 'persistentvolumeclaim "runs" not found; create this PersistentVolumeClaim'
    status = {"observedGeneration": 1, "conditions": [condition("Degraded", "Unschedulable", words)]}
    [finding] = explain(Seen(job(status), (), NOW))
    assert finding.help == ""


def test_a_claim_without_a_volume_is_told_once_and_not_sent_to_the_nodes() -> None:
    said = "0/4 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found"
    [soon] = explain(Seen(job({"observedGeneration": 1, "phase": "Starting"}), [pending(said)], NOW))
    assert "kubectl describe pvc says why" in soon.help
    words = f"pod digits-worker-0-0: {said}; `kubectl describe pvc runs` says why it has no volume"
    status = {"observedGeneration": 1, "conditions": [condition("Degraded", "Unschedulable", words)]}
    [later] = explain(Seen(job(status), [pending(said)], NOW))
    assert (later.why, later.help) == (f"Degraded, Unschedulable: {words}", "")


def test_what_a_condition_says_is_told_once() -> None:
    words = "pod digits-ps-0-0: 0/4 nodes are available; the pod needs a node"
    told = [condition("Reconciling", "Unschedulable", f"Unschedulable: {words}"),
            condition("Degraded", "Unschedulable", words)]  # fmt: skip
    about = {"kind": "TrainingJob", "name": "digits"}
    events = [
        {"involvedObject": about, "type": "Warning", "reason": "Unschedulable", "message": message,
         "lastTimestamp": stamp(NOW)} for message in (words, "another thing")
    ]  # fmt: skip
    found = [each.what for each in moments(job({"conditions": told}), events)]
    assert found == [f"Degraded: {words}", "another thing [Unschedulable]"]


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ("NodeSignalsSuspect", "warning"),
        ("NodeSignalsUnavailable", "warning"),
        ("Complete", "good"),
        ("Suspended", "normal"),
        ("PlanReady", "normal"),
    ],
)
def test_conditions_of_trouble_are_warnings(told: str, kind: str) -> None:
    [moment] = moments(job({"conditions": [condition(told, "Some", "words")]}))
    assert (moment.what, moment.kind) == (f"{told}: words", kind)


def test_a_plan_that_is_late_says_by_how_much() -> None:
    spec = {
        "workers": {"replicas": 3, "pools": ["t4"]},
        "elasticity": {"mode": "Auto", "objective": {"deadlineSeconds": 3600}},
    }
    status = RUNNING | {
        "startTime": stamp(NOW),
        "training": {"phase": "Training", "step": 9},
        "plan": {
            "summary": "3 t4",
            "reason": "all that there are",
            "finishTime": stamp(NOW + timedelta(hours=2)),
        },
    }
    words = [each.why for each in explain(Seen(job(status, **spec), (), NOW))]
    assert "3 t4: all that there are" in words
    assert "it is expected 1h00m after its deadline" in words


def test_a_plan_that_keeps_its_limits_no_longer_says_so() -> None:
    """The deadline was lowered: the counts stay, and so do the words with which they were decided."""
    plan = {"summary": "3 t4", "reason": "they end within the deadline of 150 s"}
    missed = condition("PlanReady", "NotFeasible", "No plan ends within 20 s.") | {"status": "False"}
    status = RUNNING | {"training": {"phase": "Training", "step": 9}, "plan": plan, "conditions": [missed]}
    [found] = explain(Seen(job(status), [pod_manifest()], NOW))
    assert found.why == "3 t4: No plan ends within 20 s."
    assert "elasticity.objective" in found.help


def test_a_finish_that_is_told_to_the_minute_is_late_by_no_part_of_one() -> None:
    objective = {"mode": "Auto", "objective": {"deadlineSeconds": 150}}
    for seconds, late in ((170, False), (209, False), (210, True)):
        plan = {"summary": "3 t4", "reason": "fast", "finishTime": stamp(NOW + timedelta(seconds=seconds))}
        status = RUNNING | {
            "startTime": stamp(NOW),
            "training": {"phase": "Training", "step": 9},
            "plan": plan,
        }
        of = job(status, elasticity=objective, workers={"replicas": 3, "pools": ["t4"]})
        words = [each.why for each in explain(Seen(of, (), NOW))]
        assert any("after its deadline" in each for each in words) is late


def test_a_job_that_failed_says_how_a_mended_one_is_applied_again() -> None:
    """What is trained is immutable, and `kubectl apply` of the mended file is refused."""
    failed = condition("Failed", "UserError", "A callback failed")
    [found] = explain(
        Seen(job({"observedGeneration": 1, "phase": "Failed", "conditions": [failed]}), (), NOW)
    )
    assert found.help.endswith("; to apply it again: choose another name, or kubectl delete etj digits first")


def test_story_is_in_time_order_and_has_the_reason_of_a_loss() -> None:
    def pod(incarnation: int, node: str, created: float, begun: float) -> dict[str, Any]:
        return {
            "metadata": {
                "creationTimestamp": stamp(NOW + timedelta(seconds=created)),
                "labels": {
                    "shoal.dev/role": "worker",
                    "shoal.dev/index": "1",
                    "shoal.dev/incarnation": str(incarnation),
                },
            },
            "spec": {"nodeName": node},
            "status": {
                "containerStatuses": [
                    {
                        "name": "worker",
                        "state": {"running": {"startedAt": stamp(NOW + timedelta(seconds=begun))}},
                    }
                ]
            },
        }

    ended = {"role": "worker", "index": 1, "state": "Ended", "node": "spot-1", "pool": "t4", "cause": "NodeShutdown",
             "endedAt": stamp(NOW + timedelta(seconds=90))}  # fmt: skip
    status = RUNNING | {"slots": [ended, {"index": 1, "incarnation": 1, "node": "spot-2", "pool": "t4"}]}
    event = {
        "involvedObject": {"kind": "Pod", "name": "digits-worker-1-1"}, "type": "Warning", "reason": "BackOff",
        "message": "Back-off pulling image", "count": 3, "lastTimestamp": stamp(NOW + timedelta(seconds=92)),
    }  # fmt: skip
    usual = event | {"type": "Normal", "reason": "Pulled", "message": "Container image is there"}
    earlier = event | {"message": "of an earlier job", "lastTimestamp": stamp(NOW - timedelta(seconds=9))}
    pods = [pod(0, "spot-1", 0, 4), pod(1, "spot-2", 90, 95)]
    of = job(status)
    of = of.model_copy(update={"metadata": of.metadata.model_copy(update={"creation_timestamp": stamp(NOW)})})
    assert [each.what for each in moments(of, [event, usual, earlier], pods)] == [
        "the job was created",
        "worker 1-0 runs on spot-1 (t4), 4s after it was created",
        "worker 1-0 ended on spot-1 (t4): NodeShutdown",
        "digits-worker-1-1: Back-off pulling image [BackOff] (3 times)",
        "worker 1-1 runs on spot-2 (t4), 5s after it was created",
    ]


def starting(role: str, phase: str, *, ready: bool = False, node: str | None = "n") -> dict[str, Any]:
    metadata = {
        "name": f"digits-{role}-0-0",
        "labels": {"shoal.dev/role": role},
        "creationTimestamp": stamp(NOW),
    }
    return {
        "metadata": metadata,
        "spec": {"nodeName": node, "schedulerName": "bin-packer"},
        "status": {"phase": phase, "containerStatuses": [{"name": role, "ready": ready, "state": {}}]},
    }


@pytest.mark.parametrize(
    ("pods", "why"),
    [
        ([], "about to be created"),
        (
            [starting("ps", "Running"), starting("worker", "Pending")],
            "digits-worker-0-0: its node pulls the image",
        ),
        (
            [starting("ps", "Running"), starting("worker", "Running")],
            "digits-ps-0-0: it reads the job's storage",
        ),
        ([starting("ps", "Running", ready=True), starting("worker", "Running")], "no step is done yet"),
    ],
)
def test_a_job_that_starts_says_what_it_waits_for(pods: list[dict[str, Any]], why: str) -> None:
    status = {"observedGeneration": 1, "phase": "Starting", "startTime": stamp(NOW)}
    [found] = explain(Seen(job(status), pods, now=NOW + timedelta(seconds=20)))
    assert why in found.why
    assert not found.help
    [found] = explain(Seen(job(status), pods, now=NOW + timedelta(minutes=4)))
    assert "that is 4m00s now: shoal logs digits --slot 0" in found.help


def test_a_pod_that_no_scheduler_looks_at_is_not_said_to_pull_its_image() -> None:
    status = {"observedGeneration": 1, "phase": "Pending", "startTime": stamp(NOW)}
    pods = [starting(role, "Pending", node=None) for role in ("ps", "worker")]
    [soon] = explain(Seen(job(status), pods, now=NOW + timedelta(seconds=20)))
    assert soon.why == "digits-ps-0-0, digits-worker-0-0: it waits for a scheduler to give it a node"
    [found] = explain(Seen(job(status), pods, now=NOW + timedelta(seconds=61)))
    assert found.why == f"digits-ps-0-0, digits-worker-0-0: {no_scheduler('bin-packer')}"
    assert "schedulerName" in found.help
    words = f"pod digits-ps-0-0: {no_scheduler('bin-packer')}"  # as the operator says it
    told = status | {"conditions": [condition("Degraded", "Unschedulable", words)]}
    [found] = explain(Seen(job(told), pods[:1], now=NOW + timedelta(seconds=61)))
    assert found.why == f"Degraded, Unschedulable: {words}"
    assert "schedulerName" in found.help


def test_code_that_never_ends_is_told_as_what_a_worker_does() -> None:
    """A worker that imports an endless loop runs, and its job is Running without a step."""
    status = RUNNING | {"training": {"phase": "Training", "step": 0}, "startTime": stamp(NOW)}
    assert "never ends" in explain(Seen(job(status), now=NOW + timedelta(minutes=5)))[0].help


WAITS = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient cpu."}


@pytest.mark.parametrize("conditions", [[], [WAITS]], ids=["starting", "waiting"])
def test_what_many_pods_wait_for_is_said_of_a_few(conditions: list[dict[str, Any]]) -> None:
    """Of 250 workers that wait for the same, the reason was after 5,000 characters of names."""
    pods = [pod_manifest("worker", i, phase="Pending", node=None, conditions=conditions) for i in range(250)]
    [found] = explain(Seen(job({"phase": "Starting", "observedGeneration": 1}), pods, NOW))
    assert found.why.startswith("digits-worker-0-0, digits-worker-1-0, digits-worker-10-0 and 247 more: ")


def resumed(ago: timedelta, **more: Any) -> dict[str, Any]:
    """The status of a job whose last step was an hour ago, and whose pause ended this long ago."""
    pause = condition("Suspended", "Resumed", "") | {
        "status": "False",
        "lastTransitionTime": stamp(NOW - ago),
    }
    training = {"phase": "Training", "step": 9, "lastProgressTime": stamp(NOW - timedelta(hours=1))}
    return RUNNING | {"conditions": [pause], "training": training} | more


def test_a_job_that_was_resumed_a_moment_ago_starts_its_workers() -> None:
    """Not: no step is known for an hour."""
    [found] = explain(Seen(job(resumed(timedelta(seconds=100))), [pod_manifest()], NOW))
    assert (found.why, found.help) == (WORKERS_START, "")


def test_a_job_that_was_resumed_long_ago_and_makes_no_step_stands_since_then() -> None:
    [found] = explain(Seen(job(resumed(timedelta(minutes=10))), [pod_manifest()], NOW))
    assert "no step is known for 10m00s, since it was resumed" in found.why
    assert "shoal doctor" in found.help


def test_an_operator_that_wrote_a_moment_ago_is_not_suspected() -> None:
    """It told of a node that was lost half a minute before."""
    slots = [{"index": 0, "state": "Starting", "createdAt": stamp(NOW - timedelta(seconds=35))}]
    [found] = explain(Seen(job(resumed(timedelta(minutes=4), slots=slots)), [pod_manifest()], NOW))
    assert found.why == WORKERS_START
    assert "that is 4m00s now" in found.help
    training = {"phase": "Training", "step": 9, "lastProgressTime": stamp(NOW - timedelta(minutes=10))}
    [found] = explain(Seen(job(RUNNING | {"training": training, "slots": slots}), [pod_manifest()], NOW))
    assert "no operator" not in found.why
    assert "shoal doctor" not in found.help
