"""The record of every pod, brought up to date: who is there, who is leaving, who left, each counted once.

`status.slots` is what the operator remembers. A place and incarnation that is in it and nowhere else was taken while
nobody looked: it is counted once, reason Gone. The newest record of a place stays for ever, since it says which
incarnation comes next (a parameter server's is the epoch that fences its predecessors).

A state is left only on evidence: a silent worker speaks when server 0 says so, not when server 0 is away; an exit 0 was
too early when server 0 says that there is work left; a notice is withdrawn when the node is read and gives none.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from shoal.api.kube import Node, Pod
from shoal.api.training_job_status import Slot
from shoal.policy.coordinator_view import CoordinatorView, coordinator_view
from shoal.policy.counters import Counters
from shoal.policy.disruption import pool_of
from shoal.policy.in_place import restarted_in_place
from shoal.policy.incarnations import (
    OURS,
    OUTDATED,
    SILENT,
    TAKEN_BACK,
    UNWANTED,
    ByIndex,
    Incarnation,
    by_index,
)
from shoal.policy.model import Observation
from shoal.policy.names import TEMPLATE, Place, RoleName, place_of, pod_name, template_digest
from shoal.policy.surge import settle
from shoal.policy.times import parse_time, whole
from shoal.policy.verdict import ENDED, PodOutcome, Verdict, judge
from shoal_trainer.contract import Phase

DONE_PATIENCE = timedelta(seconds=30)
"""Between a worker's exit 0 and the end of the job: before that, nothing is made of it."""
STEADY = timedelta(minutes=10)
"""A pod that ran for so long forgives its place's earlier attempts."""
KILLS_FORGIVEN = 3
"""How many times in a row a pod of one place may be killed soon after its start before it is called a failure."""


def account(
    seen: Observation, role: RoleName, wanted: Callable[[Place], bool], counters: Counters
) -> ByIndex:
    """Bring the records of one role up to date. What is newly lost is counted in `counters`."""
    pods = {place: pod for pod in seen.pods if (place := place_of(pod)) is not None and place.role == role}
    records = {Place(s.role, s.index, s.incarnation): s for s in seen.job.status.slots if s.role == role}
    told = coordinator_view(seen)
    running: dict[int, int] = {}
    for place, pod in pods.items():
        if pod.running and not pod.metadata.deletion_timestamp:
            running[place.index] = max(place.incarnation, running.get(place.index, -1))
    before: dict[int, Incarnation] = {}
    holders = []
    for place in sorted(pods.keys() | records.keys()):
        older = before.get(place.index)
        replaced = running.get(place.index, -1) > place.incarnation
        accountant = _Accountant(
            seen, counters, wanted=wanted(place), older=older, replaced=replaced, told=told
        )
        before[place.index] = accountant.holder(place, records.get(place), pods.get(place))
        holders.append(before[place.index])
    return {index: settle(of, seen, counters) for index, of in by_index(holders).items()}


def records(*roles: ByIndex) -> tuple[Slot, ...]:
    """What to write down: all that have a pod, and the newest of each place."""
    kept = []
    for role in roles:
        for of in role.values():
            kept += [h.slot for h in of if h.pod is not None or h is of[-1] or h.awaiting_the_end]
    return tuple(kept)


