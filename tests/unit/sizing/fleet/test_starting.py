"""While workers start they have a node and share no server: those that work are as fast as without them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from shoal.sizing.fleet import FleetJob, FleetPool, Watched, plan_fleet
from shoal.sizing.fleet.pace import samples_per_second
from shoal.sizing.fleet.problems import job_problem
from shoal.sizing.speed.model import fitted
from tests.unit.sizing.fleet.test_fleet import PROFILE, STEADY, job

SPEEDS, _ = fitted([PROFILE])
"""Its servers do what eight workers ask for."""
FREE = job_problem(job(pools=("steady",)), [STEADY], {"steady": 16}, SPEEDS).problem


def rate(workers: int) -> float:
    """Samples/s, just as predicted."""
    return samples_per_second(FREE, [workers])


def working(workers: int, starting: int, **changes: Any) -> FleetJob:
    there = {"steady": workers + starting}
    now = Watched({"steady": [rate(workers) / workers] * workers}, 90.0)
    return job(pools=("steady",), running=there, planned=there, now=now, **changes)


@pytest.mark.parametrize(("workers", "starting"), [(8, 0), (8, 4), (8, 8), (4, 12)])
def test_workers_that_do_what_was_predicted_are_not_faster_because_others_start(
    workers: int, starting: int
) -> None:
    """Eight were 67 % faster than predicted while eight others pulled their image."""
    made = job_problem(working(workers, starting), [STEADY], {"steady": 16}, SPEEDS)
    assert made.pace is not None
    assert made.pace.error == pytest.approx(0.0, abs=1e-9)


def test_a_plan_stays_while_its_workers_start_and_the_job_is_in_time() -> None:
    """Minute by minute, with images of eight minutes: 8, 11, 7, 12, 6, 16 and 5 workers, and five minutes late."""
    pool = FleetPool("steady", "P100", limit=16, price_per_hour=1.5, startup_seconds=150)
    left, workers, kept = rate(14) * 3200, 8, dict[str, Any]()
    ready, planned, now = list[int](), list[int](), 0
    while left > 0:
        workers += ready.count(now)
        ready = [at for at in ready if at > now]
        one = working(workers, len(ready), samples_left=left, deadline_seconds=3600.0 - now)
        plan = plan_fleet([pool], [PROFILE], [one], kept=kept).jobs["a"].counts["steady"]
        planned.append(plan)
        ready += [now + 480] * (plan - workers - len(ready))
        if not ready:
            workers = min(workers, plan)
        left -= rate(workers) * 60
        now += 60
    assert now <= 3600
    assert min(planned[:20]) > 8
    assert sum(after > before for before, after in itertools.pairwise(planned)) <= 2
