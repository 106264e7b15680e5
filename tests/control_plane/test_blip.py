"""The API server is away for a while and all nodes turn Unknown at its return, while every pod runs on."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from dev.audit import writes
from dev.cluster import ControlPlane
from dev.kube import Kube
from tests.control_plane.conftest import fresh_namespace
from tests.control_plane.operators import Job, OperatorProcess, eventually
from tests.doubles.fake_kubelet import FakeKubelet

SERVERS = 2
"""Of each job."""
WATCHED_SECONDS = 75.0
"""After its return: longer than the operator waits before it believes that nodes are gone."""
UNKNOWN_AFTER_SECONDS = 60.0
UNKNOWN_SECONDS = 5.0
"""As seen on real nodes."""
GRACE = ("--node-monitor-grace-period=20s", "--node-monitor-period=2s")
"""Shorter than the default, as the outage is; nodes turn Unknown at the first look after it."""


async def uids(jobs: list[Job]) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for job in jobs for name, pod in (await job.pods()).items()}


async def ready_states(kube: Kube) -> set[str]:
    nodes = (await kube.get("/api/v1/nodes"))["items"]
    return {c["status"] for node in nodes for c in node["status"]["conditions"] if c["type"] == "Ready"}


def pod_writes(plane: ControlPlane, namespace: str) -> int:
    """How many pods were created or deleted so far."""
    done = writes(plane.audit_log, namespace=namespace)
    return sum(w.resource == "pods" and not w.subresource and w.verb in {"create", "delete"} for w in done)


@pytest.mark.nightly
@pytest.mark.parametrize("away_seconds", [45.0, 120.0])
async def test_an_outage_of_the_api_server_deletes_nothing_and_counts_nothing(
    tmp_path: Path, away_seconds: float
) -> None:
    """B1: five healthy pods were deleted within 4 s of its return, a second before their nodes were Ready again."""
    with ControlPlane.start(controller_manager_args=GRACE) as plane:
        plane.kubectl("apply", "--server-side", "-f", str(Path(__file__).parents[2] / "crds"))
        async with Kube(plane.kubeconfig) as kube, FakeKubelet(plane.kubeconfig) as kubelet:
            await kubelet.add_node("safe-1")
            await kubelet.add_node("safe-2")
            for number in range(3):
                await kubelet.add_node(f"spot-{number}", spot=True)
            async with (
                fresh_namespace(kube) as namespace,
                OperatorProcess(plane.kubeconfig, namespace, tmp_path) as process,
                process.kept_running(),
            ):
                jobs = [Job(kube, namespace, name) for name in ("one", "two")]
                for job in jobs:
                    await job.apply(parameterServers={"replicas": SERVERS})
                for job in jobs:
                    await job.runs()
                before = await uids(jobs)
                changes = pod_writes(plane, namespace)
                server = plane.processes.find("kube-apiserver")
                assert server is not None
                for (
                    name
                ) in kubelet.nodes:  # by themselves, some would be heard again before they are looked at
                    await kubelet.vanish(name)
                server.signal(signal.SIGSTOP)
                try:
                    await asyncio.sleep(away_seconds)  # what is tested is what this much time does
                finally:
                    server.signal(signal.SIGCONT)

                async def all_unknown() -> bool:
                    return await ready_states(kube) == {"Unknown"}

                await eventually(all_unknown, UNKNOWN_AFTER_SECONDS)
                await asyncio.sleep(UNKNOWN_SECONDS)
                for name in kubelet.nodes:
                    await kubelet.appear(name)
                deadline = asyncio.get_running_loop().time() + WATCHED_SECONDS
                while asyncio.get_running_loop().time() < deadline:
                    assert await uids(jobs) == before
                    await asyncio.sleep(0.2)
                assert await ready_states(kube) == {"True"}
                assert pod_writes(plane, namespace) == changes
                for job in jobs:
                    status = await job.status()
                    assert status["restarts"].get("disruptions", 0) == 0
                    assert status["parameterServers"].get("restarts", 0) == 0
                    # An operator that is dead deletes nothing either.
                    await kube.delete(
                        f"/api/v1/namespaces/{namespace}/pods/{job.name}-worker-0-0", grace_seconds=0
                    )
                    await job.slot_runs_again(0)
