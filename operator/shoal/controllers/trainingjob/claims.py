"""Which nodes of each pool the jobs have, so that all of them together keep to `limits.nodes`.

A job plans for itself when it is reconciled, from a proposal that is made for all jobs together. But others leave their
nodes late: until then, these are not to be had. What was decided counts before it is in the cache, the workers that are
made next included, so that two jobs that are reconciled at the same moment never take the same node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from shoal.api.training_job import TrainingJob
from shoal.policy.model import CreatePod, Plan


def holdings(job: TrainingJob, decided: Plan | None = None) -> Counter[str]:
    """Nodes by pool that a job has or plans to have. `decided`: a newer plan than its status."""
    status = decided.status if decided else job.status
    places = {(slot.pool, slot.index) for slot in status.slots if slot.pool and slot.state != "Ended"}
    for action in decided.actions if decided else ():
        if isinstance(action, CreatePod) and action.role == "worker":
            places.add((action.pool, action.index))
    slots = Counter(pool for pool, _ in places if pool)  # a worker and its successor in one pool count once
    carried_out = job.spec.elasticity.mode == "Auto" and not (status.finished or job.spec.suspend)
    return slots | Counter(status.plan.pools) if carried_out and status.plan is not None else slots


class Claims:
    """The holdings of all jobs. `jobs`: those in the cache."""

    def __init__(self, jobs: Callable[[], Iterable[TrainingJob]]) -> None:
        self._jobs = jobs
        self._decided: dict[str, Counter[str]] = {}
        self._read: dict[str, tuple[str | None, Counter[str]]] = {}

    def decide(self, job: TrainingJob, decided: Plan) -> None:
        """Remember what was decided for a job, until it is decided again."""
        if job.spec.workers.pools:
            self._decided[job.metadata.uid] = holdings(job, decided)

    def of_others(self, job: TrainingJob) -> Mapping[str, int]:
        """Nodes by pool of all jobs but this one."""
        total: Counter[str] = Counter()
        there = set()
        for other in self._jobs():
            uid = other.metadata.uid
            there.add(uid)
            if uid != job.metadata.uid and (other.spec.workers.pools or other.status.pool_usage):
                total += self._of(other)
        self._decided = {uid: claim for uid, claim in self._decided.items() if uid in there}
        self._read = {uid: known for uid, known in self._read.items() if uid in there}
        return total

    def _of(self, job: TrainingJob) -> Counter[str]:
        uid, version = job.metadata.uid, job.metadata.resource_version
        known = self._read.get(uid)
        if known is None or known[0] != version:
            known = self._read[uid] = version, holdings(job)
        decided = self._decided.get(uid)
        return known[1] | decided if decided and not job.status.finished else known[1]
