"""Members that join, stay silent, are replaced or leave."""

import pytest

from shoal_trainer.contract import StopAfter, WorkerState
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.members import KEPT, Member, Members
from shoal_trainer.coordinator.protocol import Failed, Heartbeat, Leave
from shoal_trainer.errors import Fenced
from shoal_trainer.wire.messages import Timings
from tests.unit.trainer.coordinator.bench import Bench


def test_silent_worker_is_reported_and_becomes_active_again():
    bench = Bench(workers=1)
    bench.now = 4.9
    bench.coordinator.tick()
    assert report.status(bench.coordinator).workers[0].state is WorkerState.ACTIVE
    bench.now = 5.1
    bench.coordinator.tick()
    assert report.status(bench.coordinator).workers[0].state is WorkerState.SILENT
    bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0))
    assert report.status(bench.coordinator).workers[0].state is WorkerState.ACTIVE


def test_silent_workers_lease_goes_to_another_worker():
    bench = Bench()
    for slot in (0, 1):
        bench.join(slot)
    held = bench.ask(0).lease
    bench.now = 3.0
    bench.coordinator.heartbeat(Heartbeat(slot=1, incarnation=0))
    bench.now = 6.0
    assignment = bench.train(1)
    assert assignment.task == "export"
    assert bench.shard.history.samples == 8
    with pytest.raises(Fenced):
        bench.push(0, held, held.stop)
    with pytest.raises(Fenced):
        bench.ask(0)
    assert bench.coordinator.record.counters.repeated == 0
    assert bench.coordinator.record.counters.wasted_steps == 1


def test_silent_workers_task_moves_after_training_stopped():
    bench = Bench(stop=StopAfter(steps=2))
    for slot in (0, 1):
        bench.join(slot)
    assert bench.train(0).task == "export"
    bench.now = 3.0
    assert bench.ask(1).kind == "idle"
    bench.now = 6.0
    assert bench.ask(1).task == "export"


@pytest.mark.parametrize("seconds", [5.5, 70.0, 3600.0])
def test_coordinator_pause_does_not_count_as_worker_silence(seconds):
    # Its node was off the network or its process stopped: it received no heartbeat, but no worker was lost.
    bench = Bench()
    for slot in (0, 1, 2):
        bench.join(slot)
    held = bench.ask(0).lease
    bench.now = seconds
    bench.coordinator.tick()
    bench.train(1)
    bench.coordinator.tick()
    bench.finish(0, held)
    states = [worker.state for worker in report.status(bench.coordinator).workers]
    assert states == [WorkerState.ACTIVE] * 3
    # From now on silence counts: only worker 2 sends no heartbeat.
    for _ in range(61):
        bench.now += 1.0
        for slot in (0, 1):
            bench.coordinator.heartbeat(Heartbeat(slot=slot, incarnation=0))
        bench.coordinator.tick()
    states = [worker.state for worker in report.status(bench.coordinator).workers]
    assert states == [WorkerState.ACTIVE, WorkerState.ACTIVE, WorkerState.FENCED]


@pytest.mark.parametrize(("step", "seconds"), [(0.0, 60), (15.0, 90), (200.0, 120)])
def test_silent_worker_is_fenced_after_60_s_or_six_of_its_steps_up_to_120_s(step, seconds):
    bench = Bench()
    for slot in (0, 1):
        bench.join(slot)
    silent = bench.coordinator.members.get((0, 0))
    silent.pushed(1, 2, 0, Timings(step=step))
    while bench.now < seconds:
        assert silent.present
        bench.now += 1.0
        bench.coordinator.heartbeat(Heartbeat(slot=1, incarnation=0))
        bench.coordinator.tick()
    assert silent.state is WorkerState.SILENT
    bench.now += 1.0
    bench.coordinator.tick()
    assert silent.state is WorkerState.FENCED


def test_forgotten_incarnation_still_fences_older_ones():
    bench = Bench()
    bench.join(0, 1)
    bench.coordinator.leave(Leave(slot=0, incarnation=1))
    for slot in range(1, KEPT + 1):
        bench.coordinator.leave(Leave(slot=slot, incarnation=0))
    bench.coordinator.heartbeat(Heartbeat(slot=KEPT + 1, incarnation=0))
    assert (0, 1) not in bench.coordinator.members.known
    with pytest.raises(Fenced):
        bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0))


@pytest.mark.parametrize("method", ["leave", "failed"])
def test_push_after_leaving_is_fenced(method):
    bench = Bench()
    for slot in (0, 1):
        bench.join(slot)
    held = bench.ask(0).lease
    coordinator = bench.coordinator
    if method == "leave":
        coordinator.leave(Leave(slot=0, incarnation=0))
    else:
        coordinator.failed(Failed(slot=0, incarnation=0, message="why"))
    bench.train(1)
    with pytest.raises(Fenced):
        bench.push(0, held, held.start + 2)
    assert bench.coordinator.record.counters.repeated == 0


