"""etcd is restored from a backup: the operator knows states that never were, and the process begins anew.

Without `--bump-revision` their versions are still to come, and no object would be news to its caches until versions
have come as far as they were. With it and `--mark-compacted`, as etcd's documentation says, versions go on far ahead,
but each object has that of the backup, which is older than what is known of it.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable

import pytest

from shoal.errors import StoreWentBack
from tests.virtual.loop import played
from tests.virtual.server import ApiServer
from tests.virtual.trainer import Truth
from tests.virtual.world import World

BUMPS = [0, 1_000_000_000]


def backup_of(server: ApiServer) -> Callable[[int], None]:
    """Take a backup; what is returned restores it, with versions that go on so far ahead."""
    objects, version, history = copy.deepcopy(server.objects), server.version, list(server.history)

    def restore(bump: int) -> None:
        server.objects, server.version = copy.deepcopy(objects), version + bump
        server.history, server.compacted = ([], server.version) if bump else (history, 0)
        for watch in list(server.watches):
            watch.lines.put_nowait(None)

    return restore


def assert_began_anew(world: World) -> None:
    """Once, and because of the store."""
    [replica] = world.replicas
    assert replica.starts == 2
    [ended] = world.faults_of_the_operator
    assert isinstance(ended, BaseExceptionGroup)
    assert ended.subgroup(StoreWentBack) is not None
    world.faults_of_the_operator.clear()


@pytest.mark.parametrize("bump", BUMPS)
@played
async def test_operator_obeys_after_a_restore(bump: int) -> None:
    world = World(lambda _uid: Truth(samples=1e12))
    world.nodes(5, 3)
    server = world.server
    async with world.living("a"):
        world.apply()
        await world.until(lambda: world.job().status.workers.ready == 3, what="it trains")
        await world.quiet()
        restore, version = backup_of(server), server.version
        await asyncio.sleep(300)
        assert server.version > 2 * version
        restore(bump)
        await asyncio.sleep(120)
        world.edit(suspend=True)
        await world.until(lambda: world.job().status.phase == "Suspended", what="it is suspended")
        assert_began_anew(world)


@pytest.mark.parametrize("bump", BUMPS)
@played
async def test_job_that_was_suspended_after_the_backup_trains_again(bump: int) -> None:
    """Neither it nor its pods, which are there again, were seen: nothing was sent any more."""
    world = World(lambda _uid: Truth(samples=1e12))
    world.nodes(5, 3)
    async with world.living("a"):
        world.apply()
        await world.until(lambda: world.job().status.workers.ready == 3, what="it trains")
        await world.quiet()
        restore = backup_of(world.server)
        world.edit(suspend=True)
        await world.until(lambda: world.job().status.phase == "Suspended", what="it is suspended")
        await asyncio.sleep(300)
        restore(bump)
        before = len(world.server.sent)
        await asyncio.sleep(600)
        assert world.job().status.phase == "Running"
        told = [each.status for each in world.server.sent[before:] if each.key[0] == "trainingjobs"]
        assert 200 in told
        assert_began_anew(world)
