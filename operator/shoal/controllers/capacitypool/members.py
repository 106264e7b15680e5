"""Which nodes and which jobs each pool has, kept as they change: a look at a pool costs what the pool has, and no more.

Pools are looked at often, and there may be thousands of nodes and jobs of others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Set

from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import Node
from shoal.api.training_job import TrainingJob
from shoal.controllers.capacitypool.selectors import Selectors, selects
from shoal.controllers.trainingjob.claims import holdings


class Members:
    """Told each change, with the old and the new object, one of which may be None.

    `changed` is told the pools that have other nodes now, or of which a job has more or fewer.
    """

    def __init__(self, changed: Callable[[str], None] = lambda _pool: None) -> None:
        self._changed = changed
        self._selectors = Selectors()
        self._labels: dict[str, Mapping[str, str]] = {}
        self._nodes: defaultdict[str, set[str]] = defaultdict(set)
        self._pools: defaultdict[str, set[str]] = defaultdict(set)
        """Those of a node: one, as a rule."""
        self._shared: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """How many nodes a pool and another one have both."""
        self._jobs: defaultdict[str, dict[str, tuple[TrainingJob, int]]] = defaultdict(dict)
        """By pool and uid, with how many nodes of the pool the job has or is to have."""
        self._held_by: dict[str, Counter[str]] = {}
        """By uid of a job, the nodes of each of its pools."""

    def nodes(self, pool: str) -> Set[str]:
        """The names of its nodes."""
        return self._nodes.get(pool, frozenset())

    def sharing(self, pool: str) -> set[str]:
        """Other pools that have one of them, too."""
        return set(+self._shared[pool]) if pool in self._shared else set()

    def rivals(self, pool: str) -> set[str]:
        """Other pools that select nodes of it, or would."""
        return self.sharing(pool) | self._selectors.related(pool)

    def jobs(self, pool: str) -> list[TrainingJob]:
        """The jobs that have used it, or are to."""
        return [job for job, _ in self.counts(pool)]

    def counts(self, pool: str) -> Iterable[tuple[TrainingJob, int]]:
        """The jobs that have used it, or are to, with the nodes that they have or are to have."""
        return self._jobs.get(pool, {}).values()

    def held(self, pool: str) -> dict[str, int]:
        """The nodes that jobs have of it or, by a plan that is carried out, are to have, by namespace/name."""
        found = self.counts(pool)
        return {f"{job.metadata.namespace}/{job.metadata.name}": count for job, count in found if count > 0}

    def see_pool(self, old: CapacityPool | None, new: CapacityPool | None) -> None:
        """Take a change of a pool."""
        if old is not None and new is not None and old.spec.node_selector == new.spec.node_selector:
            return
        if old is not None:
            for node in list(self._nodes[old.metadata.name]):
                self._leave(node, old.metadata.name)
            self._selectors.drop(old.metadata.name)
            del self._nodes[old.metadata.name]
            self._shared.pop(old.metadata.name, None)
        if new is not None:
            self._selectors.put(new.metadata.name, new.spec.node_selector)
            for node, labels in self._labels.items():
                if selects(new.spec.node_selector, labels):
                    self._join(node, new.metadata.name)

    def see_node(self, old: Node | None, new: Node | None) -> None:
        """Take a change of a node."""
        if old is not None and new is not None and old.metadata.labels == new.metadata.labels:
            return
        if old is not None:
            name = old.metadata.name
            for pool in list(self._pools[name]):
                self._leave(name, pool)
            del self._labels[name], self._pools[name]
        if new is not None:
            name, labels = new.metadata.name, new.metadata.labels
            self._labels[name] = labels
            for pool in self._selectors.selecting(labels):
                self._join(name, pool)

    def see_job(self, old: TrainingJob | None, new: TrainingJob | None) -> None:
        """Take a change of a job. Another controller's has used none of these pools, whatever its status says."""
        before, now = Counter[str](), Counter[str]()
        if old is not None:
            before = self._held_by.pop(old.metadata.uid, before)
            for pool in before:
                del self._jobs[pool][old.metadata.uid]
        if new is not None and new.spec.ours:
            now = Counter({**dict.fromkeys(new.status.pool_usage, 0), **holdings(new)})
            if now:
                self._held_by[new.metadata.uid] = now
            for pool, count in now.items():
                self._jobs[pool][new.metadata.uid] = new, count
        for pool in before.keys() | now.keys():
            if before[pool] != now[pool]:
                self._changed(pool)

    def _join(self, node: str, pool: str) -> None:
        for other in self._pools[node]:
            self._shared[pool][other] += 1
            self._shared[other][pool] += 1
        self._pools[node].add(pool)
        self._nodes[pool].add(node)
        self._changed(pool)

    def _leave(self, node: str, pool: str) -> None:
        self._nodes[pool].remove(node)
        self._pools[node].remove(pool)
        for other in self._pools[node]:
            self._shared[pool][other] -= 1
            self._shared[other][pool] -= 1
        self._changed(pool)


def in_words(selector: Mapping[str, str]) -> str:
    """A selector, as `kubectl get -l` takes it: the same for the same labels, in whatever order they come."""
    return ",".join(f"{key}={value}" for key, value in sorted(selector.items()))
