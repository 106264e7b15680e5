"""From custom resources to proposals: the real planner on real values, in virtual time."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import pytest

from shoal.api.training_job import TrainingJob
from shoal.policy.model import Proposal
from shoal.policy.tell.progress import decimal
from shoal.sizing.fleet import plan_fleet
from shoal.sizing.speed import efficiency
from shoal.telemetry.poller import Seen
from shoal_trainer.contract import (
    BesideSums,
    DataReport,
    EpochReport,
    Phase,
    StatusReport,
    WorkerReport,
    WorkerState,
)
from tests.unit.controllers.planning.world import KEY, NOW, ON_DEMAND, SPOT, World, pool, report, training_job


async def test_measured_job_gets_the_cheapest_pools_that_keep_its_deadline() -> None:
    world, job = World(), training_job()
    # 640 samples/s a worker: 7 million samples in an hour need more than 3 workers, and fewer than 8.
    world.add(job, SPOT, ON_DEMAND, said=report(7e6))
    found = await world.planned(job)
    assert found.feasible
    assert 4 <= sum(found.pools.values()) <= 7
    assert found.pools["spot"] >= found.pools.get("on-demand", 0)
    assert found.finish_time is not None
    assert NOW < found.finish_time < NOW + timedelta(hours=1)
    assert found.samples_per_second == pytest.approx(640 * sum(found.pools.values()), rel=0.2)
    assert found.speeds["spot"] == pytest.approx(640, rel=0.1)
    assert "spot" in found.reason
    assert world.woken == [("team", "digits")]


async def test_two_jobs_never_plan_more_than_the_limit() -> None:
    world = World()
    pools = [
        pool("spot", 0.3, True, limits={"nodes": 5}),
        pool("on-demand", 1.0, False, limits={"nodes": 4}),
    ]
    jobs = [training_job(name) for name in ("one", "two")]
    world.add(*jobs, *pools, said=report(7e6))
    await world.planner.plan_once()
    for name, limit in (("spot", 5), ("on-demand", 4)):
        assert sum(world.proposal(job).pools.get(name, 0) for job in jobs) <= limit


async def test_a_budget_is_that_of_the_whole_job_where_the_servers_have_a_price() -> None:
    """What was spent is the bill as it was counted; what is to come has the price of the pool where servers are."""
    found = []
    for named, at in (([], ""), (["safe", "dear"], "safe"), (["safe", "dear"], "dear")):
        world = World()
        servers = {"replicas": 2, "pools": named}
        status = {
            "startTime": (NOW - timedelta(hours=2)).isoformat(),
            "suspendedSeconds": 3600,
            "cost": {"accumulated": "3"},
            "slots": [{"role": "ps", "index": 0, "pool": at, "node": "n"}],
        }
        elasticity = {"mode": "Auto", "objective": {"maxCost": 20}}
        job = training_job(elasticity=elasticity, parameterServers=servers, status=status)
        pools = SPOT, pool("safe", 0.5, False), pool("dear", 5, False)
        world.add(job, *pools, said=report(7e6))
        planned = []
        world.planner._plan = lambda *given, planned=planned, **_: (
            planned.append(given),
            plan_fleet(*given),
        )[1]
        proposal = await world.planned(job)
        assert proposal.cost is not None
        found.append((planned[0][2][0].budget_left, planned[0][2][0].server_price, proposal.cost))
    left, prices, costs = zip(*found, strict=True)
    assert left == (17.0, 17.0, 17.0)
    assert prices == (0.0, 0.5, 5.0)
    assert 3.0 < costs[0] < costs[1] < costs[2]


async def test_a_smoke_run_of_the_model_does_not_change_the_plan_of_a_job() -> None:
    """Its 3 epochs of 2,000 samples, each with the evaluation of the whole job, were 31 nodes where 4 are enough."""
    plans = []
    for others in ((), ("smoke",)):
        world = World()
        world.add(pool("spot", 0.3, False), ON_DEMAND)
        for name in ("full", *others):
            job = training_job(name)
            total, left = (2_000, 2e3) if name == "smoke" else (1_000_000, 7e6)
            beside, data = BesideSums(epochs=3, others=3, tasks=60_000.0), DataReport(total=total)
            said = report(left, job_uid=job.metadata.uid, data=data, step=100, beside=beside)
            world.add(job, said=said)
        found = await world.planned(training_job("full"))
        assert found.feasible
        plans.append(found.pools)
    assert plans[0] == plans[1]


@pytest.mark.by_day(2)
@pytest.mark.looptime
@pytest.mark.parametrize(("share", "keeps"), [(1.0, False), (0.8, False), (1.0, True), (0.8, True)])
async def test_operator_that_starts_anew_plans_like_the_one_before_it(*, share: float, keeps: bool) -> None:
    """How fast the workers are now, and how long they were watched, it reads from the job's status.

    `keeps`: the one before keeps its choice, and tells a little less exactly how long it may take.
    """
    slots = [{"index": i, "pool": "spot", "state": "Running", "node": f"n{i}"} for i in range(5)]
    job = training_job(status={"slots": slots})

    def operator(job: TrainingJob) -> World:
        world = World()
        world.add(job, SPOT, ON_DEMAND)
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
        return report(7e6, workers=tuple(workers))

    async def planned(world: World, seconds: int) -> Proposal:
        world.hear(job, heard(seconds))
        world.poller._seen[job.metadata.uid] = Seen(heard(seconds), asyncio.get_running_loop().time())
        return await world.planned(job)

    first = operator(job)
    for second in range(0, 120, 10):
        before = await planned(first, second)
        await asyncio.sleep(10)
    assert before.watched_seconds is not None
    prediction = {
        "relativeError": decimal(before.relative_error),
        "watchedSeconds": round(before.watched_seconds),
    }
    again = operator(training_job(status={"slots": slots, "prediction": prediction}))
    after = await planned(again, 120)
    assert (after.pools, after.confidence) == (before.pools, before.confidence)
    assert after.samples_per_second == pytest.approx(before.samples_per_second, rel=1e-4)
    assert after.remaining_range == pytest.approx(before.remaining_range, rel=0.01 if keeps else 1e-4)


@pytest.mark.parametrize("coordinator", [False, True])
async def test_a_second_job_of_a_known_model_is_predicted_before_its_first_step(coordinator: bool) -> None:
    world = World()
    first = training_job()
    world.add(first, SPOT, ON_DEMAND, said=report(7e6))
    learned = world.learner.known(KEY).merged().status
    world.add_profile(KEY[1], status=learned.model_dump(mode="json", by_alias=True))
    training = {"entrypoint": "a:b", "batchSize": 128, "stopAfter": {"steps": 10_000}}
    second = training_job("again", profile=KEY[1], training=training)
    world.add(second)
    if coordinator:  # it runs before the workers, and knows neither the data nor the model
        world.hear(second, StatusReport(job_uid="uid-again", phase=Phase.STARTING))
    found = await world.planned(second)
    workers = sum(found.pools.values())
    assert found.samples_per_second == pytest.approx(640 * workers, rel=0.2)
    assert found.remaining_range is not None
    assert found.remaining_seconds is not None
    low, high = found.remaining_range
    assert low <= found.remaining_seconds <= high


async def test_a_job_begins_with_its_replicas_until_something_is_known() -> None:
    world, job = World(), training_job()
    world.add(job, SPOT, ON_DEMAND)
    found = await world.planned(job)
    assert dict(found.pools) == {"spot": 2}
    assert found.samples_per_second is None


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
    job = training_job(training=training)
    world.add(job, SPOT, ON_DEMAND)

    def epochs(count: int) -> tuple[EpochReport, ...]:
        losses = [0.2 + 2 / (1 + (epoch + 1) / 2) for epoch in range(count)]
        return tuple(EpochReport(epoch=i, metrics={"val_loss": loss}) for i, loss in enumerate(losses))

    def heard(count: int) -> StatusReport:
        data = DataReport(total=100_000)
        return report(None, epochs=epochs(count), epoch=count, data=data)

    world.hear(job, heard(2))
    early = await world.planned(job)
    assert early.finish_time is None
    assert "5 evaluations are needed to foresee when it ends, and there were 2" in early.reason
    world.hear(job, heard(12))
    known = await world.planned(job)
    assert known.finish_time is not None
    assert "the job ends when val_loss is 0.4: from 12 evaluations" in known.reason.replace(
        "The job", "the job"
    )
    assert "is an assumption until the job has run with different numbers" in known.reason
    assert len(threads) == 2
    assert threading.main_thread() not in threads  # tens of milliseconds: not for the event loop
