"""The job's Workload in Kueue: made before the pods that it stands for, and told of them.

Quota is given back when no pod is left that uses it: by requeueing the Workload if Kueue evicted it, by deleting it if
the job is suspended or asks for something else.
"""

from __future__ import annotations

from typing import Literal

from shoal.manifests.workload import stands_for, workload
from shoal.policy.actions import Action, CreateWorkload, DeleteWorkload, RequeueWorkload, TellWorkload
from shoal.policy.decide.admission import refused_recently
from shoal.policy.decide.members import ByIndex, every
from shoal.policy.facts.read import Facts

Told = tuple[Literal["True", "False"], str, str]
FINISHED, PODS_READY = "Finished", "PodsReady"
_READY: Told = ("True", "Started", "all pods have been ready")
_NOT_READY: Told = ("False", "WaitForStart", "not all pods have been ready")


def keep_workload(facts: Facts, servers: ByIndex, workers: ByIndex) -> list[Action]:
    """What is done about the Workload of an active job."""
    quota, suspend = facts.quota, facts.job.spec.suspend
    current = None if suspend else quota.current
    unwanted = (*quota.outdated, *((quota.current,) if suspend and quota.current else ()))
    used = bool(facts.seen.in_flight) or any(not pod.ended for pod in facts.seen.pods)
    if unwanted:
        free = not (quota.wanted and used)
        return [DeleteWorkload(each.metadata.name, each.metadata.uid) for each in unwanted if free]
    if current is None:
        return _make(facts) if quota.wanted and not suspend else []
    name, uid = current.metadata.name, current.metadata.uid
    if current.says("Evicted") and current.says("QuotaReserved"):
        return [] if used else [RequeueWorkload(name, uid)]
    # Once they were ready, a lost worker is replaced, and no reason for Kueue to evict the others.
    ready = quota.lacks is None and (current.says(PODS_READY) or _all_ready(facts, servers, workers))
    if ready == current.says(PODS_READY):
        return []
    return [TellWorkload(name, uid, PODS_READY, *(_READY if ready else _NOT_READY))]


def finish_workload(facts: Facts) -> list[Action]:
    """Tell Kueue that a job is finished, which gives its quota back. Workloads that it does not use are deleted."""
    status = facts.job.status
    reason = "Succeeded" if status.phase == "Succeeded" else "Failed"
    words = f"the TrainingJob is finished: {status.reason}"
    return [
        TellWorkload(each.metadata.name, each.metadata.uid, FINISHED, "True", reason, words)
        if each.metadata.name == facts.quota.wanted
        else DeleteWorkload(each.metadata.name, each.metadata.uid)
        for each in facts.seen.workloads
        if not each.metadata.deletion_timestamp
        and not (each.metadata.name == facts.quota.wanted and each.says(FINISHED))
    ]


def _make(facts: Facts) -> list[Action]:
    seen, name = facts.seen, facts.quota.wanted
    there = any(each.metadata.name == name for each in seen.workloads)  # it is being deleted
    if there or seen.no_workloads or refused_recently(seen, name, facts.timers):
        return []
    return [CreateWorkload(name, workload(facts.job, seen.images, seen.platform))]


def _all_ready(facts: Facts, *roles: ByIndex) -> bool:
    job = facts.job
    active = (each.pod for each in every(*roles) if each.active)
    pods = (*active, *(each.pod for each in facts.at_rest))
    ready = sum(pod.ready for pod in pods if pod and pod.place and stands_for(job, pod.place))
    return ready >= job.spec.parameter_servers.replicas + job.spec.workers.min_replicas
