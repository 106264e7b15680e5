"""Every crash point and every stale view: the end of the scripted job is always the same.

The patterns are those of Sieve (OSDI 2022). `make test` plays a slice; with SHOAL_NIGHTLY=1, all of them.
"""

from __future__ import annotations

import os
from functools import cache

import pytest

from tests.virtual.script import Told, Trouble, tell_script

WRITES = 63
EVENTS = 110
"""At least as many as the script has: the first test compares."""
SLICE = 1 if os.environ.get("SHOAL_NIGHTLY") else 15
PASTS = (1, 4, 10, 30, 100)


@cache
def undisturbed() -> Told:
    return tell_script(Trouble())


def test_script_is_no_longer_than_what_is_disturbed_and_plays_the_same_twice() -> None:
    told = undisturbed()
    assert told.writes <= WRITES
    assert told.events <= EVENTS
    assert tell_script(Trouble()).digest == told.digest


@pytest.mark.parametrize("write", range(0, WRITES, SLICE))
@pytest.mark.parametrize(("after", "other"), [(False, False), (True, True)], ids=["before", "after"])
def test_killed_at_a_write_the_end_is_the_same(write: int, after: bool, other: bool) -> None:
    told = tell_script(Trouble(write=write, after=after, other=other))
    assert told.digest == undisturbed().digest, told.tell


@pytest.mark.parametrize("write", range(2, WRITES, SLICE))
def test_pod_that_nobody_recorded_is_not_made_again(write: int) -> None:
    """The operator is killed after a write, and what it made vanishes: `watch_slots` sees each name once."""
    told = tell_script(Trouble(write=write, after=True, vanish=True, other=write % 2 == 1))
    assert told.digest == undisturbed().digest, told.tell


@pytest.mark.parametrize("write", [43, 44])
def test_suspension_ends_though_the_operator_is_killed_while_it_gives_services_and_budget_back(
    write: int,
) -> None:
    assert tell_script(Trouble(write=write)).digest == undisturbed().digest


@pytest.mark.parametrize("write", range(3, WRITES, SLICE))
def test_leader_that_sees_an_old_cluster_first_changes_nothing_in_the_end(write: int) -> None:
    past = PASTS[write // SLICE % len(PASTS)]
    told = tell_script(Trouble(write=write, after=True, past=past, other=write % 2 == 1))
    assert told.digest == undisturbed().digest, told.tell


def test_leader_that_made_a_budget_again_gives_it_back() -> None:
    """It read a list from before the end, which had already given the budget back."""
    told = tell_script(Trouble(write=60, after=True, past=100))
    assert told.digest == undisturbed().digest, told.tell


@pytest.mark.parametrize("event", range(0, EVENTS, SLICE))
def test_withheld_watch_event_changes_nothing_in_the_end(event: int) -> None:
    told = tell_script(Trouble(event=event))
    assert told.digest == undisturbed().digest, told.tell
