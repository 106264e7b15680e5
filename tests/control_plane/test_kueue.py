"""The real Kueue: queued, admitted, preempted, and admitted again; pods one by one, or the job as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from dev import kueue
from dev.cluster import ControlPlane
from dev.fake_kubelet import FakeKubelet
from dev.kube import Json, Kube, tolerant
from shoal.process.operator import Operator
from shoal_trainer.contract import Outcome, TerminationMessage
from tests.control_plane.operators import Job, eventually, running_operator

NAMESPACE = "team"
API = "/apis/kueue.x-k8s.io/v1beta1"
QUEUES = f"{API}/clusterqueues"
WORKLOADS = f"{API}/namespaces/{NAMESPACE}/workloads"
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


async def quota(kube: Kube, pods: int, queue: str = "all") -> None:
    """Room for so many pods."""
    resources = [
        {"name": "cpu", "nominalQuota": "1k"},
        {"name": "memory", "nominalQuota": "1Ti"},
        {"name": "pods", "nominalQuota": pods},
    ]
    group = {
        "coveredResources": [each["name"] for each in resources],
        "flavors": [{"name": queue, "resources": resources}],
    }
    await kube.patch(f"{QUEUES}/{queue}", {"spec": {"resourceGroups": [group]}})


async def queues(kube: Kube, name: str = "all", **nodes: Any) -> None:
    """A ClusterQueue without room, of one flavor, and a LocalQueue of the same name. `nodes`: those of the flavor."""
    spec: Json = {"namespaceSelector": {}, "preemption": {"withinClusterQueue": "LowerPriority"}}
    await kube.create(f"{API}/resourceflavors", {**_object("ResourceFlavor", name), "spec": nodes})
    await kube.create(QUEUES, {**_object("ClusterQueue", name), "spec": spec})
    await quota(kube, 0, name)
    local = {**_object("LocalQueue", name), "spec": {"clusterQueue": name}}
    await kube.create(f"{API}/namespaces/{NAMESPACE}/localqueues", local)


async def priorities(kube: Kube) -> None:
    """The priority classes high and low."""
    for name, value in (("high", 100), ("low", 1)):
        body = {"metadata": {"name": name}, "value": value, "preemptionPolicy": "Never"}
        with tolerant(409):
            await kube.create("/apis/scheduling.k8s.io/v1/priorityclasses", body)


def _object(kind: str, name: str) -> Json:
    return {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": kind, "metadata": {"name": name}}


async def test_pods_wait_for_quota_run_with_it_give_way_and_come_back(plane: ControlPlane) -> None:
    async with Kube(plane.kubeconfig) as kube, FakeKubelet(plane.kubeconfig) as kubelet:
        await kubelet.add_node("safe-1")
        await kubelet.add_node("spot-1", spot=True)
        await priorities(kube)
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


class Whole:
    """A job that waits as one Workload in the queue `whole`, with an operator that is replaced before each step."""

    def __init__(self, plane: ControlPlane, kube: Kube) -> None:
        self.plane, self.kube = plane, kube
        self.job = Job(kube, NAMESPACE, "whole")

    def operator(self) -> AbstractAsyncContextManager[Operator]:
        """Another operator."""
        return running_operator(self.plane.kubeconfig, NAMESPACE, kueue=True)

    async def apply(self) -> None:
        manifest = self.job.manifest(
            runPolicy={"schedulingPolicy": {"queue": "whole", "queueAs": "Workload"}},
            workers={"replicas": WORKERS, "minReplicas": WORKERS - 1, "maxSurge": 1},
        )
        manifest["metadata"]["labels"] = {"kueue.x-k8s.io/priority-class": "modest"}
        await self.kube.create(self.job.path.rpartition("/")[0], manifest)

    async def workload(self) -> Json:
        """The job's Workload."""
        listed = await self.kube.get(WORKLOADS, labelSelector="shoal.dev/job=whole")
        [found] = listed["items"]
        return dict(found)

    async def says(self, kind: str) -> str:
        """The status of a condition of the Workload."""
        conditions = (await self.workload()).get("status", {}).get("conditions", [])
        return next((str(each["status"]) for each in conditions if each["type"] == kind), "")

    async def uids(self) -> dict[str, str]:
        """The job's pods."""
        return {name: pod["metadata"]["uid"] for name, pod in (await self.job.pods()).items()}

    async def is_queued(self) -> None:
        """Wait until the job has no pods, and its Workload waits for quota."""

        async def queued() -> bool:
            return (
                not await self.job.pods()
                and (await self.job.condition("Suspended")).get("reason") == "Queued"
                and await self.says("QuotaReserved") == "False"
            )

        await eventually(queued, what="the job is queued")

    async def all_ready(self) -> None:
        """Wait until all its workers run, and Kueue was told."""
        await self.job.runs(WORKERS)

        async def told() -> bool:
            return await self.says("PodsReady") == "True"

        await eventually(told, what="PodsReady")


