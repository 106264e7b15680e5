"""The incarnations of a place, each with its record, its pod and its verdict; and the operator's reasons to end one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

from shoal.api.kube import Pod
from shoal.api.training_job_status import Slot
from shoal.policy.names import Place
from shoal.policy.timers import Timers
from shoal.policy.times import parse_time
from shoal.policy.verdict import PodOutcome, Verdict

UNWANTED = "Unwanted"  # scaled down or suspended
TAKEN_BACK = "TakenBack"  # a replacement that is no longer needed
SILENT = "Silent"  # its replacement runs, or the coordinator has fenced it
OUTDATED = "Outdated"  # it never ran, and the template has changed
OWN_CAUSES = frozenset({UNWANTED, TAKEN_BACK, SILENT, OUTDATED})
"""Causes that are decisions of the operator, which deletes the pod."""
OVERSTAY = timedelta(seconds=5)
"""A pod that still exists this long after its grace period is not waited for: a finalizer or its kubelet holds it."""


@dataclass(frozen=True)
class Incarnation:
    """One incarnation of a place."""

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
        deadline = parse_time(self.pod.metadata.deletion_timestamp)  # the end of its grace period
        return deadline is None or timers.pending(deadline + OVERSTAY)

    @property
    def active(self) -> bool:
        """Whether it is starting or running, and not draining."""
        return self.pod is not None and self.verdict.outcome is PodOutcome.HEALTHY and not self.slot.cause

    @property
    def running(self) -> bool:
        """Whether it is active and its process runs."""
        return self.active and self.slot.state in {"Running", "Silent"}

    @property
    def awaiting_job_end(self) -> bool:
        """Whether it exited because the work is done."""
        return self.verdict.outcome is PodOutcome.DONE and not self.slot.cause

    @property
    def node(self) -> str:
        """The node that it is bound to."""
        return self.slot.node


ByIndex = dict[int, tuple[Incarnation, ...]]
"""Slot or shard -> its incarnations, oldest first."""


def by_index(incarnations: Iterable[Incarnation]) -> ByIndex:
    """Group the incarnations of one role."""
    grouped: dict[int, list[Incarnation]] = defaultdict(list)
    for each in incarnations:
        grouped[each.place.index].append(each)
    return {
        index: tuple(sorted(group, key=lambda each: each.place)) for index, group in sorted(grouped.items())
    }


def every(*roles: ByIndex) -> Iterator[Incarnation]:
    """All incarnations of the roles."""
    for role in roles:
        for incarnations in role.values():
            yield from incarnations
