"""From custom resources to proposals: the real planner on real values, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shoal.api.base import Condition
from shoal.api.capacity_pool import CapacityPool
from shoal.api.events import Event
from shoal.api.kube import Node, Pod
from shoal.api.labels import SPEED_PROFILE
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import DataStatus
from shoal.cluster.transport import Answer
from shoal.controllers.planning import planner, scene
from shoal.controllers.planning.metrics import PlanMetrics
from shoal.controllers.planning.planner import Planner
from shoal.controllers.planning.priorities import PriorityClasses
from shoal.controllers.planning.trades import Trade
from shoal.controllers.planning.translate import proposal
from shoal.controllers.speedprofile import reconcile
from shoal.controllers.speedprofile.identity import profile_name
from shoal.controllers.speedprofile.reconcile import (
    DAY_SECONDS,
    LATE_SECONDS,
    SOON_SECONDS,
    Known,
    Learner,
)
from shoal.controllers.state import ClusterState, Key, Wakes
from shoal.errors import Interrupted, ShoalError, Unavailable
from shoal.manifests.pods import Images
from shoal.policy.model import Proposal
from shoal.policy.tell.progress import decimal
from shoal.runtime.metrics import Metrics
from shoal.runtime.status_writer import StatusWriter
from shoal.runtime.work_queue import WorkQueue
from shoal.sizing.fleet import FleetJob, FleetPlan, JobPlan, Watched, plan_fleet
from shoal.sizing.fleet.jobs import END_SECONDS, asked, fleet_job, running
from shoal.sizing.fleet.resources import fleet_pool, profile_of
from shoal.sizing.speed import efficiency
from shoal.sizing.speed.measurements import Basis
from shoal.telemetry.poller import Poller, Seen
from shoal_trainer.contract import (
    BesideSums,
    DataReport,
    EpochReport,
    LogSums,
    ModelReport,
    Phase,
    ShardReport,
    SpeedSums,
    StatusReport,
    WorkerReport,
    WorkerState,
)
from tests.unit.controllers.clusters import Cluster, UnreachableCoordinator
from tests.unit.policy import build

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
MODEL = ModelReport(fingerprint="ab" * 32, parameters=500_000, tensors=20, flops_per_sample=8e7)


def job_manifest(name: str = "digits", **spec: Any) -> dict[str, Any]:
    workers = {"replicas": 2, "minReplicas": 1, "maxReplicas": 8, "pools": ["spot", "on-demand"]}
    objective = {"deadlineSeconds": 3600}
    elasticity = {"mode": "Auto", "objective": objective}
    manifest = build.job_manifest(**{"workers": workers, "elasticity": elasticity, **spec})
    manifest["metadata"] |= {"name": name, "uid": f"uid-{name}", "resourceVersion": "1"}
    return manifest


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


def sums(seconds: float, count: int) -> LogSums:
    log = math.log(seconds)
    return LogSums(count=count, total=log * count, squares=log * log * count)


def report(left: float | None, seconds: float = 0.2, count: int = 500) -> StatusReport:
    speed = SpeedSums(
        device="T4",
        devices=1,
        cores=4,
        batch_size=128,
        workers=2,
        servers=1,
        compute=sums(seconds, count),
        pull=sums(seconds / 20, count),
        push=sums(seconds / 20, count),
    )
    return StatusReport(
        job_uid="uid-digits",
        phase=Phase.TRAINING,
        model=MODEL,
        speed=(speed,),
        speed_epoch="a",
        samples_left=left,
        samples_per_second=2 * 128 / seconds,
    )


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

    def add(self, *objects: TrainingJob | CapacityPool) -> None:
        for each in objects:
            (self.state.jobs if isinstance(each, TrainingJob) else self.state.pools).put(each)  # type: ignore[arg-type]


async def test_measured_job_gets_the_cheapest_pools_that_keep_its_deadline() -> None:
    world = World()
    job = TrainingJob.model_validate(job_manifest())
    world.add(job, pool("spot", 0.3, True), pool("on-demand", 1.0, False))
    # 640 samples/s a worker: 7 million samples in an hour need more than 3 workers, and fewer than 8.
    world.hear(job, report(7e6))
    await world.planner.plan_once()
    found = world.planner.proposal(job.metadata.uid)
    assert found is not None
    assert found.feasible
    assert 4 <= sum(found.pools.values()) <= 7
    assert found.pools["spot"] >= found.pools.get("on-demand", 0)
    assert found.finish_time is not None
    assert NOW < found.finish_time < NOW + timedelta(hours=1)
    assert found.samples_per_second == pytest.approx(640 * sum(found.pools.values()), rel=0.2)
    assert found.speeds["spot"] == pytest.approx(640, rel=0.1)
    assert "spot" in found.reason
    assert world.woken == [("team", "digits")]


@pytest.mark.parametrize(
    ("exhausted", "nodes", "doubted"), [("True", 0, False), ("False", 0, True), ("False", 1, False)]
)
def test_pool_that_is_tried_again_is_doubted_until_it_has_a_node(
    exhausted: str, nodes: int, doubted: bool
) -> None:
    out = {
        "type": "Exhausted",
        "status": exhausted,
        "reason": "NoNodes",
        "lastTransitionTime": "2026-01-01T11:50:00Z",
    }
    status = {"conditions": [out], "outSince": "2026-01-01T11:00:00Z", "nodes": nodes}
    whole = pool("spot", 0.3, True).model_dump(by_alias=True) | {"status": status}
    found = fleet_pool(CapacityPool.model_validate(whole), NOW)
    assert (found.exhausted, found.doubted) == (exhausted == "True", doubted)
    assert not fleet_pool(pool("spot", 0.3, True), NOW).doubted


@pytest.mark.parametrize(
    ("policy", "transfer", "chosen"),
    [
        ("Same", 0, "on-demand"),
        ("Preferred", 0, "spot"),
        ("Any", 0, "spot"),
        ("Preferred", 0.1, "on-demand"),
        ("Any", 0.1, "on-demand"),
    ],
)
@pytest.mark.parametrize("begun", [True, False])
async def test_pools_out_of_the_zone_of_the_server_are_planned_where_workers_may_leave_it_and_that_pays(
    policy: str, transfer: float, chosen: str, begun: bool
) -> None:
    """Also before the server has a node, where all of its pools are in one zone."""
    world = World()
    workers = job_manifest()["spec"]["workers"] | {"zonePolicy": policy}
    job = TrainingJob.model_validate(job_manifest(workers=workers, parameterServers={"pools": ["safe"]}))
    spot = pool("spot", 0.3, True, zone="z1", transferPerGiB=transfer)
    world.add(job, spot, pool("on-demand", 1.0, False, zone="z2", transferPerGiB=transfer))
    world.add(pool("safe", 0.1, False, zone="z2"))
    labels = {"topology.kubernetes.io/zone": "z2"}
    world.state.nodes.put(Node.model_validate({"metadata": {"name": "safe", "uid": "n", "labels": labels}}))
    if begun:
        world.state.pods.put(server_of(job, 0, "safe"))
    world.hear(job, report(1e6))
    await world.planner.plan_once()
    found = world.planner.proposal(job.metadata.uid)
    assert found is not None
    assert set(found.pools) == {chosen}


def server_of(job: TrainingJob, incarnation: int, node: str, **more: Any) -> Pod:
    """A pod of parameter server 0 of the job."""
    server = build.pod_manifest("ps", incarnation=incarnation, node=node, **more)
    server["metadata"]["ownerReferences"][0]["uid"] = job.metadata.uid
    server["metadata"]["uid"] += job.metadata.uid
    return Pod.model_validate(server)


async def test_the_server_is_where_the_newest_pod_of_this_run_is() -> None:
    """A pod of an earlier job of this name, one that has ended, and one that only bears the label say nothing."""
    world = World()
    workers = job_manifest()["spec"]["workers"] | {"zonePolicy": "Same"}
    job = TrainingJob.model_validate(job_manifest(workers=workers))
    world.add(job, *(pool(name, 0.3, True, zone=name) for name in ("spot", "on-demand")))
    for zone in ("spot", "on-demand"):
        meta = {"name": zone, "uid": zone, "labels": {"topology.kubernetes.io/zone": zone}}
        world.state.nodes.put(Node.model_validate({"metadata": meta}))
    earlier = job.model_copy(update={"metadata": job.metadata.model_copy(update={"uid": "earlier"})})
    labelled = server_of(job, 8, "spot")
    for server in (
        server_of(earlier, 7, "spot", deleting=NOW),
        server_of(job, 1, "spot", deleting=NOW),
        server_of(job, 3, "spot", phase="Failed"),
        labelled.model_copy(
            update={"metadata": replace(labelled.metadata, name="mine", owner_references=())}
        ),
        server_of(job, 2, "on-demand"),
    ):
        world.state.pods.put(server)
    world.hear(job, report(1e6))
    await world.planner.plan_once()
    found = world.planner.proposal(job.metadata.uid)
    assert found is not None
    assert set(found.pools) == {"on-demand"}


@pytest.mark.parametrize("silent", [False, True])
async def test_what_was_last_heard_minutes_ago_says_nothing_of_the_speed_of_now(silent: bool) -> None:
    world = World()
    job = TrainingJob.model_validate(job_manifest())
    world.add(job, pool("spot", 0.3, True), pool("on-demand", 1.0, False))
    world.hear(job, report(7e6))
    world.planner._paces.observe = lambda _job, said, _at: Watched({"spot": [100.0]} if said else {}, 60.0)  # type: ignore[method-assign]
    now = asyncio.get_running_loop().time()
    world.poller._seen[job.metadata.uid] = Seen(report(7e6), now - (scene.SILENT_SECONDS + 1) * silent)
    await world.planner.plan_once()
    found = world.planner.proposal(job.metadata.uid)
    assert found is not None
    assert (found.relative_error is None) == silent
    assert ("was not heard for minutes" in found.reason) == silent


async def test_the_age_of_the_oldest_proposal_is_that_of_the_job_that_was_planned_longest_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    jobs = [TrainingJob.model_validate(job_manifest(name)) for name in ("one", "two")]
    world.add(*jobs, pool("spot", 0.3, True))
    for job in jobs:
        world.hear(job, report(7e6))
    assert world.planner.oldest_seconds() == 0.0
    monkeypatch.setattr(Planner, "_now", staticmethod(lambda: 100.0))
    await world.planner.plan_once()
    second = world.planner.proposal(jobs[1].metadata.uid)
    monkeypatch.setattr(Planner, "_now", staticmethod(lambda: 160.0))
    monkeypatch.setattr(Planner, "_proposals", lambda *_: ([(jobs[1], second)], {}))
    await world.planner.plan_once()  # the first job is left out
    monkeypatch.setattr(Planner, "_now", staticmethod(lambda: 170.0))
    assert world.planner.oldest_seconds() == 70.0


async def test_two_jobs_never_plan_more_than_the_limit() -> None:
    world = World()
    pools = [
        pool("spot", 0.3, True, limits={"nodes": 5}),
        pool("on-demand", 1.0, False, limits={"nodes": 4}),
    ]
    jobs = [TrainingJob.model_validate(job_manifest(name)) for name in ("one", "two")]
    world.add(*jobs, *pools)
    for job in jobs:
        world.hear(job, report(7e6))
    await world.planner.plan_once()
    for name, limit in (("spot", 5), ("on-demand", 4)):
        planned = [world.planner.proposal(job.metadata.uid) for job in jobs]
        assert sum(each.pools.get(name, 0) for each in planned if each is not None) <= limit


@pytest.mark.looptime
async def test_plans_at_once_after_a_change_and_else_once_a_minute() -> None:
    plans: list[float] = []

    def counted(pools: Any, profiles: Any, jobs: Any, **_: Any) -> FleetPlan:
        plans.append(len(jobs))
        return FleetPlan({})

    world = World(plan=counted)
    task = asyncio.create_task(world.planner.run())
    await asyncio.sleep(1)
    world.add(TrainingJob.model_validate(job_manifest()))
    await asyncio.sleep(2)
    assert len(plans) == 1
    await asyncio.sleep(59)
    assert len(plans) == 1
    await asyncio.sleep(120)
    assert len(plans) == 3
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.looptime
async def test_plans_take_at_most_half_of_the_time_however_much_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan of five seconds followed a plan of five seconds, for as long as nodes were lost every few."""
    world = World()
    begun: list[float] = []

    async def five_seconds(**_: Any) -> None:
        begun.append(asyncio.get_running_loop().time())
        await asyncio.sleep(5)

    monkeypatch.setattr(world.planner, "plan_once", five_seconds)
    task = asyncio.create_task(world.planner.run())
    for _ in range(100):
        world.planner.trigger()
        await asyncio.sleep(1)
    gaps = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert min(gaps) >= 10
    assert max(gaps) <= 11
    assert world.metrics.registry.get_sample_value("shoal_plan_busy_ratio") == pytest.approx(0.5, abs=0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.looptime
async def test_after_a_plan_of_an_hour_what_happens_is_planned_for_within_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It rested for an hour: a job that lost its workers then, or began, had no plan for as long."""
    world = World()
    begun, ended = list[float](), list[float]()

    async def slow_at_first(**_: Any) -> None:
        begun.append(asyncio.get_running_loop().time())
        await asyncio.sleep(3 if ended else 3600)
        ended.append(asyncio.get_running_loop().time())

    monkeypatch.setattr(world.planner, "plan_once", slow_at_first)
    task = asyncio.create_task(world.planner.run())
    world.planner.trigger()
    await asyncio.sleep(3605)
    world.planner.trigger()
    await asyncio.sleep(120)
    assert begun[1] - ended[0] <= 60
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_long_plan_is_interrupted_by_what_matters_and_goes_on_from_its_choices() -> None:
    """A job that began while an hour's plan was made had to wait for its end."""
    now, solved, kept = 0, list[str](), dict[str, Any]()

    def plan(*given: Any, told: Any, **_: Any) -> FleetPlan:
        before = set(kept)

        def slowly(name: str, made: JobPlan) -> None:
            nonlocal now
            now += 1 if name in before else 25
            solved.append(name)
            if len(solved) == 2:  # meanwhile
                world.add(TrainingJob.model_validate(job_manifest("late")))
                world.replan()
            told(name, made)

        return plan_fleet(*given, told=slowly, kept=kept)

    world = World(plan=plan)
    world.add(pool("spot", 0.3, True, limits={"nodes": 60}))
    for n in range(6):
        job = TrainingJob.model_validate(job_manifest(f"job-{n}"))
        world.add(job)
        world.hear(job, report(1e5))
    with pytest.raises(ShoalError, match="3 of 6"):
        await world.planner.plan_once(lambda: now, patience=60)
    assert world.planner.waiting() == 1 + 3, "what was made is published"
    assert len(kept) == 3
    world.planner._wanted.clear()
    await world.planner.plan_once(lambda: now, patience=120)
    assert world.planner.waiting() == 0
    assert solved[3:].count("team/late") == 1
    assert now <= 3 * 25 + 3 + 4 * 25


async def test_a_long_trade_is_interrupted_by_what_matters_and_keeps_the_first_proposals() -> None:
    """It took two minutes each minute, and nothing else was planned meanwhile."""
    now, parts = 0, 0

    def plan(*given: Any, between: Any, **options: Any) -> FleetPlan:
        def slowly() -> None:
            nonlocal now, parts
            now, parts = now + 25, parts + 1
            world.replan()
            between()

        return plan_fleet(*given, between=slowly, **options)

    world = World(plan=plan)
    world.add(pool("spot", 0.3, True, limits={"nodes": 8}))
    for n, left in enumerate((1e7, 5e6, 5e6)):  # in an hour, that takes more than eight workers
        job = TrainingJob.model_validate(job_manifest(f"job-{n}"))
        world.add(job)
        world.hear(job, report(left))
    with pytest.raises(Interrupted, match="3 of 3"):
        await world.planner.plan_once(lambda: now, patience=60)
    assert parts == 3
    assert world.planner.waiting() == 0, "their own plans are published"
    await world.planner.plan_once(lambda: now, patience=600)
    assert parts > 6


@pytest.mark.looptime
async def test_a_plan_comes_to_an_end_however_often_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    patient, done = list[float](), list[float]()

    async def of_ten_minutes(patience: float) -> None:
        patient.append(patience)
        await asyncio.sleep(min(patience, 600))
        if patience < 600:
            world.planner.trigger()
            raise Interrupted
        done.append(asyncio.get_running_loop().time())

    monkeypatch.setattr(world.planner, "plan_once", of_ten_minutes)
    task = asyncio.create_task(world.planner.run())
    await asyncio.sleep(1600)
    assert patient[:5] == [60, 120, 240, 480, 960]
    assert done
    assert world.metrics.registry.get_sample_value("shoal_plans_total", {"result": "interrupted"}) == 4
    world.planner.trigger()
    await asyncio.sleep(130)
    assert patient[5] == 60
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_first_proposals_are_published_while_those_of_others_are_made() -> None:
    """Of 1,000 jobs and 50 pools the first plan takes an hour, and nothing was published before it ended.

    A job that follows a plan keeps it until all are made: what it gains by trades would be given up, and come back.
    """
    loop, now, waiting = asyncio.get_running_loop(), 0, list[int]()

    async def look() -> None:
        waiting.append(world.planner.waiting())

    def plan(*given: Any, told: Any, **_: Any) -> FleetPlan:
        def slowly(name: str, made: JobPlan) -> None:
            nonlocal now
            now += 5
            asyncio.run_coroutine_threadsafe(look(), loop).result()
            told(name, made)

        return plan_fleet(*given, told=slowly)

    world = World(plan=plan)
    follows = {"plan": {"revision": 3, "pools": {"spot": 2}, "finishTime": NOW.isoformat()}}
    for n in range(6):
        status = {} if n else follows
        world.add(TrainingJob.model_validate({**job_manifest(f"job-{n}"), "status": status}))
    world.add(pool("spot", 0.3, True, limits={"nodes": 60}))
    await world.planner.plan_once(lambda: now)
    assert waiting == [6, 6, 5, 5, 3, 3]
    assert world.planner.waiting() == 0
    told = Counter(name for _, name in world.woken)
    assert told == {"job-0": 1, **{f"job-{n}": 2 for n in range(1, 6)}}
    await world.planner.plan_once(lambda: now)  # no first one is left: all change together
    assert Counter(name for _, name in world.woken) - told == dict.fromkeys(told, 1)


@pytest.mark.looptime
async def test_fault_of_the_planner_keeps_the_last_proposals_and_is_counted() -> None:
    broken = False

    def plan(*given: Any, **options: Any) -> FleetPlan:
        if broken:
            raise ZeroDivisionError
        return plan_fleet(*given, **options)

    world = World(plan=plan, every_seconds=10)
    job = TrainingJob.model_validate(job_manifest())
    world.add(job, pool("spot", 0.3, True), pool("on-demand", 1.0, False))
    world.hear(job, report(7e6))
    task = asyncio.create_task(world.planner.run())
    await asyncio.sleep(15)
    broken = True
    await asyncio.sleep(60)
    found = world.planner.proposal(job.metadata.uid)
    assert found is not None
    assert found.age_seconds >= 50
    assert world.metrics.registry.get_sample_value("shoal_plans_total", {"result": "error"})
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_budget_is_that_of_the_whole_job_where_the_servers_have_a_price() -> None:
    """What was spent is the bill as it was counted; what is to come has the price of the pool where servers are."""
    found = []
    for named, at in (([], ""), (["safe", "dear"], "safe"), (["safe", "dear"], "dear")):
        world = World()
        servers = {"replicas": 2, "pools": named}
        manifest = job_manifest(
            elasticity={"mode": "Auto", "objective": {"maxCost": 20}}, parameterServers=servers
        )
        manifest["status"] = {
            "startTime": (NOW - timedelta(hours=2)).isoformat(),
            "suspendedSeconds": 3600,
            "cost": {"accumulated": "3"},
            "slots": [{"role": "ps", "index": 0, "pool": at, "node": "n"}],
        }
        job = TrainingJob.model_validate(manifest)
        pools = pool("spot", 0.3, True), pool("safe", 0.5, False), pool("dear", 5, False)
        world.add(job, *pools)
        world.hear(job, report(7e6))
        planned = []
        world.planner._plan = lambda *given, planned=planned, **_: (
            planned.append(given),
            plan_fleet(*given),
        )[1]
        await world.planner.plan_once()
        proposal = world.planner.proposal(job.metadata.uid)
        assert proposal is not None
        assert proposal.cost is not None
        found.append((planned[0][2][0].budget_left, planned[0][2][0].server_price, proposal.cost))
    left, prices, costs = zip(*found, strict=True)
    assert left == (17.0, 17.0, 17.0)
    assert prices == (0.0, 0.5, 5.0)
    assert 3.0 < costs[0] < costs[1] < costs[2]


def test_deadline_and_budget_are_what_is_left() -> None:
    objective = {"deadlineSeconds": 3600, "maxCost": 40}
    manifest = job_manifest(elasticity={"mode": "Auto", "objective": objective})
    manifest["status"] = {"startTime": "2026-01-01T11:30:00Z", "cost": {"accumulated": "12.5"}}
    found = fleet_job(TrainingJob.model_validate(manifest), None, NOW)
    assert (found.deadline_seconds, found.budget_left) == (1800 - END_SECONDS, 27.5)


@pytest.mark.parametrize("mode", ["Off", "Manual"])
def test_job_that_nobody_plans_is_planned_with_the_workers_it_has(mode: str) -> None:
    manifest = job_manifest(elasticity={"mode": mode})
    found = fleet_job(TrainingJob.model_validate(manifest), None, NOW)
    assert (found.min_workers, found.max_workers) == (2, 2)


async def test_nothing_more_is_bought_of_a_pool_that_is_being_deleted() -> None:
    """It was the cheapest, and the plan bought four nodes that shoal-pools gave back."""
    for there in (0, 2):
        world = World()
        nodes = ({"index": i, "pool": "spot", "state": "Running", "node": f"n{i}"} for i in range(there))
        job = TrainingJob.model_validate({**job_manifest(), "status": {"slots": list(nodes)}})
        ending = pool("spot", 0.3, True)
        world.add(job, ending, pool("on-demand", 1.0, False))
        world.hear(job, report(7e6))
        world.planner._wanted.clear()
        about = ending.metadata.model_copy(
            update={"deletion_timestamp": "2026-01-01T11:59:00Z", "resource_version": "2"}
        )
        world.add(ending.model_copy(update={"metadata": about}))
        assert world.planner._wanted.is_set(), "that is a reason to plan"
        await world.planner.plan_once()
        found = world.planner.proposal(job.metadata.uid)
        assert found is not None
        assert found.feasible
        assert found.pools.get("spot", 0) == there
        assert found.pools["on-demand"] >= 4 - there
        assert "spot is being deleted: no worker begins there" in found.reason


def test_a_worker_has_the_cores_that_its_template_allows() -> None:
    def limit(*containers: dict[str, Any]) -> float:
        workers = {"replicas": 2, "template": {"spec": {"containers": list(containers)}}}
        return fleet_job(TrainingJob.model_validate(job_manifest(workers=workers)), None, NOW).cpu_limit

    sidecar = {"name": "logs", "image": "l", "resources": {"limits": {"cpu": "100m"}}}
    assert limit(sidecar) == limit(sidecar, {"name": "worker"}) == 0.0
    for cpu, cores in (("1500m", 1.5), (2, 2.0)):
        assert limit(sidecar, {"name": "worker", "resources": {"limits": {"cpu": cpu}}}) == cores


OF_50_000 = SpeedProfile.model_validate(
    {
        "metadata": {"name": "p"},
        "spec": {"model": {"flopsPerSample": 1e6, "parameters": 10, "tensors": 1, "samplesPerEpoch": 50_000}},
    }
)


def test_work_left_before_the_first_report_follows_from_the_profile() -> None:
    job = TrainingJob.model_validate(job_manifest())
    assert job.spec.training.stop_after.epochs == 3
    assert fleet_job(job, OF_50_000, NOW).samples_left == 150_000
    unknown = fleet_job(job, None, NOW)
    assert not unknown.has_work
    assert "set spec.model.samplesPerEpoch" in unknown.work_note


def test_an_epoch_is_as_long_as_the_job_says_or_else_as_in_other_jobs_of_its_model() -> None:
    """What the profile says is the model's; how long the data are is the job's."""
    measured = {"fingerprint": MODEL.fingerprint, "parameters": 10, "samplesPerEpoch": 2_000}
    beside = {"samplesPerEpoch": 2_000, "epochs": "3", "taskSamples": "30"}
    status = {"model": measured, "besideSteps": [beside]}
    profile = SpeedProfile.model_validate({"metadata": {"name": "p"}, "status": status})
    job = TrainingJob.model_validate(job_manifest())
    guessed = fleet_job(job, profile, NOW)
    assert guessed.samples_left == 6_000
    assert guessed.work_note == "an epoch is taken to be of 2,000 samples, as in other jobs of the model"
    known = job.model_copy(
        update={"status": job.status.model_copy(update={"data": DataStatus(total=50_000)})}
    )
    heard = report(None).model_copy(update={"data": DataReport(total=50_000)})
    for found in (fleet_job(known, profile, NOW), fleet_job(job, profile, NOW, heard)):
        assert (found.samples_left, found.work_note) == (150_000, "")
        assert found.beside is not None
        assert (found.beside.per_epoch, found.beside.tasks) == (50_000, 10)


async def test_a_smoke_run_of_the_model_does_not_change_the_plan_of_a_job() -> None:
    """Its 3 epochs of 2,000 samples, each with the evaluation of the whole job, were 31 nodes where 4 are enough."""
    plans = []
    for others in ((), ("smoke",)):
        world = World()
        world.add(pool("spot", 0.3, False), pool("on-demand", 1.0, False))
        for name in ("full", *others):
            job = TrainingJob.model_validate(job_manifest(name))
            world.add(job)
            total, left = (2_000, 2e3) if name == "smoke" else (1_000_000, 7e6)
            beside = BesideSums(epochs=3, others=3, tasks=60_000.0)
            update = {
                "job_uid": job.metadata.uid,
                "data": DataReport(total=total),
                "step": 100,
                "beside": beside,
            }
            world.hear(job, report(left).model_copy(update=update))
        await world.planner.plan_once()
        found = world.planner.proposal("uid-full")
        assert found is not None
        assert found.feasible
        plans.append(found.pools)
    assert plans[0] == plans[1]


def test_work_left_before_a_new_operator_hears_of_the_job_follows_from_its_status() -> None:
    status = {"training": {"step": 700, "epoch": 1}, "data": {"done": 40_000, "total": 50_000}}
    job = TrainingJob.model_validate({**job_manifest(), "status": status})
    assert fleet_job(job, OF_50_000, NOW).samples_left == pytest.approx(60_000)


@pytest.mark.by_day(2)
@pytest.mark.looptime
@pytest.mark.parametrize(("share", "keeps"), [(1.0, False), (0.8, False), (1.0, True), (0.8, True)])
async def test_operator_that_starts_anew_plans_like_the_one_before_it(*, share: float, keeps: bool) -> None:
    """How fast the workers are now, and how long they were watched, it reads from the job's status.

    `keeps`: the one before keeps its choice, and tells a little less exactly how long it may take.
    """
    slots = [{"index": i, "pool": "spot", "state": "Running", "node": f"n{i}"} for i in range(5)]
    job = TrainingJob.model_validate({**job_manifest(), "status": {"slots": slots}})

    def operator(job: TrainingJob) -> World:
        world = World()
        world.add(job, pool("spot", 0.3, True), pool("on-demand", 1.0, False))
        if not keeps:
            world.planner._plan = plan_fleet
        return world

    def heard(seconds: int) -> StatusReport:
        samples = 1 + int(share * 600 * seconds)
        workers = (
            WorkerReport(
                slot=i, incarnation=0, state=WorkerState.ACTIVE, steps=samples // 128, samples=samples
            )
            for i in range(5)
        )
        return report(7e6).model_copy(update={"workers": tuple(workers)})

    async def planned(world: World, seconds: int) -> Proposal:
        world.hear(job, heard(seconds))
        world.poller._seen[job.metadata.uid] = Seen(heard(seconds), asyncio.get_running_loop().time())
        await world.planner.plan_once()
        found = world.planner.proposal(job.metadata.uid)
        assert found is not None
        return found

    first = operator(job)
    for second in range(0, 120, 10):
        before = await planned(first, second)
        await asyncio.sleep(10)
    assert before.watched_seconds is not None
    prediction = {
        "relativeError": decimal(before.relative_error),
        "watchedSeconds": round(before.watched_seconds),
    }
    again = operator(
        TrainingJob.model_validate({**job_manifest(), "status": {"slots": slots, "prediction": prediction}})
    )
    after = await planned(again, 120)
    assert (after.pools, after.confidence) == (before.pools, before.confidence)
    assert after.samples_per_second == pytest.approx(before.samples_per_second, rel=1e-4)
    assert after.remaining_range == pytest.approx(before.remaining_range, rel=0.01 if keeps else 1e-4)


def test_status_that_someone_edited_is_left_out_and_not_an_error() -> None:
    status = {
        "model": {"fingerprint": "f", "flopsPerSample": "1e6", "parameters": 10, "tensors": 1},
        "rows": [
            {
                "device": "T4",
                "batchSize": 8,
                "workers": 1,
                "parameterServers": 1,
                "compute": {"meanLog": "nan", "count": "5"},
            },
            {
                "device": "T4",
                "batchSize": 8,
                "workers": 1,
                "parameterServers": 1,
                "compute": {"meanLog": "?", "count": "5"},
            },
        ],
    }
    profile = SpeedProfile.model_validate({"metadata": {"name": "p"}, "status": status})
    values = profile_of(profile, NOW, strict=False)
    assert values is not None
    assert values.rows == ()


@pytest.mark.looptime
async def test_profile_is_made_once_and_written_when_an_estimate_moves() -> None:
    world = World()
    job = TrainingJob.model_validate(job_manifest())
    world.add(job)
    key = ("team", profile_name(MODEL.fingerprint))
    path = f"/apis/shoal.dev/v1alpha1/namespaces/team/speedprofiles/{key[1]}"

    def writes() -> int:
        return world.cluster.requests.count(("PUT", f"{path}/status"))

    world.hear(job, report(1e6))
    assert await world.learner(key) == SOON_SECONDS
    assert writes() == 1
    stored = world.cluster.objects[path]["status"]
    assert stored["jobs"] == "digits"
    assert stored["rows"][0]["compute"]["count"] == "500"
    world.hear(job, report(1e6, count=505))
    await world.learner(key)
    assert writes() == 1, "nothing has moved"
    await asyncio.sleep(LATE_SECONDS)
    await world.learner(key)
    assert writes() == 2
    world.hear(job, report(1e6, seconds=0.5, count=5000))
    await world.learner(key)
    assert writes() == 3
    assert [verb for verb, _ in world.cluster.requests].count("POST") == 1


@pytest.mark.looptime
async def test_a_parameter_server_that_is_missing_in_one_report_counts_once() -> None:
    """When PS 0 restarts, it reports alone until shard 1 answers: one server was as fast as two, and shard 1 twice."""
    world = World()
    job = TrainingJob.model_validate(job_manifest(parameterServers={"replicas": 2}))
    world.add(job)

    def shard(index: int, boot: int, updates: int) -> ShardReport:
        return ShardReport(index=index, epoch=0, boot=boot, busy_seconds=updates / 100, updates=updates)

    for life, *shards in (
        ("a", shard(0, 1, 10_000), shard(1, 2, 10_000)),
        ("b", shard(0, 3, 300)),
        ("b", shard(0, 3, 600), shard(1, 2, 10_600)),
    ):
        world.hear(job, report(1e6).model_copy(update={"shards": tuple(shards), "speed_epoch": life}))
        await world.learner(("team", profile_name(MODEL.fingerprint)))
        await asyncio.sleep(LATE_SECONDS)
    profile = world.state.profiles.get(profile_name(MODEL.fingerprint), "team")
    assert profile is not None
    (load,) = profile.status.server_load
    assert (load.parameter_servers, float(load.updates)) == (2, 21_200)


@pytest.mark.looptime
async def test_reports_are_merged_at_intervals_and_not_with_each_of_them() -> None:
    """While no estimate moved, each report of 50 jobs merged those of all: 85 % of a core for one profile."""
    world, queue, looks = World(), WorkQueue[Key](), list[float]()
    world.learner._wake = queue.add
    jobs = [TrainingJob.model_validate(job_manifest(f"j{n}")) for n in range(5)]
    world.add(*jobs)

    async def look(key: Key) -> float | None:
        looks.append(asyncio.get_running_loop().time())
        return await world.learner(key)

    work = asyncio.create_task(queue.work(look))
    for second in range(0, 200, 2):
        for job in jobs:
            world.hear(job, report(1e6, count=500 + second // 100))
        await asyncio.sleep(2)
    assert looks == [20.0 * n for n in range(11)]
    for job in jobs:
        world.state.jobs.drop(job.metadata.uid)
    await asyncio.sleep(3 * SOON_SECONDS)
    assert len(looks) == 12, "nobody reports any more"
    world.add(jobs[0])
    world.hear(jobs[0], report(1e6, count=900))
    await asyncio.sleep(1)
    assert len(looks) == 13
    work.cancel()


async def test_rows_of_the_spec_that_no_plan_uses_are_told_with_what_is_wrong() -> None:
    """They were dropped without a word, and the plan made from data sheets."""
    world, row = World(), {"accelerator": "T4", "batchSize": 128, "stepSeconds": "0.2"}
    changes = (
        {},
        {"spread": "0.3"},
        {"lastSeen": "24.11.2026"},
        {"stepSeconds": "2e8"},
        {"accelerator": "RTX9999"},
    )
    path = "/apis/shoal.dev/v1alpha1/namespaces/team/speedprofiles/mine"

    async def told(*rows: dict[str, Any]) -> Condition | None:
        manifest = {
            "apiVersion": "shoal.dev/v1alpha1",
            "kind": "SpeedProfile",
            "metadata": {"name": "mine", "namespace": "team"},
        }
        known = world.cluster.objects.get(path, manifest)
        stored = world.cluster.add(path, {**known, "spec": {"rows": list(rows)}})
        world.state.profiles.put(SpeedProfile.model_validate(stored))
        await world.learner(("team", "mine"))
        profile = world.state.profiles.get("mine", "team")
        assert profile is not None
        assert profile.status.observed_generation == profile.metadata.generation
        return next(iter(profile.status.conditions), None)

    assert await told(row) is None
    found = await told(*(row | change for change in changes))
    assert found is not None
    assert (found.type, found.status, found.reason) == ("Ready", "False", "RowsLeftOut")
    assert "spec.rows[0]" not in found.message
    for words in (
        "spec.rows[1]: ",
        "spec.rows[2]: lastSeen must be a time such as 2026-11-24T12:00:00Z, not '24.11.2026'",
        "spec.rows[3]: ",
        "spec.rows[4]: RTX9999 is none of the known accelerators, A100-40GB",
    ):
        assert words in found.message
    writes = len(world.cluster.requests)
    await world.learner(("team", "mine"))
    assert len(world.cluster.requests) == writes
    corrected = await told(row)
    assert corrected is not None
    assert (corrected.status, corrected.reason) == ("True", "Valid")


def test_of_a_namespace_so_many_rows_are_read_and_the_profiles_of_planned_jobs_before_newer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scene, "MOST_ROWS_READ", 10)
    row = {"accelerator": "T4", "batchSize": 1, "stepSeconds": 1}

    def known(name: str, namespace: str, day: int) -> tuple[Key, Known]:
        meta = {"name": name, "namespace": namespace, "creationTimestamp": f"2026-11-{day:02}T00:00:00Z"}
        made = {"metadata": meta, "spec": {"rows": [row] * 4}}
        return (namespace, name), Known(
            SpeedProfile.model_validate(made), {}, datetime(2026, 11, 21, tzinfo=UTC), lambda: None
        )

    every = dict([*(known(f"p{day}", "evil", day) for day in range(1, 6)), known("one", "team", 1)])
    read, unread = scene.read_profiles(every, {("evil", "p2")})
    assert read.keys() == {("evil", "p2"), ("evil", "p5"), ("team", "one")}
    assert unread.keys() == {("evil", f"p{day}") for day in (1, 3, 4)}
    assert "12 rows of speeds, of which 10 are read" in unread["evil", "p4"]


async def test_a_profile_that_is_one_too_many_says_so() -> None:
    key, path = ("team", "mine"), "/apis/shoal.dev/v1alpha1/namespaces/team/speedprofiles/mine"
    world = World()
    manifest = {"apiVersion": "shoal.dev/v1alpha1", "kind": "SpeedProfile", "spec": {}}
    stored = world.cluster.add(path, {**manifest, "metadata": {"name": "mine", "namespace": "team"}})
    world.state.profiles.put(SpeedProfile.model_validate(stored))
    world.learner.judged({key: "its namespace has 9 rows"})
    await world.learner(key)
    (told,) = world.cluster.objects[path]["status"]["conditions"]
    words = "plans leave this profile out, since its namespace has 9 rows: correct it, or delete it"
    assert (told["status"], told["message"]) == ("False", words)


@pytest.mark.parametrize("anew", [False, True])
async def test_a_profile_is_left_out_until_it_is_corrected_though_nothing_is_planned(*, anew: bool) -> None:
    """Without a job nobody judges it: neither is it in order because the operator has begun `anew`."""
    key, path = ("team", "mine"), "/apis/shoal.dev/v1alpha1/namespaces/team/speedprofiles/mine"
    manifest = {"apiVersion": "shoal.dev/v1alpha1", "kind": "SpeedProfile", "spec": {}}
    world = World()
    stored = world.cluster.add(path, {**manifest, "metadata": {"name": "mine", "namespace": "team"}})
    world.state.profiles.put(SpeedProfile.model_validate(stored))

    async def told(world: World) -> tuple[str, str, int]:
        await world.learner(key)
        profile = world.state.profiles.get("mine", "team")
        assert profile is not None
        (found,) = profile.status.conditions
        return found.status, found.reason, found.observed_generation

    world.learner.judged({key: "a fault"})
    assert await told(world) == ("False", "LeftOut", 1)
    if anew:
        after = World()
        after.cluster, after.learner._transport = world.cluster, world.cluster
        after.learner._writer = StatusWriter(world.cluster, after.state.profiles, SpeedProfile)
        after.state.profiles.put(SpeedProfile.model_validate(world.cluster.objects[path]))
        world = after
    assert await told(world) == ("False", "LeftOut", 1)
    model = {"flopsPerSample": "8e7", "parameters": 500_000, "tensors": 20}
    corrected = world.cluster.change(path, spec={"model": model})
    world.state.profiles.put(SpeedProfile.model_validate(corrected))
    assert await told(world) == ("True", "Valid", 2)


@pytest.mark.looptime
async def test_a_profile_that_cannot_be_read_any_more_is_not_merged_each_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a change of the CRD that may be all of them, and a merge takes milliseconds."""
    world, merges = World(), list[Known]()
    job = TrainingJob.model_validate(job_manifest())
    world.add(job)
    key = ("team", profile_name(MODEL.fingerprint))
    world.hear(job, report(1e6))
    await world.learner(key)
    profile = world.state.profiles.get(key[1], "team")
    assert profile is not None
    merged = Known.merged
    monkeypatch.setattr(Known, "merged", lambda known: (merges.append(known), merged(known))[1])
    world.state.profiles.leave_unread(profile.metadata.uid, 1_000)
    await asyncio.sleep(LATE_SECONDS)
    world.hear(job, report(1e6, count=5000))
    assert await world.learner(key) == LATE_SECONDS
    assert merges == []
    meta = profile.metadata.model_copy(update={"resource_version": "1001"})
    path = f"/apis/shoal.dev/v1alpha1/namespaces/team/speedprofiles/{key[1]}"
    world.cluster.objects[path]["metadata"]["resourceVersion"] = "1001"
    world.state.profiles.put(profile.model_copy(update={"metadata": meta}))
    await world.learner(key)
    assert world.cluster.objects[path]["status"]["rows"][0]["compute"]["count"] == "5000"


@pytest.mark.looptime
async def test_last_report_of_a_job_is_kept_when_it_ends() -> None:
    world = World()
    manifest = job_manifest()
    job = TrainingJob.model_validate(manifest)
    world.add(job)
    key = ("team", profile_name(MODEL.fingerprint))
    world.hear(job, report(1e6))
    await world.learner(key)
    world.hear(job, report(0, count=510))
    manifest["metadata"]["resourceVersion"] = "2"
    done = {
        "type": "Complete",
        "status": "True",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "reason": "Trained",
    }
    world.add(TrainingJob.model_validate({**manifest, "status": {"conditions": [done]}}))
    assert await world.learner(key) == DAY_SECONDS
    profile = world.state.profiles.get(key[1], "team")
    assert profile is not None
    assert profile.status.rows[0].compute.count == "510"
    assert await world.learner(key) == DAY_SECONDS


def old_profile(world: World, **more: Any) -> Key:
    """A profile that the operator made, and that was last measured half a year ago."""
    meta = {"namespace": "team", "name": "old", "labels": {"app.kubernetes.io/managed-by": "shoal"}}
    model = {"fingerprint": "f", "flopsPerSample": "8e7", "parameters": 500_000, "tensors": 20}
    updated = (NOW - timedelta(days=181)).isoformat()
    body = {"metadata": meta, "status": {"model": model, "lastUpdated": updated}, **more}
    path = "/apis/shoal.dev/v1alpha1/namespaces/team/speedprofiles/old"
    world.state.profiles.put(SpeedProfile.model_validate(world.cluster.add(path, body)))
    return "team", "old"


async def test_a_profile_of_ours_that_nobody_uses_is_deleted_when_it_is_too_old_to_count() -> None:
    """Each version of a model leaves one, of up to a megabyte."""
    world = World()
    key = old_profile(world)
    world.wall = NOW - timedelta(days=2)
    assert await world.learner(key) == DAY_SECONDS
    world.wall = NOW
    assert await world.learner(key) is None
    assert world.cluster.writes("DELETE", "speedprofiles") == ["old"]
    assert world.state.profiles.get("old", "team") is None


@pytest.mark.parametrize("later", ["nothing", "a job"])
async def test_a_clock_that_is_half_a_year_ahead_deletes_no_profile(later: str) -> None:
    """What a leader deletes with such a clock is gone for good. What is made meanwhile says what time it is."""
    world, real = World(), NOW - timedelta(days=180)
    world.cluster.now = lambda: real
    key = old_profile(world)
    if later == "a job":
        manifest = job_manifest()
        manifest["metadata"]["creationTimestamp"] = f"{real:%Y-%m-%dT%H:%M:%SZ}"
        world.add(TrainingJob.model_validate(manifest))
    world.wall = NOW
    assert await world.learner(key) == DAY_SECONDS
    assert world.cluster.writes("DELETE", "speedprofiles") == []
    manifest = job_manifest("later")
    manifest["metadata"]["creationTimestamp"] = f"{NOW:%Y-%m-%dT%H:%M:%SZ}"
    world.add(TrainingJob.model_validate(manifest))
    assert await world.learner(key) is None
    assert world.cluster.writes("DELETE", "speedprofiles") == ["old"]


@pytest.mark.parametrize(
    "more",
    [
        {"spec": {"convergence": {"r1": 100, "r2": 0, "r3": 1000, "r4": 0.2}}},
        {"metadata": {"namespace": "team", "name": "old"}},
    ],
)
async def test_a_profile_in_which_a_user_has_a_part_is_never_deleted(more: dict[str, Any]) -> None:
    world = World()
    await world.learner(old_profile(world, **more))
    assert world.cluster.writes("DELETE", "speedprofiles") == []


async def test_a_profile_that_a_job_asks_for_is_kept_and_planned_with() -> None:
    profiles: list[int] = []

    def plan(_pools: object, known: list[object], _jobs: list[FleetJob], **_: object) -> FleetPlan:
        profiles.append(len(known))
        return FleetPlan({})

    world = World(plan=plan)
    key = old_profile(world)
    manifest = job_manifest()
    world.add(TrainingJob.model_validate(manifest), pool("spot", 0.3, True))
    await world.planner.plan_once()
    manifest["metadata"] |= {"annotations": {SPEED_PROFILE: "old"}, "resourceVersion": "2"}
    world.add(TrainingJob.model_validate(manifest))
    await world.planner.plan_once()
    assert profiles == [0, 1]
    assert await world.learner(key) == DAY_SECONDS
    assert world.cluster.writes("DELETE", "speedprofiles") == []


@pytest.mark.looptime
async def test_namespace_that_goes_takes_its_profile_and_stops_nothing() -> None:
    world = World()
    job = TrainingJob.model_validate(job_manifest())
    world.add(job)
    world.hear(job, report(1e6))
    gone = b'{"message": "unable to create new content in namespace ns because it is being terminated"}'
    world.cluster.fault = lambda _method, _path: Answer(403, gone)
    assert await world.learner(("team", profile_name(MODEL.fingerprint))) is None


@pytest.mark.looptime
async def test_a_process_has_one_model_whatever_it_reports_later() -> None:
    """A job that reported another fingerprint each time had a profile made each time: 43,000 a day."""
    world = World()
    job = TrainingJob.model_validate(job_manifest())
    world.add(job)
    for n in range(20):
        model = MODEL.model_copy(update={"fingerprint": f"{n:064x}"})
        world.hear(job, report(1e6, count=500 + n).model_copy(update={"model": model}))
    assert world.learner.keys == [("team", profile_name("0" * 64))]
    assert world.metrics.registry.get_sample_value("shoal_plan_faults_total", {"what": "report"}) == 19
    again = report(1e6).model_copy(update={"speed_epoch": "b"})
    world.hear(job, again)
    assert [key for key in world.learner.keys if world.learner.known(key).heard] == [
        ("team", profile_name(MODEL.fingerprint))
    ]


@pytest.mark.looptime
async def test_profile_of_a_user_is_found_by_annotation_or_fingerprint() -> None:
    world = World()
    manifest = job_manifest()
    job = TrainingJob.model_validate(manifest)
    assert world.learner.name_of(job, MODEL.fingerprint) == profile_name(MODEL.fingerprint)
    prior = {"fingerprint": MODEL.fingerprint, "flopsPerSample": 8e7, "parameters": 500_000, "tensors": 20}
    meta = {"name": "resnet", "namespace": "team", "uid": "s", "resourceVersion": "1"}
    world.state.profiles.put(SpeedProfile.model_validate({"metadata": meta, "spec": {"model": prior}}))
    assert world.learner.name_of(job, MODEL.fingerprint) == "resnet"
    manifest["metadata"]["annotations"] = {SPEED_PROFILE: "mine"}
    assert world.learner.name_of(TrainingJob.model_validate(manifest), MODEL.fingerprint) == "mine"


@pytest.mark.parametrize("coordinator", [False, True])
async def test_a_second_job_of_a_known_model_is_predicted_before_its_first_step(coordinator: bool) -> None:
    world = World()
    first = TrainingJob.model_validate(job_manifest())
    world.add(first, pool("spot", 0.3, True), pool("on-demand", 1.0, False))
    world.hear(first, report(7e6))
    name = profile_name(MODEL.fingerprint)
    status = world.learner.known((first.metadata.namespace, name)).merged().status
    meta = {"name": name, "namespace": first.metadata.namespace, "uid": "p", "resourceVersion": "1"}
    world.state.profiles.put(
        SpeedProfile.model_validate({"metadata": meta}).model_copy(update={"status": status})
    )
    training = {"entrypoint": "a:b", "batchSize": 128, "stopAfter": {"steps": 10_000}}
    manifest = job_manifest("again", training=training)
    manifest["metadata"]["annotations"] = {SPEED_PROFILE: name}
    second = TrainingJob.model_validate(manifest)
    world.add(second)
    if coordinator:  # it runs before the workers, and knows neither the data nor the model
        world.hear(second, StatusReport(job_uid="uid-again", phase=Phase.STARTING))
    await world.planner.plan_once()
    found = world.planner.proposal(second.metadata.uid)
    assert found is not None
    workers = sum(found.pools.values())
    assert found.samples_per_second == pytest.approx(640 * workers, rel=0.2)
    assert found.remaining_range is not None
    assert found.remaining_seconds is not None
    low, high = found.remaining_range
    assert low <= found.remaining_seconds <= high


async def test_workers_that_wait_in_an_exhausted_pool_do_not_run_there() -> None:
    world = World()
    slots = [{"index": n, "pool": "spot", "state": "Starting"} for n in range(2)]
    objective = {"deadlineSeconds": 1500}  # no time to wait for spot nodes
    manifest = job_manifest(elasticity={"mode": "Auto", "objective": objective})
    job = TrainingJob.model_validate({**manifest, "status": {"slots": slots}})
    exhausted = {"type": "Exhausted", "status": "True", "reason": "NoNodes"}
    spot = pool("spot", 0.3, True)
    condition = Condition.model_validate({**exhausted, "lastTransitionTime": "2026-01-01T00:00:00Z"})
    status = spot.status.model_copy(update={"conditions": (condition,)})
    world.add(job, spot.model_copy(update={"status": status}), pool("on-demand", 1.0, False))
    world.hear(job, report(4e6))
    await world.planner.plan_once()
    found = world.planner.proposal(job.metadata.uid)
    assert found is not None
    assert set(found.pools) == {"on-demand"}
    bound = [{**slot, "node": f"n{slot['index']}"} for slot in slots]
    assert running(TrainingJob.model_validate({**manifest, "status": {"slots": bound}})) == {"spot": 2}
    assert running(job) == {}
    assert asked(job) == {"spot": 0.0}
    made = (NOW - timedelta(seconds=each) for each in (40, 90))
    dated = [{**slot, "createdAt": at.isoformat()} for slot, at in zip(slots, made, strict=True)]
    waits = TrainingJob.model_validate({**manifest, "status": {"slots": dated}})
    assert asked(waits, NOW) == {"spot": 90.0}


async def test_a_job_begins_with_its_replicas_until_something_is_known() -> None:
    world = World()
    job = TrainingJob.model_validate(job_manifest())
    world.add(job, pool("spot", 0.3, True), pool("on-demand", 1.0, False))
    await world.planner.plan_once()
    found = world.planner.proposal(job.metadata.uid)
    assert found is not None
    assert dict(found.pools) == {"spot": 2}
    assert found.samples_per_second is None


@pytest.mark.parametrize("measured", [True, False])
async def test_only_a_risk_that_was_measured_is_urgent(measured: bool) -> None:
    world = World()
    job = TrainingJob.model_validate(job_manifest())
    world.add(job, pool("spot", 0.3, True), pool("on-demand", 1.0, False))
    said = report(1e12)
    world.hear(job, said if measured else said.model_copy(update={"speed": ()}))
    await world.planner.plan_once()
    found = world.planner.proposal(job.metadata.uid)
    assert found is not None
    assert not found.feasible
    assert found.urgent == measured


@pytest.mark.looptime
async def test_job_that_ends_by_a_metric_is_planned_once_its_course_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until five evaluations are there, the plan says that the work is not known; then it says what is left."""
    threads: list[threading.Thread] = []
    fit = efficiency.samples_to_target

    def fit_somewhere(*args: Any, **options: Any) -> efficiency.WorkLeft:
        threads.append(threading.current_thread())
        return fit(*args, **options)

    monkeypatch.setattr(efficiency, "samples_to_target", fit_somewhere)
    world = World()
    stop = {"metric": "val_loss", "value": "0.4"}
    training = {"entrypoint": "digits:job", "batchSize": 128, "stopAfter": stop}
    job = TrainingJob.model_validate(job_manifest(training=training))
    world.add(job, pool("spot", 0.3, True), pool("on-demand", 1.0, False))

    def epochs(count: int) -> tuple[EpochReport, ...]:
        losses = [0.2 + 2 / (1 + (epoch + 1) / 2) for epoch in range(count)]
        return tuple(EpochReport(epoch=i, metrics={"val_loss": loss}) for i, loss in enumerate(losses))

    def heard(count: int) -> StatusReport:
        data = DataReport(total=100_000)
        return report(None).model_copy(update={"epochs": epochs(count), "epoch": count, "data": data})

    world.hear(job, heard(2))
    await world.planner.plan_once()
    early = world.planner.proposal(job.metadata.uid)
    assert early is not None
    assert early.finish_time is None
    assert "5 evaluations are needed to foresee when it ends, and there were 2" in early.reason
    world.hear(job, heard(12))
    await world.planner.plan_once()
    known = world.planner.proposal(job.metadata.uid)
    assert known is not None
    assert known.finish_time is not None
    assert "the job ends when val_loss is 0.4: from 12 evaluations" in known.reason.replace(
        "The job", "the job"
    )
    assert "is an assumption until the job has run with different numbers" in known.reason
    assert len(threads) == 2
    assert threading.main_thread() not in threads  # tens of milliseconds: not for the event loop


async def test_a_plan_of_many_jobs_of_a_model_reads_each_thing_once_and_off_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was quadratic, and on the event loop: with 200 jobs for longer than the Lease holds."""
    calls = Counter[str]()
    threads = set[threading.Thread]()

    def counted(module: Any, name: str) -> None:
        whole = getattr(module, name)

        def called(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            threads.add(threading.current_thread())
            return whole(*args, **options)

        monkeypatch.setattr(module, name, called)

    counted(reconcile, "learn")
    counted(planner, "holdings")
    counted(planner, "profile_of")
    counted(planner, "proposal")
    counted(scene, "fleet_job")
    counted(scene, "fleet_pool")
    world = World()
    world.add(pool("spot", 0.3, True), pool("on-demand", 1.0, False))
    for n in range(9):
        job = TrainingJob.model_validate(job_manifest(f"job-{n}"))
        world.add(job)
        world.hear(job, report(1e6).model_copy(update={"job_uid": job.metadata.uid}))
    await world.planner.plan_once()
    assert calls.pop("profile_of") == 1
    assert calls.pop("fleet_pool") == 2
    assert calls == dict.fromkeys(("learn", "holdings", "fleet_job", "proposal"), 9)
    assert threading.main_thread() not in threads


async def test_reports_are_merged_off_the_loop() -> None:
    world = World()
    job = TrainingJob.model_validate(job_manifest())
    world.add(job)
    world.hear(job, report(1e6))
    loop, threads = threading.current_thread(), []
    known = world.learner.known(key := ("team", profile_name(MODEL.fingerprint)))
    assert known.merged().status.rows

    class Spied(Known):
        def merged(self) -> SpeedProfile:
            threads.append(threading.current_thread())
            return super().merged()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconcile, "Known", Spied)
        await world.learner(key)
    assert len(threads) == 1
    assert loop not in threads


@pytest.mark.parametrize(("priority", "urgent"), [(0, False), (7, True)])
async def test_nodes_are_given_up_at_once_for_a_higher_priority_only(priority: int, urgent: bool) -> None:
    """Plans of equals change places with every report; what is carried out has held for a while."""
    counts = {"team/digits": {"spot": 2}, "team/other": {"spot": 6}}

    def plans(_pools: object, _profiles: object, jobs: list[FleetJob], **_: object) -> FleetPlan:
        empty = JobPlan({}, 1, 60.0, None, None, 1.0, 0.99, True, None, "", None, None)
        return FleetPlan({job.name: replace(empty, counts=counts[job.name]) for job in jobs})

    world = World(plan=plans)
    slots = [{"index": n, "pool": "spot", "state": "Running", "node": f"n{n}"} for n in range(4)]
    first = TrainingJob.model_validate({**job_manifest(), "status": {"slots": slots}})
    manifest = job_manifest()
    manifest["metadata"] = {**manifest["metadata"], "name": "other", "uid": "uid-other"}
    other = TrainingJob.model_validate(manifest)
    world.add(first, other, pool("spot", 0.3, True))
    worker = build.pod_manifest()
    worker["metadata"] |= {
        "name": "other-worker-0-0",
        "ownerReferences": [{"uid": "uid-other", "controller": True}],
    }
    worker["metadata"]["labels"]["shoal.dev/job"] = "other"
    world.state.pods.put(Pod.model_validate({**worker, "spec": {"priority": priority}}))
    await world.planner.plan_once()
    found = world.planner.proposal(first.metadata.uid)
    assert found is not None
    assert (found.traded, found.urgent) == ({"spot"}, urgent)
    theirs = world.planner.proposal(other.metadata.uid)
    assert theirs is not None
    assert (theirs.traded, theirs.urgent) == ({"spot"}, False)  # it takes them when they are left


@pytest.mark.parametrize(
    ("pool", "basis", "urgent"), [("spot", Basis.MEASURED, True), ("measured", Basis.DATA_SHEETS, False)]
)
def test_a_deadline_at_risk_is_urgent_once_speeds_are_measured(pool: str, basis: str, urgent: bool) -> None:
    """A pool named `measured` is not."""
    job = TrainingJob.model_validate(job_manifest())
    late = JobPlan({pool: 2}, 1, 9e4, None, None, 1.0, 0.1, False, "deadline", "", 1.0, None, {pool: basis})
    found = proposal(job, late, Trade(), NOW, None)
    assert (found.urgent, found.basis) == (urgent, f"{pool}: {basis}")


@pytest.mark.parametrize(("asked", "urgent"), [(0.8, False), (0.9, False), (0.95, True)])
def test_a_deadline_is_at_risk_below_the_confidence_that_its_job_asks_for(asked: float, urgent: bool) -> None:
    job = TrainingJob.model_validate(job_manifest())
    objective = job.spec.elasticity.objective.model_copy(
        update={"deadline_seconds": 3600, "confidence": asked}
    )
    elasticity = job.spec.elasticity.model_copy(update={"objective": objective})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"elasticity": elasticity})})
    plan = JobPlan(
        {"spot": 2}, 1, 9e2, None, None, 1.0, 0.9, True, None, "", 1.0, None, {"spot": Basis.MEASURED}
    )
    assert proposal(job, plan, Trade(), NOW, None).urgent == urgent


async def test_what_the_user_says_of_the_model_counts_for_a_running_job() -> None:
    """A pool into which the model does not fit was planned, and every worker there ended for want of memory."""
    world = World()
    job = TrainingJob.model_validate(job_manifest())
    world.add(job, pool("spot", 0.3, True), pool("on-demand", 1.0, False, accelerator={"name": "A100"}))
    prior = {"flopsPerSample": 8e7, "parameters": 500_000, "tensors": 20, "fingerprint": MODEL.fingerprint}
    spec = {"model": prior | {"bytesPerSample": 200_000_000}}  # 26 GB of 128 samples: a T4 has 16
    meta = {"name": "p", "namespace": "team", "uid": "p"}
    world.state.profiles.put(SpeedProfile.model_validate({"metadata": meta, "spec": spec}))
    world.hear(job, report(1e6))
    await world.planner.plan_once()
    found = world.planner.proposal(job.metadata.uid)
    assert found is not None
    assert set(found.pools) == {"on-demand"}
    assert "spot is left out: 128 samples need 25.6 GB and T4 has 16 GB" in found.reason


@pytest.mark.parametrize("image", ["", "mine:1"])
async def test_pools_with_gpus_are_not_planned_without_an_image_for_them(image: str) -> None:
    """Their workers are never made there: a plan that counts on them keeps no deadline."""
    world = World(images=Images(ps="ps:1", worker="worker:1"))
    template = {"spec": {"containers": [{"name": "worker", "image": image}]}} if image else {}
    workers = {"replicas": 2, "maxReplicas": 8, "pools": ["spot", "cpus"], "template": template}
    job = TrainingJob.model_validate(job_manifest(workers=workers))
    world.add(job, pool("spot", 0.3, True), pool("cpus", 1.0, False, accelerator=None, cores=8))
    world.hear(job, report(1e6))
    await world.planner.plan_once()
    found = world.planner.proposal(job.metadata.uid)
    assert found is not None
    assert ("spot" in found.pools) == bool(image)
    assert ("spot is left out: its nodes have GPUs" in found.reason) == (not image)


def test_loss_curve_of_the_user_is_the_work_until_the_course_is_known() -> None:
    curve = {"r1": "100", "r2": "0", "r3": "1000", "r4": "0.2"}
    manifest = job_manifest(training={"entrypoint": "a:b", "stopAfter": {"metric": "loss", "value": "0.4"}})
    profile = SpeedProfile.model_validate({"metadata": {"name": "p"}, "spec": {"convergence": curve}})
    job = TrainingJob.model_validate(manifest)
    said = report(None).model_copy(update={"step": 10})
    for found in (fleet_job(job, profile, NOW), fleet_job(job, profile, NOW, said)):
        assert found.loss is not None
        assert found.loss.target == 0.4
    assert "spec.convergence" in fleet_job(job, None, NOW).work_note


async def test_a_profile_that_is_refused_is_told_on_its_job_once() -> None:
    """A bad name in the annotation was told in the operator's log only."""
    world = World()
    manifest = job_manifest()
    manifest["metadata"]["annotations"] = {"shoal.dev/speed-profile": "My_Model"}
    job = TrainingJob.model_validate(manifest)
    world.add(job)
    said = b'{"message": "metadata.name: Invalid value: \\"My_Model\\": a lowercase RFC 1123 subdomain"}'
    world.cluster.fault = lambda method, _path: Answer(422, said) if method == "POST" else None
    world.hear(job, report(7e6))
    for _ in range(3):
        with pytest.raises(Unavailable):
            await world.learner(("team", "My_Model"))
    [(name, event)] = world.told
    assert (name, event.type, event.reason) == ("digits", "Warning", "SpeedProfileRefused")
    assert "SpeedProfile My_Model, which the annotation shoal.dev/speed-profile names" in event.message
    assert "Invalid value" in event.message