async def test_a_job_waits_as_a_whole_is_preempted_as_a_whole_and_goes_on(plane: ControlPlane) -> None:
    async with (
        Kube(plane.kubeconfig) as kube,
        FakeKubelet(plane.kubeconfig, stop_seconds=1.0) as kubelet,
    ):
        labels = {"flavor": "whole"}
        await kubelet.add_node("safe-2", labels=labels)
        await kubelet.add_node("spot-2", labels=labels, spot=True)
        await priorities(kube)
        modest = {**_object("WorkloadPriorityClass", "modest"), "value": 50}
        await kube.create(f"{API}/workloadpriorityclasses", modest)
        await queues(kube, "whole", nodeLabels=labels)
        whole = Whole(plane, kube)
        job = whole.job
        async with whole.operator():
            await whole.apply()
            await whole.is_queued()
            spec = (await whole.workload())["spec"]
            assert (spec["priority"], spec["priorityClassName"]) == (50, "modest")
            assert {each["name"]: each["count"] for each in spec["podSets"]} == {
                "ps": 1,
                "worker": WORKERS - 1,
            }
            assert "Queued" in await job.events()

        async with whole.operator():
            await quota(kube, WORKERS, "whole")  # one too few: the last worker waits by itself
            await job.runs(WORKERS - 1)
            pods = await job.pods()
            assert [n for n, pod in pods.items() if pod["spec"].get("schedulingGates")] == [
                "whole-worker-2-0"
            ]
            assert all(
                pod["spec"]["nodeSelector"] == labels for n, pod in pods.items() if n != "whole-worker-2-0"
            )
            await quota(kube, 1 + WORKERS, "whole")
            await whole.all_ready()

        async with whole.operator():
            before = await whole.uids()
            await quota(kube, 1, "whole")  # Kueue takes nothing back for that, and neither does Shoal
            await job.pod_runs("whole-ps-0-0")
            assert await whole.uids() == before
            await quota(kube, 1 + WORKERS, "whole")
            rivals = [
                await kube.create(f"/api/v1/namespaces/{NAMESPACE}/pods", _rival(n, "whole")) for n in (7, 8)
            ]

            async def evicted() -> bool:
                return await whole.says("Evicted") == "True"

            await eventually(evicted, what="Kueue evicts the job")
        async with whole.operator():  # another one, in the midst of it
            await whole.is_queued()
            assert await whole.says("Requeued") == "True"
            assert "admission" not in (await whole.workload())["status"]
            assert (await job.status())["restarts"]["failures"] == 0
            assert "Evicted" in await job.events()

        async with whole.operator():
            for pod in rivals:
                path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}"
                await kube.delete(path, grace_seconds=0)
            await whole.all_ready()
            assert "whole-ps-0-1" in await job.pods()

        async with whole.operator():
            before, workload = await whole.uids(), await whole.workload()
            await kube.delete(f"{WORKLOADS}/{workload['metadata']['name']}")

            async def made_again() -> bool:
                return await whole.says("Admitted") == "True"

            await eventually(made_again, what="another Workload is admitted")
            assert (await whole.workload())["metadata"]["uid"] != workload["metadata"]["uid"]
            await whole.all_ready()
            assert await whole.uids() == before

        async with whole.operator():
            await kube.patch(job.path, {"spec": {"workers": {"minReplicas": WORKERS}}})

            async def asks_for_more() -> bool:
                name = (await whole.workload())["metadata"]["name"]
                return name != workload["metadata"]["name"] and await whole.says("Admitted") == "True"

            await eventually(asks_for_more, what="it is queued for more")
            await whole.all_ready()
            await kube.patch(job.path, {"spec": {"suspend": True}})

            async def without() -> bool:
                return not (await kube.get(WORKLOADS, labelSelector="shoal.dev/job=whole"))["items"]

            await eventually(without, what="a suspended job has no Workload")
            await kube.patch(job.path, {"spec": {"suspend": False}})
            await whole.all_ready()

        async with whole.operator():
            message = TerminationMessage(outcome=Outcome.SUCCEEDED).to_json()
            [server] = [name for name in await job.pods() if "-ps-" in name]
            await kubelet.succeed_pod(NAMESPACE, server, message=message)

            async def finished() -> bool:
                return await whole.says("Finished") == "True"

            await eventually(finished, what="Kueue knows that it is finished")
            restarts = (await job.status())["restarts"]
            assert restarts["failures"] == 0
            assert restarts["byReason"].keys() <= {"EvictedByKueue"}


def _rival(number: int, queue: str = "all") -> Json:
    container = {"name": "c", "image": "x", "resources": {"requests": {"cpu": "1"}}}
    metadata = {"name": f"rival-{number}", "labels": {LABEL: queue}}
    return {"metadata": metadata, "spec": {"priorityClassName": "high", "containers": [container]}}
