"""The signal tables: what nodes and pods say, and what has become of a pod."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from shoal.api.kube import Node, Pod, Toleration
from shoal.api.training_job import FailureRule
from shoal.api.training_job_status import Slot
from shoal.manifests.platforms import is_spot
from shoal.policy.facts.read import read
from shoal.policy.facts.signals import Meaning, node_signal
from shoal.policy.facts.verdict import PodOutcome, Verdict
from shoal.policy.facts.verdict import judge as judge_with
from shoal.policy.tell import pod_problems
from shoal_trainer.contract import Outcome
from tests.unit.policy import build

SLOT = Slot(
    role="worker",
    index=0,
    incarnation=0,
    state="Running",
    node="spot-0",
    machine=build.node().machine,
)


def judge(pod: Pod, slot: Slot, nodes: dict[str, Node] | None, rules: Sequence[FailureRule] = ()) -> Verdict:
    """The verdict on a pod on one of these nodes; None: they cannot be read."""
    name = pod.spec.node_name
    signal = node_signal(nodes.get(name), slot, pod.spec.tolerations) if name and nodes is not None else None
    return judge_with(pod, slot, signal, rules)


def taint(key: str, effect: str = "NoSchedule") -> dict[str, Any]:
    return {"taints": [{"key": key, "effect": effect}]}


@pytest.mark.parametrize(
    ("how", "reason", "meaning"),
    [
        ({"ready": "False", "message": "node is shutting down"}, "NodeShutdown", Meaning.LEAVING),
        ({"ready": "Unknown"}, "NodeLost", Meaning.UNREACHABLE),
        (taint("node.kubernetes.io/out-of-service", "NoExecute"), "NodeLost", Meaning.LOST),
        (taint("node.cloudprovider.kubernetes.io/shutdown"), "NodeLost", Meaning.LOST),
        (
            {"ready": "False", **taint("node.kubernetes.io/not-ready", "NoExecute")},
            "NodeNotReady",
            Meaning.UNREACHABLE,
        ),
        (taint("cloud.google.com/impending-node-termination"), "ImpendingNodeTermination", Meaning.LEAVING),
        (taint("karpenter.sh/disrupted"), "NodeDisrupted", Meaning.LEAVING),
        (taint("aws-node-termination-handler/spot-itn"), "SpotInterruption", Meaning.LEAVING),
        (
            taint("aws-node-termination-handler/rebalance-recommendation"),
            "RebalanceRecommended",
            Meaning.AT_RISK,
        ),
        (taint("remediator.kubernetes.azure.com/unschedulable"), "NodeRemediated", Meaning.LEAVING),
        (taint("ToBeDeletedByClusterAutoscaler"), "ScaledDownByAutoscaler", Meaning.LEAVING),
        (
            taint("DeletionCandidateOfClusterAutoscaler", "PreferNoSchedule"),
            "ScaleDownCandidate",
            Meaning.AT_RISK,
        ),
        (
            {"conditions": [{"type": "VMEventScheduled", "status": "True"}]},
            "VMEventScheduled",
            Meaning.LEAVING,
        ),
        ({"uid": "another", "boot": ""}, "NodeReplaced", Meaning.LOST),
        ({"uid": "another", "boot": "boot-2"}, "NodeReplaced", Meaning.LOST),
        ({"boot": "boot-2"}, "NodeReplaced", Meaning.LOST),
    ],
)
def test_node_signals(how: dict[str, Any], reason: str, meaning: Meaning) -> None:
    signal = node_signal(build.node(**how), SLOT)
    assert signal is not None
    assert (signal.reason, signal.meaning) == (reason, meaning)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"boot": ""},
        {"uid": "another"},  # registered again: a boot is of one machine
        {"ready": "False", "message": "container runtime is down"},
        taint("node.kubernetes.io/unreachable", "NoExecute"),  # it is heard again: these go a while later
        taint("node.kubernetes.io/not-ready", "NoExecute"),
        taint("node.kubernetes.io/unschedulable"),
        taint("kubernetes.azure.com/scalesetpriority"),
        taint("nvidia.com/gpu"),
    ],
)
def test_conditions_that_are_not_signals(how: dict[str, Any]) -> None:
    assert node_signal(build.node(**how), SLOT) is None


def test_missing_node_is_deleted_only_if_it_was_seen() -> None:
    gone = node_signal(None, SLOT)
    assert gone is not None
    assert gone.reason == "NodeDeleted"
    assert node_signal(None, SLOT.model_copy(update={"machine": ""})) is None


def test_strongest_signal_applies() -> None:
    both = build.node(ready="Unknown", taints=[{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}])
    signal = node_signal(both, SLOT)
    assert signal is not None
    assert signal.reason == "NodeLost"


def announced(**how: Any) -> Node:
    """A node of which it was said that it goes, which keeps no pods away."""
    event = {"type": "VMEventScheduled", "status": "True", "lastTransitionTime": build.stamp(build.NOW)}
    return build.node(**{"conditions": [event], **how})


def terminating() -> Node:
    """A node that is deleted, and stays for a finalizer."""
    manifest = build.node_manifest()
    manifest["metadata"]["deletionTimestamp"] = build.stamp(build.NOW)
    return Node.model_validate(manifest)


def timed(key: str, effect: str) -> dict[str, Any]:
    return {"key": key, "effect": effect, "timeAdded": build.stamp(build.NOW)}


PREFERRED = build.node(taints=[timed("aws-node-termination-handler/spot-itn", "PreferNoSchedule")])
CORDONED = announced(taints=[timed("node.kubernetes.io/unschedulable", "NoSchedule")])
SHUT_DOWN = build.node(
    ready="False",
    conditions=[
        {
            "type": "Ready", "status": "False", "message": "node is shutting down",
            "lastTransitionTime": build.stamp(build.NOW)
        }
    ],
)  # fmt: skip


@pytest.mark.parametrize(
    ("node", "before", "same_second", "later"),
    [
        (announced(), True, False, False),
        (terminating(), True, False, False),
        (PREFERRED, True, False, False),
        (CORDONED, True, True, True),
        (SHUT_DOWN, True, True, False),
    ],
    ids=["announced", "terminating", "tainted, and preferred less", "cordoned, too", "shut down"],
)
@pytest.mark.parametrize("seconds", [-1, 0, 11])
def test_what_was_said_of_a_node_before_a_pod_was_put_there_says_nothing_of_it(
    node: Node, before: bool, same_second: bool, later: bool, seconds: int
) -> None:
    """A pod was moved, its successor came back to the node, was moved, and so on, until the job had failed by it.

    One that was bound to a node that keeps pods away was so a moment before the scheduler could know: it is moved.
    """
    bound = build.NOW + timedelta(seconds=seconds)
    expected = {-1: before, 0: same_second, 11: later}[seconds]
    assert (node_signal(node, SLOT, bound=bound) is not None) is expected
    explained = node is not SHUT_DOWN or seconds <= 10
    assert (node_signal(node, SLOT, bound=bound, ended=True) is not None) is explained, "its end"


def test_what_is_said_of_a_node_later_counts_whatever_was_said_before() -> None:
    later = build.NOW + timedelta(minutes=5)
    taint = {"key": "ToBeDeletedByClusterAutoscaler", "effect": "PreferNoSchedule"}
    both = announced(taints=[{**taint, "timeAdded": build.stamp(later)}])
    signal = node_signal(both, SLOT, bound=build.NOW + timedelta(minutes=1))
    assert signal is not None
    assert signal.reason == "ScaledDownByAutoscaler"
    tolerated = [Toleration(operator="Exists")]
    assert node_signal(CORDONED, SLOT, tolerated, bound=later) is None, "it keeps no such pod away"


@pytest.mark.parametrize(
    "label",
    [
        {"cloud.google.com/gke-spot": "true"},
        {"eks.amazonaws.com/capacityType": "SPOT"},
        {"karpenter.sh/capacity-type": "spot"},
        {"kubernetes.azure.com/scalesetpriority": "spot"},
    ],
)
def test_spot_labels_of_all_clouds(label: dict[str, str]) -> None:
    plain = build.node(spot=False)
    assert not is_spot(plain)
    assert is_spot(plain.model_copy(update={"metadata": plain.metadata.model_copy(update={"labels": label})}))


NODES = {"spot-0": build.node()}
SHUTDOWN = build.node(ready="False", message="node is shutting down")
TARGET = [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}]
BY_KUEUE = [{"type": "TerminationTarget", "status": "True", "reason": "WorkloadEvicted"}]
LOW = "The node was low on resource: memory."
LIMIT = 'Usage of EmptyDir volume "tmp" exceeds the limit "1Gi".'
TAKEN = {"phase": "Failed", "state": build.ended(1), "conditions": TARGET}
MAY_GO = build.node(taints=[{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}])
USER_FAULT = build.termination_message(Outcome.FAILED, reason="UserError", message="no module named digts")


@pytest.mark.parametrize(
    ("pod", "node", "outcome", "reason"),
    [
        ({}, None, PodOutcome.HEALTHY, ""),
        ({"phase": "Pending", "node": None}, None, PodOutcome.HEALTHY, ""),
        ({}, SHUTDOWN, PodOutcome.LEAVING, "NodeShutdown"),
        ({}, build.node(ready="Unknown"), PodOutcome.UNREACHABLE, "NodeLost"),
        ({"deleting": build.NOW}, None, PodOutcome.LEAVING, "Deleted"),
        ({"deleting": build.NOW, "conditions": TARGET}, None, PodOutcome.LEAVING, "TerminationByKubelet"),
        ({"phase": "Failed", "reason": "NodeAffinity"}, None, PodOutcome.REJECTED, "NodeAffinity"),
        ({"phase": "Failed", "reason": "OutOfnvidia.com/gpu"}, None, PodOutcome.REJECTED, "OutOfResource"),
        ({"phase": "Failed", "reason": "NodeShutdown"}, None, PodOutcome.REJECTED, "NodeShutdown"),
        (TAKEN, None, PodOutcome.DISRUPTED, "TerminationByKubelet"),
        ({"conditions": BY_KUEUE}, None, PodOutcome.LEAVING, "EvictedByKueue"),
        ({**TAKEN, "conditions": BY_KUEUE}, None, PodOutcome.DISRUPTED, "EvictedByKueue"),
        ({"phase": "Failed", "state": build.ended(143)}, SHUTDOWN, PodOutcome.DISRUPTED, "NodeShutdown"),
        ({"phase": "Succeeded", "state": build.ended(0)}, SHUTDOWN, PodOutcome.DISRUPTED, "NodeShutdown"),
        ({"phase": "Succeeded", "state": build.ended(0), "deleting": build.NOW}, None, PodOutcome.DISRUPTED, "Deleted"),
        ({"phase": "Failed", "reason": "Evicted", "message": LOW}, None, PodOutcome.DISRUPTED, "Evicted"),
        ({"phase": "Failed", "reason": "Evicted", "message": LIMIT}, None, PodOutcome.FAILED, "Evicted"),
        ({"phase": "Failed", "reason": "NodeLost"}, None, PodOutcome.DISRUPTED, "NodeLost"),
        ({"phase": "Failed", "state": build.ended(137, "OOMKilled")}, None, PodOutcome.FAILED, "OOMKilled"),
        ({"phase": "Failed", "state": build.ended(137)}, None, PodOutcome.KILLED, "Killed"),
        ({"phase": "Failed", "state": build.ended(143)}, None, PodOutcome.KILLED, "Killed"),
        ({"phase": "Failed", "state": build.ended(4)}, None, PodOutcome.KILLED, "Fenced"),
        ({"phase": "Succeeded", "state": build.ended(0)}, None, PodOutcome.DONE, "Done"),
        ({"phase": "Failed", "state": build.ended(1)}, None, PodOutcome.FAILED, "Error"),
        ({"phase": "Failed", "state": build.ended(2, message=USER_FAULT)}, None, PodOutcome.FAILED, "UserError"),
        ({"phase": "Failed", "state": build.ended(2, message=USER_FAULT)}, MAY_GO, PodOutcome.FAILED, "UserError"),
        ({"phase": "Failed", "state": build.ended(1)}, MAY_GO, PodOutcome.DISRUPTED, "NodeDisrupted"),
        ({"phase": "Running", "state": build.ended(1)}, None, PodOutcome.FAILED, "Error"),  # a sidecar still runs
    ],
)  # fmt: skip
def test_verdict_on_a_worker(pod: dict[str, Any], node: Any, outcome: PodOutcome, reason: str) -> None:
    verdict = judge(build.pod(**pod), SLOT, {"spot-0": node or build.node()})
    assert (verdict.outcome, verdict.reason) == (outcome, reason)


def test_pod_evicted_before_its_containers_existed_is_disrupted() -> None:
    manifest = build.pod_manifest(
        phase="Failed", reason="Evicted", message="The node was low on resource: memory."
    )
    del manifest["status"]["containerStatuses"]
    verdict = judge(build.Pod.model_validate(manifest), SLOT, NODES)
    assert verdict.outcome is PodOutcome.DISRUPTED


def not_begun(init: dict[str, Any], **how: Any) -> dict[str, Any]:
    """A pod whose training container waits for this state of its init container."""
    statuses = [{"name": "mkdir", "state": build.ended(0, "Completed")}, {"name": "fetch", "state": init}]
    manifest = build.pod_manifest(state=build.waiting("PodInitializing"), **how)
    manifest["status"]["initContainerStatuses"] = statuses
    return manifest


@pytest.mark.parametrize(
    ("end", "outcome", "reason", "words"),
    [
        (build.ended(3, message="trying\n403 Forbidden\n"), PodOutcome.FAILED, "InitContainerFailed", "3: 403 Forb"),
        (build.ended(137, "OOMKilled"), PodOutcome.FAILED, "OOMKilled", "raise its resources.limits.memory"),
        (build.ended(143), PodOutcome.KILLED, "Killed", "exit code 143"),
        (build.waiting("PodInitializing"), PodOutcome.DISRUPTED, "Unknown", ""),
    ],
)  # fmt: skip
def test_verdict_on_a_pod_whose_init_container_ended(
    end: dict[str, Any], outcome: PodOutcome, reason: str, words: str
) -> None:
    pod = build.Pod.model_validate(not_begun(end, phase="Failed"))
    verdict = judge(pod, SLOT, NODES)
    assert (verdict.outcome, verdict.reason) == (outcome, reason)
    assert words in verdict.message
    if outcome is not PodOutcome.DISRUPTED:
        assert "init container fetch" in verdict.message
        assert verdict.exit_code == end["terminated"]["exitCode"]
    taken = judge(pod, SLOT, {"spot-0": SHUTDOWN})
    assert taken.outcome is PodOutcome.DISRUPTED


@pytest.mark.parametrize("role", ["worker", "ps"])
@pytest.mark.parametrize(
    ("waiting", "reason"), [("CrashLoopBackOff", "CrashLooping"), ("ImagePullBackOff", "ImagePullFailed")]
)
def test_init_container_that_cannot_start_is_a_pod_problem(role: str, waiting: str, reason: str) -> None:
    pod = build.Pod.model_validate(not_begun(build.waiting(waiting), role=role, phase="Pending"))
    problem = pod_problems.find(read(build.observe(build.job(), pod)))
    assert problem is not None
    assert problem.reason == reason
    assert "container fetch" in problem.message


@pytest.mark.parametrize(
    ("action", "outcome", "fatal"),
    [
        ("FailJob", PodOutcome.FAILED, True),
        ("Restart", PodOutcome.FAILED, False),
        ("Ignore", PodOutcome.IGNORED, False),
        ("CountAsDisruption", PodOutcome.DISRUPTED, False),
    ],
)
def test_failure_rules_decide_the_outcome(action: Any, outcome: PodOutcome, fatal: bool) -> None:
    rules = [
        FailureRule(on_exit_codes=[7], action="FailJob"),
        FailureRule(on_exit_codes=[42, 137], action=action),
    ]
    verdict = judge(build.pod(phase="Failed", state=build.ended(42)), SLOT, NODES, rules)
    assert (verdict.outcome, verdict.fatal) == (outcome, fatal)


def test_exit_2_is_fatal_only_with_a_termination_message() -> None:
    explained = judge(build.pod(phase="Failed", state=build.ended(2, message=USER_FAULT)), SLOT, NODES)
    assert explained.fatal
    assert explained.message == "no module named digts"
    unexplained = judge(build.pod(phase="Failed", state=build.ended(2, message="usage: python")), SLOT, NODES)
    assert not unexplained.fatal


def test_server_restarted_in_place_is_healthy() -> None:
    slot = SLOT.model_copy(update={"role": "ps"})
    again = judge(build.pod("ps", state=build.ended(1)), slot, NODES)
    assert again.outcome is PodOutcome.HEALTHY


def test_rebooted_node_loses_its_pods() -> None:
    """GKE recreates a reclaimed node under the same name: the pod on the old one is lost."""
    pod = build.pod(created=build.NOW - timedelta(minutes=5))
    assert judge(pod, SLOT, {"spot-0": build.node(boot="boot-2")}).outcome is PodOutcome.LOST


def test_unreadable_nodes_are_no_signal() -> None:
    """An operator that may no longer read nodes must not treat all of them as deleted."""
    assert judge(build.pod(), SLOT, {}).outcome is PodOutcome.LOST
    assert judge(build.pod(), SLOT, None).outcome is PodOutcome.HEALTHY
