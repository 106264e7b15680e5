"""Pods that cannot start or end, and what a user can do about it."""

from __future__ import annotations

from datetime import timedelta

from shoal.api.kube import Pod
from shoal.policy.model import Observation, Reason
from shoal.policy.names import place_of
from shoal.policy.timers import Timers
from shoal.policy.times import parse_time
from shoal.policy.wording import short

UNSCHEDULABLE_PATIENCE = timedelta(seconds=60)
"""An unschedulable pod is reported after this time: a growing node pool needs a while."""

DELETION_PATIENCE = timedelta(seconds=60)
"""A pod that still exists is reported this long after its grace period: unmounting volumes takes a while."""

_IMAGE = frozenset(
    {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_MOST_IMPORTANT_FIRST = (
    "ImagePullFailed",
    "ContainerConfigError",
    "CrashLooping",
    "Unschedulable",
    "StuckTerminating",
)


def find(seen: Observation, timers: Timers) -> Reason | None:
    """The most important problem, if there is one."""
    problems = [problem for pod in seen.pods if (problem := _problem_of(pod, timers)) is not None]
    return min(problems, key=lambda problem: _MOST_IMPORTANT_FIRST.index(problem.reason), default=None)


def _problem_of(pod: Pod, timers: Timers) -> Reason | None:
    if pod.metadata.deletion_timestamp:
        return _deletion_problem(pod, timers)
    if pod.ended:
        return None
    return _container_problem(pod) or _scheduling_problem(pod, timers)


def _container_problem(pod: Pod) -> Reason | None:
    for container in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        waiting = container.state.waiting
        if waiting is None:
            continue
        message = short(waiting.message, 300)
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


def _scheduling_problem(pod: Pod, timers: Timers) -> Reason | None:
    scheduled = pod.condition("PodScheduled")
    created = parse_time(pod.metadata.creation_timestamp)
    if scheduled is None or scheduled.status != "False" or created is None:
        return None
    if timers.pending(created + UNSCHEDULABLE_PATIENCE):
        return None
    place = place_of(pod)
    kind = "a node without a spot label" if place and place.role == "ps" else "a spot node"
    hint = f"the pod needs {kind} with room for its requests, unless the template sets another nodeAffinity"
    if "persistentvolumeclaim" in scheduled.message and "not found" in scheduled.message:
        hint = "create this PersistentVolumeClaim in the job's namespace, or change spec.storage.volumeClaim"
    return Reason("Unschedulable", f"pod {pod.metadata.name}: {short(scheduled.message, 300)}; {hint}")
