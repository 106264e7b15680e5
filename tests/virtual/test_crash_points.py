"""Every crash point and every stale view: the end of each scripted job is always the same.

The patterns are those of Sieve (OSDI 2022). `make test` plays a slice; with SHOAL_NIGHTLY=1, all of them.
"""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

import pytest

from dev.night import of_tonight
from tests.virtual.script import (
    KINDS,
    Life,
    Told,
    Trouble,
    eventful_life,
    pooled_life,
    queued_life,
    tell_script,
)


class Script(NamedTuple):
    """A life, with at least as many writes and events as it has: the first test compares."""

    life: Life
    writes: int
    events: int

    def told(self, **trouble: int | bool | str) -> Told:
        """Played with this trouble."""
        return tell_script(Trouble(**trouble), self.life)  # type: ignore[arg-type]


EVENTFUL, QUEUED = Script(eventful_life, 60, 109), Script(queued_life, 104, 188)
POOLED = Script(pooled_life, 83, 127)
SCRIPTS = {"eventful": EVENTFUL, "queued": QUEUED, "pooled": POOLED}
SLICE = 1 if os.environ.get("SHOAL_NIGHTLY") else 60
MORE_PASTS = of_tonight(range(2, 120, 4)) if SLICE == 1 else ()
"""A few of them each night."""
PASTS = (1, 4, 10, 30, 100, *MORE_PASTS)


@cache
def undisturbed(script: Script) -> Told:
    return script.told()


def assert_same_end(told: Told, script: Script) -> None:
    """As without trouble; an interruption may be missed by who saw old nodes, and is counted once at most."""
    assert told.digest == undisturbed(script).digest, told.tell
    assert told.interruptions <= undisturbed(script).interruptions


def each_write(first: int = 0) -> pytest.MarkDecorator:
    """Parametrize with the scripts and the numbers of their writes."""
    numbers = [
        pytest.param(script, write, id=f"{name}-{write}")
        for name, script in SCRIPTS.items()
        for write in range(first, script.writes, SLICE)
    ]
    return pytest.mark.parametrize(("script", "write"), numbers)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_script_is_no_longer_than_what_is_disturbed_and_plays_the_same_twice(script: Script) -> None:
    told = undisturbed(script)
    assert told.writes <= script.writes
    assert told.events <= script.events
    assert script.told().digest == told.digest


@pytest.mark.by_day(2)
@each_write()
@pytest.mark.parametrize(("after", "other"), [(False, False), (True, True)], ids=["before", "after"])
def test_killed_at_a_write_the_end_is_the_same(script: Script, write: int, after: bool, other: bool) -> None:
    told = script.told(write=write, after=after, other=other)
    assert_same_end(told, script)


@pytest.mark.by_day(2)
@each_write(2)
def test_pod_that_nobody_recorded_is_not_made_again(script: Script, write: int) -> None:
    """The operator is killed after a write, and what it made vanishes: `watch_slots` sees each name once."""
    told = script.told(write=write, after=True, vanish=True, other=write % 2 == 1)
    assert_same_end(told, script)


def test_suspension_ends_though_the_operator_is_killed_while_it_gives_services_and_budget_back() -> None:
    words = ("DELETE /api/v1/namespaces/team/services", "DELETE /apis/policy/")
    given_back = [n for n, sent in enumerate(undisturbed(EVENTFUL).sent) if sent.startswith(words)]
    assert len(given_back) == 4, "of the suspension, and of the end"
    for write in given_back[
        :: 1 if SLICE == 1 else 3
    ]:  # by day the first of the suspension, and the last of the end
        assert EVENTFUL.told(write=write).digest == undisturbed(EVENTFUL).digest


@pytest.mark.by_day(2)
@pytest.mark.parametrize("turn", range(len(PASTS) if SLICE == 1 else 1))
@each_write(3)
def test_leader_that_sees_an_old_cluster_first_changes_nothing_in_the_end(
    script: Script, write: int, turn: int
) -> None:
    """As it was so many versions ago: one number for each write, and at night all of them."""
    past = PASTS[(write // SLICE + turn) % len(PASTS)]
    told = script.told(write=write, after=True, past=past, other=write % 2 == 1)
    assert_same_end(told, script)


@pytest.mark.by_day(3)
@pytest.mark.parametrize("kind", KINDS)
@each_write(4)
def test_leader_that_sees_one_kind_of_objects_as_it_was_changes_nothing_in_the_end(
    script: Script, write: int, kind: str
) -> None:
    """Each kind has a cache of its own in an API server, and may be behind the others: one number for each pair."""
    past = PASTS[(write // SLICE + KINDS.index(kind)) % len(PASTS)]
    told = script.told(write=write, after=True, past=past, kind=kind, other=write % 2 == 1)
    assert_same_end(told, script)


@pytest.mark.parametrize(("write", "past"), [(56, 60), (86, 70), (82, 105)])
def test_leader_that_sees_a_cluster_of_half_a_minute_ago_makes_no_pod_again(write: int, past: int) -> None:
    """It asks before the first one whether the job is still as it was listed."""
    told = QUEUED.told(write=write, after=True, past=past)
    assert_same_end(told, QUEUED)


def test_clients_of_a_server_are_not_sent_back_by_a_leader_that_sees_old_pods() -> None:
    """It asks before whether the later one is gone."""
    service = next(n for n, sent in enumerate(undisturbed(POOLED).sent) if sent.startswith("PATCH"))
    assert_same_end(POOLED.told(write=service, after=True, past=2, kind="pods"), POOLED)


@pytest.mark.parametrize(("write", "past"), [(90, 100), (88, 114)])
def test_worker_that_was_given_up_before_another_was_recorded_counts_for_nothing(
    write: int, past: int
) -> None:
    """The watch of pods is behind that of jobs: it ends there, or runs, and the job's record has its successor."""
    told = QUEUED.told(write=write, after=True, past=past)
    assert_same_end(told, QUEUED)


def test_leader_that_sees_the_quota_of_before_a_preemption_makes_no_pod() -> None:
    """It asks before the first one whether the Workload still is as it was listed."""
    told = QUEUED.told(write=78, after=True, past=10, kind="workloads")
    assert_same_end(told, QUEUED)


def test_leader_that_made_a_budget_again_gives_it_back() -> None:
    """It read a list from before the end, which had already given the budget back."""
    told = EVENTFUL.told(write=undisturbed(EVENTFUL).writes - 1, after=True, past=100)
    assert_same_end(told, EVENTFUL)


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("script", "past"),
    [
        pytest.param(script, past, id=f"{name}-{past}")
        for name, script in SCRIPTS.items()
        for past in range(2, 190, SLICE)
    ],
)
def test_leader_that_sees_the_ended_job_as_it_was_makes_no_pod_again(script: Script, past: int) -> None:
    """Objects that are made before the pods tell it that others have made some. It then waits for news."""
    told = script.told(write=undisturbed(script).writes - 2, after=True, past=past)
    assert_same_end(told, script)
    assert told.writes < undisturbed(script).writes + 40


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("script", "event"),
    [
        pytest.param(script, event, id=f"{name}-{event}")
        for name, script in SCRIPTS.items()
        for event in range(0, script.events, SLICE)
    ],
)
def test_withheld_watch_event_changes_nothing_in_the_end(script: Script, event: int) -> None:
    told = script.told(event=event)
    assert_same_end(told, script)
