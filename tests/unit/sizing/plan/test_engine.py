"""The engine's intervals against single events: as much work, and as uncertain, however long an interval is."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace
from statistics import fmean, pstdev

import pytest

from shoal.sizing.availability import Stock
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
