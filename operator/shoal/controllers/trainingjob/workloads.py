"""What is read and written of a job's Workload in Kueue; it is created and deleted as the job's other objects are."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from shoal.api.kueue import KUEUE, Workload
from shoal.api.training_job import TrainingJob
from shoal.cluster.cache import Cache
from shoal.cluster.transport import Transport, apply
from shoal.controllers.trainingjob.objects import WORKLOADS, path
from shoal.errors import Refused, Unavailable
from shoal.manifests.objects import Manifest
from shoal.manifests.workload import (
    ADMISSION_MANAGER,
    POD_PRIORITY,
    WORKLOAD_PRIORITY,
    priority_class,
    requeued,
    told,
)
from shoal.policy.actions import TellWorkload

CLASSES = {
    WORKLOAD_PRIORITY["kind"]: f"/apis/{KUEUE}/workloadpriorityclasses",
    POD_PRIORITY["kind"]: "/apis/scheduling.k8s.io/v1/priorityclasses",
}


class Workloads:
    """The Workloads of all jobs. An answer that is news wakes the job, as the watch would."""

    def __init__(
        self, transport: Transport, cache: Cache[Workload], *, manager: str, wall: Callable[[], datetime]
    ) -> None:
        self._transport, self._cache, self._manager, self._wall = transport, cache, manager, wall

    async def with_priority(self, job: TrainingJob, manifest: Manifest) -> Manifest:
        """The manifest with the priority that the job's class has now; without a class, with the cluster's default.

        Raises:
            Refused: the class does not exist, or may not be read.
            Unavailable: it cannot be read now.
        """
        wanted = priority_class(job)
        path = CLASSES[(wanted or POD_PRIORITY)["kind"]]
        answer = await self._transport.request("GET", f"{path}/{wanted['name']}" if wanted else path)
        if answer.status in {403, 404}:
            raise Refused(answer.message)
        answer.accept()
        found: dict[str, Any] = json.loads(answer.body)
        if not wanted:
            defaults = [each for each in found["items"] if each.get("globalDefault")]
            found = min(defaults, key=lambda each: int(each["value"]), default={})
        priority: dict[str, Any] = {"priority": found.get("value", 0)}
        if found:
            priority["priorityClassRef"] = wanted or {**POD_PRIORITY, "name": found["metadata"]["name"]}
        return {**manifest, "spec": {**manifest["spec"], **priority}}

    async def tell(self, job: TrainingJob, action: TellWorkload) -> None:
        """Set one condition."""
        meta = {"name": action.name, "namespace": job.metadata.namespace, "uid": action.uid}
        body = told(meta, action.kind, action.status, action.reason, action.message, self._wall())
        await self._apply(job, action.name, body, f"{self._manager}-{action.kind}")

    async def confirm(self, job: TrainingJob, known: Workload) -> None:
        """Ask whether its quota is as it is known. Who may not ask believes the watch.

        Raises:
            Unavailable: it is gone, or has another.
        """
        answer = await self._transport.request("GET", path(job, WORKLOADS, known.metadata.name), urgent=True)
        answer.accept(403, 404)
        if answer.status == 404:
            self._cache.drop(known.metadata.uid)
        elif answer.ok:
            self._cache.put(found := Workload.model_validate_json(answer.body))
            if _quota(found) == _quota(known):
                return
        else:
            return
        raise Unavailable(f"{known.metadata.name} has changed since it was listed")

    async def requeue(self, job: TrainingJob, name: str, uid: str) -> None:
        """Give the quota back, if the Workload is still evicted and has some."""
        answer = await self._transport.request("GET", path(job, WORKLOADS, name))
        answer.accept(404)
        if answer.status == 404:
            self._cache.drop(uid)
            return
        if (body := requeued(json.loads(answer.body), self._wall())) is not None:
            await self._apply(job, name, body, ADMISSION_MANAGER)
        else:
            self._cache.put(Workload.model_validate_json(answer.body))

    async def _apply(self, job: TrainingJob, name: str, body: Manifest, manager: str) -> None:
        """Apply a status.

        Raises:
            Unavailable: another one has its name, or it changed at that moment: its watch says which.
        """
        answer = await apply(self._transport, f"{path(job, WORKLOADS, name)}/status", body, manager)
        answer.accept(404)
        if answer.ok:
            self._cache.put(Workload.model_validate_json(answer.body))
        else:
            self._cache.drop(body["metadata"]["uid"])


def _quota(known: Workload) -> tuple[object, ...]:
    """What of it says whether pods may be made, and where."""
    said = (known.says(kind) for kind in ("QuotaReserved", "Evicted", "Finished"))
    return known.metadata.uid, known.status.admission, *said
