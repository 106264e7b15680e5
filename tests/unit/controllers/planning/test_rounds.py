"""When plans are made, how long they may take, and what is published of those that are interrupted or fail."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from typing import Any

import pytest

from shoal.controllers.planning import planner, scene
from shoal.controllers.planning.planner import Planner
from shoal.controllers.speedprofile import reconcile
from shoal.errors import Interrupted, ShoalError
from shoal.sizing.fleet import FleetPlan, JobPlan, plan_fleet
from tests.unit.controllers.planning.world import NOW, ON_DEMAND, SPOT, World, pool, report, training_job


async def test_the_age_of_the_oldest_proposal_is_that_of_the_job_that_was_planned_longest_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    jobs = [training_job(name) for name in ("one", "two")]
    world.add(*jobs, SPOT)
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


@pytest.mark.looptime
async def test_plans_at_once_after_a_change_and_else_once_a_minute() -> None:
    plans: list[float] = []

    def counted(pools: Any, profiles: Any, jobs: Any, **_: Any) -> FleetPlan:
        plans.append(len(jobs))
        return FleetPlan({})

    world = World(plan=counted)
    async with world.planning():
        await asyncio.sleep(1)
        world.add(training_job())
        await asyncio.sleep(2)
        assert len(plans) == 1
        await asyncio.sleep(59)
        assert len(plans) == 1
        await asyncio.sleep(120)
        assert len(plans) == 3


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
    async with world.planning():
        for _ in range(100):
            world.planner.trigger()
            await asyncio.sleep(1)
        gaps = [later - earlier for earlier, later in itertools.pairwise(begun)]
        assert min(gaps) >= 10
        assert max(gaps) <= 11
        assert world.metrics.registry.get_sample_value("shoal_plan_busy_ratio") == pytest.approx(
            0.5, abs=0.05
        )


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
    async with world.planning():
        world.planner.trigger()
        await asyncio.sleep(3605)
        world.planner.trigger()
        await asyncio.sleep(120)
        assert begun[1] - ended[0] <= 60


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
                world.add(training_job("late"))
                world.replan()
            told(name, made)

        return plan_fleet(*given, told=slowly, kept=kept)

    world = World(plan=plan)
    world.add(pool("spot", 0.3, True, limits={"nodes": 60}))
    for n in range(6):
        world.add(training_job(f"job-{n}"), said=report(1e5))
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
        world.add(training_job(f"job-{n}"), said=report(left))
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
    async with world.planning():
        await asyncio.sleep(1600)
        assert patient[:5] == [60, 120, 240, 480, 960]
        assert done
        assert world.metrics.registry.get_sample_value("shoal_plans_total", {"result": "interrupted"}) == 4
        world.planner.trigger()
        await asyncio.sleep(130)
        assert patient[5] == 60


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
        world.add(training_job(f"job-{n}", status=status))
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

    world, job = World(plan=plan, every_seconds=10), training_job()
    world.add(job, SPOT, ON_DEMAND, said=report(7e6))
    async with world.planning():
        await asyncio.sleep(15)
        broken = True
        await asyncio.sleep(60)
        assert world.proposal(job).age_seconds >= 50
        assert world.metrics.registry.get_sample_value("shoal_plans_total", {"result": "error"})


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
    world.add(SPOT, ON_DEMAND)
    for n in range(9):
        said = report(1e6, job_uid=f"uid-job-{n}")
        world.add(training_job(f"job-{n}"), said=said)
    await world.planner.plan_once()
    assert calls.pop("profile_of") == 1
    assert calls.pop("fleet_pool") == 2
    assert calls == dict.fromkeys(("learn", "holdings", "fleet_job", "proposal"), 9)
    assert threading.main_thread() not in threads
