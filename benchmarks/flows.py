"""Whether a second connection per shard would make an exchange over a long or lossy link faster.

A worker of 25.6 M parameters in bf16 pushes and pulls over a link of 1 Gb/s, with a pause between, as its step takes;
beside it bare sockets that exchange as many bytes over one connection and over two. Links are `SLOWER` times as slow as
those that are meant, and as long, so that the cores are not the limit: as many packets are under way. Needs root.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.emulated_link import FAR, emulated_link
from benchmarks.wire_peers import JOB, Peer, model
from shoal_trainer.contract import Shard
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.client import PSClient
from shoal_trainer.ps.kernel_loader import load_kernels
from shoal_trainer.security import Credentials
from shoal_trainer.wire.messages import Push, PushMeta, WorkerIdentity

SIZE = 25_600_000
MESSAGE = 2 * SIZE
"""Bytes in bf16."""
LINK = 1e9 / 8
SLOWER = 4
"""All times are those of the link that is meant: the measured ones over this."""
PORT = 7001
PAUSE = 0.5
"""Seconds between exchanges: longer than the idle time after which TCP starts slowly again."""


def main() -> None:
    """Print a line for each link."""
    parser = argparse.ArgumentParser(prog="benchmarks.flows", description=__doc__)
    parser.add_argument("--rtt", type=float, nargs="+", default=[1, 10, 50], help="ms")
    parser.add_argument("--loss", type=float, nargs="+", default=[0, 0.01, 0.1], help="%% of packets")
    parser.add_argument("--congestion", default="cubic")
    parser.add_argument("--exchanges", type=int, default=8)
    options = parser.parse_args()
    print(
        f"median (least-most) seconds of {options.exchanges} exchanges; the link allows {MESSAGE / LINK:.2f}"
    )
    print("| RTT, loss | Shoal | bare, one flow | bare, two flows | gain of two |\n|---|---|---|---|---|")
    for rtt in options.rtt:
        for loss in options.loss:
            one, two, shoal = measure(rtt / 1e3, loss / 100, options.congestion, options.exchanges)
            gain = statistics.median(one) / statistics.median(two) - 1
            cells = " | ".join(
                f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})"
                for each in (shoal, one, two)
            )
            print(f"| {rtt:g} ms, {loss:g} % | {cells} | {gain:+.0%} |", flush=True)


def measure(
    rtt: float, loss: float, congestion: str, count: int
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of `count` exchanges: bare over one flow, over two, and Shoal's; in turns."""
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    link = LINK / SLOWER, rtt * SLOWER, loss, congestion
    with tempfile.TemporaryDirectory() as folder, emulated_link(*link) as (near, far):
        secret = str(Path(folder) / "secret")
        with Peer("serve", prefix=far, size=SIZE, secret=secret, host=FAR) as server:
            port = server.ready["port"]
            with (
                _Role("far", prefix=far),
                _Role("bare", prefix=near, flows=1) as one,
                _Role("bare", prefix=near, flows=2) as two,
                _Role("work", prefix=near, secret=secret, port=port) as worker,
            ):
                for index in range(count + 1):
                    for seconds, role in zip(found, (one, two, worker), strict=True):
                        took = role.request()["seconds"]
                        if index:  # the first one warms up
                            seconds.append(took / SLOWER)
                        time.sleep(PAUSE / 3)
    return found


class _Role(Peer):
    MODULE = "benchmarks.flows"


def far() -> None:
    """Answer each message of a flow with one as large, sent while it arrives."""

    def serve(sock: socket.socket) -> None:
        while head := sock.recv(8, socket.MSG_WAITALL):
            _both_ways(sock, int.from_bytes(head))

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    listener = socket.create_server((FAR, PORT))
    threading.Thread(target=accept, daemon=True).start()
    _say(ready=True)
    sys.stdin.read()


def bare(flows: int) -> None:
    """Exchange a message over so many connections for each line of the input."""
    socks = [socket.create_connection((FAR, PORT)) for _ in range(flows)]
    for sock in socks:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(sock: socket.socket) -> None:
        sock.sendall((MESSAGE // flows).to_bytes(8))
        _both_ways(sock, MESSAGE // flows)

    def all_flows() -> None:
        threads = [threading.Thread(target=exchange, args=(sock,)) for sock in socks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    _answer(all_flows)


def work(secret: str, port: int) -> None:
    """Push and pull for each line of the input."""
    load_kernels()
    client = PSClient([Shard(host=FAR, data_port=port)], WorkerIdentity(JOB, 0, 0), Credentials.load(secret))
    client.hello(model(SIZE))
    gradient, out = aligned(SIZE, "uint16"), aligned(SIZE, "uint16")
    pulled, seq = client.pull(out), 0

    def exchange() -> None:
        nonlocal pulled, seq
        seq += 1
        pulled = client.push_pull(gradient, out, Push(seq, pulled.versions, PushMeta(1)))

    _answer(exchange)
    client.close()


def _both_ways(sock: socket.socket, size: int) -> None:
    data = memoryview(bytearray(size))
    sender = threading.Thread(target=sock.sendall, args=(bytes(size),))
    sender.start()
    done = 0
    while done < size:
        done += sock.recv_into(data[done:], 0)
    sender.join()


def _answer(exchange: Callable[[], None]) -> None:
    _say(ready=True)
    for _ in sys.stdin:
        begin = time.monotonic()
        exchange()
        _say(seconds=time.monotonic() - begin)


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in {"far", "bare", "work"}:
        roles: dict[str, Callable[..., None]] = {"far": far, "bare": bare, "work": work}
        roles[sys.argv[1]](**json.loads(sys.argv[2]))
    else:
        main()
