"""What is known of each incarnation of a place, and the workers to which nothing happens.

Of a thousand workers a change concerns one. The others are *at rest*: they start or run as recorded, and neither their
pods, their nodes nor the coordinator say anything else. They are counted, and no policy visits them. That a worker is
still at rest follows from three objects that are the same ones as before: a cache keeps an object until it changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import compress
from operator import is_not
from typing import NamedTuple, TypeVar

from shoal.api.kube import Node, Pod
from shoal.api.labels import Place
from shoal.api.training_job_status import Slot, by_identity
from shoal.manifests.platforms import Platform
from shoal.manifests.pods import PodFactory
from shoal.policy.facts.signals import Signal
from shoal.policy.facts.verdict import Verdict
from shoal.policy.model import Observation

PoolNode = tuple[str, str]
"""A pool and one of its nodes."""

FEWEST_REMEMBERED = 32
"""Workers at rest that are worth it. Of nine, to look at each takes a plan 0.15 ms more, to remember them 4 KiB."""


T = TypeVar("T")


class Home(NamedTuple):
    """Where a worker lives: a pool; or no pool, and whether it is on demand though the job's workers are not."""

    pool: str = ""
    on_demand: bool = False


def home_of(slot: Slot) -> Home:
    """The home that is recorded."""
    return Home(slot.pool, slot.on_demand)


@dataclass(slots=True)
class Sighting:
    """What is known of one incarnation of a place."""

    place: Place
    slot: Slot
    """Its record; of a pod that was not recorded yet, a new one."""
    pod: Pod | None
    verdict: Verdict
    signal: Signal | None = None
    record: Slot | None = None
    """What the status has of it."""
    node: Node | None = None
    spot: bool = False
    """The node that a healthy one is bound to, if it can be read; whether it is a spot node."""
    quiet: bool = False
    """It is healthy, and as recorded: nothing about it was to be judged."""
    home: Home = field(init=False)
    """Where it lives, as recorded."""

    def __post_init__(self) -> None:
        self.home = home_of(self.slot)

    @property
    def recorded(self) -> bool:
        """Whether the status has the record."""
        return self.record is not None


@dataclass(slots=True)
class AtRest:
    """The workers at rest, by index. Each has one pod and no other record.

    What is asked of all of them in each plan is added up as they come and go.
    """

    running: dict[int, Sighting] = field(default_factory=dict)
    starting: dict[int, Sighting] = field(default_factory=dict)
    homes: dict[int, Home] = field(default_factory=dict)
    living: Counter[Home] = field(default_factory=Counter)
    """How many live in each home."""
    nodes: Counter[PoolNode] = field(default_factory=Counter)
    """How many are on each node of a pool."""
    nodes_of: Counter[str] = field(default_factory=Counter)
    """How many of these nodes each pool has."""
    bound: Counter[bool] = field(default_factory=Counter)
    """How many are on nodes that can be read, by whether these are spot nodes."""
    changed: set[int] = field(default_factory=set)
    """Who came or went since this was a copy of another one."""

    def __len__(self) -> int:
        return len(self.running) + len(self.starting)

    def __iter__(self) -> Iterator[Sighting]:
        yield from self.running.values()
        yield from self.starting.values()

    def add(self, each: Sighting) -> None:
        """Add a worker."""
        state = self.running if each.slot.state == "Running" else self.starting
        index = each.place.index
        state[index], self.homes[index] = each, each.home
        self._count(each, 1)

    def pop(self, indices: Iterable[int]) -> list[Sighting]:
        """Take those of these workers that are at rest."""
        found = []
        for index in indices:
            if (each := self.running.pop(index, None) or self.starting.pop(index, None)) is not None:
                del self.homes[index]
                self._count(each, -1)
                found.append(each)
        return found

    def _count(self, each: Sighting, one: int) -> None:
        self.changed.add(each.place.index)
        _add(self.living, each.home, one)
        if each.node is not None:
            _add(self.bound, each.spot, one)
        pool, name = node = each.slot.pool, each.slot.node
        if pool and name:
            before = self.nodes[node]
            _add(self.nodes, node, one)
            _add(self.nodes_of, pool, bool(before + one) - bool(before))

    def get(self, index: int) -> Sighting | None:
        """This worker, if it is at rest."""
        return self.running.get(index) or self.starting.get(index)

    def by_index(self) -> dict[int, Sighting]:
        """All of them."""
        return self.running | self.starting

    def copy(self) -> AtRest:
        """The same, of which others may be taken."""
        return AtRest(
            self.running.copy(),
            self.starting.copy(),
            self.homes.copy(),
            self.living.copy(),
            self.nodes.copy(),
            self.nodes_of.copy(),
            self.bound.copy(),
        )


