"""Slow links: pushes/s of 16 workers, each over a link of its own, against what the links allow.

The kernel paces each connection (`SO_MAX_PACING_RATE`). Links are eight times as slow as those of 1 Gb/s that are
meant, so that the cores, which server and workers share here, are not the limit; messages and memory are as large.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import Measurement, anonymous_bytes, summary
from benchmarks.wire_peers import Peer

SIZE = 25_600_000
SLOWED = 8
LINK = 1e9 / 8 / SLOWED
"""Bytes per second and direction."""
WORKERS = 16
MESSAGE = 2 * SIZE
"""Bytes in bf16."""
SLOW = 10
"""How many times as slow the link of a slow worker is."""


def measure(quick: bool = False) -> Iterator[Measurement]:
    """Shares of the pushes that the links allow if each worker sends and then receives."""
    seconds = 15.0 if quick else 40.0
    links = [LINK] * WORKERS
    rate, memory = pushes(links, seconds)
    name = f"25.6 M bf16, {WORKERS} workers"
    told = f"{name}, on links {SLOWED} times as fast as measured: 1 Gb/s"
    yield summary(told, [rate * SLOWED], "pushes/s", "", 15.0)
    yield summary(name, [rate / possible(links)], "x", "send, then receive")
    yield summary("anonymous memory, momentum", [memory / allowed()], "x", "1.1 x + 80 MB", 1.0, at_most=True)
    slower = [LINK / SLOW, *links[1:]]
    rate, _ = pushes(slower, seconds)
    name = f"25.6 M bf16, {WORKERS} workers, one link {SLOW} times as slow"
    yield summary(name, [rate / possible(slower)], "x", "send, then receive")


def possible(links: Sequence[float]) -> float:
    """Pushes/s if each worker sends all of its push before it receives the answer."""
    return sum(link / (2 * MESSAGE) for link in links)


def allowed() -> float:
    """The bound on the server's anonymous memory, in bytes, with momentum."""
    return SIZE * (4 + 4) * 1.1 + 80e6


def pushes(links: Sequence[float], seconds: float) -> tuple[float, float]:
    """Pushes/s of workers with these links, in bytes per second, and the server's anonymous memory then."""
    with ExitStack() as stack:
        secret = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "secret")
        server = stack.enter_context(Peer("serve", size=SIZE, secret=secret))
        options = {"size": SIZE, "secret": secret, "port": server.ready["port"], "dtype": "bf16"}
        workers = [
            stack.enter_context(Peer("work", **options, slot=slot, link=link))
            for slot, link in enumerate(links)
        ]
        for worker in workers:
            worker.send(seconds=seconds)
        reports = [worker.receive() for worker in workers]
        return sum(one["count"] / one["seconds"] for one in reports), anonymous_bytes(server.process.pid)
