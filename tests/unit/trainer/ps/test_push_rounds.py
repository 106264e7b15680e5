"""Pushes that wait for other workers, over real sockets."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shoal_trainer.ps import shard_client
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.client import PSClient
from shoal_trainer.ps.pool import PiecePool
from shoal_trainer.security import Credentials
from shoal_trainer.wire.messages import Copy, Push, PushMeta
from tests.unit.trainer.ps.cluster import MODEL, Cluster, N, flat, until

USUAL = 30.0
"""Seconds of a step; no test waits so long."""
PROMPT = 10.0
"""Less than a worker waits that nobody tells that its wait is over."""


def in_step(cluster: Cluster, slots: int) -> None:
    """As if all workers had begun a step together that is nearly over."""
    for store in cluster.stores:
        for slot in range(slots):
            store.workers.rounds._usual[slot] = USUAL
            store.workers.rounds._since[slot] = time.monotonic() - USUAL + 1


def joined(cluster: Cluster, slots: int) -> list[PSClient]:
    """Clients that have pulled the first parameters, in step."""
    clients = [cluster.client(slot) for slot in range(slots)]
    for client in clients:
        client.hello(MODEL, Copy(lambda: flat(0.0)))
    for client in clients:
        client.pull(aligned(N))
    in_step(cluster, slots)
    return clients


def waiting(cluster: Cluster) -> list[int]:
    return [len(store.workers.rounds._waits) for store in cluster.stores]


@pytest.mark.by_day(5)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streams"])
@pytest.mark.parametrize("shards", [1, 3])
def test_workers_get_each_others_pushes(
    credentials: Credentials,
    shards: int,
    streams: bool,
    large: bool,
    tls: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if large:
        monkeypatch.setattr(shard_client, "ASK_BYTES", 8)
    cluster = Cluster(credentials, tls=tls, streams=streams).serve(shards)
    try:
        first, second = joined(cluster, 2)
        out = [aligned(N), aligned(N)]
        with ThreadPoolExecutor(1) as pool:
            for seq, versions in ((1, (0,) * shards), (2, (2,) * shards)):
                early = pool.submit(first.push_round, flat(0.25), out[0], Push(seq, versions, PushMeta(1)))
                until(lambda: waiting(cluster) == [1] * shards)
                assert not early.done()
                late = second.push_round(flat(0.25), out[1], Push(seq, versions, PushMeta(1)))
                assert early.result(PROMPT).versions == late.versions == (2 * seq,) * shards
                assert (early.result().made, late.made) == (2 * seq - 1, 2 * seq)
                assert early.result().staleness(versions[0]) == 0
                assert late.staleness(versions[0]) == 1
                assert np.array_equal(out[0], out[1])
                assert out[0][0] == -0.5 * seq
                in_step(cluster, 2)
        known = [answer.applied for answer in first.pull(out[0]).answers]
        assert known == [{(0, 0): 2, (1, 0): 2}] * shards
    finally:
        cluster.close()


@pytest.mark.by_day(2)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streams"])
@pytest.mark.parametrize("shards", [1, 3])
def test_push_alone_is_applied_once_and_waits_for_nobody(
    credentials: Credentials, shards: int, streams: bool, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(shard_client, "ASK_BYTES", 8)
    cluster = Cluster(credentials, streams=streams).serve(shards)
    try:
        first, _ = joined(cluster, 2)
        for store in cluster.stores:
            monkeypatch.setattr(store.workers, "arrive", None)  # as in a round
            store.workers._bound = 5
            store.workers.pulled(0)
        for _ in range(2):  # a resend
            pushed = first.push(flat(0.25), Push(1, (0,) * shards, PushMeta(1)))
            assert pushed.versions == (1,) * shards
        assert [list(store.workers._permits._pulled[0]) for store in cluster.stores] == [
            [0, 1, 1, 1, 1]
        ] * shards
        out = aligned(N)
        assert first.pull(out, known=(0,) * shards).versions == (1,) * shards
        assert out[0] == -0.25
    finally:
        cluster.close()


def test_shards_may_hear_of_pushes_in_different_orders(cluster: Cluster) -> None:
    """Each has its own round, and a worker pushes to all of them before it waits."""
    cluster.serve(2)
    joined(cluster, 2)
    one, other = (store.workers for store in cluster.stores)
    one.arrive(0, USUAL)
    other.arrive(1, USUAL)
    assert one.waits(0) > 0
    assert other.waits(1) > 0
    one.arrive(1, USUAL)
    other.arrive(0, USUAL)
    assert [workers.waits(slot) for workers in (one, other) for slot in (0, 1)] == [0.0] * 4


@pytest.mark.parametrize("staleness", [None, 0], ids=["unbounded", "bounded"])
def test_push_that_waits_is_applied_and_holds_no_memory_and_no_permit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, staleness: int | None
) -> None:
    cluster.serve(1)
    monkeypatch.setattr(cluster.servers[0], "_pool", PiecePool(limit=0))  # for one message at a time
    first, second = joined(cluster, 2)
    cluster.stores[0].workers._bound = staleness  # now: no gradient of the second one is expected
    other = cluster.client(2)
    other.hello(MODEL)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(first.push_round, flat(0.25), aligned(N), Push(1, (0,), PushMeta(1)))
        until(lambda: waiting(cluster) == [1])
        assert cluster.stores[0].history.version == 1
        pulled = other.pull(aligned(N))
        for seq in (1, 2):
            pulled = other.push_pull(flat(0.25), aligned(N), Push(seq, pulled.versions, PushMeta(1)))
        second.close()
        assert waits.result(PROMPT).versions == (3,)


def test_lost_and_idle_workers_end_the_wait(cluster: Cluster) -> None:
    cluster.serve(1)
    clients = joined(cluster, 3)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(clients[0].push_round, flat(0.25), aligned(N), Push(1, (0,), PushMeta(1)))
        until(lambda: waiting(cluster) == [1])
        clients[1].pull(aligned(N), idle=True)  # evaluates
        assert not waits.done()
        clients[2].close()
        assert waits.result(PROMPT).versions == (1,)


def test_repeated_push_is_not_applied_again(cluster: Cluster) -> None:
    cluster.serve(1)
    (client,) = joined(cluster, 1)
    push, out = Push(1, (0,), PushMeta(1)), aligned(N)
    for _ in range(2):
        assert client.push_round(flat(0.25), out, push).versions == (1,)
        assert out[0] == -0.25
