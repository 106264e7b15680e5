"""A fleet of jobs that run undisturbed: memory, and what the operator does while nothing happens.

Their coordinators answer, each from an address on loopback and with its job's certificate.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from benchmarks.harness import Measurement, summary
from benchmarks.operator.world import INSTALL_KEY, JOBS, OPERATOR, World, job, until
from dev.kube import Json
from shoal.controllers.trainingjob.credentials import InstallKey
from shoal_trainer.contract import Phase, StatusReport, WorkerReport, WorkerState
from tests.control_plane.coordinators import Coordinators
from tests.doubles.fake_kubelet import FakeKubelet

PODS = 10
JOBS_IN_ALL = int(os.environ.get("SHOAL_BENCH_JOBS", "1000"))
"""Fewer where the machine cannot run the control plane of so many."""
SETTLE_SECONDS = 20.0
IDLE_SECONDS = 60.0


class Reports:
    """What the coordinators say. `progress`: whether each report is another one."""

    def __init__(self) -> None:
        self.progress = False
        self._steps = itertools.count(1)

    def __call__(self, uid: str) -> StatusReport:
        """The report of one job."""
        done = next(self._steps) if self.progress else 1
        workers = tuple(
            WorkerReport(slot=slot, incarnation=0, state=WorkerState.ACTIVE, steps=done, first_push_at=1.0)
            for slot in range(PODS - 1)
        )
        return StatusReport(
            job_uid=uid,
            phase=Phase.TRAINING,
            step=done,
            samples=128 * done,
            samples_per_second=100.0,
            progress_percent=50.0,
            workers=workers,
        )


async def measure(world: World, quick: bool) -> AsyncIterator[Measurement]:
    """The rows."""
    half = 5 if quick else JOBS_IN_ALL // 2
    reports = Reports()
    coordinators = Coordinators(InstallKey(INSTALL_KEY), world.folder, reports)

    def pod_ip(pod: Json) -> str:
        labels = pod["metadata"]["labels"]
        number = int(labels["shoal.dev/job"].removeprefix("job-"))
        return coordinators.address(number) if labels["shoal.dev/role"] == "ps" else "10.0.0.1"

    async with AsyncExitStack() as resources:
        kubelet = FakeKubelet(world.plane.kubeconfig, heartbeat_seconds=10.0, pod_ip=pod_ip)
        await resources.enter_async_context(kubelet)
        for number in range(10):
            size = {"pods": "2000", "cpu": "4000", "memory": "8000Gi"}
            await kubelet.add_node(f"fleet-{number}", spot=number > 0, capacity=size)
        operator = await resources.enter_async_context(world.operator())
        resources.push_async_callback(coordinators.close)
        await asyncio.sleep(3.0)
        idle = operator.resident_mib
        await world.namespace("fleet")
        for first in (0, half):
            await _run(world, coordinators, range(first, first + half))
            await asyncio.sleep(SETTLE_SECONDS)
            pods = (first + half) * PODS
            goal = 150.0 if pods == 5000 else None
            used = operator.resident_mib
            yield summary(f"resident memory, {pods} pods that run", [used], "MiB", "", goal, at_most=True)
            held = (used - idle) * 2**20 / await _json_bytes(world)
            yield summary(
                f"resident memory above idle, {pods} pods, ratio",
                [held],
                "x",
                "the pods' JSON at the API server",
            )
        what = f"{2 * half} jobs of {PODS} pods"
        for reports.progress, name, goal in (
            (False, "idle", 5.0),
            (True, "whose training goes on", None),
        ):
            since, cpu = len(world.log.read()), operator.cpu_seconds
            await asyncio.sleep(IDLE_SECONDS / (6 if quick else 1))
            window = IDLE_SECONDS / (6 if quick else 1)
            share = (operator.cpu_seconds - cpu) / window * 100
            asked = sum(each.user == OPERATOR for each in world.log.read()[since:])
            yield summary(
                f"{what} {name}: CPU of the operator", [share], "% of a core", "", goal, at_most=True
            )
            yield summary(f"{what} {name}: requests of the operator", [asked / window], "/s", "")


async def _run(world: World, coordinators: Coordinators, numbers: range) -> None:
    """Apply these jobs, and wait until their pods run and the operator has heard their coordinators."""
    path = JOBS.format("fleet")
    places = asyncio.Semaphore(16)

    async def apply(number: int) -> None:
        async with places:
            made = await world.kube.create(path, job("fleet", f"job-{number}", PODS - 1))
            await coordinators.serve(number, made["metadata"]["uid"])

    await asyncio.gather(*(apply(number) for number in numbers))

    async def run() -> bool:
        listed = await world.kube.get(path)
        phases = [each.get("status", {}).get("phase") for each in listed["items"]]
        return phases.count("Running") == len(phases) == numbers.stop

    await until(run, every=2.0)


async def _json_bytes(world: World) -> int:
    """Bytes of the JSON of all pods, as the API server lists them."""
    total, query = 0, {"limit": "500"}
    while True:
        url = "/api/v1/namespaces/fleet/pods"
        async with world.kube.session.get(url, params=query) as answer:
            text = await answer.read()
        total += len(text)
        mark = b'"continue":"'
        if mark not in text[:500]:
            return total
        query["continue"] = text.partition(mark)[2].partition(b'"')[0].decode()
