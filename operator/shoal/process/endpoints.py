"""Serves the health and metrics endpoints of the process, on all addresses.

One socket accepts IPv6 and IPv4: in an IPv6-only cluster the kubelet's probes use IPv6. The event loop of the operator
answers both endpoints, so a healthy answer shows that it runs, and metrics do not change while they are read.

Anybody in the cluster may connect to the probes, and each connection is an open file, without which the process can
neither watch nor create anything. So a port has so many and no more: a new one takes the place of the oldest one of the
address that has the most. To refuse the new one would keep the kubelet out.
"""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from shoal.errors import UsageError

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
CONNECTIONS = 200
"""Of a port: twice the streams of the page, which may all come from one address. Three ports have fewer than the usual
limit of open files, 1,024."""
IDLE_SECONDS = 5.0
"""Between two requests of a connection."""


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


async def open_ports(resources: AsyncExitStack, *ports: tuple[int, Mapping[str, Answer]]) -> None:
    """Serve these paths, each on its port, until the resources are closed. Port 0: not at all.

    Raises:
        UsageError: a port is not available.
    """
    for port, answers in ports:
        if port:
            await resources.enter_async_context(serving(port, answers))


@asynccontextmanager
async def serving(port: int, answers: Mapping[str, Answer]) -> AsyncIterator[int]:
    """Serve these paths; gives the port. Port 0: any free port.

    Raises:
        UsageError: the port is not available.
    """
    app = web.Application()
    for path, answer in answers.items():
        app.router.add_get(path, answer)
    runner = web.AppRunner(
        app, handle_signals=False, access_log=None, shutdown_timeout=1.0, keepalive_timeout=IDLE_SECONDS
    )
    await runner.setup()
    server = runner.server
    assert server is not None

    def connection() -> asyncio.Protocol:
        make_room([each.transport for each in server.connections if each.transport is not None])
        return server()

    try:
        listener = await asyncio.get_running_loop().create_server(connection, sock=listen(port))
    except OSError as error:
        await runner.cleanup()
        raise UsageError(f"cannot listen on port {port}: {error.strerror}; set another port") from error
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        await runner.cleanup()


def make_room(connections: Sequence[asyncio.Transport]) -> None:
    """End as many of a port's connections, in the order in which they began, that it may have one more."""
    by_address = defaultdict[str, list[asyncio.Transport]](list)
    for each in connections:
        if not each.is_closing():
            by_address[(each.get_extra_info("peername") or ("",))[0]].append(each)
    for _ in range(sum(map(len, by_address.values())) - CONNECTIONS + 1):
        max(by_address.values(), key=len).pop(0).abort()


def listen(port: int) -> socket.socket:
    """A socket on all addresses, of both IP families if available. Port 0: any free port."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
