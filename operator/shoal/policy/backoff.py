"""How long a place waits before it is filled again.

What the platform took is replaced at once. What ends by itself soon after its start waits longer each time.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from shoal.policy.incarnations import Incarnation
from shoal.policy.verdict import PodOutcome

_FIRST = {
    PodOutcome.REJECTED: 10.0,
    PodOutcome.FAILED: 1.0,
    PodOutcome.KILLED: 0.5,
    PodOutcome.IGNORED: 1.0,
    PodOutcome.DONE: 1.0,
}
_LONGEST = 60.0


def not_before(last: Incarnation) -> datetime | None:
    """When the place of `last`, which has ended, may be filled again; None: at once."""
    attempts = last.slot.attempts
    if attempts == 0 or last.slot.ended_at is None:
        return None
    first = _FIRST.get(last.verdict.outcome, 1.0 if attempts > 1 else 0.0)
    return last.slot.ended_at + timedelta(seconds=min(_LONGEST, first * 2.0 ** min(attempts - 1, 10)))