def _add(counts: Counter[T], key: T, number: int) -> None:
    """Add to a count, and drop one that is nothing: what is counted is also what there is."""
    counts[key] += number
    if not counts[key]:
        del counts[key]


class Memory:
    """Who was at rest in the last plan of a job, and what its pods are made of while some are still to be made.

    The next plan is the same without it, and takes longer. Of a thousand workers each plan asks whether the objects
    are the same ones: by the identities of all at once, not worker by worker.
    """

    def __init__(self) -> None:
        self._of: tuple[Platform, bool] | None = None
        self._pods: PodFactory | None = None
        self._at_rest = AtRest()
        self._index_of_pod: dict[int, int] = {}
        """By the identity of its pod, the index of each; likewise of its record."""
        self._index_of_slot: dict[int, int] = {}
        self._node_names: dict[int, str] = {}
        """By index; in the same order as the nodes."""
        self._nodes: dict[int, Node | None] = {}

    def pods(self, seen: Observation) -> PodFactory:
        """What makes the pods of the job."""
        known = self._pods
        if known is not None and known.serves(seen.job, seen.images, seen.platform):
            return known
        return PodFactory(seen.job, seen.images, seen.platform)

    def keep_pods(self, pods: PodFactory | None) -> None:
        """Remember what makes them; or forget it, since none is to be made: it takes 10 KiB. One that is large, too."""
        self._pods = pods if pods is not None and pods.is_small else None

    def recall(self, seen: Observation) -> tuple[AtRest, list[Pod], list[Slot]]:
        """The workers that still are at rest; and the pods and the records of others, in order."""
        if self._of != _basis(seen):
            self._drop(self._at_rest.by_index())
        of_pod, of_slot = self._index_of_pod, self._index_of_slot
        pods, slots = by_identity(seen.pods), by_identity(seen.job.status.slots)
        roused = {of_pod[key] for key in of_pod.keys() - pods.keys()}
        roused.update(of_slot[key] for key in of_slot.keys() - slots.keys())
        now = map(seen.nodes.get, self._node_names.values())
        roused.update(compress(self._node_names, map(is_not, now, self._nodes.values())))
        self._drop(roused)
        self._at_rest.changed.clear()
        others = [pod for key, pod in pods.items() if key not in of_pod]
        return self._at_rest.copy(), others, [slot for key, slot in slots.items() if key not in of_slot]

    def keep(self, seen: Observation, at_rest: AtRest) -> None:
        """Remember who is at rest."""
        self._of = _basis(seen)
        if len(at_rest) < FEWEST_REMEMBERED:
            self._drop(self._at_rest.by_index())
            return
        self._drop(at_rest.changed)
        for index in at_rest.changed:
            if (each := at_rest.get(index)) is None:
                continue
            self._at_rest.add(each)
            self._index_of_pod[id(each.pod)] = self._index_of_slot[id(each.slot)] = index
            self._node_names[index], self._nodes[index] = each.slot.node, each.node

    def _drop(self, indices: Iterable[int]) -> None:
        for each in self._at_rest.pop(indices):
            index = each.place.index
            del self._index_of_pod[id(each.pod)], self._index_of_slot[id(each.slot)]
            del self._node_names[index], self._nodes[index]


def _basis(seen: Observation) -> tuple[Platform, bool]:
    """What else it depends on whether a worker is at rest."""
    return seen.platform, seen.node_signals
