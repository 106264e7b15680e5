"""What runs while a test looks on: its end is the test's, too."""

from __future__ import annotations

import asyncio

import pytest

from shoal.errors import LeaseLost
from tests.meanwhile import during, losing_the_lease


async def dies(error: Exception) -> None:
    raise error


async def test_work_that_died_fails_the_test() -> None:
    with pytest.raises(ValueError, match="died"):
        async with during(dies(ValueError("died"))):
            await asyncio.sleep(0)


async def test_what_the_test_found_is_told_with_what_the_work_raised() -> None:
    with pytest.raises(AssertionError, match="no pod") as raised:
        async with during(dies(ValueError("died")), asyncio.Event().wait()):
            await asyncio.sleep(0)
            raise AssertionError("no pod")
    assert raised.value.__notes__ == ["meanwhile: ValueError('died')"]


async def test_a_lost_lease_ends_an_operator_and_nothing_else_does() -> None:
    with losing_the_lease():
        async with during(dies(ExceptionGroup("", [LeaseLost("lost")]))):
            await asyncio.sleep(0)
    with pytest.raises(ExceptionGroup), losing_the_lease():
        async with during(dies(ExceptionGroup("", [ValueError("died")]))):
            await asyncio.sleep(0)
