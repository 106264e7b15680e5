"""Creating the next pod of a place: the part that is the same for workers and parameter servers."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.policy.admission import Gate, gate, taken
from shoal.policy.backoff import not_before
from shoal.policy.incarnations import Incarnation
from shoal.policy.manifests import pod
from shoal.policy.model import Action, CreatePod, Observation
from shoal.policy.names import Place, RoleName, pod_name


@dataclass
class Decisions:
    """What a policy decided, gathered while it goes through the places."""

    actions: list[Action] = field(default_factory=list)
    wake_after: list[float] = field(default_factory=list)
    stalled: tuple[str, str] | None = None
    quota: str | None = None


class Creator:
    """Creates pods of one role, as far as the gate, the back-off and the names allow."""

    def __init__(self, seen: Observation, role: RoleName, decisions: Decisions) -> None:
        self._seen, self._role, self.decisions = seen, role, decisions
        self._gate: Gate = gate(seen, role)
        decisions.stalled = decisions.stalled or self._gate.stalled
        decisions.quota = decisions.quota or self._gate.quota
        if self._gate.wait_seconds is not None:
            decisions.wake_after.append(self._gate.wait_seconds)
        self._tried = False

    def create(self, index: int, of: tuple[Incarnation, ...]) -> Place | None:
        """The next incarnation of a place; None if it has to wait."""
        if not self._gate.open or (self._gate.quota and self._tried):
            return None
        if of and (until := not_before(of[-1])) is not None and until > self._seen.now:
            self.decisions.wake_after.append((until - self._seen.now).total_seconds())
            return None
        place = Place(self._role, index, of[-1].place.incarnation + 1 if of else 0)
        name = pod_name(self._seen.job.metadata.name, place)
        if (blocked := taken(self._seen, name)) is not None:
            self.decisions.stalled = self.decisions.stalled or blocked.stalled
            if blocked.wait_seconds is not None:
                self.decisions.wake_after.append(blocked.wait_seconds)
            return None
        manifest = pod(self._seen.job, place, self._seen.images)
        self.decisions.actions.append(CreatePod(name, manifest, place.role, index, place.incarnation))
        self._tried = True
        return place
