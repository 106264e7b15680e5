"""Reports an unexpected error of the operator on the job, where its owner can see it."""

from __future__ import annotations

from shoal.policy.common.wording import short
from shoal.policy.model import Event, Observation, Plan
from shoal.policy.tell.conditions import Conditions

REASON = "InternalError"


def internal_error(seen: Observation, error: Exception) -> Plan | None:
    """A plan that only reports the error. None: it is reported already.

    It is reported once per generation of the spec, even if its message varies, since each write wakes the job.
    """
    before = seen.job.status
    stalled, generation = before.condition("Stalled"), seen.job.metadata.generation
    if stalled and (stalled.status, stalled.reason, stalled.observed_generation) == (
        "True",
        REASON,
        generation,
    ):
        return None
    message = (
        "the operator failed to reconcile this job; it leaves the pods unchanged and retries. Please report this error "
        f"with the operator's log: {type(error).__name__}: {short(str(error), 500)}"
    )
    conditions = Conditions(before.conditions, generation, seen.now)
    conditions.set("Stalled", True, REASON, message)
    update = {
        "observed_generation": generation,
        "conditions": conditions.in_order(),
        "reason": conditions.reason(),
    }
    return Plan((), before.model_copy(update=update), (Event("Warning", REASON, message),))
