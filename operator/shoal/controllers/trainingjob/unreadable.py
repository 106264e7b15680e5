"""Tells the owner of a TrainingJob that this operator cannot read it: on the object itself, not only in a log.

It happens where the CRD is newer than the operator, or was changed by hand, and of arguments that are too large, which
the API server cannot count. What runs goes on, and nothing of it is replaced (`Observation.unread`): the loss could not
be recorded, and what the job is to be is not known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from shoal.api.base import API_VERSION, Condition
from shoal.api.training_job import TrainingJob
from shoal.cluster.transport import MERGE_PATCH, Transport
from shoal.controllers.state import Wake
from shoal.errors import Unavailable
from shoal.policy.common.wording import short
from shoal.runtime.backoff import pause
from shoal.runtime.controller import Key
from shoal.runtime.work_queue import Priority

logger = logging.getLogger(__name__)

REASON = "Unreadable"
LONGEST_PAUSE = 300.0
"""Seconds between tries to tell of a job: the API server may refuse it for long, as without a role."""
MOST_WHY = 500
"""Characters of why: whoever writes an object chooses how long its fields are called."""


@dataclass(frozen=True)
class _Complaint:
    """What is to be told of a job. A standby keeps it for hours, and a job may be as large as etcd takes."""

    uid: str
    generation: int
    message: str
    conditions: Sequence[Mapping[str, Any]]
    """The others that it has."""
    failures: int = 0
    """So many tries to tell it failed, in a row."""


class Complaints:
    """Takes jobs that cannot be read, and writes the condition Stalled to them.

    `unread`: whether the job with this uid still cannot be: it has not become readable, nor is it gone.
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
        self._untold: dict[Key, _Complaint] = {}

    def hear(self, found: Mapping[str, Any], why: str) -> Key:
        """Take an object as it was listed or watched; returns its key."""
        meta, status = found.get("metadata") or {}, found.get("status") or {}
        key = str(meta.get("namespace", "")), str(meta.get("name", ""))
        conditions = [each for each in status.get("conditions") or [] if isinstance(each, dict)]
        before = next((each for each in conditions if each.get("type") == "Stalled"), {})
        message = (
            f"this version of Shoal cannot read {short(why, MOST_WHY)}; what runs goes on, but no lost pod is replaced:"
            " change the field (one that is immutable, in a new job), or upgrade Shoal if it is of a newer one"
        )
        if key not in self._untold:
            self._untold = {known: each for known, each in self._untold.items() if self._unread(each.uid)}
        self._untold.pop(key, None)
        uid, generation = str(meta.get("uid", "")), meta.get("generation", 0)
        told = before.get("reason"), before.get("message"), status.get("observedGeneration", 0)
        if told != (REASON, message, generation):  # who waits for its health reads no status of an older one
            others = [each for each in conditions if each is not before]
            self._untold[key] = _Complaint(uid, generation, message, others)
        return key

    def keys(self) -> list[Key]:
        """The jobs that nobody was told of yet: a process that does not lead only hears."""
        return list(self._untold)

    def about(self, key: Key) -> bool:
        """Whether there is something to complain about."""
        return key in self._untold

    async def complain(self, key: Key) -> None:
        """Write the condition. Where that fails, the key is woken later."""
        if (known := self._untold.pop(key, None)) is None or not self._unread(known.uid):
            return
        namespace, name = key
        generation = known.generation
        stalled = Condition.after(
            None, "Stalled", True, REASON, known.message, generation=generation, now=self._wall()
        )
        conditions = [*known.conditions, stalled.model_dump(mode="json", by_alias=True)]
        body = {
            "metadata": {"uid": known.uid},
            "status": {"observedGeneration": generation, "reason": REASON, "conditions": conditions},
        }
        path = f"/apis/{API_VERSION}/namespaces/{namespace}/{TrainingJob.PLURAL}/{name}/status"
        try:
            answer = await self._transport.request("PATCH", path, body=body, content_type=MERGE_PATCH)
            answer.accept(404, 409)  # it is gone, or has changed: then it is heard of again
        except Unavailable as error:
            failures = known.failures + 1
            self._untold.setdefault(key, replace(known, failures=failures))
            seconds = pause(failures, error, LONGEST_PAUSE)
            asyncio.get_running_loop().call_later(seconds, self._wake, key, Priority.ROUTINE)
            words = "cannot report that %s/%s is unreadable: %s; retrying in %.2f s"
            logger.warning(words, namespace, name, error, seconds)
