"""A real API server accepts the manifests, with strict validation and under the restricted Pod Security Standard."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from dev.cluster import ControlPlane
from dev.kube import Kube
from shoal import manifests
from shoal.api.labels import Place
from shoal.manifests.placement import Where
from shoal.policy.model import Images
from tests.control_plane.operators import eventually
from tests.doubles.fake_kubelet import FakeKubelet
from tests.unit.policy import build

pytestmark = pytest.mark.control_plane

CLAIM = {"volumeClaim": {"name": "runs"}}
IMAGES = Images(ps="shoal/ps:test", worker="shoal/worker:test", worker_gpu="shoal/worker-gpu:test")


def objects(namespace: str) -> list[dict[str, Any]]:
    job = build.job(storage=CLAIM, parameterServers={"replicas": 2})
    job = job.model_copy(update={"metadata": job.metadata.model_copy(update={"namespace": namespace})})
    return [
        manifests.pod(job, Place("ps", 0, 0), IMAGES),
        manifests.pod(job, Place("worker", 1, 3), IMAGES),
        manifests.service(job, 0, 0),
        manifests.secret(job, {"key": b"\x00" * 32}),
        manifests.disruption_budget(job),
    ]


def create(plane: ControlPlane, *manifest: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifest})
    command = ["kubectl", "create", "--dry-run=server", "--validate=strict", "-f", "-"]
    return subprocess.run(command, env=plane.env, input=text, capture_output=True, text=True, check=False)


def test_manifests_are_accepted_under_restricted_pod_security(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.kubectl("label", "ns", namespace, "pod-security.kubernetes.io/enforce=restricted")
    made = create(control_plane, *objects(namespace))
    assert made.returncode == 0, made.stderr
    assert "Warning" not in made.stderr


def test_typo_in_a_template_is_rejected_with_its_path(control_plane: ControlPlane, namespace: str) -> None:
    pod = objects(namespace)[1]
    pod["spec"]["containers"][0]["imagePolicy"] = "Always"
    made = create(control_plane, pod)
    assert made.returncode != 0
    assert "spec.containers[0]" in made.stderr
    assert "imagePolicy" in made.stderr


async def test_an_excluded_node_is_avoided_whatever_its_host_is_called(
    kube: Kube, namespace: str, fake_kubelet: FakeKubelet
) -> None:
    await fake_kubelet.add_node("spot-1", spot=True, labels={"kubernetes.io/hostname": "another"})
    await fake_kubelet.add_node("spot-2", spot=True)
    pods = f"/api/v1/namespaces/{namespace}/pods"
    for index in range(4):
        where = Where("Spot", excluded=("spot-0", "spot-1"))
        made = manifests.pod(build.job(), Place("worker", index, 0), IMAGES, where)
        del made["metadata"]["ownerReferences"]  # there is no such job
        made["metadata"]["namespace"] = namespace
        await kube.create(pods, made)

    async def bound() -> bool:
        return all("nodeName" in each["spec"] for each in (await kube.get(pods))["items"])

    await eventually(bound, what="the scheduler places the pods")
    assert {each["spec"]["nodeName"] for each in (await kube.get(pods))["items"]} == {"spot-2"}
