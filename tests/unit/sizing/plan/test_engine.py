"""The engine's intervals against single events: as much work, and as uncertain, however long an interval is."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, pstdev

import numpy as np
import pytest

from shoal.sizing.availability import Losses, Stock, Supply
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.engine import STEPS, Engine
from shoal.sizing.plan.planner import plan
from shoal.sizing.plan.problem import Objective, Pool, Problem, Servers
from shoal.sizing.plan.work import StepWork

STARTUP = 600.0
WORKERS = 8


def problem(losses_per_hour: float, seconds: float, share: float = 0.5, shocks: float = 0.5) -> Problem:
    """Workers that do a step a second; `share` is the part of their time that the work takes."""
    pool = Pool(
        "spot",
        limit=WORKERS,
        price=1.0,
        step_seconds=1.0,
        batch=1,
        startup_seconds=STARTUP,
        interruptions_per_hour=losses_per_hour,
        shock_share=shocks,
    )
    return Problem(
        [pool],
        StepWork(steps=share * WORKERS * seconds),
        Servers(interruptions_per_hour=0.0),
        Objective(deadline=seconds),
    )


def busy(losses_per_hour: float, seconds: float, chance: random.Random, shocks: float = 0.5) -> float:
    """The part of their time in which workers work: a loss strikes one that works, a shock half of them."""
    ready = [STARTUP] * WORKERS
    lost = [(chance.expovariate(losses_per_hour * (1 - shocks) / 3600), n) for n in range(WORKERS)]
    if shocks:
        lost.append((chance.expovariate(losses_per_hour * shocks / 0.5 / 3600), -1))
    heapq.heapify(lost)
    worked = 0.0
    while lost[0][0] < seconds:
        at, which = lost[0]
        rate = losses_per_hour * (shocks / 0.5 if which < 0 else 1 - shocks) / 3600
        heapq.heapreplace(lost, (at + chance.expovariate(rate), which))
        for n in range(WORKERS) if which < 0 else (which,):
            if ready[n] <= at and (which >= 0 or chance.random() < 0.5):
                worked += at - ready[n]
                ready[n] = at + STARTUP
    worked += sum(max(seconds - at, 0.0) for at in ready)
    return worked / WORKERS / seconds


@pytest.mark.by_day(6)
@pytest.mark.parametrize("shocks", [0.0, 0.5])
@pytest.mark.parametrize("losses_per_startup", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("interval", [0.1, 0.5, 1.0, 3.0, 10.0, 100.0])
def test_as_much_work_is_done_as_event_by_event(
    interval: float, losses_per_startup: float, shocks: float
) -> None:
    """`interval`: of the engine, in start-ups."""
    rate, horizon = losses_per_startup * 3600 / STARTUP, interval * STARTUP * STEPS
    engine = Engine(problem(rate, horizon, shocks=shocks), horizon, runs=1000)
    ours = engine.done([WORKERS], 1) / WORKERS / horizon
    chance = random.Random(1)
    most = 150 if interval < 10 else 25
    true = [busy(rate, horizon, chance, shocks) for _ in range(most)]
    off = 3 * pstdev(true) / most**0.5
    assert float(ours.mean()) == pytest.approx(fmean(true), abs=off + 0.01)
    if interval < 10:
        assert float(ours.std()) == pytest.approx(pstdev(true), rel=0.35)


def single(losses_per_hour: float, startup: float, hours: float, limit: int, shocks: float) -> Problem:
    """One worker of a pool, for work that takes it so many hours without a loss."""
    given = problem(losses_per_hour, 3600 * hours * (1 + losses_per_hour * startup / 3600), shocks=shocks)
    pool = replace(given.pools[0], limit=limit, startup_seconds=startup, running=1)
    return replace(given, pools=[pool], work=StepWork(steps=3600 * hours))


@pytest.mark.parametrize("shocks", [0.0, 0.5])
@pytest.mark.parametrize("limit", [1, 8, 64])
@pytest.mark.parametrize(
    ("losses_per_hour", "startup", "hours"), [(0.2, 180, 12), (1, 600, 24), (2, 600, 24), (2, 900, 8)]
)
def test_a_part_of_a_pool_loses_as_much_and_as_unsurely_as_that_many_nodes(
    losses_per_hour: float, startup: float, hours: float, limit: int, shocks: float
) -> None:
    """The time of one worker is exact: the work and a start-up for each of Poisson(rate x work) losses."""
    lost = np.random.default_rng(0).poisson(losses_per_hour * hours, 100_000)
    true = 3600 * hours + startup * lost
    deadline = float(np.quantile(true, 0.95))
    one = single(losses_per_hour, startup, hours, limit, shocks)
    finish = Engine(one, 1.25 * deadline).run([1], 1, "").finish
    assert float(finish.mean()) == pytest.approx(float(true.mean()), abs=0.15 * float(true.std()))
    assert float(finish.std()) == pytest.approx(float(true.std()), rel=0.1)
    assert float((finish <= deadline).mean()) == pytest.approx(float((true <= deadline).mean()), abs=0.03)
    sure = ElasticModel(one, margin=1.0).evaluators()[0](np.array([[1.0]]))
    assert float(sure.sure_seconds[0] - sure.seconds[0]) == pytest.approx(float(true.std()), rel=0.03)


def test_the_time_that_lost_servers_cost_varies_as_work_to_repeat_and_a_recovery_together() -> None:
    calm = Pool("calm", limit=4, price=1.0, step_seconds=1.0, batch=1, spot=False)
    servers = Servers(interruptions_per_hour=1.0, snapshot_every=600.0, recovery_seconds=300.0)
    sure = ElasticModel(Problem([calm], StepWork(steps=4 * 36_000), servers), margin=1.0).evaluators()[0](
        np.array([[4.0]])
    )
    squares = np.square(np.random.default_rng(0).uniform(0, 600.0, 100_000) + 300.0).mean()
    variance = float(sure.sure_seconds[0] - sure.seconds[0]) ** 2
    assert variance == pytest.approx(float(sure.seconds[0]) / 3600 * squares, rel=0.01)


@pytest.mark.parametrize("limit", [1, 5, 64])
def test_of_more_nodes_at_least_as_many_are_struck_in_whatever_order_they_are_asked(limit: int) -> None:
    rng = np.random.default_rng(limit)
    lost, shocks = rng.poisson(0.3 * limit, (50, 40)), rng.binomial(limit * rng.poisson(0.3, (50, 40)), 0.5)

    def losses() -> Losses:
        supply = Supply(np.ones((50, 40)), lost / limit, shocks / limit, shared=True)
        return Losses(supply, limit, np.full((50, 40), 0.5), seed=1)

    upwards, downwards = losses(), losses()
    numbers = range(limit + 1)
    struck = [upwards.strike(n) for n in numbers]
    again = [downwards.strike(n) for n in reversed(numbers)][::-1]
    assert all(np.array_equal(one, other) for one, other in zip(struck, again, strict=True))
    assert all((more >= fewer).all() for fewer, more in pairwise(struck))
    assert np.array_equal(struck[limit], lost + shocks)
    for n in numbers:
        assert float(struck[n].mean()) == pytest.approx(0.45 * n, rel=0.25, abs=0.1)


def test_what_two_pools_of_one_size_lose_has_nothing_in_common() -> None:
    one = Pool("a", 64, price=1.0, step_seconds=1.0, batch=1, startup_seconds=60, interruptions_per_hour=1.0)
    pools = [replace(one, name=name, shock_share=0.0) for name in "ab"]
    engine = Engine(Problem(pools, StepWork(steps=1e6), Servers()), 36_000.0)
    alone = (engine.done(counts, 1) for counts in ([8, 0], [0, 8]))
    assert abs(np.corrcoef(*alone)[0, 1]) < 0.1


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("losses_per_hour", "hours", "share"), [(0.5, 720, 0.922), (1, 336, 0.855), (2, 72, 0.74), (2, 72, 0.76)]
)
def test_a_deadline_of_days_is_promised_as_often_as_it_is_kept(
    losses_per_hour: float, hours: float, share: float
) -> None:
    seconds = hours * 3600
    said = plan(problem(losses_per_hour, seconds, share)).chance
    chance = random.Random(2)
    kept = fmean(busy(losses_per_hour, seconds, chance) >= share for _ in range(100))
    assert said == pytest.approx(kept, abs=0.15)


def test_what_the_simulation_holds_to_be_sure_is_feasible() -> None:
    """By the formula a worker that begins after the end delays it: the simulation decides, and there is one answer."""
    prompt = Pool("prompt", limit=1, price=1.0, step_seconds=1.0, batch=1, step_sigma=0.01)
    late = replace(prompt, name="late", startup_seconds=3000.0)
    found = plan(
        Problem([prompt, late], StepWork(steps=900), objective=Objective(deadline=1000.0), min_workers=2)
    )
    assert found.chance == 1.0
    assert found.feasible


def test_a_stock_out_strikes_a_job_whatever_the_limit_of_its_pool() -> None:
    """A limit of 64 bought eight workers 0.99 where one of 8 promised 0.88: what was left were always the job's."""

    def kept(limit: int) -> float:
        out = Stock(0.1, 1800.0, looks=100.0)
        pool = Pool("spot", limit, 0.5, 0.1, 128, startup_seconds=150, running=8, stock=out)
        known = replace(pool, availability=pool.running_out())
        work = StepWork(steps=1.5 * 3600 * 8 / 0.1)
        problem = Problem([known], work, Servers(interruptions_per_hour=0.0), Objective(deadline=1.9 * 3600))
        runs = Engine(problem, 1.25 * 1.9 * 3600).run([8], 1, "")
        return float((runs.finish <= 1.9 * 3600).mean())

    assert [kept(limit) for limit in (12, 16, 64)] == pytest.approx([kept(8)] * 3, abs=0.03)
