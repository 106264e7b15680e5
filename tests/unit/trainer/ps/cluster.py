"""Parameter servers of one job on loopback, and their clients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from shoal_trainer.contract import Shard
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.client import PSClient
from shoal_trainer.ps.server import DataServer
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.security import Credentials
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig, WorkerIdentity

N = 100_000
MODEL = ModelSpec(
    fingerprint="f" * 64,
    parameters=N - 100,
    statistics=100,
    optimizer=OptimizerConfig(learning_rate=1.0, batch_size=1),
)
PIECE = 5000
RECOVERY = 10
"""Seconds that a restarted shard waits for the copy of an expected worker."""


class Cluster:
    """The parameter servers of one job, in this process. `streams`: as if the shards were large."""

    def __init__(self, credentials: Credentials, *, tls: bool = False, streams: bool = False) -> None:
        self.credentials, self.tls, self.streams = credentials, tls, streams
        self.stores: list[ShardStore] = []
        self.servers: list[DataServer] = []
        self._stack = ExitStack()

    def serve(
        self, shards: int = 1, *, epoch: int = 0, ports: list[int] | None = None, **arguments: Any
    ) -> Cluster:
        self.stop()
        pieces: dict[str, Any] = {"large": 0, "piece": PIECE} if self.streams else {}
        self.stores = [
            ShardStore(i, shards, epoch, recovery_seconds=RECOVERY, **pieces) for i in range(shards)
        ]
        for index, store in enumerate(self.stores):
            port = 0 if ports is None else ports[index]
            server = DataServer(
                store, "uid", self.credentials, host="127.0.0.1", port=port, tls=self.tls, **arguments
            )
            server.start()
            self.servers.append(server)
        return self

    def client(self, slot: int = 0, incarnation: int = 0, **arguments: Any) -> PSClient:
        addresses = [Shard(host="127.0.0.1", data_port=server.port) for server in self.servers]
        identity = WorkerIdentity("uid", slot, incarnation)
        client = PSClient(
            addresses, identity, self.credentials, tls=self.tls, **({"timeout": 20} | arguments)
        )
        self._stack.callback(client.close)
        return client

    def stop(self) -> list[int]:
        ports = [server.port for server in self.servers]
        for server in self.servers:
            server.close()
        self.servers.clear()
        return ports

    def close(self) -> None:
        self._stack.close()
        self.stop()


def until(condition: Callable[[], bool]) -> None:
    """Wait, at most 30 s, until another thread makes `condition` true."""
    event, attempts = threading.Event(), 3000
    while not condition():
        event.wait(0.01)
        attempts -= 1
        assert attempts, "the condition did not become true within 30 s"


def flat(value: float) -> np.ndarray:
    out = aligned(N)
    out[:] = value
    return out
