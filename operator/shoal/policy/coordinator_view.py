"""What server 0 lately told of the workers. An old report says nothing: neither that one works nor that it does not."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.policy.model import Observation
from shoal.policy.names import Place
from shoal_trainer.contract import Phase, WorkerState

FRESH_REPORT_SECONDS = 15.0


@dataclass(frozen=True)
class CoordinatorView:
    """The incarnations that it named, by what it thinks of them; all empty where nothing was heard lately."""

    phase: Phase | None = None
    active: frozenset[Place] = frozenset()
    silent: frozenset[Place] = frozenset()
    """It does not hear them, and would take what they say."""
    fenced: frozenset[Place] = frozenset()
    """It has given them up: nothing of them is taken any more, whatever they do."""


def coordinator_view(seen: Observation) -> CoordinatorView:
    """The newest report, if it is fresh."""
    report = seen.report
    if report is None or seen.report_age > FRESH_REPORT_SECONDS:
        return CoordinatorView()

    def those(state: WorkerState) -> frozenset[Place]:
        return frozenset(Place("worker", w.slot, w.incarnation) for w in report.workers if w.state is state)

    return CoordinatorView(
        report.phase, those(WorkerState.ACTIVE), those(WorkerState.SILENT), those(WorkerState.FENCED)
    )
