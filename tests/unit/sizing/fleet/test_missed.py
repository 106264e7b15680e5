"""Jobs that miss a limit: what is planned for them, and what they are told to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.errors import UsageError
from shoal.sizing.fleet import FleetJob, FleetPool, LogMean, Profile, Row, ServerLoad, plan_fleet
from shoal.sizing.fleet.problems import job_problem
from shoal.sizing.plan.planner import exactly, plan
from shoal.sizing.speed.model import SpeedModel, fitted
from tests.unit.sizing.fleet import tight
from tests.unit.sizing.fleet.test_fallback import SPOT as WATCHED
from tests.unit.sizing.fleet.test_fleet import MODEL, PROFILE, SPOT, STEADY, job

ROWS = (
    Row("P100", batch_size=128, workers=4, compute=LogMean.of(0.083, 0.004, 5000)),
    Row("V100-16GB", batch_size=128, workers=4, compute=LogMean.of(0.0805, 0.003, 5000)),
)
IDLE = Profile(MODEL, ROWS[:1], {1: ServerLoad(0.6, 6000)})
KNOWN = Profile(MODEL, ROWS, {1: ServerLoad(60.0, 60000)})
FULL = Profile(MODEL, ROWS[:1], {1: ServerLoad(600.0, 40000)})
"""Its server makes 66 updates a second, which 6 workers do."""
DEAR = FleetPool("dear", "V100-16GB", limit=16, price_per_hour=12.0, startup_seconds=150)


@pytest.mark.parametrize(
    ("pools", "profile"), [((STEADY, DEAR), KNOWN), ((replace(STEADY, limit=32),), FULL)]
)
def test_when_the_deadline_passes_the_price_of_speed_goes_on_to_count(
    pools: tuple[FleetPool, ...], profile: Profile
) -> None:
    """What costs eight times as much for 2 % of speed was bought in the second in which the deadline passed."""
    names = tuple(pool.name for pool in pools)
    late = job(pools=names, max_workers=16, samples_left=2e8, deadline_seconds=60.0)
    before = plan_fleet(pools, [profile], [late]).jobs["a"]
    runs = {name: n for name, n in before.counts.items() if n}
    stays = replace(late, running=runs, planned=runs)
    for left in (60.0, 1.0, -1.0, -3600.0):
        found = plan_fleet(pools, [profile], [replace(stays, deadline_seconds=left)]).jobs["a"]
        assert found.counts == before.counts
    assert "The deadline has passed: raise elasticity.objective.deadlineSeconds" in found.reason
    assert not found.feasible
    assert found.binding == "deadline"


def test_late_job_stays_where_it_is_about_as_good_and_where_there_is_room() -> None:
    """Behind a full server one worker more or less makes no difference, and it went back and forth."""
    half = replace(FULL, server_load={1: ServerLoad(300.0, 40000)})
    late = job(pools=("steady",), max_workers=32, samples_left=2e7, deadline_seconds=60.0)

    def chosen(limit: int, workers: int) -> int:
        there = {"steady": workers} if workers else {}
        on = replace(late, running=there, planned=there)
        return plan_fleet([replace(STEADY, limit=limit)], [half], [on]).jobs["a"].counts["steady"]

    best = chosen(32, chosen(32, 0))
    assert 12 < best < 24
    assert chosen(32, best + 1) == best + 1
    assert chosen(32, best + 4) < best + 4  # which costs more
    assert chosen(best, best + 1) <= best  # which the pool has no more


WORK = {"pools": ("steady",), "min_workers": 1, "samples_left": 8 * 3000 * 128 / 0.083}
"""Of eight workers for 50 minutes."""
HALF: dict[str, object] = {"running": {"steady": 8}, "planned": {"steady": 8}}
FINE = job("fine", **WORK, **HALF)


@pytest.mark.parametrize(
    "late",
    [
        job("a", deadline_seconds=-60.0, **WORK, **HALF),
        job("a", deadline_seconds=-60.0, prefer="MinTime", **WORK, **HALF),
        job("a", deadline_seconds=60.0, **WORK),
        job("a", deadline_seconds=1600.0, **WORK),
    ],
    ids=[
        "passed",
        "passed, and to be fast",
        "for nobody to keep",
        "for all 16 nodes, were they there at once",
    ],
)
def test_a_job_that_is_late_anyway_leaves_the_nodes_of_one_that_is_in_time(late: FleetJob) -> None:
    """It was the most urgent one, took 15 of 16 nodes, and then there were two that missed their deadlines."""
    found = plan_fleet([STEADY], [IDLE], [FINE, late]).jobs
    assert found["fine"].feasible
    assert (found["fine"].counts["steady"], found["a"].counts["steady"]) == (8, 8)


def test_a_job_that_is_late_goes_before_one_without_a_deadline() -> None:
    late = job("z", deadline_seconds=-60.0, **WORK)
    found = plan_fleet([STEADY], [IDLE], [job("a", deadline_seconds=None, **WORK), late]).jobs
    assert found["z"].counts["steady"] > found["a"].counts["steady"] > 0


def test_a_job_whose_servers_make_it_late_anyway_takes_no_node_of_one_that_can_be_in_time() -> None:
    """By its workers alone it had the least slack, went first, and of eight jobs in time one was late."""
    slow = replace(MODEL, fingerprint="slow")
    profiles = [PROFILE, replace(PROFILE, model=slow, server_load={1: ServerLoad(1500.0, 6000)})]
    late = [job(f"a{i}", model=slow, pools=("steady",), deadline_seconds=3600.0 + i) for i in range(2)]
    fine = [
        job(f"{i:02}", pools=("steady",), samples_left=1.7e7, deadline_seconds=3700.0 + i) for i in range(9)
    ]
    found = plan_fleet([replace(STEADY, limit=32)], profiles, [*late, *fine]).jobs
    assert sum(found[each.name].feasible for each in fine) == 8
    assert not any(found[each.name].feasible for each in late)


def test_of_two_jobs_the_one_that_can_be_in_time_is_whatever_the_other_has_to_do() -> None:
    """Minute by minute: the one that was late had 15 of 16 nodes for 80 minutes, and the other one ended after 100."""
    ends, has, kept = {"fine": 3600, "late": 600}, {"fine": 8, "late": 8}, dict[str, Any]()
    left = {"fine": FINE.samples_left or 0.0, "late": 3 * (FINE.samples_left or 0.0)}
    done = dict[str, int]()
    for now in range(0, 6600, 60):
        jobs = [
            replace(FINE, name=name, samples_left=left[name], deadline_seconds=ends[name] - now,
                    running={"steady": n}, planned={"steady": n})
            for name, n in has.items() if name not in done
        ]  # fmt: skip
        found = plan_fleet([STEADY], [IDLE], jobs, kept=kept).jobs
        for name, each in found.items():
            has[name] = each.counts["steady"]
            left[name] -= has[name] * 60 * 128 / 0.083
            if left[name] <= 0:
                done[name] = now + 60
    assert done["fine"] < ends["fine"]
    assert done["late"] <= 6120  # which all its work takes 16 nodes after the other one's


POOLS = st.builds(
    lambda price, out, seconds: [replace(SPOT, exhausted=out, exhausted_seconds=seconds), STEADY, price],
    st.floats(0.5, 12.0).map(lambda price: replace(DEAR, price_per_hour=price)),
    st.booleans(),
    st.floats(0.0, 3600.0),
)


@settings(max_examples=examples(4), deadline=None)
@given(
    POOLS,
    st.sampled_from(["MinCost", "MinTime"]),
    st.none() | st.floats(0.0, 40.0),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
def test_a_second_before_the_deadline_and_a_second_after_it_the_plan_is_the_same(
    pools: list[FleetPool], prefer: str, budget: float | None, there: tuple[int, int]
) -> None:
    running = dict(zip(("spot", "steady"), there, strict=True))
    names = tuple(pool.name for pool in pools)
    before, after = (
        plan_fleet(
            pools,
            [KNOWN],
            [job(pools=names, prefer=prefer, budget_left=budget, running=running, deadline_seconds=left)],
        ).jobs["a"]
        for left in (1.0, -1.0)
    )
    assert before.counts == after.counts
    assert (before.cost, before.feasible, before.binding) == (after.cost, after.feasible, after.binding)


@pytest.mark.parametrize("prefer", ["MinCost", "MinTime"])
@pytest.mark.parametrize("left", [600.0, -1.0])
def test_a_deadline_that_nothing_keeps_does_not_make_the_budget_void(prefer: str, left: float) -> None:
    """16 dear nodes were run for three times the budget, which 16 others keep."""
    late = job(pools=("spot", "dear"), prefer=prefer, deadline_seconds=left, budget_left=6.0)
    found = plan_fleet([SPOT, DEAR], [KNOWN], [late]).jobs["a"]
    assert found.cost is not None
    assert found.cost <= 6.0
    assert not found.feasible
    assert "plan within the budget is" in found.reason
    assert "The very fastest, " in found.reason
    assert "the budget was kept in" in found.reason


def test_what_is_left_to_a_late_job_is_not_said_to_be_used_up() -> None:
    """It was told to raise the limit of 100 nodes, of which it uses 9."""
    pool = replace(STEADY, limit=100)
    late = job(pools=("steady",), max_workers=64, deadline_seconds=600.0)
    found = plan_fleet([pool], [FULL], [late]).jobs["a"]
    assert found.counts["steady"] < 20
    assert "used up" not in found.reason
    full = plan_fleet([replace(pool, limit=4)], [FULL], [late]).jobs["a"]
    assert "raise what is used up: the limit of steady." in full.reason


def test_the_plan_that_runs_is_judged_as_when_it_was_found() -> None:
    """Its pool to fall back on was taken to have no room: it cost less and was less sure than a minute before."""
    runs = {"spot": 16}
    one = replace(tight.JOB, running=runs, planned=runs)
    limits = {"spot": 16, "steady": 16}
    made = job_problem(one, (WATCHED, tight.STEADY), limits, SpeedModel([tight.PROFILE]), promised={})
    found = plan(made.problem)
    same = exactly(made.problem, found.counts)
    assert made.problem.fallback == "steady"
    assert (same.cost, same.kept, same.finish) == (found.cost, found.kept, found.finish)
    assert (same.feasible, same.given, same.searched) == (found.feasible, True, 1)


OUT = replace(SPOT, exhausted=True, exhausted_seconds=300.0)


@pytest.mark.parametrize(
    ("pools", "of", "said"),
    [
        ([OUT], job(pools=("spot",), deadline_seconds=None), "spot ran out of nodes 5 min ago: wait"),
        ([OUT], job(pools=("spot",)), "spot ran out of nodes 5 min ago: wait"),
        ([OUT], job(pools=("spot",), min_workers=4, running={"spot": 2}), "spot ran out of nodes 5 min ago"),
        ([SPOT, replace(STEADY, exhausted=True)], job(on_demand_base=1), "steady ran out of nodes: wait"),
        (
            [replace(SPOT, ending=True)],
            job(pools=("spot",)),
            "is being deleted: no worker begins there. Name another pool",
        ),
    ],
)
def test_pool_that_gives_no_node_is_told_and_not_its_limit(
    pools: list[FleetPool], of: FleetJob, said: str
) -> None:
    """Whoever raised the limit, as it said, had changed nothing."""
    found = plan_fleet(pools, [PROFILE], [of]).jobs["a"]
    assert said in found.reason
    assert "workers.pools" in found.reason
    assert not {"limit", "limits", "onDemandBase"} & set(found.reason.replace(":", "").split())


def test_limit_that_is_none_is_told_to_be_raised_and_nodes_of_others_are_told() -> None:
    none = plan_fleet([replace(SPOT, limit=0)], [PROFILE], [job(pools=("spot",))]).jobs["a"]
    assert "raise the limit" in none.reason
    speeds, _ = fitted([PROFILE])
    with pytest.raises(UsageError, match="jobs leave 1 of the 16 nodes of CapacityPool spot"):
        job_problem(
            job(min_workers=4), [SPOT, replace(STEADY, exhausted=True)], {"spot": 1, "steady": 8}, speeds
        )
