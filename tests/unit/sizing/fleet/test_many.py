"""Trades of more jobs than trade together: in groups, until none gains, or a plan has tried enough of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shoal.sizing.fleet import (
    FleetJob,
    FleetPool,
    JobPlan,
    LogMean,
    Model,
    Profile,
    Row,
    ServerLoad,
    joint,
    plan_fleet,
)
from shoal.sizing.fleet.traders import MOST_TRADERS
from shoal.sizing.plan.answer import Plan
from shoal.sizing.plan.problem import Problem
from shoal.sizing.plan.together import plan_together
from tests.unit.sizing.fleet.test_fleet import PROFILE, SPOT, STEADY, job

SPEEDS = {"gains": 0.06, "hardly": 0.14}
"""Seconds of a step on an A100, of 0.2 on a T4, by model."""


def profile(name: str) -> Profile:
    rows = (
        Row(device, batch_size=64, workers=4, compute=LogMean.of(seconds, 0.05 * seconds, 2000))
        for device, seconds in (("T4", 0.2), ("A100", SPEEDS[name]))
    )
    return Profile(Model(name, 7.7e9, 25_600_000, 161), tuple(rows), {1: ServerLoad(6.0, 60_000)})


PROFILES = {name: profile(name) for name in SPEEDS}


def cluster(number: int) -> tuple[list[FleetPool], list[FleetJob]]:
    """Jobs that are to be cheap: those that hardly gain by an A100 are more urgent, and there is one for each job."""
    pools = [
        FleetPool("t4", "T4", limit=8 * number, price_per_hour=1.0, startup_seconds=60),
        FleetPool("a100", "A100", limit=number, price_per_hour=1.5, startup_seconds=60),
    ]
    jobs = [
        FleetJob(
            f"{name}-{i}", ("t4", "a100"), model=PROFILES[name].model, samples_left=6e6, batch_size=64, max_workers=16,
            deadline_seconds=deadline + i,
        )
        for i in range(number // 2)
        for name, deadline in (("hardly", 7_000.0), ("gains", 9_000.0))
    ]  # fmt: skip
    return pools, jobs


def of(found: dict[str, JobPlan], model: str) -> int:
    """The A100 that jobs of a model have."""
    return sum(each.counts["a100"] for name, each in found.items() if name.startswith(model))


def next_minute(jobs: Sequence[FleetJob], found: dict[str, JobPlan]) -> list[FleetJob]:
    there = {name: {pool: n for pool, n in each.counts.items() if n} for name, each in found.items()}
    return [replace(each, running=there[each.name], planned=there[each.name]) for each in jobs]


def test_many_jobs_trade_pools_where_all_together_cost_less() -> None:
    """Of more than eight none did: those to which an A100 is worth a third had all, at a third more."""
    pools, jobs = cluster(24)
    found = plan_fleet(pools, list(PROFILES.values()), jobs).jobs
    assert all(each.feasible for each in found.values())
    assert of(found, "gains") >= 8
    after = plan_fleet(pools, list(PROFILES.values()), next_minute(jobs, found)).jobs
    assert of(after, "gains") == 12
    stays = plan_fleet(pools, list(PROFILES.values()), next_minute(jobs, after)).jobs
    assert {name: each.counts for name, each in stays.items()} == {
        name: each.counts for name, each in after.items()
    }


def test_jobs_that_share_no_pool_trade_as_if_the_others_were_not_there() -> None:
    pools, jobs = cluster(8)
    apart = [replace(pool, name=f"{pool.name}-other") for pool in pools]
    others = [
        replace(each, name=f"other-{each.name}", pools=tuple(f"{pool}-other" for pool in each.pools))
        for each in jobs
    ]
    alone = plan_fleet(pools, list(PROFILES.values()), jobs).jobs
    both = plan_fleet([*pools, *apart], list(PROFILES.values()), [*jobs, *others]).jobs
    assert sum(each.cost or 0.0 for each in both.values()) <= 2.1 * sum(
        each.cost or 0.0 for each in alone.values()
    )


def trades(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many jobs each trade has, as it is tried."""
    asked: list[int] = []

    def counted(problems: Sequence[Problem], *more: Any) -> list[Plan | None]:
        asked.append(len(problems))
        return plan_together(problems, *more)

    monkeypatch.setattr(joint, "plan_together", counted)
    return asked


