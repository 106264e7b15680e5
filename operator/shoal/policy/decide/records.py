"""Updates the record of every pod: which are active, draining or ended, with each loss counted once.

`status.slots` is the operator's memory. A pod that is only in it vanished while no operator ran, and is counted with
reason Gone. The newest record of a place is kept forever, since it determines the next incarnation (which for a
parameter server is the epoch that fences its predecessors). The record of a worker at rest is kept as it is.

A state is left only on evidence: a silent worker is active again when parameter server 0 says so, not when it stops
reporting; an exit code 0 was too early when it reports remaining work; a notice is withdrawn when the node can be read
and has none.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from shoal.api.kube import Pod
from shoal.api.labels import RoleName
from shoal.api.training_job_status import UNWANTED, Slot
from shoal.manifests.names import pod_name
from shoal.policy.actions import Action, CreatePod
from shoal.policy.common.times import parse_time
from shoal.policy.decide.backoff import PREEMPTED
from shoal.policy.decide.counters import Counters
from shoal.policy.decide.drains import may_be_reclaimed
from shoal.policy.decide.in_place import restarted_in_place
from shoal.policy.decide.members import (
    FELL_BACK,
    GAVE_WAY,
    MOVED,
    OUTDATED,
    OWN_CAUSES,
    SILENT,
    TAKEN_BACK,
    ByIndex,
    Member,
    by_index,
    is_refutable,
    leaves_a_gap,
    refutes,
)
from shoal.policy.decide.surge import settle
from shoal.policy.decide.wanted import Wanted
from shoal.policy.facts.read import Facts
from shoal.policy.facts.sightings import Sighting
from shoal.policy.facts.verdict import (
    AFTER_THE_END,
    ENDED,
    KILLS_TOLERATED,
    STEADY,
    PodOutcome,
    Verdict,
    explains,
    terminated,
)
from shoal_trainer.contract import Phase

DONE_PATIENCE = timedelta(seconds=30)
"""How long after a worker's exit code 0 the end of the job is awaited before the exit counts as early."""
MOMENT = timedelta(seconds=5)
"""A kubelet's clock that differs by less is believed: back-off may be shorter by that."""
UNHEARD = timedelta(minutes=2)
"""For as long as this, a worker that the coordinator may have fenced is not taken for one at work."""
BRIEF = timedelta(seconds=60)
"""A worker that is preempted this soon after it started is not replaced at once."""
EXCUSABLE = frozenset(
    {
        "CallbackOutage",
        "DiskFull",
        "Error",
        "ExitedEarly",
        "HungStep",
        "InitContainerFailed",
        "InternalError",
        "KilledRepeatedly",
        "NoAccelerator",
    }
)
"""Failures that a node's end may cause."""
TOO_LITTLE_MEMORY = frozenset({"OOMKilled", "OutOfMemory"})
"""Failures of a worker that say nothing of those on machines with more."""


def update(facts: Facts, role: RoleName, wanted: Wanted, counters: Counters) -> ByIndex:
    """Update the records of one role. New losses are counted in `counters`."""
    sightings = facts.sightings[role]
    newest_running: dict[int, int] = {}
    newest_bound: dict[int, int] = {}
    newest_recorded: dict[int, int] = {}
    for each in sightings:
        if each.recorded and (role == "ps" or each.slot.state != "Planned"):
            newest_recorded[each.place.index] = each.place.incarnation
        if each.pod is not None and not each.pod.metadata.deletion_timestamp:
            if each.pod.running:
                newest_running[each.place.index] = each.place.incarnation
            if each.pod.spec.node_name:
                newest_bound[each.place.index] = each.place.incarnation
    previous: Member | None = None
    members = []
    for each in sightings:
        if previous is not None and previous.place.index != each.place.index:
            previous = None
        previous = _Updater(
            facts,
            counters,
            wanted,
            older=previous,
            replaced=newest_running.get(each.place.index, -1) > each.place.incarnation,
            followed=newest_bound.get(each.place.index, -1) > each.place.incarnation,
            outdated=newest_recorded.get(each.place.index, -1) > each.place.incarnation,
        ).member(each)
        members.append(previous)
    groups = by_index(members)
    for index, group in groups.items():
        if len(group) > 1:
            groups[index] = settle(group, facts, counters)
    return groups


