"""Posts events about jobs, with one object for repeated events.

An event's name is derived from the run, the reason and the message, so a repetition, even after a restart, is a 409 and
increments the count. Kubernetes deletes events after an hour; after that a repetition is a new event. Losing an event
is not an error, since the status has the same information.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import datetime

from shoal.api.base import API_VERSION
from shoal.api.training_job import TrainingJob
from shoal.cluster.transport import MERGE_PATCH, Transport
from shoal.errors import ClusterError
from shoal.policy.model import Event

logger = logging.getLogger(__name__)

MAX_COUNTS = 4096
MAX_MESSAGE_LENGTH = 1024  # limit of core/v1 Event


class Recorder:
    """Posts events."""

    def __init__(self, transport: Transport, *, reporter: str, wall: Callable[[], datetime]) -> None:
        self._transport = transport
        self._reporter = reporter
        self._wall = wall
        self._counts: OrderedDict[str, int] = OrderedDict()

    async def record(self, job: TrainingJob, events: Iterable[Event]) -> None:
        """Post each event; failures are only logged."""
        await asyncio.gather(*(self._post(job, event) for event in dict.fromkeys(events)))

    async def _post(self, job: TrainingJob, event: Event) -> None:
        content = f"{job.metadata.uid}\0{event.reason}\0{event.message}"
        name = f"{job.metadata.name}.{hashlib.sha256(content.encode()).hexdigest()[:16]}"
        count = self._counts.pop(name, 0) + 1
        self._counts[name] = count
        if len(self._counts) > MAX_COUNTS:
            self._counts.popitem(last=False)
        try:
            if count > 1 and await self._increment(job, name, count) != 404:
                return
            self._counts[name] = 1
            if (status := await self._create(job, name, event)) == 409:
                await self._increment(job, name, None)
            elif status >= 300:
                logger.warning(
                    "cannot record event %s of %s: HTTP %s", event.reason, job.metadata.name, status
                )
        except ClusterError as error:
            logger.warning("cannot record event %s of %s: %s", event.reason, job.metadata.name, error)

    async def _create(self, job: TrainingJob, name: str, event: Event) -> int:
        now = self._now()
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": job.metadata.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": job.kind,
                "name": job.metadata.name,
                "namespace": job.metadata.namespace,
                "uid": job.metadata.uid,
                "resourceVersion": job.metadata.resource_version,
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:MAX_MESSAGE_LENGTH],
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "source": {"component": "shoal"},
            "reportingComponent": "shoal.dev/operator",
            "reportingInstance": self._reporter[:128],
        }
        return (await self._transport.request("POST", self._path(job), body=body)).status

    async def _increment(self, job: TrainingJob, name: str, count: int | None) -> int:
        body: dict[str, object] = {"lastTimestamp": self._now()}
        if count is not None:
            body["count"] = count
        path = f"{self._path(job)}/{name}"
        return (await self._transport.request("PATCH", path, body=body, content_type=MERGE_PATCH)).status

    @staticmethod
    def _path(job: TrainingJob) -> str:
        return f"/api/v1/namespaces/{job.metadata.namespace}/events"

    def _now(self) -> str:
        return self._wall().strftime("%Y-%m-%dT%H:%M:%SZ")
