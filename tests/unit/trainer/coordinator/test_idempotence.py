"""Requests that arrive again, and work that moved to another worker."""

import pytest

from shoal_trainer.coordinator.protocol import Leave, TaskDone
from shoal_trainer.errors import Fenced, Unreachable
from tests.unit.trainer.coordinator.bench import Bench


def test_task_of_a_lost_worker_moves_to_another():
    bench = Bench()
    for slot in (0, 1):
        bench.join(slot)
    first = bench.train(0)
    assert bench.ask(1).kind == "idle"
    bench.coordinator.leave(Leave(slot=0, incarnation=0))
    second = bench.ask(1)
    assert (second.task, second.token == first.token) == ("export", False)
    assert bench.coordinator.task_done(TaskDone(slot=1, incarnation=0, token=first.token)) is None


def test_repeated_request_gets_the_same_work():
    bench = Bench(workers=1)
    first = bench.ask(0, number=1)
    assert bench.ask(0, number=1) == first
    assert len(bench.coordinator.record.ledger.leases) == 1
    second = bench.ask(0, number=2)
    assert second.lease.token != first.lease.token
    bench.finish(0, first.lease)
    bench.finish(0, second.lease)
    number = 3
    while (work := bench.ask(0, number=number)).kind == "data":
        bench.finish(0, work.lease)
        number += 1
    assert work.task == "export"
    assert bench.ask(0, number=number) == work
    assert bench.ask(0, number=number + 1).kind == "idle"


def test_repeated_request_does_not_return_reassigned_work():
    bench = Bench(workers=1)
    bench.join(1)
    work = bench.ask(0, number=1)
    bench.coordinator.leave(Leave(slot=0, incarnation=0))
    assert bench.ask(1, number=1).lease.start == work.lease.start
    assert bench.ask(0, number=1).kind == "idle"


def test_overtaken_request_is_not_assigned_work():
    """The worker has read the answer to its next request, so it would never learn of the lease."""
    bench = Bench(workers=1)
    first = bench.ask(0, number=1)
    bench.finish(0, first.lease)
    assert bench.ask(0, number=1).kind == "idle"
    second = bench.ask(0, number=2)
    assert bench.ask(0, number=1).kind == "idle"
    assert bench.ask(0, number=2) == second
    assert len(bench.coordinator.record.ledger.leases) == 1


def test_worker_that_left_gets_no_work():
    bench = Bench(workers=1)
    bench.coordinator.leave(Leave(slot=0, incarnation=0))
    assert bench.ask(0).kind == "idle"
    with pytest.raises(Fenced, match="has left"):
        bench.join(0)
    assert bench.ask(0).kind == "idle"


def test_repeated_position_is_counted_in_its_range():
    bench = Bench(workers=1)
    lease = bench.ask(0).lease
    bench.push(0, lease, lease.stop)
    bench.push(0, lease, lease.stop)
    counters = bench.coordinator.record.counters
    assert (counters.repeated, counters.steps) == (2, 2)
    assert counters.repeated_ranges == {(0, lease.start // 2)}


def test_overtaken_request_to_join_renews_no_lease():
    """Its leases may be done, and the worker would not learn their new tokens."""
    old = Bench(workers=1)
    held = old.ask(0).lease
    new = old.successor()
    new.join(0, number=2)
    with pytest.raises(Unreachable, match="another request to join"):
        new.join(0, leases=(held,), number=1)
    assert len(new.join(0, leases=(held,), number=3).renamed) == 1
