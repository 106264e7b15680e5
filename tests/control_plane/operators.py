"""Operators under test: in this process with a fake coordinator, or as the real process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dev.cluster import ControlPlane
from dev.kube import ApiError, Json, Kube
from dev.paths import ROOT
from shoal.cluster.http import HttpTransport
from shoal.cluster.lease import LeaseTimes
from shoal.cluster.server import find
from shoal.cluster.transport import Transport
from shoal.controllers.trainingjob.credentials import InstallKey
from shoal.errors import Unavailable
from shoal.policy.model import Images
from shoal.process.operator import LEASE_TIMES, Operator
from shoal.process.settings import Settings
from shoal.telemetry.coordinator import Endpoint
from shoal_trainer.contract import StatusReport
from tests.control_plane import service_account
from tests.meanwhile import during

INSTALL_KEY = bytes(range(32))
QUICK_LEASE = LeaseTimes(duration=10, renew_deadline=8, retry_period=0.5)
"""For tests of takeover. On a busy machine, shorter times would lose the Lease for no reason."""

KNOWN_ENDS = {
    0: "", -signal.SIGKILL: "", -signal.SIGTERM: r"\A\Z", 1: "the operator stopped: |shoal-operator: "
}  # fmt: skip
"""Exit codes of a process under faults, and what it says then: that the Lease was lost, or no API server answers. One
that is stopped while Python starts has said nothing, and nobody listens for the signal yet."""
UNEXPECTED = re.compile(r"ERROR +shoal[^\n]*\nTraceback.*", re.DOTALL)
"""What is logged of an error that nobody expected. That of kopf's ends nothing."""
CRASH_WORDS = 4000


class FakeCoordinator:
    """Returns the reports that the test sets, by uid of the job."""

    def __init__(self) -> None:
        self.reports: dict[str, StatusReport] = {}

    async def read(self, endpoint: Endpoint) -> StatusReport:
        try:
            return self.reports[endpoint.job_uid]
        except KeyError:
            raise Unavailable("unreachable") from None

    def forget(self, job_uid: str) -> None:
        self.reports.pop(job_uid, None)


def settings(namespace: str, **changes: Any) -> Settings:
    """Settings for one namespace."""
    values: dict[str, Any] = {
        "install_key": InstallKey(INSTALL_KEY),
        "images": Images(ps="shoal/ps:test", worker="shoal/worker:test", worker_gpu="shoal/worker-gpu:test"),
        "namespace": namespace,
        "lease_namespace": namespace,
        "identity": "operator-0",
        "telemetry_seconds": 0.2,
    }
    return Settings(**{**values, **changes})


async def transport(kubeconfig: Path) -> HttpTransport:
    return HttpTransport(await find(kubeconfig=kubeconfig))


@contextlib.asynccontextmanager
async def running_operator(
    kubeconfig: Path,
    namespace: str,
    coordinator: FakeCoordinator | None = None,
    through: Callable[[Transport], Transport] = lambda inner: inner,
    lease_times: LeaseTimes = LEASE_TIMES,
    **changes: Any,
) -> AsyncIterator[Operator]:
    """An operator in this process, until the end of the block. `through` may wrap its transport."""
    http = await transport(kubeconfig)
    operator = Operator(
        through(http),
        settings(namespace, **changes),
        coordinator or FakeCoordinator(),
        lease_times=lease_times,
    )
    try:
        async with during(operator.run()):
            yield operator
    finally:
        await http.close()


