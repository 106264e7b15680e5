"""Pods that do not get going, and what a person can do about it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from shoal.api.kube import Pod
from shoal.policy.model import Observation
from shoal.policy.names import place_of
from shoal.policy.times import parse_time
from shoal.policy.wording import short

UNSCHEDULABLE_PATIENCE = timedelta(seconds=60)
"""A node pool that grows needs a while; before that an unschedulable pod is no news."""

_IMAGE = frozenset(
    {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


@dataclass(frozen=True)
class Trouble:
    """A reason in one word, and a sentence that says what to do."""

    reason: str
    message: str


def find(seen: Observation, wake_after: list[float]) -> Trouble | None:
    """The trouble that matters most, if there is any."""
    found = [trouble for pod in seen.pods if (trouble := _of(pod, seen, wake_after)) is not None]
    order = ["ImagePullFailed", "ContainerConfigError", "CrashLooping", "Unschedulable"]
    return min(found, key=lambda trouble: order.index(trouble.reason), default=None)


def _of(pod: Pod, seen: Observation, wake_after: list[float]) -> Trouble | None:
    if pod.metadata.deletion_timestamp or pod.status.phase in {"Failed", "Succeeded"}:
        return None
    return _container_trouble(pod) or _scheduling_trouble(pod, seen, wake_after)


def _container_trouble(pod: Pod) -> Trouble | None:
    for container in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        waiting = container.state.waiting
        if waiting is None:
            continue
        said = short(waiting.message, 300)
        where = f"pod {pod.metadata.name}, container {container.name}"
        if waiting.reason in _IMAGE:
            hint = "check the image in the job's template, and imagePullSecrets if the registry is private"
            return Trouble("ImagePullFailed", f"{where}: the image cannot be pulled: {said}; {hint}")
        if waiting.reason in _CONFIG:
            hint = "check the volumes, Secrets, ConfigMaps and securityContext in the job's template"
            return Trouble(
                "ContainerConfigError", f"{where}: the container cannot be started: {said}; {hint}"
            )
        if waiting.reason == "CrashLoopBackOff":
            hint = f"see `kubectl logs {pod.metadata.name} -c {container.name} --previous`"
            return Trouble("CrashLooping", f"{where}: the container crashes repeatedly; {hint}")
    return None


def _scheduling_trouble(pod: Pod, seen: Observation, wake_after: list[float]) -> Trouble | None:
    scheduled = pod.condition("PodScheduled")
    created = parse_time(pod.metadata.creation_timestamp)
    if scheduled is None or scheduled.status != "False" or created is None:
        return None
    left = (created + UNSCHEDULABLE_PATIENCE - seen.now).total_seconds()
    if left > 0:
        wake_after.append(left)
        return None
    place = place_of(pod)
    kind = "a node without a spot label" if place and place.role == "ps" else "a spot node"
    hint = f"the pod needs {kind} with room for its requests, unless the template sets another nodeAffinity"
    if "persistentvolumeclaim" in scheduled.message and "not found" in scheduled.message:
        hint = "create this PersistentVolumeClaim in the job's namespace, or change spec.storage.volumeClaim"
    return Trouble("Unschedulable", f"pod {pod.metadata.name}: {short(scheduled.message, 300)}; {hint}")
