"""The real Kueue: queued, admitted, preempted, and admitted again; pods one by one, or the job as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dev.cluster import ControlPlane
from dev.kube import Json, Kube, tolerant
from dev.paths import ROOT
from shoal_trainer.contract import Outcome, TerminationMessage
from tests.control_plane import kueue
from tests.control_plane.installed import as_service_account
from tests.control_plane.operators import Job, eventually, own_control_plane, running_operator
from tests.doubles.fake_kubelet import FakeKubelet

NAMESPACE = "team"
API = "/apis/kueue.x-k8s.io/v1beta2"
QUEUES = f"{API}/clusterqueues"
WORKLOADS = f"{API}/namespaces/{NAMESPACE}/workloads"
LABEL = "kueue.x-k8s.io/queue-name"
WORKERS = 3
FLAVOR = {"flavor": "whole"}
GPUS = {"cpu": "64", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": "8"}

pytestmark = pytest.mark.nightly


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    """A control plane of its own: Kueue's webhooks are cluster-wide."""
    with own_control_plane(NAMESPACE) as plane, kueue.running(plane, [NAMESPACE]):
        yield plane


async def quota(kube: Kube, pods: int, queue: str = "all") -> None:
    """Room for so many pods."""
    quotas = {"cpu": "1k", "memory": "1Ti", "pods": pods}
    resources = [{"name": name, "nominalQuota": most} for name, most in quotas.items()]
    group = {
        "coveredResources": list(quotas),
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
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": name}}


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


async def test_the_example_is_admitted_with_its_servers_on_demand_and_its_workers_on_spot(
    plane: ControlPlane,
) -> None:
    async with Kube(plane.kubeconfig) as kube, FakeKubelet(plane.kubeconfig) as kubelet:
        await kubelet.add_node("safe-1")
        await kubelet.add_node("spot-1", spot=True, capacity=GPUS)
        plane.kubectl("apply", "-n", NAMESPACE, "-f", str(ROOT / "examples" / "kueue"))
        job = Job(kube, NAMESPACE, "queued")
        async with running_operator(plane.kubeconfig, NAMESPACE, kueue=True):
            await job.runs(8)
            assert (await job.condition("QuotaReserved"))["reason"] == "Admitted"
            nodes = {name: pod["spec"]["nodeName"] for name, pod in (await job.pods()).items()}
            assert {name for name, node in nodes.items() if node == "safe-1"} == {"queued-ps-0-0"}


class Whole:
    """A job that waits as one Workload in the queue `whole`. Its steps are named for what happens to it."""

    def __init__(self, kube: Kube, kubelet: FakeKubelet) -> None:
        self.kube, self.kubelet = kube, kubelet
        self.job = Job(kube, NAMESPACE, "whole")
        self.rivals: list[Json] = []

    async def is_queued(self) -> None:
        manifest = self.job.manifest(
            runPolicy={"schedulingPolicy": {"queue": "whole", "queueAs": "Workload"}},
            workers={"replicas": WORKERS, "minReplicas": WORKERS - 1, "maxSurge": 1},
        )
        manifest["metadata"]["labels"] = {"kueue.x-k8s.io/priority-class": "modest"}
        await self.kube.create(self.job.path.rpartition("/")[0], manifest)
        await self._waits()
        spec = (await self.workload())["spec"]
        assert (spec["priority"], spec["priorityClassRef"]["name"]) == (50, "modest")
        assert {each["name"]: each["count"] for each in spec["podSets"]} == {"ps": 1, "worker": WORKERS - 1}
        await eventually(lambda: self._has_event("Queued"), what="it is told")

    async def is_admitted(self) -> None:
        """With quota for all but one worker, which waits by itself."""
        await quota(self.kube, WORKERS, "whole")
        await self.job.runs(WORKERS - 1)
        pods = await self.job.pods()
        [last] = [name for name, pod in pods.items() if pod["spec"].get("schedulingGates")]
        assert last.startswith("whole-worker-2-"), (
            "its number is a later one where an earlier leader may have made it"
        )
        assert all(pod["spec"]["nodeSelector"] == FLAVOR for name, pod in pods.items() if name != last)
        await quota(self.kube, 1 + WORKERS, "whole")
        await self._all_ready()

    async def keeps_what_it_has(self) -> None:
        """Less quota: Kueue takes nothing back for that, and neither does Shoal."""
        before = await self._uids()
        await quota(self.kube, 1, "whole")
        await self._touched()
        assert await self._uids() == before
        await quota(self.kube, 1 + WORKERS, "whole")

    async def is_preempted(self) -> None:
        """The first of two pods takes the place of the last worker, the second that of the others together."""
        pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        self.rivals = [await self.kube.create(pods, _rival(number, "whole")) for number in (7, 8)]

        async def evicted() -> bool:
            return await self._says("Evicted") == "True"

        await eventually(evicted, what="Kueue evicts the job")

    async def drains(self) -> None:
        await self._waits()
        assert await self._says("Requeued") == "True"
        assert "admission" not in (await self.workload())["status"]
        assert (await self.job.status())["restarts"]["failures"] == 0
        await eventually(lambda: self._has_event("Evicted"), what="it is told")

    async def is_admitted_again(self) -> None:
        for pod in self.rivals:
            path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}"
            await self.kube.delete(path, grace_seconds=0)
        await self._all_ready()
        [server] = [name for name in await self.job.pods() if name.startswith("whole-ps-0-")]
        assert server != "whole-ps-0-0"

    async def loses_its_workload(self) -> None:
        before, workload = await self._uids(), await self.workload()
        await self.kube.delete(f"{WORKLOADS}/{workload['metadata']['name']}")
        await self._is_another(workload)
        assert await self._uids() == before

    async def asks_for_more(self) -> None:
        workload = await self.workload()
        await self.kube.patch(self.job.path, {"spec": {"workers": {"minReplicas": WORKERS}}})
        await self._is_another(workload)

    async def is_suspended_and_resumed(self) -> None:
        await self.kube.patch(self.job.path, {"spec": {"suspend": True}})

        async def without() -> bool:
            return not (await self.kube.get(WORKLOADS, labelSelector="shoal.dev/job=whole"))["items"]

        await eventually(without, what="a suspended job has no Workload")
        await self.kube.patch(self.job.path, {"spec": {"suspend": False}})
        await self._all_ready()

    async def ends(self) -> None:
        message = TerminationMessage(outcome=Outcome.SUCCEEDED).to_json()
        [server] = [name for name in await self.job.pods() if "-ps-" in name]
        await self.kubelet.succeed_pod(NAMESPACE, server, message=message)

        async def finished() -> bool:
            return await self._says("Finished") == "True" and set(await self.job.pods()) == {server}

        await eventually(finished, what="Kueue knows that it is finished, and its workers are gone")
        restarts = (await self.job.status())["restarts"]
        assert restarts["failures"] == 0
        assert restarts["byReason"].keys() <= {"EvictedByKueue"}

    async def workload(self) -> Json:
        """The job's Workload."""
        listed = await self.kube.get(WORKLOADS, labelSelector="shoal.dev/job=whole")
        [found] = listed["items"]
        return dict(found)

    async def _says(self, kind: str) -> str:
        conditions = (await self.workload()).get("status", {}).get("conditions", [])
        return next((str(each["status"]) for each in conditions if each["type"] == kind), "")

    async def _has_event(self, reason: str) -> bool:
        return reason in await self.job.events()

    async def _uids(self) -> dict[str, str]:
        return {name: pod["metadata"]["uid"] for name, pod in (await self.job.pods()).items()}

    async def _waits(self) -> None:
        """Until the job has no pods, and its Workload no quota."""

        async def queued() -> bool:
            reason = (await self.job.condition("Suspended")).get("reason")
            return (
                not await self.job.pods()
                and reason == "Queued"
                and await self._says("QuotaReserved") == "False"
            )

        await eventually(queued, what="the job is queued")

    async def _all_ready(self) -> None:
        """Until all workers run, and Kueue was told."""
        await self.job.runs(WORKERS)

        async def told() -> bool:
            return await self._says("PodsReady") == "True"

        await eventually(told, what="PodsReady")

    async def _is_another(self, workload: Json) -> None:
        """Until there is another Workload, and the job runs with it."""

        async def admitted() -> bool:
            listed = (await self.kube.get(WORKLOADS, labelSelector="shoal.dev/job=whole"))["items"]
            others = [each for each in listed if each["metadata"]["uid"] != workload["metadata"]["uid"]]
            return bool(others) and len(listed) == 1 and await self._says("Admitted") == "True"

        await eventually(admitted, what="another Workload is admitted")
        await self._all_ready()

    async def _touched(self) -> None:
        """Until the operator has looked at the job again."""
        job = await self.kube.patch(self.job.path, {"spec": {"runPolicy": {"backoffLimit": 7}}})
        await self.job.reaches(observedGeneration=job["metadata"]["generation"])