class OperatorProcess:
    """The real process, `shoal-operator`, as a context manager. Its log is at `log`.

    `account`: the files of a service account, with which it runs as in a pod, instead of with the kubeconfig.
    """

    def __init__(
        self,
        kubeconfig: Path,
        namespace: str,
        folder: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
        account: Path | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        key = folder / "install-key"
        key.write_bytes(INSTALL_KEY)
        self.log = folder / "operator.log"
        self._environment = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "SHOAL_INSTALL_KEY_FILE": str(key),
            "SHOAL_IMAGE_PS": "shoal/ps:test",
            "SHOAL_IMAGE_WORKER": "shoal/worker:test",
            "SHOAL_IMAGE_WORKER_GPU": "shoal/worker-gpu:test",
            "SHOAL_NAMESPACE": namespace,
            "POD_NAME": "operator-0",
            "POD_NAMESPACE": namespace,
            "SHOAL_TELEMETRY_SECONDS": "1",
            "SHOAL_METRICS_PORT": "0",
            "SHOAL_HEALTH_PORT": "0",
            **environment,
        }
        self._command = [sys.executable, "-m", "shoal.process.main"]
        if account is not None:
            self._command = service_account.command(account)
            del self._environment["KUBECONFIG"]
        self._process: asyncio.subprocess.Process | None = None
        self._crashes: list[str] = []
        """How it ended unexpectedly, while it was kept running."""

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                stdout=log,
                stderr=log,
            )

    async def kill(self) -> None:
        """Send SIGKILL."""
        await self._end(signal.SIGKILL)

    async def pause(self, seconds: float) -> None:
        """SIGSTOP for a while, as a machine that hangs."""
        async with self.hanging():
            await asyncio.sleep(seconds)

    @contextlib.asynccontextmanager
    async def hanging(self) -> AsyncIterator[None]:
        """SIGSTOP meanwhile."""
        process = self._process
        assert process is not None
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)

    async def stop(self) -> int:
        """Send SIGTERM; returns the exit code."""
        return await self._end(signal.SIGTERM)

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    @contextlib.asynccontextmanager
    async def kept_running(self) -> AsyncIterator[None]:
        """Started again whenever it ends, as a kubelet does; that it crashes is a fault all the same."""

        async def restart() -> None:
            while True:
                said_before = self.log.stat().st_size
                code = await self.wait()
                said = self.log.read_bytes()[said_before:].decode(errors="replace")
                if code not in KNOWN_ENDS or not re.search(KNOWN_ENDS[code], said):
                    self._crashes.append(f"{self.log} ended with {code}:\n{said[-CRASH_WORDS:]}")
                await self.start()

        async with during(restart()):
            yield
        assert not (crashes := self.crashes()), "\n".join(crashes)

    def crashes(self) -> list[str]:
        """What no signal, no lost Lease and no API server that is away explains: each exit code, or what was logged."""
        logged = UNEXPECTED.search(self.log.read_text(errors="replace"))
        return self._crashes + ([logged[0][:CRASH_WORDS]] if logged else [])

    async def _end(self, number: signal.Signals) -> int:
        process = self._process
        assert process is not None
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
        return await process.wait()

    async def __aenter__(self) -> OperatorProcess:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()


COLLECTED_SECONDS = 120.0
"""The garbage collector discovers new kinds of owners every 30 s, so the first test that needs it waits."""


PATIENCE = 120.0
"""Timeout of quick operations on a busy machine."""
ASKED_AGAIN = (0.02, 0.1)
"""Seconds until the next look, at first and at most: each one takes time of the API server, that others wait for."""
LATER = 0.1
"""Of what a test has waited it may wait this share more."""


async def eventually(read: Callable[[], Awaitable[Any]], seconds: float = PATIENCE, what: str = "") -> Any:
    """The first truthy answer."""
    began = time.monotonic()
    least, most = ASKED_AGAIN
    while True:
        try:
            if answer := await read():
                return answer
        except ApiError as error:
            if error.status != 404:
                raise
        waited = time.monotonic() - began
        assert waited < seconds, f"timeout: {what}"
        await asyncio.sleep(min(max(least, LATER * waited), most))


