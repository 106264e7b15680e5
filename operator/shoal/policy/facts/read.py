"""Reads an observation into facts, once: each pod with its record, its place, the signal of its node and the verdict.

Workers at rest (`sightings`) are not read again while nothing about them has changed.

The rooms after this one (`decide`, `tell`) ask no pod or node again.
"""

from __future__ import annotations

import math
from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property

from shoal.api.kube import Node, Pod
from shoal.api.labels import ON_DEMAND, POOL, SHARDS, Place, RoleName
from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import Slot
from shoal.manifests.names import first_incarnation, pod_name
from shoal.manifests.platforms import is_spot
from shoal.manifests.pods import PodFactory
from shoal.policy.common.timers import Timers
from shoal.policy.common.times import TOLERATED, parse_time, whole
from shoal.policy.facts.blip import suspicion
from shoal.policy.facts.coordinator import (
    FRESH_REPORT_SECONDS,
    CoordinatorView,
    coordinator_view,
    may_be_heard,
)
from shoal.policy.facts.in_vain import in_vain
from shoal.policy.facts.quota import Quota, quota
from shoal.policy.facts.sightings import AtRest, Memory, Sighting
from shoal.policy.facts.signals import NODE_REPLACED, Meaning, Signal, node_signal
from shoal.policy.facts.verdict import AFTER_THE_END, ENDED, HEALTHY, PodOutcome, Verdict, has_ended, judge
from shoal.policy.facts.waits import NO_NODES, UNREAD_NODES, Wait, near_since, wait_of
from shoal.policy.model import NameConflict, Observation, Reason
from shoal_trainer.contract import StatusReport

UNCONFIRMED = Signal("NodeMissing", Meaning.AT_RISK)
"""The node is not in the cache, which may lag behind, or is registered again: the API server is to be asked."""
UNREACHABLE_PATIENCE = {"worker": timedelta(seconds=5), "ps": timedelta(seconds=10)}
"""How long a node must be Unknown before its pods are replaced: others may follow, and tell that it is not the node. A
server is alone in its place, so it waits longer. The coordinator has noticed the silence of a worker long before."""

STALE_REPORT_SECONDS = 60.0
"""A report of the coordinator that is older says nothing about the present."""
ASK_SECONDS = 1.0
"""Until it is looked again whether the coordinator has answered a new leader, or cannot be reached."""


@dataclass
class Facts:
    """What was read. Decisions add to `timers` when something becomes due."""

    seen: Observation
    timers: Timers
    coordinator: CoordinatorView
    pods: PodFactory
    """What makes the job's pods."""
    sightings: Mapping[RoleName, list[Sighting]]
    """By role, in the order of the places; of workers, those that are not at rest."""
    at_rest: AtRest = field(default_factory=AtRest)
    """The other workers."""
    suspicion: Reason | None = None
    """Why the silence of nodes is not believed."""
    quota: Quota = Quota()
    """What Kueue says of the job as a whole."""

    @property
    def suspended(self) -> bool:
        """Whether the job is to have no pods: its user or its queue says so, or it was resumed with other shards."""
        return self.job.spec.suspend or self.quota.held or self.resharded

    @cached_property
    def resharded(self) -> bool:
        """Whether there are servers of another number of shards, which could not work with new ones."""
        number = str(self.job.spec.parameter_servers.replicas)
        servers = (each.pod for each in self.sightings["ps"])
        return any(
            pod.metadata.labels.get(SHARDS, number) != number for pod in servers if pod and not pod.ended
        )

    @property
    def job(self) -> TrainingJob:
        """The job."""
        return self.seen.job

    @property
    def report(self) -> StatusReport | None:
        """The coordinator's report, unless it is old."""
        return self.seen.report if self.seen.report_age <= STALE_REPORT_SECONDS else None

    @cached_property
    def first_incarnation(self) -> int:
        """The incarnation of first pods; later ones are replacements."""
        return first_incarnation(self.seen.job)

    @property
    def now(self) -> datetime:
        """Now, in whole seconds as a status has it."""
        return whole(self.seen.now)

    @property
    def coordinator_pod(self) -> Pod | None:
        """The pod of parameter server 0 that runs."""
        found = (each.pod for each in self.sightings["ps"] if each.place.is_coordinator)
        return next((pod for pod in found if pod and pod.running), None)

    @property
    def records(self) -> Iterator[Slot]:
        """What the status has of all that are not at rest."""
        every = (each.record for role in self.sightings.values() for each in role)
        return (record for record in every if record is not None)

    @cached_property
    def near_since(self) -> datetime | None:
        """See `waits.near_since`."""
        return near_since(self.job, (each.pod for each in self.sightings["ps"] if each.pod is not None))

    @cached_property
    def in_vain(self) -> Mapping[tuple[str, int], Slot]:
        """The workers, with their pools, whose pods get no node, and their newest records: see `in_vain`."""
        return in_vain(self)

    def wait_of(self, slot: Slot, pod: Pod | None) -> Wait | None:
        """For what a pod without a node waits. What the nodes of its pool have is not read here."""
        if pod is None:
            return None
        pool = self.seen.pools.get(slot.pool)
        there_are = pool is not None and pool.status.nodes > 0
        near = slot.role == "ps" or self.near_since is not None
        return wait_of(pod, UNREAD_NODES if there_are else NO_NODES, near=near)

    def asked_since(self, slot: Slot, since: datetime) -> datetime:
        """Since when a node could come for a pod that was made, or let go by a queue, then."""
        return since if slot.role == "ps" or self.near_since is None else max(since, self.near_since)

    def rouse(self, indices: Iterable[int]) -> None:
        """Workers at rest that are not left in peace: something is decided about them."""
        if roused := self.at_rest.pop(indices):
            self.sightings["worker"].extend(roused)
            self.sightings["worker"].sort(key=lambda each: each.place)


