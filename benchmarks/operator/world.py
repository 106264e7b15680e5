"""The control plane, the operator's process, the bare client's, and what the audit log says of them."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.operator import traced
from dev.audit import READS, AuditTail, Write
from dev.cluster import ControlPlane
from dev.cluster.control_plane import OPERATOR_NAMESPACE, PROCESSES
from dev.kube import ApiError, Json, Kube, tolerant
from tests.control_plane import service_account

PATIENCE = 600.0
ACCOUNT = "shoal"


def user(account: str) -> str:
    """A service account beside the operator's, as the API server names it."""
    return f"system:serviceaccount:{OPERATOR_NAMESPACE}:{account}"


OPERATOR = user(ACCOUNT)
INSTALL_KEY = bytes(range(32))
JOBS = "/apis/shoal.dev/v1alpha1/namespaces/{}/trainingjobs"
OBJECTS = frozenset({"pods", "services", "secrets", "poddisruptionbudgets"})


@dataclass
class World:
    """One control plane. `log`: its whole audit log so far."""

    plane: ControlPlane
    kube: Kube
    folder: Path
    log: AuditTail = field(init=False)

    def __post_init__(self) -> None:
        self.log = AuditTail(self.plane.audit_log)

    def writes(self, namespace: str, *, user: str = "", since: int = 0) -> list[Write]:
        """The accepted writes in a namespace, of one user or of all, after the first `since` lines of the log."""
        return [
            each
            for each in self.log.read()[since:]
            if each.namespace == namespace
            and each.verb not in READS
            and each.code < 300
            and user in ("", each.user)
        ]

    def creates(self, namespace: str, *, since: int = 0) -> list[Write]:
        """Pods made in a namespace, in order."""
        return [
            each
            for each in self.writes(namespace, since=since)
            if is_create(each) and each.resource == "pods"
        ]

    async def count(self, namespace: str, kind: str = "pods") -> int:
        """How many there are: a create that the API server gave up (504) may have been carried out."""
        listed = await self.kube.get(f"/api/v1/namespaces/{namespace}/{kind}", limit="1")
        return len(listed["items"]) + int(listed["metadata"].get("remainingItemCount") or 0)

    async def namespace(self, name: str) -> None:
        """A namespace in which pods can be made at once."""
        await self.kube.create("/api/v1/namespaces", {"metadata": {"name": name}})
        await until(lambda: self.kube.get(f"/api/v1/namespaces/{name}/serviceaccounts/default"))

    async def apply(self, job: Json) -> None:
        """A TrainingJob."""
        await self.kube.create(JOBS.format(job["metadata"]["namespace"]), job)

    async def status(self, namespace: str, name: str) -> Json:
        """A job's status."""
        found = await self.kube.get(f"{JOBS.format(namespace)}/{name}")
        return dict(found.get("status") or {})

    async def run(self, namespace: str, name: str, workers: int) -> None:
        """Wait until this many workers of a job are ready."""

        async def ready() -> bool:
            found = (await self.status(namespace, name)).get("workers", {})
            return bool(found.get("ready") == found.get("desired") == workers)

        await until(ready)

    async def account(self, name: str) -> Path:
        """The mounted files of a service account that may do everything."""
        folder = self.folder / f"account-{name}"
        await service_account.mount(self.plane, self.kube, name, folder)
        binding = {
            "metadata": {"name": f"bench-{name}"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": "cluster-admin",
            },
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": OPERATOR_NAMESPACE}],
        }
        with tolerant(409):
            await self.kube.create("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", binding)
        return folder

    @asynccontextmanager
    async def operator(
        self, identity: str = "operator-0", *, trace: Path | None = None, **more: str
    ) -> AsyncIterator[Operator]:
        """The real process, as in its pod, once it leads or stands by. `trace`: where it writes its moments."""
        account, key = await self.account(ACCOUNT), self.folder / "key"
        key.write_bytes(INSTALL_KEY)
        operator = Operator(
            service_account.command(account) if trace is None else traced.command(account, trace),
            service_account.environment(
                self.plane,
                SHOAL_INSTALL_KEY_FILE=str(key),
                SHOAL_IMAGE_PS="ps:bench",
                SHOAL_IMAGE_WORKER="worker:bench",
                SHOAL_METRICS_PORT="0",
                SHOAL_HEALTH_PORT="0",
                SHOAL_LOG_LEVEL="error",
                POD_NAME=identity,
                **more,
            ),
        )
        try:
            await operator.start()
            await until(self.holder)
            yield operator
        finally:
            await operator.stop()

    async def holder(self) -> str:
        """Who holds the Lease."""
        lease = f"/apis/coordination.k8s.io/v1/namespaces/{OPERATOR_NAMESPACE}/leases/shoal"
        return str((await self.kube.get(lease))["spec"].get("holderIdentity") or "")

    @asynccontextmanager
    async def bare(
        self, what: str, namespace: str, **options: int | Path
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """The bare client's process, ended with the block. `replace` has read its pods then."""
        words = [f"--{name}={value}" for name, value in options.items()]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "benchmarks.operator.bare", what),
            *(f"--kubeconfig={self.plane.kubeconfig}", f"--namespace={namespace}", *words),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            if what == "replace":
                assert process.stdout is not None
                await process.stdout.readline()
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def make_bare(self, namespace: str, **options: int | Path) -> None:
        """Have the bare client make the objects of these jobs."""
        async with self.bare("make", namespace, **options) as process:
            if await process.wait():
                raise RuntimeError(f"the bare client ended with {process.returncode}")

    async def bare_made(self, namespace: str, jobs: int, workers: int) -> list[Write]:
        """The objects of these jobs, made by the bare client; what the log says of them."""
        await self.namespace(namespace)
        await self.make_bare(namespace, jobs=jobs, workers=workers)
        return [each for each in self.writes(namespace) if is_create(each) and each.resource in OBJECTS]

    def processes(self) -> dict[str, float]:
        """Seconds of CPU of each process of the control plane so far."""
        found = {}
        for name in PROCESSES:
            if (process := self.plane.processes.find(name)) is not None:
                found[name] = cpu_seconds(process.pid)
        return found


