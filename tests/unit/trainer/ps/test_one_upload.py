"""Of parameters that all workers have, a shard asks for one copy: large ones are gigabytes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.errors import Unreachable
from shoal_trainer.ps import server as server_module
from shoal_trainer.ps import shard_client
from shoal_trainer.ps.recovery import LONGEST_WAIT, Origin, Recovery, Worth
from shoal_trainer.ps.shard import ShardStore, State
from shoal_trainer.wire.messages import AnswerMeta, Copy, Held, Journal, Pulled
from tests.unit.trainer.ps.shards import MODEL, ONE, Clock, N, grad, push_to, ready
from tests.unit.trainer.ps.test_admission import Served

WORKERS = 16


class Lost:
    """A shard that was restored from a snapshot of 16 workers' pushes, which have newer copies."""

    def __init__(self) -> None:
        self.clock = Clock()
        old = ready()
        for slot in range(WORKERS):
            push_to(old, slot, 0, 1, 0, ONE, grad())
        snapshot = old.copy()
        assert snapshot is not None
        self.snapshot = snapshot
        self.shard = ShardStore(0, 1, 1, clock=self.clock)
        self.shard.restore(snapshot)
        for slot in range(WORKERS):
            self.shard.workers.connect(slot, 0)

    def hello(self, slot: int, version: int = 100) -> bool:
        return self.shard.hello(slot, 0, MODEL, Held(version=version)).wants_copy

    def offer(self, slot: int, version: int = 100, floor: int | None = None) -> None:
        journal = Journal(self.snapshot.version if floor is None else floor)
        meta = AnswerMeta(applied={(i, 0): 2 for i in range(WORKERS)}, journal=journal)
        self.shard.offer(slot, 0, grad(5.0), version, meta)


def test_only_one_of_equal_copies_is_asked_for_and_the_shard_is_ready_with_it() -> None:
    lost = Lost()
    assert [lost.hello(slot) for slot in range(WORKERS)] == [True] + [False] * (WORKERS - 1)
    lost.clock.now += 8.0  # gigabytes take this long
    assert lost.shard.state is State.RECOVERING
    lost.offer(0)
    assert (lost.shard.state, lost.shard.history.version) == (State.READY, 100)


def test_next_copy_is_asked_for_if_the_first_one_does_not_come() -> None:
    lost = Lost()
    assert [lost.hello(slot) for slot in range(WORKERS)].count(True) == 1
    lost.clock.now += 8.0
    lost.shard.disconnect(0)
    assert lost.shard.state is State.RECOVERING  # the others say HELLO again soon
    lost.clock.now += 0.5
    assert [lost.hello(slot) for slot in range(1, WORKERS)] == [True] + [False] * (WORKERS - 2)
    lost.offer(1)
    assert (lost.shard.state, lost.shard.history.version) == (State.READY, 100)


def test_next_copy_is_asked_for_if_the_first_one_is_refused() -> None:
    lost = Lost()
    lost.hello(0)
    lost.hello(1, 99)
    lost.offer(0, floor=50)  # its journal has gaps
    assert (lost.shard.state, lost.shard.history.version) == (State.RECOVERING, WORKERS)
    assert lost.hello(1, 99)


def test_newer_copy_is_asked_for_as_well() -> None:
    lost = Lost()
    assert [lost.hello(slot, 100 + slot) for slot in range(3)] == [True] * 3
    lost.shard.disconnect(2)
    lost.offer(0, 100)
    assert lost.shard.state is State.RECOVERING
    lost.offer(1, 101)
    assert lost.shard.history.version == 101


def test_shard_does_not_wait_for_ever_for_copies_that_it_put_off() -> None:
    lost = Lost()
    for slot in range(WORKERS):
        lost.hello(slot)
    lost.shard.disconnect(0)
    lost.clock.now += 5.0
    assert (lost.shard.state, lost.shard.history.version) == (State.READY, WORKERS)


