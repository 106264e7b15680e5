"""Which pods may be created now, seen from what the API server refused before and which names are taken."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from shoal.policy.model import Observation, Refusal, RefusalKind
from shoal.policy.names import place_of_name

QUOTA_RETRY = timedelta(seconds=5)
FORBIDDEN_RETRY = timedelta(seconds=30)
NAMESAKE_RETRY_SECONDS = 1.0


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
    """The gate for a role. What was refused as invalid may be tried again when the spec has changed."""
    mine = [r for r in seen.refusals if (place := place_of_name(r.name)) is None or place.role == role]
    for refusal in mine:
        if refusal.kind is RefusalKind.INVALID and refusal.generation == seen.job.metadata.generation:
            return Gate(stalled=("Invalid", f"the API server refuses {refusal.name}: {refusal.message}"))
    for kind, after in ((RefusalKind.FORBIDDEN, FORBIDDEN_RETRY), (RefusalKind.QUOTA, QUOTA_RETRY)):
        latest = max((r for r in mine if r.kind is kind), key=lambda r: r.at, default=None)
        if latest is not None:
            return _waiting(seen, latest, after)
    return Gate()


def _waiting(seen: Observation, refusal: Refusal, after: timedelta) -> Gate:
    left = (refusal.at + after - seen.now).total_seconds()
    wait = left if left > 0 else None
    if refusal.kind is RefusalKind.QUOTA:
        return Gate(quota=refusal.message, wait_seconds=wait)
    words = f"not allowed to create {refusal.name}: {refusal.message}"
    return Gate(stalled=("Forbidden", words) if wait else None, wait_seconds=wait)


def taken(seen: Observation, name: str) -> Gate | None:
    """The gate for one name that belongs to somebody else's object; None if it is free."""
    if name not in seen.foreign:
        return None
    if seen.foreign[name]:
        return Gate(wait_seconds=NAMESAKE_RETRY_SECONDS)
    words = f"{name} exists and does not belong to this job: delete it, or give the job another name"
    return Gate(stalled=("NameCollision", words))