async def test_a_job_waits_is_preempted_and_goes_on_as_a_whole(plane: ControlPlane, tmp_path: Path) -> None:
    """Another operator, with the chart's permissions, begins before each step, also in the midst of a preemption."""
    async with Kube(plane.kubeconfig) as kube, FakeKubelet(plane.kubeconfig, stop_seconds=1.0) as kubelet:
        await kubelet.add_node("safe-1", labels=FLAVOR)
        await kubelet.add_node("spot-1", labels=FLAVOR, spot=True)
        await priorities(kube)
        modest = {**_object("WorkloadPriorityClass", "modest"), "value": 50}
        await kube.create(f"{API}/workloadpriorityclasses", modest)
        await queues(kube, "whole", nodeLabels=FLAVOR)
        values = ("kueue.enabled=true", f"scope.namespace={NAMESPACE}")
        account = await as_service_account(plane, kube, NAMESPACE, tmp_path, *values)
        whole = Whole(kube, kubelet)
        for step in (
            whole.is_queued,
            whole.is_admitted,
            whole.keeps_what_it_has,
            whole.is_preempted,
            whole.drains,
            whole.is_admitted_again,
            whole.loses_its_workload,
            whole.asks_for_more,
            whole.is_suspended_and_resumed,
            whole.ends,
        ):
            async with running_operator(account, NAMESPACE, kueue=True):
                await step()


def _rival(number: int, queue: str = "all") -> Json:
    container = {"name": "c", "image": "x", "resources": {"requests": {"cpu": "1"}}}
    metadata = {"name": f"rival-{number}", "labels": {LABEL: queue}}
    return {"metadata": metadata, "spec": {"priorityClassName": "high", "containers": [container]}}