def test_copy_that_is_no_longer_needed_is_not_sent() -> None:
    lost = Lost()
    lost.hello(0, 100)
    lost.hello(1, 101)
    lost.offer(1, 101)
    with pytest.raises(Unreachable, match="as good as"):
        lost.shard.check_wanted(0)
    lost.clock.now += 5.0
    assert (lost.shard.state, lost.shard.history.version) == (State.READY, 101)


@pytest.mark.parametrize("kind", ["copy", "first parameters"])
def test_payload_that_waited_for_memory_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Before the server tells its worker to send it; the connection of a refused one is closed."""
    monkeypatch.setattr(server_module, "BUSY_SECONDS", 0.02)
    monkeypatch.setattr(shard_client, "ASK_BYTES", 8)
    served = Served(tmp_path)
    if kind == "copy":
        served.shard = served.server._shard = ShardStore(0, 1, 2, recovery_seconds=100.0)
    else:
        served.shard = served.server._shard = ShardStore(0, 1, 2, follows=False, large=0, piece=4)
    client, waits = served.client(), threading.Event()

    def none(_: Any) -> None:
        waits.set()

    monkeypatch.setattr(served.server._pool, "_take", none)
    copied = Copy(lambda: np.zeros(N, np.uint16), Pulled((5,), (AnswerMeta(),)))

    def send() -> None:
        client.hello(MODEL, copied if kind == "copy" else Copy(lambda: grad(1.0)))

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        assert waits.wait(30)
        if kind == "copy":
            served.shard.offer(1, 0, grad(7.0), 6, AnswerMeta(applied={(0, 0): 1}))
        else:
            served.shard.offer(0, 0, grad(7.0))
        with pytest.raises(Unreachable, match="as good as"):
            sending.result(30)
    assert served.shard.model is not None
    np.testing.assert_array_equal(served.shard.model.parameters, 7.0)
    served.close()


def large_and_empty(clock: Clock, shards: int = 1) -> list[ShardStore]:
    return [ShardStore(i, shards, 0, clock=clock, large=0, piece=4) for i in range(shards)]


def test_one_worker_initializes_a_large_shard() -> None:
    (shard,) = large_and_empty(clock := Clock())

    def asked(slot: int) -> bool:
        return shard.hello(slot, 0, MODEL, Held()).wants_copy

    for slot in range(4):
        shard.workers.connect(slot, 0)
    assert [asked(slot) for slot in (2, 3, 1)] == [True, False, True]
    with pytest.raises(Unreachable):
        shard.check_wanted(2)
    shard.check_wanted(1)
    assert not asked(0)  # the other one sends its own
    shard.disconnect(1)
    assert asked(2)
    assert not asked(3)
    clock.now += LONGEST_WAIT
    assert asked(3)
    shard.offer(3, 0, grad(5.0))
    assert shard.hello(0, 0, MODEL, Held()).ready


@given(st.data())
def test_every_order_of_hellos_elects_one_worker_for_all_shards(data: st.DataObject) -> None:
    """Workers say HELLO to the shards in turn, again and again, and send once all of them ask for it."""
    shards, workers = 3, 4
    elections = [Recovery(0.75, follows=False) for _ in range(shards)]

    def asks(slot: int, shard: int) -> bool:
        return elections[shard].hello(slot, Worth(origin=Origin.FIRST), 0.0, whole=False)

    at = dict.fromkeys(range(workers), 0)
    asked: dict[int, list[bool]] = {slot: [] for slot in range(workers)}
    for _ in range(300):
        slot = data.draw(st.integers(0, workers - 1))
        asked[slot].append(asks(slot, at[slot]))
        at[slot] += 1
        if at[slot] == shards:
            if all(asked[slot]):
                return
            at[slot], asked[slot] = 0, []
    for slot in [slot for slot in range(workers) for _ in range(2)]:  # a fair end
        asked[slot] = [asks(slot, shard) for shard in range(shards)]
    assert any(all(answers) for answers in asked.values()), "nobody sends"
