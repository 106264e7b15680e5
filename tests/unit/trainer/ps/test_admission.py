"""Which connections a data server accepts, and how long a request may wait."""

from __future__ import annotations

import inspect
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shoal_trainer.contract import Shard
from shoal_trainer.errors import Unreachable
from shoal_trainer.ps import server as server_module
from shoal_trainer.ps import shard_client
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.client import PSClient
from shoal_trainer.ps.pool import POOL_BYTES, RESERVED, Loan
from shoal_trainer.ps.server import DataServer
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.ps.values import AppliedPush
from shoal_trainer.security import Credentials, create_secret_dir
from shoal_trainer.wire.channel import MIN_RATE, Channel
from shoal_trainer.wire.gate import Gate
from shoal_trainer.wire.messages import Copy, ModelSpec, Push, PushMeta, WorkerIdentity
from tests.unit.trainer.ps.cluster import MODEL as SPEC
from tests.unit.trainer.ps.cluster import Cluster, flat, until

MODEL = ModelSpec(fingerprint="0" * 64, parameters=8)


class Served:
    """A data server at epoch 2, and its clients."""

    def __init__(self, folder: Path) -> None:
        self.credentials: Credentials = create_secret_dir(folder / "secret")
        self.shard = ShardStore(0, 1, 2, follows=False)
        self.superseded: list[int] = []
        self.server = DataServer(
            self.shard, "uid", self.credentials, host="127.0.0.1", on_superseded=self.superseded.append
        )
        self.server.start()
        self._stack = ExitStack()

    def client(self, slot: int = 0) -> PSClient:
        address = Shard(host="127.0.0.1", data_port=self.server.port)
        client = PSClient([address], WorkerIdentity("uid", slot, 0), self.credentials, timeout=20)
        self._stack.callback(client.close)
        return client

    def close(self) -> None:
        self._stack.close()
        self.server.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.close()


