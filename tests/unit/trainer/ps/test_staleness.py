"""Bounded staleness: which workers a push waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from shoal_trainer.contract import Staleness
from shoal_trainer.errors import Fenced
from shoal_trainer.ps.shard import ShardStore
from tests.unit.trainer.ps.shards import MODEL, ONE, Clock, grad, pull_from, push_to, ready


def test_fast_worker_waits_for_a_slow_but_not_a_dead_worker() -> None:
    shard = ready(staleness=Staleness(max=2))
    for slot in (0, 1):
        shard.workers.connect(slot, 0)
        pull_from(shard, slot, grad(0.0))
    for seq in (1, 2):
        shard.workers.wait_admitted(0, seq - 1, 0.0)
        push_to(shard, 0, 0, seq, seq - 1, ONE, grad(0.0))
    passed = threading.Event()

    def third() -> None:
        shard.workers.wait_admitted(0, 2, 30)
        passed.set()

    thread = threading.Thread(target=third)
    thread.start()
    assert not passed.wait(0.05)
    shard.workers.wait_admitted(1, 0, 0.0)  # the slowest worker never waits
    shard.disconnect(1)  # before its push
    assert passed.wait(30)
    thread.join()


def test_worker_that_computes_while_it_pushes_is_waited_for_twice_on_one_version() -> None:
    """Its second gradient on these parameters was begun before the answer to the first one."""
    bound = 4
    shard = ready(staleness=Staleness(max=bound))
    for slot in (0, 1):
        shard.workers.connect(slot, 0)
        pull_from(shard, slot, grad(0.0))
    sent = {0: 0, 1: 0}

    def push(slot: int, base: int) -> bool:
        """Push, if it need not wait."""
        shard.workers._permits.arrive(slot, base)
        admitted = shard.workers._permits.admits(base, shard.history.version, bound)
        if admitted:
            shard.workers.wait_admitted(slot, base, 0.0)
            sent[slot] += 1
            push_to(shard, slot, 0, sent[slot], base, ONE, grad(0.0))
            shard.workers.push_ended(slot)
        else:
            shard.workers._permits._waiting.pop(slot)
        return admitted

    def overtakes() -> int:
        while push(1, shard.history.version):
            pass
        return shard.history.version

    assert overtakes() == bound
    assert push(0, 0)
    assert overtakes() == bound + 1  # not 2 x bound + 1
    assert push(0, 0)
    assert overtakes() == 2 * bound + 1
    assert push(0, bound + 1)


def test_fenced_worker_blocks_no_push() -> None:
    # Its process is suspended: the kernel keeps the connection open.
    shard = ready(staleness=Staleness(max=0))
    for slot in (0, 1):
        shard.workers.connect(slot, 0)
        pull_from(shard, slot, grad(0.0))
    push_to(shard, 0, 0, 1, 0, ONE, grad(0.0))
    shard.workers.fence(1, 0)  # its own join fences earlier incarnations only
    assert not shard.workers._permits.admits(1, shard.history.version, 0)
    shard.workers.fence(1, 1)
    assert shard.workers._permits.admits(1, shard.history.version, 0)


def test_fenced_worker_that_goes_on_pulling_blocks_no_push() -> None:
    """It stalled, its successor trains, and its connection is still open: of it no push comes."""
    shard = ready(staleness=Staleness(max=2))
    for slot in (0, 1):
        shard.workers.connect(slot, 0)
    under_way = shard.pulling(0, 0)
    shard.workers.fence(0, 1)
    with pytest.raises(Fenced):
        shard.run(under_way, grad(0.0))
    with pytest.raises(Fenced):
        shard.pulling(0, 0)
    pull_from(shard, 1, grad(0.0))
    for seq in range(1, 5):
        shard.workers._permits.arrive(1, seq - 1)
        assert shard.workers._permits.admits(seq - 1, shard.history.version, 2)
        push_to(shard, 1, 0, seq, seq - 1, ONE, grad(0.0))


def test_worker_that_blocked_one_push_until_timeout_blocks_no_other() -> None:
    shard = ready(staleness=Staleness(max=0))
    for slot in (0, 1, 2):
        shard.workers.connect(slot, 0)
        pull_from(shard, slot, grad(0.0))
    shard.workers.wait_admitted(0, 0, 0.0)
    push_to(shard, 0, 0, 1, 0, ONE, grad(0.0))
    shard.workers.wait_admitted(0, 1, 0.0)  # waits until the timeout
    assert shard.workers._permits.admits(1, shard.history.version, 0)
    pull_from(shard, 1, grad(0.0))  # the next push waits for it again
    push_to(shard, 0, 0, 2, 1, ONE, grad(0.0))
    assert not shard.workers._permits.admits(2, shard.history.version, 0)


def test_push_after_its_worker_left_is_fenced() -> None:
    # The push waited until its worker left: its positions may have been leased again.
    shard = ready(staleness=Staleness(max=0))
    shard.workers.connect(0, 0)
    shard.workers.leave(0, 0)
    with pytest.raises(Fenced, match="has left"):
        push_to(shard, 0, 0, 1, 0, ONE, grad())
    with pytest.raises(Fenced, match="has left"):
        shard.workers.connect(0, 0)
    assert shard.history.version == 0


def test_idle_worker_blocks_no_push() -> None:
    shard = ready(staleness=Staleness(max=0))
    for slot in (0, 1):
        shard.workers.connect(slot, 0)
        pull_from(shard, slot, grad(0.0))
    push_to(shard, 0, 0, 1, 0, ONE, grad(0.0))
    assert not shard.workers._permits.admits(1, shard.history.version, 0)
    pull_from(shard, 1, grad(0.0), idle=True)  # it evaluates or waits for work
    for seq in (2, 3):
        assert shard.workers._permits.admits(seq - 1, shard.history.version, 0)
        push_to(shard, 0, 0, seq, seq - 1, ONE, grad(0.0))
    assert shard.history.version == 3


@pytest.mark.parametrize(
    "stop_expecting",
    [
        lambda shard: shard.hello(1, 0, MODEL),  # an idle worker's probe
        lambda shard: pull_from(shard, 1, grad(0.0), idle=True),
        lambda shard: shard.disconnect(1),
        lambda shard: shard.workers.fence(1, 1),
        lambda shard: shard.workers.leave(1, 0),
        lambda shard: shard.roll_back(
            shard.copy().model_copy(update={"version": 0})
        ),  # refuses the push afterwards
    ],
    ids=["hello", "idle pull", "disconnect", "fence", "leave", "rollback"],
)
def test_waiting_push_continues_when_the_other_worker_computes_no_gradient(
    stop_expecting: Callable[[ShardStore], object],
) -> None:
    """Shards other than 0 have no timer that would wake the waiting push."""
    shard = ready(staleness=Staleness(max=0))
    for slot in (0, 1):
        shard.workers.connect(slot, 0)
        pull_from(shard, slot, grad(0.0))
    push_to(shard, 0, 0, 1, 0, ONE, grad(0.0))
    passed = threading.Event()

    def second() -> None:
        shard.workers.wait_admitted(0, 1, 30)
        passed.set()

    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    assert not passed.wait(0.05)
    stop_expecting(shard)
    assert passed.wait(10)
    thread.join()


def test_push_that_skips_an_older_version_wakes_the_pushes_that_wait_for_it() -> None:
    shard = ready(staleness=Staleness(max=1))
    for slot in (0, 1):
        shard.workers.connect(slot, 0)
    shard.history.version = 1
    pull_from(shard, 1, grad(0.0))  # worker 1 computes no gradient on this version
    shard.history.version = 2
    pull_from(shard, 0, grad(0.0))
    shard.history.version = 3
    pull_from(shard, 1, grad(0.0))
    passed = threading.Event()

    def first() -> None:
        shard.workers.wait_admitted(0, 2, 30)
        passed.set()

    threads = [threading.Thread(target=first, daemon=True)]
    threads[0].start()
    assert not passed.wait(0.05)
    threads.append(threading.Thread(target=lambda: shard.workers.wait_admitted(1, 3, 30), daemon=True))
    threads[1].start()  # waits for worker 0
    assert passed.wait(10)
    for seq in (1, 2):  # it computed the second one while it pushed the first
        push_to(shard, 0, 0, seq, 2, ONE, grad(0.0))
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_an_older_incarnation_does_not_make_the_late_push_of_a_worker_that_left_acceptable() -> None:
    """0-1 drained while its push waited in the server; a zombie of 0-0 connects before that push is applied."""
    shard = ready()
    shard.workers.connect(0, 1)
    shard.workers.leave(0, 1)
    with pytest.raises(Fenced):
        shard.workers.connect(0, 0)
    with pytest.raises(Fenced, match="has left"):
        push_to(shard, 0, 1, 1, 0, ONE, grad())
    assert shard.history.version == 0


def test_a_gradient_of_lost_versions_is_stale() -> None:
    """After a restart from an older snapshot, an interrupted push names a version that the shard has not reached."""
    weights = []
    shard = ready(on_applied=lambda push: weights.append((push.staleness, push.weight)))
    shard.workers.connect(0, 0)
    push_to(shard, 0, 0, 1, 0, ONE, grad())
    push_to(shard, 0, 0, 2, 10, ONE, grad())
    assert [staleness for staleness, _ in weights] == [0, 9]
    assert weights[1][1] == pytest.approx(weights[0][1] / 9), "it is staler than normal by as much"


def test_a_lower_fence_does_not_replace_a_higher_one() -> None:
    shard = ready()
    shard.workers.fence(0, 5)
    shard.workers.fence(0, 3)
    with pytest.raises(Fenced):
        shard.workers.connect(0, 4)


@pytest.mark.parametrize("arrived", [False, True])
def test_push_says_how_long_a_slower_worker_computed_and_not_how_long_servers_took_for_its_gradient(
    arrived: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a fast worker beside slow ones looks as if the servers, or their link, were full; or they look as if not."""
    clock = Clock()
    shard = ready(staleness=Staleness(max=0), clock=clock)
    workers = shard.workers
    for slot in (0, 1):
        workers.connect(slot, 0)
        pull_from(shard, slot, grad(0.0))
    workers.wait_admitted(0, 0, 0.0)
    push_to(shard, 0, 0, 1, 0, ONE, grad(0.0))
    workers.push_ended(0)
    if arrived:
        workers.wait_admitted(1, 0, 0.0)

    def passes(_seconds: float) -> None:
        clock.now += 3.0
        if not arrived:
            workers.wait_admitted(1, 0, 0.0)
        clock.now += 0.5
        push_to(shard, 1, 0, 1, 0, ONE, grad(0.0))
        workers.push_ended(1)

    monkeypatch.setattr(shard.changed, "wait", passes)
    assert workers.wait_admitted(0, 1, 30.0) == (0.0 if arrived else 3.0)
    assert clock.now == 3.5


def test_worker_that_never_pushes_held_others_up_until_they_gave_it_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    shard = ready(staleness=Staleness(max=0), clock=clock)
    for slot in (0, 1):
        shard.workers.connect(slot, 0)
        pull_from(shard, slot, grad(0.0))
    push_to(shard, 0, 0, 1, 0, ONE, grad(0.0))

    def passes(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(shard.changed, "wait", passes)
    assert shard.workers.wait_admitted(0, 1, 20.0) == 20.0
    shard.workers.push_ended(0)
    assert shard.workers.wait_admitted(0, 1, 20.0) == 0.0
