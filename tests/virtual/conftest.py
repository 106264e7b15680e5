"""What the operator plans in virtual time it would plan without what it remembers of earlier plans."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from dev.night import again
from shoal.controllers.trainingjob import reconcile
from shoal.policy.facts import sightings
from shoal.policy.facts.sightings import Memory
from shoal.policy.model import Observation, Plan
from shoal.policy.plan import plan


@pytest.fixture(autouse=True)
def plans_without_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make plans twice. Jobs are small here, and remembered all the same."""
    monkeypatch.setattr(sightings, "FEWEST_REMEMBERED", 1)
    different: list[tuple[Plan, Plan]] = []
    number = count()

    def twice(seen: Observation, memory: Memory) -> Plan:
        remembered = plan(seen, memory)
        if again(next(number)) and remembered != (fresh := plan(seen)):
            different.append((remembered, fresh))
        return remembered

    monkeypatch.setattr(reconcile, "plan", twice)
    yield
    assert not different, different[0]
