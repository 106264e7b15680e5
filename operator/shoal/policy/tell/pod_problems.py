"""Pods that cannot start or end, and what a user can do about it."""

from __future__ import annotations

import re
from datetime import timedelta

from shoal.api.kube import Pod
from shoal.api.labels import POOL
from shoal.api.training_job_status import TrainingProgress
from shoal.manifests.names import gang_size
from shoal.manifests.platforms import is_spot
from shoal.policy.common.timers import Timers
from shoal.policy.common.times import parse_time
from shoal.policy.common.wording import short
from shoal.policy.decide.admission import missing_pod_group
from shoal.policy.facts.in_vain import PATIENCE, asks_for_others
from shoal.policy.facts.read import Facts
from shoal.policy.model import Reason
from shoal.policy.tell.not_starting import VOLUMES_ARE_LATE, not_starting
from shoal.words import no_scheduler
from shoal_trainer.contract import CONTROL_PORT

UNSCHEDULABLE_PATIENCE = timedelta(seconds=60)
"""An unschedulable pod is reported after this time: a growing node pool needs a while."""

NOTHING_BEFORE = min(UNSCHEDULABLE_PATIENCE, VOLUMES_ARE_LATE)
"""Of a pod that only waits, for its node or for its containers, nothing is said before this time."""

DELETION_PATIENCE = timedelta(seconds=60)
"""A pod that still exists is reported this long after its grace period: unmounting volumes takes a while."""

