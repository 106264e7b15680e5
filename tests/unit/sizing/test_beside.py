"""What a job does beside its steps, by its formula and step by step."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from shoal.api.speed_profile import BesideSteps, SpeedProfileStatus
from shoal.sizing.beside import Beside
from shoal.sizing.fleet import FleetJob, plan_fleet
from shoal.sizing.fleet.problems import work_of
from shoal.sizing.fleet.resources import beside_of
from shoal.sizing.plan.planner import plan
from shoal.sizing.plan.problem import Objective, Pool, Problem
from shoal.sizing.plan.work import StepWork
from tests.unit.sizing.fleet.test_fleet import PROFILE, STEADY, job

EPOCHS, PER_EPOCH, RATE, TASK = 5, 12_000.0, 100.0, 30.0
TICK = 0.01


def seconds(workers: int, *, waits: bool) -> float:
    """A job of workers of 100 samples/s, one of which has a task of 30 s after each epoch, played in small steps."""
    now, done, task, ended = 0.0, 0.0, 0.0, 0
    while ended < EPOCHS or task > 0:
        over = ended == EPOCHS
        busy = workers if task > 0 and (waits or over) else int(task > 0)
        done += (workers - busy) * RATE * TICK
        task = max(task - TICK, 0.0)
        if done >= (ended + 1) * PER_EPOCH and not over:
            ended, task = ended + 1, TASK
        now += TICK
    return now


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_formula_is_what_happens_step_by_step(workers: int, waits: bool) -> None:
    beside = Beside(PER_EPOCH, TASK * RATE, TASK * RATE if waits else 0.0)
    total = EPOCHS * PER_EPOCH
    predicted = (total + beside.samples(total, workers)) / (workers * RATE)
    assert predicted == pytest.approx(seconds(workers, waits=waits), rel=0.01)


def test_tasks_of_epochs_that_ended_and_are_not_done_count() -> None:
    beside = Beside(100.0, 7.0)
    assert beside.samples(200.0, 1) == 14.0
    assert replace(beside, behind=1).samples(200.0, 1) == 21.0
    assert list(beside.samples(np.array([1.0, 100.0, 101.0]), np.array([1.0, 1.0, 1.0]))) == [7.0, 7.0, 14.0]


@pytest.mark.parametrize("workers", [1, 4, 16])
@pytest.mark.parametrize("waits", [0.0, 1800.0 * RATE])
def test_at_the_last_evaluation_no_other_one_is_to_come(workers: int, waits: float) -> None:
    """For a job that was about to end, two were planned: nodes were bought for it, or it was said to be late."""
    beside = Beside(50_000.0, 1800.0 * RATE, waits, behind=1, sigma=0.1, seen=10.0)
    for left in ({"samples_left": 0.0}, {"steps_left": 0.0}, {"samples_left": 0.0, "steps_left": 100.0}):
        work = work_of(FleetJob("a", (), beside=beside, batch_size=128, **left))
        assert isinstance(work, StepWork)
        steps = work.iterations(np.array([128.0]), np.array([float(workers)]))
        assert steps == pytest.approx(workers * 1800.0 * RATE / 128, rel=0.01)
        assert 0 < work.spread(np.array([float(workers)])) < 0.2


def test_a_job_at_its_last_evaluation_buys_no_nodes_and_is_in_time() -> None:
    """It had one of 30 min and a deadline of 40 min, and was planned 19 workers, or not to be in time."""
    speed = 128 / 0.083
    for waits in (0.0, 1800 * speed):
        beside = Beside(50_000.0, 1800 * speed, waits, behind=1, sigma=0.1, seen=10.0)
        there = {"steady": 4}
        last = job(pools=("steady",), samples_left=0.0, beside=beside, running=there, planned=there,
                   max_workers=64, deadline_seconds=2400.0)  # fmt: skip
        found = plan_fleet([replace(STEADY, limit=64)], [PROFILE], [last]).jobs["a"]
        assert found.feasible
        assert found.counts["steady"] <= 4
        assert found.finish_seconds == pytest.approx(1800, rel=0.02)


def test_a_plan_counts_them_in_its_time_cost_and_confidence() -> None:
    pool = Pool("own", 4, 3.6, 1.0, 100, spot=False, step_sigma=0.02)
    work = StepWork(samples=60_000.0)
    beside = Beside(12_000.0, 3000.0, 3000.0)
    objective = Objective(deadline=500.0)
    plain = plan(Problem([pool], work, objective=objective, min_workers=2, max_workers=2))
    longer = plan(
        Problem([pool], replace(work, beside=beside), objective=objective, min_workers=2, max_workers=2)
    )
    assert longer.seconds == pytest.approx(plain.seconds + 150.0, rel=0.01)
    assert longer.cost == pytest.approx(plain.cost * longer.seconds / plain.seconds, rel=0.01)
    assert (plain.chance, longer.chance) == (1.0, pytest.approx(1.0))
    tight = replace(objective, deadline=440.0)
    assert plan(Problem([pool], work, objective=tight, min_workers=2, max_workers=2)).feasible
    assert not plan(
        Problem([pool], replace(work, beside=beside), objective=tight, min_workers=2, max_workers=2)
    ).feasible
    assert beside.share_of_steps(2) == pytest.approx(60_000 / 90_000)


def test_steps_are_counted_like_samples() -> None:
    beside = Beside(1000.0, 500.0)
    by_samples = StepWork(samples=4000.0, beside=beside).iterations(np.array([10.0]), np.array([1.0]))
    by_steps = StepWork(steps=400, beside=beside).iterations(np.array([10.0]), np.array([1.0]))
    assert by_samples == by_steps == 600.0


def test_a_profile_tells_it_by_epoch() -> None:
    measured = BesideSteps(epochs="4", others="8", task_samples="1200", wait_samples="400")
    status = SpeedProfileStatus(beside=measured)
    assert beside_of(status, 1000) == Beside(1000, 300.0, 50.0, sigma=pytest.approx(0.2), seen=4.0)
    assert beside_of(status, None) is None
    assert beside_of(SpeedProfileStatus(), 1000) is None
    broken = SpeedProfileStatus(beside=BesideSteps(epochs="many"))
    assert beside_of(broken, 1000) is None


def test_its_part_of_the_uncertainty_is_its_share_of_the_work_and_falls_with_epochs() -> None:
    """Of one worker that spends half of its time beside steps, whose epochs differ by 20 %."""
    few = Beside(1000, 1000.0, sigma=0.2, seen=4.0)
    assert few.spread(4000.0, 1) == pytest.approx(0.5 * 0.2 * math.sqrt(1 / 4 + 1 / 4), rel=0.01)
    assert few.spread(64_000.0, 1) < few.spread(4000.0, 1)
    assert replace(few, seen=100.0).spread(4000.0, 1) < few.spread(4000.0, 1)
    assert Beside(1000, 1000.0).spread(4000.0, 1) == 0.0


def test_a_chance_counts_how_much_epochs_differ() -> None:
    """A deadline 5 % after what is likely: met for certain where all epochs are alike, and often where they differ."""
    pool = Pool("own", 1, 3.6, 1.0, 100, spot=False, step_sigma=0.02)

    def chance(sigma: float) -> float:
        work = StepWork(samples=4000.0, beside=Beside(1000.0, 1000.0, sigma=sigma, seen=4.0))
        problem = Problem([pool], work, objective=Objective(deadline=84.0), min_workers=1, max_workers=1)
        found = plan(problem).chance
        assert found is not None
        return found

    assert chance(0.0) > 0.97
    assert 0.5 < chance(0.5) < 0.7
