"""Answers of the API server about a job's objects that no watch reports: refusals, name conflicts, existing Secrets.

They may be lost at any time at the cost of a request or two, and expire, so that what has changed is asked again. Their
times, and `now`, are seconds on the loop's clock: by the wall's, what waits would wait for as long as that is set back.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace
from datetime import datetime

from shoal.api.kube import Node
from shoal.cluster.clock import loop_time
from shoal.policy.decide.admission import asked_anew, retry_after
from shoal.policy.model import NameConflict, Refusal, RefusalKind

_REFUSAL_EXPIRES = 4
"""A refusal expires after so many times what the policies wait before they retry, which refreshes one that holds."""
CONFLICT_SECONDS, MOST_CONFLICT_SECONDS = 2.0, 60.0
"""After these a name that another object had is asked for again: at first, and after many times in vain."""
EXISTING_EXPIRES = 300.0
"""Seconds. A Secret may be deleted by hand, and pods need it. To ask again costs a 409."""

_MOST_COUNTED = 8
"""Writes of which some may have had no answer, and be stored."""
GONE_NODES_EXPIRE = 60.0
"""Seconds."""


@dataclass(frozen=True)
class Taken:
    """An object of another owner has a name."""

    conflict: NameConflict
    times: int
    """It was asked for so many times in vain."""
    until: float
    """When to ask again."""


@dataclass(frozen=True)
class _AllBut:
    """All numbers but these."""

    numbers: frozenset[int]

    def __contains__(self, number: object) -> bool:
        return number not in self.numbers


@dataclass
class ApiAnswers:
    """The answers about one run of a job, by name of the object."""

    existing: dict[str, float] = field(default_factory=dict)
    """When the API server last confirmed that the Secret exists."""
    refused: dict[str, Refusal] = field(default_factory=dict)
    gone_pods: dict[str, str | None] = field(default_factory=dict)
    """Recorded pods that do not exist, says the API server, and no more: no pod of a run has the name again."""
    gone_nodes: dict[str, float] = field(default_factory=dict)
    """The same of nodes, whose names are used again; asked again after a while, and once one was there since."""
    recorded: bool = False
    """The status says what this process knows of the job: it then knows what others had made."""
    looked_at: frozenset[int] | None = None
    """Of these workers only, as no plan has decided about others yet; None: of all, since no other process had been."""
    stored: bool = False
    """This process has stored a status of the job, or the API server said that it knows the newest version: what it
    knows of it is not old."""
    made_before: bool | None = None
    """Whether others may have made pods of it: there is a status, or an object that is made before them. None: not
    looked yet."""
    quota_confirmed: bool = False
    """The API server said that the job's Workload is as this process knows it."""
    conflicting: dict[str, Taken] = field(default_factory=dict)
    """Objects of other owners, by their names."""
    counted: dict[datetime | None, float] = field(default_factory=dict)
    """When this process counted the time of nodes up to these moments: the last ones, of which one is stored."""

    @property
    def first_look(self) -> bool:
        """Whether there may be pods of others that no status records."""
        return not self.recorded and bool(self.made_before)

    @property
    def unseen(self) -> Container[int]:
        """The workers of which there may be such pods, once it has recorded what it knows of others."""
        return frozenset() if self.looked_at is None else _AllBut(self.looked_at)

    def record(self, looked_at: frozenset[int] | None) -> None:
        """The status says what this process knows. `looked_at`: see `Plan`."""
        if looked_at is None:
            return
        if self.first_look:
            self.looked_at = looked_at
        elif self.looked_at is not None:
            self.looked_at |= looked_at
        self.recorded = True

    def count(self, until: datetime | None, now: float) -> None:
        """A status is written that counts the time of nodes up to this moment, which is now."""
        self.counted.pop(until, None)  # so that the last one is the newest
        self.counted[until] = now
        if len(self.counted) > _MOST_COUNTED:
            del self.counted[next(iter(self.counted))]

    def others_knew_more(self) -> None:
        """What was to be done had been done: the caches are behind those of another process."""
        self.recorded, self.stored, self.quota_confirmed, self.made_before = False, False, False, True

    def existing_names(self, now: float) -> frozenset[str]:
        """Names that were lately confirmed to exist."""
        return frozenset(name for name, at in self.existing.items() if now - at <= EXISTING_EXPIRES)

    def absent_nodes(self, now: float) -> frozenset[str]:
        """Nodes that lately did not exist."""
        self.gone_nodes = {name: at for name, at in self.gone_nodes.items() if now - at <= GONE_NODES_EXPIRE}
        return frozenset(self.gone_nodes)

    def next_expiry_seconds(self, now: float) -> float | None:
        """Seconds until the first of them has to be confirmed again."""
        first = min((at for at in self.existing.values() if now - at <= EXISTING_EXPIRES), default=None)
        return None if first is None else first + EXISTING_EXPIRES - now + 1.0

    def refusals(self, now: float) -> tuple[Refusal, ...]:
        """Refusals of late."""
        for name, refusal in list(self.refused.items()):
            if now - refusal.at > _REFUSAL_EXPIRES * retry_after(refusal):
                del self.refused[name]
        return tuple(self.refused.values())

    def taken(self, name: str, conflict: NameConflict, now: float) -> None:
        """Another object had this name when the job's was to be created."""
        times = self.conflicting[name].times + 1 if name in self.conflicting else 0
        growth = 1.0 if conflict.terminating else 2.0 ** min(times, 10)
        seconds = min(CONFLICT_SECONDS * growth, MOST_CONFLICT_SECONDS)
        self.conflicting[name] = Taken(conflict, times, now + seconds)

    def conflicts(self, now: float) -> dict[str, NameConflict]:
        """Names that objects of other owners have."""
        for name, each in list(self.conflicting.items()):
            if now > each.until + MOST_CONFLICT_SECONDS:
                del self.conflicting[name]  # nobody has wanted it since
        return {
            name: replace(each.conflict, due=now >= each.until) for name, each in self.conflicting.items()
        }

    def next_conflict_seconds(self, now: float) -> float | None:
        """Seconds until the first of these names may be asked for again."""
        first = min((each.until for each in self.conflicting.values()), default=None)
        return None if first is None else max(CONFLICT_SECONDS, first - now)


class AnswerStore:
    """The answers about every run, by the job's uid."""

    def __init__(self) -> None:
        self._by_uid: dict[str, ApiAnswers] = {}

    def get(self, uid: str) -> ApiAnswers:
        """The answers about one run, at first empty."""
        return self._by_uid.setdefault(uid, ApiAnswers())

    def see_node(self, old: Node | None, new: Node | None) -> None:
        """Take that a node has come: what was said of its name is old."""
        if old is None and new is not None:
            for each in self._by_uid.values():
                each.gone_nodes.pop(new.metadata.name, None)

    def see_room(self, uid: str) -> None:
        """Take that a pod of a run is gone: what a quota refused may have its place."""
        if (found := self._by_uid.get(uid)) is not None:
            for name, each in found.refused.items():
                if each.kind is RefusalKind.QUOTA:
                    found.refused[name] = asked_anew(each, loop_time())

    def forget(self, uid: str) -> None:
        """Drop the answers about a run that is gone."""
        self._by_uid.pop(uid, None)
