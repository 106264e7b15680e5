"""Which nodes of each pool the jobs have, so that all of them together keep to `limits.nodes`.

A job plans for itself when it is reconciled, from a proposal that is made for all jobs together. But others leave their
nodes late: until then, these are not to be had. What was decided counts before it is in the cache, the workers that are
made next included, so that two jobs that are reconciled at the same moment never take the same node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shoal.api.planning_status import PlanStatus
from shoal.api.training_job import TrainingJob
from shoal.policy.model import Plan


def holdings(job: TrainingJob, decided: Plan | None = None) -> Counter[str]:
    """Nodes by pool that a job's workers have or plan to have. `decided`: a newer plan than its status.

    Of a plan whose pods cannot be made or get no node, or may be held back by a queue when they are made, those of the
    others. Of another controller's job, none: its status may be that of its twin in another cluster, whose pools have
    the same names.
    """
    if not job.spec.ours:
        return Counter()
    status = decided.status if decided else job.status
    plan = status.plan or PlanStatus()
    made = decided.nodes if decided else None
    slots = plan.have_nodes(status.worker_nodes) if made is None else Counter(made)
    wants_none = status.finished or job.spec.suspend or job.metadata.deletion_timestamp is not None
    if job.spec.elasticity.mode != "Auto" or wants_none:
        return slots
    wanted = plan.have_nodes(plan.pools)
    if job.spec.run_policy.scheduling_policy.queue:
        wanted -= status.to_begin(slots)
    return slots | wanted


class Claims:
    """The holdings of all jobs and their sum, kept as jobs change: there is one question about it in every plan."""

    def __init__(self) -> None:
        self._stored: dict[str, Counter[str]] = {}
        self._decided: dict[str, Counter[str]] = {}
        self._claims: dict[str, Counter[str]] = {}
        self._total: Counter[str] = Counter()

    def see(self, old: TrainingJob | None, new: TrainingJob | None) -> None:
        """Take a change of a job in the cache; `new`: None when it is gone."""
        if (seen := new or old) is None:
            return
        uid = seen.metadata.uid
        has_pools = new is not None and (new.spec.workers.pools or new.status.pool_usage)
        self._stored[uid] = holdings(new) if new is not None and has_pools else Counter()
        if new is None or new.status.finished or new.metadata.deletion_timestamp is not None:
            self._decided.pop(uid, None)
        self._add_up(uid)

    def decide(self, job: TrainingJob, decided: Plan) -> None:
        """Remember what was decided for a job, until it is decided again."""
        uid = job.metadata.uid
        # Also of a job whose spec names no pools any more: it leaves those that it had.
        if (job.spec.workers.pools or uid in self._decided) and not job.status.finished:
            self._decided[uid] = holdings(job, decided)
            self._add_up(uid)

    def of_others(self, job: TrainingJob) -> Mapping[str, int]:
        """Nodes by pool of all jobs but this one."""
        return self._total - self._claims.get(job.metadata.uid, Counter())

    def _add_up(self, uid: str) -> None:
        self._total -= self._claims.pop(uid, Counter())
        if claim := self._stored.get(uid, Counter()) | self._decided.get(uid, Counter()):
            self._claims[uid] = claim
            self._total += claim
        else:
            self._stored.pop(uid, None)
