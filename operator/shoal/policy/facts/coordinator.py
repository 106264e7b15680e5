"""What parameter server 0 lately reported about the workers. An old report is no evidence either way."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from shoal.api.labels import Place
from shoal.policy.model import Observation
from shoal_trainer.contract import Phase, WorkerState

FRESH_REPORT_SECONDS = 30.0
"""Longer than between two reports where very many jobs are polled: an operator that is slow to ask is no silence."""


@dataclass(frozen=True)
class CoordinatorView:
    """The reported workers by state; empty without a fresh report."""

    phase: Phase | None = None
    active: Set[Place] = frozenset()
    silent: Set[Place] = frozenset()
    """Not heard from, but their pushes are still accepted."""
    fenced: Set[Place] = frozenset()
    """Given up: none of their pushes is accepted any more."""
    serving: Set[Place] = frozenset()
    """Parameter servers that were heard: the one that reports, and the shards that report to it."""
    pushed: Mapping[Place, float] = field(default_factory=dict)
    """When workers pushed first, in Unix seconds."""

    def hears(self, place: Place) -> bool:
        """Whether the process of this place was heard lately, whatever its node says."""
        return place in self.active or place in self.serving


def coordinator_view(seen: Observation) -> CoordinatorView:
    """The newest report, if it is fresh."""
    report = seen.report
    if report is None or seen.report_age >= FRESH_REPORT_SECONDS:
        return CoordinatorView()

    places: dict[WorkerState, set[Place]] = {state: set() for state in WorkerState}
    pushed = {}
    for each in report.workers:
        place = Place("worker", each.slot, each.incarnation)
        places[each.state].add(place)
        if each.first_push_at is not None:
            pushed[place] = each.first_push_at
    return CoordinatorView(
        report.phase,
        active=places[WorkerState.ACTIVE],
        silent=places[WorkerState.SILENT],
        fenced=places[WorkerState.FENCED],
        serving={
            Place("ps", s.index, s.epoch) for s in report.shards if s.index == 0 or (s.ready and s.boot)
        },
        pushed=pushed,
    )


def unasked(seen: Observation) -> bool:
    """Whether the coordinator runs, is asked, and has neither been heard nor failed to answer yet."""
    return not seen.unreachable_because and may_be_heard(seen)


def may_be_heard(seen: Observation) -> bool:
    """Whether the coordinator runs and has not been heard yet, nor asked in vain for long.

    For as long as an operator that has heard it believes its last report: one poll that fails is no silence.
    """
    asked = seen.report is not None or seen.unreachable_seconds >= FRESH_REPORT_SECONDS
    if asked or seen.job.metadata.deletion_timestamp:
        return False
    running = (each for each in seen.pods if each.running and each.status.pod_ip)
    return any(each.place is not None and each.place.is_coordinator for each in running)
