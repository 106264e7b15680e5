"""What the process itself serves: its health and its metrics, on every address it has.

One socket takes IPv6 and IPv4 alike: in a cluster that has only IPv6 the kubelet's probes come from there. Both are
answered by the loop that does the work: health is that it turns, and nothing changes while the metrics are read.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from shoal.errors import UsageError

Answer = Callable[[web.Request], Awaitable[web.Response]]


async def healthy(_: web.Request) -> web.Response:
    """The loop turns."""
    return web.json_response({})


def exposition(registry: CollectorRegistry) -> Answer:
    """What Prometheus reads, in the format that it asks for."""

    async def answer(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    return answer


async def serve(port: int, path: str, answer: Answer) -> web.AppRunner:
    """Serve one path; `cleanup()` of what is returned ends it.

    Raises:
        UsageError: the port cannot be had.
    """
    app = web.Application()
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
    """A socket on every address of the machine, of both families where it has both. Port 0: any."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
