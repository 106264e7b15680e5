"""etcd is restored from a backup without `--bump-revision`: what the operator knows has versions still to come.

No object would be news to its caches then, until versions have come as far as they were: the process begins anew.
"""

from __future__ import annotations

import asyncio
import copy

from shoal.errors import StoreWentBack
from tests.virtual.loop import play
from tests.virtual.trainer import Truth
from tests.virtual.world import World


def test_operator_obeys_after_a_restore() -> None:
    async def story() -> None:
        world = World(lambda _uid: Truth(samples=1e12))
        world.nodes(5, 3)
        server = world.server
        async with world.living():
            replica = world.replica("a")
            world.apply()
            await world.until(lambda: world.job().status.workers.ready == 3, what="it trains")
            await world.quiet()
            backup, version, history = copy.deepcopy(server.objects), server.version, list(server.history)
            await asyncio.sleep(300)
            assert server.version > 2 * version
            server.objects, server.version, server.history = copy.deepcopy(backup), version, history
            for watch in list(server.watches):
                watch.lines.put_nowait(None)
            await asyncio.sleep(120)
            world.edit(suspend=True)
            await world.until(lambda: world.job().status.phase == "Suspended", what="it is suspended")
            assert replica.starts == 2
            [ended] = world.faults_of_the_operator
            assert isinstance(ended, BaseExceptionGroup)
            assert ended.subgroup(StoreWentBack) is not None
            world.faults_of_the_operator.clear()

    play(story)
