"""A leader that loses its Lease in the midst of its work sends nothing more, and the other one ends the work."""

from __future__ import annotations

import pytest

from tests.virtual.judge import Judge
from tests.virtual.loop import play
from tests.virtual.server import Change, Json
from tests.virtual.trainer import Truth
from tests.virtual.world import Replica, World

HUNG_SECONDS = 40.0


@pytest.mark.parametrize("work", ["pods", "services", "poddisruptionbudgets"])
def test_leader_that_hung_longer_than_its_lease_sends_nothing_when_it_wakes(work: str) -> None:
    """It is stopped by SIGSTOP when it has sent a write, and hears the answer when another one leads."""

    async def story() -> None:
        world = World(lambda _uid: Truth(samples=1e9))
        world.nodes(spot=4, safe=2)
        judge = Judge(world, None)
        world.watchers.append(judge.look)
        hung: list[Replica] = []

        def hang(change: Change, _old: Json | None) -> None:
            if change.key[0] == work and not hung and (leaders := [r for r in world.replicas if r.leads]):
                hung.append(leaders[0])
                leaders[0].hang(HUNG_SECONDS)

        async with world.living("a", "b"):
            await world.until(lambda: any(each.leads for each in world.replicas))
            world.server.on_change.append(hang)
            world.apply()
            await world.until(lambda: world.job().status.workers.ready == 3)
            await world.until(lambda: world.leases_lost == 1, what="the Lease is lost")
            await world.quiet()
            assert world.job().status.workers.ready == 3
            assert [each.leads for each in world.replicas if each is not hung[0]] == [True]
        assert not judge.broken, judge.broken

    play(story)
