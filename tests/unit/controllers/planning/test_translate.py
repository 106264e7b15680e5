"""How long a plan has been wished for, by a clock that somebody may set."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.api.elasticity import Stabilization
from shoal.controllers.planning.translate import wished
from shoal.policy.decide.lasting import lasting

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WAIT = Stabilization(up=30, down=300)


@pytest.mark.parametrize("later", [{"a": 8}, {"a": 9}])
def test_a_clock_that_was_ahead_for_one_plan_holds_no_change_when_it_is_right_again(
    later: Mapping[str, int],
) -> None:
    """It was six hours ahead for one plan, and the change waited for six hours."""
    old: Any = None
    for ahead, counts in ((timedelta(0), {"a": 4}), (timedelta(hours=6), {"a": 8}), (timedelta(0), later)):
        since, before = wished(counts, NOW + ahead, old, WAIT)
        old = SimpleNamespace(pools=counts, since=since, before=before)
    now = NOW + timedelta(seconds=WAIT.up + 1)
    since, before = wished(later, now, old, WAIT)
    wishes = [*((wish.since, wish.pools) for wish in before), (since, later)]
    assert max(start for start, _ in wishes) <= NOW
    assert lasting({"a": 4}, wishes, lambda start: now - start < timedelta(seconds=WAIT.up)) == later
