"""What is seen of one pool at one moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import datetime

from shoal.api.base import Reason
from shoal.api.capacity_pool import CapacityPool
from shoal.api.capacity_pool_status import OlderPool
from shoal.api.training_job import TrainingJob


@dataclass(frozen=True)
class Seen:
    """What is seen of one pool at one moment. `nodes`: those that its selector matches."""

    pool: CapacityPool
    now: datetime
    nodes: Sized
    used: int
    """Nodes with a pod of a job."""
    jobs: Sequence[TrainingJob]
    """The jobs that have used it."""
    waiting: Sequence[datetime]
    """Since when pods of this pool have waited for a node: they were created, or let go by a queue."""
    held: Mapping[str, int]
    """The nodes that jobs' workers have or, by a plan that is carried out, are to have, by namespace/name."""
    worker_nodes: int
    """As many as those workers need, of which several may share one."""
    more_nodes: int
    """As many as the workers need that wait for nodes, or are kept apart."""
    unread: Callable[[str], bool] = lambda _uid: False
    """Whether a job, by its uid, is there and cannot be parsed: it may be none of `jobs`, and have used the pool."""
    newest: datetime | None = None
    """When the last machine of these came: see `waiting.last_came`."""
    serving: int = 0
    """Of those used, nodes with parameter servers."""
    apart: int = 0
    """Of those, nodes without a worker."""
    full: int = 0
    """Of these, nodes without room for one."""
    servers_waiting: int = 0
    """Of those waiting, parameter servers: no plan counts their nodes."""
    server_nodes: int = 0
    """As many as those need and the ones that are kept apart, if they share them; one, while nobody knows what a node
    has room for."""
    problem: Reason | None = None
    """What is wrong with the pool's description."""
    overlaps: OlderPool | None = None
    """An older pool that selects nodes of it."""
    nodes_readable: bool = True
    """Else there may be nodes, with pods, that are not seen."""
    operator: str = ""
    """Who sees this."""
