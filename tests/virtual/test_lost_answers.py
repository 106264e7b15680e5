"""Answers that are late or lost while a job is made: what was made is found, and stays."""

from __future__ import annotations

import asyncio

import pytest

from shoal.errors import Unavailable
from tests.virtual.loop import played
from tests.virtual.server import Client, Faults
from tests.virtual.trainer import Truth
from tests.virtual.world import World


class Lost(Faults):
    """The first answers about the job's Secret and its server are lost, the latter after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._left = {"digits-shoal", "digits-ps-0-0"}

    async def after(self, client: Client, verb: str, key: str) -> None:
        name = client.server.sent[-1].key[2] if client.server.sent else ""
        if (
            verb != "POST"
            or (about := next((each for each in self._left if name.startswith(each)), None)) is None
        ):
            return
        self._left.remove(about)
        await asyncio.sleep(self._seconds if "-ps-" in about else 0.0)
        raise Unavailable("connection reset after the request was done")


@pytest.mark.parametrize("refused", [False, True], ids=["as before", "no more pods"])
@pytest.mark.parametrize("seconds", [0.1, 3.0])
@played
async def test_a_server_stays_whose_answer_was_lost(seconds: float, refused: bool) -> None:
    """The next one was recorded, as if another leader had made it, and it was deleted at work: the only one, where no
    more pods may be made, as in a namespace that is being deleted."""
    world = World(lambda _: Truth(samples=1e9), faults=Lost(seconds))
    world.nodes(5, 3)
    world.server.lag = lambda watch, _change: 10.0 if watch.plural == "pods" else 0.0
    async with world.living("a"):
        await asyncio.sleep(5)
        world.apply()
        if refused:
            await asyncio.sleep(0.04)
            world.server.admit = lambda key, _new, old: "no more" if key[0] == "pods" and old is None else ""
        await asyncio.sleep(100)
        assert not [each for each in world.server.sent if (each.verb, each.key[0]) == ("DELETE", "pods")]
        assert world.server.get("pods", "digits-ps-0-0", "team") is not None
