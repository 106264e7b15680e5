"""What a profile says of its own use."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.api.base import Condition
from shoal.api.speed_profile import SpeedProfile
from shoal.runtime.status_writer import StatusWriter
from tests.unit.controllers.planning.world import DESCRIBED, World

MINE = ("team", "mine")


async def test_rows_of_the_spec_that_no_plan_uses_are_told_with_what_is_wrong() -> None:
    """They were dropped without a word, and the plan made from data sheets."""
    world, row = World(), {"accelerator": "T4", "batchSize": 128, "stepSeconds": "0.2"}
    changes = (
        {},
        {"spread": "0.3"},
        {"lastSeen": "24.11.2026"},
        {"stepSeconds": "2e8"},
        {"accelerator": "RTX9999"},
        {"accelerator": "cpu"},
    )

    async def told(*rows: dict[str, Any]) -> Condition | None:
        world.add_profile("mine", spec={"rows": list(rows)})
        await world.learner(MINE)
        profile = world.profile("mine")
        assert profile.status.observed_generation == profile.metadata.generation
        return next(iter(profile.status.conditions), None)

    assert await told(row) is None
    found = await told(*(row | change for change in changes))
    assert found is not None
    assert (found.type, found.status, found.reason) == ("Ready", "False", "RowsLeftOut")
    assert "spec.rows[0]" not in found.message
    for words in (
        "spec.rows[1]: ",
        "spec.rows[2]: lastSeen must be a time such as 2026-11-24T12:00:00Z, not '24.11.2026'",
        "spec.rows[3]: ",
        "spec.rows[4]: RTX9999 is none of the known accelerators, A100-40GB",
        "spec.rows[5]: it does not say on how many CPU cores: add cores",
    ):
        assert words in found.message
    writes = len(world.cluster.requests)
    await world.learner(MINE)
    assert len(world.cluster.requests) == writes
    corrected = await told(row)
    assert corrected is not None
    assert (corrected.status, corrected.reason) == ("True", "Valid")


async def test_a_profile_that_is_one_too_many_says_so() -> None:
    world = World()
    world.add_profile("mine")
    world.learner.judged({MINE: "its namespace has 9 rows"})
    await world.learner(MINE)
    (told,) = world.profile("mine").status.conditions
    words = "plans leave this profile out, since its namespace has 9 rows: correct it, or delete it"
    assert (told.status, told.message) == ("False", words)


@pytest.mark.parametrize("anew", [False, True])
async def test_a_profile_is_left_out_until_it_is_corrected_though_nothing_is_planned(*, anew: bool) -> None:
    """Without a job nobody judges it: neither is it in order because the operator has begun `anew`."""
    world = World()
    world.add_profile("mine")

    async def told(world: World) -> tuple[str, str, int]:
        await world.learner(MINE)
        profile = world.profile("mine")
        (found,) = profile.status.conditions
        return found.status, found.reason, found.observed_generation

    world.learner.judged({MINE: "a fault"})
    assert await told(world) == ("False", "LeftOut", 1)
    if anew:
        after = World()
        after.cluster, after.learner._transport = world.cluster, world.cluster
        after.learner._writer = StatusWriter(world.cluster, after.state.profiles, SpeedProfile)
        after.add_profile("mine")
        world = after
    assert await told(world) == ("False", "LeftOut", 1)
    world.add_profile("mine", spec={"model": DESCRIBED})
    assert await told(world) == ("True", "Valid", 2)
