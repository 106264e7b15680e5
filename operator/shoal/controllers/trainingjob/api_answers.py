"""Answers of the API server about a job's objects that no watch reports: refusals, name conflicts, existing Secrets.

They may be lost at any time at the cost of a request or two, and expire, so that what has changed is asked again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from shoal.policy.model import NameConflict, Refusal, RefusalKind

_REFUSAL_EXPIRES = {
    # Longer than the policies wait before they retry, which refreshes a refusal that still holds.
    RefusalKind.QUOTA: timedelta(seconds=30),
    RefusalKind.FORBIDDEN: timedelta(seconds=120),
}
CONFLICT_EXPIRES = timedelta(seconds=2)
EXISTING_EXPIRES = timedelta(minutes=5)
"""A Secret may be deleted by hand, and pods need it. To ask again costs a 409."""

GONE_NODES_EXPIRE = timedelta(minutes=1)


@dataclass
class ApiAnswers:
    """The answers about one run of a job, by name of the object."""

    existing: dict[str, datetime] = field(default_factory=dict)
    """When the API server last confirmed that the Secret exists."""
    refused: dict[str, Refusal] = field(default_factory=dict)
    gone_pods: dict[str, str] = field(default_factory=dict)
    """Recorded pods that do not exist, says the API server, and no more: no pod of a run has the name again."""
    gone_nodes: dict[str, datetime] = field(default_factory=dict)
    """The same of nodes, whose names are used again; asked again after a while."""
    recorded: bool = False
    """This process has stored a status of the job: it then knew what others had made."""
    made_before: bool | None = None
    """Whether others may have made pods of it: there are objects that are made before them. None: not looked yet."""
    conflicting: dict[str, tuple[NameConflict, datetime]] = field(default_factory=dict)
    """Objects of other owners, and when they were seen."""

    @property
    def first_look(self) -> bool:
        """Whether there may be pods of others that no status records."""
        return not self.recorded and bool(self.made_before)

    def others_knew_more(self) -> None:
        """What was to be done had been done: the caches are behind those of another process."""
        self.recorded, self.made_before = False, True

    def existing_names(self, now: datetime) -> frozenset[str]:
        """Names that were lately confirmed to exist."""
        return frozenset(name for name, at in self.existing.items() if now - at <= EXISTING_EXPIRES)

    def absent_nodes(self, now: datetime) -> frozenset[str]:
        """Nodes that lately did not exist."""
        return frozenset(name for name, at in self.gone_nodes.items() if now - at <= GONE_NODES_EXPIRE)

    def next_expiry_seconds(self, now: datetime) -> float | None:
        """Seconds until the first of them has to be confirmed again."""
        first = min((at for at in self.existing.values() if now - at <= EXISTING_EXPIRES), default=None)
        return None if first is None else (first + EXISTING_EXPIRES - now).total_seconds() + 1.0

    def refusals(self, now: datetime, generation: int) -> tuple[Refusal, ...]:
        """Refusals that are still valid for this generation of the spec."""
        for name, refusal in list(self.refused.items()):
            expires = _REFUSAL_EXPIRES.get(refusal.kind)
            if refusal.generation != generation if expires is None else now - refusal.at > expires:
                del self.refused[name]
        return tuple(self.refused.values())

    def conflicts(self, now: datetime) -> dict[str, NameConflict]:
        """Names that objects of other owners have."""
        for name, (_, at) in list(self.conflicting.items()):
            if now - at > CONFLICT_EXPIRES:
                del self.conflicting[name]
        return {name: conflict for name, (conflict, _) in self.conflicting.items()}


class AnswerStore:
    """The answers about every run, by the job's uid."""

    def __init__(self) -> None:
        self._by_uid: dict[str, ApiAnswers] = {}

    def get(self, uid: str) -> ApiAnswers:
        """The answers about one run, at first empty."""
        return self._by_uid.setdefault(uid, ApiAnswers())

    def forget(self, uid: str) -> None:
        """Drop the answers about a run that is gone."""
        self._by_uid.pop(uid, None)
