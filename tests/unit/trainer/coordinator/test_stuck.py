"""A worker that reads nothing of what it leased, or is cut off from a server, while others are idle, gives it up."""

import contextlib

import pytest

from shoal_trainer.contract import StopAfter, WorkerState
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.protocol import Heartbeat
from shoal_trainer.coordinator.stuck import FACTOR, FIRST_SECONDS, LEAST_SECONDS, TOLD_SECONDS
from shoal_trainer.errors import Fenced
from tests.unit.trainer.coordinator.bench import Bench


def passes(bench, seconds, reading=(), since=0.0, slots=(0, 1)):
    """So many seconds, in which these slots send heartbeats; `reading`: those that read nothing since `since`."""
    for _ in range(round(seconds)):
        bench.now += 1.0
        for slot in slots:
            waited = bench.now - since if slot in reading else 0.0
            bench.coordinator.heartbeat(Heartbeat(slot=slot, incarnation=0, reading_seconds=waited))
        bench.coordinator.tick()


def held_up(workers=2):
    """Worker 0 holds the last lease and reads nothing from now on; the others have nothing to do."""
    bench = Bench()
    for slot in range(workers):
        bench.join(slot)
    held = bench.ask(0).lease
    while (work := bench.ask(1)).kind == "data":
        bench.finish(1, work.lease)
    return bench, held


def status(bench):
    return report.status(bench.coordinator)


def test_its_ranges_go_to_an_idle_worker():
    bench, held = held_up()
    passes(bench, LEAST_SECONDS, reading=[0])
    assert bench.ask(1).kind == "idle"
    assert status(bench).leases_taken_back == 0
    passes(bench, 1, reading=[0])
    taken = bench.ask(1)
    assert (taken.lease.epoch, taken.lease.start, taken.lease.stop) == (held.epoch, held.start, held.stop)
    assert status(bench).leases_taken_back == 1
    assert (
        status(bench).message
        == "worker 0-0 read nothing for 601 s while others were idle: its ranges went to others"
    )
    assert status(bench).workers[0].state is WorkerState.FENCED
    with pytest.raises(Fenced):
        bench.push(0, held, held.stop)
    with pytest.raises(Fenced, match="read nothing for 601 s"):
        bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0))
    bench.finish(1, taken.lease)
    assert bench.train(1).task == "export"
    assert (status(bench).data.repeated, bench.shard.history.samples) == (0, 8)
    assert report.succeeded(bench.coordinator).message == "all epochs are complete"
    passes(bench, TOLD_SECONDS + 1, slots=[1])
    assert status(bench).message == ""


def test_while_others_have_work_nothing_is_taken():
    bench = Bench(stop=StopAfter(epochs=50))
    for slot in (0, 1):
        bench.join(slot)
    bench.ask(0)
    for _ in range(20):
        passes(bench, LEAST_SECONDS / 10, reading=[0])
        work = bench.ask(1)
        assert work.kind == "data"
        bench.finish(1, work.lease)
    assert status(bench).leases_taken_back == 0


def test_after_an_hour_it_is_replaced_although_others_have_work():
    bench = Bench(stop=StopAfter(epochs=50))
    for slot in (0, 1):
        bench.join(slot)
    held = bench.ask(0).lease
    for passed in range(0, round(FIRST_SECONDS), 60):
        bench.finish(1, bench.ask(1).lease)
        passes(bench, 60, reading=[0])
        assert status(bench).leases_taken_back == 0, passed
    passes(bench, 1, reading=[0], slots=[0])
    assert status(bench).message == "worker 0-0 read nothing for 3601 s: its ranges went to others"
    with pytest.raises(Fenced):
        bench.push(0, held, held.stop)


def test_one_that_is_alone_is_replaced_ever_later():
    """A new process may read what this one cannot; if the storage is away, it reads as little."""
    bench = Bench()
    for incarnation, hours in enumerate([1, 2, 4]):
        bench.join(0, incarnation)
        bench.ask(0, incarnation)
        began = bench.now
        for seconds, taken in [(hours * FIRST_SECONDS, incarnation), (1.0, incarnation + 1)]:
            bench.now += seconds
            waited = bench.now - began
            bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=incarnation, reading_seconds=waited))
            bench.coordinator.tick()
            assert status(bench).leases_taken_back == taken
        assert f"worker 0-{incarnation} read nothing for {waited:.0f} s: " in status(bench).message


def test_before_the_first_push_it_is_waited_for_longer():
    bench = Bench()
    bench.data = bench.data.model_copy(update={"size": None, "files": ("a",)})
    for slot in (0, 1):
        bench.join(slot)
    assert bench.ask(0).kind == "data"
    passes(bench, FIRST_SECONDS, reading=[0])
    assert bench.ask(1).kind == "idle"
    passes(bench, 1, reading=[0])
    assert bench.ask(1).kind == "data"


def test_long_reads_that_end_are_usual():
    bench, _ = held_up()
    passes(bench, LEAST_SECONDS - 10, reading=[0])
    passes(bench, 1)
    began = bench.now
    passes(bench, FACTOR * (LEAST_SECONDS - 10), reading=[0], since=began)
    assert bench.ask(1).kind == "idle"
    passes(bench, 1, reading=[0], since=began)
    assert bench.ask(1).kind == "data"


