"""When an outage of the API server is over, and when one is assumed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from shoal.cluster.clock import loop_time
from shoal.cluster.lease import Lease, LeaseTimes
from shoal.errors import Unavailable
from shoal.runtime.outage import LEAST_SECONDS, Outage, Watched
from tests.unit.cluster.servers import SmallServer
from tests.unit.cluster.test_lease import LeaseServer

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    seconds = 0.0

    def outage(self) -> Outage:
        return Outage(lambda: self.seconds)


@pytest.mark.parametrize(("lasts", "counts"), [(LEAST_SECONDS - 1, False), (LEAST_SECONDS + 1, True)])
async def test_only_an_outage_that_turns_nodes_unknown_counts(lasts: float, counts: bool) -> None:
    clock, server = Clock(), SmallServer()
    outage = clock.outage()
    watched = Watched(server, outage)
    await watched.request("GET", "/x")
    server.fault = lambda _method, _path: Unavailable("connection refused")
    with pytest.raises(Unavailable):
        await watched.request("GET", "/x")
    clock.seconds = lasts
    with pytest.raises(Unavailable):
        await watched.request("GET", "/x")
    assert outage.returned_seconds is None
    server.fault = lambda _method, _path: None
    await watched.request("GET", "/x")
    clock.seconds += 5
    assert outage.returned_seconds == (5 if counts else None)


async def test_server_that_sheds_load_is_not_away() -> None:
    clock, server = Clock(), SmallServer()
    outage = clock.outage()
    server.fault = lambda _method, _path: Unavailable("429", retry_after=1.0)
    for _ in range(2):
        with pytest.raises(Unavailable):
            await Watched(server, outage).request("GET", "/x")
        clock.seconds += 100
    server.fault = lambda _method, _path: None
    await Watched(server, outage).request("GET", "/x")
    assert outage.returned_seconds is None


@pytest.mark.looptime
@pytest.mark.parametrize("released", [True, False])
async def test_lease_that_nobody_renewed_is_told_apart_from_one_that_was_released(released: bool) -> None:
    server, now = LeaseServer(), NOW
    times = LeaseTimes()
    one = Lease(
        server, namespace="n", name="l", identity="one", times=times, clock=loop_time, wall=lambda: now
    )
    await one.acquire()
    assert one.abandoned_seconds == 0
    if released:
        await one.release()
    later = now + timedelta(seconds=90)
    two = Lease(
        server, namespace="n", name="l", identity="one", times=times, clock=loop_time, wall=lambda: later
    )
    await two.acquire()
    assert two.abandoned_seconds == (0 if released else 90)
