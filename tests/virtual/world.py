"""The virtual world: API server, machines, trainers, and replicas of the real operator, killed at any await."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from shoal.api.training_job import TrainingJob
from shoal.controllers.trainingjob.credentials import InstallKey
from shoal.policy.model import Images
from shoal.process.operator import Operator
from shoal.process.settings import Settings
from tests import belongings
from tests.virtual.cluster import SPOT, STEP_SECONDS, Cluster, Machine
from tests.virtual.loop import now, wall
from tests.virtual.server import ApiServer, Client, Faults, Json, Key
from tests.virtual.trainer import Trainers, Truth

GROUP = "shoal.dev/v1alpha1"
KEY = InstallKey(b"k" * 32)
RESTART_SECONDS = 2.0
"""The kubelet starts a container of the operator again."""


class Replica:
    """One pod of the operator, whose container is started again when it ends."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.operator: Operator | None = None
        self.client: Client | None = None
        self.starts = 0
        self.past: tuple[int, float, str] | None = None
        """Its next start sees the cluster as it was at a version, for so many seconds: this kind of objects, or all."""
        self._task: asyncio.Task[None] | None = None
        self._hung_at = 0.0

    def start(self) -> None:
        """Start the process."""
        world = self.world
        self.starts += 1
        self.client = Client(world.server, self.name, world.faults)
        if self.past is not None:
            self.client.past, seconds, self.client.past_kind = self.past
            self.client.past_until = now() + seconds
            self.past = None
        lease = Client(world.server, self.name, world.lease_faults)
        settings = Settings(
            install_key=KEY,
            images=Images(ps="ps:1", worker="worker:1", worker_gpu="worker-gpu:1"),
            identity=self.name,
            plan_seconds=world.plan_seconds,
            kueue=world.kueue,
        )
        self.operator = Operator(
            self.client,
            settings,
            world.trainers,
            lease_transport=lease,
            wall=lambda: wall() + world.ahead,
            monotonic=now,
            lease_clock=self._clock,
        )
        self._lease = lease
        self._task = asyncio.create_task(self._run(self.operator), name=f"operator {self.name}")

    async def _run(self, operator: Operator) -> None:
        try:
            await operator.run()
        except BaseExceptionGroup as group:
            rest = group.split(lambda error: type(error).__name__ == "LeaseLost")[1]
            if rest is not None:
                self.world.faults_of_the_operator.append(rest)
            else:
                self.world.leases_lost += 1
        except Exception as error:
            self.world.faults_of_the_operator.append(error)
        finally:
            self.world.faults_of_the_operator += survived(operator)
        asyncio.get_running_loop().call_later(RESTART_SECONDS, self._again, operator)

    def _again(self, operator: Operator) -> None:
        if self.operator is operator and not self.world.over:
            self.start()

    def hang(self, seconds: float) -> None:
        """SIGSTOP for a while: its own clock stands still, and leaps when it wakes and goes on with what it was at."""
        if self.client is not None:
            self._hung_at = now()
            self.client.wakes_at = self._lease.wakes_at = now() + seconds

    def _clock(self) -> float:
        return self._hung_at if self.client is not None and self.client.hangs else now()

    async def kill(self) -> None:
        """SIGKILL: nothing that it does afterwards reaches the server."""
        if self.client is None or self._task is None:
            return
        self.client.dead = self._lease.dead = True
        self.operator = None
        task, self._task = self._task, None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    @property
    def leads(self) -> bool:
        """Whether it may write."""
        return self.operator is not None and self.operator.lease.held


def survived(operator: Operator) -> list[BaseException]:
    """Faults of the code that did not end the process: a reflector has begun anew."""
    [restarts] = operator.metrics.watch_restarts.collect()
    failed = [each for each in restarts.samples if each.labels.get("reason") == "failed" and each.value]
    return [AssertionError(f"a reflector failed: {each}") for each in failed]


