"""What parameter server 0 lately reported about the workers. An old report is no evidence either way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.api.labels import Place
from shoal.policy.model import Observation
from shoal_trainer.contract import Phase, WorkerState

FRESH_REPORT_SECONDS = 15.0


@dataclass(frozen=True)
class CoordinatorView:
    """The reported workers by state; empty without a fresh report."""

    phase: Phase | None = None
    active: frozenset[Place] = frozenset()
    silent: frozenset[Place] = frozenset()
    """Not heard from, but their pushes are still accepted."""
    fenced: frozenset[Place] = frozenset()
    """Given up: none of their pushes is accepted any more."""
    serving: frozenset[Place] = frozenset()
    """Parameter servers that were heard: the one that reports, and the shards that report to it."""
    pushed: Mapping[Place, float] = field(default_factory=dict)
    """When workers pushed first, in Unix seconds."""

    def hears(self, place: Place) -> bool:
        """Whether the process of this place was heard lately, whatever its node says."""
        return place in self.active or place in self.serving


def coordinator_view(seen: Observation) -> CoordinatorView:
    """The newest report, if it is fresh."""
    report = seen.report
    if report is None or seen.report_age > FRESH_REPORT_SECONDS:
        return CoordinatorView()

    def in_state(state: WorkerState) -> frozenset[Place]:
        return frozenset(Place("worker", w.slot, w.incarnation) for w in report.workers if w.state is state)

    return CoordinatorView(
        report.phase,
        active=in_state(WorkerState.ACTIVE),
        silent=in_state(WorkerState.SILENT),
        fenced=in_state(WorkerState.FENCED),
        serving=frozenset(
            Place("ps", s.index, s.epoch) for s in report.shards if s.index == 0 or (s.ready and s.boot)
        ),
        pushed={
            Place("worker", w.slot, w.incarnation): w.first_push_at
            for w in report.workers
            if w.first_push_at is not None
        },
    )
