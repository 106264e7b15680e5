"""What the API server answered about a job's objects and no watch tells: refusals, names taken, Secrets there.

It may be lost at any time, and then costs a request or two. It fades, so that what is no longer true is asked again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from shoal.policy.model import NameConflict, Refusal, RefusalKind

_FADES = {
    # Longer than the policies wait before they try again: what is still true has been refreshed by then.
    RefusalKind.QUOTA: timedelta(seconds=30),
    RefusalKind.FORBIDDEN: timedelta(seconds=120),
}
FOREIGN_FADES = timedelta(seconds=2)
EXISTING_FADES = timedelta(minutes=5)
"""Somebody may delete a Secret by hand, and then pods wait for it; to ask again costs a 409."""


@dataclass
class ApiAnswers:
    """What is remembered of one run of a job."""

    existing: dict[str, datetime] = field(default_factory=dict)
    """Name -> when the API server last said that it is there."""
    refused: dict[str, Refusal] = field(default_factory=dict)
    taken: dict[str, tuple[NameConflict, datetime]] = field(default_factory=dict)
    """Name -> who has it, and when that was seen."""

    def there(self, now: datetime) -> frozenset[str]:
        """Names that were lately known to exist."""
        return frozenset(name for name, at in self.existing.items() if now - at <= EXISTING_FADES)

    def doubt_in(self, now: datetime) -> float | None:
        """Seconds until the first of them has to be asked for again."""
        first = min((at for at in self.existing.values() if now - at <= EXISTING_FADES), default=None)
        return None if first is None else (first + EXISTING_FADES - now).total_seconds() + 1.0

    def refusals(self, now: datetime, generation: int) -> tuple[Refusal, ...]:
        """Refusals that still speak of this spec."""
        for name, refusal in list(self.refused.items()):
            fades = _FADES.get(refusal.kind)
            old = refusal.generation != generation if fades is None else now - refusal.at > fades
            if old:
                del self.refused[name]
        return tuple(self.refused.values())

    def foreign(self, now: datetime) -> dict[str, NameConflict]:
        """Names that were found to be somebody else's."""
        for name, (_, at) in list(self.taken.items()):
            if now - at > FOREIGN_FADES:
                del self.taken[name]
        return {name: who for name, (who, _) in self.taken.items()}


class AnswerStore:
    """The answers of every job, by uid."""

    def __init__(self) -> None:
        self._of: dict[str, ApiAnswers] = {}

    def of(self, uid: str) -> ApiAnswers:
        """The answers of one run, empty at first."""
        return self._of.setdefault(uid, ApiAnswers())

    def forget(self, uid: str) -> None:
        """The run is gone."""
        self._of.pop(uid, None)
