"""Gangs with the real Coscheduling of scheduler-plugins: two jobs that compete for the same nodes do not halve them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from dev.cluster import ControlPlane
from dev.kube import Json, Kube
from shoal.policy.tell.pod_problems import UNSCHEDULABLE_PATIENCE
from tests.control_plane import coscheduling
from tests.control_plane.operators import Job, eventually, own_control_plane, running_operator
from tests.doubles.fake_kubelet import FakeKubelet

NAMESPACE = "team"
WORKERS = 3
ROOM = 4
"""GPUs: enough for one gang, and for one worker of another."""
GPU = {"requests": {"nvidia.com/gpu": 1}, "limits": {"nvidia.com/gpu": 1}}

pytestmark = pytest.mark.nightly


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    """A control plane of its own: PodGroups are cluster-wide."""
    with own_control_plane(NAMESPACE) as plane, coscheduling.running(plane):
        yield plane


@pytest.fixture
async def kubelet(plane: ControlPlane) -> AsyncIterator[FakeKubelet]:
    async with FakeKubelet(plane.kubeconfig) as kubelet:
        await kubelet.add_node("safe-1")
        await kubelet.add_node("spot-1", spot=True, capacity={"nvidia.com/gpu": str(ROOM)})
        yield kubelet


def gang() -> Json:
    """A job of which no pod is placed before there is room for all of it."""

    def template(**container: Any) -> Json:
        return {"spec": {"schedulerName": coscheduling.NAME, "containers": [container]}}

    return {
        "runPolicy": {"schedulingPolicy": {"gang": "PodGroup"}},
        "parameterServers": {"template": template(name="ps")},
        "workers": {
            "replicas": WORKERS,
            "minReplicas": WORKERS,
            "template": template(name="worker", resources=GPU),
        },
    }


def placed(pods: dict[str, Json]) -> set[str]:
    return {name for name, pod in pods.items() if pod["spec"].get("nodeName")}


async def test_one_gang_runs_whole_and_the_other_holds_nothing(
    plane: ControlPlane, kubelet: FakeKubelet
) -> None:
    async with Kube(plane.kubeconfig) as kube, running_operator(plane.kubeconfig, NAMESPACE):
        jobs = [Job(kube, NAMESPACE, name) for name in ("first", "second")]
        for job in jobs:
            await job.apply(**gang())

        async def decided() -> list[Job] | None:
            phases = [(await job.status()).get("phase") for job in jobs]
            return (
                sorted(jobs, key=lambda job: job is not jobs[phases.index("Running")])
                if "Running" in phases
                else None
            )

        runs, waits = await eventually(decided, what="one of them runs")
        await runs.runs(WORKERS)

        async def told() -> bool:
            return "the pods of the gang wait" in (await waits.condition("Degraded")).get("message", "")

        await eventually(told, UNSCHEDULABLE_PATIENCE.total_seconds() + 30, "the other is told to wait")
        assert len(await waits.pods()) == 1 + WORKERS
        assert placed(await waits.pods()) == set()

        # A lost worker returns although the gang is placed already, and takes no place from the other.
        lost = next(name for name in await runs.pods() if "-worker-0-" in name)
        await kubelet.fail_pod(NAMESPACE, lost)
        await runs.slot_runs_again(0)
        assert placed(await waits.pods()) == set()

        await kube.delete(runs.path)
        await waits.runs(WORKERS)
