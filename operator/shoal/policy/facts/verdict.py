"""Decides what happened to a pod: the only place that distinguishes disruptions by the platform from failures.

The first match wins: rejected by the kubelet, disrupted according to the pod, according to its node, deleted, out of
memory, the user's rules for exit codes, killed without a known cause, exited early, failed. A pod whose training
container never started is judged by its init container.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from pydantic import ValidationError

from shoal.api.kube import Pod, Terminated
from shoal.api.labels import RoleName
from shoal.api.training_job import FailureRule
from shoal.api.training_job_status import Slot
from shoal.policy.common.times import parse_time
from shoal.policy.common.wording import conclusion, short
from shoal.policy.facts.signals import (
    Meaning,
    Signal,
    exceeded_own_limit,
    pod_disruption,
    rejection,
)
from shoal_trainer.contract import (
    EXIT_FENCED,
    EXIT_OK,
    EXIT_USER,
    FAILURE_REASONS,
    Outcome,
    TerminationMessage,
)


class PodOutcome(StrEnum):
    """What happened to a pod."""

    HEALTHY = "Healthy"  # starting or running
    LEAVING = "Leaving"  # still runs, but it or its node is terminating
    UNREACHABLE = "Unreachable"  # nothing is heard of its node: it may run on
    LOST = "Lost"  # its node is gone, whatever the API still shows
    MISSING = "Missing"  # not seen, or ended while its node is not: not confirmed yet
    REJECTED = "Rejected"  # the kubelet did not admit it
    DISRUPTED = "Disrupted"  # ended by the platform
    KILLED = "Killed"  # ended by a signal without a known cause
    DONE = "Done"  # exit code 0
    FAILED = "Failed"  # ended by an error of the job
    IGNORED = "Ignored"  # ended, and a rule of the user says not to count it


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
"""Outcomes of pods whose process has ended."""
BEFORE_THE_END = timedelta(seconds=120)
AFTER_THE_END = timedelta(seconds=60)
"""A node's signal explains the end of a pod if it came at most this long before or after it."""
STEADY = timedelta(minutes=10)
"""A container that ran this long says nothing of how often it is started in vain."""
KILLS_TOLERATED = 3
"""How often in a row a pod may be killed without a known cause before that counts as a failure."""


@dataclass(frozen=True)
class Verdict:
    """An outcome with its reason in one word, a message for people, and whether a restart is pointless (`fatal`)."""

    outcome: PodOutcome
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    fatal: bool = False
    revocable: bool = False
    """The pod is leaving, unless the platform changes its mind."""


USER_ERROR = "UserError"
HEALTHY = Verdict(PodOutcome.HEALTHY)
_KILLED = {137: "SIGKILL", 143: "SIGTERM"}


def termination_message(terminated: Terminated | None) -> TerminationMessage | None:
    """The trainer's termination message; None if the container left none or another text."""
    if terminated is None or not terminated.message:
        return None
    try:
        return TerminationMessage.model_validate_json(terminated.message)
    except ValidationError:
        return None


def terminated(pod: Pod, container: str) -> Terminated | None:
    """How the container ended; None if it runs or is being restarted."""
    status = next((c for c in pod.status.container_statuses if c.name == container), None)
    return status.state.terminated if status else None


def has_ended(pod: Pod, role: RoleName) -> bool:
    """Whether its training container has, for good: that of a server is restarted in place."""
    end = terminated(pod, role)
    restarts_in_place = role == "ps" and end is not None and end.exit_code != 0
    return pod.ended or (end is not None and not restarts_in_place)


def judge(pod: Pod, slot: Slot, signal: Signal | None = None, rules: Sequence[FailureRule] = ()) -> Verdict:
    """The verdict on a pod. `slot`: its record. `signal`: the strongest of its node."""
    if signal is None and pod.untroubled:
        return HEALTHY
    if not has_ended(pod, slot.role):
        return _alive(pod, signal)
    end = terminated(pod, slot.role)
    code = end.exit_code if end else None
    if rejected := rejection(pod):
        return Verdict(PodOutcome.REJECTED, rejected, pod.status.message, code)
    if exceeded_own_limit(pod):
        return Verdict(PodOutcome.FAILED, "Evicted", pod.status.message, code)
    if disrupted := pod_disruption(pod):
        return Verdict(PodOutcome.DISRUPTED, disrupted, pod.status.message, code)
    refuted = signal is not None and signal.revocable and end is not None and _is_user_error(end)
    ended = parse_time(end.finished_at) if end else None
    if signal is not None and not refuted and explains(signal, ended):
        return Verdict(PodOutcome.DISRUPTED, signal.reason, pod.status.message, code)
    if pod.metadata.deletion_timestamp:
        return Verdict(PodOutcome.DISRUPTED, "Deleted", pod.status.message, code)
    if end is None:
        return _never_started(pod)
    return judge_exit(end, slot, rules)


