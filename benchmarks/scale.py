"""Scale: anonymous memory of a parameter server, and the cost of a push-pull, as parameters and clients grow."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Measurement, summary
from shoal_trainer.contract import Shard
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.ps.client import PSClient
from shoal_trainer.security import Credentials, create_secret_dir
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig, Push, WorkerIdentity

SIZES = {"1 M": 1_000_000, "25.6 M": 25_600_000, "100 M": 100_000_000, "500 M": 500_000_000}
CLIENTS = (1, 4, 16, 64)
SERVER = """
import sys
from shoal_trainer.contract import Role
from shoal_trainer.ps.server import DataServer
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.security import Credentials
server = DataServer(ShardStore(0, 1, 0), "bench", Credentials.load(sys.argv[1]), host="127.0.0.1")
server.start()
print(server.port, flush=True)
sys.stdin.readline()
"""


def measure(quick: bool) -> Iterator[Measurement]:
    """Memory against parameters x (4 + state) bytes, then push-pulls a second by the number of clients."""
    for name, size in list(SIZES.items())[: 2 if quick else 4]:
        with _Server() as server:
            server.push(size, clients=1, pushes=3)
            allowed = size * (4 + 4) * 1.2 + 80e6
            ratio = server.anonymous_bytes() / allowed
        yield Measurement(
            f"anonymous memory, {name}, momentum", ratio, "x", "1.2 x (parameters + state) + 80 MB", 1.0, True
        )
    alone = 0.0
    for clients in CLIENTS[: 2 if quick else 4]:
        with _Server() as server:
            rates = [server.push(1_730_000, clients=clients, pushes=max(2, 200 // clients)) for _ in range(3)]
        alone = alone or max(rates)
        yield summary(
            f"push-pulls/s, 1.73 M bf16, {clients} clients", [r / alone for r in rates], "x", "1 client"
        )


class _Server:
    """A parameter server's data plane in a process of its own."""

    def __enter__(self) -> _Server:
        self._folder = tempfile.TemporaryDirectory()
        self._credentials: Credentials = create_secret_dir(Path(self._folder.name) / "secret")
        command = [sys.executable, "-c", SERVER, str(Path(self._folder.name) / "secret")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._shard = Shard(host="127.0.0.1", data_port=int(self._process.stdout.readline()))
        self._next_slot = 0
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def anonymous_bytes(self) -> int:
        text = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text()
        return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Anonymous"))

    def push(self, size: int, *, clients: int, pushes: int) -> float:
        """Push-pulls a second of `clients` threads, each on a connection of its own."""
        spec = ModelSpec(
            fingerprint="0" * 64, parameters=size, optimizer=OptimizerConfig(momentum=0.9, batch_size=1)
        )
        first, self._next_slot = self._next_slot, self._next_slot + clients
        gradient, out = aligned(size, "uint16"), [aligned(size, "uint16") for _ in range(clients)]
        ready, times = threading.Barrier(clients), []

        def client(number: int) -> None:
            identity = WorkerIdentity("bench", first + number, 0)
            peer = PSClient((self._shard,), identity, self._credentials, dtype="bf16")
            if not peer.hello(spec).initialized:
                peer.initialize(aligned(size))
            pulled = peer.pull(out[number])
            ready.wait()
            start = time.perf_counter()
            for seq in range(1, pushes + 1):
                pulled = peer.push_pull(gradient, out[number], Push(seq, 1, pulled.versions))
            times.append(time.perf_counter() - start)
            peer.close()

        threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return clients * pushes / max(times)
