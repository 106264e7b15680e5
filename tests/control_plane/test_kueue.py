"""The real Kueue admits the pods of a job one by one: queued, admitted, preempted, and admitted again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dev import kueue
from dev.cluster import ControlPlane
from dev.fake_kubelet import FakeKubelet
from dev.kube import Json, Kube
from tests.control_plane.operators import Job, eventually, running_operator

NAMESPACE = "team"
API = "/apis/kueue.x-k8s.io/v1beta1"
QUEUE = f"{API}/clusterqueues/all"
LABEL = "kueue.x-k8s.io/queue-name"
WORKERS = 3

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    """A control plane of its own: Kueue's webhooks are cluster-wide."""
    with ControlPlane.start() as plane:
        plane.kubectl("apply", "--server-side", "-f", str(Path(__file__).parents[2] / "crds"))
        plane.kubectl("create", "namespace", NAMESPACE)
        plane.kubectl("wait", "--for=create", "-n", NAMESPACE, "serviceaccount/default")
        with kueue.running(plane, [NAMESPACE]):
            yield plane


async def quota(kube: Kube, pods: int) -> None:
    """Room for so many pods."""
    resources = [
        {"name": "cpu", "nominalQuota": "1k"},
        {"name": "memory", "nominalQuota": "1Ti"},
        {"name": "pods", "nominalQuota": pods},
    ]
    group = {
        "coveredResources": [each["name"] for each in resources],
        "flavors": [{"name": "default", "resources": resources}],
    }
    await kube.patch(QUEUE, {"spec": {"resourceGroups": [group]}})


async def queues(kube: Kube) -> None:
    """One ClusterQueue without room, and a LocalQueue named `all`."""
    spec: Json = {"namespaceSelector": {}, "preemption": {"withinClusterQueue": "LowerPriority"}}
    await kube.create(f"{API}/resourceflavors", _object("ResourceFlavor", "default"))
    await kube.create(f"{API}/clusterqueues", {**_object("ClusterQueue", "all"), "spec": spec})
    await quota(kube, 0)
    local = {**_object("LocalQueue", "all"), "spec": {"clusterQueue": "all"}}
    await kube.create(f"{API}/namespaces/{NAMESPACE}/localqueues", local)


def _object(kind: str, name: str) -> Json:
    return {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": kind, "metadata": {"name": name}}


async def test_pods_wait_for_quota_run_with_it_give_way_and_come_back(plane: ControlPlane) -> None:
    async with Kube(plane.kubeconfig) as kube, FakeKubelet(plane.kubeconfig) as kubelet:
        await kubelet.add_node("safe-1")
        await kubelet.add_node("spot-1", spot=True)
        for name, value in (("high", 100), ("low", 1)):
            body = {"metadata": {"name": name}, "value": value, "preemptionPolicy": "Never"}
            await kube.create("/apis/scheduling.k8s.io/v1/priorityclasses", body)
        await queues(kube)
        job = Job(kube, NAMESPACE)
        async with running_operator(plane.kubeconfig, NAMESPACE):
            await job.apply(
                runPolicy={"schedulingPolicy": {"queue": "all"}},
                parameterServers={"template": {"spec": {"priorityClassName": "high"}}},
                workers={
                    "replicas": WORKERS,
                    "maxSurge": 1,
                    "template": {"spec": {"priorityClassName": "low"}},
                },
            )

            async def queued() -> bool:
                return (await job.condition("Degraded")).get("reason") == "Queued"

            await eventually(queued, what="the pods are queued")
            assert all(pod["spec"]["schedulingGates"] for pod in (await job.pods()).values())

            await quota(kube, 1 + WORKERS)
            await job.runs(WORKERS)
            servers = {n: p["metadata"]["uid"] for n, p in (await job.pods()).items() if "-ps-" in n}

            taken = [await kube.create(f"/api/v1/namespaces/{NAMESPACE}/pods", _rival(n)) for n in range(2)]

            async def gave_way() -> Json | None:
                status = await job.status()
                lost = status["restarts"]["disruptions"] == len(taken)
                return status if lost and status["workers"]["ready"] == WORKERS - len(taken) else None

            status = dict(await eventually(gave_way, what="two workers give way"))
            assert status["phase"] == "Running"
            assert status["restarts"]["byReason"] == {"EvictedByKueue": len(taken)}
            await eventually(queued, what="their successors are queued")

            for pod in taken:
                path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}"
                await kube.delete(path, grace_seconds=0)
            await job.runs(WORKERS)
            assert {n: p["metadata"]["uid"] for n, p in (await job.pods()).items() if "-ps-" in n} == servers
            assert (await job.status())["restarts"] == status["restarts"]


def _rival(number: int) -> Json:
    container = {"name": "c", "image": "x", "resources": {"requests": {"cpu": "1"}}}
    metadata = {"name": f"rival-{number}", "labels": {LABEL: "all"}}
    return {"metadata": metadata, "spec": {"priorityClassName": "high", "containers": [container]}}
