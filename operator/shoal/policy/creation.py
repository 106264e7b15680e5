"""Creates the next pod of a place: the part shared by workers and parameter servers."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.policy.admission import Gate, gate, name_conflict_gate
from shoal.policy.backoff import not_before
from shoal.policy.incarnations import Incarnation
from shoal.policy.manifests import pod
from shoal.policy.model import Action, CreatePod, Observation, Reason
from shoal.policy.names import Place, RoleName, pod_name
from shoal.policy.timers import Timers


@dataclass
class Decisions:
    """The decisions of all policies of one plan."""

    timers: Timers
    actions: list[Action] = field(default_factory=list)
    stalled: Reason | None = None
    quota: str | None = None

    def report(self, closed: Gate) -> None:
        """Report why a gate is closed, and plan again when it may open. The first report wins."""
        self.stalled = self.stalled or closed.stalled
        self.quota = self.quota or closed.quota
        if closed.wait_seconds is not None:
            self.timers.after(closed.wait_seconds)


class Creator:
    """Creates pods of one role, as far as the gate, back-off and name conflicts allow."""

    def __init__(self, seen: Observation, role: RoleName, decisions: Decisions) -> None:
        self._seen, self._role, self.decisions = seen, role, decisions
        self._gate = gate(seen, role)
        decisions.report(self._gate)
        self._tried = False

    def create(self, index: int, incarnations: tuple[Incarnation, ...]) -> Place | None:
        """Create the next incarnation of a place; None if it has to wait."""
        if not self._gate.open or (self._gate.quota and self._tried):
            return None
        last = incarnations[-1] if incarnations else None
        if last and (due := not_before(last)) is not None and self.decisions.timers.pending(due):
            return None
        place = Place(self._role, index, last.place.incarnation + 1 if last else 0)
        name = pod_name(self._seen.job.metadata.name, place)
        if (conflict := name_conflict_gate(self._seen, name)) is not None:
            self.decisions.report(conflict)
            return None
        manifest = pod(self._seen.job, place, self._seen.images)
        self.decisions.actions.append(CreatePod(name, manifest, place.role, index, place.incarnation))
        self._tried = True
        return place
