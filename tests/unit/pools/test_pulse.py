"""Whether the operator runs is seen in its Lease, in virtual time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from shoal.cluster.transport import Answer
from shoal.errors import Unavailable
from shoal.pools.pulse import EVERY_SECONDS, SILENT_SECONDS, Pulse


class Server:
    def __init__(self) -> None:
        self.renewed, self.version, self.holder = True, 0, "operator-0"
        self.reachable = True

    async def request(self, _method: str, _path: str, **_: Any) -> Answer:
        if not self.reachable:
            raise Unavailable("no route")
        self.version += self.renewed
        lease = {"metadata": {"resourceVersion": str(self.version)}, "spec": {"holderIdentity": self.holder}}
        return Answer(200, json.dumps(lease).encode())


@pytest.mark.looptime
async def test_operator_is_alive_while_its_lease_is_seen_to_change() -> None:
    server = Server()
    returns: list[float] = []
    now = asyncio.get_running_loop().time
    pulse = Pulse(server, "shoal-system", "shoal", on_return=lambda: returns.append(now()))  # type: ignore[arg-type]
    assert not pulse.alive()
    task = asyncio.create_task(pulse.run())
    await asyncio.sleep(1)
    assert not pulse.alive(), "one look shows no change"
    await asyncio.sleep(EVERY_SECONDS)
    assert pulse.alive()
    server.renewed = False
    await asyncio.sleep(SILENT_SECONDS)
    assert not pulse.alive()
    server.renewed = True
    await asyncio.sleep(EVERY_SECONDS)
    assert pulse.alive()
    server.reachable = False
    await asyncio.sleep(SILENT_SECONDS)
    assert not pulse.alive()
    server.reachable = True
    await asyncio.sleep(EVERY_SECONDS)
    server.holder = ""
    await asyncio.sleep(EVERY_SECONDS)
    assert len(returns) == 3, "pools are looked at again at each return"
    assert not pulse.alive(), "it was stopped on purpose"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