def test_time_with_pushes_or_a_task_does_not_count():
    bench = Bench(validation=True)
    for slot in (0, 1):
        bench.join(slot)
    held = bench.ask(0).lease, bench.ask(0).lease
    while (work := bench.ask(1)).kind == "data":
        bench.finish(1, work.lease)
    passes(bench, LEAST_SECONDS, reading=[0])
    bench.finish(0, held[0])
    passes(bench, FACTOR * LEAST_SECONDS - 500, reading=[0])
    assert bench.ask(1).kind == "idle"
    bench.finish(0, held[1])
    assert bench.ask(0).task == "evaluate"
    passes(bench, 4 * LEAST_SECONDS, reading=[0])
    assert bench.ask(1).kind == "idle"
    assert status(bench).leases_taken_back == 0


def lives(bench, seconds, cut_off=(), since=0.0, slots=(0, 1)):
    """So many seconds; `cut_off`: those of the slots that do not reach a server since `since`. The others have no work.

    Returns who got some, and when.
    """
    got = []
    for _ in range(round(seconds)):
        bench.now += 1.0
        for slot in slots:
            out = bench.now - since if slot in cut_off else 0.0
            with contextlib.suppress(Fenced):
                bench.coordinator.heartbeat(Heartbeat(slot=slot, incarnation=0, outage_seconds=out))
                if bench.ask(slot).kind != "idle":
                    got.append((slot, bench.now))
    return got


def test_worker_cut_off_from_a_server_that_others_reach_gives_its_ranges_up():
    bench, held = held_up()
    assert lives(bench, LEAST_SECONDS, cut_off=[0]) == []
    assert lives(bench, 2, cut_off=[0]) == [(1, LEAST_SECONDS + 2)]
    assert (
        status(bench).message
        == "worker 0-0 did not reach a parameter server for 601 s while others were idle: its ranges went to others"
    )
    with pytest.raises(Fenced):
        bench.push(0, held, held.stop)
    assert status(bench).leases_taken_back == 1


def test_one_that_is_cut_off_is_replaced_after_an_hour_although_others_have_work():
    bench = Bench(stop=StopAfter(epochs=50))
    for slot in (0, 1):
        bench.join(slot)
    bench.ask(0)
    for passed in range(0, round(FIRST_SECONDS), 60):
        assert status(bench).leases_taken_back == 0, passed
        bench.finish(1, bench.ask(1).lease)
        for _ in range(60):
            bench.now += 1.0
            bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0, outage_seconds=bench.now))
    bench.finish(1, bench.ask(1).lease)
    bench.now += 1.0
    bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0, outage_seconds=bench.now))
    bench.coordinator.tick()
    assert status(bench).leases_taken_back == 0
    bench.finish(1, bench.ask(1).lease)
    bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0, outage_seconds=bench.now))
    bench.coordinator.tick()
    assert status(bench).workers[0].state is WorkerState.FENCED


def test_server_that_nobody_reaches_costs_nobody_its_ranges():
    """Neither while it is away, nor when it is back and one worker knows it before another."""
    bench, _ = held_up()
    lives(bench, 30)
    away = bench.now
    lives(bench, 5, cut_off=[0], since=away)  # the other one notices it later
    lives(bench, 2 * FIRST_SECONDS, cut_off=[0, 1], since=away)
    assert lives(bench, LEAST_SECONDS, cut_off=[0], since=away) == []
    lives(bench, 10)
    assert status(bench).leases_taken_back == 0


def test_one_that_is_alone_keeps_its_ranges_without_a_server():
    bench = Bench(workers=1)
    bench.ask(0)
    lives(bench, 2 * FIRST_SECONDS, cut_off=[0], slots=[0])
    assert status(bench).leases_taken_back == 0


def test_task_of_one_that_is_cut_off_goes_to_another():
    bench = Bench(validation=True)
    for slot in (0, 1):
        bench.join(slot)
    assert bench.train(0).task == "evaluate"
    assert lives(bench, LEAST_SECONDS, cut_off=[0]) == []
    assert lives(bench, 2, cut_off=[0]) == [(1, LEAST_SECONDS + 2)]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_patience_doubles_until_a_push(times):
    bench, _ = held_up(workers=times + 2)
    active, hung = list(range(1, times + 2)), 0
    for again in range(times):
        began = bench.now
        passes(bench, LEAST_SECONDS * 2**again, reading=[hung], since=began, slots=[hung, *active])
        assert bench.ask(active[0]).kind == "idle"
        passes(bench, 1, reading=[hung], since=began, slots=[hung, *active])
        lease = bench.ask(active[0]).lease
        hung = active.pop(0)
        assert status(bench).leases_taken_back == again + 1
    assert bench.coordinator.stuck.patience(idle=True) == LEAST_SECONDS * 2**times
    bench.finish(hung, lease)
    assert bench.coordinator.stuck.patience(idle=True) == LEAST_SECONDS


def test_an_outage_says_nothing_of_how_long_reads_take():
    bench, _ = held_up()
    patience = bench.coordinator.stuck.patience(idle=True)
    lives(bench, LEAST_SECONDS - 10, cut_off=[0])
    lives(bench, 5)
    assert bench.coordinator.stuck.patience(idle=True) == patience == LEAST_SECONDS
