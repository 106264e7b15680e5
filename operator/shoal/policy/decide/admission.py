"""Whether an object may be created now, given earlier refusals by the API server and name conflicts.

Pods of a role are created through a `Gate`. What is refused of one pod for what it is says nothing of pods for other
pools, which differ from it in labels and tolerations; a full quota, and what all pods need, close the gates of all
pools. Any other object that was refused is retried on its own (`refused_recently`).

Nothing is refused for good: a pod depends on more than the job's spec (its pool, the flavors of a queue, images, the
policies of the cluster), and what has changed there tells nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.manifests.names import (
    budget_name,
    group_key,
    group_name,
    place_of_name,
    secret_name,
    workload_name,
)
from shoal.policy.common.timers import Timers
from shoal.policy.decide.members import OVERSTAY
from shoal.policy.facts.quota import Quota
from shoal.policy.model import NameConflict, Observation, Reason, Refusal, RefusalKind

QUOTA_SECONDS, MOST_QUOTA_SECONDS = 5, 60
"""When a create beyond a quota is retried: twice as long after each. It may be full for days, for a thousand jobs."""
FORBIDDEN_SECONDS = 30
INVALID_SECONDS, MOST_INVALID_SECONDS = 30, 300
"""Likewise of what a person has to correct, unless the spec of the job or of the pod's pool has changed."""
FOUNDATION_RETRY_SECONDS = 1.0
_OTHER_ARGUMENTS = (
    "training.args is not what the job began with, and is immutable: set it back, or create a new TrainingJob and set"
    " training.initialFrom to this run. Its pods go on with the earlier arguments, and no other is made"
)
TERMINATING_SECONDS = 1.0
"""When a name is looked at again whose object is being deleted."""


@dataclass(frozen=True)
class Gate:
    """Whether pods of one role may be created, for one pool."""

    stalled: Reason | None = None
    """Set if the job needs a change by a person."""
    quota: str | None = None
    """The server's message about an exhausted quota."""
    wait_seconds: float | None = None
    """Create nothing for this many seconds."""
    asks: bool = False
    """A create may be tried all the same: only its answer tells whether the reason still holds."""

    @property
    def doubtful(self) -> bool:
        """Whether a pod is likely to be refused: one is tried, and no others."""
        return not self.open or self.asks or self.quota is not None

    @property
    def open(self) -> bool:
        """Whether pods may be created."""
        return self.asks or (self.stalled is None and self.wait_seconds is None)


def gate(seen: Observation, role: str, pool: str) -> Gate:
    """The gate for pods of a role, for a pool; empty: for none."""
    began_with = seen.job.status.args_digest
    if began_with and began_with != seen.job.spec.training.args_digest:
        return Gate(Reason("ArgumentsChanged", _OTHER_ARGUMENTS))
    refusals = [refusal for refusal in seen.refusals if _blocks(refusal, role, pool, seen)]
    for kind in (RefusalKind.INVALID, RefusalKind.FORBIDDEN, RefusalKind.QUOTA):
        latest = max((r for r in refusals if r.kind is kind), key=lambda r: r.at, default=None)
        if latest is not None:
            return _waiting(seen, latest)
    return Gate()


def _blocks(refusal: Refusal, role: str, pool: str, seen: Observation) -> bool:
    """Whether a refusal concerns pods of a role for a pool: it is of one of them, or of what they need."""
    if _is_outdated(seen, refusal):
        return False
    name = refusal.name
    if (place := place_of_name(name)) is not None:
        return place.role == role and (refusal.kind is RefusalKind.QUOTA or refusal.pool == pool)
    if name == secret_name(seen.job):
        # Running pods have mounted it: then it exists, and only a full quota answers a second create with a refusal.
        return not any(pod.running for pod in seen.pods)
    alone = name in {budget_name(seen.job), workload_name(seen.job)} or name.startswith(group_name(seen.job))
    return not alone and name not in seen.services


def _waiting(seen: Observation, refusal: Refusal) -> Gate:
    left = _seconds_left(seen, refusal)
    wait = left if left > 0 else None
    if wait is None and place_of_name(refusal.name) is None:
        wait = FOUNDATION_RETRY_SECONDS  # it is retried in this plan; pods need it first
    if refusal.kind is RefusalKind.QUOTA:
        return Gate(quota=refusal.message, wait_seconds=wait)
    if refusal.kind is RefusalKind.INVALID:
        why = Reason("Invalid", f"the API server rejected {refusal.name}: {refusal.message}")
        return Gate(why, wait_seconds=wait, asks=wait is None)  # else each try would tell that it is resolved
    message = f"the operator is not allowed to create {refusal.name}: {refusal.message}"
    return Gate(Reason("Forbidden", message) if wait else None, wait_seconds=wait, asks=wait is None)


