"""What a worker of each job asks for, as its template says: read once, and again when the job's spec is another.

A template has up to 128 KiB, and a pool a thousand jobs: nothing else is done while all of them are read. And whoever
may edit a job chooses what is in it: one that cannot be read is of no concern to others, who share its pools.
"""

from __future__ import annotations

import logging

from shoal.api.amounts import Amounts
from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import MOST_RESOURCES
from shoal.api.training_job import TrainingJob
from shoal.manifests.pods import worker_requests

logger = logging.getLogger(__name__)


class Asked:
    """Of jobs that exist: `forget` those that are gone."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, dict[int, Amounts | None]]] = {}
        """By uid, the generation, and by how many GPUs a node of the pool has: nothing else of a pool matters."""

    def of(self, job: TrainingJob, pool: CapacityPool) -> Amounts | None:
        """What a worker asks for in this pool; None if that cannot be read."""
        uid, generation = job.metadata.uid, job.metadata.generation
        known = self._known.get(uid)
        if known is None or known[0] != generation:
            known = self._known[uid] = generation, {}
        gpus = pool.spec.accelerator.count if pool.spec.accelerator is not None else 0
        if gpus not in known[1]:
            known[1][gpus] = _read(job, pool)
        return known[1][gpus]

    def forget(self, uid: str) -> None:
        """Forget a job."""
        self._known.pop(uid, None)


def _read(job: TrainingJob, pool: CapacityPool) -> Amounts | None:
    try:
        return worker_requests(job, pool)[:MOST_RESOURCES]
    except Exception:  # broad: nobody's pool must stand still for a template that somebody else may edit
        logger.exception(
            "what workers of job %s/%s ask for cannot be read", job.metadata.namespace, job.metadata.name
        )
        return None
