"""Who holds a place: each incarnation with its record, its pod and what became of it; and why Shoal lets one go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.api.kube import Pod
from shoal.api.training_job_status import Slot
from shoal.policy.names import Place
from shoal.policy.verdict import PodOutcome, Verdict

UNWANTED = "Unwanted"  # scaled down or suspended
TAKEN_BACK = "TakenBack"  # a replacement whose predecessor spoke again
SILENT = "Silent"  # its replacement runs, or server 0 has given it up
OUTDATED = "Outdated"  # it never ran, and the template is another one by now
OURS = frozenset({UNWANTED, TAKEN_BACK, SILENT, OUTDATED})
"""Causes that are Shoal's own decision: Shoal deletes the pod."""


@dataclass(frozen=True)
class Incarnation:
    """One incarnation of a place: its record, the pod if there is one, and what has become of it."""

    place: Place
    slot: Slot
    pod: Pod | None
    verdict: Verdict
    settled: bool
    """Its cause had been written down before this plan: the pod itself is needed no more."""

    @property
    def alive(self) -> bool:
        """A process of it may still run and use resources."""
        return self.pod is not None and self.verdict.outcome in {PodOutcome.HEALTHY, PodOutcome.LEAVING}

    @property
    def staying(self) -> bool:
        """It holds its place."""
        return self.pod is not None and self.verdict.outcome is PodOutcome.HEALTHY and not self.slot.cause

    @property
    def running(self) -> bool:
        """It holds its place and its process runs."""
        return self.staying and self.slot.state in {"Running", "Silent"}

    @property
    def awaiting_the_end(self) -> bool:
        """A worker that was told that the work is done."""
        return self.verdict.outcome is PodOutcome.DONE and not self.slot.cause

    @property
    def node(self) -> str:
        """Where it is bound."""
        return self.slot.node


ByIndex = dict[int, tuple[Incarnation, ...]]
"""Index of a slot or shard -> its incarnations, oldest first."""


def by_index(holders: Iterable[Incarnation]) -> ByIndex:
    """Holders of one role by index."""
    found: dict[int, list[Incarnation]] = defaultdict(list)
    for holder in holders:
        found[holder.place.index].append(holder)
    return {index: tuple(sorted(of, key=lambda h: h.place)) for index, of in sorted(found.items())}
