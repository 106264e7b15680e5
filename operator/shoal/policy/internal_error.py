"""A job that no plan can be made for, through a fault of Shoal's own: said on the job, where its owner looks."""

from __future__ import annotations

from shoal.policy.conditions import Conditions
from shoal.policy.model import Event, Observation, Plan
from shoal.policy.wording import short

REASON = "InternalError"


def internal_error(seen: Observation, error: Exception) -> Plan | None:
    """The plan in the place of the one that could not be made: to say so. None: it is said already.

    Once for each generation of the spec, in whatever words the error comes again: each write wakes the job.
    """
    before = seen.job.status
    said, generation = before.condition("Stalled"), seen.job.metadata.generation
    if said and (said.status, said.reason, said.observed_generation) == ("True", REASON, generation):
        return None
    words = (
        "the operator failed to reconcile this job; it leaves the pods unchanged and retries. Please report this error "
        f"with the operator's log: {type(error).__name__}: {short(str(error), 500)}"
    )
    conditions = Conditions(before.conditions, generation, seen.now)
    conditions.set("Stalled", True, REASON, words)
    update = {"conditions": conditions.done(), "reason": conditions.reason()}
    return Plan((), before.model_copy(update=update), (Event("Warning", REASON, words),))
