"""A pod that has a node and does not start.

The kubelet tells a volume that it cannot mount, and a network that it cannot set up, in events of the pod only. The
pod's containers wait in the same words while it pulls an image.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from shoal.api.kube import READY_TO_START, Node, Pod
from shoal.manifests.pods import volumes_of
from shoal.policy.common.wording import short
from shoal.policy.facts.read import Facts
from shoal.policy.model import Reason

VOLUMES_ARE_LATE = timedelta(minutes=2)
"""Where no image is pulled yet: a volume of a cloud is attached within a minute."""
MAY_PULL = timedelta(minutes=15)
"""Where it may be an image that is pulled: one of 10 GiB at 12 MiB/s."""
_TELLS_BEFORE_IT_PULLS = (1, 36)
"""The first kubelet that does; those before say that volumes and network are ready when all images are there."""


def not_starting(pod: Pod, facts: Facts) -> Reason | None:
    """Degraded: its node has had the pod for long, and no container of it has begun."""
    bound, node = pod.bound_at, pod.spec.node_name
    if not node or bound is None or pod.status.phase != "Pending" or _has_begun(pod):
        return None
    ready = pod.condition(READY_TO_START)
    said = ready.status if ready is not None else ""
    pulls_nothing = said == "False" and _tells_before_it_pulls(facts.seen.nodes.get(node))
    patience = VOLUMES_ARE_LATE if pulls_nothing else MAY_PULL
    if facts.timers.pending(bound + patience):
        return None
    parts = []
    if said != "True":
        parts.append(f"its volumes{_made_of(pod, facts)} or its network are not ready")
    if not pulls_nothing:
        parts.append("an image is still being pulled")
    message = (
        f"pod {pod.metadata.name} does not start: for {patience.total_seconds() / 60:.0f} minutes and longer"
        f" {', or '.join(parts)} on node {node}; `kubectl describe pod {pod.metadata.name}` has the kubelet's words"
    )
    return Reason("NotStarting", message)


def _has_begun(pod: Pod) -> bool:
    containers = (*pod.status.init_container_statuses, *pod.status.container_statuses)
    return any(each.state.running or each.state.terminated or each.restart_count for each in containers)


def _tells_before_it_pulls(node: Node | None) -> bool:
    numbers = re.match(r"v(\d+)\.(\d+)", node.status.node_info.kubelet_version) if node is not None else None
    return numbers is not None and tuple(map(int, numbers.groups())) >= _TELLS_BEFORE_IT_PULLS


def _made_of(pod: Pod, facts: Facts) -> str:
    """What the pod's volumes are made of, as the job's template has it now."""
    role = pod.place.role if pod.place is not None else "worker"
    names = [name for each in volumes_of(facts.job, role) for name in _sources(each, pod.metadata.name)]
    return f" ({short(', '.join(dict.fromkeys(names)), 600)})" if names else ""


def _sources(volume: dict[str, Any], pod: str) -> Iterator[str]:
    """The objects without which a volume cannot be mounted."""
    for kind, source in volume.items():
        match kind, source:
            case (("configMap" | "secret"), {"optional": True}):
                pass
            case "configMap", {"name": name}:
                yield f"ConfigMap {name}"
            case "secret", {"secretName": name} | {"name": name}:
                yield f"Secret {name}"
            case "projected", {"sources": [*sources]}:
                for each in sources:
                    yield from _sources(each, pod)
            case "persistentVolumeClaim", {"claimName": name}:
                yield f"PersistentVolumeClaim {name}"
            case "ephemeral", _:
                yield f"PersistentVolumeClaim {pod}-{volume.get('name')}"
            case "csi", {"driver": name}:
                yield f"CSI driver {name}"
            case (("emptyDir" | "downwardAPI"), _):
                pass
            case _, dict() if "name" in volume:  # a volume, and no source of a projected one
                yield f"{volume['name']} ({kind})"
