"""What is remembered and said of a pool, in the words of its status."""

from __future__ import annotations

from datetime import datetime

from shoal.api.base import Condition
from shoal.api.capacity_pool import CapacityPool, ScalingStatus, Subject
from shoal.pools.rules import Finding, Memory


def memory_of(scaling: ScalingStatus) -> Memory:
    """What the rules remember."""
    return Memory(
        original=scaling.original_nodes,
        nodes=scaling.nodes,
        setting=scaling.setting,
        resized_at=scaling.resized_at,
        lower_since=scaling.lower_since,
        highest=scaling.highest,
    )


def scaling_of(subject: Subject, memory: Memory | None, since: datetime | None) -> ScalingStatus | None:
    """The same as a status; `since`: since when it is released."""
    if memory is None:
        return None
    return ScalingStatus(
        subject=subject,
        original_nodes=memory.original,
        nodes=memory.nodes,
        setting=memory.setting,
        resized_at=memory.resized_at,
        lower_since=memory.lower_since,
        highest=memory.highest,
        releasing_since=since,
    )


def condition(
    pool: CapacityPool, before: dict[str, Condition], kind: str, holds: bool, why: Finding, now: datetime
) -> Condition:
    """A condition, with the time of its last change."""
    status = "True" if holds else "False"
    was = before.get(kind)
    return Condition(
        type=kind,
        status="True" if holds else "False",
        observed_generation=pool.metadata.generation,
        last_transition_time=was.last_transition_time if was is not None and was.status == status else now,
        reason=why.reason,
        message=why.message,
    )