def read(seen: Observation, memory: Memory | None = None) -> Facts:
    """The facts of an observation. `memory`: of earlier plans of the job; it saves work and changes nothing."""
    return _Reader(seen).facts(memory or Memory())


@dataclass(slots=True)
class _Reader:
    seen: Observation
    timers: Timers = field(init=False)
    suspicion: Reason | None = None

    def facts(self, memory: Memory) -> Facts:
        seen = self.seen
        self.timers = Timers(seen.now)
        view = coordinator_view(seen)
        at_rest, pods, records = memory.recall(seen)
        troubled = view.silent | view.fenced
        places = {pod.place for pod in pods if pod.place} | {slot.place for slot in records} | troubled
        for each in at_rest.pop({place.index for place in places if place.role == "worker"}):
            assert each.pod is not None
            pods.append(each.pod)
            records.append(each.slot)
        pods = self._without_strangers(pods, records)
        found: dict[RoleName, list[Sighting]] = {"ps": [], "worker": []}
        for each in self._sightings(pods, records, view):
            found[each.place.role].append(each)
        alone = Counter(each.place.index for each in found["worker"])
        restless = []
        for each in found["worker"]:
            if alone[each.place.index] == 1 and each.place not in troubled and self._rests(each):
                at_rest.add(each)
            else:
                restless.append(each)
        memory.keep(seen, at_rest)
        found["worker"] = restless
        return Facts(
            seen=self.seen,
            timers=self.timers,
            coordinator=view,
            pods=memory.pods(seen),
            sightings=found,
            at_rest=at_rest,
            suspicion=self.suspicion,
            quota=quota(self.seen),
        )

    def _without_strangers(self, pods: list[Pod], records: Sequence[Slot]) -> list[Pod]:
        """The pods but those with a number that nobody gave: from here on, they are other owners' that have a name.

        Whoever may create pods may label them as the job's. But a server is recorded before it is made, and of a
        worker there is one pod at most that is not (`decide.workers`). Where nothing of a place is recorded, the status
        may be lost.
        """
        newest = dict[tuple[RoleName, int], int]()
        for slot in records:
            newest[slot.role, slot.index] = max(slot.incarnation, newest.get((slot.role, slot.index), 0))
        strangers = {
            pod.metadata.name
            for pod in pods
            if pod.place
            and pod.place.incarnation > newest.get(pod.place[:2], math.inf) + (pod.place.role == "worker")
        }
        if not strangers:
            return pods
        self.seen = replace(
            self.seen,
            pods=tuple(pod for pod in self.seen.pods if pod.metadata.name not in strangers),
            name_conflicts=ChainMap(
                dict.fromkeys(strangers, NameConflict()),
                self.seen.name_conflicts,  # type: ignore[arg-type]  # it is read only
            ),
        )
        return [pod for pod in pods if pod.metadata.name not in strangers]

    def _sightings(
        self, pods: Sequence[Pod], records: Sequence[Slot], view: CoordinatorView
    ) -> Iterator[Sighting]:
        """In the order of the places. Of two pods that say to be in one, the last by name counts."""
        by_place = {pod.place: pod for pod in sorted(pods, key=lambda pod: pod.metadata.name) if pod.place}
        recorded = {slot.place: slot for slot in records}
        previous: Sighting | None = None
        for place in sorted(by_place.keys() | recorded.keys()):
            older = previous if previous and previous.place[:2] == place[:2] else None
            previous = self._sighting(place, recorded.get(place), by_place.get(place), older, view)
            yield previous

    def _rests(self, each: Sighting) -> bool:
        """Whether nothing happened to a worker: all is as its record says."""
        slot, pod = each.slot, each.pod
        if not each.quiet or pod is None or slot.cause:
            return False
        if slot.state == "Running":
            return pod.running
        return slot.state == "Starting" and not pod.running

    def _sighting(
        self,
        place: Place,
        record: Slot | None,
        pod: Pod | None,
        older: Sighting | None,
        view: CoordinatorView,
    ) -> Sighting:
        seen = self.seen
        if pod is None:
            assert record is not None
            return Sighting(place, record, None, self._vanished(record), self._signal_after(record), record)
        planned = record is not None and record.state == "Planned"
        before = record if planned else older.slot if older else None
        slot = (
            record
            if record is not None and not planned
            else Slot(
                role=place.role,
                index=place.index,
                incarnation=place.incarnation,
                state="Starting",
                attempts=before.attempts if before else 0,
                replaces=record is not None and record.replaces,
                pool=pod.metadata.labels.get(POOL, ""),
                on_demand=ON_DEMAND in pod.metadata.labels,
                queued=pod.queued,
                created_at=parse_time(pod.metadata.creation_timestamp),
            )
        )
        if slot.queued != pod.queued:
            since = slot.created_at if pod.queued else whole(seen.now)
            # How long a pod is held back is its owner's choice, and would be the patience of all jobs with the pool.
            slot = slot.model_copy(update={"queued": pod.queued, "created_at": since, "trained": True})
        node_name = pod.spec.node_name
        node = seen.nodes.get(node_name) if node_name else None
        if node_name and not (slot.node and slot.machine):
            slot = _bound(slot, node_name, node)
        if node and slot.machine and node.is_machine(slot.machine) and not node.has_uid(slot.machine):
            slot = slot.model_copy(update={"machine": node.machine})  # it was registered again
        signal = None
        if node_name and seen.node_signals:
            signal = self._signal(node, slot, pod)
            if signal is NODE_REPLACED and node and _was_there(node, slot, pod, heard=view.hears(place)):
                slot = slot.model_copy(update={"machine": node.machine})
                signal = self._signal(node, slot, pod)
        if signal is None and record is not None and (pod.untroubled or pod.starts_quietly):  # as most are
            spot = node is not None and is_spot(node, seen.platform)
            return Sighting(place, slot, pod, HEALTHY, None, record, node, spot, quiet=slot is record)
        if signal is not None and signal.meaning >= Meaning.UNREACHABLE:
            signal = self._believed(signal, slot, pod, view) or self._signal(node, slot, pod, heard=True)
        rules = seen.job.spec.run_policy.failure_rules
        verdict = judge(pod, slot, signal, rules)
        if signal is UNCONFIRMED and verdict.outcome in ENDED - {PodOutcome.DONE} and not slot.cause:
            verdict = Verdict(PodOutcome.MISSING)  # a node that is gone explains its end: no failure
        return Sighting(place, slot, pod, verdict, signal, record)

    def _signal(self, node: Node | None, slot: Slot, pod: Pod, *, heard: bool = False) -> Signal | None:
        """The signal of a pod's node. `heard`: but those that its process refutes."""
        bound = None if node is None or node.untroubled else self._bound_at(pod)  # most are, and say nothing
        ended = bound is not None and has_ended(pod, slot.role)
        return node_signal(node, slot, pod.spec.tolerations, bound=bound, ended=ended, heard=heard)

    def _signal_after(self, record: Slot) -> Signal | None:
        """The signal of the node of a pod that ended a moment ago: it may explain why."""
        if not record.node or record.ended_at is None or self.seen.now - record.ended_at > AFTER_THE_END:
            return None
        node = self.seen.nodes.get(record.node)
        return node_signal(node, record) if node is not None else None

    def _vanished(self, record: Slot) -> Verdict:
        """The verdict on a record without a pod.

        Absence is weak evidence: the watch of pods may lag behind that of jobs, so a loss is counted when the API
        server has confirmed it.
        """
        if record.cause:
            return Verdict(PodOutcome.IGNORED, record.cause)
        if record.state == "Planned":
            return HEALTHY
        if record.state == "Ended":
            return Verdict(PodOutcome.DONE, "Done", "", 0)
        why = self.seen.gone_pods.get(pod_name(self.seen.job.metadata.name, record.place))
        return Verdict(PodOutcome.MISSING) if why is None else Verdict(PodOutcome.DISRUPTED, why or "Gone")

    def _believed(self, signal: Signal, slot: Slot, pod: Pod, view: CoordinatorView) -> Signal | None:
        """The signal, unless there is better evidence: its process is heard, or too many nodes say the same."""
        if view.hears(slot.place) and (signal is NODE_REPLACED or signal.meaning is not Meaning.LOST):
            # That it is not any more, nobody tells.
            self.timers.after(FRESH_REPORT_SECONDS - self.seen.report_age)
            return None
        if signal.meaning is Meaning.LOST:
            name = pod.spec.node_name
            missing = name not in self.seen.nodes and name not in self.seen.absent_nodes
            return UNCONFIRMED if missing else signal
        # As by a new leader. What was counted stays until it is heard.
        if not slot.cause and may_be_heard(self.seen):
            in_vain = self.seen.unreachable_seconds
            self.timers.after(FRESH_REPORT_SECONDS - in_vain if in_vain else ASK_SECONDS)
            return None
        since, bound = signal.since, self._bound_at(pod)
        if since is not None and since > self.seen.now + TOLERATED:
            since = None  # before this clock was set back
        if (suspected := suspicion(self.seen, since, self.timers)) is not None:
            self.suspicion = suspected
            return None
        if since is not None and bound is not None and bound > since:
            since = bound
        patience = max(signal.patience, UNREACHABLE_PATIENCE[slot.role])
        due = since + patience if since and not slot.cause else None
        return None if due is not None and self.timers.pending(due) else signal

    def _bound_at(self, pod: Pod) -> datetime | None:
        """When the pod was bound. What lies ahead was before this clock was set back, and is after nothing."""
        bound = pod.bound_at
        return None if bound is None or bound > self.seen.now + TOLERATED else bound


def _was_there(node: Node, slot: Slot, pod: Pod, *, heard: bool) -> bool:
    """Whether the pod is on this machine, and not on the one before it of that name that the slot records.

    The watch of nodes was behind when the slot was recorded. `heard`: its process is. What has not started lost nothing
    by a reboot: the kubelet starts it.
    """
    if node.has_uid(slot.machine):
        return heard or pod.starts_on_node
    created, bound = parse_time(node.metadata.creation_timestamp), pod.bound_at
    return created is not None and bound is not None and created <= bound


def _bound(slot: Slot, node_name: str, node: Node | None) -> Slot:
    """Record the node when the pod is first seen on it; never later, since a node name can be reused."""
    if node is None and slot.node == node_name:
        return slot
    change: dict[str, object] = {"node": node_name}
    if node is not None:
        change["machine"] = node.machine
    return slot.model_copy(update=change)
