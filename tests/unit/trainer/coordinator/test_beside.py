"""What passes beside training steps is counted in samples, by epoch: not what comes after the last step."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from shoal_trainer.contract import BesideSums, StopAfter
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.protocol import Heartbeat
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.wire.messages import Progress, PushMeta, Timings
from tests.unit.trainer.coordinator.bench import Bench
from tests.unit.trainer.ps.shards import push_to

HALF_A_SECOND = Timings(0.5, 0.4, 0.1, 0.1, 0.0)


def timed(bench: Bench, slot: int) -> None:
    """A push with times: 2 samples in 0.5 s are 4 samples/s."""
    bench.seq[slot, 0] = seq = bench.seq.get((slot, 0), 0) + 1
    meta = PushMeta(samples=2, loss=0.5, timings=HALF_A_SECOND, progress=(Progress(0, -1, 0, 2),))
    push_to(bench.shard, slot, 0, seq, bench.shard.history.version, meta, aligned(4), delta=True)


def test_sums_are_added_to_and_compared() -> None:
    sums = BesideSums(tasks=300.0).plus(epochs=1, others=2, waits=50.0).plus(epochs=1, waits=20.0)
    assert sums == BesideSums(epochs=2, others=2, tasks=300.0, waits=70.0)
    assert sums.since(BesideSums(epochs=1, tasks=100.0)) == BesideSums(
        epochs=1, others=2, tasks=200.0, waits=70.0
    )


def test_heartbeats_carry_sums_of_which_each_second_counts_once() -> None:
    bench = Bench(stop=StopAfter(epochs=3))
    for slot in (0, 1):
        bench.join(slot)
        timed(bench, slot)
        bench.coordinator.heartbeat(Heartbeat(slot=slot, incarnation=0))
    for seconds in (1.0, 3.0, 3.0):
        bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0, task_seconds=seconds))
    bench.coordinator.heartbeat(Heartbeat(slot=1, incarnation=0, wait_seconds=0.25))
    status = report.status(bench.coordinator)
    assert (status.beside.tasks, status.beside.waits) == (12.0, 1.0)
    assert [worker.beside_seconds for worker in status.workers] == [3.0, 0.25]


@pytest.mark.parametrize("first", ["heartbeat", "push"])
def test_seconds_from_before_a_restart_of_the_server_are_not_counted_again(first: str) -> None:
    """In the new process its worker has a rate as soon as it pushes, and its sums are of hours."""
    bench = Bench(stop=StopAfter(epochs=3), workers=1)
    if first == "push":
        timed(bench, 0)
    for seconds in (5000.0, 5003.0):
        bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0, task_seconds=seconds))
        timed(bench, 0)
    assert report.status(bench.coordinator).beside.tasks == 12.0


def test_a_worker_that_never_pushed_costs_no_samples() -> None:
    bench = Bench(stop=StopAfter(epochs=3), workers=1)
    bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0, wait_seconds=60.0))
    assert report.status(bench.coordinator).beside == BesideSums()


def test_waits_of_a_worker_that_never_pushed_count_at_the_mean_rate() -> None:
    bench = Bench(stop=StopAfter(epochs=3))
    for slot in (0, 1):
        bench.join(slot)
    timed(bench, 0)
    bench.coordinator.tick()
    for seconds in (0.0, 5.0):
        bench.coordinator.heartbeat(Heartbeat(slot=1, incarnation=0, wait_seconds=seconds))
    assert report.status(bench.coordinator).beside.waits == 20.0


def test_epochs_count_but_for_the_last_one_whose_tasks_hold_no_step_back() -> None:
    bench = Bench(stop=StopAfter(epochs=3), validation=True, workers=1)
    timed(bench, 0)
    bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0))
    for _ in range(3):
        while (work := bench.ask(0)).kind == "data":
            bench.finish(0, work.lease)
        if report.status(bench.coordinator).epoch < 3:
            seconds = float(report.status(bench.coordinator).epoch)
            bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0, task_seconds=seconds))
        bench.coordinator.record.tasks.done(work.token, {}, bench.now)
    seen = report.status(bench.coordinator).beside
    bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0, task_seconds=99.0, wait_seconds=0.0))
    assert report.status(bench.coordinator).beside == seen
    assert (seen.epochs, seen.others) == (2, 0)
    assert seen.tasks == 8.0  # two seconds at 4 samples/s


@pytest.mark.parametrize("seconds", [-1.0, 1e300, float("inf"), float("nan")])
@pytest.mark.parametrize("field", ["task_seconds", "wait_seconds"])
def test_seconds_that_no_worker_can_have_spent_are_refused(field, seconds):
    with pytest.raises(ValidationError):
        Heartbeat(slot=0, incarnation=0, **{field: seconds})


def since_push(bench: Bench) -> float:
    return report.status(bench.coordinator).workers[0].last_push_seconds


def test_time_since_the_last_push_is_of_training_only() -> None:
    """A speed is of training: its reader need not know which of it a worker spent beside."""
    bench = Bench(stop=StopAfter(epochs=3), workers=1)
    bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0, wait_seconds=7.0))
    timed(bench, 0)
    bench.now += 42.0
    bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0, task_seconds=30.0, wait_seconds=17.0))
    assert since_push(bench) == pytest.approx(2.0)
    timed(bench, 0)
    assert since_push(bench) == 0.0


def test_hours_beside_before_a_restart_of_the_server_are_none_since_the_push() -> None:
    bench = Bench(stop=StopAfter(epochs=3), workers=1)
    timed(bench, 0)
    bench.now += 2.0
    bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0, task_seconds=5000.0))
    assert since_push(bench) == pytest.approx(2.0)
