"""How long to wait before the next pod of a place is created.

A disrupted pod is replaced at once. A pod that ended shortly after it started, also because it was preempted by a
higher priority, is replaced with exponential back-off.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from shoal.policy.decide.members import Member
from shoal.policy.facts.verdict import PodOutcome

_FIRST_SECONDS = {
    PodOutcome.REJECTED: 10.0,
    PodOutcome.FAILED: 1.0,
    PodOutcome.KILLED: 0.5,
    PodOutcome.IGNORED: 1.0,
    PodOutcome.DONE: 1.0,
}
_LONGEST_SECONDS = 60.0
PREEMPTED = "PreemptionByScheduler"
_PREEMPTED_SECONDS, _LONGEST_PREEMPTED_SECONDS = 5.0, 20.0
"""The room may come back at any time, and the job is to be back with it within 30 s."""


def not_before(last: Member) -> datetime | None:
    """When the successor of `last`, which has ended, may be created; None: at once."""
    attempts = last.slot.attempts
    if attempts == 0 or last.slot.ended_at is None:
        return None
    first = _FIRST_SECONDS.get(last.verdict.outcome, 1.0 if attempts > 1 else 0.0)
    longest = _LONGEST_SECONDS
    if last.slot.cause == PREEMPTED:
        first, longest = _PREEMPTED_SECONDS, _LONGEST_PREEMPTED_SECONDS
    return last.slot.ended_at + timedelta(seconds=min(longest, first * 2.0 ** min(attempts - 1, 10)))
