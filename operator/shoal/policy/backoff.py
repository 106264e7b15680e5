"""How long to wait before the next pod of a place is created.

A disrupted pod is replaced at once. A pod that ended shortly after it started is replaced with exponential back-off.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from shoal.policy.incarnations import Incarnation
from shoal.policy.verdict import PodOutcome

_FIRST_SECONDS = {
    PodOutcome.REJECTED: 10.0,
    PodOutcome.FAILED: 1.0,
    PodOutcome.KILLED: 0.5,
    PodOutcome.IGNORED: 1.0,
    PodOutcome.DONE: 1.0,
}
_LONGEST_SECONDS = 60.0


def not_before(last: Incarnation) -> datetime | None:
    """When the successor of `last`, which has ended, may be created; None: at once."""
    attempts = last.slot.attempts
    if attempts == 0 or last.slot.ended_at is None:
        return None
    first = _FIRST_SECONDS.get(last.verdict.outcome, 1.0 if attempts > 1 else 0.0)
    return last.slot.ended_at + timedelta(seconds=min(_LONGEST_SECONDS, first * 2.0 ** min(attempts - 1, 10)))
