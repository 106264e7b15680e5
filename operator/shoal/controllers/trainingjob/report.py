"""Reports a plan: one write of the status if it changed, then the events.

Writes that only update telemetry (`policy.tell.telemetry`) are rate-limited, and so are, to one a second, those that
only follow pods as they start: what a large job does within a second is one write. A loss is recorded at once, since
its pod may be deleted only when the reason is in the status; a wave of losses in a few writes, that the replacements do
not wait for.
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
from shoal.policy.tell.telemetry import differs_in_telemetry_only
from shoal.runtime.recorder import Recorder
from shoal.runtime.status_writer import StatusWriter

CONFLICT_SECONDS = 1.0
"""Fallback: normally the watch delivers the newer object and wakes the job."""
DUE_SECONDS = 1e-3
"""A wait so short is over: it is a rounding error, and a timer of it may fire before the clock has moved."""
SETTLE_SECONDS = 1.0
"""Minimum interval of writes that record neither a loss nor an end."""
WAVE_SECONDS = 0.2
"""Minimum interval of writes that record the losses of workers and nothing else that is urgent."""


@dataclass(frozen=True)
class Reported:
    """The result of a report."""

    recorded: bool
    """The status is stored, except perhaps the newest telemetry."""
    conflict: bool = False
    """The job has changed since it was seen: its watch wakes it, and what the plan would do next is out of date."""
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
            return Reported(recorded=telemetry_only, wait=wait)
        try:
            stored = await self._writer.write(job, status)
        except asyncio.CancelledError:  # it may be stored: told twice, which is counted, rather than never
            self._recorder.record(job, events)
            raise
        if stored is None:
            return Reported(recorded=False, conflict=True, wait=CONFLICT_SECONDS)
        self._written[job.metadata.uid] = self._now()
        self._metrics.count_changes(job.metadata.uid, job.status, status, self._wall())
        self._recorder.record(stored, events)
        return Reported(recorded=True)

    def _too_soon(self, job: TrainingJob, status: TrainingJobStatus, telemetry_only: bool) -> float | None:
        last = self._written.get(job.metadata.uid)
        if last is None:
            return None
        pause = self._telemetry_seconds
        if not telemetry_only:
            if _is_awaited(job.status, status):
                return None
            pause = self._settle_seconds
            if _counts_losses(job.status, status):
                pause = min(WAVE_SECONDS, pause)
        left = last + pause - self._now()
        return left if left > DUE_SECONDS else None

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _is_awaited(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """Whether people, programs or the next pod of a server wait for what the new status says."""
    if (old.phase, old.observed_generation) != (new.phase, new.observed_generation):
        return True
    snapshot = {"last_snapshot_time": new.parameter_servers.last_snapshot_time}
    if old.parameter_servers.model_copy(update=snapshot) != new.parameter_servers:
        return True
    before, after = (
        {(slot.index, slot.incarnation, slot.cause) for slot in status.slots if slot.role == "ps"}
        for status in (old, new)
    )
    return before != after


def _counts_losses(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """Whether the new status says why pods go."""
    if (old.reason, old.restarts) != (new.reason, new.restarts):
        return True
    before, after = ({_loss(slot) for slot in status.slots if slot.cause} for status in (old, new))
    return before != after


def _loss(slot: Slot) -> tuple[int, int, str]:
    return slot.index, slot.incarnation, slot.cause