@contextlib.contextmanager
def own_control_plane(namespace: str) -> Iterator[ControlPlane]:
    """A control plane with Shoal's kinds and this namespace, for a test that changes what is cluster-wide."""
    with ControlPlane.start() as plane:
        plane.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
        plane.kubectl("create", "namespace", namespace)
        plane.kubectl("wait", "--for=create", "-n", namespace, "serviceaccount/default")
        yield plane


class Job:
    """One TrainingJob in one namespace."""

    def __init__(self, kube: Kube, namespace: str, name: str = "digits") -> None:
        self.kube, self.namespace, self.name = kube, namespace, name
        self.path = f"/apis/shoal.dev/v1alpha1/namespaces/{namespace}/trainingjobs/{name}"

    def manifest(self, **spec: Any) -> Json:
        whole = {
            "storage": {"ephemeral": {}},
            "training": {"entrypoint": "digits:job", "batchSize": 128, "stopAfter": {"epochs": 1}},
            "workers": {"replicas": 2, "maxSurge": 1},
            **spec,
        }
        return {
            "apiVersion": "shoal.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": self.name},
            "spec": whole,
        }

    async def apply(self, **spec: Any) -> Json:
        return await self.kube.create(self.path.rpartition("/")[0], self.manifest(**spec))

    async def get(self) -> Json:
        return await self.kube.get(self.path)

    async def status(self) -> Json:
        return dict((await self.get()).get("status") or {})

    async def condition(self, kind: str) -> Json:
        return next((c for c in (await self.status()).get("conditions", []) if c["type"] == kind), {})

    async def pods(self) -> dict[str, Json]:
        """The job's pods by name, including terminating ones."""
        listed = await self.kube.get(
            f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=f"shoal.dev/job={self.name}"
        )
        return {pod["metadata"]["name"]: pod for pod in listed["items"]}

    async def events(self) -> dict[str, list[Json]]:
        """Events about the job by reason."""
        listed = await self.kube.get(f"/api/v1/namespaces/{self.namespace}/events")
        found: dict[str, list[Json]] = {}
        for event in listed["items"]:
            if event["involvedObject"]["name"] == self.name:
                found.setdefault(event["reason"], []).append(event)
        return found

    async def pod_runs(self, name: str) -> Json:
        async def runs() -> Json | None:
            pod = (await self.pods()).get(name)
            return pod if pod and pod["status"].get("phase") == "Running" else None

        return dict(await eventually(runs, what=f"{name} runs"))

    async def slot_runs_again(self, index: int) -> None:
        """Wait until a later pod of this worker runs. After another leader has begun, a number may be left out."""

        async def runs() -> bool:
            return any(
                pod["metadata"]["labels"]["shoal.dev/index"] == str(index)
                and pod["metadata"]["labels"]["shoal.dev/incarnation"] != "0"
                and pod["metadata"]["labels"]["shoal.dev/role"] == "worker"
                and pod["status"].get("phase") == "Running"
                for pod in (await self.pods()).values()
            )

        await eventually(runs, what=f"worker {index} runs again")

    async def runs(self, workers: int = 2, seconds: float = PATIENCE) -> None:
        """Wait until the phase is Running with this many workers."""

        async def all_run() -> bool:
            status = await self.status()
            return status.get("phase") == "Running" and status["workers"]["ready"] == workers

        try:
            await eventually(all_run, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}: {await self.status()}") from None

    async def reaches(self, **wanted: Any) -> Json:
        """Wait until the status has these top-level values."""

        async def reached() -> Json | None:
            status = await self.status()
            return status if all(status.get(k) == v for k, v in wanted.items()) else None

        try:
            return dict(await eventually(reached))
        except AssertionError as error:
            raise AssertionError(f"{error}: wanted {wanted}, has {await self.status()}") from None


FIXED_PORTS = range(20_000, 32_000)
"""Below the ephemeral ports of the kernel, so that no other process gets one by chance."""


def fixed_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    ports: list[int] = []
    for port in random.sample(FIXED_PORTS, len(FIXED_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            ports.append(port)
        if len(ports) == count:
            break
    return ports
