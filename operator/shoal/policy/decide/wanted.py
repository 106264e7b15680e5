"""What is wanted, decided once: which workers, where each of them lives, and which parameter servers.

`spec.workers.replicas` is read in this module only.

A worker is wanted as long as its record does not say otherwise, so that a slot whose pod just failed is not given up
for another one. When there are too many, those go that would be missed least: without a pod, draining, silent, not
running yet; then those with the least speed for their price; then the highest index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import compress, count
from math import ceil
from operator import ne

from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import Pod
from shoal.api.labels import PLATFORM, POOL, TEMPLATE, Place, RoleName, avoids_until
from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import UNWANTED, ExcludedNode, Slot
from shoal.manifests.placement import Assigned, Where, placement_labels
from shoal.manifests.platforms import GENERIC, Platform
from shoal.manifests.workload import stands_for
from shoal.policy.common.timers import Timers
from shoal.policy.decide.assignment import Assignment, assign
from shoal.policy.decide.homes import Homes, first_with_nodes, homes_of, server_pools, with_words
from shoal.policy.decide.members import newest_of, refutes
from shoal.policy.decide.planning import Planned, planned
from shoal.policy.facts.read import Facts
from shoal.policy.facts.sightings import AtRest, Home, Sighting, home_of
from shoal.policy.facts.verdict import PodOutcome
from shoal.policy.facts.waits import NEEDS_A_NODE, Wait, wait_of
from shoal.policy.model import Reason


@dataclass
class Wanted:
    """The wanted workers and servers."""

    job: TrainingJob
    workers: frozenset[int]
    places: Homes
    """The homes that workers may have."""
    planned: Planned
    asked: int = 0
    """How many workers the spec or the plan asks for; there may be no place for all."""
    lingering: int = 0
    """How many of them are one too many, and end when the others run."""
    homes: Mapping[int, Home] = field(default_factory=dict)
    """Where the workers live; empty if all live where the spec says."""
    servers: Callable[[Place], bool] = lambda _: False
    server_pools: Mapping[str, CapacityPool] = field(default_factory=dict)
    """Where new parameter servers may live, if the job names pools for them."""
    assigned: Mapping[RoleName, Assigned] = field(default_factory=dict)
    """What a queue's admission says about the pods that it is for."""
    excluded: tuple[ExcludedNode, ...] = ()
    """Nodes that new workers avoid."""
    gives_way: Place | None = None
    """The worker whose place a server needs: see `room`."""
    problem: Reason | None = None
    """Why not all pods can have a home."""
    platform: Platform = GENERIC
    _placements: dict[tuple[RoleName, Home], dict[str, str]] = field(default_factory=dict)
    """The labels that say a placement, by role and home."""

    def wants(self, place: Place) -> bool:
        """Whether there is to be a pod of this place."""
        return place.index in self.workers if place.role == "worker" else self.servers(place)

    def fits(self, slot: Slot) -> bool:
        """Whether the pod of this record lives where it is wanted."""
        if slot.role == "ps" or not self.homes:
            return True
        return self.homes.get(slot.index, home_of(slot)) == home_of(slot)

    def goes_on_demand(self, slot: Slot) -> bool:
        """Whether this worker is to go from a spot node to an on-demand node."""
        on_demand = self.places.is_on_demand
        return on_demand(self.homes.get(slot.index, Home())) and not on_demand(home_of(slot))

    def returns_to_spot(self, slot: Slot) -> bool:
        """Whether this worker is to go from an on-demand node to a spot node."""
        on_demand = self.places.is_on_demand
        return on_demand(home_of(slot)) and not on_demand(self.homes.get(slot.index, Home()))

    def disturbed(self, at_rest: AtRest, timers: Timers) -> set[int]:
        """Workers at rest that are not wanted, not where they are, or not as they are."""
        here = at_rest.homes
        elsewhere = map(ne, map(self.homes.get, here), here.values()) if self.homes else ()
        outdated = {
            i for i, each in at_rest.starting.items() if each.pod and self.is_outdated(each.pod, timers)
        }
        return set(compress(here, elsewhere)) | (here.keys() - self.workers) | outdated

    def is_outdated(self, pod: Pod, timers: Timers) -> bool:
        """Whether a pod that has not run is not as it would be made now.

        One that has its node keeps that, whatever has been edited since. One that has none, and avoids nodes, is made
        anew when none of these is excluded any more: once in a cooldown at most.
        """
        place, labels, spec = pod.place, pod.metadata.labels, self.job.spec
        if place is None:
            return False
        template = (spec.parameter_servers if place.role == "ps" else spec.workers).template_digest
        if labels.get(TEMPLATE, template) != template:
            return True
        if pod.spec.node_name:
            return False
        until, now = avoids_until(labels), self._placement(place, pod)
        if now is None:
            return False
        others = {key for key, said in now.items() if key in labels and labels[key] != said}
        if PLATFORM in others and not self._follows_platform(pod):
            others.remove(PLATFORM)
        return bool(others) or not (until is None or timers.pending(until))

    def _follows_platform(self, pod: Pod) -> bool:
        """Whether the pod is made anew where the platform makes something else of its placement.

        Not if it has a place in a queue, or quota: it would lose that.
        """
        queues = bool(self.job.spec.run_policy.scheduling_policy.queue) or wait_of(pod) is Wait.QUEUE
        return self.platform.is_known and not queues

    def _placement(self, place: Place, pod: Pod) -> Mapping[str, str] | None:
        """What this pod, which has no node, would say of its placement if it was made now; None: it cannot be made."""
        if place.role == "worker":
            homeless, home = self.is_homeless(place.index), self.home(place)
        else:
            homeless, home = self.servers_are_homeless, self._home_of_server(pod)
        if homeless:
            return None
        if (key := (place.role, home)) not in self._placements:
            self._placements[key] = placement_labels(self.job, self._where(*key), self.platform)
        return self._placements[key]

    def _home_of_server(self, pod: Pod | None = None) -> Home:
        """Where a new server lives; or one that has no node, which stays unless its pool has none, and another one."""
        here = pod.metadata.labels.get(POOL, "") if pod is not None else ""
        if pod is not None and here in self.server_pools and wait_of(pod) not in NEEDS_A_NODE:
            return Home(here)
        pool = first_with_nodes(self.server_pools, here)
        return Home(pool.metadata.name if pool is not None else "")

    def home(self, place: Place) -> Home:
        """Where a new pod of this place lives."""
        return self.homes.get(place.index, Home()) if place.role == "worker" else Home()

    def pool_of(self, place: Place) -> str:
        """The CapacityPool that a new pod of this place is for; empty: none."""
        return (self.home(place) if place.role == "worker" else self._home_of_server()).pool

    def is_homeless(self, index: int) -> bool:
        """Whether no new pod of this worker can be placed: its pool is not there."""
        home = self.homes.get(index)
        return home is not None and bool(home.pool) and home.pool not in self.places.pools

    @property
    def servers_are_homeless(self) -> bool:
        """Whether no new parameter server can be placed: none of its pools is there."""
        return bool(self.job.spec.parameter_servers.pools) and not self.server_pools

    def home_is_exhausted(self, index: int) -> bool:
        """Whether a new pod of this worker would wait for a node that is known not to come."""
        return self.places.is_exhausted(self.homes.get(index, Home()))

    def where_of(self, place: Place) -> Where:
        """The nodes that a new pod of this place may run on."""
        where = self._where(
            place.role, self.home(place) if place.role == "worker" else self._home_of_server()
        )
        if stands_for(self.job, place):
            where = replace(where, assigned=self.assigned.get(place.role))
        if place.role == "ps" or not self.excluded:
            return where
        until = max(each.until for each in self.excluded)
        nodes = tuple(each.node for each in self.excluded)
        return replace(where, excluded=nodes, excluded_until=ceil(until.timestamp()))

    def _where(self, role: RoleName, home: Home) -> Where:
        """The nodes of a home."""
        if role == "worker":
            return self.places.where(home)
        return Where(self.job.spec.parameter_servers.capacity, self.server_pools.get(home.pool))


