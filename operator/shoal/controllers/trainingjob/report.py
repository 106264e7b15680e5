"""Reports a plan: one write of the status if it changed, then the events.

Writes that only update telemetry are rate-limited, and so are, to one a second, those that only follow pods as they
start: what a large job does within a second is one write. A loss is recorded at once, since its pod may be deleted only
when the reason is in the status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

from shoal.api.events import Event
from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import Slot, TrainingJobStatus
from shoal.controllers.trainingjob.metrics import JobMetrics
from shoal.policy.tell.progress import differs_in_telemetry_only
from shoal.runtime.recorder import Recorder
from shoal.runtime.status_writer import StatusWriter

CONFLICT_SECONDS = 1.0
"""Fallback: normally the watch delivers the newer object and wakes the job."""
DUE_SECONDS = 1e-3
"""A wait so short is over: it is a rounding error, and a timer of it may fire before the clock has moved."""
SETTLE_SECONDS = 1.0
"""Minimum interval of writes that record neither a loss nor an end."""


@dataclass(frozen=True)
class Reported:
    """The result of a report."""

    recorded: bool
    """The status is stored, except perhaps the newest telemetry."""
    wait: float | None = None
    """Report again after this many seconds."""


class Reporter:
    """Writes statuses. `telemetry_seconds`: minimum interval of writes that only update telemetry."""

    def __init__(
        self,
        writer: StatusWriter[TrainingJob],
        recorder: Recorder,
        metrics: JobMetrics,
        *,
        wall: Callable[[], datetime],
        telemetry_seconds: float,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        self._writer = writer
        self._recorder = recorder
        self._metrics = metrics
        self._wall = wall
        self._telemetry_seconds = telemetry_seconds
        self._settle_seconds = settle_seconds
        self._written: dict[str, float] = {}

    def forget(self, uid: str) -> None:
        """Drop the state of a deleted job."""
        self._written.pop(uid, None)
        self._metrics.forget(uid)

    async def report(self, job: TrainingJob, status: TrainingJobStatus, events: Iterable[Event]) -> Reported:
        """Write the status and queue the events.

        Raises:
            Unavailable: the write failed and may succeed on retry.
            Refused: the API server rejects the status.
        """
        if status == job.status:
            self._recorder.record(job, events)
            return Reported(recorded=True)
        telemetry_only = differs_in_telemetry_only(job.status, status)
        wait = self._too_soon(job, status, telemetry_only)
        if wait is not None:
            if telemetry_only:
                self._recorder.record(job, events)
            return Reported(recorded=telemetry_only, wait=wait)
        stored = await self._writer.write(job, status)
        if stored is None:
            return Reported(recorded=False, wait=CONFLICT_SECONDS)
        self._written[job.metadata.uid] = self._now()
        self._metrics.count_changes(job.metadata.uid, job.status, status, self._wall())
        self._recorder.record(stored, events)
        return Reported(recorded=True)

    def _too_soon(self, job: TrainingJob, status: TrainingJobStatus, telemetry_only: bool) -> float | None:
        last = self._written.get(job.metadata.uid)
        if last is None or (not telemetry_only and _is_urgent(job.status, status)):
            return None
        left = last + (self._telemetry_seconds if telemetry_only else self._settle_seconds) - self._now()
        return left if left > DUE_SECONDS else None

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _is_urgent(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """Whether the new status records what must not be lost, or what people and programs wait for."""
    if (old.phase, old.reason, old.restarts) != (new.phase, new.reason, new.restarts):
        return True
    if old.observed_generation != new.observed_generation or old.parameter_servers != new.parameter_servers:
        return True
    before, after = ({_identity(slot) for slot in status.slots} for status in (old, new))
    return before != after


def _identity(slot: Slot) -> tuple[str, int, int, str] | None:
    """What of a slot is written at once: the servers, whose incarnation is an epoch, and why a pod goes."""
    if slot.role == "ps" or slot.cause:
        return slot.role, slot.index, slot.incarnation, slot.cause
    return None
