"""Changes to a running job: scale, suspend, delete and apply again; jobs in two namespaces."""

from __future__ import annotations

import pytest

from dev.cluster import ControlPlane
from dev.kube import Kube
from shoal.runtime.work_queue import Priority
from tests.control_plane.operators import COLLECTED_SECONDS, Job, eventually, running_operator
from tests.doubles.fake_kubelet import FakeKubelet


@pytest.fixture
async def nodes(fake_kubelet: FakeKubelet) -> FakeKubelet:
    await fake_kubelet.add_node("safe-1")
    for number in range(3):
        await fake_kubelet.add_node(f"spot-{number}", spot=True)
    return fake_kubelet


async def test_kubectl_scale_up_and_down(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        await job.runs(2)
        control_plane.kubectl("scale", "etj/digits", "-n", namespace, "--replicas=4")
        await job.runs(4)
        control_plane.kubectl("scale", "etj/digits", "-n", namespace, "--replicas=1")
        await job.runs(1)

        async def one_left() -> bool:
            return [n for n in await job.pods() if "worker" in n] == ["digits-worker-0-0"]

        await eventually(one_left)
        status = await job.status()
        assert status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}

        async def events_posted() -> bool:
            return {"ScaledUp", "ScaledDown"} <= (await job.events()).keys()

        await eventually(events_posted)
        listed = control_plane.kubectl("get", "etj", "-n", namespace)
        assert "digits" in listed
        assert "Running" in listed


async def test_suspend_and_resume(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        await job.runs()
        await kube.patch(job.path, {"spec": {"suspend": True}})
        await job.reaches(phase="Suspended")

        async def no_pods() -> bool:
            return not await job.pods()

        await eventually(no_pods)
        await kube.patch(job.path, {"spec": {"suspend": False}})
        await job.runs()
        pods = await job.pods()
        assert set(pods) == {"digits-ps-0-1", "digits-worker-0-1", "digits-worker-1-1"}
        status = await job.status()
        assert status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}


async def test_job_created_suspended_has_no_pods(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace) as operator:
        await job.apply(suspend=True)
        await job.reaches(phase="Suspended")

        async def at_rest() -> bool:  # the status write wakes the job once more
            return len(operator.jobs.queue) == 0

        await eventually(at_rest)
        assert not await job.pods()


async def test_job_applied_again_is_a_new_run(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    nodes.stop_seconds = 1
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        first = (await job.apply())["metadata"]["uid"]
        await job.runs()
        await kube.delete(job.path)
        second = (await job.apply())["metadata"]["uid"]
        assert first != second
        await job.runs(seconds=COLLECTED_SECONDS)
        owners = {p["metadata"]["ownerReferences"][0]["uid"] for p in (await job.pods()).values()}
        assert owners == {second}
        assert (await job.status())["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}


@pytest.mark.nightly
async def test_jobs_of_the_same_name_in_two_namespaces(
    control_plane: ControlPlane,
    crds: None,
    kube: Kube,
    namespace: str,
    second_namespace: str,
    nodes: FakeKubelet,
) -> None:
    one, two = Job(kube, namespace), Job(kube, second_namespace)
    async with (
        running_operator(control_plane.kubeconfig, namespace),
        running_operator(control_plane.kubeconfig, second_namespace),
    ):
        await one.apply()
        await two.apply(workers={"replicas": 1})
        await one.runs(2)
        await two.runs(1)
        await kube.delete(f"/api/v1/namespaces/{namespace}/pods/digits-worker-0-0", grace_seconds=0)
        await one.pod_runs("digits-worker-0-1")
        assert set(await two.pods()) == {"digits-ps-0-0", "digits-worker-0-0"}
        keys = []
        for job in (one, two):
            secrets = await kube.get(f"/api/v1/namespaces/{job.namespace}/secrets")
            [secret] = [s for s in secrets["items"] if s["metadata"]["name"].startswith("digits-")]
            keys.append(secret["data"]["key"])
        assert keys[0] != keys[1]


async def test_finished_job_creates_no_pods(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace) as operator:
        await job.apply(runPolicy={"cleanPodPolicy": "All"})
        await job.runs()
        message = '{"outcome": "Succeeded", "modelUri": "file:///m"}'
        await nodes.succeed_pod(namespace, "digits-ps-0-0", message=message)
        await job.reaches(phase="Succeeded")

        async def no_pods() -> bool:
            return not await job.pods()

        await eventually(no_pods)
        passes = operator.metrics.reconcile_seconds.labels("trainingjob", "done")._sum.get()
        operator._wake_job((namespace, "digits"), Priority.URGENT)

        async def passed() -> bool:
            return bool(operator.metrics.reconcile_seconds.labels("trainingjob", "done")._sum.get() > passes)

        await eventually(passed)
        assert not await job.pods()
        assert (await job.status())["phase"] == "Succeeded"


async def test_job_of_another_controller_has_no_pods(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    other, job = Job(kube, namespace, "other"), Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await other.apply(managedBy="kueue.x-k8s.io/multikueue")
        await job.apply()
        await job.runs()
        assert not await other.pods()
        assert not await other.status()
