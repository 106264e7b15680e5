"""How a parameter server leaves a node that Karpenter wants back, while the workers run on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from dev.cluster import ControlPlane
from dev.kube import MERGE, Kube, tolerant
from tests.control_plane.operators import Job, eventually, running_operator
from tests.doubles.fake_kubelet import FakeKubelet

TAINT = {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}
FINALIZER = "karpenter.sh/termination"
LABELS = {
    spot: {"karpenter.sh/nodepool": "pool", "karpenter.sh/capacity-type": "spot" if spot else "on-demand"}
    for spot in (True, False)
}


async def cordon(kube: Kube, node: str) -> None:
    """What a person does: Karpenter begins nothing on a node with a pod that says `karpenter.sh/do-not-disrupt`."""
    await kube.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": True}})


async def expire(kube: Kube, node: str) -> None:
    """What Karpenter does when a node has expired, whoever is on it: a taint, and the deletion of the node."""
    path = f"/api/v1/nodes/{node}"
    await kube.patch(path, {"metadata": {"finalizers": [FINALIZER]}, "spec": {"taints": [TAINT]}})
    await kube.delete(path)


@pytest.mark.parametrize("want_back", [cordon, expire])
async def test_a_server_leaves_its_node_and_the_workers_run_on(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, fake_kubelet: FakeKubelet,
    want_back: Callable[[Kube, str], Awaitable[None]],
) -> None:  # fmt: skip
    for name in ("safe-1", "safe-2"):
        await fake_kubelet.add_node(name, labels=LABELS[False])
    await fake_kubelet.add_node("spot-1", labels=LABELS[True])
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        await job.runs()
        before = await job.pods()
        assert before["digits-ps-0-0"]["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
        old = before["digits-ps-0-0"]["spec"]["nodeName"]
        try:
            await want_back(kube, old)
            new = await job.pod_runs("digits-ps-0-1")
            assert new["spec"]["nodeName"] not in {old, "spot-1"}

            async def left() -> bool:
                return not fake_kubelet.pods_on(old)

            await eventually(left, what="nothing keeps the node")
        finally:
            with tolerant(404):
                await kube.request("PATCH", f"/api/v1/nodes/{old}", {"metadata": {"finalizers": None}},
                                   content_type=MERGE)  # fmt: skip
        await job.runs()
        now = await job.pods()
        workers = {name: pod["metadata"]["uid"] for name, pod in before.items() if "worker" in name}
        assert {name: now[name]["metadata"]["uid"] for name in workers} == workers
        status = await job.status()
        assert status["restarts"]["disruptions"] == status["restarts"]["failures"] == 0
        assert status["parameterServers"]["restarts"] == 1
