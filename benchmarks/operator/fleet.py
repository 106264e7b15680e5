"""A fleet of jobs that run undisturbed: memory, and what the operator does while nothing happens.

Their coordinators answer, each from an address on loopback and with its job's certificate.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.harness import Measurement, summary
from benchmarks.operator.world import INSTALL_KEY, JOBS, OPERATOR, World, job, until
from dev.fake_kubelet import FakeKubelet
from dev.kube import Json
from shoal.controllers.trainingjob.credentials import job_credentials
from shoal_trainer.contract import CONTROL_PORT, Phase, StatusReport, WorkerReport, WorkerState

PODS = 10
SETTLE_SECONDS = 20.0
IDLE_SECONDS = 60.0


class Coordinators:
    """The coordinators of all jobs. `progress`: whether each report is another one."""

    def __init__(self, folder: Path) -> None:
        self.progress = False
        self._folder = folder
        self._samples = itertools.count(1)
        self._servers: list[asyncio.Server] = []

    def address(self, number: int) -> str:
        """The address of a job's coordinator."""
        return f"127.64.{number // 250}.{number % 250 + 1}"

    async def serve(self, number: int, uid: str) -> None:
        """Answer for one job until `close`."""
        known = job_credentials(INSTALL_KEY, uid)
        pem = self._folder / "coordinator.pem"
        pem.write_text(known.private_key + known.certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while await reader.readuntil(b"\r\n\r\n"):
                    body = self._report(uid).encode()
                    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                    writer.write(head.encode() + body)
                    await writer.drain()
            except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
                writer.close()

        host = self.address(number)
        self._servers.append(await asyncio.start_server(answer, host, CONTROL_PORT, ssl=context))

    def close(self) -> None:
        """Stop answering."""
        for server in self._servers:
            server.close()

    def _report(self, uid: str) -> str:
        done = next(self._samples) if self.progress else 1
        workers = tuple(
            WorkerReport(slot=slot, incarnation=0, state=WorkerState.ACTIVE, steps=done, first_push_at=1.0)
            for slot in range(PODS - 1)
        )
        return StatusReport(
            job_uid=uid, phase=Phase.TRAINING, step=done, samples=128 * done, samples_per_second=100.0,
            progress_percent=50.0, workers=workers,
        ).to_json()  # fmt: skip


async def measure(world: World, quick: bool) -> AsyncIterator[Measurement]:
    """The rows."""
    half = 5 if quick else 500
    coordinators = Coordinators(world.folder)

    def pod_ip(pod: Json) -> str:
        labels = pod["metadata"]["labels"]
        number = int(labels["shoal.dev/job"].removeprefix("job-"))
        return coordinators.address(number) if labels["shoal.dev/role"] == "ps" else "10.0.0.1"

    async with AsyncExitStack() as resources:
        kubelet = FakeKubelet(world.plane.kubeconfig, heartbeat_seconds=10.0, pod_ip=pod_ip)
        await resources.enter_async_context(kubelet)
        for number in range(10):
            size = {"pods": "2000", "cpu": "4000"}
            await kubelet.add_node(f"fleet-{number}", spot=number > 0, capacity=size)
        operator = await resources.enter_async_context(world.operator())
        resources.callback(coordinators.close)
        await asyncio.sleep(3.0)
        idle = operator.resident_mib
        await world.namespace("fleet")
        for first in (0, half):
            await _run(world, coordinators, range(first, first + half))
            await asyncio.sleep(SETTLE_SECONDS)
            pods, goal = (first + half) * PODS, 150.0 if first == 0 else None
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
        for coordinators.progress, name, goal in (
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
