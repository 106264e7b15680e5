"""Trades of jobs that others cannot end: by waiting for a node, by being over a budget, or by taking long to plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.errors import Interrupted
from shoal.sizing.fleet import FleetJob, JobPlan, LogMean, Profile, Row, ServerLoad, plan_fleet
from tests.unit.sizing.fleet.test_fleet import MODEL, PROFILE, STEADY, job

IDLE = replace(PROFILE, server_load={1: ServerLoad(0.6, 6000)})
"""Its servers never limit."""
HOUR = 128 / 0.083 * 3300
"""Samples of one worker in an hour in which it starts."""
A, B, OTHER = (replace(STEADY, name=name, limit=limit) for name, limit in (("a", 8), ("b", 8), ("other", 60)))


def one(name: str, pool: str, workers: float, running: int = 0, **changes: Any) -> FleetJob:
    """A job that needs so many workers of a pool for its deadline."""
    there = {pool: running} if running else {}
    values: dict[str, Any] = {
        "pools": (pool,),
        "max_workers": 8,
        "running": there,
        "planned": there,
        "created": "2026-11-02",
    }
    return job(name, samples_left=workers * HOUR, **(values | changes))


def planned(jobs: list[FleetJob], others: int, pools: tuple[str, ...] = ("other",)) -> dict[str, JobPlan]:
    fill = [one(f"f{i}", "other", 2, 3, max_workers=4, pools=pools) for i in range(others)]
    return plan_fleet([A, B, OTHER], [IDLE], [*jobs, *fill]).jobs


@pytest.mark.parametrize("others", [0, 8])
@pytest.mark.parametrize(
    "waits",
    [
        {},
        {"deadline_seconds": None},
        {"deadline_seconds": None, "prefer": "MinTime"},
        {"priority": -1, "pools": ("a", "b")},
        {"priority": -1, "pools": ("a", "b"), "min_workers": 4, "least": 4},
    ],
    ids=["urgent", "cheap", "fast", "of both pools and lower priority", "that needs several nodes"],
)
def test_a_job_that_waits_for_a_node_ends_no_trade_of_others(waits: dict[str, Any], others: int) -> None:
    """One in a full pool had all others keep what they had; a cheap one made who filled the pool late by its trade."""
    jobs = [
        one("holder", "a", 7.3, 8, created="2026-10-01"),
        one("rich", "b", 2, 8, created="2026-10-01"),
        one("waits", "a", 7, created="2026-11-01", **waits),
        one("good", "b", 3.9),
    ]
    found = planned(jobs, others)
    assert [name for name, each in found.items() if not each.feasible] == ["waits"]
    assert found["holder"].counts == {"a": 8}


@pytest.mark.parametrize("others", [3, 8])
def test_a_late_job_gives_nothing_to_one_of_lower_priority(others: int) -> None:
    """It gave five of eight nodes, and took nearly three times as long, where a third job waited in another pool."""
    found = planned(
        [
            one("high", "a", 40, 8, priority=1, created="2026-10-01", deadline_seconds=3600.0),
            one("first", "b", 7.3, 8, priority=2, created="2026-10-01", pools=("a", "b")),
            one("low", "a", 3.9, priority=0),
            one("waits", "b", 7, priority=1),
        ],
        others,
        pools=("other", "a"),
    )
    assert found["high"].counts["a"] == 8
    assert not found["low"].feasible


@pytest.mark.parametrize("others", [0, 7])
def test_a_job_over_its_budget_gives_what_another_needs_for_its_deadline(others: int) -> None:
    """Beside more than six others it kept all nodes for good, though it was in time with three."""
    over = one("over", "a", 22, 8, deadline_seconds=40_000.0, budget_left=-1.0)
    found = planned([over, one("good", "a", 3.9)], others)
    assert found["good"].feasible
    assert 3 <= found["over"].counts["a"] <= 4


def test_a_plan_of_many_jobs_over_their_budgets_is_interrupted_between_any_two_of_them() -> None:
    """Each was planned once more to see whether a trade helps it: two seconds that nobody could end."""
    asked: list[int] = []

    def between() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise Interrupted

    jobs = [one(f"{i}", "a", 2, 1, deadline_seconds=None, budget_left=0.5) for i in range(9)]
    with pytest.raises(Interrupted):
        plan_fleet([A], [IDLE], jobs, between=between)


def test_the_slack_of_a_job_whose_servers_limit_steps_counts_on_larger_batches() -> None:
    """The fastest workers alone make the smallest batches: it was called late, and left others what it needed."""
    slow = replace(MODEL, fingerprint="slow")
    rows = (("P100", 32, 0.02), ("V100", 256, 0.2))
    profile = Profile(
        slow,
        tuple(
            Row(kind, batch_size=size, workers=1, compute=LogMean.of(at, 0.004, 5000))
            for kind, size, at in rows
        ),
        {1: ServerLoad(1500.0, 60_000)},
    )
    pools = [replace(A, limit=16), replace(B, accelerator="V100", limit=16)]
    sizes: dict[str, Any] = {
        "pools": ("a", "b"),
        "max_workers": 16,
        "batch_size": 32,
        "batch_sizes": {"V100": 256},
    }
    limited = job("limited", model=slow, samples_left=256 * 33 * 3000.0, created="2026-11-01", **sizes)
    fast = one("fast", "b", 200, 16, prefer="MinTime", max_workers=16, deadline_seconds=200_000.0)
    fill = [one(f"f{i}", "other", 2, 3, pools=("other", "b"), max_workers=4) for i in range(8)]
    found = plan_fleet([*pools, OTHER], [IDLE, profile], [limited, fast, *fill]).jobs
    assert [name for name, each in found.items() if not each.feasible] == []
