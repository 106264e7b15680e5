"""The homes that a job's workers may have: its CapacityPools, or, without pools, spot nodes and on-demand nodes.

A home is decided for each worker, and recorded in its slot. The spec gives the order of preference. Who names pools
has no other home: while none of them is there, perhaps since it is not read yet, no pod is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.api.capacity_pool import CapacityPool
from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import UNWANTED
from shoal.manifests.placement import ZONE, Where
from shoal.manifests.pods import has_gpu_image
from shoal.policy.facts.read import Facts
from shoal.policy.facts.sightings import Home, Sighting
from shoal.policy.facts.waits import NEEDS_A_NODE
from shoal.policy.model import Reason


@dataclass(frozen=True)
class Homes:
    """The homes of a job, in order of preference."""

    job: TrainingJob
    pools: Mapping[str, CapacityPool]
    """Those of the job that exist, and are in the right zone."""
    problem: Reason | None = None
    """Why some are missing."""
    taken: Mapping[str, int] = field(default_factory=dict)
    """Nodes by pool that other jobs have."""
    in_vain: Mapping[str, int] = field(default_factory=dict)
    """Workers by pool that get no node there: they use none of what others leave."""
    had: Mapping[str, int] = field(default_factory=dict)
    """Workers by pool that were made there, if any wait in vain, and are not given up."""

    @property
    def named(self) -> bool:
        """Whether the job names pools."""
        return bool(self.job.spec.workers.pools)

    @property
    def trivial(self) -> bool:
        """Whether all workers live in the same one."""
        spec = self.job.spec.workers
        return not self.named and not spec.on_demand_base and spec.fallback is None

    @property
    def base(self) -> int:
        """How many workers are to live on demand."""
        return self.job.spec.workers.on_demand_base

    def all(self) -> list[Home]:
        """All homes."""
        if self.named:
            return [Home(name) for name in self.pools]
        return [Home(), Home(on_demand=True)] if self.job.spec.workers.capacity == "Spot" else [Home()]

    def is_on_demand(self, home: Home) -> bool:
        """Whether its nodes are on demand."""
        if home.pool:
            pool = self.pools.get(home.pool)
            return pool is not None and pool.spec.capacity_type == "OnDemand"
        return home.on_demand or self.job.spec.workers.capacity == "OnDemand"

    def limit(self, home: Home) -> int:
        """Most workers: of a pool, as many as get a node of those that other jobs and parameter servers leave.

        Those in vain make room for others that were there, which are lost: of more, all would once claim these nodes.
        """
        if not home.pool:
            return 1_000
        pool = self.pools.get(home.pool)
        if pool is None or pool.is_ending:
            return 0
        left = pool.room - self.taken.get(home.pool, 0)
        beside = left + self.in_vain.get(home.pool, 0)
        return max(0, left, min(beside, self.had.get(home.pool, 0), pool.room))

    def is_exhausted(self, home: Home) -> bool:
        """Whether it is known to have no more nodes now."""
        pool = self.pools.get(home.pool)
        return pool is not None and not pool.gives_nodes

    def on_demand(self, used: Counter[Home]) -> int:
        """How many of these workers live on demand."""
        return sum(count for home, count in used.items() if self.is_on_demand(home))

    def next(self, used: Counter[Home], *, on_demand: bool | None = None) -> Home | None:
        """The most preferred home with room: of those that are not exhausted, if there is one; None: all are full.

        `used`: the homes of the others. `on_demand`: whether it is to be on demand if it can; None: as long as fewer
        than `onDemandBase` are.
        """
        if on_demand is None:
            on_demand = self.on_demand(used) < self.base
        room = [home for home in self.all() if used[home] < self.limit(home)]
        if not self.named and not on_demand:
            room = [home for home in room if not home.on_demand]  # only by base or fallback
        wanted = [home for home in room if self.is_on_demand(home)] if on_demand else []
        choices = wanted or room
        available = [home for home in choices if not self.is_exhausted(home)]
        return next(iter(available or choices), None)

    def where(self, home: Home) -> Where:
        """The nodes of a home."""
        spec = self.job.spec.workers
        if home.pool:
            return Where(spec.capacity, self.pools[home.pool], spec.zone_policy)
        return Where("OnDemand" if home.on_demand else spec.capacity, zone=spec.zone_policy)


def needs_a_node(facts: Facts, each: Sighting) -> bool:
    """Whether its pod has none. It may be one that its template fits, if not of this home."""
    return not each.slot.cause and facts.wait_of(each.slot, each.pod) in NEEDS_A_NODE


def homes_of(facts: Facts) -> Homes:
    """The homes of the job's workers."""
    spec = facts.job.spec.workers
    if not spec.pools:
        return Homes(facts.job, {})
    known, problem = _there(facts, spec.pools, "workers.pools")
    if blind := _without_image(facts, known):
        words = (
            f"the nodes of CapacityPool {', '.join(blind)} have GPUs, and Shoal has no worker image with CUDA: name "
            "one in workers.template, or set trainer.workerGpuImage in the chart's values"
        )
        problem = with_words(problem, Reason("NoGpuImage", words))
        known = {name: pool for name, pool in known.items() if name not in blind}
    zone = _zone_of_servers(facts) if spec.zone_policy == "Same" else ""
    near = in_zone(known, zone)
    if known and not near:
        words = f"no pool of workers.pools is in zone {zone}, where parameter server 0 is (workers.zonePolicy Same)"
        problem = Reason("NoPoolInZone", words)
    in_vain = Counter(pool for (pool, _), slot in facts.in_vain.items() if not slot.cause)
    return Homes(facts.job, near, problem, facts.seen.taken, in_vain, _had(facts) if in_vain else {})