class _Accountant:
    """Brings one record up to date.

    `older`: the incarnation before it, if there is one. `replaced`: a later one runs.
    """

    def __init__(
        self,
        seen: Observation,
        counters: Counters,
        *,
        wanted: bool,
        older: Incarnation | None,
        replaced: bool,
        told: CoordinatorView,
    ) -> None:
        self._seen, self._counters, self._wanted, self._older = seen, counters, wanted, older
        self._replaced, self._told = replaced, told
        self._now = whole(seen.now)

    def holder(self, place: Place, record: Slot | None, pod: Pod | None) -> Incarnation:
        slot = record or Slot(
            role=place.role,
            index=place.index,
            incarnation=place.incarnation,
            state="Starting",
            attempts=self._older.slot.attempts if self._older else 0,
            created_at=parse_time(pod.metadata.creation_timestamp) if pod else None,
        )
        if pod is None:
            verdict = _vanished(slot)
        else:
            rules = self._seen.job.spec.run_policy.failure_rules
            slot = _bound(slot, pod, self._seen.nodes.get(pod.spec.node_name or ""))
            verdict = judge(pod, slot, self._seen.nodes_if_read, rules)
            if place.role == "ps":
                slot = restarted_in_place(slot, pod, rules, self._counters)
        slot, verdict = self._advance(slot, verdict, pod)
        return Incarnation(place, slot, pod, verdict, settled=bool(record and record.cause))

    def _advance(self, slot: Slot, verdict: Verdict, pod: Pod | None) -> tuple[Slot, Verdict]:
        change: dict[str, object] = {}
        if pod is not None and slot.running_at is None and pod.running:
            change["running_at"] = self._now
        if verdict.outcome is PodOutcome.HEALTHY and slot.cause not in OURS:
            if _place(slot) in self._told.fenced:
                verdict = Verdict(PodOutcome.LEAVING, SILENT)
                if slot.cause:
                    change["cause"] = SILENT  # counted before; now it is not waited for
            elif slot.cause and self._is_withdrawn(slot, pod):
                slot = slot.model_copy(update={"cause": "", "ended_at": None})
        if verdict.outcome is PodOutcome.HEALTHY:
            change["state"] = self._state_when_fine(slot, pod)
            if not slot.cause and (cause := self._to_go(slot, pod)):
                change |= {"cause": cause, "state": "Draining", "ended_at": self._now}
        else:
            change["state"] = "Ended" if verdict.outcome in ENDED else "Draining"
            if slot.ended_at is None:
                change["ended_at"] = self._now
            if not slot.cause:
                if slot.state == "Silent" and verdict.reason in {"Deleted", "Gone"}:
                    verdict = Verdict(verdict.outcome, SILENT)  # deleted by us, or nobody knows better
                return self._count(slot.model_copy(update=change), verdict, pod)
        return slot.model_copy(update=change), verdict

    def _is_withdrawn(self, slot: Slot, pod: Pod | None) -> bool:
        """Nothing is wrong any more with a worker that was counted as leaving, and its place is still its own.

        A server's epoch may have a successor by then: it goes all the same.
        """
        if slot.role == "ps" or self._replaced or pod is None:
            return False
        return not pod.spec.node_name or pod.spec.node_name in self._seen.nodes  # else nobody can say

    def _to_go(self, slot: Slot, pod: Pod | None) -> str:
        """Why a pod with which nothing is wrong is deleted; empty: it stays."""
        if not self._wanted:
            return UNWANTED
        if pod is None or slot.running_at is not None or pod.running:
            return ""
        made_from = pod.metadata.labels.get(TEMPLATE)
        return OUTDATED if made_from not in {None, template_digest(self._seen.job, slot.role)} else ""

    def _state_when_fine(self, slot: Slot, pod: Pod | None) -> str:
        if slot.cause:
            return "Draining"
        if pod is None or not pod.running:
            return "Starting"
        place = _place(slot)
        unheard = slot.state == "Silent" and place not in self._told.active
        return "Silent" if unheard or place in self._told.silent else "Running"

    def _count(self, slot: Slot, verdict: Verdict, pod: Pod | None) -> tuple[Slot, Verdict]:
        """It left or is leaving, and nothing was written down about it so far."""
        if not self._wanted:
            return slot.model_copy(update={"cause": UNWANTED}), verdict
        if self._older is not None and self._older.staying and self._older.slot.state != "Silent":
            # A replacement that is not needed after all: we deleted it, or nobody misses it.
            return slot.model_copy(update={"cause": TAKEN_BACK}), verdict
        if verdict.outcome is PodOutcome.DONE:
            if self._may_be_done(slot):
                return slot, verdict
            words = "ended with exit code 0 before the job was complete"
            verdict = Verdict(PodOutcome.FAILED, "ExitedEarly", words, 0)
        attempts = _attempts_after(slot, verdict)
        if verdict.outcome is PodOutcome.KILLED and attempts > KILLS_FORGIVEN:
            words = f"killed {attempts} times in a row shortly after it started; see the logs of the pod"
            verdict = Verdict(PodOutcome.FAILED, "KilledRepeatedly", words, verdict.exit_code)
        name = pod.metadata.name if pod else pod_name(self._seen.job.metadata.name, _place(slot))
        self._counters.lost(slot, name, verdict)
        return slot.model_copy(update={"cause": verdict.reason, "attempts": attempts}), verdict

    def _may_be_done(self, slot: Slot) -> bool:
        """An exit 0 was too early if server 0 says, well after it, that there is work left."""
        if slot.ended_at is None or self._now - slot.ended_at < DONE_PATIENCE:
            return True
        if _place(slot).seat == ("ps", 0):
            return False  # its last word would have ended the job
        return self._told.phase in {None, Phase.FINISHING, Phase.SUCCEEDED}


def _vanished(slot: Slot) -> Verdict:
    """There is a record and no pod."""
    if slot.cause:
        return Verdict(PodOutcome.IGNORED, slot.cause)
    if slot.state == "Ended":
        return Verdict(PodOutcome.DONE, "Done", "", 0)
    return Verdict(PodOutcome.DISRUPTED, "Gone")


def _bound(slot: Slot, pod: Pod, node: Node | None) -> Slot:
    """Remember the machine when the pod is first seen on it; never afterwards: a name is used again."""
    if not pod.spec.node_name or (slot.node and slot.node_uid):
        return slot
    change: dict[str, object] = {"node": pod.spec.node_name}
    if node is not None:
        change |= {
            "node_uid": node.metadata.uid,
            "boot_id": node.status.node_info.boot_id,
            "pool": pool_of(node),
        }
    return slot.model_copy(update=change)


def _attempts_after(slot: Slot, verdict: Verdict) -> int:
    """How many bad ends in a row the place has now had. What ran, and then was taken, is not a bad end."""
    if (
        verdict.outcome in {PodOutcome.LEAVING, PodOutcome.LOST, PodOutcome.DISRUPTED}
        and slot.running_at is not None
    ):
        return 0
    steady = slot.running_at and slot.ended_at and slot.ended_at - slot.running_at >= STEADY
    return 1 if steady else slot.attempts + 1


def _place(slot: Slot) -> Place:
    return Place(slot.role, slot.index, slot.incarnation)
