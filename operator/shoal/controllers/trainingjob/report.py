"""Reports a plan: one write of the status if it changed, then the events.

Writes that only update telemetry (`policy.tell.telemetry`) are rate-limited, and so are, to one a second, those that
only follow pods as they start: what a large job does within a second is one write. One that is awaited, as that of a
phase, goes at once, and those that follow wait for longer. A loss is recorded once its replacement runs, or a moment
later: one write tells of both. It is recorded at once where a pod is to be deleted for it, or made, since the reason
has to be in the status before; a wave of losses in a few writes, that the replacements do not wait for.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime

from shoal.api.events import Event
from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import Slot, TrainingJobStatus, apart
from shoal.cluster.clock import loop_time
from shoal.controllers.trainingjob.metrics import JobMetrics
from shoal.controllers.trainingjob.requests import TELL_AFTER
from shoal.errors import ClusterError, Refused, Unavailable
from shoal.policy.common.wording import short
from shoal.policy.tell.telemetry import OUTSTANDING, differs_in_telemetry_only
from shoal.runtime.backoff import DUE_SECONDS
from shoal.runtime.recorder import Recorder
from shoal.runtime.status_writer import StatusWriter

CONFLICT_SECONDS = 1.0
"""Fallback: normally the watch delivers the newer object and wakes the job."""
SETTLE_SECONDS = 1.0
"""Minimum interval of writes that record neither a loss nor an end."""
LONGEST_SETTLE = 3
"""So many times that, at most, is waited for after writes that came at once."""
FIRST_SECONDS = 3.0
"""How long a job's first status waits for its pods to be made, so that it tells of all of them: of two statuses written
while hundreds of jobs begin, one is a fifth of what the API server has to do for a job of five pods."""
FIRST_POD_SECONDS = 10.0
"""How long it waits where there is none yet: beside hundreds of jobs that begin, they wait for their turn."""
WAVE_SECONDS = 0.2
"""Minimum interval of writes that record the losses of workers and nothing else that is urgent."""

REPLACED_SECONDS = 2.0
"""How long the write of a loss waits for its replacement to run: as long as a pod takes to start on a node that has
its image, and a failed one is replaced after. Not longer: a leader that ends before it takes with it why a pod is gone.
"""
TELL_AGAIN = 600.0
"""Seconds between events about a status that cannot be stored."""
MOST_UNANSWERED = 8
"""The last writes without an answer, of which one may be stored: as many as are tried until a watch says so. They are
5 KiB each, and where nothing answers for statuses, as a webhook that is down, six are tried each minute."""


@dataclass(frozen=True)
class Report:
    """What is to be done about a status."""

    recorded: bool
    """It is stored, except perhaps the newest telemetry."""
    wait: float | None = None
    """It is written after this many seconds; 0: now. None: there is nothing to write."""


@dataclass(frozen=True)
class _Unanswered:
    """A write that may be stored: the job as it was, its new status, and the events about that."""

    job: TrainingJob
    status: TrainingJobStatus
    events: tuple[Event, ...]


@dataclass
class _Told:
    """What was written of one job, and tried."""

    written: float = -math.inf
    settled: float = -math.inf
    """When the writes so far are as many as one in each `SETTLE_SECONDS`."""
    differs: float | None = None
    """Since when there is something to write, other than telemetry."""
    complain_at: float | None = None
    """When to tell that it cannot be written; None: it can."""
    conflict: tuple[str, float] = "", 0.0
    """The version of the job that was not the newest, and when."""
    unanswered: list[_Unanswered] = field(default_factory=list)
    """What may be stored, of one version of the job."""


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
        self._told: defaultdict[str, _Told] = defaultdict(_Told)

    def forget(self, uid: str) -> None:
        """Drop the state of a deleted job."""
        self._told.pop(uid, None)
        self._writer.forget(uid)
        self._metrics.forget(uid)

    def report(
        self,
        job: TrainingJob,
        status: TrainingJobStatus,
        events: Iterable[Event],
        *,
        makes: bool,
        awaited: bool = True,
    ) -> Report:
        """When the status is written.

        `makes`: pods are being created, and soon there is more to say. `awaited`: something is done when it is stored.
        """
        told = self._told[job.metadata.uid]
        self._look_for_unanswered(job, told)
        known: TrainingJobStatus = self._writer.known(job)
        if status == known:
            told.differs = None
            self._recorder.record(job, events)
            return Report(recorded=True)
        if not self._writer.can_write(job):
            return Report(recorded=False)
        old, new = apart(known, status)
        telemetry_only = differs_in_telemetry_only(old, new)
        version, at = told.conflict
        due = [
            at + CONFLICT_SECONDS if version == job.metadata.resource_version else 0.0,
            self._next(told, old, new, telemetry_only),
        ]
        if telemetry_only:
            told.differs = None
        else:
            told.differs = loop_time() if told.differs is None else told.differs
            due += [told.differs + _gathering_seconds(old, new)] if makes else []
            waits = not awaited and _is_soon_replaced(old, new)
            longest = min(REPLACED_SECONDS, LONGEST_SETTLE * self._settle_seconds)
            due += [told.differs + longest] if waits else []
        left = max(due) - loop_time()
        if makes and not old.observed_generation and told.differs is not None:
            look = told.differs + FIRST_SECONDS - loop_time()
            left = min(left, look) if look > DUE_SECONDS else left  # the first of many pods wakes nobody
        return Report(recorded=telemetry_only, wait=left if left > DUE_SECONDS else 0.0)

    async def write(
        self, job: TrainingJob, status: TrainingJobStatus, events: Iterable[Event], *, urgent: bool = False
    ) -> bool:
        """Write the status and queue the events; False if the job has changed meanwhile, or is gone.

        `urgent`: a replacement waits for it.

        Raises:
            Unavailable: the write failed and may succeed on retry.
            Refused: the API server rejects the status.
        """
        told, result = self._told[job.metadata.uid], "error"
        try:
            stored = await self._writer.write(job, status, urgent=urgent)
            result = "refused" if stored is None else "done"
        except asyncio.CancelledError:  # it may be stored: told twice, which is counted, rather than never
            self._recorder.record(job, events)
            raise
        except (Unavailable, Refused) as error:
            if isinstance(error, Unavailable):
                tried = _Unanswered(job, status, tuple(events))
                told.unanswered = [*told.unanswered[1 - MOST_UNANSWERED :], tried]
            self._complain(job, told, error)
            raise
        finally:
            self._metrics.actions.labels("WriteStatus", result).inc()
        if stored is None:
            told.conflict = job.metadata.resource_version, loop_time()
            return False
        told.written, told.differs, told.unanswered, told.complain_at = loop_time(), None, [], None
        settled = max(told.written, told.settled) + self._settle_seconds
        told.settled = min(settled, told.written + LONGEST_SETTLE * self._settle_seconds)
        self._tell(job, status, events)
        return True

    def _complain(self, job: TrainingJob, told: _Told, error: ClusterError) -> None:
        """Tell now and then of a status that cannot be stored: it cannot say so itself."""
        now = loop_time()
        if told.complain_at is None:
            told.complain_at = now + TELL_AFTER
        elif now >= told.complain_at:
            told.complain_at = now + TELL_AGAIN
            words = "the status cannot be stored: it stands still, and no lost parameter server is replaced"
            said = f"{words}: {short(str(error), 500)}"
            self._recorder.record(job, [Event("Warning", "StatusNotStored", said)])

    def _tell(self, job: TrainingJob, status: TrainingJobStatus, events: Iterable[Event]) -> None:
        """Tell of a status that is stored, where `job` had another one."""
        self._metrics.count_changes(job.metadata.uid, job.status, status, self._wall())
        self._recorder.record(job, events)

    def _look_for_unanswered(self, job: TrainingJob, told: _Told) -> None:
        """Tell of a write without an answer if the job, once it is newer, shows that it was stored."""
        tried = told.unanswered
        if not tried or tried[0].job.metadata.resource_version == job.metadata.resource_version:
            return
        told.unanswered = []
        if (stored := next((each for each in tried if each.status == job.status), None)) is not None:
            self._tell(stored.job, stored.status, stored.events)

    def _next(
        self, told: _Told, old: TrainingJobStatus, new: TrainingJobStatus, telemetry_only: bool
    ) -> float:
        """The earliest time of a write."""
        if telemetry_only:
            return told.written + self._telemetry_seconds
        if _is_awaited(old, new):
            return 0.0
        if _counts_losses(old, new):
            return told.written + min(WAVE_SECONDS, self._settle_seconds)
        return told.settled


def _gathering_seconds(old: TrainingJobStatus, new: TrainingJobStatus) -> float:
    """How long a write waits for the answers about pods that are being created, to tell of them, too."""
    if new.finished or _records_servers(old, new):
        return 0.0
    if _counts_losses(old, new):
        return WAVE_SECONDS
    if old.observed_generation:
        return SETTLE_SECONDS
    return FIRST_SECONDS if new.slots else FIRST_POD_SECONDS


def _is_soon_replaced(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """Whether the new status tells of lost workers, of which one is to be replaced, or its replacement to run.

    The job does without them meanwhile.
    """
    if _is_awaited(old, new) or not _counts_losses(old, new) or new.reason not in {old.reason, OUTSTANDING}:
        return False
    newest = {slot.index: slot for slot in new.slots if slot.role == "worker"}
    return any(slot.cause or (slot.replaces and slot.state == "Starting") for slot in newest.values())


def _is_awaited(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """Whether people, programs or the next pod of a server wait for what the new status says."""
    snapshot = {"last_snapshot_time": None}
    said = [
        (each.phase, each.observed_generation, each.parameter_servers.model_copy(update=snapshot))
        for each in (old, new)
    ]
    return said[0] != said[1] or _records_servers(old, new)


def _records_servers(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """Whether the next pod of a server waits for what the new status says."""
    before, after = (
        {
            _loss(slot)
            for slot in status.slots
            if slot.role == "ps" and (slot.cause or slot.state == "Planned")
        }
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
