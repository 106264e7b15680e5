"""What an object belongs to: a pod to the run of a job, to a node and a pool; a Service to a job.

Whoever may make a pod in any namespace chooses its labels, so what they name may not exist, or may not be the owner.
"""

from __future__ import annotations

from collections.abc import Hashable

from shoal.api.kube import DisruptionBudget, Pod, Service
from shoal.api.kueue import Workload
from shoal.api.labels import JOB, POOL, RoleName
from shoal.api.speed_profile import SpeedProfile
from shoal.controllers.sharing import Run, Tenant
from shoal.manifests.names import pod_name
from shoal.policy.facts.waits import NEEDS_A_NODE, wait_of
from shoal.runtime.controller import Key

Owned = Pod | Service | DisruptionBudget | Workload


def job_named_by(owned: Owned) -> Key | None:
    """The job that an object's label names."""
    name = owned.metadata.labels.get(JOB)
    return (owned.metadata.namespace, name) if name else None


def jobs_named_by(old: Owned | None, new: Owned | None) -> set[Key]:
    """The job of an object, and the one that it was of."""
    return {key for each in (old, new) if each is not None and (key := job_named_by(each)) is not None}


def run_of(pod: Pod) -> Run | None:
    """The run that a pod says it is of: its labels, its owner and its name agree. See `ClusterState.job_of`."""
    key, uid, place = job_named_by(pod), pod.metadata.controller_uid, pod.place
    if key is None or not uid or place is None or pod.metadata.name != pod_name(key[1], place):
        return None
    return key, uid


def tenant(pod: Pod | None) -> Tenant | None:
    """The node on which a pod for a pool is, and the run that it is of."""
    if pod is None or pod.ended or not (node := pod.spec.node_name) or not pod.metadata.labels.get(POOL):
        return None
    run = run_of(pod)
    return (node, run) if run is not None else None


def host(role: RoleName, pod: Pod) -> str | None:
    """The node of a pod that is of a run and has this role."""
    here = pod.place is not None and pod.place.role == role
    return pod.spec.node_name if here and not pod.ended and run_of(pod) else None


def awaited_pool(pod: Pod) -> str | None:
    """The pool of which a pod that is of a run needs a node, if it has none."""
    pool = pod.metadata.labels.get(POOL)
    return pool if pool and wait_of(pod) in NEEDS_A_NODE and run_of(pod) else None


def described(profile: SpeedProfile) -> Hashable | None:
    """The model that a user describes in a profile, as (namespace, fingerprint)."""
    prior = profile.spec.model
    return (profile.metadata.namespace, prior.fingerprint) if prior and prior.fingerprint else None
