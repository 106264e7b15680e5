"""What may be created now, seen from what the API server refused before and which names are taken.

Pods of a role are asked for through its `Gate`. Everything else is asked for by its name: what was refused is not asked
for again before its time (`too_early`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from shoal.policy.model import NameConflict, Observation, Refusal, RefusalKind
from shoal.policy.names import budget_name, place_of_name, secret_name

RETRY = {RefusalKind.QUOTA: timedelta(seconds=5), RefusalKind.FORBIDDEN: timedelta(seconds=30)}
"""After how long what was refused is tried again; what is invalid: when the spec has changed."""
NAMESAKE_RETRY_SECONDS = 1.0
OVERDUE = timedelta(seconds=5)
"""What is still there so long after its grace period has nobody who could confirm its end."""
FOUNDATION_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Gate:
    """Whether pods of one role may be created."""

    stalled: tuple[str, str] | None = None
    """(reason, message): only a change by somebody helps."""
    quota: str | None = None
    """The server's words about a quota that is used up."""
    wait_seconds: float | None = None
    """No creation before so many seconds."""

    @property
    def open(self) -> bool:
        """Nothing stands against it."""
        return self.stalled is None and self.wait_seconds is None


def gate(seen: Observation, role: str) -> Gate:
    """The gate for a role."""
    mine = [r for r in seen.refusals if _concerns(r.name, role, seen)]
    for refusal in mine:
        if refusal.kind is RefusalKind.INVALID and refusal.generation == seen.job.metadata.generation:
            return Gate(stalled=("Invalid", f"the API server rejected {refusal.name}: {refusal.message}"))
    for kind in (RefusalKind.FORBIDDEN, RefusalKind.QUOTA):
        latest = max((r for r in mine if r.kind is kind), key=lambda r: r.at, default=None)
        if latest is not None:
            return _waiting(seen, latest)
    return Gate()


def _concerns(name: str, role: str, seen: Observation) -> bool:
    """Whether pods of a role have to wait for this object, or are of its kind."""
    if (place := place_of_name(name)) is not None:
        return place.role == role
    if name == secret_name(seen.job):  # those that run have it: a full quota says no also to what is there
        return not any(pod.status.phase == "Running" for pod in seen.pods)
    return name != budget_name(seen.job) and name not in seen.services


def _waiting(seen: Observation, refusal: Refusal) -> Gate:
    left = _seconds_left(seen, refusal)
    wait = left if left > 0 else None
    if wait is None and place_of_name(refusal.name) is None:
        wait = FOUNDATION_RETRY_SECONDS  # it is tried now, and pods are of no use before it is there
    if refusal.kind is RefusalKind.QUOTA:
        return Gate(quota=refusal.message, wait_seconds=wait)
    words = f"the operator is not allowed to create {refusal.name}: {refusal.message}"
    return Gate(stalled=("Forbidden", words) if wait else None, wait_seconds=wait)


def _seconds_left(seen: Observation, refusal: Refusal) -> float:
    return (refusal.at + RETRY[refusal.kind] - seen.now).total_seconds()


def too_early(seen: Observation, name: str, wake_after: list[float]) -> bool:
    """Whether this very object was refused, and is not yet to be asked for again."""
    refusal = _refusal_of(seen, name)
    if refusal is None:
        return False
    if refusal.kind is RefusalKind.INVALID:
        return refusal.generation == seen.job.metadata.generation
    left = _seconds_left(seen, refusal)
    if left > 0:
        wake_after.append(left)
    return left > 0


def unprotected(seen: Observation) -> tuple[str, str] | None:
    """Degraded, reason NoDisruptionBudget: the job runs without it, and less safely."""
    refusal = _refusal_of(seen, name := budget_name(seen.job))
    if refusal is None or name in seen.existing:
        return None
    words = f"{name} cannot be created, so a drain may evict a parameter server: {refusal.message}"
    return "NoDisruptionBudget", words


def _refusal_of(seen: Observation, name: str) -> Refusal | None:
    return next((refusal for refusal in seen.refusals if refusal.name == name), None)


def taken(seen: Observation, name: str) -> Gate | None:
    """The gate for one name that belongs to somebody else's object; None if it is free."""
    if (who := seen.foreign.get(name)) is None:
        return None
    if who.terminating:
        return Gate(stalled=_overdue(seen, name, who), wait_seconds=NAMESAKE_RETRY_SECONDS)
    words = f"{name} exists and does not belong to this job: delete it, or give the job another name"
    return Gate(stalled=("NameCollision", words))


def _overdue(seen: Observation, name: str, who: NameConflict) -> tuple[str, str] | None:
    """Its end is not confirmed, and this job cannot have the name before that."""
    if who.until is None or seen.now < who.until + OVERDUE:
        return None
    deadline = f"{who.until:%H:%M:%S} UTC"
    if not who.node:
        words = (
            f"{name} should have been deleted by {deadline} and is still being deleted: check its finalizers"
        )
        return "NameCollision", f"{words}. The job continues when it is gone."
    words = (
        f"pod {name} on node {who.node} should have been deleted by {deadline} and is still being deleted: "
        f"if the node is lost, run `kubectl delete node {who.node}` (a cloud provider does so automatically)"
    )
    return "NameCollision", f"{words}. The job continues when the pod is gone."
