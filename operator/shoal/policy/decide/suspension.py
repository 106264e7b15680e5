"""Suspending: which servers are still wanted, whether it is done, and how long the job was suspended.

A job is suspended by its user, or by a queue that has no quota for it. It has no pods then. Workers end first, each
with a last push, then the parameter servers with a final snapshot, so no progress is lost. A job created suspended
starts no pods. One that is resumed with another number of shards is resumed once the servers of before have ended.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.api.labels import Place
from shoal.policy.common.timers import Timers
from shoal.policy.common.times import seconds_between
from shoal.policy.decide.cleanup import give_back
from shoal.policy.decide.members import ByIndex, every, is_overdue
from shoal.policy.facts.read import Facts


def wants_server(facts: Facts, workers: ByIndex, timers: Timers) -> Callable[[Place], bool]:
    """Whether a shard is wanted: while suspending, until no worker pushes and shard 0 has saved all shards."""
    if not facts.suspended:
        replicas = facts.job.spec.parameter_servers.replicas
        return lambda place: place.index < replicas
    if any(worker.may_run(timers) for worker in every(workers)):
        return lambda _place: True  # all that exist: their number may have been changed
    saving = any(
        s.place.is_coordinator and s.pod and not s.pod.ended and not is_overdue(s.pod, timers)
        for s in facts.sightings["ps"]
    )
    return lambda place: saving and not place.is_coordinator


def is_complete(facts: Facts) -> bool:
    """Whether nothing of the suspended job is left that runs or holds an address. A failed pod is kept for its logs."""
    there = facts.seen.in_flight or any(not pod.ended for pod in facts.seen.pods)
    return not there and not give_back(facts)


def suspended_seconds(facts: Facts) -> int:
    """Total suspended time up to the last resumption, which may be now."""
    before = facts.job.status
    condition = before.condition("Suspended")
    resumes = condition is not None and condition.status == "True" and not facts.suspended
    if condition is None or not resumes or before.start_time is None:
        return before.suspended_seconds
    since = max(condition.last_transition_time, before.start_time)
    return before.suspended_seconds + seconds_between(since, facts.seen.now)
