"""Scale: anonymous memory of a parameter server, and the cost of a push-pull, as parameters and clients grow.

Memory varies little from run to run, so it is measured once: at rest, and at most while snapshots are written.

The plot is build/scale.png. Its limit is a bare hot socket both ways, measured in the same run.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.harness import Measurement, anonymous_bytes, summary
from benchmarks.wire_peers import hot_rate
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.client import PSClient
from shoal_trainer.ps.memory import needed
from shoal_trainer.ps.update_rules import STATE, rule
from shoal_trainer.run.processes import LocalJob, LocalRun
from shoal_trainer.wire.messages import Copy, ModelSpec, OptimizerConfig, Push, PushMeta, WorkerIdentity

SIZES = {"1 M": 1_000_000, "25.6 M": 25_600_000, "100 M": 100_000_000, "500 M": 500_000_000}

OPTIMIZERS = {
    "sgd": OptimizerConfig(batch_size=1),
    "momentum": OptimizerConfig(momentum=0.9, batch_size=1),
    "adam": OptimizerConfig(name="adam", batch_size=1),
}
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
SMALL = 1_730_000
BF16, FP32 = 2, 4
PLOT = Path("build/scale.png")
AT_REST = "1.1 x (parameters + state) + 80 MB"
AGAINST = "2.1 x (parameters + state) + 168 MB"
NEVER, SOON = 1_000_000, 2
"""Seconds between snapshots: each holds a second copy of the shard while it is written."""


def measure(quick: bool) -> Iterator[Measurement]:
    """Memory relative to parameters x (4 + state) bytes, then push-pulls/s by parameters and by clients."""
    pushes, repeats = (40, 1) if quick else (400, 3)
    limit = statistics.median(hot_rate(1.0)[0] for _ in range(repeats))
    memory: dict[str, dict[int, float]] = {name: {} for name in OPTIMIZERS}
    by_size: dict[int, float] = {}
    by_clients: dict[int, float] = {}
    for name, size in list(SIZES.items())[: 1 if quick else None]:
        for optimizer, config in OPTIMIZERS.items():
            if (lacking := _lacking(size, config)) > 0:
                print(
                    f"  {name}, {optimizer}, is left out: {lacking / 1e9:.0f} GB of memory are lacking",
                    flush=True,
                )
                continue
            rates = []
            for _ in range(repeats if optimizer == "momentum" else 1):
                with _Server() as server:
                    count = max(3, pushes * 250_000 // size)
                    rates.append(server.push(size, clients=2, pushes=count, optimizer=optimizer))
                    used = server.anonymous_bytes()
            memory[optimizer][size] = used
            what = f"anonymous memory, {name}, {optimizer}, bf16"
            at_rest, with_copy = resting(size, config), needed(size, config)
            yield summary(what, [used / at_rest], "x", AT_REST, 1.0, at_most=True)
            with _Server(SOON) as server:
                most = server.most_bytes(size, optimizer)
            told = f"{what}, at most, with snapshots"
            yield summary(told, [most / with_copy], "x", AGAINST, 1.0, at_most=True)
            if optimizer == "momentum":
                by_size[size] = statistics.median(rates)
                shares = [rate * size * 2 * BF16 / limit for rate in rates]
                yield summary(f"push+pull, {name} bf16, 2 clients", shares, "x", "bare socket both ways")
    for clients in CLIENTS[:1] if quick else CLIENTS:
        with _Server() as server:
            rates = [
                server.push(SMALL, clients=clients, pushes=max(4, pushes // clients)) for _ in range(repeats)
            ]
        by_clients[clients] = statistics.median(rates)
        alone = by_clients[1]
        name = f"push-pulls/s, 1.73 M bf16, {clients} clients"
        yield summary(name, [rate / alone for rate in rates], "x", "1 client")
    if not quick:
        plot(memory, by_size, by_clients, limit)


def resting(parameters: int, config: OptimizerConfig) -> float:
    """The bound on the bytes of a server that copies nothing: pushes to it are streams."""
    return 1.1 * 4 * parameters * (1 + len(STATE[rule(config)])) + 80e6


def _lacking(parameters: int, config: OptimizerConfig) -> float:
    """Bytes: for a server that writes a snapshot, a gradient, the answers of two clients and the first parameters."""
    clients = parameters * (3 * BF16 + FP32)
    return needed(parameters, config) + clients - psutil.virtual_memory().available


def plot(
    memory: dict[str, dict[int, float]],
    by_size: dict[int, float],
    by_clients: dict[int, float],
    limit: float,
) -> None:
    """Three panels: memory and its bound; rate by parameters, and by clients, below the socket's limit."""
    from matplotlib.figure import Figure

    figure = Figure((12, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    sizes = sorted(by_size)
    for style, (optimizer, measured) in zip(("k:", "k--", "k-."), memory.items(), strict=True):
        known = sorted(measured)
        left.loglog(known, [measured[n] / 1e6 for n in known], "o-", label=optimizer)
        left.loglog(
            known, [needed(n, OPTIMIZERS[optimizer]) / 1e6 for n in known], style, label=f"bound, {optimizer}"
        )
    left.set(title="anonymous memory of a PS", xlabel="parameters", ylabel="MB")
    middle.loglog(sizes, [by_size[n] for n in sizes], "o-", label="2 clients, bf16")
    middle.loglog(sizes, [limit / (n * 2 * BF16) for n in sizes], "k--", label="bare socket, both ways")
    middle.set(title="push-pulls/s", xlabel="parameters")
    clients = sorted(by_clients)
    right.semilogx(clients, [by_clients[n] for n in clients], "o-", base=2, label="1.73 M, bf16")
    right.axhline(limit / (SMALL * 2 * BF16), color="k", ls="--", label="bare socket, both ways")
    right.set(title="push-pulls/s, clients on the same cores", xlabel="clients", ylim=(0, None))
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=110)


class _Server:
    """Parameter server 0 of a job without workers, as `shoal-trainer run` starts it."""

    def __init__(self, snapshot_seconds: int = NEVER) -> None:
        self._snapshot_seconds = snapshot_seconds

    def __enter__(self) -> _Server:
        with contextlib.ExitStack() as stack:
            self._storage = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            job = LocalJob(
                "none",
                workers=0,
                storage_uri=f"file://{self._storage}",
                snapshot_seconds=self._snapshot_seconds,
            )
            self._run = stack.enter_context(LocalRun(job))
            while self._run.status() is None:
                if self._run.poll() is not None or self._run.failures:
                    raise RuntimeError(f"the parameter server has failed; its log is in {self._run.logs}")
                time.sleep(0.05)
            self._stack = stack.pop_all()
        self._next_slot = 0
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def anonymous_bytes(self) -> int:
        return anonymous_bytes(self._run.processes[0].popen.pid)

    def most_bytes(self, size: int, optimizer: str) -> int:
        """The most that was seen while two clients pushed, and until a snapshot was written."""
        used, over = [0], threading.Event()

        def look() -> None:
            while not over.wait(0.01):
                used.append(self.anonymous_bytes())

        looking = threading.Thread(target=look)
        looking.start()
        self.push(size, clients=2, pushes=10, optimizer=optimizer)
        end = time.monotonic() + 120
        while not list(self._storage.rglob("manifest-*.json")) and time.monotonic() < end:
            time.sleep(0.1)
        over.set()
        looking.join()
        return max(used)

    def push(self, size: int, *, clients: int, pushes: int, optimizer: str = "momentum") -> float:
        """Push-pulls/s of `clients` threads with one connection each."""
        config = OPTIMIZERS[optimizer]
        spec = ModelSpec(fingerprint="0" * 64, parameters=size, optimizer=config)
        first, self._next_slot = self._next_slot, self._next_slot + clients
        gradient, out = aligned(size, "uint16"), [aligned(size, "uint16") for _ in range(clients)]
        ready, times, begun = threading.Barrier(clients), [], threading.Event()

        def client(number: int) -> None:
            if number:
                begun.wait(60)  # one says what the parameters are at first
            identity = WorkerIdentity(self._run.identity.uid, first + number, 0)
            peer = PSClient(self._run.shards, identity, self._run.credentials, dtype="bf16")
            peer.hello(spec, Copy(lambda: aligned(size)))
            begun.set()
            pulled = peer.pull(out[number])
            pulled = peer.push_pull(
                gradient, out[number], Push(1, pulled.versions, PushMeta(1))
            )  # touches every page
            ready.wait(60)  # if one fails, all fail
            start = time.perf_counter()
            for seq in range(2, pushes + 2):
                pulled = peer.push_pull(gradient, out[number], Push(seq, pulled.versions, PushMeta(1)))
            times.append(time.perf_counter() - start)
            peer.close()

        threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return clients * pushes / max(times)
