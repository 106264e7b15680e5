"""When a job has ended, and how.

Success is PS 0's exit 0 with its termination message, and nothing else: telemetry is never the only evidence, and an
exit 0 without the message is an early exit.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from shoal.policy.counters import Counters
from shoal.policy.incarnations import ByIndex
from shoal.policy.model import Observation
from shoal.policy.suspension import suspended_seconds
from shoal.policy.verdict import terminated, termination_message
from shoal.policy.wording import short
from shoal_trainer.contract import EXIT_OK, Outcome, TerminationMessage


@dataclass(frozen=True)
class End:
    """How the job ended."""

    succeeded: bool
    reason: str
    message: str
    evidence: TerminationMessage | None = None


def decide(seen: Observation, servers: ByIndex, counters: Counters, wake_after: list[float]) -> End | None:
    """The job's end, if this is it."""
    if (evidence := _evidence(servers)) is not None:
        words = f"trained to step {evidence.step}; the model is in {evidence.model_uri or 'the job storage'}"
        return End(True, "Trained", words, evidence)
    policy = seen.job.spec.run_policy
    last = counters.last_failure
    if counters.fatal is not None:
        return End(False, counters.fatal.reason, short(counters.fatal.message))
    if counters.failures > policy.backoff_limit:
        words = f"{counters.failures} failures exceed runPolicy.backoffLimit ({policy.backoff_limit})"
        return End(False, "BackoffLimitExceeded", f"{words}; last failure: {last.message}" if last else words)
    if policy.max_disruptions is not None and counters.disruptions > policy.max_disruptions:
        words = (
            f"{counters.disruptions} disruptions exceed runPolicy.maxDisruptions ({policy.max_disruptions})"
        )
        return End(False, "MaxDisruptionsExceeded", words)
    return _deadline(seen, wake_after)


def _evidence(servers: ByIndex) -> TerminationMessage | None:
    for holder in servers.get(0, ()):
        end = terminated(holder.pod, "ps") if holder.pod else None
        said = termination_message(end)
        if end and end.exit_code == EXIT_OK and said and said.outcome is Outcome.SUCCEEDED:
            return said
    return None


def _deadline(seen: Observation, wake_after: list[float]) -> End | None:
    limit, start = seen.job.spec.run_policy.active_deadline_seconds, seen.job.status.start_time
    if limit is None or start is None or seen.job.spec.suspend:
        return None
    left = (start + timedelta(seconds=limit + suspended_seconds(seen)) - seen.now).total_seconds()
    if left > 0:
        wake_after.append(left)
        return None
    return End(
        False, "DeadlineExceeded", f"active for longer than runPolicy.activeDeadlineSeconds ({limit} s)"
    )
