"""Operator: reaction and scale on a real control plane with fake nodes, against a bare client loop in the same run."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import Measurement, summary
from dev.audit import Write, writes
from dev.cluster import ControlPlane
from dev.fake_kubelet import FakeKubelet
from dev.kube import Json, Kube
from shoal.api.training_job import TrainingJob
from shoal.policy.model import CreatePod, Observation
from shoal.policy.plan import plan
from tests.unit.policy import build

CRDS = Path(__file__).parents[1] / "crds"
JOBS = "/apis/shoal.dev/v1alpha1/namespaces/{}/trainingjobs"
PATIENCE = 300.0


def measure(quick: bool) -> Iterator[Measurement]:
    """All figures of one run on one control plane."""
    yield from _planning(quick)
    yield from asyncio.run(_on_a_control_plane(quick))


def _planning(quick: bool) -> Iterator[Measurement]:
    """How long one change of a job with 1,000 workers holds the event loop, and the size of its status."""
    workers = 100 if quick else 1000
    manifest = build.job_manifest(workers={"replicas": workers, "maxReplicas": 1000})
    job = TrainingJob.model_validate(manifest)
    pods = (build.pod("ps"), *(build.pod("worker", index) for index in range(workers)))
    seen: Observation = build.observe(job, *pods)
    first = plan(seen)
    settled = build.observe(job.model_copy(update={"status": first.status}), *pods)
    spent = []
    for _ in range(5):
        began = time.perf_counter()
        plan(settled)
        spent.append((time.perf_counter() - began) * 1000)
    yield summary(f"plan of one change, {workers} workers", spent, "ms", "", 10.0, at_most=True)
    size = len(first.status.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True)) / 1024
    yield summary(f"status, {workers} workers", [size], "KiB", "", 60.0 * workers / 1000, at_most=True)


async def _on_a_control_plane(quick: bool) -> list[Measurement]:
    with ControlPlane.start() as plane, tempfile.TemporaryDirectory() as folder:
        plane.kubectl("apply", "--server-side", "-f", str(CRDS))
        async with Kube(plane.kubeconfig) as kube:
            await _served(kube)
            bare = await _bare_rate(plane, kube, 100 if quick else 1000)
            async with _operator(plane, Path(folder)) as pid:
                idle = _resident(pid)
                found = [
                    summary("resident memory, idle", [idle], "MiB", "", 90.0, at_most=True),
                    *await _started(plane, kube, pid, bare, 20 if quick else 200),
                ]
            async with (
                _operator(plane, Path(folder)) as pid,
                FakeKubelet(plane.kubeconfig) as kubelet,
            ):
                return [*found, *await _replaced(plane, kube, kubelet, 8 if quick else 32)]


async def _served(kube: Kube) -> None:
    async def listed() -> bool:
        return "items" in await kube.get("/apis/shoal.dev/v1alpha1/trainingjobs")

    await _until(listed)


async def _bare_rate(plane: ControlPlane, kube: Kube, pods: int) -> float:
    """Pods a second that a client makes that does nothing else, 64 requests at a time."""
    await _namespace(kube, "bare")
    made = build.observe(TrainingJob.model_validate(_job("bare", "bare", 1)))
    manifest = next(a.manifest for a in plan(made).actions if isinstance(a, CreatePod))
    manifest = {**manifest, "metadata": {"name": "", "labels": manifest["metadata"]["labels"]}}
    places = asyncio.Semaphore(64)

    async def create(number: int) -> None:
        async with places:
            body = {**manifest, "metadata": {**manifest["metadata"], "name": f"bare-{number}"}}
            await kube.create("/api/v1/namespaces/bare/pods", body)

    await asyncio.gather(*(create(number) for number in range(pods)))
    return _rate(_creates(plane, "bare"))


async def _started(plane: ControlPlane, kube: Kube, pid: int, bare: float, jobs: int) -> list[Measurement]:
    """Jobs of 5 pods, applied together: how fast their pods are made."""
    await _namespace(kube, "many")
    places = asyncio.Semaphore(32)

    async def apply(number: int) -> None:
        async with places:
            await kube.create(JOBS.format("many"), _job(f"job-{number}", "many", 4))

    await asyncio.gather(*(apply(number) for number in range(jobs)))

    async def all_made() -> bool:
        return len(_creates(plane, "many")) >= 5 * jobs

    await _until(all_made)
    made = _creates(plane, "many")
    # Each pod has its share of a Secret, a Service and a budget: these are requests of the same weight.
    objects = sum(
        w.verb == "create"
        and w.code == 201
        and w.resource in {"pods", "services", "secrets", "poddisruptionbudgets"}
        for w in writes(plane.audit_log, namespace="many")
    )
    seconds = (made[-1].answered - made[0].received).total_seconds()
    rate = objects / seconds
    memory = _resident(pid)
    return [
        summary(f"{jobs} jobs of 5 pods: objects made", [rate / bare], "x", "a bare client", 0.7),
        summary(f"{jobs} jobs of 5 pods: last CREATE", [seconds], "s", ""),
        summary(f"resident memory, {5 * jobs} pods", [memory], "MiB", ""),
    ]


async def _replaced(plane: ControlPlane, kube: Kube, kubelet: FakeKubelet, workers: int) -> list[Measurement]:
    """Workers of one job that end one after the other, and then half of them at once."""
    await _namespace(kube, "one")
    await kubelet.add_node("safe")
    for number in range(4):
        await kubelet.add_node(f"spot-{number}", spot=True, capacity={"pods": "500", "cpu": "500"})
    job = _job("one", "one", workers)
    job["spec"]["runPolicy"] = {"backoffLimit": 1_000_000}
    path = f"{JOBS.format('one')}/one"
    await kube.create(JOBS.format("one"), job)

    async def all_run() -> bool:
        status = (await kube.get(path)).get("status", {})
        return bool(status.get("workers", {}).get("ready") == workers)

    await _until(all_run)

    async def take(name: str) -> None:
        """The platform takes a pod: it is gone at once."""
        await kube.delete(f"/api/v1/namespaces/one/pods/{name}", grace_seconds=0)

    single = []
    for index in range(min(workers, 12)):
        before = len(_creates(plane, "one"))
        await take(f"one-worker-{index}-0")
        ended = max(w.answered for w in writes(plane.audit_log, namespace="one") if _is_loss(w))

        async def replaced(before: int = before) -> bool:
            return len(_creates(plane, "one")) > before

        await _until(replaced)
        created = _creates(plane, "one")[before]
        single.append((created.received - ended).total_seconds() * 1000)
    single.sort()
    await _until(all_run)
    listed = await kube.get("/api/v1/namespaces/one/pods", labelSelector="shoal.dev/role=worker")
    running = [pod["metadata"]["name"] for pod in listed["items"] if pod["status"].get("phase") == "Running"]
    half = running[: workers // 2]
    before = len(_creates(plane, "one"))
    at = len(list(writes(plane.audit_log, namespace="one")))
    await asyncio.gather(*(take(name) for name in half))

    async def burst_replaced() -> bool:
        return len(_creates(plane, "one")) >= before + len(half)

    await _until(burst_replaced)
    await _until(all_run)
    after = list(writes(plane.audit_log, namespace="one"))[at:]
    last = _creates(plane, "one")[before + len(half) - 1]
    ours = [
        w
        for w in after
        if w.verb in {"create", "delete", "update"}
        and w.resource in {"pods", "trainingjobs", "events"}
        and w.subresource != "binding"
    ]
    ours = [w for w in ours if not (w.resource == "pods" and w.subresource == "status")]
    return [
        summary(
            f"taken pod to CREATE, {workers} workers: median",
            [statistics.median(single)],
            "ms",
            "",
            15.0,
            at_most=True,
        ),
        summary(
            f"taken pod to CREATE, {workers} workers: largest of {len(single)}",
            [single[-1]],
            "ms",
            "",
            50.0,
            at_most=True,
        ),
        summary(f"{len(half)} lost at once: writes for each", [len(ours) / len(half)], "", ""),
        summary(
            f"{len(half)} lost at once: first to last CREATE",
            [(last.received - _creates(plane, "one")[before].received).total_seconds()],
            "s",
            "",
        ),
    ]


def _job(name: str, namespace: str, workers: int) -> Json:
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "storage": {"ephemeral": {}},
            "training": {"entrypoint": "digits:job", "stopAfter": {"epochs": 1}},
            "workers": {"replicas": workers, "maxSurge": "100%", "capacity": "Any"},
        },
    }


async def _namespace(kube: Kube, name: str) -> None:
    await kube.create("/api/v1/namespaces", {"metadata": {"name": name}})

    async def account() -> Any:
        return await kube.get(f"/api/v1/namespaces/{name}/serviceaccounts/default")

    await _until(account)


def _creates(plane: ControlPlane, namespace: str) -> list[Write]:
    made = writes(plane.audit_log, namespace=namespace)
    return [w for w in made if (w.verb, w.resource, w.subresource, w.code) == ("create", "pods", "", 201)]


def _is_loss(write: Write) -> bool:
    return write.verb == "delete" and write.resource == "pods" and "worker" in write.name


def _rate(made: list[Write]) -> float:
    return len(made) / (made[-1].answered - made[0].received).total_seconds()


def _resident(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def _until(reached: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            if await reached():
                return
        except Exception:  # broad: not there yet
            pass
        if time.monotonic() > deadline:
            raise TimeoutError("the control plane did not get there")
        await asyncio.sleep(0.05)


@asynccontextmanager
async def _operator(plane: ControlPlane, folder: Path) -> AsyncIterator[int]:
    """The real process; its pid."""
    key = folder / "key"
    key.write_bytes(bytes(range(32)))
    environment = {
        **os.environ,
        "KUBECONFIG": str(plane.kubeconfig),
        "SHOAL_INSTALL_KEY_FILE": str(key),
        "SHOAL_IMAGE_PS": "ps:bench",
        "SHOAL_IMAGE_WORKER": "worker:bench",
        "SHOAL_METRICS_PORT": "0",
        "SHOAL_HEALTH_PORT": "0",
        "SHOAL_LOG_LEVEL": "warning",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "shoal.process.main", env=environment
    )
    try:
        lease = "/apis/coordination.k8s.io/v1/namespaces/default/leases/shoal"

        async with Kube(plane.kubeconfig) as kube:

            async def leads() -> bool:
                return bool((await kube.get(lease))["spec"].get("holderIdentity"))

            await _until(leads)
            await asyncio.sleep(3.0)  # what is measured as idle
        yield process.pid
    finally:
        process.terminate()
        await process.wait()
