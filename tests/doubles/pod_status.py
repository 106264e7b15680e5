"""The pod statuses that the fake kubelet writes."""

from __future__ import annotations

import datetime as dt
import itertools
import uuid
from collections.abc import Callable

from dev.kube import Json


def pod_path(pod: Json) -> str:
    """The path of a pod."""
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def has_statuses(pod: Json) -> bool:
    """Whether it has container statuses."""
    return bool(pod["status"].get("containerStatuses"))


def container_status(container: Json, state: Json, *, ready: bool) -> Json:
    """The status of one container."""
    image = container["image"]
    return {
        "name": container["name"],
        "image": image,
        "imageID": f"fake/{image}",
        "containerID": f"fake://{uuid.uuid4()}",
        "ready": ready,
        "started": ready,
        "restartCount": 0,
        "state": state,
    }


def running_containers(pod: Json) -> list[Json]:
    """Every container running and ready."""
    state = {"running": {"startedAt": now()}}
    return [container_status(container, state, ready=True) for container in pod["spec"]["containers"]]


def waiting(pod: Json, reason: str, message: str) -> Json:
    """The status of a pod whose containers cannot start."""
    state = {"waiting": {"reason": reason, "message": message}}
    statuses = [container_status(container, state, ready=False) for container in pod["spec"]["containers"]]
    return {"phase": "Pending", "containerStatuses": statuses, "startTime": now()}


def container_statuses(pod: Json) -> list[Json]:
    """The containers as last reported."""
    return list(pod["status"].get("containerStatuses") or running_containers(pod))


def terminated(pod: Json, exit_code: int, reason: str, message: str) -> Json:
    """A container's end."""
    started = pod["status"].get("startTime") or now()
    end: Json = {"exitCode": exit_code, "reason": reason, "startedAt": started, "finishedAt": now()}
    return end | ({"message": message} if message else {})


def kept_conditions(pod: Json, replaced: list[Json]) -> list[Json]:
    """The conditions that are not replaced."""
    names = {condition["type"] for condition in replaced}
    return [c for c in pod["status"].get("conditions", []) if c["type"] not in names]


def condition(kind: str, status: str, reason: str = "", message: str = "") -> Json:
    """A condition of a pod or a node."""
    condition = {"type": kind, "status": status, "lastTransitionTime": now()}
    return condition | ({"reason": reason} if reason else {}) | ({"message": message} if message else {})


def now() -> str:
    """The time with a resolution of a second, as the API has it."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def now_micro() -> str:
    """The time with microseconds, as leases have it."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def started(pod: Json, address: str) -> Json:
    """The status of a pod that runs and is ready."""
    names = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady")
    conditions = [condition(name, "True") for name in names]
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "hostIP": "10.249.0.1",
        "startTime": now(),
        "conditions": [*kept_conditions(pod, conditions), *conditions],
        "containerStatuses": running_containers(pod),
    }


def ended(pod: Json, phase: str, end: Json, extra: list[Json]) -> Json:
    """The status of a pod whose containers have all ended in the same way."""
    conditions = [*(condition(name, "False", "PodFailed") for name in ("Ready", "ContainersReady")), *extra]
    state = {"ready": False, "started": False, "state": {"terminated": end}}
    return {
        "phase": phase,
        "containerStatuses": [{**status, **state} for status in container_statuses(pod)],
        "conditions": [*kept_conditions(pod, conditions), *conditions],
    }


def addresses() -> Callable[[Json], str]:
    """A new address for each pod."""
    numbers = itertools.count(256)

    def next_address(_pod: Json) -> str:
        number = next(numbers)
        return f"10.{250 + number // 65536}.{number // 256 % 256}.{number % 256}"

    return next_address
