"""Reports a plan: one write of the status if it changed, then the events.

The write has the resource version that the plan was based on: if the job changed meanwhile it is a 409, and the next
plan counts from the same status again. Writes that only update telemetry are rate-limited.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.api.base import API_VERSION
from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import TrainingJobStatus
from shoal.cluster.transport import Transport
from shoal.controller.cluster_state import ClusterState
from shoal.controller.events import Recorder
from shoal.errors import Refused, Unavailable
from shoal.policy.model import Event
from shoal.policy.tell.progress import differs_in_telemetry_only
from shoal.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

CONFLICT_SECONDS = 1.0
"""Fallback: normally the watch delivers the newer object and wakes the job."""


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
        transport: Transport,
        state: ClusterState,
        recorder: Recorder,
        metrics: Metrics,
        *,
        telemetry_seconds: float,
    ) -> None:
        self._transport = transport
        self._state = state
        self._recorder = recorder
        self._metrics = metrics
        self._telemetry_seconds = telemetry_seconds
        self._written: dict[str, float] = {}

    def forget(self, uid: str) -> None:
        """Drop the state of a deleted job."""
        self._written.pop(uid, None)

    async def report(self, job: TrainingJob, status: TrainingJobStatus, events: Iterable[Event]) -> Reported:
        """Write the status and post the events.

        Raises:
            Unavailable: the write failed and may succeed on retry.
            Refused: the API server rejects the status.
        """
        wait = None
        if status != job.status:
            wait = self._too_soon(job, status)
            if wait is None and not await self._write(job, status):
                return Reported(recorded=False, wait=CONFLICT_SECONDS)
        await self._recorder.record(job, events)
        return Reported(recorded=True, wait=wait)

    def _too_soon(self, job: TrainingJob, status: TrainingJobStatus) -> float | None:
        if not differs_in_telemetry_only(job.status, status):
            return None
        last = self._written.get(job.metadata.uid)
        left = 0.0 if last is None else last + self._telemetry_seconds - self._now()
        return left if left > 0 else None

    async def _write(self, job: TrainingJob, status: TrainingJobStatus) -> bool:
        meta = job.metadata
        path = f"/apis/{API_VERSION}/namespaces/{meta.namespace}/{job.PLURAL}/{meta.name}/status"
        body = {
            "apiVersion": API_VERSION,
            "kind": job.kind,
            "metadata": {
                "name": meta.name,
                "namespace": meta.namespace,
                "uid": meta.uid,
                "resourceVersion": meta.resource_version,
            },
            "spec": job.spec.model_dump(
                mode="json", by_alias=True, exclude_none=True
            ),  # ignored, yet checked
            "status": status.model_dump(mode="json", by_alias=True, exclude_none=True),
        }
        answer = await self._transport.request("PUT", path, body=body)
        self._metrics.status_writes.labels("written" if answer.ok else str(answer.status)).inc()
        if answer.ok:
            self._written[meta.uid] = self._now()
            self._metrics.count_changes(job.status, status)
            self._state.jobs.put(TrainingJob.model_validate_json(answer.body, extra="ignore"))
            return True
        if answer.status == 409:
            return False
        if answer.status == 404:
            self._state.jobs.drop(meta.uid)
            return False
        words = f"cannot update the status of {meta.namespace}/{meta.name}: {answer.status} {answer.message}"
        raise Refused(words) if answer.status in {400, 422} else Unavailable(words)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
