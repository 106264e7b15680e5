"""Health and metrics endpoints over real sockets."""

from __future__ import annotations

import socket

import aiohttp
import pytest

from shoal.errors import UsageError
from shoal.process.endpoints import exposition, healthy, listen, ready, serve
from shoal.runtime.metrics import Metrics

HOSTS = ["127.0.0.1", *(["[::1]"] if socket.has_dualstack_ipv6() else [])]


@pytest.mark.parametrize("host", HOSTS)
async def test_endpoints_answer_over_ipv4_and_ipv6(host: str) -> None:
    metrics = Metrics()
    metrics.watch_restarts.labels("pods", "broken").inc(3)
    problems = ["pods"]
    probes = {"/healthz": healthy, "/readyz": ready(lambda: problems)}
    runners = [await serve(0, probes), await serve(0, {"/metrics": exposition(metrics.registry)})]
    health, scrape = (runner.addresses[0][1] for runner in runners)
    async with aiohttp.ClientSession() as session:
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
    for runner in runners:
        await runner.cleanup()


async def test_host_without_ipv6_is_served_over_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen(0) as listener:
        assert listener.family == socket.AF_INET


async def test_port_in_use_is_named() -> None:
    with listen(0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on port {port}"):
            await serve(port, {"/healthz": healthy})
