"""Workers: each wanted slot has one pod, and a replacement starts before its predecessor ends.

A slot whose pod is draining or silent gets its replacement at once. At most `maxSurge` replacements run beside pods
that still use their nodes; pods on nodes that were announced to go, or are not heard, do not count. Where a higher
priority took the nodes, only a bounded number of replacements waits for them, so that neither the scheduler nor an
autoscaler is flooded; what was lost otherwise is asked for at once, as when the job began.

With a `maxSurge` of 0, as where a quota has no room for one pod more, a worker that is to move ends before its
successor is made: one at a time, while all others work, and not for a pool that is known to have no nodes. Who waits in
vain from the beginning holds none up; the successor of one that ran does, or each would make way for the next.

A pod of a pool that is full waits until the worker that is to leave it has left.

An incarnation is never used twice: a push of the second pod would be taken for one of the first. A leader records a pod
with the next status, which would be too late if it died, and the pod vanished, before. So there is at most one such pod
for each slot, and the next leader, who cannot know of it, leaves its number out: at its first look at a job it records
the incarnation after that for each vacant slot, and creates the pod then. So does one whose pod vanished before it was
recorded. In any other case nothing waits for a write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil

from shoal.api.labels import Place
from shoal.policy.actions import DeletePod
from shoal.policy.common.timers import Timers
from shoal.policy.decide.backoff import PREEMPTED, not_before
from shoal.policy.decide.creation import Actions, Creator
from shoal.policy.decide.kept_to import closed_pools
from shoal.policy.decide.members import MOVED, OWN_CAUSES, ByIndex, Member, follows_a_loss
from shoal.policy.decide.wanted import Wanted
from shoal.policy.facts.read import Facts
from shoal.policy.facts.sightings import AtRest
from shoal.policy.facts.signals import Meaning

MIN_UNSCHEDULED = 16
UNSCHEDULED_SHARE = 0.25
"""Of the wanted workers, or the number above if that is more: unscheduled replacements, where some were preempted."""
MOST_NEW = 256
"""Pods that replace none, in one plan: several times as many as are made until the next one, which asks for more."""
ROOM_SECONDS = 5.0
"""A full pool is looked at again after so long: other jobs leave it without a word."""


def max_surge(value: int | str, replicas: int) -> int:
    """`maxSurge` in pods: percentages are of the wanted workers, rounded up."""
    if isinstance(value, int):
        return value
    return ceil(int(value.removesuffix("%")) * replicas / 100)


def create_workers(facts: Facts, workers: ByIndex, wanted: Wanted, actions: Actions) -> None:
    """Create the missing pods."""
    timers, number = actions.timers, len(wanted.workers)
    vacant = [
        index
        for index in sorted(wanted.workers - facts.at_rest.by_index().keys())
        if not _occupied(workers.get(index, ())) and not wanted.is_homeless(index)
    ]
    if not vacant:
        return
    creator = Creator(facts, "worker", wanted, actions)
    unseen = {index for index in vacant if facts.seen.first_look or index in facts.seen.unseen}
    _plan_ahead(facts, workers, sorted(unseen), creator)
    if not (vacant := [index for index in vacant if index not in unseen]):
        return
    unrecorded = {each.place for each in facts.sightings["worker"] if not each.recorded}
    leaving = _nodes_that_go(facts)
    holding = {
        index: sum(_holds(each, timers, leaving) for each in workers[index])
        for index in workers
        if len(workers[index]) > 1 or index in vacant
    }
    surge = max_surge(facts.job.spec.workers.max_surge, number)
    surge_left = surge - sum(max(0, n - 1) for n in holding.values())
    slots = (group[-1].slot for group in workers.values() if group[-1].active)
    starting = (each.slot for each in facts.at_rest.starting.values())
    unscheduled_left = max(MIN_UNSCHEDULED, int(UNSCHEDULED_SHARE * number)) - sum(
        slot.replaces and not slot.node and (slot.pool, slot.index) not in facts.in_vain
        for slot in (*slots, *starting)
    )
    needs_surge = {index for index in vacant if holding.get(index)}
    rooms = _Rooms(workers, facts.at_rest, wanted, timers, leaving)
    closed = closed_pools(facts)
    new_left = MOST_NEW
    sent = {place.index for place in facts.seen.in_flight if place.role == "worker"}
    for index in sorted(vacant, key=lambda index: (index not in sent, index in needs_surge)):
        group = workers.get(index, [])
        replaces = follows_a_loss(group)
        preempted = bool(group) and group[-1].slot.cause == PREEMPTED
        if not (replaces or new_left):
            continue
        if (index in needs_surge and surge_left <= 0) or (preempted and unscheduled_left <= 0):
            if (pool := wanted.pool_of(Place("worker", index, 0))) in closed:
                actions.denied.add((pool, index))
            continue
        if group and group[-1].place in unrecorded:
            timers.after(0.0)  # when it is recorded
            continue
        if not rooms.has_one(index):
            creator.doubt(Place("worker", index, 0))
            timers.after(ROOM_SECONDS)
            continue
        if (place := creator.next_place(index, group)) is not None:
            if place.incarnation > _unrecorded(facts, group):
                creator.plan_ahead(place, workers.setdefault(index, group))
                continue
            creator.create(place, replaces=replaces)
            rooms.take(index)
            surge_left -= index in needs_surge
            unscheduled_left -= replaces
            new_left -= not replaces
    others = wanted.workers - facts.at_rest.running.keys() - _never_ran(facts, workers)
    if not surge and all(any(each.works for each in workers.get(index, ())) for index in others):
        may = (
            index for index in vacant if rooms.has_one(index) and creator.next_place(index, workers[index])
        )
        _end_one(may, workers, wanted, actions)


def _never_ran(facts: Facts, workers: ByIndex) -> set[int]:
    """The workers that wait in vain, and follow none that was lost or moved."""
    newest = ((i, workers[i][-1].slot if i in workers else slot) for (_, i), slot in facts.in_vain.items())
    return {index for index, slot in newest if not slot.replaces}


def _end_one(moving: Iterable[int], workers: ByIndex, wanted: Wanted, actions: Actions) -> None:
    """End a worker that is to move, whose next pod may be made and has a node elsewhere, as far as is known."""
    leaving = (each for i in moving if not wanted.home_is_exhausted(i) for each in workers[i] if each.moves)
    if (first := next(leaving, None)) is not None and first.pod is not None:
        actions.actions.append(DeletePod(first.pod.metadata.name, first.pod.metadata.uid, why=MOVED))


def _plan_ahead(facts: Facts, workers: ByIndex, vacant: list[int], creator: Creator) -> None:
    """Record the next pod of each vacant slot, after the one that an earlier leader may have made unseen."""
    for index in vacant:
        group = workers.get(index, [])
        if group and (due := not_before(group[-1])) is not None and facts.timers.pending(due):
            creator.actions.postponed.add(index)
            continue
        place = Place("worker", index, _unrecorded(facts, group) + 1)
        creator.plan_ahead(place, workers.setdefault(index, group))


def _unrecorded(facts: Facts, group: Sequence[Member]) -> int:
    """The number that the one pod of a slot may have that no status records."""
    if not group:
        return facts.first_incarnation
    return group[-1].place.incarnation + (not group[-1].planned)


class _Rooms:
    """The nodes that the pools still have for this job: it has those of workers that have not left yet, too."""

    def __init__(
        self, workers: ByIndex, at_rest: AtRest, wanted: Wanted, timers: Timers, leaving: set[str]
    ) -> None:
        self._wanted = wanted
        holding = [
            (each.slot.pool, index, each.slot.cause in OWN_CAUSES | {MOVED})
            for index, group in (workers.items() if wanted.homes else ())
            for each in group
            if each.slot.pool and _holds(each, timers, leaving)
        ]
        self._held = {(pool, index) for pool, index, ended_by_us in holding if not ended_by_us}
        """A worker that is lost, or silent, and its successor in one pool count once: the node of the first goes."""
        self._used = Counter(pool for pool, _ in self._held)
        self._used.update(pool for pool, _, ended_by_us in holding if ended_by_us)
        for home, number in at_rest.living.items():
            self._used[home.pool] += number
        if leaving:
            self._used.subtract(each.home.pool for each in at_rest if each.slot.node in leaving)

    def has_one(self, index: int) -> bool:
        """Whether this worker may have a node where it is wanted."""
        home = self._wanted.homes.get(index)
        if home is None or not home.pool or (home.pool, index) in self._held:
            return True
        return self._used[home.pool] < self._wanted.places.limit(home)

    def take(self, index: int) -> None:
        """Its pod is created."""
        home = self._wanted.homes.get(index)
        if home is not None and (home.pool, index) not in self._held:
            self._held.add((home.pool, index))
            self._used[home.pool] += 1


def _holds(each: Member, timers: Timers, leaving: set[str]) -> bool:
    """Whether its replacement runs beside it, on another node."""
    unbound = bool(each.slot.cause) and not each.slot.node
    return not unbound and each.slot.node not in leaving and each.may_run(timers)


def _nodes_that_go(facts: Facts) -> set[str]:
    """Nodes of which it is known that they end, or that are not heard."""
    return {
        each.slot.node
        for each in facts.sightings["worker"]
        if each.signal is not None and each.signal.meaning >= Meaning.LEAVING
    }


def _occupied(group: Sequence[Member]) -> bool:
    """Whether the slot has a pod that needs no replacement, or its worker exited because the work is done."""
    return any(
        (each.active and each.slot.state != "Silent") or each.awaiting_job_end or each.missing
        for each in group
    )
