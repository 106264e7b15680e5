"""Choices that are kept from one plan to the next: the same as without, for the same input."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.sizing.fleet import (
    FleetJob,
    FleetPool,
    JobPlan,
    LogMean,
    Profile,
    Row,
    ServerLoad,
    Watched,
    alone,
    plan_fleet,
)
from shoal.sizing.fleet.kept import Kept
from tests.unit.sizing.fleet.test_fleet import MODEL, job

NEW = replace(MODEL, fingerprint="new")
SPOT = FleetPool(
    "spot", "P100", spot=True, limit=40, price_per_hour=0.5, interruptions_per_hour=0.1, node_hours=500.0,
    interruptions_seen=50, watched_seconds=9e5,
)  # fmt: skip
STEADY = FleetPool("steady", "P100", limit=40, price_per_hour=1.5, startup_seconds=150)
FAST = FleetPool("fast", "V100", spot=True, limit=6, price_per_hour=1.4)
POOLS = [SPOT, STEADY, FAST]
PROFILES = [
    Profile(
        MODEL,
        (Row("P100", batch_size=128, workers=4, compute=LogMean.of(0.083, 0.004, 500)),),
        {1: ServerLoad(6.0, 6000)},
    )
]
SPEED = 1542.0


def running(name: str = "a", **changes: object) -> FleetJob:
    values = {"running": {"spot": 6}, "planned": {"spot": 6}, "deadline_seconds": 3600.0, **changes}
    return job(name, **values)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was chosen anew."""
    found, really = list[str](), alone._choice

    def choice(asked: Any) -> Any:
        found.append("chosen")
        return really(asked)

    monkeypatch.setattr(alone, "_choice", choice)
    return found


def jobs() -> st.SearchStrategy[FleetJob]:
    some = st.integers(0, 8)
    there = st.builds(lambda spot, steady: {"spot": spot, "steady": steady}, some, some)
    return st.builds(
        lambda work, hours, budget, now, model, priority, prefer: running(
            samples_left=work, deadline_seconds=hours and 3600 * hours, budget_left=budget, running=now,
            planned=now, model=model, priority=priority, pools=("spot", "steady", "fast"), prefer=prefer,
        ),
        st.floats(1e6, 5e7), st.none() | st.floats(0.5, 6), st.none() | st.floats(2, 50), there,
        st.sampled_from([MODEL, NEW]), st.integers(0, 1), st.sampled_from(["MinCost", "MinTime"]),
    )  # fmt: skip


@settings(max_examples=examples(8), deadline=None)
@given(st.lists(jobs(), min_size=1, max_size=3))
def test_the_same_fleet_has_the_same_plans_with_and_without_kept_choices(fleet: list[FleetJob]) -> None:
    named = [replace(each, name=f"job-{n}") for n, each in enumerate(fleet)]
    kept: Kept = {}
    without = plan_fleet(POOLS, PROFILES, named)
    for _ in range(2):
        assert plan_fleet(POOLS, PROFILES, named, kept=kept) == without
    assert {name for name, plan in without.jobs.items() if plan.feasible} <= kept.keys()


def after(one: FleetJob, seconds: float, pace: float = 1.0) -> FleetJob:
    """What is left when its workers have worked for so long, at a pace of what was expected."""
    assert one.samples_left is not None
    assert one.deadline_seconds is not None
    done = pace * SPEED * sum(one.running.values()) * seconds
    return replace(
        one, samples_left=one.samples_left - done, deadline_seconds=one.deadline_seconds - seconds,
        now=Watched({name: [pace * SPEED] * n for name, n in one.running.items()}, 80.0),
    )  # fmt: skip


@settings(max_examples=examples(8), deadline=None)
@given(
    st.floats(0.7, 1.3),
    st.lists(st.tuples(st.floats(0, 200), st.floats(0.9, 1.1)), min_size=1, max_size=4),
)
def test_what_is_kept_is_what_would_be_chosen_a_little_earlier(
    slack: float, minutes: list[tuple[float, float]]
) -> None:
    """Each choice is either the one that is found anew, or that of an input from which this one hardly differs."""
    now = running(deadline_seconds=3600.0 * slack, now=Watched({"spot": [SPEED] * 6}, 80.0))
    kept, begun = Kept(), now
    for seconds, pace in [(0.0, 1.0), *minutes]:
        now = after(now, seconds, pace)
        before = kept.get("a")
        found = plan_fleet(POOLS, PROFILES, [now], kept=kept).jobs["a"]
        anew = plan_fleet(POOLS, PROFILES, [now]).jobs["a"]
        if before is None or "a" not in kept or kept["a"][0] is not before[0]:  # chosen anew
            begun = now
            assert found == anew
            continue
        assert begun.samples_left
        assert now.samples_left
        assert now.samples_left >= 0.95 * begun.samples_left
        assert found.counts == plan_fleet(POOLS, PROFILES, [begun]).jobs["a"].counts
        assert found.feasible
        if found.counts == anew.counts:
            assert found.finish_seconds == pytest.approx(anew.finish_seconds, rel=0.03)
            assert found.cost == pytest.approx(anew.cost, rel=0.03)


