"""The caches of the cluster's objects, and which keys of which controller a change wakes.

A terminating pod or a changed node wakes its jobs with urgent priority, a pod that gets on with the others that do. A
controller's own status write wakes nothing of it: the plan that led to it has said when to plan again.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any

from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import DisruptionBudget, Node, Pod, Service
from shoal.api.kueue import ResourceFlavor, Workload
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.cluster.cache import Cache
from shoal.cluster.clock import utc_now
from shoal.controllers.arrival import as_heard
from shoal.controllers.belonging import (
    Owned,
    awaited_pool,
    described,
    host,
    job_named_by,
    jobs_named_by,
    run_of,
    tenant,
)
from shoal.controllers.kept import R, kept, with_known_parts
from shoal.controllers.sharing import Run, Sharing, paid_by
from shoal.manifests.platforms import NO_OWN, Platform, marks_of, platform_by
from shoal.policy.facts.blip import heard_again, silent_since
from shoal.policy.facts.sightings import PoolNode
from shoal.policy.facts.signals import pod_disruption
from shoal.runtime.controller import Key, key_of
from shoal.runtime.work_queue import Priority

MOST_GONE = 4096
"""Names of pods that a job had which are remembered, four for each place that it may have: longer than it takes to
record their end."""

Wake = Callable[[Key, Priority], None]


def _ignore(_key: Key, _priority: Priority) -> None:
    """Wake nothing."""


def _nothing() -> None:
    """Do nothing."""


@dataclass
class Wakes:
    """What to call with the keys of each kind that a change may affect."""

    jobs: Wake = _ignore
    pools: Wake = _ignore
    profiles: Wake = _ignore
    plans: Callable[[], None] = _nothing
    """Called when what jobs want of pools, or what pools have, may have changed."""


def _kept(_old: R | None, new: R) -> R:
    return kept(new)


class ClusterState:
    """The caches. `platform`: of the nodes, if somebody said it; `wall`: tells when an object arrives."""

    def __init__(
        self,
        wakes: Wakes,
        platform: Platform | None = None,
        *,
        own: Platform = NO_OWN,
        wall: Callable[[], datetime] = utc_now,
    ) -> None:
        self._wakes = wakes
        self._nodes: dict[str, Node] = {}
        self._pools: dict[str, CapacityPool] = {}
        self._flavors: dict[str, ResourceFlavor] = {}
        self._sharing = Sharing()
        self._unreadable: dict[str, tuple[str, str]] = {}
        """Pools that could not be parsed, by uid: the name, and why."""
        self.jobs: Cache[TrainingJob] = Cache(
            self._job_changed, shared=lambda old, new: with_known_parts(old, as_heard(old, kept(new), wall()))
        )
        self.pods: Cache[Pod] = Cache(
            self._pod_changed,
            {
                "run": run_of,
                "node": lambda pod: pod.spec.node_name,
                "worker's host": partial(host, "worker"),
                "server's host": partial(host, "ps"),
                "waiting": awaited_pool,
            },
            shared=lambda old, new: as_heard(old, new, wall()),
        )
        self.services: Cache[Service] = Cache(self._owned_changed, {"job": job_named_by})
        self.budgets: Cache[DisruptionBudget] = Cache(self._owned_changed, {"job": job_named_by})
        self.workloads: Cache[Workload] = Cache(self._owned_changed, {"job": job_named_by})
        self.flavors: Cache[ResourceFlavor] = Cache(self._flavor_changed, shared=_kept)
        self.nodes: Cache[Node] = Cache(
            self._node_changed, shared=lambda old, new: as_heard(old, kept(new), wall())
        )
        self.pools: Cache[CapacityPool] = Cache(self._pool_changed, shared=_kept)
        self.profiles: Cache[SpeedProfile] = Cache(
            self._profile_changed, {"described": described}, shared=_kept
        )
        self.on_job: list[Callable[[TrainingJob | None, TrainingJob | None], None]] = []
        """Told every change of a job, before it is woken; so are these of nodes and pools."""
        self.on_gone: list[Callable[[str], None]] = []
        """Told the uid of a job that is gone. Whoever keeps something of jobs is told here, and drops it."""
        self.on_node: list[Callable[[Node | None, Node | None], None]] = []
        self.on_lost: list[Callable[[str], None]] = []
        """Told the uid of a job that has a pod no more."""
        self.on_pool: list[Callable[[CapacityPool | None, CapacityPool | None], None]] = []
        self._gone_pods: dict[str, dict[str, str | None]] = {}
        self._silent: list[datetime] = []
        self._heard_again: list[datetime] = []
        self._platform_by = partial(platform_by, said=platform, own=own)
        self._marks: Set[str] = frozenset()
        self._platform = self._platform_by(self._marks)
        self.nodes_by_name: Mapping[str, Node] = MappingProxyType(self._nodes)
        self.pools_by_name: Mapping[str, CapacityPool] = MappingProxyType(self._pools)
        self.flavors_by_name: Mapping[str, ResourceFlavor] = MappingProxyType(self._flavors)

    @property
    def unreadable_pools(self) -> dict[str, str]:
        """Why CapacityPools cannot be parsed, by name."""
        self._unreadable = {uid: each for uid, each in self._unreadable.items() if self.pools.is_unread(uid)}
        return dict(self._unreadable.values())

    def hear_unreadable_pool(self, found: Mapping[str, Any], why: str) -> None:
        """Take a CapacityPool that cannot be parsed, as it was listed or watched, and why."""
        meta = found.get("metadata") or {}
        name = str(meta.get("name", ""))
        self._unreadable[str(meta.get("uid", ""))] = name, why
        self._wake_users(name)

    @property
    def platform(self) -> Platform:
        """The platform of all nodes that this process has seen.

        Pods that wait are made anew where it becomes another: they would be for ever where a group of nodes comes and
        goes, and those that ask for its nodes, too, find all others.
        """
        return self._platform

    @property
    def caches(self) -> dict[str, Cache[Any]]:
        """All of them, by resource: see `sources`."""
        return {
            TrainingJob.PLURAL: self.jobs,
            "pods": self.pods,
            "services": self.services,
            "poddisruptionbudgets": self.budgets,
            "workloads": self.workloads,
            "resourceflavors": self.flavors,
            "nodes": self.nodes,
            CapacityPool.PLURAL: self.pools,
            SpeedProfile.PLURAL: self.profiles,
        }

    def cache_of(self, plural: str) -> Cache[Any] | None:
        """The cache of a custom resource; None for another kind."""
        ours = {TrainingJob.PLURAL, CapacityPool.PLURAL, SpeedProfile.PLURAL}
        return self.caches[plural] if plural in ours else None

    def wake(self, plural: str, key: Key, priority: Priority = Priority.NORMAL) -> None:
        """Wake the controller of a custom resource."""
        wakes = {
            TrainingJob.PLURAL: self._wakes.jobs,
            CapacityPool.PLURAL: self._wakes.pools,
            SpeedProfile.PLURAL: self._wakes.profiles,
        }
        wakes[plural](key, priority)

    def _job_changed(self, old: TrainingJob | None, new: TrainingJob | None, ours: bool) -> None:
        seen = new or old
        if seen is None:
            return
        for told in self.on_job:
            told(old, new)
        if not ours:
            self._wakes.jobs(key_of(seen), Priority.NORMAL)
        if new is None:
            self._gone_pods.pop(seen.metadata.uid, None)
            for forget in self.on_gone:
                forget(seen.metadata.uid)
        if seen.spec.workers.pools and _wants(old) != _wants(new):
            self._wakes.plans()

    def job_of(self, pod: Pod) -> TrainingJob | None:
        """The job that a pod is of, if that exists: by its uid, and by its own namespace and name.

        Whoever may make a pod in any namespace chooses its labels and the uid of its owner, and learns that of others.
        """
        run = run_of(pod)
        return self._job_of_run(run) if run is not None else None

    def _job_of_run(self, run: Run) -> TrainingJob | None:
        key, uid = run
        job = self.jobs.by_uid(uid)
        return job if job is not None and key_of(job) == key else None

    def gone_pods(self, job_uid: str) -> dict[str, str | None]:
        """The pods that a job had: see `Observation.gone_pods`."""
        return self._gone_pods.get(job_uid, {})

    @property
    def silent_nodes(self) -> Sequence[datetime]:
        """Since when nodes are Unknown, the earliest first."""
        return self._silent

    @property
    def nodes_heard_again(self) -> Sequence[datetime]:
        """When nodes that had been Unknown were heard again, the earliest first: the last ones."""
        return self._heard_again

    def others_on(self, job_uid: str, nodes: Set[PoolNode]) -> dict[PoolNode, int]:
        """How many jobs but this one pay a node, too, of those that can be seen and have not ended.

        Of these nodes, those where there are any. A pod does not show that its job pays: whoever may make pods puts any
        number of them on a node. One that pays has the node in its status, in that pool, and counts what it has.
        """
        found, paid = Counter[PoolNode](), dict[str, Set[PoolNode]]()
        for node in nodes:
            for run in self._sharing.on(node[1]) if node[1] in self._sharing.nodes else ():
                if run[1] == job_uid or (job := self._job_of_run(run)) is None:
                    continue
                if node in (paid.get(run[1]) or paid.setdefault(run[1], paid_by(job))):
                    found[node] += 1
        return dict(found)

    def _pod_changed(self, old: Pod | None, new: Pod | None, ours: bool) -> None:
        self._sharing.see(tenant(old), tenant(new))
        run = run_of(old) if old is not None else None
        if old is not None and run is not None and (new is None or run_of(new) != run):
            self._lose(old, told=new is None and _is_leaving(old))
        if not ours and not _reads_the_same(old, new):
            of_a_run = run is not None or (
                new is not None and run_of(new) is not None
            )  # else of whoever labelled it
            ends = new is None or _is_leaving(new)
            priority = Priority.URGENT if ends and of_a_run else Priority.CALM
            for key in jobs_named_by(old, new):
                self._wakes.jobs(key, priority)

    def _lose(self, pod: Pod, *, told: bool) -> None:
        """Remember a pod that a job has no more. `told`: it had announced that; else it may run on, without a label."""
        if (job := self.job_of(pod)) is not None:
            why = (pod_disruption(pod) or "") if told else None
            gone = self._gone_pods.setdefault(job.metadata.uid, {})
            gone[pod.metadata.name] = why
            for told_of in self.on_lost:
                told_of(job.metadata.uid)
            if len(gone) > MOST_GONE:
                del gone[next(iter(gone))]

    def _owned_changed(self, old: Owned | None, new: Owned | None, ours: bool) -> None:
        if ours or _reads_the_same(old, new):
            return
        for key in jobs_named_by(old, new):  # what is new may be ours, seen before the answer
            self._wakes.jobs(key, Priority.CALM if old is None else Priority.NORMAL)

    def _flavor_changed(self, old: ResourceFlavor | None, new: ResourceFlavor | None, _ours: bool) -> None:
        if new is not None:
            self._flavors[new.metadata.name] = new
        elif old is not None:
            self._flavors.pop(old.metadata.name, None)
        for key in {key for each in self.workloads.all() if (key := job_named_by(each)) is not None}:
            self._wakes.jobs(key, Priority.NORMAL)

    def _node_changed(self, old: Node | None, new: Node | None, _ours: bool) -> None:
        for told in self.on_node:
            told(old, new)
        if new is not None:
            name = new.metadata.name
            self._nodes[name] = new
            if not (marks := marks_of(new)) <= self._marks:
                self._marks |= marks
                self._platform = self._platform_by(self._marks)
        elif old is not None:
            name = old.metadata.name
            if (known := self._nodes.get(name)) is not None and known.metadata.uid == old.metadata.uid:
                del self._nodes[name]
        self._note_silence(old, new)
        if old is not None and new is not None and _without_version(old) == _without_version(new):
            return  # only a heartbeat
        jobs = Counter(
            key for pod in self.pods.indexed("node", name) if (key := job_named_by(pod)) is not None
        )
        for key, _ in reversed(jobs.most_common()):  # those with few pods are soon done
            self._wakes.jobs(key, Priority.URGENT)

    def _note_silence(self, old: Node | None, new: Node | None) -> None:
        was, since = (silent_since(each) if each is not None else None for each in (old, new))
        if was != since:
            if was is not None:
                self._silent.remove(was)
            if since is not None:
                bisect.insort(self._silent, since)
        if old is not None and new is not None and (heard := heard_again(old, new)) is not None:
            bisect.insort(self._heard_again, heard)
            del self._heard_again[: -len(self._nodes)]

    def _pool_changed(self, old: CapacityPool | None, new: CapacityPool | None, ours: bool) -> None:
        for told in self.on_pool:
            told(old, new)
        if new is not None:
            self._pools[new.metadata.name] = new
        elif old is not None:
            self._pools.pop(old.metadata.name, None)
        if (seen := new or old) is None or ours:
            return
        self._wakes.pools(key_of(seen), Priority.NORMAL)
        if old is None or new is None or (old.spec, old.is_ending) != (new.spec, new.is_ending):
            self._wakes.plans()
            self._wake_users(seen.metadata.name)

    def _wake_users(self, pool: str) -> None:
        """Wake the jobs that name a pool."""
        for job in self.jobs.all():
            if pool in job.spec.workers.pools or pool in job.spec.parameter_servers.pools:
                self._wakes.jobs(key_of(job), Priority.NORMAL)

    def _profile_changed(self, old: SpeedProfile | None, new: SpeedProfile | None, ours: bool) -> None:
        if (seen := new or old) is not None and not ours:
            self._wakes.profiles(key_of(seen), Priority.NORMAL)


def _wants(job: TrainingJob | None) -> object:
    """What of a job is a reason to plan at once: its spec, its begin and end, and what pools took from it."""
    if job is None:
        return None
    usage = {name: (used.interruptions, used.unfulfilled) for name, used in job.status.pool_usage.items()}
    return job.metadata.uid, job.metadata.generation, job.status.finished, usage


def _reads_the_same(old: Owned | None, new: Owned | None) -> bool:
    """Whether only what nobody reads has changed: a condition of no meaning here, an annotation, who wrote a field."""
    if old is None or new is None:
        return False
    parts = type(new).model_fields.keys() - {"metadata"}
    if any(getattr(old, part) != getattr(new, part) for part in parts):
        return False
    same = replace(new.metadata, resource_version=old.metadata.resource_version)
    return old.metadata == same


def _is_leaving(pod: Pod) -> bool:
    return pod.metadata.deletion_timestamp is not None or pod.ended or pod_disruption(pod) is not None


def _without_version(node: Node) -> Node:
    return node.model_copy(update={"metadata": node.metadata.model_copy(update={"resource_version": ""})})
