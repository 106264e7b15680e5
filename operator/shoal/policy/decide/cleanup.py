"""Deletes pods that are no longer wanted, that ended and are recorded, or that are stuck on lost nodes.

And what a job without parameter servers needs no longer: its Services (there are only so many addresses), and its
disruption budget, which monitoring would report as violated.
"""

from __future__ import annotations

from datetime import timedelta

from shoal.api.kube import Pod
from shoal.manifests import names
from shoal.policy.actions import Action, DeleteDisruptionBudget, DeletePod, DeleteService
from shoal.policy.common.timers import Timers
from shoal.policy.common.times import parse_time
from shoal.policy.decide.members import MOVED, OUTDATED, OWN_CAUSES, ByIndex, Member
from shoal.policy.facts.read import Facts
from shoal.policy.facts.verdict import ENDED, PodOutcome


def clean(facts: Facts, roles: tuple[ByIndex, ...], timers: Timers) -> list[Action]:
    """Deletions that are due while the job is active."""
    actions: list[Action] = []
    for role in roles:
        for members in role.values():
            for each in members:
                if each.pod is None:
                    continue
                if each.pod.metadata.deletion_timestamp:
                    actions += force(facts, each.pod, each.verdict.outcome, timers)
                elif _is_due(facts, each, members):
                    actions.append(_delete(each.pod))
    return actions


def _is_due(facts: Facts, each: Member, members: list[Member]) -> bool:
    last_failure = facts.job.status.last_failure
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
    if each.verdict.outcome is PodOutcome.LOST or each.slot.cause in OWN_CAUSES:
        return True
    if each.place.role == "ps" and each.verdict.outcome is not PodOutcome.UNREACHABLE:
        return True
    if each.verdict.revocable and each.slot.cause != MOVED:
        return False  # whoever tainted the node evicts it, or changes its mind
    # A draining worker keeps working until a replacement runs, which need not be the newest incarnation. So does a
    # pod on a node that is not heard: it may be alive.
    return any(other.running for other in members if other.place > each.place)


def force(facts: Facts, pod: Pod, outcome: PodOutcome, timers: Timers) -> list[Action]:
    """Force-delete a pod that is Terminating on a lost node, where no kubelet can confirm its end.

    Where nodes cannot be read, a pod that exists so long after its grace period is on one. Its process is fenced by its
    incarnation, if it is alive after all.
    """
    deadline = parse_time(pod.metadata.deletion_timestamp)
    if deadline is None:
        return []
    patience = timedelta(seconds=facts.job.spec.run_policy.force_delete_after_seconds)
    if outcome in {PodOutcome.LOST, PodOutcome.UNREACHABLE}:
        due = deadline - timedelta(seconds=pod.metadata.deletion_grace_period_seconds or 0) + patience
    elif not facts.seen.node_signals and pod.spec.node_name:
        due = deadline + patience
    else:
        return []
    return [] if timers.pending(due) else [DeletePod(pod.metadata.name, pod.metadata.uid, grace_seconds=0)]


def stuck(facts: Facts) -> list[Action]:
    """The same of all pods: all that is done for a job that is being deleted, whose pods Kubernetes deletes."""
    return [
        action
        for role in facts.sightings.values()
        for each in role
        if each.pod is not None
        for action in force(facts, each.pod, each.verdict.outcome, facts.timers)
    ]


def give_back(facts: Facts) -> list[Action]:
    """The deletion of the Services and the disruption budget, of a job that is suspended or finished.

    Once no server runs. Empty: they are gone.
    """
    seen = facts.seen
    if any(each.pod is not None and not each.pod.ended for each in facts.sightings["ps"]):
        return []
    actions: list[Action] = [DeleteService(n, s.metadata.uid) for n, s in seen.services.items()]
    name = names.budget_name(facts.job)
    if name in seen.existing:
        actions.append(DeleteDisruptionBudget(name))
    return actions


def _delete(pod: Pod) -> DeletePod:
    return DeletePod(pod.metadata.name, pod.metadata.uid)


def at_the_end(facts: Facts) -> list[Action]:
    """Deletions of a finished job, according to cleanPodPolicy."""
    policy = facts.job.spec.run_policy.clean_pod_policy
    if policy == "None":
        return []
    return [
        _delete(pod)
        for pod in facts.seen.pods
        if not pod.metadata.deletion_timestamp and (policy == "All" or not (pod.ended or pod.ending))
    ]
