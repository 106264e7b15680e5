"""The incarnations of a place as the decisions see them, and the operator's reasons to end one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from shoal.api.kube import Pod
from shoal.api.labels import Place
from shoal.api.training_job_status import UNWANTED, Slot
from shoal.policy.common.timers import Timers
from shoal.policy.common.times import parse_time
from shoal.policy.facts.sightings import Sighting
from shoal.policy.facts.verdict import PodOutcome, Verdict

TAKEN_BACK = "TakenBack"  # a replacement that is no longer needed
SILENT = "Silent"  # its replacement runs, or the coordinator has fenced it
OUTDATED = "Outdated"  # it never ran, and would be made otherwise now
FELL_BACK = "FellBack"  # it waited for a spot node in vain
NEVER_RAN = frozenset({OUTDATED, FELL_BACK})
"""Causes of pods that did not run, as far as was seen."""
GAVE_WAY = "GaveWay"  # to a server that a quota refused
OWN_CAUSES = frozenset({UNWANTED, TAKEN_BACK, SILENT, OUTDATED, FELL_BACK, GAVE_WAY})
"""Causes that are decisions of the operator, which deletes the pod."""
MOVED = "Moved"
"""The operator wants it in another pool: it works until its successor runs. Not counted."""
OVERSTAY = timedelta(seconds=5)
"""A pod that still exists this long after its grace period is not waited for: a finalizer or its kubelet holds it."""


def is_overdue(pod: Pod, timers: Timers) -> bool:
    """Whether a pod is still there though its grace period has ended."""
    deadline = parse_time(pod.metadata.deletion_timestamp)  # the end of its grace period
    return deadline is not None and not timers.pending(deadline + OVERSTAY)


def is_refutable(role: str, cause: str) -> bool:
    """Whether a pod refutes by running that it is to end: it was seen late.

    A server that runs has fenced the one before it, whatever that one is taken for.
    """
    return cause in NEVER_RAN or (role, cause) == ("ps", TAKEN_BACK)


def refutes(slot: Slot, pod: Pod | None) -> bool:
    """Whether the pod does: it runs, or got the node after all that it was seen to wait for in vain."""
    if pod is None or not is_refutable(slot.role, slot.cause):
        return False
    return pod.running or (slot.cause == FELL_BACK and bool(pod.spec.node_name))


def leaves_a_gap(last: Slot) -> bool:
    """Whether the next incarnation after this one replaces a lost pod: not after what was given up."""
    return last.replaces if last.cause in NEVER_RAN else last.cause != UNWANTED


def newest_of(sightings: Iterable[Sighting]) -> dict[int, Sighting]:
    """The newest incarnation by index; one that stays counts, and not its replacement that is taken back."""
    found = dict[int, Sighting]()
    for each in sightings:
        before = found.get(each.place.index)
        if before is None or before.verdict.outcome is not PodOutcome.HEALTHY:
            stays = False
        elif refutes(before.slot, before.pod):
            stays = each.pod is None or not each.pod.running
        else:
            stays = not before.slot.cause and each.slot.cause in OWN_CAUSES
        if not stays:
            found[each.place.index] = each
    return found


@dataclass(slots=True)
class Member:
    """One incarnation of a place, with its record, its pod and the verdict on it."""

    place: Place
    slot: Slot
    pod: Pod | None
    verdict: Verdict
    recorded: bool
    """The status recorded its cause before this plan, so the pod itself is no longer needed."""

    def may_run(self, timers: Timers) -> bool:
        """Whether its process may still run and use resources; not beyond its grace period."""
        if self.pod is None or self.verdict.outcome not in {PodOutcome.HEALTHY, PodOutcome.LEAVING}:
            return False
        return not is_overdue(self.pod, timers)

    @property
    def active(self) -> bool:
        """Whether it is starting or running, and not draining."""
        return self.pod is not None and self.verdict.outcome is PodOutcome.HEALTHY and not self.slot.cause

    @property
    def running(self) -> bool:
        """Whether it is active and its process runs."""
        return self.active and self.slot.state in {"Running", "Silent"}

    @property
    def moves(self) -> bool:
        """Whether it works until its successor in another pool runs."""
        healthy = self.pod is not None and self.pod.running and self.verdict.outcome is PodOutcome.HEALTHY
        return healthy and self.slot.cause == MOVED

    @property
    def works(self) -> bool:
        """Whether it trains, as far as is known."""
        return self.moves or (self.running and self.slot.state == "Running")

    @property
    def planned(self) -> bool:
        """Whether it is recorded, and its pod not created yet."""
        return self.pod is None and self.slot.state == "Planned" and not self.slot.cause

    @property
    def missing(self) -> bool:
        """Whether its pod is not seen, or the node of one that ended, and the API server has not been asked."""
        return self.verdict.outcome is PodOutcome.MISSING

    @property
    def awaiting_job_end(self) -> bool:
        """Whether it exited because the work is done."""
        return self.verdict.outcome is PodOutcome.DONE and not self.slot.cause

    @property
    def announced(self) -> bool:
        """Whether its loss is counted and has not come yet."""
        alive = self.verdict.outcome in {PodOutcome.LEAVING, PodOutcome.UNREACHABLE, PodOutcome.HEALTHY}
        ours = self.slot.cause in OWN_CAUSES or self.slot.cause == MOVED
        return self.pod is not None and bool(self.slot.cause) and alive and not ours


def follows_a_loss(members: Sequence[Member]) -> bool:
    """Whether the next pod of a place replaces a lost one."""
    if not members:
        return False
    last = members[-1]
    return last.slot.replaces if last.planned else leaves_a_gap(last.slot)


ByIndex = dict[int, list[Member]]
"""Slot or shard -> its incarnations, oldest first. Of workers, those that are not at rest (`facts.at_rest`)."""


def by_index(members: Iterable[Member]) -> ByIndex:
    """Group the incarnations of one role, which are in order."""
    grouped: ByIndex = {}
    for each in members:
        grouped.setdefault(each.place.index, []).append(each)
    return grouped


def every(*roles: ByIndex) -> Iterator[Member]:
    """All incarnations of the roles."""
    for role in roles:
        for members in role.values():
            yield from members
