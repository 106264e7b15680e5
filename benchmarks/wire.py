"""Push and pull over sockets: against bare sockets, in TLS, and over a link shaped to 10 Gb/s."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.harness import Measurement, summary
from benchmarks.wire_peers import exchange, hot_rate

SIZES = {"1.7 M": 1_730_000, "25.6 M": 25_600_000, "100 M": 100_000_000}
LINE_RATE = 10e9 / 8
HOT_MEGABYTE = "bare socket both ways, one megabyte that stays in the cache"
NAMESPACE = f"shoal-bench-{os.getpid()}"
NO_LINK = "  the rows of a 10 Gb/s link are skipped, since no veth pair can be made: {}"
HOST_SIDE, SERVER_SIDE = "10.213.7.1", "10.213.7.2"


def measure(quick: bool = False) -> Iterator[Measurement]:
    """Rates are of push and pull together, including the update."""
    repeats, seconds = (1, 1.0) if quick else (3, 4.0)
    hot = [hot_rate(seconds) for _ in range(repeats)]
    yield summary(
        "hot megabyte, both ways", [rate / 1e9 for rate, _ in hot], "GB/s", "this machine's loopback"
    )
    yield summary("hot megabyte, CPU", [cpu for _, cpu in hot], "s/GB", "both sides together")
    for label, size in SIZES.items():
        if quick and size > 30_000_000:
            continue
        for tls in (False, True):
            # Two workers: the gradient of one arrives while the parameters of the other are sent.
            spans = list(exchange(size, "fp32", 2, seconds, tls=tls, repeats=repeats))
            name = f"push+pull {label} fp32{' TLS' if tls else ''}"
            rates = [span.bytes_per_second / span.bare_bytes_per_second for span in spans]
            yield summary(name, rates, "x", "bare socket both ways, messages as large")
            rates = [span.bytes_per_second / span.hot_bytes_per_second for span in spans]
            yield summary(f"{name} / hot megabyte", rates, "x", HOT_MEGABYTE, None if tls else 0.65)
            for side in ("server", "client"):
                cpu = [getattr(span, f"{side}_cpu_per_gb") for span in spans]
                yield summary(f"{name}, CPU of {side}", cpu, "s/GB", "update and handshake included")
    for dtype, goal in (("bf16", 280.0), ("fp32", 150.0)):
        spans = list(exchange(SIZES["1.7 M"], dtype, 4, seconds, repeats=repeats))
        rates = [span.per_second for span in spans]
        name = f"service 1.73 M {dtype}"
        yield summary(name, rates, "/s", "4 workers on the same cores", goal)
        shares = [span.bytes_per_second / span.hot_bytes_per_second for span in spans]
        yield summary(f"{name} / hot megabyte", shares, "x", HOT_MEGABYTE)
    with shaped_link() as prefix:
        if prefix is None:
            return
        for workers in (4, 8):
            spans = list(
                exchange(
                    SIZES["25.6 M"],
                    "bf16",
                    workers,
                    seconds,
                    host=SERVER_SIDE,
                    server_prefix=prefix,
                    repeats=repeats,
                )
            )
            shares = [span.bytes_per_second / 2 / LINE_RATE for span in spans]
            yield summary(
                f"25.6 M bf16, {workers} workers, 10 Gb/s", shares, "x", "line rate, each direction"
            )


@contextmanager
def shaped_link() -> Iterator[list[str] | None]:
    """A network namespace behind a veth pair shaped to 10 Gb/s each way; prints why and yields None if it cannot be."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        print(NO_LINK.format("needs root, ip and tc"), flush=True)
        yield None
        return
    host, server = f"shb{os.getpid() % 10**8}a", f"shb{os.getpid() % 10**8}b"
    inside = f"ip netns exec {NAMESPACE}"
    shape = "root tbf rate 10gbit burst 4mb latency 50ms"
    commands = [
        f"ip netns add {NAMESPACE}",
        f"ip link add {host} type veth peer name {server} netns {NAMESPACE}",
        f"ip addr add {HOST_SIDE}/30 dev {host}",
        f"ip link set {host} up",
        f"{inside} ip addr add {SERVER_SIDE}/30 dev {server}",
        f"{inside} ip link set {server} up",
        f"tc qdisc add dev {host} {shape}",
        f"{inside} tc qdisc add dev {server} {shape}",
    ]
    try:
        try:
            for command in commands:
                subprocess.run(command.split(), check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            print(NO_LINK.format(f"{' '.join(error.cmd)}: {error.stderr.decode().strip()}"), flush=True)
            yield None
        else:
            yield inside.split()
    finally:
        subprocess.run(["ip", "netns", "del", NAMESPACE], check=False, capture_output=True)
