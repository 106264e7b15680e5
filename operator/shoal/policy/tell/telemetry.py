"""What of a status may wait for the next write of telemetry.

The figures of training; other words of a condition whose reason stays, since those of a scheduler, a quota or a webhook
change with each try; and that the replacement of a lost worker has a node, or runs: its loss was written at once, and
where the job lacks it (another phase, fewer workers than its minimum) that has ended is, too.
"""

from __future__ import annotations

from shoal.api.planning_status import PlanStatus
from shoal.api.training_job_status import DataStatus, Slot, TrainingJobStatus, TrainingProgress

OUTSTANDING = "ReplacementOutstanding"
_FOLLOW = frozenset({"Disrupted", "WorkersReady", "Reconciling"})
"""Conditions that follow from the slots, as the counts of workers do."""


def differs_in_telemetry_only(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """Whether only what may wait has changed: writes of such a status are rate-limited."""
    there = {slot.place for slot in new.slots}  # a record that is not kept has a successor
    before, after = (
        [_on_its_way(each) for each in status.slots if each.place in there] for status in (old, new)
    )
    return before == after and _lasting(old) == _lasting(new)


def _lasting(status: TrainingJobStatus) -> TrainingJobStatus:
    last = status.last_disruption
    recovery = {"replacement_created_seconds": None, "recovered_seconds": None}
    workers = {"active": 0, "ready": 0, "pending": 0, "spot": 0, "on_demand": 0}
    return status.model_copy(
        update={
            "training": TrainingProgress(restarts_from_nothing=status.training.restarts_from_nothing),
            "data": DataStatus(),
            "parameter_servers": status.parameter_servers.model_copy(update={"last_snapshot_time": None}),
            "prediction": None,
            "plan": _decided(status.plan),
            "cost": None,
            "pool_usage": {},
            "counted_until": None,
            "slots": [],
            "workers": status.workers.model_copy(update=workers),
            "conditions": [
                each.model_copy(update={"message": ""})
                for each in status.conditions
                if each.type not in _FOLLOW
            ],
            "reason": "" if status.reason == OUTSTANDING else status.reason,
            "last_disruption": last.model_copy(update=recovery) if last is not None else None,
        }
    )


def _on_its_way(slot: Slot) -> Slot:
    """The record of a worker without the node that it starts on; of a replacement, without that it runs."""
    if slot.role != "worker" or slot.cause:
        return slot
    change: dict[str, object] = {"trained": False}
    if slot.state == "Starting" or (slot.replaces and slot.state == "Running"):
        change |= {"node": "", "machine": ""}
        if slot.replaces:
            change |= {"state": "Starting", "created_at": None, "ran": False}
    return slot.model_copy(update=change)


def _decided(plan: PlanStatus | None) -> PlanStatus | None:
    """The plan without what is expected of it."""
    nothing = {"finish_time": None, "cost": None, "confidence": None, "parameter_servers": None}
    return plan.model_copy(update=nothing) if plan is not None else None
