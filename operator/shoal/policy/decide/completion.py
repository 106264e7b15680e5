"""Decides when a job is finished.

Only exit code 0 of parameter server 0 together with its termination message is success: telemetry is never the only
evidence, and an exit code 0 without the message is an early exit.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from shoal.api.training_job import TrainingJobSpec
from shoal.policy.common.wording import short
from shoal.policy.decide.counters import Counters
from shoal.policy.decide.members import ByIndex, every
from shoal.policy.decide.records import may_be_excused
from shoal.policy.decide.suspension import suspended_seconds
from shoal.policy.facts.read import Facts
from shoal.policy.facts.verdict import terminated, termination_message
from shoal_trainer.contract import EXIT_OK, Outcome, TerminationMessage

NODE_PATIENCE = timedelta(seconds=10)
"""For a node that ends, of which a watch, or its kubelet, tells after the pods that failed with it."""


@dataclass(frozen=True)
class End:
    """How the job finished."""

    succeeded: bool
    reason: str
    message: str
    evidence: TerminationMessage | None = None


def decide(facts: Facts, servers: ByIndex, workers: ByIndex, counters: Counters) -> End | None:
    """How the job finished; None while it is active.

    Failures that were disruptions, and announced disruptions that did not come or have not come yet, do not count
    against the limits. One that may turn out to be of a node's end ends no job at once: that cannot be taken back.
    """
    if (evidence := _evidence(servers)) is not None:
        return End(True, "Trained", _success(facts.job.spec, evidence), evidence)
    policy = facts.job.spec.run_policy
    last = counters.last_failure
    if counters.fatal is not None:
        return End(False, counters.fatal.reason, short(counters.fatal.message))
    failures = counters.failures - counters.excused
    if failures > policy.backoff_limit and not awaits_nodes(facts, workers, counters):
        words = f"{failures} failures exceed runPolicy.backoffLimit ({policy.backoff_limit})"
        return End(False, "BackoffLimitExceeded", f"{words}; last failure: {last.message}" if last else words)
    if policy.max_disruptions is not None:
        announced = sum(each.announced for each in every(workers))
        disruptions = counters.disruptions - counters.withdrawn - announced
        if disruptions > policy.max_disruptions:
            words = f"{disruptions} disruptions exceed runPolicy.maxDisruptions ({policy.max_disruptions})"
            return End(False, "MaxDisruptionsExceeded", words)
    return _deadline(facts)


def awaits_nodes(facts: Facts, workers: ByIndex, counters: Counters) -> bool:
    """Whether too many failures are too many only if none of the last was of a node whose end is not seen yet."""
    beyond = counters.failures - counters.excused - facts.job.spec.run_policy.backoff_limit
    if beyond <= 0:
        return False
    ended = sorted(
        each.slot.ended_at
        for each in every(workers)
        if each.slot.ended_at is not None and may_be_excused(facts, each.slot)
    )
    return beyond <= len(ended) and facts.timers.pending(ended[-beyond] + NODE_PATIENCE)


def _success(spec: TrainingJobSpec, evidence: TerminationMessage) -> str:
    model = f"the model is in {evidence.model_uri or 'the job storage'}"
    if spec.storage.ephemeral:
        model = "the model is gone with its pod (storage.ephemeral); set storage.volumeClaim or storage.uri to keep it"
    short_epoch = spec.training.short_epoch(evidence.data.total)
    return "; ".join(filter(None, (f"trained to step {evidence.step}", model, short_epoch)))


def _evidence(servers: ByIndex) -> TerminationMessage | None:
    for each in servers.get(0, ()):
        end = terminated(each.pod, "ps") if each.pod else None
        message = termination_message(end)
        if end and end.exit_code == EXIT_OK and message and message.outcome is Outcome.SUCCEEDED:
            return message
    return None


def _deadline(facts: Facts) -> End | None:
    limit, start = facts.job.spec.run_policy.active_deadline_seconds, facts.job.status.start_time
    if limit is None or start is None or facts.suspended:
        return None
    if facts.timers.pending(start + timedelta(seconds=limit + suspended_seconds(facts))):
        return None
    words = f"active for longer than runPolicy.activeDeadlineSeconds ({limit} s)"
    return End(False, "DeadlineExceeded", words)
