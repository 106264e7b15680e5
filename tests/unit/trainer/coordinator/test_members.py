"""Members that join, stay silent, are replaced or leave."""

import pytest

from shoal_trainer.contract import StopAfter, WorkerState
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.members import KEPT, Member
from shoal_trainer.errors import Fenced
from tests.unit.trainer.coordinator.bench import Bench


def test_a_silent_worker_is_told_of_and_active_again_when_it_speaks():
    bench = Bench()
    bench.join(0)
    bench.now = 4.9
    bench.coordinator.tick()
    assert bench.coordinator.status().workers[0].state is WorkerState.ACTIVE
    bench.now = 5.1
    bench.coordinator.tick()
    assert bench.coordinator.status().workers[0].state is WorkerState.SILENT
    bench.coordinator.heartbeat(0, 0)
    assert bench.coordinator.status().workers[0].state is WorkerState.ACTIVE


def test_nobody_waits_for_a_silent_worker():
    bench = Bench()
    for slot in (0, 1):
        bench.join(slot)
    held = bench.ask(0).lease
    bench.now = 3.0
    bench.coordinator.heartbeat(1, 0)
    bench.now = 6.0
    given = bench.train(1)
    assert given.task == "export"
    assert bench.shard.samples == 8
    with pytest.raises(Fenced):
        bench.push(0, held, held.stop)
    with pytest.raises(Fenced):
        bench.ask(0)
    assert bench.coordinator.counters.repeated == 0
    assert bench.coordinator.counters.wasted_steps == 1


def test_nobody_waits_for_a_silent_workers_task_though_training_was_stopped():
    bench = Bench(stop=StopAfter(steps=2))
    for slot in (0, 1):
        bench.join(slot)
    assert bench.train(0).task == "export"
    bench.now = 3.0
    assert bench.ask(1).kind == "idle"
    bench.now = 6.0
    assert bench.ask(1).task == "export"


@pytest.mark.parametrize("away", [5.5, 70.0, 3600.0])
def test_that_the_coordinator_was_away_itself_is_nobodys_silence(away):
    # Its node was off the network, or its process was stopped: it heard nobody, and nobody is lost.
    bench = Bench()
    for slot in (0, 1, 2):
        bench.join(slot)
    held = bench.ask(0).lease
    bench.now = away
    bench.coordinator.tick()
    bench.train(1)
    bench.coordinator.tick()
    bench.finish(0, held)
    states = [worker.state for worker in bench.coordinator.status().workers]
    assert states == [WorkerState.ACTIVE] * 3
    # From now on silence counts: only the third one says nothing.
    for _ in range(61):
        bench.now += 1.0
        for slot in (0, 1):
            bench.coordinator.heartbeat(slot, 0)
        bench.coordinator.tick()
    states = [worker.state for worker in bench.coordinator.status().workers]
    assert states == [WorkerState.ACTIVE, WorkerState.ACTIVE, WorkerState.FENCED]


def test_of_an_incarnation_that_was_forgotten_it_is_known_that_older_ones_are_refused():
    bench = Bench()
    bench.join(0, 1)
    bench.coordinator.leave(0, 1)
    for slot in range(1, KEPT + 1):
        bench.coordinator.heartbeat(slot, 0)
    assert (0, 1) not in bench.coordinator.members.known
    with pytest.raises(Fenced):
        bench.coordinator.heartbeat(0, 0)


@pytest.mark.parametrize("goodbye", ["leave", "failed"])
def test_a_push_after_goodbye_is_refused_for_its_range_is_somebody_elses(goodbye):
    bench = Bench()
    for slot in (0, 1):
        bench.join(slot)
    held = bench.ask(0).lease
    said = {"leave": (0, 0), "failed": (0, 0, "why")}[goodbye]
    getattr(bench.coordinator, goodbye)(*said)
    bench.train(1)
    with pytest.raises(Fenced):
        bench.push(0, held, held.start + 2)
    assert bench.coordinator.counters.repeated == 0


def test_steps_in_vain_count_once_though_they_are_told_again():
    first, second = Bench(), Bench()  # the coordinator, and the one after the loss of parameter server 0

    def told(bench, steps, before):
        bench.join(0, wasted_steps=steps, wasted_told=before)
        return bench.coordinator.counters.wasted_steps

    assert told(first, 3, 0) == 3
    assert told(first, 3, 0) == 3  # the answer was lost
    assert told(first, 5, 0) == 5  # lost again, and more was in vain by then
    assert told(first, 5, 5) == 5
    assert told(first, 6, 5) == 6
    assert told(second, 8, 6) == 2
    assert told(second, 8, 6) == 2


def test_a_successor_takes_over_and_the_old_one_is_fenced():
    bench = Bench()
    bench.join(0)
    held = bench.ask(0).lease
    bench.join(0, incarnation=1)
    with pytest.raises(Fenced):
        bench.push(0, held, held.stop)
    with pytest.raises(Fenced):
        bench.coordinator.heartbeat(0, 0)
    bench.train(0, incarnation=1)
    assert bench.shard.samples == 8


def test_a_worker_that_leaves_gives_the_exact_rest_back():
    bench = Bench()
    bench.join(0)
    held = bench.ask(0).lease
    bench.coordinator.leave(0, 0)
    bench.join(1)
    assert (bench.ask(1).lease.start, bench.coordinator.counters.wasted_steps) == (held.start, 0)


def test_what_a_worker_says_with_its_heartbeats_is_in_the_status_until_it_says_it_no_more():
    bench = Bench()
    bench.join(0)
    for message in ("cannot read s3://bucket/part-3: no answer", ""):
        bench.coordinator.heartbeat(0, 0, message)
        assert [worker.message for worker in bench.coordinator.status().workers] == [message]


def test_the_newest_of_every_slot_are_told_first():
    members = [Member(slot, incarnation) for slot in range(3) for incarnation in range(slot + 1)]
    told = [(m.slot, m.incarnation) for m in report.newest_first(members)]
    assert told == [(0, 0), (1, 1), (2, 2), (1, 0), (2, 1), (2, 0)]