def test_repeated_reports_of_wasted_steps_count_once():
    first, second = Bench(), Bench()  # the coordinator, and its successor

    def total(bench, steps, before):
        bench.join(0, wasted_steps=steps, wasted_acknowledged=before)
        return bench.coordinator.record.counters.wasted_steps

    assert total(first, 3, 0) == 3
    assert total(first, 3, 0) == 3  # the answer was lost
    assert total(first, 5, 0) == 5  # lost again, and more steps were wasted since
    assert total(first, 5, 5) == 5
    assert total(first, 6, 5) == 6
    assert total(second, 8, 6) == 2
    assert total(second, 8, 6) == 2


def test_successor_takes_over_and_fences_its_predecessor():
    bench = Bench(workers=1)
    held = bench.ask(0).lease
    bench.join(0, incarnation=1)
    with pytest.raises(Fenced):
        bench.push(0, held, held.stop)
    with pytest.raises(Fenced):
        bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0))
    bench.train(0, incarnation=1)
    assert bench.shard.history.samples == 8


def test_leaving_worker_returns_the_rest_of_its_lease():
    bench = Bench(workers=1)
    held = bench.ask(0).lease
    bench.coordinator.leave(Leave(slot=0, incarnation=0))
    bench.join(1)
    assert (bench.ask(1).lease.start, bench.coordinator.record.counters.wasted_steps) == (held.start, 0)


def test_heartbeat_message_is_in_the_status_until_cleared():
    bench = Bench(workers=1)
    for message in ("cannot read s3://bucket/part-3: no answer", ""):
        bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0, message=message))
        assert [worker.message for worker in report.status(bench.coordinator).workers] == [message]


def test_newest_incarnations_are_reported_first():
    members = [Member(slot, incarnation) for slot in range(3) for incarnation in range(slot + 1)]
    order = [(m.slot, m.incarnation) for m in report.newest_first(members)]
    assert order == [(0, 0), (1, 1), (2, 2), (1, 0), (2, 1), (2, 0)]


def test_untimed_push_of_an_outage_does_not_shorten_the_wait_for_the_next_push():
    member = Member(0, 0)
    before = member.push_limit
    member.pushed(12, 24, 0, Timings())
    assert member.push_limit == before
    member.pushed(10, 20, 0, Timings(step=2.0))
    assert member.push_limit == 60


def test_long_wait_for_data_does_not_lengthen_the_wait_for_the_next_push():
    """In it a worker pushes what it has."""
    member = Member(0, 0)
    member.pushed(1, 2, 0, Timings(step=600.0, input=598.0))
    assert member.push_limit == pytest.approx(36)


@pytest.mark.parametrize("seconds", [0.1, 9.0])
def test_worker_that_accumulates_batches_of_slow_data_is_waited_for(seconds):
    """It pushes nothing before it has all of them."""
    member = Member(0, 0)
    member.pushed(16, 512, 0, Timings(step=seconds + 0.1, input=seconds))
    assert member.push_limit == pytest.approx(max(5, 3 * 16 * (seconds + 0.1)))


def test_worker_that_leaves_reports_its_wasted_steps_once():
    bench = Bench(workers=1)
    for _ in range(2):  # the answer was lost
        bench.coordinator.leave(Leave(slot=0, incarnation=0, wasted_steps=3, wasted_acknowledged=1))
    assert bench.coordinator.record.counters.wasted_steps == 2


def test_a_fenced_worker_of_a_large_job_stays_fenced_while_others_join():
    members = Members()
    for slot in range(KEPT + 100):
        members.get((slot, 0)).last_seen = 1.0
    members.get((KEPT + 100, 0)).state = WorkerState.FENCED
    members.get((KEPT + 101, 0))
    assert members.get((KEPT + 100, 0)).state is WorkerState.FENCED


def test_a_fenced_worker_that_was_forgotten_stays_fenced():
    bench = Bench(workers=1)
    for _ in range(70):
        bench.now += 1.0
        bench.coordinator.heartbeat(Heartbeat(slot=1, incarnation=0))
        bench.coordinator.tick()
    assert bench.coordinator.members.get((0, 0)).state is WorkerState.FENCED
    for slot in range(2, KEPT + 2):
        bench.now += 0.001
        bench.coordinator.leave(Leave(slot=slot, incarnation=0))
    bench.coordinator.heartbeat(Heartbeat(slot=KEPT + 2, incarnation=0))
    assert (0, 0) not in bench.coordinator.members.known
    with pytest.raises(Fenced):
        bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0))