def test_a_job_that_does_what_was_expected_is_chosen_for_once_in_a_while(counted: list[str]) -> None:
    now, kept = (
        running(samples_left=4e7, deadline_seconds=7200.0, now=Watched({"spot": [SPEED] * 6}, 80.0)),
        Kept(),
    )
    first = plan_fleet(POOLS, PROFILES, [now], kept=kept).jobs["a"]
    assert first.finish_seconds is not None
    for minute in range(1, 4):
        found = plan_fleet(POOLS, PROFILES, [after(now, 60.0 * minute)], kept=kept).jobs["a"]
        assert found.counts == first.counts
        assert found.finish_seconds == pytest.approx(first.finish_seconds - 60 * minute, rel=0.01)
    assert len(counted) == 1
    plan_fleet(POOLS, PROFILES, [after(now, 600.0)], kept=kept)
    assert len(counted) == 2


CHANGES: dict[str, Callable[[FleetJob], tuple[list[FleetPool], FleetJob]]] = {
    "a price": lambda one: ([replace(SPOT, price_per_hour=0.51), STEADY, FAST], one),
    "a pool that is out of stock": lambda one: ([replace(SPOT, exhausted=True), STEADY, FAST], one),
    "many interruptions": lambda one: ([replace(SPOT, interruptions_seen=80), STEADY, FAST], one),
    "hardly more than is used": lambda one: ([replace(SPOT, limit=9), STEADY, FAST], one),
    "a worker that went": lambda one: (POOLS, replace(one, running={"spot": 5})),
    "a plan that is carried out": lambda one: (POOLS, replace(one, planned={"spot": 7})),
    "an earlier deadline": lambda one: (POOLS, replace(one, deadline_seconds=5400.0)),
    "no deadline": lambda one: (POOLS, replace(one, deadline_seconds=None)),
    "a budget": lambda one: (POOLS, replace(one, budget_left=100.0)),
    "more workers": lambda one: (POOLS, replace(one, max_workers=18)),
    "another objective": lambda one: (POOLS, replace(one, prefer="MinTime")),
    "another batch": lambda one: (POOLS, replace(one, batch_size=64)),
    "work that is to be done again": lambda one: (POOLS, replace(one, samples_left=4.2e7)),
    "a pool more": lambda one: (POOLS, replace(one, pools=("spot", "steady", "fast"))),
    "a node that it waits for": lambda one: (POOLS, replace(one, asked={"steady": 0.0})),
    "another server": lambda one: (POOLS, replace(one, parameter_servers=2)),
    "a dearer server": lambda one: (POOLS, replace(one, server_price=0.3)),
    "servers elsewhere": lambda one: (POOLS, replace(one, servers_zone="b")),
    "another confidence": lambda one: (POOLS, replace(one, confidence=0.8)),
    "another model": lambda one: (POOLS, replace(one, model=NEW)),
    "a reserve of on-demand nodes that went": lambda one: ([SPOT, replace(STEADY, limit=1), FAST], one),
    "slower workers": lambda one: (POOLS, replace(one, now=Watched({"spot": [0.8 * SPEED] * 6}, 80.0))),
}