def to_record(facts: Facts, servers: ByIndex, workers: ByIndex) -> tuple[Slot, ...]:
    """The slots of the status: all incarnations that have a pod or may still matter, and the newest of each place."""
    kept = [slot for group in servers.values() for slot in _kept(group, facts)]
    at_rest = facts.at_rest.by_index()
    order, begin = sorted(at_rest), 0
    slots = [at_rest[index].slot for index in order]
    for index in sorted(workers):
        end = bisect(order, index)
        kept += slots[begin:end]
        kept += _kept(workers[index], facts)
        begin = end
    return (*kept, *slots[begin:])


def nodes_by_pool(facts: Facts, workers: ByIndex, actions: Iterable[Action]) -> Counter[str]:
    """How many nodes of each pool the workers have, and those that are made; one and its successor there count once."""
    places = {
        (slot.pool, slot.index) for group in workers.values() for slot in _kept(group, facts) if slot.has_pod
    }
    places |= {(a.pool, a.index) for a in actions if isinstance(a, CreatePod) and a.role == "worker"}
    found = Counter(pool for pool, _ in places)
    for home, number in facts.at_rest.living.items():
        found[home.pool] += number
    del found[""]
    return found


def _kept(group: Sequence[Member], facts: Facts) -> list[Slot]:
    return [each.slot for each in group if _is_kept(each, group, facts)]


def _is_kept(each: Member, group: Sequence[Member], facts: Facts) -> bool:
    return (
        each.pod is not None
        or each is group[-1]
        or each.awaiting_job_end
        or each.missing
        or may_be_excused(facts, each.slot)
        or may_be_reclaimed(facts, each.slot)
    )


def may_be_excused(facts: Facts, slot: Slot) -> bool:
    """Whether this is a failure that may turn out to be of the end of its node, which is told a moment later."""
    ended = slot.ended_at
    recent = ended is not None and facts.now - ended <= AFTER_THE_END
    return recent and slot.role == "worker" and bool(slot.node) and slot.cause in EXCUSABLE