_IMAGE = frozenset(
    {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
_ABSENT_CLAIM = re.compile(r'persistentvolumeclaim "[^"]*" not found')
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_MOST_IMPORTANT_FIRST = (
    "ImagePullFailed",
    "ContainerConfigError",
    "CrashLooping",
    "NotStarting",
    "Unschedulable",
    "Queued",
    "StuckTerminating",
)


def find(facts: Facts) -> Reason | None:
    """The most important problem, if there is one."""
    now = facts.seen.now
    troubled, first = list[Pod](), None
    for pod in facts.seen.pods:
        if pod.untroubled:
            continue
        since = pod.waits_since
        if since is None or since + NOTHING_BEFORE <= now:
            troubled.append(pod)
        elif first is None or since < first:  # as most of a job that ramps up
            first = since
    if first is not None:
        facts.timers.pending(first + NOTHING_BEFORE)
    problems = [problem for pod in troubled if (problem := _problem_of(pod, facts)) is not None]
    return min(problems, key=lambda problem: _MOST_IMPORTANT_FIRST.index(problem.reason), default=None)


def _problem_of(pod: Pod, facts: Facts) -> Reason | None:
    if pod.metadata.deletion_timestamp:
        return _deletion_problem(pod, facts.timers)
    if pod.ended:
        return None
    return _container_problem(pod) or _scheduling_problem(pod, facts) or not_starting(pod, facts)


def _container_problem(pod: Pod) -> Reason | None:
    for container in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        waiting = container.state.waiting
        if waiting is None:
            continue
        # While kubelet pauses it puts words before the error: the condition would change with each try.
        message = short(waiting.message.rpartition(": ErrImagePull: ")[2], 300)
        where = f"pod {pod.metadata.name}, container {container.name}"
        if waiting.reason in _IMAGE:
            hint = "check the image in the job's template, and imagePullSecrets if the registry is private"
            return Reason("ImagePullFailed", f"{where}: the image cannot be pulled: {message}; {hint}")
        if waiting.reason in _CONFIG:
            hint = "check the volumes, Secrets, ConfigMaps and securityContext in the job's template"
            return Reason(
                "ContainerConfigError", f"{where}: the container cannot be started: {message}; {hint}"
            )
        if waiting.reason == "CrashLoopBackOff":
            hint = f"see `kubectl logs {pod.metadata.name} -c {container.name} --previous`"
            return Reason("CrashLooping", f"{where}: the container crashes repeatedly; {hint}")
    return None


def _deletion_problem(pod: Pod, timers: Timers) -> Reason | None:
    deadline = parse_time(pod.metadata.deletion_timestamp)
    if deadline is None or timers.pending(deadline + DELETION_PATIENCE):
        return None
    where = f" and the kubelet of node {pod.spec.node_name}" if pod.spec.node_name else ""
    words = f"should have been gone by {deadline:%H:%M:%S} UTC: check its finalizers{where}"
    return Reason("StuckTerminating", f"pod {pod.metadata.name} {words}. The job does not wait for it.")


def _scheduling_problem(pod: Pod, facts: Facts) -> Reason | None:
    scheduled = pod.condition("PodScheduled")
    created = pod.created
    if created is None or pod.spec.node_name or (scheduled is not None and scheduled.status != "False"):
        return None
    if scheduled is None:
        if facts.timers.pending(created + UNSCHEDULABLE_PATIENCE):
            return None
        return Reason("Unschedulable", f"pod {pod.metadata.name}: {no_scheduler(pod.spec.scheduler_name)}")
    if pod.queued:
        return Reason("Queued", "pods wait for the queue to admit them")
    where = f"pod {pod.metadata.name}: {short(scheduled.message, 300)}"
    if absent := _ABSENT_CLAIM.search(scheduled.message):  # the scheduler may say the end of it twice
        hint = "create this PersistentVolumeClaim in the job's namespace, or change spec.storage.volumeClaim"
        return Reason("Unschedulable", f"pod {pod.metadata.name}: {absent[0]}; {hint}")
    if facts.timers.pending(created + UNSCHEDULABLE_PATIENCE):
        return None
    if "unbound immediate PersistentVolumeClaims" in scheduled.message:
        return Reason("Unschedulable", f"{where}; {_unbound(facts)}")
    if size := _awaited_gang(facts):
        # The scheduler's own words change with each try and name no resource.
        where = (
            f"the pods of the gang wait until there is room for {size} of them together: all parameter servers and"
            " workers.minReplicas, which may be lowered"
        )
    return Reason("Unschedulable", f"{where}; {_needs(pod, facts)}")


def _awaited_gang(facts: Facts) -> int:
    """The size of the job's gang where less of it is placed; 0 otherwise, and without PodGroups."""
    if facts.job.spec.run_policy.scheduling_policy.gang != "PodGroup" or missing_pod_group(facts.seen):
        return 0
    size = gang_size(facts.job)
    placed = sum(bool(pod.spec.node_name) and not pod.ended for pod in facts.seen.pods)
    return size if placed < size else 0


def _unbound(facts: Facts) -> str:
    """What a claim needs that has no volume: no node would help."""
    claim = facts.job.spec.storage.volume_claim
    which = f" {claim.name}" if claim else ""
    return (
        f"`kubectl describe pvc{which}` says why it has no volume: where no StorageClass is the default, the claim has"
        " to name one (storageClassName)"
    )


def _needs(pod: Pod, facts: Facts) -> str:
    """What the pod needs that no node has."""
    spec = facts.job.spec
    servers = pod.place is not None and pod.place.role == "ps"
    role, field = (spec.parameter_servers, "parameterServers") if servers else (spec.workers, "workers")
    if pool := pod.metadata.labels.get(POOL):
        there = facts.seen.pools.get(pool)
        if not servers and there is not None and there.status.nodes and asks_for_others(pod):
            return (
                f"no node of CapacityPool {pool} is as the pod asks (nodeSelector and affinity of workers.template,"
                f" excludedNodes): after {PATIENCE.total_seconds() / 60:.0f} minutes its node is left to other jobs"
            )
        return f"the pod needs a node of CapacityPool {pool} with room for its requests"
    if role.capacity == "Any":
        return "the pod needs a node with room for its requests"
    if role.capacity == "OnDemand":
        return (
            "the pod needs a node without a spot label with room for its requests; on other nodes it runs with"
            f" {field}.capacity: Any"
        )
    hint = "" if any_spot(facts) else " (no node of this cluster has a known spot label)"
    return (
        f"the pod needs a spot node with room for its requests{hint}; on other nodes it runs with"
        f" {field}.capacity: Any"
    )


def any_spot(facts: Facts) -> bool:
    """Whether any node has a spot label."""
    return any(is_spot(node, facts.seen.platform) for node in facts.seen.nodes.values())


UNREACHABLE_SECONDS = 60.0


def unreachable(facts: Facts) -> Reason | None:
    """Degraded: the operator cannot read the report of parameter server 0, whose pod runs."""
    server = facts.coordinator_pod
    if facts.seen.unreachable_seconds < UNREACHABLE_SECONDS or server is None:
        return None
    # The kubelet beside it says whether it is ready, and no NetworkPolicy keeps that out.
    if not server.ready:
        message = (
            "parameter server 0 runs and does not serve: it reads the job's storage first, and waits for it"
            f" ({short(facts.seen.unreachable_because, 500)}); `kubectl logs {server.metadata.name} -c ps` says more"
        )
        return Reason("WaitingForStorage", message)
    # Not the seconds: a condition that changes is written at once.
    message = (
        f"the operator cannot reach port {CONTROL_PORT} of parameter server 0, so silent workers are not noticed and"
        " the progress is not known; check the NetworkPolicies of the job's namespace"
    )
    if because := facts.seen.unreachable_because:
        message = f"{message} ({short(because, 300)})"
    return Reason("CoordinatorUnreachable", message)


SNAPSHOTS_FAIL_SECONDS = 300.0
"""Longer than a large snapshot takes, or a storage is restarted."""


def snapshots_fail(facts: Facts) -> Reason | None:
    """Degraded: the job trains, and for minutes no snapshot of it could be saved."""
    report = facts.report
    if report is None or facts.suspended or report.snapshots_fail_seconds < SNAPSHOTS_FAIL_SECONDS:
        return None
    because = report.snapshots_fail_because or "one is being written all this time"
    message = (
        f"no snapshot could be saved for {SNAPSHOTS_FAIL_SECONDS / 60:.0f} minutes and longer: {short(because, 500)};"
        " training goes on, and what it learns since is lost with the parameter servers"
    )
    return Reason("SnapshotsFail", message)


def no_progress(facts: Facts, training: TrainingProgress) -> Reason | None:
    """Degraded: no training step completed within progressDeadlineSeconds."""
    job = facts.job
    limit, start = job.spec.run_policy.progress_deadline_seconds, job.status.start_time
    if limit is None or start is None or facts.suspended:
        return None
    suspended = job.status.condition("Suspended")
    resumed = start
    if suspended is not None:
        resumed = facts.seen.now if suspended.status == "True" else suspended.last_transition_time
    since = max(training.last_progress_time or start, start, resumed)
    if facts.timers.pending(since + timedelta(seconds=limit)):
        return None
    # Not the message itself: it may contain seconds, and a condition that changes is written at once.
    see = "; see status.training.message" if training.message else ""
    message = f"no training step completed for {limit} s (runPolicy.progressDeadlineSeconds){see}"
    return Reason("NoProgress", message)
