"""What has become of a pod: the one place where the platform's doing is told from the job's own fault.

First match wins: refused by the kubelet, taken by the platform by the pod's word, by the node's word, deleted, out of
memory, the user's rules for exit codes, killed without a word, ended too early, the job's own fault. A pod whose
training container never began is judged by its init container.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import ValidationError

from shoal.api.kube import Node, Pod, Terminated
from shoal.api.training_job import FailureRule
from shoal.api.training_job_status import Slot
from shoal.policy.disruption import (
    Meaning,
    exceeded_its_own_limit,
    node_signal,
    pod_disruption,
    rejection,
)
from shoal.policy.wording import conclusion, short
from shoal_trainer.contract import (
    EXIT_FENCED,
    EXIT_OK,
    EXIT_USER,
    FAILURE_REASONS,
    Outcome,
    TerminationMessage,
)


class PodOutcome(StrEnum):
    """What has become of a pod."""

    HEALTHY = "Healthy"  # starting or running
    LEAVING = "Leaving"  # runs, but was told to go or its node is going
    LOST = "Lost"  # its node is gone, whatever the API shows
    REJECTED = "Rejected"  # its node would not take it
    DISRUPTED = "Disrupted"  # ended, the platform's doing
    KILLED = "Killed"  # ended by a signal, nobody says why
    DONE = "Done"  # exit 0
    FAILED = "Failed"  # ended, the job's own fault
    IGNORED = "Ignored"  # ended, and the user's rules say not to count it


ENDED = frozenset(
    {
        PodOutcome.REJECTED,
        PodOutcome.DISRUPTED,
        PodOutcome.KILLED,
        PodOutcome.DONE,
        PodOutcome.FAILED,
        PodOutcome.IGNORED,
    }
)
"""Its process is no more."""


@dataclass(frozen=True)
class Verdict:
    """A outcome, with the reason in one word, in a sentence, and whether starting again is pointless."""

    outcome: PodOutcome
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    fatal: bool = False


HEALTHY = Verdict(PodOutcome.HEALTHY)
_KILLED = {137: "SIGKILL", 143: "SIGTERM"}


def termination_message(terminated: Terminated | None) -> TerminationMessage | None:
    """What the trainer wrote before it ended, if it is one of its messages."""
    if terminated is None or not terminated.message:
        return None
    try:
        return TerminationMessage.model_validate_json(terminated.message)
    except ValidationError:
        return None


def terminated(pod: Pod, container: str) -> Terminated | None:
    """How the training container ended, if it has and is not being started again."""
    found = next((c for c in pod.status.container_statuses if c.name == container), None)
    return found.state.terminated if found else None


def judge(
    pod: Pod, slot: Slot, nodes: Mapping[str, Node] | None, rules: Sequence[FailureRule] = ()
) -> Verdict:
    """The verdict on a pod.

    `nodes` are all nodes as they are now, None where nodes cannot be read; `slot` says which machine it was when the
    pod was bound.
    """
    end = terminated(pod, slot.role)
    restarts_in_place = slot.role == "ps" and end is not None and end.exit_code != 0
    ended = pod.status.phase in {"Failed", "Succeeded"} or (end is not None and not restarts_in_place)
    bound = pod.spec.node_name
    signal = node_signal(nodes.get(bound), slot) if bound and nodes is not None else None
    if not ended:
        return _alive(pod, signal.reason if signal else "", signal.meaning if signal else None)
    code = end.exit_code if end else None
    if refused := rejection(pod):
        return Verdict(PodOutcome.REJECTED, refused, pod.status.message, code)
    if exceeded_its_own_limit(pod):
        return Verdict(PodOutcome.FAILED, "Evicted", pod.status.message, code)
    if taken := pod_disruption(pod):
        return Verdict(PodOutcome.DISRUPTED, taken, pod.status.message, code)
    if signal is not None and signal.meaning >= Meaning.LEAVING:
        return Verdict(PodOutcome.DISRUPTED, signal.reason, pod.status.message, code)
    if pod.metadata.deletion_timestamp:
        return Verdict(PodOutcome.DISRUPTED, "Deleted", pod.status.message, code)
    if end is None:
        return _never_began(pod)
    return judge_exit(end, slot, rules)


def _never_began(pod: Pod) -> Verdict:
    """The verdict on a pod that ended before its training container began."""
    ends = ((c.name, c.state.terminated) for c in pod.status.init_container_statuses)
    failed = next(((name, end) for name, end in ends if end is not None and end.exit_code != EXIT_OK), None)
    if failed is None:
        return Verdict(PodOutcome.DISRUPTED, "Unknown", pod.status.message)
    name, end = failed
    code = end.exit_code
    ended = f"init container {name} ended with exit code {code}"
    if end.reason == "OOMKilled":
        words = f"{ended}: out of memory: raise its resources.limits.memory in the job's template"
        return Verdict(PodOutcome.FAILED, "OOMKilled", words, code)
    if code in _KILLED:
        return Verdict(PodOutcome.KILLED, "Killed", f"{ended} ({_KILLED[code]}); no cause was reported", code)
    last = conclusion(end.message)
    words = f"{ended}{f': {last}' if last else ''} (see `kubectl logs {pod.metadata.name} -c {name}`)"
    return Verdict(PodOutcome.FAILED, "InitContainerFailed", words, code)


def _alive(pod: Pod, reason: str, meaning: Meaning | None) -> Verdict:
    if meaning is Meaning.LOST:
        return Verdict(PodOutcome.LOST, reason)
    if taken := pod_disruption(pod):
        return Verdict(PodOutcome.LEAVING, taken, pod.status.message)
    if meaning is Meaning.LEAVING:
        return Verdict(PodOutcome.LEAVING, reason)
    if pod.metadata.deletion_timestamp:
        return Verdict(PodOutcome.LEAVING, "Deleted")
    return HEALTHY


def judge_exit(end: Terminated, slot: Slot, rules: Sequence[FailureRule]) -> Verdict:
    """The verdict on an exit that nothing outside the container explains."""
    code = end.exit_code
    if end.reason == "OOMKilled":
        words = f"out of memory: raise resources.limits.memory of container {slot.role}, or lower training.batchSize"
        return Verdict(PodOutcome.FAILED, "OOMKilled", words, code)
    for rule in rules:
        if code in rule.on_exit_codes:
            return _by_rule(rule, code)
    if code in _KILLED:
        words = f"container {slot.role} ended with exit code {code} ({_KILLED[code]}); no cause was reported"
        return Verdict(PodOutcome.KILLED, "Killed", words, code)
    if code == EXIT_FENCED:
        return Verdict(PodOutcome.KILLED, "Fenced", "a newer incarnation has replaced it", code)
    said = termination_message(end)
    if said is not None and said.outcome is Outcome.FAILED:
        fatal = code in {EXIT_OK, EXIT_USER}  # the coordinator ends 0 when it has said all there is to say
        if said.reason in FAILURE_REASONS:
            return Verdict(PodOutcome.FAILED, said.reason, said.message, code, fatal)
        words = f"{short(said.reason, 100)}: {said.message}" if said.reason else said.message
        return Verdict(PodOutcome.FAILED, "Error", words, code, fatal)  # reasons are keys and labels: few
    if code == EXIT_OK:
        return Verdict(PodOutcome.DONE, "Done", "", code)
    last = conclusion(end.message) or f"container {slot.role} ended with exit code {code}"
    return Verdict(PodOutcome.FAILED, "Error", f"{last} (see the logs of the pod)", code)


def _by_rule(rule: FailureRule, code: int) -> Verdict:
    words = f"exit code {code} matches a rule of runPolicy.failureRules with action {rule.action}"
    match rule.action:
        case "FailJob":
            return Verdict(PodOutcome.FAILED, "FailJob", words, code, fatal=True)
        case "Restart":
            return Verdict(PodOutcome.FAILED, "Error", words, code)
        case "Ignore":
            return Verdict(PodOutcome.IGNORED, "Ignored", words, code)
        case "CountAsDisruption":
            return Verdict(PodOutcome.DISRUPTED, "FailureRule", words, code)
