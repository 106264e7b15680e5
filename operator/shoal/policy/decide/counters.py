"""Counts failures and disruptions, each once, and keeps the most recent of each.

A count and the record that it was counted (`slot.cause`) go into one status update, so a crash of the operator can
neither lose nor repeat one. Counters only grow.
"""

from __future__ import annotations

from datetime import datetime

from shoal.api.training_job_status import LastDisruption, LastFailure, Slot, TrainingJobStatus
from shoal.policy.common.times import whole
from shoal.policy.common.wording import role_word, short
from shoal.policy.facts.verdict import PodOutcome, Verdict
from shoal.policy.model import Event


class Counters:
    """The counters of one plan, starting from the status."""

    def __init__(self, before: TrainingJobStatus, now: datetime) -> None:
        self._now = whole(now)
        self.failures = before.restarts.failures
        self.disruptions = before.restarts.disruptions
        self.withdrawn = before.restarts.withdrawn or 0
        self.excused = before.restarts.excused or 0
        self.by_reason = dict(before.restarts.by_reason)
        self.server_restarts = before.parameter_servers.restarts
        self.last_disruption = before.last_disruption
        self.last_failure = before.last_failure
        self.fatal: Verdict | None = None
        self.failed_on: list[tuple[str, str]] = []
        """(node, reason) of the failures of workers that are counted now."""
        self.events: list[Event] = []

    def lost(self, slot: Slot, pod: str, verdict: Verdict) -> None:
        """Count a pod that ended or is draining for a reason other than a decision of the operator."""
        if slot.role == "ps":
            self.server_restarts += 1
        if verdict.outcome is PodOutcome.FAILED:
            self.failed(slot, pod, verdict)
        elif verdict.outcome is not PodOutcome.IGNORED:
            self._disrupted(slot, pod, verdict)

    def failed(self, slot: Slot, pod: str, verdict: Verdict, times: int = 1) -> None:
        """Count a failure."""
        self.failures += times
        if slot.role == "worker":
            self._count_reason(verdict.reason, times)
            if slot.node:
                self.failed_on.append((slot.node, verdict.reason))
        self.last_failure = LastFailure(
            pod=pod,
            node=slot.node,
            exit_code=verdict.exit_code,
            reason=verdict.reason,
            message=short(verdict.message),
            time=self._now,
        )
        if verdict.fatal:
            self.fatal = verdict
        kind = "WorkerFailed" if slot.role == "worker" else "ParameterServerFailed"
        self.events.append(Event("Warning", kind, f"{pod}: {verdict.reason}: {short(verdict.message, 500)}"))

    def withdraw(self, slot: Slot) -> None:
        """Take note that a counted notice did not come true."""
        if slot.role == "worker":
            self.withdrawn += 1

    def excuse(self, pod: str, why: str) -> None:
        """Take note that what was counted as a failure is not the job's."""
        self.excused += 1
        self.events.append(Event("Normal", "FailureExcused", f"the failure of {pod} is not the job's: {why}"))

    def _disrupted(self, slot: Slot, pod: str, verdict: Verdict) -> None:
        if slot.role == "worker":
            self.disruptions += 1
            self._count_reason(verdict.reason, 1)
        self.last_disruption = LastDisruption(pod=pod, node=slot.node, reason=verdict.reason, time=self._now)
        kind = "WorkerDisrupted" if slot.role == "worker" else "ParameterServerLost"
        where = f" on node {slot.node}" if slot.node else ""
        message = f"{role_word(slot.role)} {pod}{where} was disrupted: {verdict.reason}"
        self.events.append(Event("Warning", kind, message))

    def _count_reason(self, reason: str, times: int) -> None:
        self.by_reason[reason] = self.by_reason.get(reason, 0) + times
