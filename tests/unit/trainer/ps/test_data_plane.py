"""Client and server over real sockets: several shards, both encodings, TLS, and lost servers."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from shoal_trainer.errors import Fenced, Unreachable, UserError
from shoal_trainer.ps import pool as pool_module
from shoal_trainer.ps import server as server_module
from shoal_trainer.ps import shard_client
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.client import PSClient
from shoal_trainer.ps.coding import coded, decode, encode
from shoal_trainer.ps.damping import Damped
from shoal_trainer.ps.pool import PiecePool
from shoal_trainer.ps.shard_client import ShardClient
from shoal_trainer.security import Credentials
from shoal_trainer.snapshot.manifest import Manifest
from shoal_trainer.snapshot.storage import open_storage
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.wire import header
from shoal_trainer.wire.messages import (
    AnswerMeta,
    Copy,
    Held,
    OptimizerConfig,
    Progress,
    Pulled,
    Push,
    PushMeta,
    Schedule,
    ShardWelcome,
)
from tests.unit.trainer.ps.cluster import MODEL, PIECE, Cluster, N, flat, until


@pytest.mark.by_day(5)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streams"])
@pytest.mark.parametrize("shards", [1, 3])
def test_worker_trains_with_every_encoding(
    credentials: Credentials,
    shards: int,
    streams: bool,
    dtype: Any,
    tls: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(credentials, tls=tls, streams=streams).serve(shards)
    if streams:
        ask_always(monkeypatch)
    client, out = cluster.client(dtype=dtype), aligned(N)
    start = np.linspace(-1, 1, N, dtype=np.float32)
    assert not client.hello(MODEL).ready
    welcome = client.hello(MODEL, Copy(lambda: start))
    assert welcome.ready
    assert len(welcome.shards) == shards
    pulled = client.pull(out)
    np.testing.assert_allclose(out, start, rtol=0 if dtype == "fp32" else 2**-8)
    for seq in range(1, 4):
        push = Push(seq, pulled.versions, PushMeta(1, progress=(Progress(0, -1, seq - 1, seq),)))
        pulled = client.push_pull(flat(0.25), out, push)
    expected = start + np.where(np.arange(N) < MODEL.parameters, -0.75, 0.75).astype(np.float32)
    np.testing.assert_allclose(out, expected, rtol=0 if dtype == "fp32" else 2**-8, atol=1e-6)
    assert pulled.versions == (3,) * shards
    assert [answer.applied for answer in pulled.answers] == [{}] * shards  # the journal tells it
    assert pulled.samples == 3
    assert pulled.filled == pytest.approx(1 - 0.9**3, abs=1e-3)
    assert [answer.applied for answer in client.pull(out).answers] == [{(0, 0): 3}] * shards
    cluster.close()


class Arriving:
    """An update in the wire's format that an accelerator is still giving, in uneven pieces.

    `before_last` is called before the last one is given.
    """

    def __init__(self, values: Any, before_last: Callable[[], None] = lambda: None) -> None:
        self.size, self.shape, self.dtype, self._values = values.size, values.shape, values.dtype, values
        self._before_last = before_last

    def parts(self, low: int, high: int) -> Iterator[tuple[slice, Any]]:
        bounds = [low, *range(low - low % 7001 + 7001, high, 7001), high]
        for a, b in pairwise(bounds):
            if b == self.size:
                self._before_last()
            yield slice(a, b), self._values[a:b]


@pytest.mark.by_day(5)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streams"])
@pytest.mark.parametrize("shards", [1, 3])
def test_update_in_pieces_is_that_of_one_array(
    credentials: Credentials,
    shards: int,
    streams: bool,
    dtype: Any,
    tls: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(credentials, tls=tls, streams=streams).serve(shards)
    if streams:
        ask_always(monkeypatch)
    client, found = cluster.client(dtype="bf16" if dtype == np.uint16 else "fp32"), []
    client.hello(MODEL, Copy(lambda: flat(0.0)))
    update = coded(N, MODEL.parameters, dtype)
    encode(np.linspace(-1, 1, N, dtype=np.float32), update, MODEL.parameters)
    both: tuple[Any, ...] = update, Arriving(update)
    for seq, given in enumerate(both, start=1):
        out = coded(N, MODEL.parameters, dtype)
        client.push_pull(given, out, Push(seq, (seq - 1,) * shards, PushMeta(1)))
        found.append(out)
    values = [aligned(N) for _ in found]
    for array, into in zip(found, values, strict=True):
        decode(array, into, MODEL.parameters)
    np.testing.assert_allclose(values[1], 2 * values[0], rtol=2**-7, atol=1e-5)
    assert np.abs(values[0]).max() > 0.9
    cluster.close()


def test_update_is_sent_as_it_arrives(credentials: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_always(monkeypatch)
    cluster = Cluster(credentials, streams=True).serve()
    client, out = cluster.client(dtype="fp32"), aligned(N)
    client.hello(MODEL, Copy(lambda: flat(0.0)))
    pulled = client.pull(out)

    def applied() -> bool:
        return [push.pieces for push in cluster.stores[0].history.begun()] == [N // PIECE - 1]

    update = Arriving(flat(1.0), before_last=lambda: until(applied))
    client.push_pull(update, out, Push(1, pulled.versions, PushMeta(1)))
    np.testing.assert_array_equal(out[: MODEL.parameters], -1)
    cluster.close()


def ask_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients ask before they send a payload, as if it were large."""
    monkeypatch.setattr(shard_client, "ASK_BYTES", 0)


