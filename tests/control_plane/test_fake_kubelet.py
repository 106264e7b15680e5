"""The fake kubelet against the real control plane."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dev.audit import creates
from dev.cluster import ControlPlane
from dev.kube import ApiError, Kube
from tests.control_plane.operators import eventually
from tests.doubles.fake_kubelet import FakeKubelet


def pod(name: str, **spec: Any) -> dict[str, Any]:
    container = {"name": "worker", "image": "fake", "resources": spec.pop("resources", {})}
    return {
        "metadata": {"name": name},
        "spec": {
            "containers": [container],
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            **spec,
        },
    }


async def create(kube: Kube, namespace: str, body: dict[str, Any]) -> None:
    async def once() -> bool:
        try:
            await kube.create(f"/api/v1/namespaces/{namespace}/pods", body)
        except ApiError as error:
            if error.status != 403:
                raise
            return False
        return True

    await eventually(once)


async def phase(kube: Kube, namespace: str, name: str) -> str:
    return (await kube.get(f"/api/v1/namespaces/{namespace}/pods/{name}"))["status"].get("phase", "")


async def running(kube: Kube, namespace: str, name: str) -> None:
    async def is_running() -> bool:
        return await phase(kube, namespace, name) == "Running"

    await eventually(is_running)


async def test_pod_is_scheduled_and_in_the_audit_log(
    control_plane: ControlPlane, kube: Kube, namespace: str, fake_kubelet: FakeKubelet
) -> None:
    await fake_kubelet.add_node("gpu-1", spot=True, capacity={"nvidia.com/gpu": "8"})
    await create(kube, namespace, pod("a", resources={"limits": {"nvidia.com/gpu": "8"}}))
    await running(kube, namespace, "a")
    seen = await kube.get(f"/api/v1/namespaces/{namespace}/pods/a")
    assert seen["status"]["podIP"]
    assert {"type": "Ready", "status": "True"}.items() <= next(
        c for c in seen["status"]["conditions"] if c["type"] == "Ready"
    ).items()
    [written] = creates(control_plane.audit_log, "pods", namespace=namespace)
    assert (written.name, written.user) == ("a", "kubernetes-admin")
    assert written.received <= written.answered


async def test_deleted_pod_terminates(kube: Kube, namespace: str, fake_kubelet: FakeKubelet) -> None:
    await fake_kubelet.add_node("n1")
    await create(kube, namespace, pod("a"))
    await running(kube, namespace, "a")
    await kube.delete(f"/api/v1/namespaces/{namespace}/pods/a", grace_seconds=30)

    async def gone() -> bool:
        return not (await kube.get(f"/api/v1/namespaces/{namespace}/pods"))["items"]

    await eventually(gone)


async def test_notice_sets_the_node_condition_before_pods_end(
    kube: Kube, namespace: str, fake_kubelet: FakeKubelet
) -> None:
    await fake_kubelet.add_node("s1", spot=True)
    await create(kube, namespace, pod("a"))
    await running(kube, namespace, "a")
    await fake_kubelet.notice("s1")
    ready = next(
        c for c in (await kube.get("/api/v1/nodes/s1"))["status"]["conditions"] if c["type"] == "Ready"
    )
    assert (ready["status"], ready["reason"]) == ("False", "KubeletNotReady")
    assert ready["message"] == "node is shutting down"
    assert await phase(kube, namespace, "a") == "Running"
    await create(kube, namespace, pod("late", nodeName="s1"))

    async def refused() -> bool:
        status = (await kube.get(f"/api/v1/namespaces/{namespace}/pods/late"))["status"]
        return status.get("reason") == "NodeShutdown"

    await eventually(refused)
    await fake_kubelet.end_shutdown("s1")
    status = (await kube.get(f"/api/v1/namespaces/{namespace}/pods/a"))["status"]
    assert status["phase"] == "Failed"
    assert status["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 143
    assert any(c["type"] == "DisruptionTarget" for c in status["conditions"])


async def test_vanished_node_keeps_pods_terminating(
    kube: Kube, namespace: str, fake_kubelet: FakeKubelet
) -> None:
    await fake_kubelet.add_node("v1")
    await create(kube, namespace, pod("a"))
    await running(kube, namespace, "a")
    await fake_kubelet.vanish("v1", unknown_after=0)

    async def unreachable() -> bool:
        node = await kube.get("/api/v1/nodes/v1")
        return any(t["key"] == "node.kubernetes.io/unreachable" for t in node["spec"].get("taints", []))

    await eventually(unreachable)
    await kube.delete(f"/api/v1/namespaces/{namespace}/pods/a", grace_seconds=1)
    assert (await kube.get(f"/api/v1/namespaces/{namespace}/pods/a"))["metadata"]["deletionTimestamp"]
    await kube.delete(f"/api/v1/namespaces/{namespace}/pods/a", grace_seconds=0)


async def test_container_exit_states(kube: Kube, namespace: str, fake_kubelet: FakeKubelet) -> None:
    await fake_kubelet.add_node("n2")
    for name in ("oom", "done", "again"):
        await create(kube, namespace, pod(name))
    for name in ("oom", "done", "again"):
        await running(kube, namespace, name)
    await fake_kubelet.fail_pod(namespace, "oom", exit_code=137, reason="OOMKilled")
    await fake_kubelet.succeed_pod(namespace, "done", message='{"outcome":"Succeeded"}')
    await fake_kubelet.restart_container(namespace, "again", exit_code=3)

    async def status(name: str) -> dict[str, Any]:
        whole = (await kube.get(f"/api/v1/namespaces/{namespace}/pods/{name}"))["status"]
        return {**whole["containerStatuses"][0], "phase": whole["phase"]}

    oom, done, again = [await status(name) for name in ("oom", "done", "again")]
    assert (oom["phase"], oom["state"]["terminated"]["reason"]) == ("Failed", "OOMKilled")
    assert (done["phase"], done["state"]["terminated"]["message"]) == (
        "Succeeded",
        '{"outcome":"Succeeded"}',
    )
    assert (again["phase"], again["restartCount"]) == ("Running", 1)
    assert again["lastState"]["terminated"]["exitCode"] == 3


async def test_missing_image_is_image_pull_back_off(
    kube: Kube, namespace: str, fake_kubelet: FakeKubelet
) -> None:
    fake_kubelet.image_errors["fake"] = 'Back-off pulling image "fake"'
    await fake_kubelet.add_node("n3")
    await create(kube, namespace, pod("a"))

    async def waiting() -> str:
        status = (await kube.get(f"/api/v1/namespaces/{namespace}/pods/a"))["status"]
        return str(
            (status.get("containerStatuses") or [{}])[0].get("state", {}).get("waiting", {}).get("reason", "")
        )

    assert await eventually(waiting) == "ImagePullBackOff"


@pytest.mark.parametrize("begun", [False, True])
async def test_what_was_asked_of_a_machine_that_was_not_heard_is_done_when_it_is_back(
    kube: Kube, namespace: str, fake_kubelet: FakeKubelet, begun: bool
) -> None:
    await fake_kubelet.add_node("node-1")
    await create(kube, namespace, pod("a"))
    await running(kube, namespace, "a")
    fake_kubelet.stop_seconds = 1.0
    path = f"/api/v1/namespaces/{namespace}/pods"
    if not begun:
        await fake_kubelet.vanish("node-1")
    await kube.delete(f"{path}/a")

    async def terminates() -> bool:
        return any(p["metadata"].get("deletionTimestamp") for p in fake_kubelet.pods.values())

    await eventually(terminates)
    if begun:
        await fake_kubelet.vanish("node-1")
        await asyncio.sleep(fake_kubelet.stop_seconds)
    await fake_kubelet.appear("node-1")

    async def gone() -> bool:
        return not (await kube.get(path))["items"]

    await eventually(gone)
