"""Jobs that are to be fast share the nodes of a pool: all of them, alike, and as long as nothing is surely better.

Of few jobs by trades, of many by shares.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.sizing.availability import Floats
from shoal.sizing.fleet import FleetJob, FleetPlan, LogMean, Profile, ServerLoad, plan_fleet
from shoal.sizing.fleet.floors import Floors
from shoal.sizing.fleet.problems import job_problem
from shoal.sizing.fleet.shares import Sharer, share
from shoal.sizing.speed.model import fitted
from tests.unit.sizing.fleet.test_fleet import PROFILE, SPOT, STEADY, job

IDLE = replace(PROFILE, server_load={1: ServerLoad(1.0, 6000)})
SPEEDS, _ = fitted([IDLE])


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


@pytest.mark.parametrize(("number", "has", "price"), [(9, 2, 0.0), (9, 0, 1.5), (30, 0, 0.0)])
def test_any_number_of_jobs_leaves_no_node_idle_and_has_as_many_each(
    number: int, has: int, price: float
) -> None:
    """Nine jobs on 36 nodes stayed with the two with which each began, and of thirty new ones most had none."""
    jobs = [running(f"{i:02}", has) if has else fast(f"{i:02}") for i in range(number)]
    found = plan_fleet([replace(STEADY, limit=4 * number, price_per_hour=price)], [IDLE], jobs)
    assert set(counts(found).values()) == {4}
    assert all(each.feasible for each in found.jobs.values())


def test_one_more_job_gets_its_share_of_many_that_run() -> None:
    jobs = [running(f"{i:02}", 4) for i in range(11)]
    shares = counts(plan_fleet([replace(STEADY, limit=44)], [IDLE], [*jobs, fast("new")]))
    assert sum(shares.values()) == 44
    assert 3 <= min(shares.values()) <= max(shares.values()) <= 4


def test_shares_of_many_stay_from_minute_to_minute_whatever_the_watch_says() -> None:
    noise, pools = random.Random(0), [replace(STEADY, limit=50)]
    shares = {f"{i:02}": 5 if i in {3, 7} else 4 for i in range(12)}
    left = {name: 2e8 * noise.uniform(0.5, 1.5) for name in shares}
    for _ in range(4):
        row = replace(IDLE.rows[0], compute=LogMean.of(0.083 * noise.lognormvariate(0, 0.02), 0.004, 500))
        watched = Profile(IDLE.model, (row,), IDLE.server_load)
        jobs = [running(name, n, samples_left=left[name]) for name, n in shares.items()]
        assert counts(plan_fleet(pools, [watched], jobs, kept={})) == shares
        left = {name: left[name] - 1e5 * n * noise.lognormvariate(0, 0.1) for name, n in shares.items()}


def test_of_many_jobs_those_in_time_have_what_they_need_and_each_other_has_a_share() -> None:
    """Those with a deadline go first, in their order; those without one that came last had no node."""
    pools = [replace(STEADY, limit=60)]
    cheap = [job(f"cheap-{i}", pools=("steady",), samples_left=1e7) for i in range(4)]
    bound = [
        fast(f"bound-{i}", samples_left=1.5e7, deadline_seconds=3600.0, prefer="MinCost") for i in range(4)
    ]
    late = [fast(f"late-{i}", deadline_seconds=60.0, prefer="MinCost") for i in range(4)]
    free = [fast(f"free-{i}") for i in range(4)]
    found = plan_fleet(pools, [IDLE], [*cheap, *bound, *late, *free])
    shares = counts(found)
    assert all(each.feasible for name, each in found.jobs.items() if not name.startswith("late"))
    assert sum(shares.values()) == 60
    assert min(shares.values()) >= 2


def test_of_many_jobs_those_of_higher_priority_go_first_and_the_others_share_the_rest() -> None:
    above = [fast(f"above-{i}", priority=1, max_workers=4) for i in range(3)]
    below = [running(f"below-{i}", 4) for i in range(8)]
    shares = counts(plan_fleet([replace(STEADY, limit=32)], [IDLE], [*below, *above]))
    assert [shares[each.name] for each in above] == [4, 4, 4]
    assert sum(shares.values()) == 32
    assert {shares[each.name] for each in below} == {2, 3}


def test_of_many_jobs_a_node_goes_to_those_whom_it_makes_faster() -> None:
    """Behind full servers a worker more makes no job faster."""
    full = replace(PROFILE.model, fingerprint="full")
    slow = Profile(full, PROFILE.rows, {1: ServerLoad(600.0, 20_000)})
    held = [fast(f"held-{i}", model=full) for i in range(5)]
    jobs = [*held, *(fast(f"quick-{i}") for i in range(5))]
    shares = counts(plan_fleet([replace(STEADY, limit=60)], [IDLE, slow], jobs))
    assert sum(shares.values()) == 60
    assert max(shares[each.name] for each in held) < min(
        n for name, n in shares.items() if name.startswith("quick")
    )


def test_of_many_jobs_one_that_has_no_other_pool_gets_a_share_of_it() -> None:
    pools = [replace(STEADY, limit=12), replace(STEADY, name="other", limit=28, price_per_hour=1.6)]
    both = [fast(f"both-{i}", pools=("steady", "other")) for i in range(6)]
    found = plan_fleet(pools, [IDLE], [*both, *(fast(f"one-{i}") for i in range(4))]).jobs
    workers = [sum(each.counts.values()) for each in found.values()]
    assert sum(workers) == 40
    assert min(workers) >= 3


@settings(max_examples=examples(6), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 6), st.integers(1, 3), st.sampled_from([None, 60.0, 7200.0]), st.integers(0, 1)
        ),
        min_size=9,
        max_size=14,
    ),
    st.integers(1, 40),
)
def test_many_jobs_never_get_more_than_there_is(
    given: list[tuple[int, int, float | None, int]], nodes: int
) -> None:
    """However few nodes there are for what runs, and whatever each needs at least."""
    jobs = [
        running(f"{i:02}", has, min_workers=least, least=least, deadline_seconds=deadline, priority=priority)
        for i, (has, least, deadline, priority) in enumerate(given)
    ]
    found = plan_fleet([replace(STEADY, limit=nodes)], [IDLE], jobs)
    assert sum(counts(found).values()) <= nodes
    assert not any(each.fault for each in found.jobs.values())


def test_shares_of_a_hundred_jobs_take_as_long_for_each_as_those_of_ten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = Counter[int]()
    steps = Sharer.steps

    def counted(self: Sharer) -> tuple[Floats, Floats]:
        looks[number] += 1
        return steps(self)

    monkeypatch.setattr(Sharer, "steps", counted)
    for number in (10, 100):
        one = job_problem(
            fast("a"), [replace(STEADY, limit=4 * number)], {"steady": 4 * number}, SPEEDS
        ).problem
        shares = share([Sharer(fast(f"{i:03}"), one, {}) for i in range(number)], {"steady": 4 * number})
        assert {each["steady"] for each in shares.values()} == {4}
    assert looks[100] <= 10 * looks[10]


@pytest.mark.parametrize("jobs", [1, 2, 9])
def test_a_job_of_which_nothing_is_known_gets_the_node_with_which_it_begins(jobs: int) -> None:
    """It waited until one of them ended: its model is known when a worker has reported it."""
    new = fast("new", model=None, min_workers=4, least=1)
    found = plan_fleet(
        [replace(STEADY, limit=4 * jobs)], [IDLE], [*(running(f"{i}", 4) for i in range(jobs)), new]
    )
    shares = counts(found)
    assert shares.pop("new") == 1
    assert sum(shares.values()) == 4 * jobs - 1


def test_jobs_of_which_nothing_is_known_leave_those_that_run_what_they_keep() -> None:
    new = [fast(f"new-{i}", model=None) for i in range(8)]
    shares = counts(plan_fleet([replace(STEADY, limit=4)], [IDLE], [running("a", 4), *new]))
    assert shares.pop("a") == 1
    assert sum(shares.values()) == 3
    above = running("above", 4, priority=1, max_workers=4)
    assert counts(plan_fleet([replace(STEADY, limit=4)], [IDLE], [above, *new]))["above"] == 4


def test_a_cheap_job_among_many_has_no_more_than_it_needs_where_others_are_to_be_fast() -> None:
    """On spot nodes many workers cost it no more than few do."""
    pools = [replace(each, limit=30) for each in (SPOT, STEADY)]
    cheap = [job(f"cheap-{i}", samples_left=2e7, deadline_seconds=2 * 3600.0) for i in range(3)]
    bound = [job(f"bound-{i}", samples_left=2e7, deadline_seconds=5400.0) for i in range(3)]
    late = [fast(f"late-{i}", prefer="MinCost", deadline_seconds=60.0) for i in range(3)]
    free = [fast(f"free-{i}", pools=("spot", "steady")) for i in range(6)]
    found = plan_fleet(pools, [IDLE], [*cheap, *bound, *late, *free]).jobs
    workers = {name: sum(each.counts.values()) for name, each in found.items()}
    assert all(each.feasible for name, each in found.items() if not name.startswith("late"))
    assert sum(workers.values()) == 60
    shares = [n for name, n in workers.items() if name.startswith("free")]
    assert max(shares) - min(shares) <= 1


def test_many_jobs_in_time_keep_what_they_need_when_one_comes_that_is_to_be_fast() -> None:
    """With a few nodes too few for all, it made all ten late: seven were in time without it."""
    has = [5] * 7 + [1, 0, 0]
    jobs = [
        running(f"{i:02}", n, prefer="MinCost", samples_left=1.9e7, deadline_seconds=3600.0 + i)
        for i, n in enumerate(has)
    ]
    pools = [replace(STEADY, limit=36)]
    for number in (0, 1):
        found = plan_fleet(pools, [IDLE], [*jobs, *(fast("fast", max_workers=1) for _ in range(number))])
        assert sum(found.jobs[each.name].feasible for each in jobs) == 7
        assert [counts(found)[each.name] for each in jobs[:7]] == has[:7]


@pytest.mark.parametrize("number", [9, 12])
def test_many_jobs_that_stay_in_one_zone_share_the_nodes_of_both(number: int) -> None:
    """All began in the first zone, and one had all of the other."""
    pools = [replace(STEADY, name=zone, zone=zone, limit=2 * number) for zone in ("a", "b")]
    jobs = [fast(f"{i:02}", pools=("a", "b"), zone_policy="Same") for i in range(number)]
    found = plan_fleet(pools, [IDLE], jobs).jobs
    workers = [sum(each.counts.values()) for each in found.values()]
    assert sum(workers) == 4 * number
    assert min(workers) >= 3
    assert all(min(each.counts.values()) == 0 for each in found.values())


def test_many_running_jobs_keep_their_least_workers_whatever_their_budgets() -> None:
    """Nodes of those whose budget nothing keeps were planned for others, who waited for ever."""
    jobs = [
        running(f"{i:02}", 2, budget_left=0.5 if i % 3 == 1 else None, least=2, min_workers=2)
        for i in range(30)
    ]
    found = plan_fleet([replace(STEADY, limit=60)], [IDLE], jobs)
    assert set(counts(found).values()) == {2}


def test_many_new_jobs_share_nodes_whatever_their_budgets() -> None:
    jobs = [fast(f"{i:02}", budget_left=0.01 if i % 3 == 1 else None) for i in range(12)]
    found = plan_fleet([replace(STEADY, limit=48)], [IDLE], jobs)
    assert min(counts(found).values()) >= 1
    assert sum(counts(found).values()) == 48


def test_the_least_workers_of_a_job_are_not_counted_on_in_nodes_of_which_another_has_its_share() -> None:
    pools = [replace(STEADY, name="one", limit=1), replace(STEADY, name="two", limit=2)]
    both = fast("both", pools=("one", "two"), planned={"one": 1, "two": 1})
    first, third = fast("first", pools=("one",)), fast("third", pools=("two",))
    floors, left = Floors([first, both, third], pools), {"one": 1, "two": 2}
    floors.share(both, {"one": 1})
    floors.share(third, {"two": 2})
    assert floors.room(first, left)["one"] == 0
    assert floors.room(both, left) == {"one": 1, "two": 0}


def test_the_least_workers_of_a_job_are_on_demand_as_far_as_it_needs_such() -> None:
    pools = [replace(SPOT, limit=4), replace(STEADY, limit=1)]
    based = fast(
        "based", pools=("spot", "steady"), planned={"spot": 2, "steady": 1}, on_demand_base=1, least=2
    )
    assert +Counter(Floors([based], pools).kept(based)) == {"spot": 1, "steady": 1}
