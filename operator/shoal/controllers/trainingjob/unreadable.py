"""Tells the owner of a TrainingJob that this operator cannot read it: on the object itself, not only in a log.

It happens where the CRD is newer than the operator, or was changed by hand. What runs goes on, and nothing of it is
replaced (`Observation.unread`): the loss could not be recorded, and what the job is to be is not known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from shoal.api.base import API_VERSION
from shoal.api.training_job import TrainingJob
from shoal.cluster.transport import MERGE_PATCH, Transport
from shoal.controllers.state import Key, Wake
from shoal.errors import Unavailable
from shoal.runtime.work_queue import Priority

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0
"""Until the next try where the API server did not answer."""


class Complaints:
    """Takes jobs that cannot be read, and writes the condition Stalled to them.

    `unread`: whether the job with this uid still cannot be.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        wake: Wake,
        wall: Callable[[], datetime],
        unread: Callable[[str], bool] = lambda _uid: True,
    ) -> None:
        self._transport = transport
        self._unread = unread
        self._wake = wake
        self._wall = wall
        self._unreadable: dict[Key, tuple[Mapping[str, Any], str]] = {}

    def hear(self, found: Mapping[str, Any], why: str) -> Key:
        """Take an object as it was listed or watched; returns its key."""
        meta = found.get("metadata") or {}
        key = str(meta.get("namespace", "")), str(meta.get("name", ""))
        self._unreadable[key] = found, why
        return key

    def keys(self) -> list[Key]:
        """The jobs that nobody was told of yet: a process that does not lead only hears."""
        return list(self._unreadable)

    def about(self, key: Key) -> bool:
        """Whether there is something to complain about."""
        return key in self._unreadable

    async def complain(self, key: Key) -> None:
        """Write the condition, unless it is there. Where the API server does not answer, the key is woken later.

        Raises:
            Unavailable: it did not answer.
        """
        if (known := self._unreadable.pop(key, None)) is None:
            return
        found, why = known
        if not self._unread(str(found["metadata"].get("uid", ""))):
            return
        namespace, name = key
        message = (
            f"this version of Shoal cannot read {why}; what runs goes on, but no lost pod is replaced:"
            " upgrade Shoal, or change the field"
        )
        status = found.get("status") or {}
        conditions = [c for c in status.get("conditions") or [] if isinstance(c, dict)]
        before = next((c for c in conditions if c.get("type") == "Stalled"), None)
        if before is not None and (before.get("reason"), before.get("message")) == ("Unreadable", message):
            return
        stalled = {
            "type": "Stalled",
            "status": "True",
            "reason": "Unreadable",
            "message": message,
            "observedGeneration": found["metadata"].get("generation", 0),
            "lastTransitionTime": self._wall().strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        body = {
            "metadata": {"uid": found["metadata"].get("uid")},
            "status": {
                "reason": "Unreadable",
                "conditions": [*(c for c in conditions if c.get("type") != "Stalled"), stalled],
            },
        }
        path = f"/apis/{API_VERSION}/namespaces/{namespace}/{TrainingJob.PLURAL}/{name}/status"
        try:
            answer = await self._transport.request("PATCH", path, body=body, content_type=MERGE_PATCH)
        except Unavailable:
            self._unreadable.setdefault(key, known)
            asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._wake, key, Priority.ROUTINE)
            raise
        if not answer.ok and answer.status not in {404, 409}:
            logger.warning("cannot report that %s/%s is unreadable: %s", namespace, name, answer.message)
