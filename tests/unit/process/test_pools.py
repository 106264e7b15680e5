"""The wiring of `shoal-pools`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from shoal.cluster.clock import loop_time
from shoal.cluster.transport import Answer
from shoal.pools.scaler import FINALIZER
from shoal.process.pools import NodePools, PoolSettings
from tests.meanwhile import during
from tests.unit.controllers.clusters import NOW, Cluster

pytestmark = pytest.mark.looptime

POOLS = "/apis/shoal.dev/v1alpha1/capacitypools"
POOL = {
    "metadata": {"name": "a", "uid": "a", "resourceVersion": "1", "finalizers": [FINALIZER]},
    "spec": {"capacityType": "Spot", "nodeSelector": {"pool": "a"}, "limits": {"nodes": 1}},
}


class BehindTheTruth(Cluster):
    """One pool that is to be let go: each write is a conflict, and its watch, which is behind, says nothing."""

    lists = 0

    def _get(self, path: str, body: Any) -> Answer:
        if path != POOLS:
            return super()._get(path, body)
        self.lists += 1
        return Answer(200, json.dumps({"metadata": {"resourceVersion": "1"}, "items": [POOL]}).encode())

    def _patch(self, path: str, body: Any) -> Answer:
        return Answer(409, b"{}") if path.startswith(POOLS) else super()._patch(path, body)


async def test_a_pool_whose_watch_is_behind_is_listed_again() -> None:
    """Each write was a conflict until the API server ended the watch, 5 to 10 minutes later."""
    cluster = BehindTheTruth()
    pools = NodePools(cluster, PoolSettings(), lease_clock=loop_time, wall=lambda: NOW)
    async with during(pools.run()):
        await asyncio.sleep(60)
    assert cluster.lists > 2  # one of a standby, one behind the Lease
