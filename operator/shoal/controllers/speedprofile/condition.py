"""What a profile says of its own use: whether plans leave it out, as a whole or in part, and why."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from shoal.api.base import Condition
from shoal.api.speed_profile import SpeedProfile
from shoal.sizing.fleet.resources import unusable_rows

LEFT_OUT, ROWS_LEFT_OUT = "LeftOut", "RowsLeftOut"
"""Why a profile is not ready: as a whole, or some rows of its spec."""
NAMED_ROWS = 5


class Fault(NamedTuple):
    """Why plans leave a profile out, as its spec was in this generation."""

    generation: int
    words: str


def conditions_of(
    profile: SpeedProfile, fault: Fault | None, now: datetime, *, judged: bool
) -> tuple[Condition, ...]:
    """The conditions that a profile is to have: one, and none before something was wrong with it.

    `fault`: why plans leave it out, if they do. `judged`: this operator has made a plan, and knows that.
    """
    before, generation = next(iter(profile.status.conditions), None), profile.metadata.generation
    reason, message = "Valid", ""
    out = before if before is not None and before.reason == LEFT_OUT else None
    if out is not None and not judged and out.observed_generation == generation:
        return profile.status.conditions  # as the operator before this one found it
    if fault is not None and fault.generation == generation:
        reason = LEFT_OUT
        message = f"plans leave this profile out, since {fault.words}: correct it, or delete it"
    elif wrong := unusable_rows(profile, now):
        more = f"; and {len(wrong) - NAMED_ROWS} more" if len(wrong) > NAMED_ROWS else ""
        reason = ROWS_LEFT_OUT
        message = f"plans leave these rows out: {'; '.join(wrong[:NAMED_ROWS])}{more}"
    elif before is None:
        return ()
    if out is not None and reason == LEFT_OUT:
        message = out.message  # what fails may be said in other words each time
    holds = reason == "Valid"
    return (Condition.after(before, "Ready", holds, reason, message, generation=generation, now=now),)
