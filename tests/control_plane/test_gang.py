"""A job as a gang, where PodGroups of scheduler-plugins are installed and where they are not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dev.cluster import ControlPlane
from dev.kube import Json, Kube
from tests.control_plane.installed import as_service_account
from tests.control_plane.operators import Job, eventually, running_operator
from tests.doubles.fake_kubelet import FakeKubelet

NAME = "podgroups.scheduling.x-k8s.io"
GANG = {"schedulingPolicy": {"gang": "PodGroup"}}


def crd() -> Json:
    """The part of scheduler-plugins' definition that matters here."""
    number = {"type": "integer", "minimum": 1}
    spec = {"type": "object", "properties": {"minMember": number}}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": NAME,
            "annotations": {
                "api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/scheduler-plugins/pull/50"
            },
        },
        "spec": {
            "group": "scheduling.x-k8s.io",
            "scope": "Namespaced",
            "names": {"plural": "podgroups", "singular": "podgroup", "kind": "PodGroup"},
            "versions": [{"name": "v1alpha1", "served": True, "storage": True, "schema": schema}],
        },
    }


@pytest.fixture
async def pod_groups(control_plane: ControlPlane) -> AsyncIterator[None]:
    control_plane.kubectl("apply", "-f", "-", stdin=json.dumps(crd()))
    control_plane.kubectl("wait", "--for=condition=Established", f"crd/{NAME}")
    yield
    control_plane.kubectl("delete", f"crd/{NAME}")


@pytest.fixture
async def nodes(fake_kubelet: FakeKubelet) -> FakeKubelet:
    await fake_kubelet.add_node("safe-1")
    await fake_kubelet.add_node("spot-1", spot=True)
    return fake_kubelet


async def test_a_gang_has_a_group(
    control_plane: ControlPlane, crds: None, pod_groups: None, kube: Kube, namespace: str, nodes: FakeKubelet,
    tmp_path: Path,
) -> None:  # fmt: skip
    kubeconfig = await as_service_account(control_plane, kube, namespace, tmp_path)
    job = Job(kube, namespace)
    async with running_operator(kubeconfig, namespace):
        await job.apply(runPolicy=GANG, workers={"replicas": 3, "minReplicas": 2})
        await job.runs(3)
        (group,) = (await kube.get(f"/apis/scheduling.x-k8s.io/v1alpha1/namespaces/{namespace}/podgroups"))[
            "items"
        ]
        assert group["spec"] == {"minMember": 3}
        labels = [pod["metadata"]["labels"] for pod in (await job.pods()).values()]
        assert {each["scheduling.x-k8s.io/pod-group"] for each in labels} == {group["metadata"]["name"]}
        assert (await job.condition("Degraded")).get("status") != "True"


async def test_without_pod_groups_the_job_runs_and_says_so(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply(runPolicy=GANG)
        await job.runs()

        async def told() -> bool:
            return (await job.condition("Degraded")).get("reason") == "NoPodGroup"

        await eventually(told)
