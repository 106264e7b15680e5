"""Health and metrics endpoints over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from contextlib import AsyncExitStack

import aiohttp
import pytest

from shoal.errors import UsageError
from shoal.process.endpoints import CONNECTIONS, exposition, healthy, listen, ready, serving
from shoal.runtime.metrics import Metrics

HOSTS = ["127.0.0.1", *(["[::1]"] if socket.has_dualstack_ipv6() else [])]


@pytest.mark.parametrize("host", HOSTS)
async def test_endpoints_answer_over_ipv4_and_ipv6(host: str) -> None:
    metrics = Metrics()
    metrics.watch_restarts.labels("pods", "broken").inc(3)
    problems = ["pods"]
    probes = {"/healthz": healthy, "/readyz": ready(lambda: problems)}
    scraped = {"/metrics": exposition(metrics.registry)}
    async with (
        serving(0, probes) as health,
        serving(0, scraped) as scrape,
        aiohttp.ClientSession() as session,
    ):
        async with session.get(f"http://{host}:{health}/healthz") as answer:
            assert answer.status == 200
        async with session.get(f"http://{host}:{health}/readyz") as answer:
            assert (answer.status, await answer.json()) == (503, {"waitingFor": ["pods"]})
        problems.clear()
        async with session.get(f"http://{host}:{health}/readyz") as answer:
            assert answer.status == 200
        async with session.get(f"http://{host}:{scrape}/metrics") as answer:
            assert answer.content_type == "text/plain"
            assert 'shoal_watch_restarts_total{reason="broken",resource="pods"} 3.0' in await answer.text()


async def test_host_without_ipv6_is_served_over_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen(0) as listener:
        assert listener.family == socket.AF_INET


async def test_port_in_use_is_named() -> None:
    with listen(0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on port {port}"):
            async with serving(port, {"/healthz": healthy}):
                pass


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def ask(connection: Connection) -> bytes:
    """What it is answered; empty: it has ended."""
    reader, writer = connection
    with contextlib.suppress(ConnectionError):
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        return await reader.readline()
    return b""


async def test_a_pod_that_fills_a_port_keeps_the_kubelet_out_neither_of_this_nor_of_others() -> None:
    """With 1,024 idle connections the process could open no file any more: no watch, no pod of a lost worker."""
    async with serving(0, {"/healthz": healthy}) as port, AsyncExitStack() as resources:

        async def connect(source: str) -> Connection:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
            resources.callback(writer.close)
            return reader, writer

        early = await connect("127.0.0.3")
        many = [await connect("127.0.0.2") for _ in range(2 * CONNECTIONS)]
        for each in (await connect("127.0.0.3"), early, await connect("127.0.0.2")):
            assert b"200" in await ask(each)
        assert [await ask(each) for each in many[:CONNECTIONS]] == [b""] * CONNECTIONS
        assert b"200" in await ask(many[-1])
