"""Deletes pods that are no longer wanted, that ended and are recorded, or that are stuck on lost nodes.

And the disruption budget of a job without parameter servers, which monitoring would report as violated.
"""

from __future__ import annotations

from datetime import timedelta

from shoal.api.kube import Pod
from shoal.policy import names
from shoal.policy.incarnations import OUTDATED, OWN_CAUSES, ByIndex, Incarnation
from shoal.policy.model import Action, DeleteDisruptionBudget, DeletePod, Observation
from shoal.policy.timers import Timers
from shoal.policy.times import parse_time
from shoal.policy.verdict import ENDED, PodOutcome


def clean(seen: Observation, roles: tuple[ByIndex, ...], timers: Timers) -> list[Action]:
    """Deletions that are due while the job is active."""
    actions: list[Action] = []
    for role in roles:
        for incarnations in role.values():
            for each in incarnations:
                if each.pod is None:
                    continue
                if each.pod.metadata.deletion_timestamp:
                    actions += force(seen, each, each.pod, timers)
                elif _is_due(seen, each, incarnations):
                    actions.append(_delete(each.pod))
    return actions


def _is_due(seen: Observation, each: Incarnation, incarnations: tuple[Incarnation, ...]) -> bool:
    last_failure = seen.job.status.last_failure
    assert each.pod is not None
    if each.verdict.outcome in ENDED:
        # Not while a sidecar runs: the pod would keep its accelerator.
        is_last_failure = last_failure is not None and last_failure.pod == each.pod.metadata.name
        kept_for_its_logs = is_last_failure and each.pod.ended
        return each.recorded and not kept_for_its_logs
    if not each.slot.cause:
        return False
    if each.slot.cause == OUTDATED:
        return each.recorded  # unrecorded, its absence would count as a disruption
    if each.verdict.outcome is PodOutcome.LOST or each.slot.cause in OWN_CAUSES or each.place.role == "ps":
        return True
    # A draining worker keeps working until a replacement runs, which need not be the newest incarnation.
    return any(other.running for other in incarnations if other.place > each.place)


def force(seen: Observation, each: Incarnation, pod: Pod, timers: Timers) -> list[Action]:
    """Force-delete a pod that is Terminating on a lost node, where no kubelet can confirm its end."""
    deadline = parse_time(pod.metadata.deletion_timestamp)
    if deadline is None or each.verdict.outcome is not PodOutcome.LOST:
        return []
    requested = deadline - timedelta(seconds=pod.metadata.deletion_grace_period_seconds or 0)
    patience = timedelta(seconds=seen.job.spec.run_policy.force_delete_after_seconds)
    if timers.pending(requested + patience):
        return []
    return [DeletePod(pod.metadata.name, pod.metadata.uid, grace_seconds=0)]


def budget(seen: Observation) -> list[Action]:
    """The deletion of the disruption budget, of a job that is suspended or finished, once no server runs."""
    name = names.budget_name(seen.job)
    servers = (pod for pod in seen.pods if (place := names.place_of(pod)) is not None and place.role == "ps")
    never_created = seen.job.status.start_time is None and name not in seen.existing
    if never_created or name in seen.absent or any(not pod.ended for pod in servers):
        return []
    return [DeleteDisruptionBudget(name)]


def _delete(pod: Pod) -> DeletePod:
    return DeletePod(pod.metadata.name, pod.metadata.uid)


def at_the_end(seen: Observation) -> list[Action]:
    """Deletions of a finished job, according to cleanPodPolicy."""
    policy = seen.job.spec.run_policy.clean_pod_policy
    if policy == "None":
        return []
    return [
        _delete(pod)
        for pod in seen.pods
        if not pod.metadata.deletion_timestamp and (policy == "All" or not pod.ended)
    ]