@pytest.fixture
def one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers have memory for one message, and requests are large."""
    monkeypatch.setattr(pool_module, "PIECE_BYTES", 1 << 14)
    monkeypatch.setattr(server_module, "PiecePool", lambda memory, clock: PiecePool(0, clock=clock))  # noqa: ARG005
    monkeypatch.setattr(pool_module, "MODEL_SHARE", 0.0)
    ask_always(monkeypatch)


@pytest.mark.usefixtures("one_message")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_workers_share_the_memory_of_one_message(credentials: Credentials, shards: int, dtype: Any) -> None:
    cluster = Cluster(credentials).serve(shards)
    for store in cluster.stores:
        store.damping.apply = lambda *_: Damped(1.0, 1.0)  # type: ignore[method-assign]  # the sum is checked
    clients = [cluster.client(slot=slot, dtype=dtype) for slot in range(4)]
    for client in clients:
        client.hello(MODEL, Copy(lambda: flat(0.0)))

    def train(client: PSClient) -> None:
        out = aligned(N)
        pulled = client.pull(out)
        for seq in range(1, 11):
            pulled = client.push_pull(flat(-0.25), out, Push(seq, pulled.versions, PushMeta(1)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(train, clients))
    message = N * (2 if dtype == "bf16" else 4) / shards
    for store, server in zip(cluster.stores, cluster.servers, strict=True):
        assert (store.history.version, store.history.contents.last((3, 0))) == (40, 10)
        assert 0.8 * message <= server._pool.made <= 1.2 * message  # shards differ by some thousand values
    out = aligned(N)
    clients[0].pull(out)
    np.testing.assert_array_equal(out[: MODEL.parameters], 10)
    cluster.close()


def test_answer_of_a_large_push_is_read_while_it_is_sent(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else both would wait: the server for the client to read, the client for the server."""
    ask_always(monkeypatch)
    cluster = Cluster(credentials, streams=True).serve()
    client, out, read = cluster.client(), aligned(N), threading.Event()
    client.hello(MODEL, Copy(lambda: flat(0.0)))
    pulled = client.pull(out)
    receive, send = ShardClient.receive_payload, ShardClient.send_payload

    def sends(shard: ShardClient, payload: Any) -> None:
        send(shard, payload[:PIECE])
        assert read.wait(20)  # the answer to the first piece, with the rest of the push unsent
        send(shard, payload[PIECE:])

    def receives(shard: ShardClient, target: Any) -> None:
        receive(shard, target.part(0, PIECE))
        read.set()
        receive(shard, target.part(PIECE, target.size))

    monkeypatch.setattr(ShardClient, "send_payload", sends)
    monkeypatch.setattr(ShardClient, "receive_payload", receives)
    client.push_pull(flat(1.0), out, Push(1, pulled.versions, PushMeta(1)))
    np.testing.assert_array_equal(out[: MODEL.parameters], -1)
    cluster.close()


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streams"])
@pytest.mark.parametrize("kind", ["push_pull", "push_round"])
@pytest.mark.parametrize("ahead", [0.0, 2.0])
def test_schedule_that_cannot_be_evaluated_ends_the_job_with_the_reason(
    credentials: Credentials, streams: bool, kind: str, ahead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amid a payload nothing could tell it: the worker would take the server for lost, and come again for ever."""
    ask_always(monkeypatch)
    restarts = {"initial_learning_rate": 0.1, "first_decay_steps": 2, "t_mul": 0.5}
    rate = Schedule(name="CosineDecayRestarts", config=restarts)
    model = MODEL.model_copy(
        update={"optimizer": OptimizerConfig(learning_rate=rate, momentum=0.9, batch_size=1)}
    )
    cluster = Cluster(credentials, streams=streams).serve()
    client, out = cluster.client(), aligned(N)
    client.hello(model, Copy(lambda: flat(0.0)))
    versions = client.pull(out).versions
    with pytest.raises(UserError, match="the learning-rate schedule CosineDecayRestarts cannot be evaluated"):
        for seq in range(1, 9):
            versions = getattr(client, kind)(flat(1.0), out, Push(seq, versions, PushMeta(1), ahead)).versions
    assert versions[0] >= 3
    cluster.close()


@pytest.mark.parametrize("reason", [Unreachable, Fenced, UserError])
def test_failed_push_leaves_the_buffer_alone_and_gives_the_reason(
    credentials: Credentials, reason: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_always(monkeypatch)
    cluster = Cluster(credentials, streams=True).serve()
    client, out, read = cluster.client(), aligned(N), threading.Event()
    client.hello(MODEL, Copy(lambda: flat(0.0)))
    pulled = client.pull(out)

    def fails(_shard: ShardClient, _payload: Any) -> None:
        raise Unreachable("the server closed the connection")

    def receives(shard: ShardClient, *_arguments: Any) -> Any:
        until(lambda: shard._link is None)  # the failed push has closed all connections
        out[:] = 7
        read.set()
        raise reason("the server's reason")

    monkeypatch.setattr(ShardClient, "send_payload", fails)
    monkeypatch.setattr(ShardClient, "receive", receives)
    with pytest.raises(reason, match="server"):
        client.push_pull(flat(1.0), out, Push(1, pulled.versions, PushMeta(1)))
    assert read.is_set()
    cluster.close()


def test_interrupted_push_goes_on_where_it_was(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_always(monkeypatch)
    cluster = Cluster(credentials, streams=True).serve()
    client, other, out = cluster.client(0), cluster.client(1), aligned(N)
    client.hello(MODEL, Copy(lambda: flat(0.0)))
    pulled = client.pull(out)
    send = ShardClient.send_payload

    def breaks(shard: ShardClient, payload: Any) -> None:
        send(shard, payload[: 3 * PIECE])
        until(lambda: [one.pieces for one in cluster.stores[0].history.begun()] == [3])
        raise Unreachable("the link broke")

    monkeypatch.setattr(ShardClient, "send_payload", breaks)
    push = Push(1, pulled.versions, PushMeta(1, progress=(Progress(0, -1, 0, 1),)))
    with pytest.raises(Unreachable):
        client.push_pull(flat(1.0), out, push)
    monkeypatch.setattr(ShardClient, "send_payload", send)
    other.hello(MODEL)
    between = other.pull(out)
    assert set(out[: 3 * PIECE]) == {-1}
    assert set(out[3 * PIECE :]) == {0}
    assert between.answers[0].begun[0][:4] == (0, 0, 1, 3)
    assert between.versions == (0,)
    client.hello(MODEL)
    again = client.push_pull(flat(1.0), out, push)
    assert (again.versions, again.answers[0].begun) == ((1,), ())
    np.testing.assert_array_equal(out[: MODEL.parameters], -1)
    cluster.close()


def test_idle_pull_blocks_no_push(cluster: Cluster) -> None:
    cluster.serve()
    store = cluster.stores[0]
    store.workers._bound = 0
    busy, idle = cluster.client(slot=0), cluster.client(slot=1)
    for client in (busy, idle):
        client.hello(MODEL, Copy(lambda: flat(0.0)))
    for client in (busy, idle):
        client.pull(aligned(N))
    store.workers._permits.arrive(0, 1)
    assert not store.workers._permits.admits(1, 1, 0)
    idle.pull(aligned(N), idle=True)
    assert store.workers._permits.admits(1, 1, 0)


def test_bf16_buffers_are_exchanged_directly(cluster: Cluster) -> None:
    client = cluster.serve(2).client()
    client.hello(MODEL, Copy(lambda: flat(1.5)))
    out = coded(N, MODEL.parameters, np.uint16)
    client.pull(out)
    assert set(out[: MODEL.parameters]) == {0x3FC0}
    assert set(out[MODEL.parameters :].view(np.float32)) == {1.5}
    client.push_pull(out.copy(), out, Push(1, (0, 0), PushMeta(1)))
    np.testing.assert_array_equal(out[: MODEL.parameters], 0)


def test_live_workers_follow_joins_and_leaves(cluster: Cluster) -> None:
    cluster.serve(2)
    first, out = cluster.client(0), aligned(N)
    first.hello(MODEL, Copy(lambda: flat(0.0)))
    second = cluster.client(1)
    assert second.hello(MODEL).ready
    assert second.pull(out).live_workers == 2
    second.push_pull(flat(1.0), out, Push(1, (0, 0), PushMeta(1)))
    second.close()
    until(lambda: cluster.stores[0].workers.live == 1)
    first.push_pull(flat(1.0), out, Push(1, (1, 1), PushMeta(1)))
    assert first.pull(out).answers[0].applied == {(0, 0): 1, (1, 0): 1}
    np.testing.assert_array_equal(out[:10], -2)


def test_replaced_worker_is_fenced(cluster: Cluster) -> None:
    cluster.serve(1)
    old, new, out = cluster.client(0, 0), cluster.client(0, 1), aligned(N)
    old.hello(MODEL, Copy(lambda: flat(0.0)))
    new.hello(MODEL)
    with pytest.raises(Fenced):
        old.push_pull(flat(1.0), out, Push(1, (0,), PushMeta(1)))
    with pytest.raises(Fenced):
        old.hello(MODEL)
    new.pull(out)
    np.testing.assert_array_equal(out, 0)


def test_resend_over_a_new_connection_is_applied_once(cluster: Cluster) -> None:
    cluster.serve(2)
    client, out = cluster.client(), aligned(N)
    client.hello(MODEL, Copy(lambda: flat(0.0)))
    push = Push(1, (0, 0), PushMeta(1))
    client.push_pull(flat(1.0), out, push)
    before = client.hello(MODEL)
    assert [shard.last_seq for shard in before.shards] == [1, 1]
    pulled = client.push_pull(flat(1.0), out, push)
    assert pulled.versions == (1, 1)
    np.testing.assert_array_equal(out[:10], -1)


def test_different_model_over_the_wire_is_a_user_error(cluster: Cluster) -> None:
    cluster.serve(1)
    cluster.client(0).hello(MODEL)
    other = MODEL.model_copy(update={"fingerprint": "0" * 64})
    with pytest.raises(UserError, match="build the same model"):
        cluster.client(1).hello(other)


def test_worker_survives_the_loss_of_all_parameter_servers(cluster: Cluster, tmp_path: Path) -> None:
    """Only the push in flight is lost, although the snapshot is old."""
    store = SnapshotStore(open_storage(tmp_path.as_uri()))
    cluster.serve(2)
    client, out = cluster.client(dtype="bf16"), aligned(N)
    known = client.hello(MODEL, Copy(lambda: flat(0.0)))
    pulled = client.pull(out)
    for seq in range(1, 11):
        pulled = client.push_pull(flat(0.125), out, Push(seq, pulled.versions, PushMeta(1)))
        if seq == 4:
            files = [store.write_shard(1, 0, copy) for s in cluster.stores if (copy := s.copy())]
            store.publish(Manifest(number=1, epoch=0, run="uid", shards=tuple(files), model=MODEL))
    ports = cluster.stop()
    with pytest.raises(Unreachable):
        client.push_pull(flat(0.125), aligned(N), Push(11, pulled.versions, PushMeta(1)))
    with pytest.raises(Unreachable):
        client.hello(MODEL)
    cluster.serve(2, epoch=1, ports=ports)
    for index, shard in enumerate(cluster.stores):
        found = store.load_newest(index, 2)
        assert found is not None
        shard.restore(found[1])
        assert shard.history.version == 4
    known_pushes = tuple(answer._replace(applied={(0, 0): 10}) for answer in pulled.answers)
    welcome = client.hello(MODEL, Copy(out.copy, replace(pulled, answers=known_pushes)))
    assert welcome.boots != known.boots
    assert [shard.version for shard in welcome.shards] == [10, 10]
    assert [shard.last_seq for shard in welcome.shards] == [10, 10]
    pulled = client.push_pull(flat(0.125), out, Push(11, pulled.versions, PushMeta(1)))
    assert pulled.versions == (11, 11)
    np.testing.assert_allclose(out[:10], -1.375, rtol=2**-8)


@pytest.mark.parametrize("lost", [0, 1])
def test_shard_gets_the_copy_while_another_is_unreachable(
    cluster: Cluster, tmp_path: Path, lost: int
) -> None:
    # Both were lost with their node: the first one to restart waits for copies only briefly.
    store = SnapshotStore(open_storage(tmp_path.as_uri()))
    cluster.serve(2)
    client, out = cluster.client(dtype="bf16"), aligned(N)
    client.hello(MODEL, Copy(lambda: flat(0.0)))
    pulled = client.push_pull(flat(0.125), out, Push(1, client.pull(out).versions, PushMeta(1)))
    files = [store.write_shard(1, 0, copy) for s in cluster.stores if (copy := s.copy())]
    store.publish(Manifest(number=1, epoch=0, run="uid", shards=tuple(files), model=MODEL))
    pulled = client.push_pull(flat(0.125), out, Push(2, pulled.versions, PushMeta(1)))
    cluster.serve(2, epoch=1, ports=cluster.stop())
    for index, shard in enumerate(cluster.stores):
        found = store.load_newest(index, 2)
        assert found is not None
        shard.restore(found[1])
    cluster.servers[lost].close()
    with pytest.raises(Unreachable):
        client.hello(MODEL, Copy(out.copy, pulled))
    assert [shard.history.version for shard in cluster.stores] == ([1, 2] if lost == 0 else [2, 1])


def test_a_shard_hears_of_a_worker_that_still_connects_to_another(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose node is lost answers after seconds, or not: the others wait for copies only briefly."""
    cluster.serve(2)
    connect, heard = ShardClient.connect, threading.Event()
    hello = cluster.stores[1].hello

    def greeted(*arguments: Any) -> ShardWelcome:
        heard.set()
        return hello(*arguments)

    def connects(self: ShardClient) -> None:
        if self.index == 0 and not heard.wait(5):
            raise Unreachable("shard 1 has heard of nobody")
        connect(self)

    monkeypatch.setattr(cluster.stores[1], "hello", greeted)
    monkeypatch.setattr(ShardClient, "connect", connects)
    assert cluster.client().hello(MODEL, Copy(lambda: flat(2.0))).ready


def test_a_shard_gets_the_copy_before_another_has_answered(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for what it has asked for, and another one may hang."""
    cluster.serve(2, epoch=1)
    connect, offered = ShardClient.connect, threading.Event()
    offer = cluster.stores[1].offer

    def takes(*arguments: Any, **more: Any) -> ShardWelcome:
        offered.set()
        return offer(*arguments, **more)

    def connects(self: ShardClient) -> None:
        if self.index == 0 and not offered.wait(1):
            raise Unreachable("shard 1 has got nothing")
        connect(self)

    monkeypatch.setattr(cluster.stores[1], "offer", takes)
    monkeypatch.setattr(ShardClient, "connect", connects)
    copied = Copy(lambda: flat(2.0), Pulled((5, 5), (AnswerMeta(), AnswerMeta())))
    cluster.client().hello(MODEL, copied)
    assert [shard.history.version for shard in cluster.stores] == [5, 5]


@pytest.mark.parametrize("held", [np.float32, np.uint16], ids=["decoded", "as sent"])
def test_a_copy_is_sent_as_it_came_and_the_snapshots_precise_values_are_kept(
    cluster: Cluster, held: Any
) -> None:
    third, new = np.float32(1 / 3), np.float32(0.25)
    cluster.serve(1)
    client, out = cluster.client(dtype="bf16"), coded(N, MODEL.parameters, held)
    client.hello(MODEL, Copy(lambda: flat(float(third))))
    snapshot = cluster.stores[0].copy()
    assert snapshot is not None
    update = flat(0.0)
    update[:10] = third - new
    pulled = client.push_pull(update, out, Push(1, client.pull(out).versions, PushMeta(1)))
    cluster.serve(1, epoch=1, ports=cluster.stop())
    cluster.stores[0].restore(snapshot)
    client.hello(MODEL, Copy(lambda: out, pulled))
    model = cluster.stores[0].model
    assert model is not None
    assert cluster.stores[0].history.version == 1
    np.testing.assert_allclose(model.parameters[:10], new, rtol=2**-8)
    assert set(model.parameters[10:]) == {third}


def test_first_parameters_are_made_once_and_only_if_a_shard_asks_for_them(cluster: Cluster) -> None:
    made: list[int] = []

    def first() -> np.ndarray:
        made.append(1)
        return flat(2.0)

    cluster.serve(3)
    for slot in (0, 1):
        assert cluster.client(slot).hello(MODEL, Copy(first)).ready
    assert len(made) == 1


def test_first_parameters_are_one_workers_for_all_shards(cluster: Cluster) -> None:
    """The lower slot's, although the other one was the first at a shard."""
    cluster.serve(2)
    assert cluster.stores[1].hello(0, 0, MODEL, Held()).wants_copy
    assert not any(shard.ready for shard in cluster.client(1).hello(MODEL, Copy(lambda: flat(2.0))).shards)
    assert cluster.client(0).hello(MODEL, Copy(lambda: flat(1.0))).ready
    for shard in cluster.stores:
        assert shard.model is not None
        np.testing.assert_array_equal(shard.model.parameters, 1.0)


def test_client_rejects_an_older_server(cluster: Cluster) -> None:
    cluster.serve(1, epoch=3)
    client = cluster.client()
    client.hello(MODEL)
    superseded: list[int] = []
    cluster.serve(1, epoch=2, ports=cluster.stop(), on_superseded=superseded.append)
    with pytest.raises(Unreachable, match="older parameter server"):
        client.hello(MODEL)
    until(lambda: superseded == [3])


def of_another_version(version: int) -> ModuleType:
    """The header's module as an image of another version has it."""
    spec = importlib.util.find_spec("shoal_trainer.wire.header")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    same = ("Codec", "Op", "_CODECS", "_OPS")
    module.__dict__.update({name: getattr(header, name) for name in same}, VERSION=version)
    module.encode.__defaults__ = (version,)
    return module


def test_peers_of_another_version_are_told_so_in_their_own(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.serve()
    monkeypatch.setattr(shard_client, "header", of_another_version(99))
    with pytest.raises(
        Unreachable, match=r"parameter server 0: the peer uses version 99 .* Suspend the job, name the images"
    ):
        cluster.client().hello(MODEL)
