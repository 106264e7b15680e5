"""The processes that `benchmarks.wire` measures: a parameter server, workers that only push, a bare socket.

`Peer` starts each of them; it ends when its standard input closes.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal_trainer.contract import Shard
from shoal_trainer.ps.aligned import aligned, octets
from shoal_trainer.ps.client import PSClient
from shoal_trainer.ps.kernel_loader import load_kernels
from shoal_trainer.ps.server import DataServer
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.security import Credentials, create_secret_dir
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig, Push, PushMeta, WorkerIdentity

HOT = 1 << 20
SO_MAX_PACING_RATE = 47
"""Linux'; TCP paces itself."""
LINK_BUFFER = 1 << 18
JOB = "benchmark"


class Peer:
    """A process with one role of this module; `ready` is the line of JSON that it prints when it is ready."""

    MODULE = "benchmarks.wire_peers"

    def __init__(self, role: str, *, prefix: Sequence[str] = (), **options: Any) -> None:
        command = [*prefix, sys.executable, "-m", self.MODULE, role, json.dumps(options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready: dict[str, Any] = self.receive()

    def receive(self) -> dict[str, Any]:
        """Read the next line of JSON."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the benchmark ended with {self.process.wait()}")
        message: dict[str, Any] = json.loads(line)
        return message

    def request(self, **message: Any) -> dict[str, Any]:
        """Send a line and read the answer."""
        self.send(**message)
        return self.receive()

    def send(self, **message: Any) -> None:
        """Send a line of JSON."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


def _print(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def model(size: int) -> ModelSpec:
    """A model of `size` values with momentum."""
    optimizer = OptimizerConfig(learning_rate=1e-6, momentum=0.9, batch_size=1)
    return ModelSpec(fingerprint="0" * 64, parameters=size, optimizer=optimizer)


def serve(size: int, secret: str, host: str = "127.0.0.1", tls: bool = False) -> None:
    """A parameter server of one shard; answers each line with the CPU seconds that it has used."""
    credentials = create_secret_dir(secret)
    shard = ShardStore(0, 1, 0)
    shard.hello(0, 0, model(size))
    shard.offer(0, 0, aligned(size))
    server = DataServer(shard, JOB, credentials, host=host, tls=tls)
    server.start()
    _print(port=server.port)
    for _ in sys.stdin:
        _print(cpu=time.process_time(), version=shard.history.version)
    server.close()


def work(
    size: int,
    secret: str,
    port: int,
    slot: int,
    dtype: str,
    host: str = "127.0.0.1",
    tls: bool = False,
    link: float = 0.0,
) -> None:
    """A worker without a model: on {"seconds": s} it pushes and pulls that long and prints the count.

    `link`: bytes per second that its connection sends, and receives; 0: as many as it can.
    """
    load_kernels()
    if link:
        port = _link(host, port, int(link))
    identity = WorkerIdentity(JOB, slot, 0)
    shards = [Shard(host=host, data_port=port)]
    client = PSClient(shards, identity, Credentials.load(secret), dtype=dtype, tls=tls)  # type: ignore[arg-type]
    client.hello(model(size))
    kind = "uint16" if dtype == "bf16" else "float32"  # a worker's step computes bf16
    gradient, out = aligned(size, kind), aligned(size, kind)
    pulled, seq = client.pull(out), 0
    _print(ready=True)
    for line in sys.stdin:
        until, count, cpu = time.monotonic() + json.loads(line)["seconds"], 0, time.process_time()
        begin = time.monotonic()
        while time.monotonic() < until:
            seq, count = seq + 1, count + 1
            pulled = client.push_pull(gradient, out, Push(seq, pulled.versions, PushMeta(1)))
        _print(count=count, seconds=time.monotonic() - begin, cpu=time.process_time() - cpu)
    client.close()


def _link(host: str, port: int, rate: int) -> int:
    """The port of a proxy that forwards one connection after another, at `rate` bytes per second and direction."""
    listener = socket.create_server(("127.0.0.1", 0))

    def forward() -> None:
        while True:
            near, _ = listener.accept()
            far = socket.create_connection((host, port))
            for sock in (near, far):
                sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LINK_BUFFER)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LINK_BUFFER)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=_copy, args=(source, target), daemon=True).start()

    threading.Thread(target=forward, daemon=True).start()
    return int(listener.getsockname()[1])


def _copy(source: socket.socket, target: socket.socket) -> None:
    while data := source.recv(1 << 16):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