class _Updater:
    """Updates one record.

    `older`: the previous incarnation, if it is known. `replaced`: a later one runs. `followed`: a later one has a node.
    `outdated`: a later one is recorded, of a worker as made.
    """

    def __init__(
        self,
        facts: Facts,
        counters: Counters,
        wanted: Wanted,
        *,
        older: Member | None,
        replaced: bool,
        followed: bool,
        outdated: bool,
    ) -> None:
        self._facts, self._counters, self._wanted = facts, counters, wanted
        self._older, self._replaced, self._followed, self._outdated = older, replaced, followed, outdated
        self._now, self._view = facts.now, facts.coordinator

    def member(self, seen: Sighting) -> Member:
        slot, pod = seen.slot, seen.pod
        had_cause = seen.recorded and bool(slot.cause)
        if not seen.recorded and self._older is not None:
            slot = slot.model_copy(update={"replaces": leaves_a_gap(self._older.slot)})
        # An earlier leader's, of which its successor heard too late, or whose predecessor is heard again. A server is
        # recorded before it is made: one that is not, though a later one is, was given up, and the watch of pods is
        # behind that of jobs. So was a worker, unless it works: who recorded the later one knew why, or it was made
        # moments before that one.
        given_up = self._outdated and not self._works(seen)
        if not seen.recorded and (self._replaced or self._needless or given_up):
            slot = slot.model_copy(update={"cause": TAKEN_BACK, "ended_at": self._now})
        elif pod is not None and slot.role == "ps":
            rules = self._facts.job.spec.run_policy.failure_rules
            slot = restarted_in_place(slot, pod, rules, self._counters)
        if seen.verdict.outcome is PodOutcome.MISSING:
            return Member(seen.place, slot, None, seen.verdict, recorded=had_cause)
        if seen.signal is not None and slot.state == "Ended" and may_be_excused(self._facts, slot):
            assert slot.ended_at is not None
            if explains(seen.signal, slot.ended_at):
                why = f"its node ended a moment later ({seen.signal.reason})"
                self._counters.excuse(self._name(slot, pod), why)
                slot = slot.model_copy(update={"cause": seen.signal.reason, "attempts": 0})
        slot, verdict = self._advance(slot, seen.verdict, pod)
        counted_now = seen.slot.cause == MOVED != slot.cause
        return Member(seen.place, slot, pod, verdict, recorded=had_cause and not counted_now)

    def _advance(self, slot: Slot, verdict: Verdict, pod: Pod | None) -> tuple[Slot, Verdict]:
        change: dict[str, object] = {}
        if slot.cause == MOVED and self._is_lost(verdict):
            slot = slot.model_copy(update={"cause": "", "ended_at": None})
        ours = slot.cause in OWN_CAUSES and not is_refutable(slot.role, slot.cause)
        if verdict.outcome is PodOutcome.HEALTHY and not ours:
            if slot.place in self._view.fenced:
                verdict = Verdict(PodOutcome.LEAVING, SILENT)
                if slot.cause:
                    change["cause"] = SILENT  # already counted; as SILENT it is deleted without waiting
            elif slot.cause and self._is_withdrawn(slot, pod):
                if slot.cause not in OWN_CAUSES | {MOVED}:
                    self._counters.withdraw(slot)
                slot = slot.model_copy(update={"cause": "", "ended_at": None})
        if verdict.outcome is PodOutcome.HEALTHY:
            state = self._state_when_healthy(slot, pod)
            change["state"] = state
            if state == "Running":
                change |= {"created_at": None, "ran": False}  # of a pod that runs, the pod itself tells
            undecided = slot.cause in {"", MOVED}
            if undecided and (cause := self._cause_to_end(slot, pod)) and cause != slot.cause:
                change |= {"cause": cause, "state": "Draining", "ran": slot.has_run, "ended_at": self._now}
        else:
            change["state"] = "Ended" if verdict.outcome in ENDED else "Draining"
            if slot.ended_at is None:
                change |= {
                    "ended_at": self._end_of(slot, pod),
                    "ran": slot.has_run or bool(pod and pod.running),
                }
            if not slot.cause:
                if slot.state == "Silent" and verdict.reason in {"Deleted", "Gone"}:
                    verdict = Verdict(verdict.outcome, SILENT)  # deleted by us, or no better reason is known
                return self._count(slot.model_copy(update=change), verdict, pod)
        if not self._wanted.wants(slot.place) and slot.cause and slot.cause not in OWN_CAUSES:
            change["cause"] = UNWANTED  # counted already; its slot was given up since
        if all(getattr(slot, name) == value for name, value in change.items()):
            return slot, verdict
        return slot.model_copy(update=change), verdict

    def _is_lost(self, verdict: Verdict) -> bool:
        """Whether a pod that moves to another pool is lost before its successor runs: then it counts as any other."""
        ours = self._replaced or verdict.reason in {
            "Deleted",
            "Gone",
            MOVED,
        }  # what is recorded of it, without a pod
        return verdict.outcome is not PodOutcome.HEALTHY and not ours

    def _end_of(self, slot: Slot, pod: Pod | None) -> datetime:
        """When it ended: if it did a moment ago, as its kubelet says, so that plans agree before this is recorded."""
        end = terminated(pod, slot.role) if pod is not None and pod.ended else None
        said = parse_time(end.finished_at) if end is not None else None
        return said if said is not None and timedelta() <= self._now - said <= MOMENT else self._now

    def _works(self, seen: Sighting) -> bool:
        """Whether a worker does, as the coordinator knows."""
        healthy = seen.slot.role == "worker" and seen.verdict.outcome is PodOutcome.HEALTHY
        return healthy and self._view.hears(seen.place)

    @property
    def _needless(self) -> bool:
        """Whether the previous incarnation works, as the coordinator knows."""
        older = self._older
        return older is not None and older.active and self._view.hears(older.place)

    def _is_spare(self, slot: Slot) -> bool:
        """Whether the previous incarnation works where it is wanted: no successor is made, for which one could wait.

        As the coordinator knows: who runs may have fenced it, and the watch of pods is behind. Where nobody hears the
        coordinator for long, no watch is behind for as long, and both would be paid.
        """
        older = self._older
        if older is None:
            return False
        moved = slot.ended_at if slot.cause == MOVED and self._view.phase is None else None
        for_long = moved is not None and not self._facts.timers.pending(moved + UNHEARD)
        if not (self._view.hears(older.place) or for_long):
            return False
        return older.works and self._wanted.fits(older.slot)

    def _is_withdrawn(self, slot: Slot, pod: Pod | None) -> bool:
        """Whether the reason to end a healthy pod no longer holds, and no later incarnation runs.

        Nor, of a parameter server, may one start: its epoch ends that of this one.
        """
        if self._replaced or (slot.role == "ps" and self._followed) or pod is None:
            return False
        if slot.cause == MOVED:
            return self._wanted.fits(slot)
        if is_refutable(slot.role, slot.cause):  # the successor of a worker is taken back
            return refutes(slot, pod) and not (slot.role == "ps" and self._outdated)
        # Unreadable nodes prove nothing.
        return not pod.spec.node_name or pod.spec.node_name in self._facts.seen.nodes

    def _cause_to_end(self, slot: Slot, pod: Pod | None) -> str:
        """Why a healthy pod is to end; empty: it stays."""
        if not self._wanted.wants(slot.place):
            return UNWANTED
        if pod is None:
            return ""
        if slot.place == self._wanted.gives_way:
            return GAVE_WAY
        has_run = slot.has_run or pod.running
        if not self._wanted.fits(slot):
            if has_run:
                return TAKEN_BACK if self._is_spare(slot) else MOVED
            return FELL_BACK if self._wanted.goes_on_demand(slot) else OUTDATED
        outdated = not has_run and self._wanted.is_outdated(pod, self._facts.timers)
        return OUTDATED if outdated else ""

    def _state_when_healthy(self, slot: Slot, pod: Pod | None) -> str:
        if slot.cause:
            return "Draining"
        if pod is None:
            return slot.state
        if not pod.running:
            return "Starting"
        still_silent = slot.state == "Silent" and slot.place not in self._view.active
        return "Silent" if still_silent or slot.place in self._view.silent else "Running"

    def _count(self, slot: Slot, verdict: Verdict, pod: Pod | None) -> tuple[Slot, Verdict]:
        """Count a pod that ended or is draining, unless the operator decided so."""
        if not self._wanted.wants(slot.place):
            return slot.model_copy(update={"cause": UNWANTED}), verdict
        if self._older is not None and self._older.active and self._older.slot.state != "Silent":
            # A replacement that is no longer needed: its predecessor is active again.
            return slot.model_copy(update={"cause": TAKEN_BACK}), verdict
        if verdict.outcome is PodOutcome.DONE:
            if self._may_be_done(slot):
                return slot, verdict
            words = "ended with exit code 0 before the job was complete"
            verdict = Verdict(PodOutcome.FAILED, "ExitedEarly", words, 0)
        attempts = _attempts_after(slot, verdict, pod)
        if verdict.outcome is PodOutcome.KILLED and attempts > KILLS_TOLERATED:
            words = f"killed {attempts} times in a row shortly after it started; see the logs of the pod"
            verdict = Verdict(PodOutcome.FAILED, "KilledRepeatedly", words, verdict.exit_code)
        self._counters.lost(slot, self._name(slot, pod), verdict)
        if verdict.reason in TOO_LITTLE_MEMORY and not verdict.fatal and self._others_train(slot):
            self._counters.excuse(self._name(slot, pod), "others train with the memory that they have")
        return slot.model_copy(update={"cause": verdict.reason, "attempts": attempts}), verdict

    def _others_train(self, slot: Slot) -> bool:
        """Whether a worker of another place works, and has pushed."""
        working = self._view.active & self._view.pushed.keys()
        return slot.role == "worker" and any(place.index != slot.place.index for place in working)

    def _name(self, slot: Slot, pod: Pod | None) -> str:
        return pod.metadata.name if pod else pod_name(self._facts.job.metadata.name, slot.place)

    def _may_be_done(self, slot: Slot) -> bool:
        """Whether an exit code 0 may mean that the work is done.

        It was early if, well after it, parameter server 0 reports remaining work.
        """
        if slot.ended_at is None or self._facts.timers.pending(slot.ended_at + DONE_PATIENCE):
            return True
        if slot.place.is_coordinator:
            return False  # its termination message would have finished the job
        return self._view.phase in {None, Phase.FINISHING, Phase.SUCCEEDED}


def _attempts_after(slot: Slot, verdict: Verdict, pod: Pod | None) -> int:
    """Abnormal ends of the place in a row, including this one. The disruption of a pod that ran is not abnormal.

    Except that a worker preempted right after it started is: with each wave it waits longer.
    """
    lasted = _ran_for(slot, pod)
    disrupted = verdict.outcome in {
        PodOutcome.LEAVING,
        PodOutcome.UNREACHABLE,
        PodOutcome.LOST,
        PodOutcome.DISRUPTED,
    }
    if disrupted and slot.ran and not (verdict.reason == PREEMPTED and lasted is not None and lasted < BRIEF):
        return 0
    return 1 if lasted is not None and lasted >= STEADY else slot.attempts + 1


def _ran_for(slot: Slot, pod: Pod | None) -> timedelta | None:
    """How long its container ran; None where that is not known."""
    if pod is None or slot.ended_at is None or not slot.ran:
        return None
    status = next((c for c in pod.status.container_statuses if c.name == slot.role), None)
    end = status.state.terminated if status else None
    started = status.state.running.started_at if status and status.state.running else None
    began = parse_time((end.started_at if end else started) or pod.metadata.creation_timestamp)
    return slot.ended_at - began if began else None
