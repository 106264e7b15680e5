"""Which nodes several jobs share, and which a job pays.

Kept as pods come and go, since of a thousand nodes of a job hardly any is shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Set

from shoal.api.training_job import TrainingJob
from shoal.policy.facts.sightings import PoolNode

Run = tuple[tuple[str, str], str]
"""The namespace and name of a job, and the uid of its run, as a pod says them."""
Tenant = tuple[str, Run]
"""A node, and a run that has a pod there."""


class Sharing:
    """The runs on each node. `nodes`: those with several."""

    def __init__(self) -> None:
        self._runs: dict[str, Counter[Run]] = {}
        self._nodes: set[str] = set()

    @property
    def nodes(self) -> Set[str]:
        """The nodes that are shared."""
        return self._nodes

    def on(self, node: str) -> Collection[Run]:
        """The runs that have pods on a node."""
        return self._runs.get(node, ())

    def see(self, old: Tenant | None, new: Tenant | None) -> None:
        """Take a change of one pod: where it was, and where it is now."""
        if old == new:
            return
        if old is not None:
            self._count(*old, -1)
        if new is not None:
            self._count(*new, 1)

    def _count(self, node: str, run: Run, more: int) -> None:
        runs = self._runs.setdefault(node, Counter())
        runs[run] += more
        if not runs[run]:
            del runs[run]
        if not runs:
            del self._runs[node]
        if len(runs) > 1:
            self._nodes.add(node)
        else:
            self._nodes.discard(node)


def paid_by(job: TrainingJob) -> Set[PoolNode]:
    """The nodes of pools that a job pays, all or parts of them."""
    if job.status.finished or job.status.counted_until is None:
        return frozenset()
    return {
        (slot.pool, slot.node)
        for slot in job.status.slots
        if slot.pool and slot.node and slot.state != "Ended"
    }