def parts(number: int, of: int) -> tuple[list[FleetPool], list[FleetJob]]:
    """Tenants with pools of their own."""
    pools, jobs = cluster(of)
    return (
        [replace(pool, name=f"{pool.name}-{i}") for i in range(number) for pool in pools],
        [
            replace(each, name=f"{each.name}-{i}", pools=tuple(f"{pool}-{i}" for pool in each.pools))
            for i in range(number)
            for each in jobs
        ],
    )


def test_many_jobs_of_which_nothing_moves_try_no_trade_however_few_share_a_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each few that share a pool traded anew at every plan: 13 times the time, with 37 tenants."""
    pools, jobs = parts(3, 4)
    for _ in range(3):
        asked = trades(monkeypatch)
        found = plan_fleet(pools, list(PROFILES.values()), jobs).jobs
        jobs = next_minute(jobs, found)
    assert all(each.feasible for each in found.values())
    assert asked == []


def test_jobs_that_share_no_pool_try_one_group_each_and_few_more_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each part tried as many as a plan may."""
    asked = trades(monkeypatch)
    pools, jobs = parts(3, 10)
    plan_fleet(pools, list(PROFILES.values()), jobs)
    assert 3 <= len(asked) <= 3 + joint.MOST_GROUPS - 1


def test_a_plan_tries_no_more_groups_than_it_has_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = trades(monkeypatch)
    monkeypatch.setattr(joint, "MOST_GROUPS", 2)
    pools, jobs = cluster(30)
    plan_fleet(pools, list(PROFILES.values()), jobs)
    assert len(asked) == 2
    assert max(asked) <= MOST_TRADERS


def test_each_of_many_jobs_that_others_make_late_gets_what_it_needs() -> None:
    """The first four did, at every plan; a plan tries no more groups once one and one job alone found nothing."""
    pools = [replace(SPOT, limit=36), replace(STEADY, limit=96)]
    flexible = [job(f"a{i}", deadline_seconds=3500.0) for i in range(6)]
    bound = [job(f"b{i}", pools=("spot",), deadline_seconds=3600.0) for i in range(6)]
    jobs = [*flexible, *bound]
    for _ in range(3):
        found = plan_fleet(pools, [PROFILE], jobs).jobs
        jobs = next_minute(jobs, found)
    assert {name: each.feasible for name, each in found.items() if not each.feasible} == {}
    assert sum(each.counts["spot"] for each in found.values()) <= 36


def test_a_job_that_is_late_anyway_keeps_no_other_from_trading() -> None:
    pools, jobs = cluster(24)
    late = replace(jobs[0], name="late", deadline_seconds=60.0, max_workers=4)
    found = plan_fleet(pools, list(PROFILES.values()), [*jobs, late]).jobs
    assert [name for name, each in found.items() if not each.feasible] == ["late"]
    assert of(found, "gains") >= 8


@pytest.mark.parametrize("number", [6, 24])
@pytest.mark.parametrize(
    "hopeless",
    [
        {"deadline_seconds": None, "budget_left": -1.0},
        {"deadline_seconds": 9_500.0, "samples_left": 4 * 64 / 0.14 * 9_450},
        {"deadline_seconds": 60.0, "pools": ("other",)},
        {"deadline_seconds": None, "pools": ("a100",), "min_workers": 23, "least": 23, "max_workers": 23},
    ],
    ids=[
        "its budget is spent",
        "in time by its speed alone",
        "in a pool of its own",
        "larger than what is there",
    ],
)
def test_a_job_that_no_trade_helps_keeps_no_other_from_trading_for_money(
    hopeless: dict[str, Any], number: int
) -> None:
    """One that was over its budget cost all other tenants a third more, for as long as it existed."""
    pools, jobs = cluster(number)
    other = FleetPool("other", "T4", limit=4, price_per_hour=1.0, startup_seconds=60)
    late = replace(jobs[0], name="late", **({"max_workers": 4} | hopeless))
    found = plan_fleet([*pools, other], list(PROFILES.values()), [*jobs, late]).jobs
    assert [name for name, each in found.items() if not each.feasible] == ["late"]
    assert of(found, "gains") >= number // 3


