"""Deletes pods that are no longer wanted, that ended and are recorded, or that are stuck on lost nodes.

Those that failed last are kept, as a batch/v1 Job keeps its own, so that people can read their logs.

And what a job without parameter servers needs no longer: its Services (there are only so many addresses), and its
disruption budget, which monitoring would report as violated.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from shoal.api.kube import Pod
from shoal.manifests import names
from shoal.policy.actions import Action, ConfirmAbsent, DeleteDisruptionBudget, DeletePod, DeleteService
from shoal.policy.common.timers import Timers
from shoal.policy.common.times import parse_time
from shoal.policy.decide.cordon import is_only_cordoned, next_server
from shoal.policy.decide.members import (
    FELL_BACK,
    MOVED,
    OUTDATED,
    OWN_CAUSES,
    ByIndex,
    Member,
    every,
    is_refutable,
)
from shoal.policy.decide.room import HELD_UP, counts_ended, in_the_way
from shoal.policy.decide.wanted import Wanted
from shoal.policy.facts.read import UNCONFIRMED, Facts
from shoal.policy.facts.verdict import ENDED, PodOutcome

MOST_KEPT = 10
"""Pods that failed and are kept, the newest: more than a job survives by default (`backoffLimit`). Only the last one
where a quota is exceeded: it may count all pods (`count/pods`). None where that keeps out a server."""


def clean(
    facts: Facts, wanted: Wanted, roles: tuple[ByIndex, ...], timers: Timers, *, most_kept: int = MOST_KEPT
) -> list[Action]:
    """Deletions that are due while the job is active. `most_kept`: of the pods that failed."""
    actions: list[Action] = []
    kept = set[str]() if counts_ended(facts) else _kept_for_their_logs(facts, roles, most_kept)
    at_once = in_the_way(facts) | {PodOutcome.LOST}
    for role in roles:
        for members in role.values():
            for each in members:
                if each.pod is None:
                    continue
                if each.pod.metadata.deletion_timestamp:
                    actions += force(facts, each.pod, each.verdict.outcome, timers)
                elif each.pod.metadata.name not in kept and _is_due(each, members, timers, at_once):
                    deletion = _delete(each.pod, each.slot.cause or each.verdict.reason)
                    if is_only_cordoned(facts, each):
                        if (successor := next_server(facts, wanted, each)) is None:
                            continue
                        deletion = replace(deletion, successor=successor)
                    actions.append(deletion)
    return actions


def _kept_for_their_logs(facts: Facts, roles: tuple[ByIndex, ...], most: int) -> set[str]:
    """The names of pods that are kept. None of which a sidecar runs: it would keep its accelerator."""
    ended = [each for each in every(*roles) if each.pod is not None and each.pod.ended]
    failed = sorted(
        (each.slot.ended_at or facts.now, each.pod.metadata.name)
        for each in ended
        if each.pod is not None and each.verdict.outcome is PodOutcome.FAILED
    )
    last = facts.job.status.last_failure  # perhaps of one that was killed too often, or ended too early
    lasts = {last.pod} & {each.pod.metadata.name for each in ended if each.pod} if last else set()
    return lasts | {name for _, name in failed[-most:]}


def _is_due(each: Member, members: list[Member], timers: Timers, at_once: frozenset[PodOutcome]) -> bool:
    """Whether to delete a pod now. `at_once`: of these outcomes, if it is to end."""
    assert each.pod is not None
    if each.verdict.outcome in ENDED:
        return each.recorded
    if not each.slot.cause:
        return False
    if each.slot.cause == OUTDATED:
        return each.recorded  # unrecorded, its absence would count as a disruption
    if each.verdict.outcome in at_once or each.slot.cause in OWN_CAUSES:
        return True
    later = [other for other in members if other.place > each.place]
    if each.place.role == "ps" and _holds_up(each, later, timers):
        return True
    if each.verdict.revocable and each.slot.cause != MOVED:
        return False  # whoever tainted the node evicts it, or changes its mind
    # A draining worker keeps working until a replacement runs, which need not be the newest incarnation. So does a
    # pod on a node that is not heard: it may be alive.
    return any(other.running for other in later)


def _holds_up(server: Member, later: list[Member], timers: Timers) -> bool:
    """Whether the next server of a shard does not start while this one is there.

    It waits for the final snapshot of one that can take it. Beside one that is not heard it starts, unless that has its
    place in a queue, or its volume (`ReadWriteOnce`). Kubernetes deletes such a pod after five minutes; where most
    nodes of a zone are not heard, it never does.
    """
    if server.verdict.outcome is not PodOutcome.UNREACHABLE:
        return True
    pod = later[-1].pod if later else None
    if pod is None or pod.running or not (pod.spec.node_name or pod.queued or pod.misses_volume):
        return False
    return pod.bound_at is not None and not timers.pending(pod.bound_at + HELD_UP)


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
    return [] if timers.pending(due) else [DeletePod(pod.metadata.name, pod.metadata.uid, 0, "Stuck")]


def ask_for_nodes(facts: Facts, *, of_ending: bool = False) -> list[Action]:
    """The questions whether nodes are gone that seem to be. `of_ending`: those of pods that are being deleted."""
    nodes = {
        each.slot.node
        for role in facts.sightings.values()
        for each in role
        if each.signal is not None and each.signal.reason == UNCONFIRMED.reason
        if not of_ending or (each.pod is not None and each.pod.metadata.deletion_timestamp)
    }
    return [ConfirmAbsent(name, "Node") for name in sorted(nodes)]


def stuck(facts: Facts) -> list[Action]:
    """The same of all pods: all that is done for a job that is being deleted, whose pods Kubernetes deletes."""
    return ask_for_nodes(facts, of_ending=True) + [
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


def _delete(pod: Pod, why: str) -> DeletePod:
    """The deletion of a pod; of one that is ended since it never ran, unless it does by now: watches may be late.

    Nor of one that waited for a node in vain, if it has it by now.
    """
    meta, unless_it_runs = pod.metadata, pod.place is not None and is_refutable(pod.place.role, why)
    version = meta.resource_version if unless_it_runs else ""
    return DeletePod(meta.name, meta.uid, why=why, version=version, homeless=why == FELL_BACK)


def at_the_end(facts: Facts) -> list[Action]:
    """Deletions of a finished job, according to cleanPodPolicy."""
    policy = facts.job.spec.run_policy.clean_pod_policy
    if policy == "None":
        return []
    return [
        _delete(pod, "Finished")
        for pod in facts.seen.pods
        if not pod.metadata.deletion_timestamp and (policy == "All" or not (pod.ended or pod.ending))
    ]
