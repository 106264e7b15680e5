"""Serves the health and metrics endpoints of the process, on all addresses.

One socket accepts IPv6 and IPv4: in an IPv6-only cluster the kubelet's probes use IPv6. The event loop of the operator
answers both endpoints, so a healthy answer shows that it runs, and metrics do not change while they are read.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from shoal.errors import UsageError

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def healthy(_: web.Request) -> web.StreamResponse:
    """Answer the liveness probe."""
    return web.json_response({})


def ready(problems: Callable[[], Sequence[str]]) -> Answer:
    """Answer the readiness probe: 503 while there are problems, which are in the body."""

    async def answer(_: web.Request) -> web.Response:
        found = problems()
        return web.json_response({"waitingFor": list(found)}, status=503 if found else 200)

    return answer


def exposition(registry: CollectorRegistry) -> Answer:
    """Answer Prometheus in the format that it requests."""

    async def answer(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    return answer


async def serve(port: int, answers: Mapping[str, Answer]) -> web.AppRunner:
    """Serve these paths until `cleanup()` of the returned runner.

    Raises:
        UsageError: the port is not available.
    """
    app = web.Application()
    for path, answer in answers.items():
        app.router.add_get(path, answer)
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, listen(port)).start()
    except OSError as error:
        await runner.cleanup()
        raise UsageError(f"cannot listen on port {port}: {error.strerror}; set another port") from error
    return runner


def listen(port: int) -> socket.socket:
    """A socket on all addresses, of both IP families if available. Port 0: any free port."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