def _send_until(sock: socket.socket, data: memoryview, until: float) -> None:
    while True:
        sock.sendall(data)
        if time.monotonic() >= until:
            break
    sock.shutdown(socket.SHUT_WR)


def _receive_all(sock: socket.socket, view: memoryview) -> int:
    total = 0
    while count := sock.recv_into(view, len(view), socket.MSG_WAITALL):
        total += count
    return total


def _touched(size: int) -> memoryview:
    """Memory with every page touched, as in a worker."""
    memory = aligned(size, np.uint8)
    memory[:] = 1
    return octets(memory)


def _both_ways(sock: socket.socket, size: int, seconds: float) -> dict[str, float]:
    mine, theirs = _touched(size), _touched(size)
    cpu, begin = time.process_time(), time.monotonic()
    sender = threading.Thread(target=_send_until, args=(sock, mine, begin + seconds))
    sender.start()
    received = _receive_all(sock, theirs)
    sender.join()
    return {"received": received, "seconds": time.monotonic() - begin, "cpu": time.process_time() - cpu}


def hot(host: str = "127.0.0.1") -> None:
    """The limit of the machine: the same bytes repeatedly, sent both ways at once."""
    with socket.create_server((host, 0)) as listener:
        _print(port=listener.getsockname()[1])
        for line in sys.stdin:
            sock, _ = listener.accept()
            with sock:
                _print(**_both_ways(sock, **json.loads(line)))


def hot_rate(seconds: float, size: int = HOT) -> tuple[float, float]:
    """(bytes a second, both directions together; CPU seconds a GB on both sides) of the bare socket.

    `size`: bytes of a message; HOT bytes stay in the cache.
    """
    with Peer("hot") as peer:
        peer.send(size=size, seconds=seconds)
        with socket.create_connection(("127.0.0.1", peer.ready["port"])) as sock:
            mine = _both_ways(sock, size, seconds)
        theirs = peer.receive()
    moved = mine["received"] + theirs["received"]
    return moved / max(mine["seconds"], theirs["seconds"]), (mine["cpu"] + theirs["cpu"]) / moved * 1e9


@dataclass(frozen=True)
class Span:
    """A measurement of `workers` and one server, and of bare sockets right before."""

    per_second: float
    bytes_per_second: float
    server_cpu_per_gb: float
    client_cpu_per_gb: float
    hot_bytes_per_second: float
    """With messages of one megabyte, which stay in the cache."""
    bare_bytes_per_second: float
    """With messages of the size of the vector."""


def exchange(
    size: int,
    dtype: str,
    workers: int,
    seconds: float,
    *,
    tls: bool = False,
    host: str = "127.0.0.1",
    server_prefix: Sequence[str] = (),
    repeats: int = 3,
) -> Iterator[Span]:
    """Measure `repeats` spans of push-pulls, after one that warms up.

    The bare socket is measured before each, since the speed of a shared machine varies.
    """
    itemsize = 2 if dtype == "bf16" else 4
    with tempfile.TemporaryDirectory() as folder:
        secret = str(Path(folder) / "secret")
        with Peer("serve", prefix=server_prefix, size=size, secret=secret, host=host, tls=tls) as server:
            port = server.ready["port"]
            clients = [
                Peer("work", size=size, secret=secret, port=port, slot=slot, dtype=dtype, host=host, tls=tls)
                for slot in range(workers)
            ]
            for index in range(repeats + 1):
                hot_bytes = hot_rate(1.0)[0] if index else 0.0
                bare_bytes = hot_rate(1.0, size * itemsize)[0] if index else 0.0
                before = server.request()
                for client in clients:
                    client.send(seconds=seconds if index else 0.5)
                reports = [client.receive() for client in clients]
                after = server.request()
                if not index:
                    continue
                count = sum(one["count"] for one in reports)
                span = max(one["seconds"] for one in reports)
                moved = count * size * itemsize * 2
                yield Span(
                    per_second=count / span,
                    bytes_per_second=moved / span,
                    server_cpu_per_gb=(after["cpu"] - before["cpu"]) / moved * 1e9,
                    client_cpu_per_gb=sum(one["cpu"] for one in reports) / moved * 1e9,
                    hot_bytes_per_second=hot_bytes,
                    bare_bytes_per_second=bare_bytes,
                )
            for client in clients:
                client.__exit__()


if __name__ == "__main__":
    roles: dict[str, Callable[..., None]] = {"serve": serve, "work": work, "hot": hot}
    roles[sys.argv[1]](**json.loads(sys.argv[2]))
