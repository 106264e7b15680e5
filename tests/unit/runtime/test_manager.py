"""What a new leader does before it decides anything, and what a process does when it stops; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime

import pytest

from shoal.api.events import Event
from shoal.api.kube import Pod
from shoal.cluster.cache import Cache
from shoal.cluster.clock import loop_time
from shoal.cluster.lease import Lease
from shoal.cluster.reflector import Reflector, Source
from shoal.cluster.transport import Answer
from shoal.errors import Unavailable
from shoal.runtime.controller import Controller, Key
from shoal.runtime.manager import OPTIONAL_SECONDS, SILENT_SECONDS, Manager
from shoal.runtime.metrics import Metrics
from shoal.runtime.recorder import Recorder
from tests.meanwhile import during
from tests.unit.cluster.servers import SmallServer
from tests.unit.cluster.test_lease import TIMES, LeaseServer, candidate
from tests.unit.policy import build

pytestmark = pytest.mark.looptime


class Replica:
    """A manager of one controller that notes what its caches held at each reconcile."""

    def __init__(self, leases: LeaseServer, pods: SmallServer, nodes: SmallServer, name: str) -> None:
        self.decided: list[tuple[set[str], set[str]]] = []
        self.caches: list[Cache[Pod]] = [Cache(lambda _old, _new, _ours: None) for _ in range(2)]
        self.metrics = Metrics()
        self.recorder = Recorder(pods, reporter=name, wall=lambda: datetime(2026, 1, 1, tzinfo=UTC))
        reflectors = [
            Reflector(server, Source("/x", Pod), cache)
            for server, cache in zip((pods, nodes), self.caches, strict=True)
        ]
        self.nodes = reflectors[1]
        self.controller = Controller(
            "test", self._reconcile, keys=lambda: [("ns", "job")], metrics=self.metrics
        )
        self.manager = Manager(
            Lease(leases, namespace="ns", name="shoal", identity=name, times=TIMES, clock=loop_time),
            [self.controller],
            needed={"pods": reflectors[0]},
            optional={"nodes": self.nodes},
            recorder=self.recorder,
            metrics=self.metrics,
        )

    async def _reconcile(self, _key: Key) -> None:
        pods, nodes = ({pod.metadata.name for pod in cache.all()} for cache in self.caches)
        self.decided.append((pods, nodes))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Replica]:
        async with during(self.manager.run()):
            yield self


@pytest.mark.parametrize("behind", ["pods", "nodes"])
async def test_new_leader_decides_on_nothing_that_it_has_not_read_itself(behind: str) -> None:
    """B2: a standby whose watch of one resource is dead counted what it had not read as lost."""
    leases, servers = LeaseServer(), {"pods": SmallServer(), "nodes": SmallServer()}
    for server in servers.values():
        server.set("old")
    leader = Replica(leases, servers["pods"], servers["nodes"], "one")
    standby = Replica(leases, servers["pods"], servers["nodes"], "two")
    async with AsyncExitStack() as ends_later:
        async with leader.running():
            await asyncio.sleep(1)
            await ends_later.enter_async_context(standby.running())
            await asyncio.sleep(1)
            servers[behind].watches[-1].put_nowait = lambda _line: None  # type: ignore[method-assign]
            for server in servers.values():
                server.remove("old")
                server.set("new")
            await asyncio.sleep(1)
            assert standby.decided == []
        await asyncio.sleep(TIMES.retry_period * 3)
        assert standby.decided[0] == ({"new"}, {"new"})


async def test_leader_that_is_restarted_lists_everything_once_and_decides() -> None:
    pods, nodes = SmallServer(), SmallServer()
    pods.set("a")
    replica = Replica(LeaseServer(), pods, nodes, "one")
    async with replica.running():
        await asyncio.sleep(2)
        assert replica.decided == [({"a"}, set())]
        assert (pods.lists, nodes.lists) == (1, 1)


async def test_standby_has_read_everything_before_it_has_the_lease() -> None:
    pods, leases = SmallServer(), LeaseServer()
    pods.set("a")
    await candidate(leases, "another").acquire()
    replica = Replica(leases, pods, SmallServer(), "one")
    async with replica.running():
        await asyncio.sleep(2)
        assert not replica.manager.lease.held
        assert [pod.metadata.name for pod in replica.caches[0].all()] == ["a"]


async def test_nodes_that_may_not_be_read_do_not_delay_the_leader() -> None:
    pods, nodes = SmallServer(), SmallServer()
    pods.set("a")
    nodes.fault = lambda _method, _path: Answer(403, b'{"message": "forbidden"}')
    replica = Replica(LeaseServer(), pods, nodes, "one")
    async with replica.running():
        await asyncio.sleep(2)
        assert replica.decided == [({"a"}, set())]


async def test_an_optional_resource_that_cannot_be_listed_delays_the_leader_and_does_not_stop_it() -> None:
    """As Kueue's Workloads while its conversion webhook is down: nobody would have led until it is back."""
    pods, nodes, leases = SmallServer(), SmallServer(), LeaseServer()
    pods.set("a")
    nodes.set("old")
    await candidate(leases, "another").acquire()  # and dies
    replica = Replica(leases, pods, nodes, "one")
    async with replica.running():
        await asyncio.sleep(1)
        assert replica.nodes.readable
        nodes.fault = lambda method, _path: Unavailable("HTTP 500") if method == "GET" else None
        await asyncio.sleep(TIMES.duration + TIMES.retry_period * 3 + OPTIONAL_SECONDS)
        assert replica.decided == [({"a"}, {"old"})]
        assert replica.manager.unread() == []
        assert not replica.nodes.readable, "what it knew as a standby is not said to be so"
        nodes.fault = lambda _method, _path: None
        await asyncio.sleep(31)
        assert replica.nodes.readable
        assert len(replica.decided) == 2, "all is looked at anew, though no object has changed"


