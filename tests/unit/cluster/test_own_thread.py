"""The Lease is renewed while the main event loop stands still."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from shoal.cluster.lease import Lease, LeaseTimes
from shoal.cluster.own_thread import OwnThread
from shoal.cluster.transport import Answer, Query
from shoal.errors import LeaseLost
from tests.meanwhile import during
from tests.unit.cluster.test_lease import LeaseServer

PATIENCE = 60.0
TIMES = LeaseTimes(duration=60, renew_deadline=50, retry_period=0.1)
"""It must not be lost on a busy machine."""


class CountingServer(LeaseServer):
    """Sets `renewed` at the third write."""

    def __init__(self) -> None:
        super().__init__()
        self.renewed = threading.Event()

    def answer(self, method: str, path: str, query: Query, body: Any) -> Answer:
        if len(self.writes) == 3:
            self.renewed.set()
        return super().answer(method, path, query, body)


async def test_lease_is_renewed_while_the_main_loop_stands_still() -> None:
    server = CountingServer()
    with OwnThread("lease") as aside:
        lease = Lease(server, namespace="n", name="shoal", identity="one", times=TIMES, runs=aside)
        await lease.acquire()
        async with during(lease.keep()):
            await asyncio.sleep(0)
            assert await asyncio.get_running_loop().create_task(stand_still(server.renewed))
            assert lease.held
        await lease.release()
        assert server.lease is not None
        assert server.lease["spec"]["holderIdentity"] == ""


async def stand_still(until: threading.Event) -> bool:
    """Hold the event loop."""
    return until.wait(PATIENCE)


async def test_loss_is_told_in_the_main_loop() -> None:
    server = LeaseServer()
    with OwnThread("lease") as aside:
        lease = Lease(server, namespace="n", name="shoal", identity="one", times=TIMES, runs=aside)
        await lease.acquire()
        assert server.lease is not None
        server.lease["spec"]["holderIdentity"] = "two"
        server.lease["metadata"]["resourceVersion"] = "another"
        with pytest.raises(LeaseLost):
            async with asyncio.timeout(PATIENCE):
                await lease.keep()
        assert not lease.held