@pytest.mark.by_day(6)
@pytest.mark.parametrize("what", CHANGES)
def test_a_choice_is_made_anew_where_something_changed(what: str, counted: list[str]) -> None:
    one, kept = (
        running(samples_left=4e7, deadline_seconds=7200.0, now=Watched({"spot": [SPEED] * 6}, 80.0)),
        Kept(),
    )
    plan_fleet(POOLS, PROFILES, [one], kept=kept)
    assert len(counted) == 1
    pools, changed = CHANGES[what](one)
    found = plan_fleet(pools, PROFILES, [changed], kept=kept)
    assert len(counted) == 2
    assert found == plan_fleet(pools, PROFILES, [changed])


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    "pools",
    [
        [replace(SPOT, limit=80), STEADY],
        [replace(SPOT, limit=30), STEADY],
        [SPOT, replace(STEADY, limit=20)],
        [replace(SPOT, node_hours=520.0, interruptions_seen=52, watched_seconds=9.1e5), STEADY],
    ],
    ids=["more than it may have", "enough", "less of what it does not use", "a little longer watched"],
)
def test_a_choice_is_kept_where_a_change_does_not_concern_it(
    pools: list[FleetPool], counted: list[str]
) -> None:
    now, kept = Watched({"spot": [SPEED] * 6}, 80.0), Kept()
    one = running(samples_left=4e7, deadline_seconds=7200.0, now=now)
    before = plan_fleet(POOLS, PROFILES, [one], kept=kept).jobs["a"]
    found = plan_fleet(pools, PROFILES, [one], kept=kept).jobs["a"]
    assert len(counted) == 1
    anew = plan_fleet(pools, PROFILES, [one]).jobs["a"]
    assert before.counts == found.counts == anew.counts


def test_a_pool_in_which_there_is_room_again_is_looked_at(counted: list[str]) -> None:
    now, kept = Watched({"steady": [SPEED] * 6}, 80.0), Kept()
    one = running(
        samples_left=4e7, deadline_seconds=7200.0, running={"steady": 6}, planned={"steady": 6}, now=now
    )
    dear = plan_fleet([replace(SPOT, limit=1), STEADY], PROFILES, [one], kept=kept).jobs["a"]
    cheap = plan_fleet([replace(SPOT, limit=8), STEADY], PROFILES, [one], kept=kept).jobs["a"]
    assert len(counted) == 2
    assert cheap.counts["spot"] > dear.counts["spot"]


def test_what_cannot_be_in_time_is_looked_at_every_time(counted: list[str]) -> None:
    late, kept = running(deadline_seconds=300.0), Kept()
    for _ in range(2):
        assert not plan_fleet(POOLS, PROFILES, [late], kept=kept).jobs["a"].feasible
    assert len(counted) == 2
    assert not kept


def test_jobs_that_are_gone_are_forgotten() -> None:
    kept = Kept()
    plan_fleet(POOLS, PROFILES, [running("a"), running("b")], kept=kept)
    assert kept.keys() == {"a", "b"}
    plan_fleet(POOLS, PROFILES, [running("b")], kept=kept)
    assert kept.keys() == {"b"}


def test_a_pool_that_became_faster_than_others_is_looked_at(counted: list[str]) -> None:
    def profiles(seconds: float) -> list[Profile]:
        row = Row("V100", batch_size=128, workers=4, compute=LogMean.of(seconds, 0.002, 500))
        return [replace(PROFILES[0], rows=(*PROFILES[0].rows, row))]

    kept, one = Kept(), running(samples_left=4e7, deadline_seconds=7200.0, pools=("spot", "fast"))
    plan_fleet(POOLS, profiles(0.05), [one], kept=kept)
    plan_fleet(POOLS, profiles(0.0497), [one], kept=kept)
    assert len(counted) == 1
    plan_fleet(POOLS, profiles(0.047), [one], kept=kept)
    assert len(counted) == 2


def test_worker_is_given_up_only_where_the_next_watch_will_not_ask_for_it_again() -> None:
    """With 2 % of noise in each minute's speed a plan went from 9 workers to 8 and back six times in two hours."""

    def chosen(deadline: float, workers: int, slower: float = 1.0) -> JobPlan:
        row = Row("P100", batch_size=128, workers=4, compute=LogMean.of(slower * 0.083, 0.004, 500))
        profile = Profile(MODEL, (row,), {1: ServerLoad(60.0, 6000)})
        now = {"steady": workers}
        one = job(pools=("steady",), running=now, planned=now, deadline_seconds=deadline)
        return plan_fleet([STEADY], [profile], [one]).jobs["a"]

    stays = chosen(2350.0, 8)
    assert stays.counts == {"steady": 8}
    assert re.search(
        r"7 workers from steady, would keep the limits in 9[56]\.\d% of the simulated", stays.reason
    )
    assert "to give a worker up needs 97.5%" in stays.reason
    assert chosen(2350.0, 7).counts == {"steady": 7}
    assert chosen(2350.0, 7, slower=1.02).counts == {"steady": 8}  # the promise goes before the rest
    assert chosen(2500.0, 8).counts == {"steady": 7}
