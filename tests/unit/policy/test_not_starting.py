"""A pod that has a node and never starts: the kubelet says why in an event only."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from shoal.api.base import Condition
from shoal.policy.model import Observation
from shoal.policy.plan import plan
from shoal.policy.tell.not_starting import MAY_PULL, VOLUMES_ARE_LATE
from tests.unit.policy import build

CODE = {"entrypoint": "digits:job", "stopAfter": {"epochs": 3}, "code": {"configMap": "digits-code"}}
VOLUMES = [
    {"name": "data", "persistentVolumeClaim": {"claimName": "images"}},
    {"name": "login", "secret": {"secretName": "login"}},
    {"name": "perhaps", "configMap": {"name": "settings", "optional": True}},
    {
        "name": "all",
        "projected": {"sources": [{"secret": {"name": "token"}}, {"downwardAPI": {"items": []}}]},
    },
    {"name": "bucket", "csi": {"driver": "gcsfuse.csi.storage.gke.io"}},
    {"name": "home", "nfs": {"server": "files", "path": "/home"}},
    {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {}}},
    {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
]
VOLUMES_FAIL = {"type": "PodReadyToStartContainers", "status": "False"}
PULLS = {"type": "PodReadyToStartContainers", "status": "True"}
TELLS, OLD = "v1.36.2-gke.100", "v1.35.9"


def waits(*conditions: dict[str, Any], reason: str = "ContainerCreating", **how: Any) -> dict[str, Any]:
    """A pod with a node, none of whose containers has begun."""
    bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": build.stamp(build.NOW)}
    state = build.waiting(reason)
    return build.pod_manifest(phase="Pending", state=state, conditions=[bound, *conditions], **how)


def seen(manifest: dict[str, Any], kubelet: str = TELLS, **spec: Any) -> Observation:
    node = build.node_manifest()
    node["status"]["nodeInfo"]["kubeletVersion"] = kubelet
    nodes = {"spot-0": build.Node.model_validate(node)}
    job = build.job(**{"training": CODE, "workers": {"replicas": 1}, **spec})
    return build.observe(job, build.Pod.model_validate(manifest), nodes=nodes)


def degraded(observed: Observation, after: timedelta) -> Condition | None:
    told = plan(replace(observed, now=build.NOW + after)).status.condition("Degraded")
    return told if told is not None and told.status == "True" else None


@pytest.mark.parametrize(
    ("conditions", "kubelet", "patience"),
    [
        ((VOLUMES_FAIL,), TELLS, VOLUMES_ARE_LATE),
        ((VOLUMES_FAIL,), OLD, MAY_PULL),  # it says so while it pulls, too
        ((VOLUMES_FAIL,), "", MAY_PULL),
        ((PULLS,), TELLS, MAY_PULL),
        ((), OLD, MAY_PULL),
    ],
)
def test_pod_that_never_starts_is_told_once_no_image_explains_it(
    conditions: tuple[dict[str, Any], ...], kubelet: str, patience: timedelta
) -> None:
    observed = seen(waits(*conditions), kubelet)
    early = plan(replace(observed, now=build.NOW + patience - timedelta(seconds=1)))
    assert early.status.condition("Degraded") is None
    assert early.wake_after == 1.0
    told = degraded(observed, patience)
    assert told is not None
    assert told.reason == "NotStarting"
    assert "pod digits-worker-0-0 does not start" in told.message
    assert "kubectl describe pod digits-worker-0-0" in told.message
    assert degraded(observed, timedelta(hours=2)) == told.model_copy(
        update={"last_transition_time": build.NOW + timedelta(hours=2)}
    )


def test_message_names_what_the_volumes_are_made_of() -> None:
    workers = {"replicas": 1, "template": {"spec": {"volumes": VOLUMES}}}
    told = degraded(seen(waits(VOLUMES_FAIL), workers=workers), VOLUMES_ARE_LATE)
    assert told is not None
    for named in (
        "Secret digits-shoal-0a1b2c3d",
        "ConfigMap digits-code",
        "PersistentVolumeClaim images",
        "Secret login",
        "Secret token",
        "CSI driver gcsfuse.csi.storage.gke.io",
        "home (nfs)",
        "PersistentVolumeClaim digits-worker-0-0-scratch",
    ):
        assert named in told.message, named
    assert "settings" not in told.message  # without it the pod starts
    assert "tmp" not in told.message


def test_no_volumes_are_blamed_while_images_are_pulled() -> None:
    told = degraded(seen(waits(PULLS)), MAY_PULL)
    assert told is not None
    assert "image" in told.message
    assert "digits-code" not in told.message


@pytest.mark.parametrize(
    "manifest",
    [
        waits(reason="PodInitializing", initContainerStatuses=[{"name": "fetch", "state": {"running": {}}}]),
        waits(reason="PodInitializing", initContainerStatuses=[{"name": "fetch", "state": build.ended(0)}]),
        waits(node=None),
        build.pod_manifest(),
    ],
    ids=["an init container runs", "an init container ended", "no node", "running"],
)
def test_pod_that_has_begun_or_has_no_node_is_not_told_so(manifest: dict[str, Any]) -> None:
    told = degraded(seen(manifest), timedelta(hours=2))
    assert told is None or told.reason != "NotStarting"


def test_what_the_kubelet_says_itself_comes_first() -> None:
    manifest = waits(PULLS, reason="ImagePullBackOff")
    told = degraded(seen(manifest), timedelta(hours=2))
    assert told is not None
    assert told.reason == "ImagePullFailed"


def test_parameter_server_names_the_claim_of_the_storage() -> None:
    storage = {"volumeClaim": {"name": "models"}}
    manifest = waits(VOLUMES_FAIL, role="ps")
    told = degraded(seen(manifest, storage=storage, parameterServers={"capacity": "Any"}), VOLUMES_ARE_LATE)
    assert told is not None
    assert "PersistentVolumeClaim models" in told.message
    assert "digits-code" not in told.message