def _is_user_error(end: Terminated) -> bool:
    """Whether the trainer itself says that the program is wrong: no node that may stay is the reason of that."""
    message = termination_message(end)
    return message is not None and message.reason == USER_ERROR


def explains(signal: Signal, ended: datetime | None) -> bool:
    """Whether a node's signal explains that a container ended then: it came shortly before or after it.

    A signal without a time may have. A machine that is gone explains everything.
    """
    if signal.meaning < Meaning.LEAVING:
        return False
    if signal.meaning is Meaning.LOST or signal.since is None or ended is None:
        return True
    return ended - BEFORE_THE_END <= signal.since <= ended + AFTER_THE_END


def _alive(pod: Pod, signal: Signal | None) -> Verdict:
    """The verdict on a pod whose training container has not ended."""
    meaning = signal.meaning if signal else Meaning.AT_RISK
    if signal is not None and meaning >= Meaning.UNREACHABLE:
        lost = meaning is Meaning.LOST
        return Verdict(PodOutcome.LOST if lost else PodOutcome.UNREACHABLE, signal.reason)
    if disrupted := pod_disruption(pod):
        return Verdict(PodOutcome.LEAVING, disrupted, pod.status.message)
    if signal is not None and meaning is Meaning.LEAVING:
        return Verdict(PodOutcome.LEAVING, signal.reason, revocable=signal.revocable)
    if pod.metadata.deletion_timestamp:
        return Verdict(PodOutcome.LEAVING, "Deleted")
    return HEALTHY


def _never_started(pod: Pod) -> Verdict:
    """The verdict on a pod that ended before its training container started."""
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
        return _killed(ended, code)
    last = conclusion(end.message)
    words = f"{ended}{f': {last}' if last else ''} (see `kubectl logs {pod.metadata.name} -c {name}`)"
    return Verdict(PodOutcome.FAILED, "InitContainerFailed", words, code)


def judge_exit(end: Terminated, slot: Slot, rules: Sequence[FailureRule]) -> Verdict:
    """The verdict on an exit that nothing outside the container explains."""
    code = end.exit_code
    ended = f"container {slot.role} ended with exit code {code}"
    if end.reason == "OOMKilled":
        words = f"out of memory: raise resources.limits.memory of container {slot.role}, or lower training.batchSize"
        return Verdict(PodOutcome.FAILED, "OOMKilled", words, code)
    for rule in rules:
        if code in rule.on_exit_codes:
            return _by_rule(rule, code)
    message = termination_message(end)
    reported = message is not None and message.outcome is Outcome.FAILED
    if code in _KILLED and not (message and message.reason == USER_ERROR):
        return _killed(ended, code)
    if code == EXIT_FENCED:
        return Verdict(
            PodOutcome.KILLED,
            "Fenced",
            "its work went to another one: a newer incarnation, or since it was silent or stuck",
            code,
        )
    if message is not None and reported:
        return _reported_failure(message, code)
    if code == EXIT_OK:
        return Verdict(PodOutcome.DONE, "Done", "", code)
    return Verdict(
        PodOutcome.FAILED, "Error", f"{conclusion(end.message) or ended} (see the logs of the pod)", code
    )


def _killed(ended: str, code: int) -> Verdict:
    return Verdict(PodOutcome.KILLED, "Killed", f"{ended} ({_KILLED[code]}); no cause was reported", code)


def _reported_failure(message: TerminationMessage, code: int) -> Verdict:
    """The verdict on a failure that the trainer explained."""
    # The coordinator exits with 0 after it has reported the job's failure. An interpreter may crash while it ends.
    fatal = code in {EXIT_OK, EXIT_USER} or message.reason == USER_ERROR
    if message.reason in FAILURE_REASONS:
        return Verdict(PodOutcome.FAILED, message.reason, message.message, code, fatal)
    # Reasons become keys of a map and labels of a metric: a container must not make up its own.
    words = f"{short(message.reason, 100)}: {message.message}" if message.reason else message.message
    return Verdict(PodOutcome.FAILED, "Error", words, code, fatal)


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
