"""What is wanted, decided once: which workers, on which nodes each, and how many parameter servers.

`spec.workers.replicas` is read here only.

A worker is wanted as long as its record does not say otherwise, so that a slot whose pod just failed is not given up
for another one. When there are too many, those go that would be missed least: without a pod, draining, silent, not
running yet; then the highest index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.api.labels import Place
from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import Slot
from shoal.manifests.placement import Where, default_where
from shoal.policy.decide.members import UNWANTED
from shoal.policy.facts.read import Facts, Sighting
from shoal.policy.facts.verdict import PodOutcome


@dataclass
class Wanted:
    """The wanted workers and servers."""

    job: TrainingJob
    workers: frozenset[int]
    servers: Callable[[Place], bool] = lambda _: False
    where: dict[int, Where] = field(default_factory=dict)
    """Where the workers run that do not run as the spec says by default."""

    def wants(self, place: Place) -> bool:
        """Whether there is to be a pod of this place."""
        return place.index in self.workers if place.role == "worker" else self.servers(place)

    pools: dict[int, str] = field(default_factory=dict)
    """The CapacityPools of the workers."""
    fallen_back: frozenset[int] = frozenset()
    """Workers that are on on-demand nodes because they waited for others in vain."""

    def fits(self, slot: Slot) -> bool:
        """Whether the pod of this record is on the nodes that are wanted."""
        return slot.role == "ps" or slot.pool == self.pools.get(slot.index, slot.pool)

    def fell_back(self, slot: Slot) -> bool:
        """Whether it does not, because it waited in vain."""
        return slot.index in self.fallen_back

    def keeps(self, slot: Slot) -> bool:
        """Whether the worker of this record is wanted as it is."""
        return slot.index in self.workers and self.fits(slot)

    def where_of(self, place: Place) -> Where:
        """The nodes that a new pod of this place may run on."""
        if place.role == "worker" and (found := self.where.get(place.index)) is not None:
            return found
        return default_where(self.job, place)


def wanted_workers(facts: Facts) -> frozenset[int]:
    """The slots of the wanted workers."""
    number = wanted_number(facts)
    newest: dict[int, Sighting] = {each.place.index: each for each in facts.sightings["worker"]}
    held = {index for index, each in newest.items() if each.slot.cause != UNWANTED}
    if len(held) <= number:
        vacant = (index for index in range(number + len(newest)) if index not in held)
        return frozenset(held | {next(vacant) for _ in range(number - len(held))})
    return frozenset(sorted(held, key=lambda index: (_loss(newest[index]), index))[:number])


def wanted_number(facts: Facts) -> int:
    """How many workers are wanted."""
    spec = facts.job.spec
    return 0 if spec.suspend else spec.workers.replicas


def _loss(newest: Sighting) -> int:
    """How little would be lost with the worker: 0 for one at work."""
    slot, outcome = newest.slot, newest.verdict.outcome
    if outcome is PodOutcome.DONE and not slot.cause:
        return 0
    if newest.pod is None or outcome not in {PodOutcome.HEALTHY, PodOutcome.LEAVING, PodOutcome.UNREACHABLE}:
        return 5
    if slot.cause or outcome is not PodOutcome.HEALTHY:
        return 4
    if slot.state == "Silent":
        return 3
    if not newest.pod.running:
        return 2
    return 1 if newest.signal is not None else 0
