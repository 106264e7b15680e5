"""Updates the record of every pod: which are active, draining or ended, with each loss counted once.

`status.slots` is the operator's memory. A pod that is only in it vanished while no operator ran, and is counted with
reason Gone. The newest record of a place is kept forever, since it determines the next incarnation (which for a
parameter server is the epoch that fences its predecessors).

A state is left only on evidence: a silent worker is active again when parameter server 0 says so, not when it stops
reporting; an exit code 0 was too early when it reports remaining work; a notice is withdrawn when the node can be read
and has none.
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
    OUTDATED,
    OWN_CAUSES,
    SILENT,
    TAKEN_BACK,
    UNWANTED,
    ByIndex,
    Incarnation,
    by_index,
)
from shoal.policy.model import Observation
from shoal.policy.names import (
    TEMPLATE,
    Place,
    RoleName,
    place_of,
    place_of_slot,
    pod_name,
    template_digest,
)
from shoal.policy.surge import settle
from shoal.policy.times import parse_time, whole
from shoal.policy.verdict import ENDED, KILLS_TOLERATED, PodOutcome, Verdict, judge
from shoal_trainer.contract import Phase

DONE_PATIENCE = timedelta(seconds=30)
"""How long after a worker's exit code 0 the end of the job is awaited before the exit counts as early."""
STEADY = timedelta(minutes=10)
"""A pod that ran this long resets the attempts of its place."""


def update(seen: Observation, role: RoleName, wanted: Callable[[Place], bool], counters: Counters) -> ByIndex:
    """Update the records of one role. New losses are counted in `counters`."""
    pods = {place: pod for pod in seen.pods if (place := place_of(pod)) is not None and place.role == role}
    records = {place_of_slot(slot): slot for slot in seen.job.status.slots if slot.role == role}
    view = coordinator_view(seen)
    newest_running: dict[int, int] = {}
    for place, pod in pods.items():
        if pod.running and not pod.metadata.deletion_timestamp:
            newest_running[place.index] = max(place.incarnation, newest_running.get(place.index, -1))
    previous: dict[int, Incarnation] = {}
    updated = []
    for place in sorted(pods.keys() | records.keys()):
        updater = _Updater(
            seen,
            counters,
            view,
            wanted=wanted(place),
            older=previous.get(place.index),
            replaced=newest_running.get(place.index, -1) > place.incarnation,
        )
        previous[place.index] = updater.incarnation(place, records.get(place), pods.get(place))
        updated.append(previous[place.index])
    return {index: settle(group, seen, counters) for index, group in by_index(updated).items()}


def to_record(*roles: ByIndex) -> tuple[Slot, ...]:
    """The slots of the status: all incarnations that have a pod, and the newest of each place."""
    return tuple(
        each.slot
        for role in roles
        for group in role.values()
        for each in group
        if each.pod is not None or each is group[-1] or each.awaiting_job_end
    )


