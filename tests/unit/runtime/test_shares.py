"""A share for each key in virtual time: whoever holds its places for long keeps nobody else from having theirs."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.shares import Shares
from tests.virtual.loop import now, play

STRANGER = -1


@dataclass(frozen=True)
class Visit:
    """Comes after so many seconds, and stays for some."""

    key: int
    after: int
    seconds: int


def visits(keys: int) -> st.SearchStrategy[list[Visit]]:
    """Of so many keys."""
    each = st.builds(Visit, st.integers(0, keys - 1), st.integers(0, 20), st.integers(1, 60))
    return st.lists(each, max_size=60)


def entered(places: int, all_visits: list[Visit]) -> dict[Visit, list[int]]:
    """How long each waited; there are never more inside than places."""
    waited: dict[Visit, list[int]] = {}
    inside = 0

    async def visit(shares: Shares, each: Visit) -> None:
        nonlocal inside
        await asyncio.sleep(each.after)
        asked = now()
        async with shares.place(each.key):
            inside += 1
            assert inside <= places
            waited.setdefault(each, []).append(round(now() - asked))
            await asyncio.sleep(each.seconds)
            inside -= 1

    async def story() -> None:
        shares = Shares(places)
        async with asyncio.TaskGroup() as tasks:
            for each in all_visits:
                tasks.create_task(visit(shares, each))
        assert shares.open_to(STRANGER)

    play(story)
    return waited


@given(st.integers(1, 4).flatmap(lambda keys: st.tuples(st.just(keys), visits(keys))), st.integers(0, 80))
def test_whatever_others_do_one_who_has_none_has_a_place_at_once(
    others: tuple[int, list[Visit]], after: int
) -> None:
    keys, all_visits = others
    stranger = Visit(STRANGER, after, 1)
    assert entered(2**keys, [*all_visits, stranger])[stranger] == [0]


@given(st.integers(1, 9), visits(6))
def test_everybody_has_a_turn(places: int, all_visits: list[Visit]) -> None:
    waited = entered(places, all_visits)
    assert sum(map(len, waited.values())) == len(all_visits)


@given(st.integers(1, 8), st.integers(1, 40))
def test_one_who_waits_waits_for_one_turn_of_each_at_most(keys: int, after: int) -> None:
    """More namespaces are slow than there are places for, and each has much to do."""
    crowd = [Visit(key, 0, 30) for key in range(keys) for _ in range(10)]
    stranger = Visit(STRANGER, after, 1)
    assert entered(4, [*crowd, stranger])[stranger][0] <= 30 * math.ceil(keys / 4)


@pytest.mark.looptime
async def test_one_alone_has_half_and_in_the_order_in_which_they_came() -> None:
    shares, order, most, inside = Shares(8), [], 0, 0

    async def visit(number: int) -> None:
        nonlocal most, inside
        async with shares.place("a"):
            order.append(number)
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(1.0)
            inside -= 1

    async with asyncio.TaskGroup() as tasks:
        for number in range(20):
            tasks.create_task(visit(number))
    assert (most, order) == (4, list(range(20)))


@pytest.mark.looptime
async def test_namespaces_that_wait_take_turns() -> None:
    shares, done = Shares(2), []

    async def visit(key: str) -> None:
        async with shares.place(key):
            await asyncio.sleep(1.0)
        done.append(key)

    async with asyncio.TaskGroup() as tasks:
        for key in ["many"] * 20 + ["few"] * 2 + ["other"] * 2:
            tasks.create_task(visit(key))
    assert Counter(done[:8]) == {"many": 4, "few": 2, "other": 2}


@pytest.mark.looptime
@pytest.mark.parametrize("given_up_after", [0.5, 1.0])
async def test_one_who_gives_up_leaves_no_place_behind(given_up_after: float) -> None:
    """While it waits, and in the moment in which it has its turn."""
    shares = Shares(2)

    async def visit() -> None:
        async with shares.place("a"):
            await asyncio.sleep(1.0)

    first = asyncio.create_task(visit())
    second = asyncio.create_task(visit())
    asyncio.get_running_loop().call_later(given_up_after, second.cancel)
    await asyncio.wait({first, second})
    assert second.cancelled()
    assert shares.open_to("a")
    async with asyncio.timeout(1.5):
        await visit()
