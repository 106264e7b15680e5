"""The loop on a real control plane: reports become a profile, plans move pods, pools and costs are counted."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from dev.cluster import ControlPlane
from dev.fake_kubelet import FakeKubelet
from dev.kube import Json, Kube
from shoal_trainer.contract import (
    LogSums,
    ModelReport,
    Phase,
    ShardReport,
    SpeedSums,
    StatusReport,
    WorkerReport,
    WorkerState,
)
from tests.control_plane.operators import FakeCoordinator, Job, eventually, running_operator

MODEL = ModelReport(fingerprint="cd" * 32, parameters=500_000, tensors=20, flops_per_sample=8e7)
POOLS = "/apis/shoal.dev/v1alpha1/capacitypools"


def pool(name: str, namespace: str, price: str, spot: bool, nodes: int) -> Json:
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "CapacityPool",
        "metadata": {"name": f"{name}-{namespace}"},
        "spec": {
            "accelerator": {"name": "T4"},
            "capacityType": "Spot" if spot else "OnDemand",
            "nodeSelector": {"example.com/pool": f"{name}-{namespace}"},
            "limits": {"nodes": nodes},
            "price": {"perHour": price},
            "startupSeconds": 1,
        },
    }


def sums(seconds: float, count: int) -> LogSums:
    log = math.log(seconds)
    return LogSums(count=count, total=log * count, squares=log * log * count)


def report(uid: str, workers: int, left: float, seconds: float = 0.2) -> StatusReport:
    speed = SpeedSums(
        device="T4",
        devices=1,
        cores=4,
        batch_size=128,
        workers=workers,
        servers=1,
        compute=sums(seconds, 1000),
        pull=sums(0.01, 1000),
        push=sums(0.01, 1000),
    )
    shard = ShardReport(index=0, epoch=0, boot=1, busy_seconds=1.0, updates=1000, bytes_received=10**9)
    return StatusReport(
        job_uid=uid,
        phase=Phase.TRAINING,
        step=1000,
        model=MODEL,
        speed=(speed,),
        speed_epoch="one",
        shards=(shard,),
        samples_left=left,
        samples_per_second=workers * 128 / seconds,
        workers=tuple(
            WorkerReport(slot=slot, incarnation=0, state=WorkerState.ACTIVE, first_push_at=1.0)
            for slot in range(workers)
        ),
    )


@pytest.fixture
async def pools(kube: Kube, crds: None, fake_kubelet: FakeKubelet, namespace: str) -> Any:
    await fake_kubelet.add_node("safe-1")
    for number in range(4):
        label = {"example.com/pool": f"spot-{namespace}"}
        await fake_kubelet.add_node(f"spot-{number}", spot=True, labels=label)
    for number in range(3):
        await fake_kubelet.add_node(f"od-{number}", labels={"example.com/pool": f"od-{namespace}"})
    for each in (pool("spot", namespace, "0.3", True, 4), pool("od", namespace, "1.0", False, 3)):
        await kube.create(POOLS, each)
    yield None
    for name in ("spot", "od"):
        await kube.delete(f"{POOLS}/{name}-{namespace}")


@pytest.mark.timeout(120)
async def test_running_job_teaches_the_predictor_and_is_moved_to_the_pools_it_needs(
    control_plane: ControlPlane, pools: None, kube: Kube, namespace: str
) -> None:
    job, coordinator = Job(kube, namespace), FakeCoordinator()
    names = [f"spot-{namespace}", f"od-{namespace}"]
    async with running_operator(control_plane.kubeconfig, namespace, coordinator, plan_seconds=1.0):
        applied = await job.apply(
            workers={"replicas": 2, "minReplicas": 1, "maxReplicas": 7, "pools": names},
            elasticity={
                "mode": "Auto",
                "objective": {"deadlineSeconds": 3600},
                "stabilizationSeconds": {"up": 0, "down": 0},
            },
        )
        uid = applied["metadata"]["uid"]
        await job.runs(2)
        # A worker makes 640 samples a second: 12 million in an hour need more workers than there are spot nodes.
        coordinator.reports[uid] = report(uid, 2, 12e6)

        async def moved() -> bool:
            nodes = Counter(
                pod["spec"].get("nodeName", "").split("-")[0]
                for name, pod in (await job.pods()).items()
                if "worker" in name and pod["status"].get("phase") == "Running"
            )
            plan = (await job.status())["plan"][
                "pools"
            ]  # written after the pods that follow from it are created
            return nodes["spot"] == plan[names[0]] == 4 and nodes["od"] == plan.get(names[1], 0) >= 2

        await eventually(moved, seconds=60)
        status = await job.status()
        assert status["plan"]["finishTime"]
        assert float(status["plan"]["confidence"]) >= 0.95
        assert {slot["pool"] for slot in status["slots"] if slot.get("role", "worker") == "worker"} == set(
            names
        )
        assert "PlanChanged" in await job.events()
        assert float(status["prediction"]["samplesPerSecond"]) > 3000

        profiles = await kube.get(f"/apis/shoal.dev/v1alpha1/namespaces/{namespace}/speedprofiles")
        [profile] = profiles["items"]
        assert profile["status"]["model"]["parameters"] == 500_000
        [row] = profile["status"]["rows"]
        assert (row["device"], row["batchSize"], row["workers"]) == ("T4", 128, 2)
        assert float(row["compute"]["meanLog"]) == pytest.approx(math.log(0.2), abs=0.01)

        async def pool_told() -> bool:
            found = (await kube.get(f"{POOLS}/{names[0]}")).get("status", {})
            return (found.get("nodes"), found.get("used"), found.get("recommended", {}).get("nodes")) == (
                4,
                4,
                4,
            )

        await eventually(pool_told, seconds=40)
        listed = control_plane.kubectl("get", "cpool", names[0])
        assert listed.split()[-1] != ""

        # The spot nodes alone are early enough now, and what is left takes longer than a drained node is paid for.
        coordinator.reports[uid] = report(uid, 6, 6e6)

        async def given_back() -> bool:
            plan = (await job.status()).get("plan", {})
            return bool(plan.get("pools")) and names[1] not in plan["pools"]

        await eventually(given_back, seconds=40)

        async def charged() -> bool:
            return float((await job.status()).get("cost", {}).get("accumulated", 0)) > 0

        await eventually(charged, seconds=40)


async def test_advise_changes_nothing(
    control_plane: ControlPlane, pools: None, kube: Kube, namespace: str
) -> None:
    job, coordinator = Job(kube, namespace), FakeCoordinator()
    names = [f"spot-{namespace}", f"od-{namespace}"]
    async with running_operator(control_plane.kubeconfig, namespace, coordinator, plan_seconds=1.0):
        applied = await job.apply(
            workers={"replicas": 2, "maxReplicas": 7, "pools": names},
            elasticity={"mode": "Advise", "objective": {"deadlineSeconds": 3600}},
        )
        uid = applied["metadata"]["uid"]
        await job.runs(2)
        coordinator.reports[uid] = report(uid, 2, 12e6)

        async def advised() -> bool:
            plan = (await job.status()).get("plan", {})
            return sum(plan.get("pools", {}).values()) >= 6

        await eventually(advised, seconds=40)
        workers = [name for name in await job.pods() if "worker" in name]
        assert len(workers) == 2
        assert (await kube.get(job.path))["spec"]["workers"]["replicas"] == 2
