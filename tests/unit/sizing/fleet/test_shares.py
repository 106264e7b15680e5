"""Jobs that are to be fast share the nodes of a pool: all of them, alike, and as long as nothing is surely better."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.sizing.fleet import FleetJob, FleetPlan, LogMean, Profile, ServerLoad, plan_fleet
from tests.unit.sizing.fleet.test_fleet import PROFILE, SPOT, STEADY, job

IDLE = replace(PROFILE, server_load={1: ServerLoad(1.0, 6000)})


def fast(name: str, **changes: object) -> FleetJob:
    given = {"pools": ("steady",), "prefer": "MinTime", "deadline_seconds": None, "min_workers": 1}
    return job(name, **(given | changes))


def running(name: str, workers: int, **changes: object) -> FleetJob:
    return fast(name, running={"steady": workers}, planned={"steady": workers}, **changes)


def counts(found: FleetPlan, pool: str = "steady") -> dict[str, int]:
    return {name: each.counts[pool] for name, each in found.jobs.items()}


def test_jobs_that_prefer_time_share_all_nodes_and_are_told_so() -> None:
    """Each was given the cheapest size, one worker, and told that this was the fastest plan."""
    found = plan_fleet([replace(STEADY, limit=8)], [IDLE], [fast("a"), fast("b")])
    assert counts(found) == {"a": 4, "b": 4}
    assert "This is the fastest plan, in the nodes that other jobs leave." in found.jobs["a"].reason
    alone = plan_fleet([replace(STEADY, limit=8)], [IDLE], [fast("a")]).jobs["a"]
    assert "This is the fastest plan." in alone.reason


def test_job_that_comes_gets_half_of_the_nodes_of_one_that_runs() -> None:
    assert counts(plan_fleet([replace(STEADY, limit=8)], [IDLE], [running("a", 8), fast("b")])) == {
        "a": 4,
        "b": 4,
    }


@settings(max_examples=examples(4), deadline=None)
@given(st.integers(2, 4), st.integers(5, 20), st.integers(2, 8))
def test_equal_jobs_get_as_many_nodes_as_each_other_and_leave_none(jobs: int, nodes: int, most: int) -> None:
    equal = [fast("abcd"[number], max_workers=most) for number in range(jobs)]
    shares = counts(plan_fleet([replace(STEADY, limit=nodes)], [IDLE], equal)).values()
    assert sum(shares) == min(nodes, jobs * most)
    assert max(shares) - min(shares) <= 1


def test_higher_priority_has_all_nodes_but_those_without_which_another_cannot_run() -> None:
    found = plan_fleet([replace(STEADY, limit=8)], [IDLE], [fast("a"), fast("b", priority=1, max_workers=8)])
    assert counts(found) == {"a": 1, "b": 7}
    found = plan_fleet([replace(STEADY, limit=12)], [IDLE], [fast("a"), fast("b", priority=1, max_workers=8)])
    assert counts(found) == {"a": 4, "b": 8}


def test_deadline_of_one_is_kept_before_another_is_fast() -> None:
    cheap = job("a", deadline_seconds=3600.0, pools=("steady",), prefer="MinCost")
    found = plan_fleet([replace(STEADY, limit=8)], [IDLE], [cheap, fast("b")])
    assert found.jobs["a"].feasible
    assert sum(counts(found).values()) == 8


def test_job_that_is_cheaper_with_many_nodes_does_not_throttle_one_that_is_to_be_fast() -> None:
    """With a dear server six workers are cheapest by a little: the other one had what these left."""
    cheap = fast("a", prefer="MinCost", server_price=3.0)
    found = counts(plan_fleet([replace(STEADY, limit=8)], [IDLE], [fast("b"), cheap]))
    assert found["b"] >= 3
    assert sum(found.values()) == 8


def test_jobs_share_two_pools_of_which_either_alone_would_take_all() -> None:
    pools = [replace(SPOT, limit=40), replace(STEADY, limit=40)]
    both = [fast(name, pools=("spot", "steady"), max_workers=64) for name in "ab"]
    found = plan_fleet(pools, [IDLE], both).jobs.values()
    assert sum(sum(each.counts.values()) for each in found) == 80
    fewest, most = sorted(each.finish_seconds or 0.0 for each in found)
    assert most <= 1.1 * fewest


def test_eight_jobs_share_three_pools() -> None:
    """Four of them had no node."""
    pools = [
        replace(SPOT, limit=40),
        replace(STEADY, limit=40),
        replace(STEADY, name="other", limit=20, price_per_hour=1.0),
    ]
    jobs = [fast(name, pools=("spot", "steady", "other"), max_workers=32) for name in "abcdefgh"]
    found = plan_fleet(pools, [IDLE], jobs).jobs.values()
    assert sum(sum(each.counts.values()) for each in found) == 100
    seconds = [each.finish_seconds or 0.0 for each in found]
    assert max(seconds) <= 1.2 * min(seconds)


@pytest.mark.parametrize(("has", "then"), [((7, 1), (4, 4)), ((1, 7), (4, 4)), ((4, 4), (4, 4))])
def test_nodes_that_run_unequally_are_shared_anew(has: tuple[int, int], then: tuple[int, int]) -> None:
    """However much more work one of them has: what it costs weighs nothing here."""
    jobs = [running("a", has[0], samples_left=2e8), running("b", has[1])]
    assert tuple(counts(plan_fleet([replace(STEADY, limit=8)], [IDLE], jobs)).values()) == then


def test_shares_stay_from_minute_to_minute_whatever_the_watch_says() -> None:
    """Of nine nodes one job has five: which, is chance, and stays."""
    noise, pools, shares = random.Random(0), [replace(STEADY, limit=9)], {"a": 5, "b": 4}
    left = {"a": 2e8, "b": 1.9e8}
    for _ in range(6):
        row = replace(IDLE.rows[0], compute=LogMean.of(0.083 * noise.lognormvariate(0, 0.02), 0.004, 500))
        watched = Profile(IDLE.model, (row,), IDLE.server_load)
        jobs = [running(name, n, samples_left=left[name]) for name, n in shares.items()]
        found = plan_fleet(pools, [watched], jobs, kept={})
        assert counts(found) == shares
        left = {name: left[name] - 1e5 * n * noise.lognormvariate(0, 0.1) for name, n in shares.items()}


@pytest.mark.parametrize("deadline", [None, 90_000.0])
def test_job_on_nodes_that_cost_nothing_gets_all_that_make_it_faster(deadline: float | None) -> None:
    """It stayed for ten hours with the two with which it began: no plan was cheaper in any run."""
    free, cheap = (
        replace(STEADY, name="own", price_per_hour=0.0),
        {"prefer": "MinCost", "pools": ("own", "steady")},
    )
    runs = {"running": {"own": 2}, "planned": {"own": 2}, "samples_left": 1e8, "deadline_seconds": deadline}
    for pools in ([free], [free, STEADY]):
        found = plan_fleet(pools, [IDLE], [fast("a", **cheap, **runs)]).jobs["a"]
        assert found.counts == {"own": 16, "steady": 0} if len(pools) == 2 else {"own": 16}
        assert found.cost == 0.0


@pytest.mark.parametrize("has", [(2, 2), (4, 4), (0, 8), (7, 1)])
def test_jobs_share_nodes_that_cost_nothing_as_those_that_are_to_be_fast(has: tuple[int, int]) -> None:
    """The first had seven of them, and the other one what it keeps in any case."""
    free = replace(STEADY, limit=8, price_per_hour=0.0)
    jobs = [running(name, n, prefer="MinCost") for name, n in zip("ab", has, strict=True)]
    assert counts(plan_fleet([free], [IDLE], jobs)) == {"a": 4, "b": 4}