class World:
    """Everything."""

    def __init__(
        self,
        truth: Callable[[str], Truth],
        *,
        faults: Faults | None = None,
        plan_seconds: float = 60.0,
        step_seconds: float = STEP_SECONDS,
        kueue: bool = False,
    ) -> None:
        self.server = ApiServer()
        self.cluster = Cluster(self.server)
        self.trainers = Trainers(self.cluster, truth)
        self.faults = faults or Faults()
        self.lease_faults = Faults()
        self.plan_seconds = plan_seconds
        self.step_seconds = step_seconds
        self.kueue = kueue
        self.replicas: list[Replica] = []
        self.faults_of_the_operator: list[BaseException] = []
        self.leases_lost = 0
        """How often a replica ended because of that."""
        self.watchers: list[Callable[[], None]] = []
        """Called at each step: invariants."""
        self.over = False
        self.ahead = timedelta()
        """By how much the operator's clock is."""

    @asynccontextmanager
    async def living(self, *replicas: str) -> AsyncIterator[None]:
        """Time passes in the cluster while this is open, and these replicas of the operator run in it."""
        task = asyncio.create_task(self._live())
        for name in replicas:
            self.replica(name)
        try:
            yield
            if task.done():
                task.result()
        finally:
            self.over = True
            for replica in self.replicas:
                await replica.kill()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert not self.faults_of_the_operator, self.faults_of_the_operator

    async def _live(self) -> None:
        while True:
            await asyncio.sleep(self.step_seconds)
            self.cluster.step()
            self.trainers.step(self.step_seconds)
            for watcher in self.watchers:
                watcher()

    def replica(self, name: str) -> Replica:
        """Start a replica of the operator."""
        replica = Replica(self, name)
        self.replicas.append(replica)
        replica.start()
        return replica

    # --- what users do

    def nodes(self, spot: int, safe: int) -> None:
        """Machines that are always there."""
        for number in range(spot):
            self.cluster.add(Machine(f"spot-{number}", SPOT))
        for number in range(safe):
            self.cluster.add(Machine(f"safe-{number}", {}))

    def apply(self, name: str = "digits", namespace: str = "team", **spec: Any) -> Json:
        """Create a TrainingJob; what is not given is a small job of three workers."""
        whole = {
            "storage": {"uri": "s3://bucket/runs"},
            "training": {"entrypoint": "digits:job", "batchSize": 128, "stopAfter": {"epochs": 1}},
            "workers": {"replicas": 3, "maxReplicas": 6, "maxSurge": 1},
            **spec,
        }
        body = {"apiVersion": GROUP, "kind": "TrainingJob", "metadata": {"name": name}, "spec": whole}
        return self.server.store(("trainingjobs", namespace, name), body)

    def edit(self, name: str = "digits", namespace: str = "team", **spec: Any) -> None:
        """Change parts of a job's spec."""
        found = self.server.objects["trainingjobs", namespace, name]
        self.server.store(("trainingjobs", namespace, name), {**found, "spec": {**found["spec"], **spec}})

    def respec(self, spec: Json, name: str = "digits", namespace: str = "team") -> None:
        """Replace a job's spec."""
        found = self.server.objects["trainingjobs", namespace, name]
        self.server.store(("trainingjobs", namespace, name), {**found, "spec": spec})

    def job(self, name: str = "digits", namespace: str = "team") -> TrainingJob:
        """The job as the server has it."""
        return TrainingJob.model_validate(
            self.server.objects["trainingjobs", namespace, name], extra="ignore"
        )

    def pod_at(self, role: str, index: int) -> Json | None:
        """The newest pod of a place that runs."""
        found = [
            pod
            for pod in self.server.all("pods")
            if (pod["metadata"]["labels"]["shoal.dev/role"], pod["metadata"]["labels"]["shoal.dev/index"])
            == (role, str(index))
            and pod["status"]["phase"] == "Running"
            and "deletionTimestamp" not in pod["metadata"]
        ]
        return max(
            found, key=lambda pod: int(pod["metadata"]["labels"]["shoal.dev/incarnation"]), default=None
        )

    async def until(self, holds: Callable[[], bool], seconds: float = 300.0, what: str = "") -> None:
        """Wait for something to be so."""
        end = now() + seconds
        while not holds():
            assert now() < end, f"not in {seconds} s: {what}\n{self.tell()}"
            await asyncio.sleep(self.step_seconds)

    async def quiet(self, seconds: float = 6.0, most: float = 300.0) -> None:
        """Wait until nothing has changed for some seconds, but telemetry."""
        end, last, since = now() + most, self.digest(), now()
        while now() - since < seconds:
            assert now() < end, f"never quiet\n{self.tell()}"
            await asyncio.sleep(1.0)
            if (fresh := self.digest()) != last:
                last, since = fresh, now()

    # --- what it looks like

    def digest(self) -> Json:
        """The world without times and telemetry: objects, and of each job counters, conditions and slots.

        Without incarnations, too: of a server that may have been made while nobody looked, the next one has a higher
        epoch, so that it is never the same.
        """
        objects = sorted(
            (*key[:2], key[2].rpartition("-")[0] if key[0] == "pods" else key[2])
            for key in self.server.objects
            if key[0] not in {"events", "leases", "nodes", "speedprofiles"}
        )
        return {
            "objects": objects,
            "jobs": {job["metadata"]["name"]: digest_of(job) for job in self.server.all("trainingjobs")},
        }

    def lacking(self, name: str = "digits", namespace: str = "team") -> list[str]:
        """What a job that runs does not have beside its pods."""
        found = {kind: self.server.all(kind) for kind in belongings.KINDS}
        return belongings.lacking(
            self.server.objects["trainingjobs", namespace, name], self.server.all("pods"), found
        )

    def tell(self) -> str:
        """For people."""
        pods = [
            f"{pod['metadata']['name']} {pod['status']['phase']} on {pod['spec'].get('nodeName')}"
            f"{' leaving' if 'deletionTimestamp' in pod['metadata'] else ''}"
            for pod in self.server.all("pods")
        ]
        nodes = [
            f"{n['metadata']['name']} {n['status']['conditions'][0]['status']}"
            for n in self.server.all("nodes")
        ]
        jobs = [str(digest_of(job)) for job in self.server.all("trainingjobs")]
        leads = [replica.name for replica in self.replicas if replica.leads]
        lacking = [words for _, ns, name in self._jobs() for words in self.lacking(name, ns)]
        return "\n".join([f"at {now():.1f}, leading: {leads}", *nodes, *pods, *jobs, *lacking])

    def _jobs(self) -> list[Key]:
        return [key for key in self.server.objects if key[0] == "trainingjobs"]

    def writes(self) -> Counter[str]:
        """Writes by kind of object, without Leases and events."""
        return Counter(
            f"{s.verb} {s.key[0]}{'/' + s.sub if s.sub else ''}"
            for s in self.server.sent
            if s.key[0] not in {"leases", "events"}
        )


def digest_of(job: Json) -> Json:
    """A job without times and telemetry."""
    status = job.get("status") or {}
    slots = [
        (s.get("role", "worker"), s["index"], s.get("state", "Running"), s.get("pool", ""))
        for s in status.get("slots", [])
    ]
    return {
        "phase": status.get("phase"),
        "reason": status.get("reason"),
        "conditions": sorted(
            (c["type"], c["status"], c["reason"])
            for c in status.get("conditions", [])
            # As if it had never been told: it may be so brief.
            if (c["type"], c["status"]) not in {("Disrupted", "False"), ("Degraded", "False")}
        ),
        "restarts": {k: v for k, v in status.get("restarts", {}).items() if k != "byReason"},
        "reasons": sum(status.get("restarts", {}).get("byReason", {}).values()),
        "servers": {k: v for k, v in status.get("parameterServers", {}).items() if k != "lastSnapshotTime"},
        "workers": {k: v for k, v in status.get("workers", {}).items() if k != "succeeded"},
        "slots": sorted(slots),
        "observed": status.get("observedGeneration") == job["metadata"]["generation"],
        "output": status.get("output"),
    }
