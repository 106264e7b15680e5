"""What is remembered and said of a pool, in the words of its status."""

from __future__ import annotations

from datetime import datetime

from shoal.api.capacity_pool_scaling import Subject
from shoal.api.capacity_pool_status import ScalingStatus
from shoal.pools.rules import Memory


def memory_of(scaling: ScalingStatus) -> Memory:
    """What the rules remember."""
    return Memory(
        original=scaling.original_nodes,
        nodes=scaling.nodes,
        setting=scaling.setting,
        resized_at=scaling.resized_at,
        shrunk_at=scaling.shrunk_at,
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
        shrunk_at=memory.shrunk_at,
        lower_since=memory.lower_since,
        highest=memory.highest,
        releasing_since=since,
    )