def _had(facts: Facts) -> Mapping[str, int]:
    newest = {slot.index: slot for slot in facts.job.status.slots if slot.role == "worker"}
    return Counter(slot.pool for slot in newest.values() if slot.cause != UNWANTED)


def _there(facts: Facts, names: Sequence[str], field: str) -> tuple[dict[str, CapacityPool], Reason | None]:
    """Those of the pools that a field of the spec names which select nodes, and why others do not."""
    known = {name: facts.seen.pools[name] for name in names if name in facts.seen.pools}
    missing = [name for name in names if name not in known]
    problem = Reason("PoolNotFound", _not_found(facts, missing, field)) if missing else None
    everywhere = [name for name, pool in known.items() if not pool.spec.node_selector]
    if everywhere:
        words = (
            f"CapacityPool {', '.join(everywhere)} selects no nodes: set spec.nodeSelector to their labels"
        )
        problem = with_words(problem, Reason("PoolNotReady", words))
        known = {name: pool for name, pool in known.items() if name not in everywhere}
    if ending := [name for name, pool in known.items() if pool.is_ending]:
        words = (
            f"CapacityPool {', '.join(ending)} is being deleted: no worker begins there, and no parameter server that "
            f"has another pool; change {field}"
        )
        problem = with_words(problem, Reason("PoolNotReady", words))
    return known, problem


def with_words(first: Reason | None, problem: Reason) -> Reason:
    """A problem, after the words of another one."""
    return problem if first is None else Reason(problem.reason, f"{first.message}; {problem.message}")


def _not_found(facts: Facts, missing: Sequence[str], field: str) -> str:
    """What is wrong with pools that are not there to be used."""
    unread = facts.seen.unreadable_pools
    words = [
        f"this version of Shoal cannot read CapacityPool {name} ({unread[name]}): correct it, or upgrade Shoal"
        for name in missing
        if name in unread
    ]
    if absent := [name for name in missing if name not in unread]:
        names, why = ", ".join(absent), facts.seen.no_pools
        words.append(
            f"the operator does not know CapacityPool {names}, which {field} names: {why}"
            if why
            else f"CapacityPool {names} does not exist: create it, or change {field}"
        )
    return "; ".join(words)


def _without_image(facts: Facts, pools: Mapping[str, CapacityPool]) -> list[str]:
    """The pools whose workers would run an image for CPUs on nodes with GPUs, which are paid for."""
    if has_gpu_image(facts.job, facts.seen.images):
        return []
    return [name for name, pool in pools.items() if pool.spec.accelerator]


def in_zone(pools: Mapping[str, CapacityPool], zone: str) -> dict[str, CapacityPool]:
    """The pools that may have nodes in a zone; empty: anywhere."""
    return {name: pool for name, pool in pools.items() if not zone or pool.spec.zone in {"", zone}}


def _zone_of_servers(facts: Facts) -> str:
    """The zone of parameter server 0, of its newest pod that has a node; empty until one has.

    While its node cannot be read, that of its pool; or that of the pools where workers run, which are near it.
    """
    pools = facts.seen.pools
    servers = [
        each for each in facts.sightings["ps"] if each.place.is_coordinator and each.pod and each.slot.node
    ]
    for each in reversed(servers):
        if (node := facts.seen.nodes.get(each.slot.node)) is not None:
            return node.metadata.labels.get(ZONE, "")
    slots = facts.job.status.slots if servers else ()
    near = [each.slot for each in servers] + [each for each in slots if each.role == "worker"]
    running = {slot.pool for slot in near if slot.state == "Running" and not slot.cause}
    zones = {pools[name].spec.zone for name in running if name in pools} - {""}
    return zones.pop() if len(zones) == 1 else ""


def server_pools(facts: Facts) -> tuple[dict[str, CapacityPool], Reason | None]:
    """The pools in which new parameter servers may live, in order of preference, and what is wrong with others."""
    return _there(facts, facts.job.spec.parameter_servers.pools, "parameterServers.pools")


def first_with_nodes(pools: Mapping[str, CapacityPool], here: str = "") -> CapacityPool | None:
    """The first pool that has nodes; if all are exhausted, the first. Rather the one that is `here`."""
    choices = {name: pool for name, pool in pools.items() if pool.gives_nodes} or pools
    return choices.get(here) or next(iter(choices.values()), None)