def retry_after(refusal: Refusal) -> float:
    """How many seconds after a refusal the same is asked for again."""
    if refusal.kind is RefusalKind.FORBIDDEN:
        return FORBIDDEN_SECONDS
    first, most = QUOTA_SECONDS, MOST_QUOTA_SECONDS
    if refusal.kind is RefusalKind.INVALID:
        first, most = INVALID_SECONDS, MOST_INVALID_SECONDS
    return min(most, first * 2.0 ** min(refusal.times, 10))


def refused_since(refusal: Refusal) -> float:
    """When the first of its row was, at the latest, as `Observation.at`."""
    before = (replace(refusal, times=times) for times in range(min(refusal.times, 10)))
    return refusal.at - sum(map(retry_after, before))


def asked_anew(refusal: Refusal, at: float) -> Refusal:
    """What a quota refused, when a pod of the job has left its place: it is asked at once whether that is free."""
    first = replace(refusal, times=-1)
    return replace(first, at=at - retry_after(first))


def _seconds_left(seen: Observation, refusal: Refusal) -> float:
    """In milliseconds: what is less is a rounding error, and a timer of it would fire before the clock has moved."""
    return round(refusal.at + retry_after(refusal) - seen.at, 3)


def _is_outdated(seen: Observation, refusal: Refusal) -> bool:
    """Whether it was of another spec of the job or the pool: the first that may be wrong with what is invalid."""
    pool = seen.pools.get(refusal.pool)
    specs = seen.job.metadata.generation, pool.metadata.generation if pool is not None else 0
    return refusal.kind is RefusalKind.INVALID and refusal.specs != specs


def refused_recently(seen: Observation, name: str, timers: Timers) -> bool:
    """Whether this object was refused and must not be retried yet."""
    refusal = refusal_of(seen, name)
    if refusal is None or _is_outdated(seen, refusal) or (left := _seconds_left(seen, refusal)) <= 0:
        return False
    timers.after(left)
    return True


def missing_disruption_budget(seen: Observation) -> Reason | None:
    """Degraded: the job runs without a PodDisruptionBudget."""
    refusal = refusal_of(seen, name := budget_name(seen.job))
    if refusal is None or name in seen.existing:
        return None
    message = f"{name} cannot be created, so a drain may evict a parameter server: {refusal.message}"
    return Reason("NoDisruptionBudget", message)


def missing_pod_group(seen: Observation) -> Reason | None:
    """Degraded: the job is to be a gang, and is none."""
    refusal = refusal_of(seen, name := group_key(seen.job))
    if refusal is None or name in seen.existing:
        return None
    message = (
        "runPolicy.schedulingPolicy.gang needs the PodGroups of scheduler-plugins, and the job runs without:"
        f" {refusal.message}"
    )
    return Reason("NoPodGroup", message)


def missing_workload(seen: Observation, quota: Quota) -> Reason | None:
    """Degraded: the job is to be queued as a Workload, and has none."""
    if not quota.wanted or quota.current is not None or seen.job.spec.suspend:
        return None
    refusal = refusal_of(seen, quota.wanted)
    because = seen.no_workloads or (refusal and refusal.message)
    if not because:
        return None
    runs = "" if quota.held else ", and the job runs without quota"
    return Reason("NoWorkload", f"the job can have no Workload of Kueue{runs}: {because}")


def refusal_of(seen: Observation, name: str) -> Refusal | None:
    """What the API server said when this object was last asked for, if it refused it."""
    return next((refusal for refusal in seen.refusals if refusal.name == name), None)


def name_conflict_gate(seen: Observation, name: str) -> Gate | None:
    """The gate for one name that an object of another owner has; None if the name is free."""
    if (conflict := seen.name_conflicts.get(name)) is None:
        return None
    if conflict.terminating:
        return Gate(_overdue(seen, name, conflict), wait_seconds=TERMINATING_SECONDS, asks=conflict.due)
    message = f"{name} exists and does not belong to this job: delete it, or give the job another name"
    return Gate(Reason("NameCollision", message), asks=conflict.due)


def _overdue(seen: Observation, name: str, conflict: NameConflict) -> Reason | None:
    """Set if the deletion of the other object does not complete."""
    if conflict.deadline is None or seen.now < conflict.deadline + OVERSTAY:
        return None
    overdue = f"should have been deleted by {conflict.deadline:%H:%M:%S} UTC and is still being deleted"
    if not conflict.node:
        message = f"{name} {overdue}: check its finalizers. The job continues when it is gone."
    else:
        message = (
            f"pod {name} on node {conflict.node} {overdue}: if the node is lost, run `kubectl delete node"
            f" {conflict.node}` (a cloud provider does so automatically). The job continues when the pod is gone."
        )
    return Reason("NameCollision", message)
