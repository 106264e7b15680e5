"""Deleting pods: those that are not wanted, those that ended and are written down, those stuck on lost machines."""

from __future__ import annotations

from datetime import timedelta

from shoal.api.kube import Pod
from shoal.policy.incarnations import OURS, OUTDATED, ByIndex, Incarnation
from shoal.policy.model import Action, DeletePod, Observation
from shoal.policy.times import parse_time
from shoal.policy.verdict import ENDED, PodOutcome


def clean(seen: Observation, roles: list[ByIndex], wake_after: list[float]) -> list[Action]:
    """Deletions that are due while the job goes on."""
    actions: list[Action] = []
    for role in roles:
        for of in role.values():
            for holder in of:
                if holder.pod is None:
                    continue
                if holder.pod.metadata.deletion_timestamp:
                    actions += force(seen, holder, holder.pod, wake_after)
                elif _is_due(seen, holder, of):
                    actions.append(_delete(holder.pod))
    return actions


def _is_due(seen: Observation, holder: Incarnation, of: tuple[Incarnation, ...]) -> bool:
    last_failure = seen.job.status.last_failure
    assert holder.pod is not None
    if holder.verdict.outcome in ENDED:
        kept_for_its_logs = last_failure is not None and last_failure.pod == holder.pod.metadata.name
        return holder.settled and not kept_for_its_logs
    if not holder.slot.cause:
        return False
    if holder.slot.cause == OUTDATED:
        return holder.settled  # written down first, or its absence would look like a loss
    if holder.verdict.outcome is PodOutcome.LOST or holder.slot.cause in OURS or holder.place.role == "ps":
        return True
    # It works on until its replacement does. The newest record need not be that: it may be of one taken back.
    return any(other.running for other in of if other.place > holder.place)


def force(seen: Observation, holder: Incarnation, pod: Pod, wake_after: list[float]) -> list[Action]:
    """Delete by force what is Terminating on a machine that is gone: nobody there will ever confirm it."""
    deadline = parse_time(pod.metadata.deletion_timestamp)
    if deadline is None or holder.verdict.outcome is not PodOutcome.LOST:
        return []
    asked = deadline - timedelta(seconds=pod.metadata.deletion_grace_period_seconds or 0)
    due = asked + timedelta(seconds=seen.job.spec.run_policy.force_delete_after_seconds)
    left = (due - seen.now).total_seconds()
    if left > 0:
        wake_after.append(left)
        return []
    return [DeletePod(pod.metadata.name, pod.metadata.uid, grace_seconds=0)]


def _delete(pod: Pod) -> DeletePod:
    return DeletePod(pod.metadata.name, pod.metadata.uid)


def at_the_end(seen: Observation) -> list[Action]:
    """Deletions when the job has ended, as cleanPodPolicy says."""
    policy = seen.job.spec.run_policy.clean_pod_policy
    if policy == "None":
        return []
    return [
        _delete(pod)
        for pod in seen.pods
        if not pod.metadata.deletion_timestamp
        and (policy == "All" or pod.status.phase not in {"Failed", "Succeeded"})
    ]