def wanted(facts: Facts) -> Wanted:
    """What is wanted of the job's workers; what of its servers is added later."""
    spec = facts.job.spec
    newest = newest_of(facts.sightings["worker"])
    held = {index: each for index, each in newest.items() if each.slot.cause != UNWANTED}
    held |= facts.at_rest.by_index()
    homes, (servers, problem) = homes_of(facts), server_pools(facts)
    if homes.problem is not None:
        problem = with_words(problem, homes.problem)
    plan = planned(facts, homes, spec.workers.replicas)
    number = 0 if facts.suspended else plan.workers
    result = Wanted(
        facts.job,
        frozenset(),
        homes,
        plan,
        number,
        server_pools=servers,
        assigned=facts.quota.assigned,
        excluded=tuple(each for each in facts.job.status.excluded_nodes if each.until > facts.now),
        problem=problem,
        platform=facts.seen.platform,
    )
    if homes.trivial:
        result.workers = _without_homes(facts.job, held, number)
        return result
    losses = dict.fromkeys(facts.at_rest.running, 0)
    losses |= {index: loss(each) for index, each in held.items() if index not in losses}
    assigned: Assignment = assign(facts, homes, held, losses, number, plan.counts)
    result.workers, result.homes = frozenset(assigned.homes), assigned.homes
    result.lingering = assigned.lingering
    result.problem = result.problem or assigned.problem
    return result


def _without_homes(job: TrainingJob, held: dict[int, Sighting], number: int) -> frozenset[int]:
    """The workers, of which those that a Workload stands for go last: the quota is theirs, whatever they do."""
    if len(held) == number:
        return frozenset(held)
    if len(held) < number:
        vacant = (index for index in count() if index not in held)
        return frozenset(held.keys() | {next(vacant) for _ in range(number - len(held))})

    def how_little(index: int) -> tuple[bool, int, int]:
        return not stands_for(job, held[index].place), loss(held[index]), index

    return frozenset(sorted(held, key=how_little)[:number])


def loss(newest: Sighting) -> int:
    """How little would be lost with the worker: 0 for one at work."""
    slot, outcome = newest.slot, newest.verdict.outcome
    cause = "" if refutes(slot, newest.pod) else slot.cause
    if outcome is PodOutcome.DONE and not cause:
        return 0
    if newest.pod is None or outcome not in {PodOutcome.HEALTHY, PodOutcome.LEAVING, PodOutcome.UNREACHABLE}:
        return 5
    if cause or outcome is not PodOutcome.HEALTHY:
        return 4
    if slot.state == "Silent":
        return 3
    if not newest.pod.running:
        return 2
    return 1 if newest.signal is not None else 0
