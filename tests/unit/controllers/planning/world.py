"""The planner and the learner around caches and a fake API server, and the objects that they find there."""

from __future__ import annotations

import math
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import Any

from shoal.api.capacity_pool import CapacityPool
from shoal.api.events import Event
from shoal.api.labels import SPEED_PROFILE
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.controllers.planning.metrics import PlanMetrics
from shoal.controllers.planning.planner import Planner
from shoal.controllers.planning.priorities import PriorityClasses
from shoal.controllers.speedprofile.identity import profile_name
from shoal.controllers.speedprofile.reconcile import Learner
from shoal.controllers.state import ClusterState, Wakes
from shoal.manifests.pods import Images
from shoal.policy.model import Proposal
from shoal.runtime.controller import Key
from shoal.runtime.metrics import Metrics
from shoal.runtime.status_writer import StatusWriter, collection_path
from shoal.telemetry.poller import Poller, Seen
from shoal_trainer.contract import LogSums, ModelReport, Phase, SpeedSums, StatusReport
from tests.meanwhile import during
from tests.unit.controllers.clusters import Cluster, UnreachableCoordinator
from tests.unit.policy import build

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
MODEL = ModelReport(fingerprint="ab" * 32, parameters=500_000, tensors=20, flops_per_sample=8e7)
KEY = ("team", profile_name(MODEL.fingerprint))
"""The profile that is made for the model."""
DESCRIBED = {"fingerprint": MODEL.fingerprint, "flopsPerSample": 8e7, "parameters": 500_000, "tensors": 20}
"""The model in the `spec` of a profile."""
MADE = {"labels": {"app.kubernetes.io/managed-by": "shoal"}}
"""Metadata of a profile that the operator made."""
PROFILES = collection_path(SpeedProfile, "team")


def job_manifest(name: str = "digits", **spec: Any) -> dict[str, Any]:
    workers = {"replicas": 2, "minReplicas": 1, "maxReplicas": 8, "pools": ["spot", "on-demand"]}
    objective = {"deadlineSeconds": 3600}
    elasticity = {"mode": "Auto", "objective": objective}
    manifest = build.job_manifest(**{"workers": workers, "elasticity": elasticity, **spec})
    manifest["metadata"] |= {"name": name, "uid": f"uid-{name}", "resourceVersion": "1"}
    return manifest


def training_job(name: str = "digits", *, profile: str = "", **more: Any) -> TrainingJob:
    """`profile`: that its annotation names. `more`: fields of its spec, and `status` and `metadata`."""
    metadata, status = more.pop("metadata", {}), more.pop("status", {})
    manifest = job_manifest(name, **more)
    manifest["metadata"] |= {"annotations": {SPEED_PROFILE: profile} if profile else {}, **metadata}
    return TrainingJob.model_validate({**manifest, "status": status})


def pool(name: str, price: float, spot: bool, **spec: Any) -> CapacityPool:
    whole = {
        "accelerator": {"name": "T4"},
        "capacityType": "Spot" if spot else "OnDemand",
        "nodeSelector": {"pool": name},
        "limits": {"nodes": 8},
        "price": {"perHour": price},
        "startupSeconds": 60,
        **spec,
    }
    meta = {"name": name, "uid": name, "resourceVersion": "1"}
    return CapacityPool.model_validate({"metadata": meta, "spec": whole})


SPOT, ON_DEMAND = pool("spot", 0.3, True), pool("on-demand", 1.0, False)


def sums(seconds: float, count: int) -> LogSums:
    log = math.log(seconds)
    return LogSums(count=count, total=log * count, squares=log * log * count)


def speed(seconds: float, count: int, workers: int = 2) -> SpeedSums:
    """Of so many steps, each of which computes for so long."""
    return SpeedSums(
        device="T4",
        devices=1,
        cores=4,
        batch_size=128,
        workers=workers,
        servers=1,
        compute=sums(seconds, count),
        pull=sums(seconds / 20, count),
        push=sums(seconds / 20, count),
    )


def report(left: float | None, seconds: float = 0.2, count: int = 500, **more: Any) -> StatusReport:
    return StatusReport(
        job_uid="uid-digits",
        phase=Phase.TRAINING,
        model=MODEL,
        speed=(speed(seconds, count),),
        speed_epoch="a",
        samples_left=left,
        samples_per_second=2 * 128 / seconds,
    ).model_copy(update=more)


class World:
    """The planner and the learner around caches and a fake API server."""

    def __init__(self, **planner: Any) -> None:
        self.cluster = Cluster()
        self.woken: list[Key] = []
        self.woken_profiles: list[Key] = []
        self.told: list[tuple[str, Event]] = []
        self.state = ClusterState(Wakes(plans=self.replan))
        self.poller = Poller(UnreachableCoordinator())
        self.wall = NOW
        writer = StatusWriter(self.cluster, self.state.profiles, SpeedProfile)
        self.metrics = Metrics()
        metrics = PlanMetrics(self.metrics)
        self.learner = Learner(
            self.cluster,
            self.state,
            writer,
            wake=lambda key, _priority: self.woken_profiles.append(key),
            wall=lambda: self.wall,
            on_fault=lambda: metrics.faults.labels("report").inc(),
            tell=lambda job, event: self.told.append((job.metadata.name, event)),
        )
        self.planner = Planner(
            self.state,
            self.poller,
            self.learner,
            wake=lambda key, _priority: self.woken.append(key),
            wall=lambda: self.wall,
            metrics=metrics,
            classes=PriorityClasses(self.cluster),
            **({"images": Images(ps="ps:1", worker="worker:1", worker_gpu="gpu:1")} | planner),
        )

    def replan(self) -> None:
        self.planner.trigger()

    def hear(self, job: TrainingJob, said: StatusReport) -> None:
        self.poller._seen[job.metadata.uid] = Seen(said, 0.0)
        self.learner.hear(job, said)

    def add(self, *objects: TrainingJob | CapacityPool, said: StatusReport | None = None) -> None:
        """`said`: what the jobs among them report."""
        for each in objects:
            (self.state.jobs if isinstance(each, TrainingJob) else self.state.pools).put(each)  # type: ignore[arg-type]
            if said is not None and isinstance(each, TrainingJob):
                self.hear(each, said)

    def add_profile(self, name: str, **fields: Any) -> None:
        """Of namespace `team`, as the API server has it; of one that is there, these fields are changed."""
        path = f"{PROFILES}/{name}"
        known = self.cluster.objects.get(path, {"metadata": {"name": name, "namespace": "team"}})
        metadata = known["metadata"] | fields.pop("metadata", {})
        stored = self.cluster.add(path, {**known, **fields, "metadata": metadata})
        self.state.profiles.put(SpeedProfile.model_validate(stored))

    def profile(self, name: str) -> SpeedProfile:
        found = self.state.profiles.get(name, "team")
        assert found is not None
        return found

    def proposal(self, job: TrainingJob) -> Proposal:
        found = self.planner.proposal(job.metadata.uid)
        assert found is not None
        return found

    async def planned(self, job: TrainingJob) -> Proposal:
        """What is proposed to the job after one more plan."""
        await self.planner.plan_once()
        return self.proposal(job)

    def planning(self) -> AbstractAsyncContextManager[None]:
        return during(self.planner.run())
