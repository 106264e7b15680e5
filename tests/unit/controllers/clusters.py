"""A fake API server behind the transport, with faults on demand, and the controller around it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from shoal.api.events import Event
from shoal.api.kube import DisruptionBudget, Pod, Service
from shoal.api.kueue import ResourceFlavor, Workload
from shoal.api.training_job import TrainingJob
from shoal.cluster.cache import Cache
from shoal.cluster.transport import APPLY_PATCH, Answer, Query
from shoal.controllers.state import ClusterState, Wake, Wakes
from shoal.controllers.trainingjob.api_answers import AnswerStore
from shoal.controllers.trainingjob.apply import Applier
from shoal.controllers.trainingjob.claims import Claims
from shoal.controllers.trainingjob.credentials import CredentialsOfJobs, InstallKey
from shoal.controllers.trainingjob.metrics import JobMetrics
from shoal.controllers.trainingjob.observe import Observer
from shoal.controllers.trainingjob.reactions import Reactions
from shoal.controllers.trainingjob.reconcile import Reconciler
from shoal.controllers.trainingjob.report import Reporter
from shoal.controllers.trainingjob.unreadable import Complaints
from shoal.errors import Unavailable
from shoal.policy.model import Images
from shoal.runtime.controller import Key
from shoal.runtime.metrics import Metrics
from shoal.runtime.recorder import Recorder
from shoal.runtime.status_writer import StatusWriter
from shoal.runtime.tasks import Tasks
from shoal.runtime.work_queue import Priority
from shoal.telemetry.coordinator import Endpoint
from shoal.telemetry.poller import Poller
from shoal_trainer.contract import StatusReport
from tests.doubles.patches import json_patched, merged

Json = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
KEY = ("ns", "digits")
ABSENT = Answer(404, b'{"kind": "Status", "reason": "NotFound", "message": "not found"}')


class Cluster:
    """Objects by path. `fault` may answer or raise instead of the server."""

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.version = 1
        self.now: Callable[[], datetime] = lambda: NOW
        self.requests: list[tuple[str, str]] = []
        self.fault: Callable[[str, str], Answer | Exception | None] = lambda _method, _path: None
        self.loses_answer: Callable[[str, str], bool] = lambda _method, _path: False

    def writes(self, method: str, kind: str) -> list[str]:
        """Names that were written (for POST: of the collection)."""
        return [
            path.rpartition("/")[2] for verb, path in self.requests if verb == method and f"/{kind}" in path
        ]

    def add(self, path: str, body: Json) -> Json:
        self.version += 1
        meta = {
            "uid": f"uid-{self.version}",
            "creationTimestamp": f"{self.now():%Y-%m-%dT%H:%M:%SZ}",
            "generation": 1,
            **body["metadata"],
            "resourceVersion": str(self.version),
        }
        if (known := self.objects.get(path)) is not None and known.get("spec") != body.get("spec"):
            meta["generation"] = known["metadata"]["generation"] + 1
        self.objects[path] = {**body, "metadata": meta}
        return self.objects[path]

    def change(self, path: str, **fields: Any) -> Json:
        return self.add(path, {**self.objects[path], **fields})

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Any = None,
        content_type: str = "application/json",
        timeout: float = 30.0,
        urgent: bool = False,
        leaves: Callable[[], object] = lambda: None,
    ) -> Answer:
        leaves()
        self.requests.append((method, path))
        body = body() if callable(body) else body
        fault = self.fault(method, path)
        if isinstance(fault, Exception):
            raise fault
        if content_type == APPLY_PATCH and path.endswith("/status"):
            body = self._applied(path, body)
        elif fault is None and content_type == APPLY_PATCH and path not in self.objects:
            self.add(path, body)
        if fault is None and "dryRun" in (query or {}):
            fault = Answer(201, b"{}")
        answer: Answer = fault or getattr(self, f"_{method.lower()}")(path, body)
        if self.loses_answer(method, path):
            raise Unavailable("connection reset")
        return answer

    @asynccontextmanager
    async def stream(self, path: str, query: Query) -> AsyncIterator[AsyncIterator[bytes]]:
        """Nothing changes."""

        async def lines() -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

        yield lines()

    def _get(self, path: str, _body: Any) -> Answer:
        if path.endswith("/pods"):
            return _ok(
                {"items": [each for name, each in self.objects.items() if name.startswith(f"{path}/")]}
            )
        return _ok(self.objects[path]) if path in self.objects else ABSENT

    def _post(self, path: str, body: Json) -> Answer:
        where = f"{path}/{body['metadata']['name']}"
        if where in self.objects:
            return Answer(409, b'{"message": "already exists", "reason": "AlreadyExists"}')
        return _ok(self.add(where, body))

    def _put(self, path: str, body: Json) -> Answer:
        where = path.removesuffix("/status")
        known = self.objects.get(where)
        if known is None:
            return ABSENT
        if body["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            return Answer(409, b'{"message": "the object has been modified"}')
        if where == path:
            return _ok(self.add(path, body))
        return _ok(self.change(where, status=json.loads(json.dumps(body["status"]))))

    def _patch(self, path: str, body: Any) -> Answer:
        where = path.removesuffix("/status")
        if where not in self.objects:
            return ABSENT
        if isinstance(body, dict) and not _same_uid(body, self.objects[where]):
            return Answer(409, b'{"message": "the UID in the precondition does not match"}')
        if isinstance(body, list):
            patched = json_patched(self.objects[where], body)
            return Answer(422, b"{}") if patched is None else _ok(self.add(where, patched))
        return _ok(self.add(where, merged(self.objects[where], body)))

    def _applied(self, path: str, body: Json) -> Json:
        """A status with the conditions of other managers; what a manager leaves out stays, as nobody needs it here."""
        known = self.objects.get(path.removesuffix("/status"), {}).get("status", {})
        by_type = {each["type"]: each for each in known.get("conditions", [])}
        by_type |= {each["type"]: each for each in body["status"].get("conditions", [])}
        meta = {key: value for key, value in body["metadata"].items() if key != "resourceVersion"}
        return {**body, "metadata": meta, "status": {**body["status"], "conditions": list(by_type.values())}}

    def _delete(self, path: str, body: Json) -> Answer:
        known = self.objects.get(path)
        if known is None:
            return ABSENT
        if body and body["preconditions"]["uid"] != known["metadata"]["uid"]:
            return Answer(409, b'{"message": "the UID in the precondition does not match"}')
        if known["metadata"].get("finalizers"):
            meta = {"deletionTimestamp": f"{self.now():%Y-%m-%dT%H:%M:%SZ}", **known["metadata"]}
            return _ok(self.change(path, metadata=meta))
        if (body or {}).get("propagationPolicy", "Background") != "Orphan":
            for each in [p for p, o in self.objects.items() if _owned_by(o, known["metadata"]["uid"])]:
                self.objects.pop(each)
        return _ok(self.objects.pop(path))


def _same_uid(body: Json, known: Json) -> bool:
    return body.get("metadata", {}).get("uid") in {None, known["metadata"]["uid"]}


def _owned_by(found: Json, uid: str) -> bool:
    return any(each["uid"] == uid for each in found["metadata"].get("ownerReferences") or ())


def _ok(content: Json) -> Answer:
    return Answer(200, json.dumps(content).encode())


def relist(cache: Cache[Any], listed: Iterable[Any], at: int) -> None:
    """As a reflector does."""
    uids = set()
    for each in listed:
        cache.put(each)
        uids.add(each.metadata.uid)
    cache.keep(uids, at)


class UnreachableCoordinator:
    """A coordinator that never answers."""

    async def read(self, endpoint: Endpoint) -> StatusReport:
        raise Unavailable("unreachable")

    def forget(self, job_uid: str) -> None:
        """Does nothing."""


class Rig:
    """The controller around a `Cluster`. Without reflectors: `see` updates the caches."""

    def __init__(self, *, telemetry_seconds: float = 30.0, settle_seconds: float = 0.0) -> None:
        self.cluster = Cluster()
        self.woken: list[tuple[Key, Priority]] = []
        self.rests: list[float] = []
        self.tasks = Tasks()
        self.wall = NOW
        self.cluster.now = lambda: self.wall
        self.metrics, self.registry = JobMetrics(process := Metrics()), process.registry
        self.on_wake: Wake = lambda _key, _priority: None
        self.state = ClusterState(Wakes(jobs=self._wake), wall=lambda: self.wall)
        self.answers = AnswerStore()
        self.claims = Claims()
        self.state.on_job.append(self.claims.see)
        self.poller = Poller(UnreachableCoordinator())
        self.recorder = Recorder(self.cluster, reporter="test", wall=lambda: self.wall)
        self.reporter = Reporter(
            StatusWriter(self.cluster, self.state.jobs, TrainingJob),
            self.recorder,
            self.metrics,
            wall=lambda: self.wall,
            telemetry_seconds=telemetry_seconds,
            settle_seconds=settle_seconds,
        )
        credentials = CredentialsOfJobs(InstallKey(b"k" * 32)).get
        self.applier = Applier(
            self.cluster,
            self.state,
            self.answers,
            credentials=credentials,
            wall=lambda: self.wall,
            metrics=self.metrics,
        )
        self.observer = Observer(
            self.state,
            self.answers,
            self.poller,
            self.claims,
            images=Images(ps="ps:1", worker="worker:1", worker_gpu="worker-gpu:1"),
            node_signals=lambda: True,
            wall=lambda: self.wall,
        )
        self.complaints = Complaints(self.cluster, wake=self._wake, wall=lambda: self.wall)
        self._reconciler = Reconciler(
            self.observer,
            self.applier,
            self.reporter,
            state=self.state,
            answers=self.answers,
            claims=self.claims,
            poller=self.poller,
            credentials=credentials,
            complaints=self.complaints,
            reactions=Reactions(self.metrics.reacted),
            waited=lambda _key: 0.0,
            tasks=self.tasks,
            wake=self._wake,
            rest=lambda _key, seconds: self.rests.append(seconds),
        )

    def _wake(self, key: Key, priority: Priority) -> None:
        self.woken.append((key, priority))
        self._again = True
        self.on_wake(key, priority)

    def forget(self) -> None:
        """Forget earlier plans, as a new process does."""
        self._reconciler._memories.clear()

    async def once(self, key: Key = KEY) -> float | None:
        """Reconcile once; what it sends is not answered yet."""
        return await self._reconciler(key)

    async def reconcile(self, key: Key = KEY) -> float | None:
        """Reconcile until all is answered and nothing asks for more, and post the events."""
        try:
            for _ in range(100):
                self._again = False
                delay = await self.once(key)
                await self.tasks.idle()
                if not self._again:
                    return delay
            raise AssertionError(f"does not end: {self.cluster.requests[-20:]}")
        finally:
            await self.recorder.drain()

    async def record(self, *events: Event) -> None:
        """Record events about the job, and post them."""
        self.recorder.record(self.job, events)
        await self.recorder.drain()

    @property
    def job(self) -> TrainingJob:
        """The job in the cluster."""
        return TrainingJob.model_validate(self.cluster.objects[JOB_PATH])

    def applied(self) -> Self:
        """This rig, with a job."""
        self.apply()
        return self

    def apply(self, *, labels: dict[str, str] | None = None, **spec: Any) -> TrainingJob:
        whole = {
            "storage": {"ephemeral": {}},
            "training": {"entrypoint": "digits:job", "stopAfter": {"epochs": 1}},
            "workers": {"replicas": 2},
            **spec,
        }
        body = {
            "apiVersion": "shoal.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "digits", "namespace": "ns", "labels": labels or {}},
            "spec": whole,
        }
        self.cluster.add(JOB_PATH, body)
        self.see()
        return self.job

    def see(self) -> None:
        """Relist everything."""
        jobs = [o for p, o in self.cluster.objects.items() if p == JOB_PATH]
        relist(self.state.jobs, map(TrainingJob.model_validate, jobs), self.cluster.version)
        kinds: list[tuple[str, Any, Any]] = [
            ("pods", self.state.pods, Pod),
            ("services", self.state.services, Service),
            ("poddisruptionbudgets", self.state.budgets, DisruptionBudget),
            ("workloads", self.state.workloads, Workload),
            ("resourceflavors", self.state.flavors, ResourceFlavor),
        ]
        for kind, cache, model in kinds:
            found = [o for p, o in self.cluster.objects.items() if re.search(f"/{kind}/", p)]
            relist(cache, [model.model_validate(o) for o in found], self.cluster.version)

    def pod(self, name: str) -> Json:
        return self.cluster.objects[f"/api/v1/namespaces/ns/pods/{name}"]

    def pods(self) -> set[str]:
        return {p.rpartition("/")[2] for p in self.cluster.objects if "/pods/" in p}

    def run_pods(self) -> None:
        """Make all pods run that have not ended, as kubelets do."""
        for path in [p for p, found in self.cluster.objects.items() if "/pods/" in p and not _ended(found)]:
            ready = [{"type": "Ready", "status": "True"}]
            self.cluster.change(path, status={"phase": "Running", "podIP": "10.0.0.1", "conditions": ready})
        self.see()

    async def pass_time(self, seconds: float) -> None:
        self.wall += timedelta(seconds=seconds)
        await asyncio.sleep(seconds)


def _ended(pod: Json) -> bool:
    return pod.get("status", {}).get("phase") in {"Failed", "Succeeded"}


JOB_PATH = "/apis/shoal.dev/v1alpha1/namespaces/ns/trainingjobs/digits"
EVERYTHING = {"digits-ps-0-0", "digits-worker-0-0", "digits-worker-1-0"}