class _Updater:
    """Updates one record.

    `older`: the previous incarnation, if it is known. `replaced`: a later one runs.
    """

    def __init__(
        self,
        seen: Observation,
        counters: Counters,
        view: CoordinatorView,
        *,
        wanted: bool,
        older: Incarnation | None,
        replaced: bool,
    ) -> None:
        self._seen, self._counters, self._view = seen, counters, view
        self._wanted, self._older, self._replaced = wanted, older, replaced
        self._now = whole(seen.now)

    def incarnation(self, place: Place, record: Slot | None, pod: Pod | None) -> Incarnation:
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
            verdict = judge(pod, slot, self._seen.nodes_if_readable, rules)
            if place.role == "ps":
                slot = restarted_in_place(slot, pod, rules, self._counters)
        slot, verdict = self._advance(slot, verdict, pod)
        return Incarnation(place, slot, pod, verdict, recorded=bool(record and record.cause))

    def _advance(self, slot: Slot, verdict: Verdict, pod: Pod | None) -> tuple[Slot, Verdict]:
        change: dict[str, object] = {}
        if pod is not None and slot.running_at is None and pod.running:
            change["running_at"] = self._now
        if verdict.outcome is PodOutcome.HEALTHY and slot.cause not in OWN_CAUSES:
            if place_of_slot(slot) in self._view.fenced:
                verdict = Verdict(PodOutcome.LEAVING, SILENT)
                if slot.cause:
                    change["cause"] = SILENT  # already counted; as SILENT it is deleted without waiting
            elif slot.cause and self._is_withdrawn(slot, pod):
                slot = slot.model_copy(update={"cause": "", "ended_at": None})
        if verdict.outcome is PodOutcome.HEALTHY:
            change["state"] = self._state_when_healthy(slot, pod)
            if not slot.cause and (cause := self._cause_to_delete(slot, pod)):
                change |= {"cause": cause, "state": "Draining", "ended_at": self._now}
        else:
            change["state"] = "Ended" if verdict.outcome in ENDED else "Draining"
            if slot.ended_at is None:
                change["ended_at"] = self._now
            if not slot.cause:
                if slot.state == "Silent" and verdict.reason in {"Deleted", "Gone"}:
                    verdict = Verdict(verdict.outcome, SILENT)  # deleted by us, or no better reason is known
                return self._count(slot.model_copy(update=change), verdict, pod)
        return slot.model_copy(update=change), verdict

    def _is_withdrawn(self, slot: Slot, pod: Pod | None) -> bool:
        """Whether the notice of a healthy worker no longer holds, and no later incarnation runs.

        A parameter server's notice is never withdrawn: its shard may already have a successor.
        """
        if slot.role == "ps" or self._replaced or pod is None:
            return False
        return (
            not pod.spec.node_name or pod.spec.node_name in self._seen.nodes
        )  # unreadable nodes prove nothing

    def _cause_to_delete(self, slot: Slot, pod: Pod | None) -> str:
        """Why a healthy pod is deleted; empty: it stays."""
        if not self._wanted:
            return UNWANTED
        if pod is None or slot.running_at is not None or pod.running:
            return ""
        digest = pod.metadata.labels.get(TEMPLATE)
        return OUTDATED if digest not in {None, template_digest(self._seen.job, slot.role)} else ""

    def _state_when_healthy(self, slot: Slot, pod: Pod | None) -> str:
        if slot.cause:
            return "Draining"
        if pod is None or not pod.running:
            return "Starting"
        place = place_of_slot(slot)
        still_silent = slot.state == "Silent" and place not in self._view.active
        return "Silent" if still_silent or place in self._view.silent else "Running"

    def _count(self, slot: Slot, verdict: Verdict, pod: Pod | None) -> tuple[Slot, Verdict]:
        """Count a pod that ended or is draining, unless the operator decided so."""
        if not self._wanted:
            return slot.model_copy(update={"cause": UNWANTED}), verdict
        if self._older is not None and self._older.active and self._older.slot.state != "Silent":
            # A replacement that is no longer needed: its predecessor is active again.
            return slot.model_copy(update={"cause": TAKEN_BACK}), verdict
        if verdict.outcome is PodOutcome.DONE:
            if self._may_be_done(slot):
                return slot, verdict
            words = "ended with exit code 0 before the job was complete"
            verdict = Verdict(PodOutcome.FAILED, "ExitedEarly", words, 0)
        attempts = _attempts_after(slot, verdict)
        if verdict.outcome is PodOutcome.KILLED and attempts > KILLS_TOLERATED:
            words = f"killed {attempts} times in a row shortly after it started; see the logs of the pod"
            verdict = Verdict(PodOutcome.FAILED, "KilledRepeatedly", words, verdict.exit_code)
        name = pod.metadata.name if pod else pod_name(self._seen.job.metadata.name, place_of_slot(slot))
        self._counters.lost(slot, name, verdict)
        return slot.model_copy(update={"cause": verdict.reason, "attempts": attempts}), verdict

    def _may_be_done(self, slot: Slot) -> bool:
        """Whether an exit code 0 may mean that the work is done.

        It was early if, well after it, parameter server 0 reports remaining work.
        """
        if slot.ended_at is None or self._now - slot.ended_at < DONE_PATIENCE:
            return True
        if place_of_slot(slot).is_coordinator:
            return False  # its termination message would have finished the job
        return self._view.phase in {None, Phase.FINISHING, Phase.SUCCEEDED}


def _vanished(slot: Slot) -> Verdict:
    """The verdict on a record without a pod."""
    if slot.cause:
        return Verdict(PodOutcome.IGNORED, slot.cause)
    if slot.state == "Ended":
        return Verdict(PodOutcome.DONE, "Done", "", 0)
    return Verdict(PodOutcome.DISRUPTED, "Gone")


def _bound(slot: Slot, pod: Pod, node: Node | None) -> Slot:
    """Record the node when the pod is first seen on it; never later, since a node name can be reused."""
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
    """Abnormal ends of the place in a row, including this one. The disruption of a pod that ran is not abnormal."""
    disrupted = verdict.outcome in {PodOutcome.LEAVING, PodOutcome.LOST, PodOutcome.DISRUPTED}
    if disrupted and slot.running_at is not None:
        return 0
    steady = slot.running_at and slot.ended_at and slot.ended_at - slot.running_at >= STEADY
    return 1 if steady else slot.attempts + 1