def test_acceptor_survives_a_refused_thread(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's PID limit counts threads."""
    start = threading.Thread.start
    refused: list[object] = []

    def limited(self: threading.Thread) -> None:
        if self.name.startswith("data-127") and len(refused) < 2:
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    monkeypatch.setattr(served.server.listener, "gate", Gate(1))
    for _ in range(2):
        with pytest.raises(Unreachable):
            served.client().hello(MODEL)
    served.client().hello(MODEL)
    assert served.server.listener.acceptor.is_alive()


def test_client_that_knows_a_newer_epoch_stops_the_older_server(served: Served) -> None:
    client = served.client()
    client._shards[0].minimum_epoch = 3
    with pytest.raises(Unreachable, match="older parameter server"):
        client.hello(MODEL)
    until(lambda: served.superseded == [3])


def test_connection_counts_once(served: Served) -> None:
    client = served.client()
    client.hello(MODEL)
    assert len(served.server.listener.open) == 1


@pytest.mark.parametrize(("limit", "both"), [(RESERVED + 4 * POOL_BYTES, True), (None, False)])
def test_requests_have_the_memory_of_their_pod(
    limit: int | None, both: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two requests, each as large as all the memory without a limit, one would else wait for the other."""
    monkeypatch.setattr(server_module, "memory_limit", lambda: limit)
    with closing(Served(tmp_path)) as served:
        pool = served.server._pool
        with pool.lend(2 * POOL_BYTES) as first, pool.lend(2 * POOL_BYTES) as second:
            assert first.granted(0, whole=True)
            assert second.granted(0, whole=True) == both


@contextmanager
def full(server: DataServer, monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    """The server has no memory for another message for so long, which is longer than anything else may last."""
    monkeypatch.setattr(server_module, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(server_module, "BUSY_SECONDS", 0.02)
    take, freed = server._pool._take, threading.Event()
    monkeypatch.setattr(server._pool, "_take", lambda loan: take(loan) if freed.is_set() else None)
    freeing = threading.Timer(seconds, freed.set)
    freeing.start()
    yield
    freeing.join()


@pytest.mark.parametrize("kind", ["pull", "push", "push that is sent without asking"])
def test_a_busy_server_makes_a_worker_wait_longer_than_any_timeout(
    served: Served, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A saturated server is not a lost one: the worker would answer an outage with three messages for one."""
    if kind == "push":
        monkeypatch.setattr(shard_client, "ASK_BYTES", 8)
    client = served.client()
    client.hello(MODEL)
    served.shard.offer(0, 0, aligned(8))
    client._shards[0]._connected().channel.set_timeout(0.2)
    with full(served.server, monkeypatch, 1.0):
        if kind == "pull":
            client.pull(aligned(8))
        else:
            client.push_pull(aligned(8), aligned(8), Push(1, (0,), PushMeta(1)))
            assert served.shard.history.version == 1
    assert served.shard.report().busy_answers >= 5
    client.pull(aligned(8))  # the connection goes on


@pytest.mark.parametrize("tls", [False, True])
def test_a_payload_on_its_way_to_a_busy_server_does_not_fill_the_connection(
    tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest that is sent without asking, to two shards, of which the second has memory first."""
    values = shard_client.ASK_BYTES // 2
    model = ModelSpec(fingerprint="0" * 64, parameters=2 * values)
    with closing(Cluster(create_secret_dir(tmp_path / "secret"), tls=tls)) as cluster:
        cluster.serve(2)
        client = cluster.client()
        client.hello(model)
        for shard in (0, 1):
            cluster.stores[shard].offer(0, 0, aligned(values))
            client._shards[shard]._connected().channel.set_timeout(0.2)
        gradient, out = aligned(2 * values), aligned(2 * values)
        gradient[:] = 1.0
        with full(cluster.servers[1], monkeypatch, 0.3), full(cluster.servers[0], monkeypatch, 1.0):
            client.push_pull(gradient, out, Push(1, (0, 0), PushMeta(1)))
    assert [store.history.version for store in cluster.stores] == [1, 1]
    assert (out == out[0]).all()
    assert out[0]


def test_more_workers_than_memory_all_get_their_turn(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of all messages is longer than a request may wait for anything else."""
    monkeypatch.setattr(server_module, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(server_module, "BUSY_SECONDS", 0.02)
    monkeypatch.setattr(shard_client, "ASK_BYTES", 8)
    served.server._pool._limit = served.server._pool._usual = 0  # one message
    served.server._pool._memory = None
    apply, turn = served.shard.run, threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        turn.wait(0.05)
        return apply(*arguments, **options)

    monkeypatch.setattr(served.shard, "run", slow)
    clients = [served.client(slot) for slot in range(12)]
    for client in clients:
        client.hello(MODEL)
    served.shard.offer(0, 0, aligned(8))

    def work(client: PSClient) -> None:
        for seq in range(1, 4):
            client.push_pull(aligned(8), aligned(8), Push(seq, (0,), PushMeta(1)))

    with ThreadPoolExecutor(len(clients)) as pool:
        for done in [pool.submit(work, client) for client in clients]:
            done.result(timeout=30)
    assert served.shard.history.version == 36


def test_all_waits_of_a_request_share_one_deadline(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "WAIT_SECONDS", 10.0)
    now, limits = [0.0], []
    monkeypatch.setattr(served.server, "_clock", lambda: now[0])

    def wait_ready(timeout: float) -> bool:
        limits.append(timeout)
        now[0] += 6
        return True

    def wait_admitted(_slot: int, _base: int, timeout: float) -> float:
        limits.append(timeout)
        now[0] += 3
        return 0.0

    lend = served.server._pool.lend

    def lend_for(nbytes: int, model_bytes: int, *, patience: float) -> object:
        limits.append(patience)
        return lend(nbytes, model_bytes)

    served.shard.hello(0, 0, MODEL)
    served.shard.offer(0, 0, aligned(8))
    monkeypatch.setattr(served.shard, "wait_ready", wait_ready)
    monkeypatch.setattr(served.shard.workers, "wait_admitted", wait_admitted)
    monkeypatch.setattr(served.server._pool, "lend", lend_for)
    client = served.client()
    client.hello(MODEL)
    client.push_pull(aligned(8), aligned(8), Push(1, (0,), PushMeta(1)))
    assert limits == [10.0, 4.0, 1.0]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("kind", ["push_pull", "push_round", "push"])
def test_wait_for_slower_workers_is_no_time_of_the_exchange(
    kind: str, asks: bool, streams: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast worker beside a slow one was measured as one with a slow link. Servers that are asked wait in turn."""
    now, told = [0.0], list[AppliedPush]()
    monkeypatch.setattr(shard_client, "ASK_BYTES", 8 if asks else 4 << 20)

    def slower_workers(index: int, *_: object) -> float:
        now[0] += 3.0 if asks or index == 0 else 0.0
        return 3.0

    def works(pushing: Callable[..., Any], *push: object, **options: object) -> Any:
        now[0] += 0.25
        return pushing(*push, **options)

    with closing(Cluster(create_secret_dir(tmp_path / "secret"), streams=streams)) as cluster:
        client = cluster.serve(2, clock=lambda: now[0]).client()
        client.hello(SPEC, Copy(lambda: flat(0.0)))
        for store in cluster.stores:
            monkeypatch.setattr(store.workers, "wait_admitted", partial(slower_workers, store.index))
            monkeypatch.setattr(store, "pushing", partial(works, store.pushing))
            store.on_applied = told.append
        monkeypatch.setattr(client, "_clock", lambda: now[0])
        out = () if kind == "push" else (flat(0.0),)
        found = getattr(client, kind)(flat(0.0), *out, Push(1, (0, 0), PushMeta(8, steps=2)))
    waited = 6.0 if asks else 3.0
    assert found.push_seconds + found.pull_seconds + found.wait_seconds == now[0] == waited + 0.5
    assert found.wait_seconds == waited or kind == "push_round"
    assert [push.meta.timings.wait for push in told] == [1.5, 1.5], "of a step"


def test_waiting_time_is_shorter_than_the_clients_timeout() -> None:
    timeout = inspect.signature(PSClient).parameters["timeout"].default
    assert timeout >= server_module.WAIT_SECONDS + 5


def test_waiting_for_memory_does_not_shorten_the_time_to_send(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines, receive, take = [], Channel.receive, Loan.take

    def waits_for_seven_seconds(loan: Loan) -> Iterator[Any]:
        loan.waited = 7.0
        yield from take(loan)

    def received(self: Channel, view: memoryview, *, deadline: float | None = None) -> None:
        deadlines.append(deadline)
        receive(self, view)

    monkeypatch.setattr(served.server, "_clock", lambda: 0.0)
    client = served.client()
    monkeypatch.setattr(Channel, "receive", received)
    monkeypatch.setattr(Loan, "take", waits_for_seven_seconds)
    client.hello(MODEL, Copy(lambda: aligned(8)))
    limit = 10 + 32 / MIN_RATE
    assert deadlines.count(limit + 7.0) == 1


def test_connection_closes_after_a_message_sent_in_part() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        channel = Channel(ours, timeout=0.05)
        with pytest.raises(Unreachable):
            channel.send(bytes(64 << 20))
        assert ours.fileno() == -1