class Operator:
    """The operator's process, started again in place when it ends by itself, as a kubelet does.

    On a machine that is too busy it loses its Lease, and ends. `restarts` counts that. `log`: where it writes, if not
    where this process does.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path | None = None) -> None:
        self._command = command
        self._environment = dict(environment)
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self.restarts = 0

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def resident_mib(self) -> float:
        """Its resident memory."""
        return psutil.Process(self.pid).memory_info().rss / 2**20

    @property
    def cpu_seconds(self) -> float:
        """Its processor time so far."""
        return cpu_seconds(self.pid)

    async def start(self) -> None:
        """Start it."""
        self._process = await self._begin()
        self._watch = asyncio.create_task(self._keep_running())

    async def kill(self) -> None:
        """SIGKILL."""
        await self._end("kill")

    async def stop(self) -> None:
        """SIGTERM."""
        await self._end("terminate")

    async def _keep_running(self) -> None:
        while True:
            assert self._process is not None
            await self._process.wait()
            self.restarts += 1
            self._process = await self._begin()

    async def _begin(self) -> asyncio.subprocess.Process:
        start = partial(asyncio.create_subprocess_exec, *self._command, env=self._environment)
        if self._log is None:
            return await start()
        with self._log.open("ab") as log:
            return await start(stdout=log, stderr=log)

    async def _end(self, how: str) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._process is not None and self._process.returncode is None:
            getattr(self._process, how)()
        if self._process is not None:
            await self._process.wait()


def job(namespace: str, name: str, workers: int, surge: int | str = "25%", **spec: Any) -> Json:
    """A TrainingJob whose losses never end it."""
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "storage": {"ephemeral": {}},
            "training": {"entrypoint": "digits:job", "stopAfter": {"epochs": 1}},
            "runPolicy": {"backoffLimit": 1_000_000},
            "workers": {
                "replicas": workers,
                "maxReplicas": max(1, workers),
                "maxSurge": surge,
                "capacity": "Any",
            },
            **spec,
        },
    }


def is_create(write: Write) -> bool:
    """Whether it made an object."""
    return write.verb == "create" and not write.subresource


def is_loss(write: Write) -> bool:
    """Whether it took a worker's pod."""
    return write.verb == "delete" and write.resource == "pods"


def rate(made: list[Write]) -> float:
    """Objects a second, from the first request to the last answer."""
    return len(made) / (made[-1].answered - min(each.received for each in made)).total_seconds()


def milliseconds(since: datetime, to: datetime) -> float:
    """The time between."""
    return (to - since).total_seconds() * 1000


def cpu_seconds(pid: int) -> float:
    """The processor time of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def until(reached: Callable[[], Awaitable[Any]], every: float = 0.05) -> Any:
    """The first answer that is true. While it raises an API's error, it is not there yet."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            if found := await reached():
                return found
        except (ApiError, OSError, KeyError):
            pass
        if time.monotonic() > deadline:
            raise TimeoutError("the control plane did not get there")
        await asyncio.sleep(every)


def load() -> str:
    """The machine's load averages, in words."""
    return "/".join(f"{one:.1f}" for one in os.getloadavg())
