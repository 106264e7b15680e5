"""How long it takes from the loss of a pod to its replacement's creation, start and first push, for the metrics.

The clock begins when the operator was woken about the loss, not when it came to look. All of it is in memory: what was
lost before this process led is not measured, since its beginning is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.api.labels import Place, RoleName
from shoal.api.training_job_status import Slot, TrainingJobStatus, apart
from shoal.policy.decide.members import MOVED, OWN_CAUSES, SILENT
from shoal.policy.model import Observation

Observe = Callable[[str, str, str, float], None]
"""Told role, reason, stage (created, running, first_push) and seconds."""

CREATED, RUNNING, FIRST_PUSH = "created", "running", "first_push"
STAGES = {"ps": (CREATED, RUNNING), "worker": (CREATED, RUNNING, FIRST_PUSH)}
"""A parameter server pushes nothing."""


@dataclass
class _Loss:
    place: Place
    reason: str
    since: float
    seen: set[str] = field(default_factory=set)
    """The stages that its replacement has reached."""


class Reactions:
    """The losses of all jobs whose replacements do not train yet."""

    def __init__(self, observe: Observe) -> None:
        self._observe = observe
        self._open: dict[str, dict[tuple[RoleName, int], _Loss]] = {}

    def forget(self, uid: str) -> None:
        """Drop a job that finished or was deleted."""
        self._open.pop(uid, None)

    def lost(self, seen: Observation, status: TrainingJobStatus, woken: float) -> None:
        """Note what a plan calls lost and the stored status does not. `woken`: when the operator was told."""
        if status.finished or seen.job.spec.suspend:
            self.forget(seen.job.metadata.uid)
            return
        if status.slots is seen.job.status.slots:
            return
        losses = self._open.setdefault(seen.job.metadata.uid, {})
        before, after = apart(seen.job.status, status)
        known = {slot.place for slot in before.slots if _reason(slot)}
        for slot in after.slots:
            key = slot.role, slot.index
            open_loss = losses.get(key)
            if (reason := _reason(slot)) is None:
                if open_loss is not None and open_loss.place == slot.place and not slot.cause:
                    del losses[key]  # it is back, or its notice was withdrawn
            elif slot.place not in known and (open_loss is None or open_loss.place < slot.place):
                losses[key] = _Loss(slot.place, reason, woken)

    def replaced(self, seen: Observation, now: float) -> None:
        """Look how far the replacements are."""
        uid = seen.job.metadata.uid
        if not (losses := self._open.get(uid)):
            return
        reached: dict[str, dict[tuple[RoleName, int], int]] = {CREATED: {}, RUNNING: {}, FIRST_PUSH: {}}
        """The newest incarnation of each place, by stage."""

        def note(stage: str, role: RoleName, index: int, incarnation: int) -> None:
            newest = reached[stage]
            newest[role, index] = max(incarnation, newest.get((role, index), -1))

        indices = {index for _, index in losses}
        for pod in seen.pods:
            if (place := pod.place) is not None and place.index in indices and place[:2] in losses:
                note(CREATED, *place)
                if pod.running:
                    note(RUNNING, *place)
        for worker in seen.report.workers if seen.report else ():
            if worker.slot in indices and worker.first_push_at is not None:
                note(FIRST_PUSH, "worker", worker.slot, worker.incarnation)
        for key, loss in list(losses.items()):
            for stage in STAGES[loss.place.role]:
                if stage not in loss.seen and reached[stage].get(key, -1) > loss.place.incarnation:
                    loss.seen.add(stage)
                    self._observe(loss.place.role, loss.reason, stage, max(0.0, now - loss.since))
            if len(loss.seen) == len(STAGES[loss.place.role]):
                del losses[key]
        if not losses:
            self.forget(uid)


def _reason(slot: Slot) -> str | None:
    """Why it is lost; None if it is not, or if the operator decided so."""
    if slot.state == "Silent":
        return SILENT
    ours = slot.cause in OWN_CAUSES or slot.cause == MOVED
    return None if ours or not slot.cause else slot.cause
