"""What is seen of one pool at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import Node, Pod
from shoal.api.training_job import TrainingJob


@dataclass(frozen=True)
class Seen:
    """What is seen of one pool at one moment. `nodes`: those that its selector matches."""

    pool: CapacityPool
    now: datetime
    nodes: Sequence[Node]
    used: int
    """Nodes with a pod of a job."""
    jobs: Sequence[TrainingJob]
    """All jobs that exist."""
    waiting: Sequence[Pod]
    """Pods of this pool that have no node."""
    problem: tuple[str, str] | None = None
    """What is wrong with the pool's description, as a reason and a message."""
    overlaps: str = ""
    """An older pool that selects nodes of it."""
    operator: str = ""
    """Who sees this."""
