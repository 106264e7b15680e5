"""What Kueue says of a job that is queued as a Workload: whether the job is held, as if it were suspended, and where.

A job begins only with quota. Once it has begun, it is held only when Kueue says so (`Evicted`, `QuotaReserved` False),
or when it asks for something else: that its Workload is not seen, or not decided about yet, says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.api.kueue import Workload
from shoal.api.labels import RoleName
from shoal.manifests.names import workload_name
from shoal.manifests.placement import Assigned
from shoal.manifests.workload import assigned
from shoal.policy.model import Observation, Reason

PENDING = "Pending"
ROLES: tuple[RoleName, ...] = ("ps", "worker")
_CHANGED = Reason("Changed", "the job asks for something else: it is queued again when its pods have ended")


@dataclass(frozen=True)
class Quota:
    """The job's Workload, and what follows from it. All empty for a job that has none."""

    wanted: str = ""
    """The name of the Workload that the job is to have; empty: none."""
    current: Workload | None = None
    """That Workload."""
    outdated: tuple[Workload, ...] = ()
    """Workloads of the job that stand for nothing any more."""
    lacks: Reason | None = None
    """Why it is not known to have quota; None: it has."""
    held: bool = False
    """Whether the job may have no pods for that."""
    assigned: Mapping[RoleName, Assigned] = field(default_factory=dict)
    """What the admission says about the pods that it is for."""


def quota(seen: Observation) -> Quota:
    """What is known of the job's quota."""
    job, policy = seen.job, seen.job.spec.run_policy.scheduling_policy
    wanted = workload_name(job) if policy.queue_as == "Workload" else ""
    if not wanted and not seen.workloads:
        return Quota()
    there = [each for each in seen.workloads if not each.metadata.deletion_timestamp]
    current = next((w for w in there if w.metadata.name == wanted and not w.says("Finished")), None)
    outdated = tuple(w for w in there if w is not current)
    if not wanted:
        return Quota(outdated=outdated)
    found = ((role, assigned(current, role, seen.flavors)) for role in ROLES) if current else ()
    places = {role: where for role, where in found if where is not None}
    asks = ROLES if job.spec.workers.min_replicas else ROLES[:1]
    placed = all(role in places for role in asks)
    said = _said(current, outdated) if not seen.no_workloads else None
    lacks = said or _unknown(seen, current, placed=placed)
    held = said is not None or (lacks is not None and not begun(seen))
    return Quota(wanted, current, outdated, lacks, held, places)


def begun(seen: Observation) -> bool:
    """Whether the job runs, or would but for its losses: it has pods, or had them when it was last told of."""
    if any(not pod.ended for pod in seen.pods):
        return True
    suspended = seen.job.status.condition("Suspended")
    return seen.job.status.start_time is not None and (suspended is None or suspended.status != "True")


def _said(current: Workload | None, outdated: tuple[Workload, ...]) -> Reason | None:
    """Why the job has no quota, if that is certain."""
    if outdated:
        return _CHANGED
    # An eviction is told until there is quota again, also while the Workload waits for it.
    for kind, status in (("QuotaReserved", "False"), ("Evicted", "True")):
        found = current.condition(kind) if current is not None else None
        if found is not None and found.status == status:
            return Reason(found.reason or PENDING, found.message or "Kueue gives no reason")
    return None


def _unknown(seen: Observation, current: Workload | None, *, placed: bool) -> Reason | None:
    """Why it is not known that the job has quota."""
    if seen.no_workloads:
        return Reason(PENDING, seen.no_workloads)
    if current is None:
        return Reason(PENDING, "the job's Workload does not exist yet")
    if not current.says("QuotaReserved"):
        return Reason(PENDING, "Kueue has not decided about the job's Workload yet")
    if not current.says("Admitted"):
        return Reason(PENDING, "quota is reserved, and not all admission checks are ready")
    return None if placed else Reason(PENDING, "the ResourceFlavors of the admission have not been read yet")
