"""Production takes half of the GPUs of examples/priorities.yaml: the job goes on with the rest, and comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import yaml

from dev.audit import creates
from dev.cluster import ControlPlane
from dev.kube import Json, Kube, tolerant
from dev.paths import ROOT
from shoal.policy.decide import workers as policy
from tests.control_plane.operators import Job, eventually, running_operator
from tests.doubles.fake_kubelet import FakeKubelet

GRACE_SECONDS = 2
"""Of workers, here; all of it is used."""
CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


def example(gpus: int, taken: int) -> dict[str, list[Json]]:
    """The example's manifests by kind, of this size."""
    found: dict[str, list[Json]] = {}
    for each in yaml.safe_load_all((ROOT / "examples/priorities.yaml").read_text()):
        found.setdefault(each["kind"], []).append(each)
    job, service = found["TrainingJob"][0]["spec"], found["Deployment"][0]["spec"]
    job["workers"] |= {"replicas": gpus, "minReplicas": 1, "maxReplicas": gpus}
    job["workers"]["template"]["spec"]["terminationGracePeriodSeconds"] = GRACE_SECONDS
    service["replicas"] = taken
    return found


@pytest.fixture
async def classes(kube: Kube) -> AsyncIterator[None]:
    """The example's PriorityClasses, which are cluster-scoped."""
    made = example(1, 1)["PriorityClass"]
    for each in made:
        await kube.create(CLASSES, each)
    yield
    for each in made:
        with tolerant(404):
            await kube.delete(f"{CLASSES}/{each['metadata']['name']}")


async def running(kube: Kube, namespace: str, selector: str) -> int:
    listed = await kube.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)
    return sum(
        pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
        for pod in listed["items"]
    )


async def seconds_until(number: int, kube: Kube, namespace: str, selector: str, limit: float) -> float:
    """How long it takes until exactly so many pods run."""
    began = time.monotonic()

    async def reached() -> bool:
        return await running(kube, namespace, selector) == number

    await eventually(reached, limit, f"{number} of {selector} run")
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("gpus", "taken", "most"),
    [(12, 6, 3), pytest.param(100, 50, 25, marks=pytest.mark.nightly)],
    ids=["12", "100"],
)
async def test_production_takes_half_of_the_gpus_and_gives_them_back(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, fake_kubelet: FakeKubelet,
    classes: None, gpus: int, taken: int, most: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`most`: a quarter of the workers, of which replacements wait for room."""
    monkeypatch.setattr(policy, "MIN_UNSCHEDULED", most)  # else it would be all of a small job's
    fake_kubelet.stop_seconds = GRACE_SECONDS
    await asyncio.gather(
        *(fake_kubelet.add_node(f"safe-{n}") for n in range(2)),
        *(
            fake_kubelet.add_node(f"gpu-{n}", spot=True, capacity={"nvidia.com/gpu": "1"})
            for n in range(gpus)
        ),
    )
    made = example(gpus, taken)
    job = Job(kube, namespace, "experiment")
    workers = "shoal.dev/role=worker"
    async with running_operator(control_plane.kubeconfig, namespace):
        await kube.create(job.path.rpartition("/")[0], made["TrainingJob"][0])
        await job.runs(gpus)
        servers = {n: p["metadata"]["uid"] for n, p in (await job.pods()).items() if "-ps-" in n}

        deployments = f"/apis/apps/v1/namespaces/{namespace}/deployments"
        await kube.create(deployments, made["Deployment"][0])
        took = await seconds_until(taken, kube, namespace, "app=service", GRACE_SECONDS + 10)
        assert await running(kube, namespace, workers) == gpus - taken

        async def told() -> Json | None:
            status = await job.status()
            counted = status["restarts"]["byReason"] == {"PreemptionByScheduler": taken}
            return status if counted and status["workers"]["ready"] == gpus - taken else None

        status = dict(await eventually(told))
        assert status["phase"] == "Running"
        assert status["restarts"]["failures"] == 0

        # Replacements wait for room, but only some of them: neither scheduler nor autoscaler is flooded.
        async def wait() -> Json | None:
            status = await job.status()
            return status if status["workers"]["pending"] >= most else None

        status = dict(await eventually(wait, what="replacements wait"))
        made_since = len(creates(control_plane.audit_log, "pods", namespace=namespace)) - gpus - taken - 2
        assert (status["workers"]["pending"], made_since) == (most, most)

        await kube.delete(f"{deployments}/service")
        back = await seconds_until(gpus, kube, namespace, workers, 30)
        assert {n: p["metadata"]["uid"] for n, p in (await job.pods()).items() if "-ps-" in n} == servers
        await job.runs(gpus)
        assert (await job.status())["restarts"] == status["restarts"]
    print(
        f"production ran after {took:.1f} s of which {GRACE_SECONDS} s grace; the job was back after {back:.1f} s"
    )