async def test_not_ready_while_what_is_needed_keeps_the_holder_of_the_lease_from_leading() -> None:
    pods, leases = SmallServer(), LeaseServer()
    await candidate(leases, "another").acquire()  # and dies
    replica = Replica(leases, pods, SmallServer(), "one")
    lists = 0

    def fault(method: str, _path: str) -> Exception | None:
        nonlocal lists
        lists += method == "GET"
        return Unavailable("HTTP 500") if lists > 1 else None  # the first one is before the Lease is there

    pods.fault = fault
    async with replica.running():
        await asyncio.sleep(30)
        assert replica.manager.lease.held
        assert replica.decided == []
        assert replica.manager.unread() == ["pods"]


async def test_standby_that_has_not_heard_from_the_api_server_for_long_is_not_ready() -> None:
    """As one whose node's network is cut, or that has an old certificate of the authority: it will never lead."""
    pods, leases = SmallServer(), LeaseServer()
    await candidate(leases, "another").acquire()
    replica = Replica(leases, pods, SmallServer(), "one")

    async def tell() -> None:
        while True:
            await asyncio.sleep(60)
            pods.bookmark()

    async with replica.running(), asyncio.TaskGroup() as tasks:
        telling = tasks.create_task(tell())
        for _ in range(20):
            await asyncio.sleep(60)
            assert replica.manager.unread() == []
        pods.fault = lambda _method, _path: Unavailable("certificate verify failed")
        pods.cut()
        await asyncio.sleep(SILENT_SECONDS - 61)
        assert replica.manager.unread() == []
        await asyncio.sleep(62)  # the last bookmark may have come at this very moment
        assert replica.manager.unread() == ["pods"]
        pods.fault = lambda _method, _path: None
        await asyncio.sleep(31)
        assert replica.manager.unread() == []
        telling.cancel()


async def test_a_new_leader_that_may_not_list_tries_again_at_leisure() -> None:
    pods, leases = SmallServer(), LeaseServer()
    replica = Replica(leases, pods, SmallServer(), "one")
    lists = 0

    def fault(method: str, _path: str) -> Answer | None:
        nonlocal lists
        lists += method == "GET"
        return Answer(403, b'{"message": "forbidden"}')

    pods.fault = fault
    async with replica.running():
        await asyncio.sleep(20)
        assert replica.manager.unread() == ["pods"]
        assert 15 <= lists <= 25
        pods.fault = lambda _method, _path: None
        await asyncio.sleep(2)
        assert replica.decided == [(set(), set())]


async def test_clean_stop_posts_the_last_events_and_releases_the_lease() -> None:
    leases, pods = LeaseServer(), SmallServer()
    replica = Replica(leases, pods, SmallServer(), "one")
    async with replica.running():
        await asyncio.sleep(2)
        replica.recorder.record(build.job(), [Event("Normal", "Last", "one more")])
    assert [body["reason"] for method, _, body in pods.writes if method == "POST"] == ["Last"]
    assert leases.lease["spec"]["holderIdentity"] == ""