@pytest.mark.parametrize("budget", [-1.0, 0.5])
def test_many_jobs_over_their_budgets_keep_no_other_from_trading_for_money(budget: float) -> None:
    """More of them than a group has: one tenant made that of five small jobs."""
    pools, jobs = cluster(24)
    late = [
        replace(jobs[0], name=f"late-{i}", max_workers=4, deadline_seconds=None, budget_left=budget)
        for i in range(5)
    ]
    found = plan_fleet(pools, list(PROFILES.values()), [*jobs, *late]).jobs
    assert [name for name, each in found.items() if not each.feasible] == [each.name for each in late]
    assert of(found, "gains") >= 8


def test_jobs_that_stay_late_cost_no_more_trades_than_a_plan_has_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sixteen groups were tried in each minute, and found nothing: a plan took ten times as long."""
    asked: list[int] = []

    def counted(problems: Sequence[Problem], *more: Any) -> list[Plan | None]:
        asked.append(len(problems))
        return plan_together(problems, *more)

    monkeypatch.setattr(joint, "plan_together", counted)
    pools = [replace(STEADY, limit=40)]
    jobs = [
        job(f"{i:02}", pools=("steady",), samples_left=2.4e7, deadline_seconds=3600.0 + i) for i in range(16)
    ]
    found = plan_fleet(pools, [PROFILE], jobs).jobs
    assert sum(not each.feasible for each in found.values()) > MOST_TRADERS
    assert 0 < len(asked) <= joint.MOST_GROUPS


@pytest.mark.parametrize("number", [8, 10])
def test_jobs_in_time_keep_their_nodes_from_minute_to_minute_where_they_are_too_few_for_all(
    number: int,
) -> None:
    """Who waited had less slack than who trained, and took its nodes: all swapped, and fewer were in time."""
    pools = [replace(STEADY, limit=20)]
    jobs = [
        job(f"{i:02}", pools=("steady",), samples_left=1.9e7, deadline_seconds=3600.0 + i)
        for i in range(number)
    ]
    found = plan_fleet(pools, [PROFILE], jobs).jobs
    in_time = {name: each.counts for name, each in found.items() if each.feasible}
    assert 2 <= len(in_time) < number
    for _ in range(3):
        jobs = [
            replace(
                each,
                samples_left=(each.samples_left or 0.0) - 60 * (found[each.name].samples_per_second or 0.0),
                deadline_seconds=(each.deadline_seconds or 0.0) - 60,
            )
            for each in next_minute(jobs, found)
        ]
        found = plan_fleet(pools, [PROFILE], jobs).jobs
        assert {name: each.counts for name, each in found.items() if name in in_time} == in_time
        assert all(found[name].feasible for name in in_time)


@pytest.mark.parametrize(("small", "large", "nodes", "samples"), [(8, 2, 7, 2.7e7), (10, 1, 9, 3.4e7)])
def test_who_is_in_time_takes_no_node_from_another_that_is(
    small: int, large: int, nodes: int, samples: float
) -> None:
    """The first in the order took what others held, only to end sooner, and in the next minute they took it back."""
    few = {"samples_left": 7e6, "running": {"steady": 2}}
    many = {"samples_left": samples, "running": {"steady": nodes}}
    jobs = [
        job(f"{number:02}", pools=("steady",), prefer="MinTime", **each)
        for number, each in enumerate([few] * small + [many] * large)
    ]
    room = sum(each.running["steady"] for each in jobs)
    found = plan_fleet([replace(STEADY, limit=room)], [PROFILE], jobs).jobs
    assert [found[each.name].counts for each in jobs] == [each.running for each in jobs]
    assert all(each.feasible for each in found.values())
