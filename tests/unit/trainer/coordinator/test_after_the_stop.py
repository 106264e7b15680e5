"""Late pushes and results after training was stopped, and what they must not change."""

import pytest

from shoal_trainer.contract import StopAfter
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.artefacts import Artefacts
from shoal_trainer.coordinator.last_pushes import RESEND_SECONDS, LastPushes
from shoal_trainer.coordinator.protocol import Heartbeat, Leave, TaskDone
from shoal_trainer.coordinator.task_queue import Tasks
from shoal_trainer.errors import Fenced, Overtaken
from shoal_trainer.ps.contents import Contents, uneven
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.wire.messages import Timings
from tests.unit.trainer.coordinator.bench import Bench, next_work

STEPS_PER_PUSH = 10


def stopped_by_an_evaluation(workers, step_seconds=None):
    """Training stops while every worker but the first holds a lease. `step_seconds`: these have pushed before."""
    bench = Bench(stop=StopAfter(epochs=9, metric="accuracy", value=0.9), validation=True)
    for slot in range(workers):
        bench.join(slot)
    first = bench.train(0)
    assert first.task == "evaluate"
    leases = {slot: bench.ask(slot).lease for slot in range(1, workers)}
    if step_seconds is not None:
        for slot in leases:
            timings = Timings(step_seconds, 0.0, 0.0, 0.0, 0.0)
            bench.coordinator.members.get((slot, 0)).pushed(STEPS_PER_PUSH, 2, 0, timings)
    bench.coordinator.task_done(
        TaskDone(slot=0, incarnation=0, token=first.token, metrics={"val_accuracy": 0.95})
    )
    assert bench.coordinator.record.stopping
    return bench, leases


def seconds_until_a_task(bench, slots):
    """How long worker 0 waits for a task while the workers of these slots send heartbeats."""
    for second in range(1, 200):
        bench.now += 1.0
        for slot in slots:
            bench.coordinator.heartbeat(Heartbeat(slot=slot, incarnation=0))
        if bench.ask(0).kind == "task":
            return second
    raise AssertionError("no task")


def test_final_evaluation_waits_for_the_last_push_of_each_worker():
    bench, leases = stopped_by_an_evaluation(3)
    assert bench.ask(0).kind == "idle"
    bench.push(1, leases[1], leases[1].start + 2)
    assert bench.ask(0).kind == "idle"
    bench.push(2, leases[2], leases[2].start + 2)
    assert bench.ask(0).task == "evaluate"


@pytest.mark.parametrize("arrives", [True, False])
def test_evaluation_of_an_epoch_waits_until_its_pushes_are_in_every_shard(arrives):
    """If it ends training, the export must not have a push more in another shard."""
    bench = Bench(stop=StopAfter(epochs=3), validation=True, callbacks=True)
    bench.coordinator.course.last_pushes, asked = LastPushes(2), []
    bench.coordinator.course.compare_soon = lambda: asked.append(bench.now)
    for slot in range(2):
        bench.join(slot)
    assert bench.train(0).kind == "idle"
    assert asked
    whole = bench.shard.history.contents.spans()
    ((slot, incarnation, first, _),) = whole
    contents = [Contents(whole), Contents([(slot, incarnation, first, first + 3)])]  # lacks the last of four
    bench.coordinator.count_partial(contents, uneven(contents))
    assert bench.ask(1).kind == "idle"
    if arrives:
        bench.coordinator.count_partial([Contents(whole), Contents(whole)], Contents())
    else:
        bench.now += RESEND_SECONDS
    assert bench.ask(1).task == "evaluate"


def test_final_tasks_do_not_wait_for_a_worker_that_left():
    bench, _ = stopped_by_an_evaluation(2)
    bench.coordinator.leave(Leave(slot=1, incarnation=0))
    assert bench.ask(0).task == "export"


def test_final_tasks_do_not_wait_for_a_worker_that_pushes_no_more():
    bench, _ = stopped_by_an_evaluation(2, step_seconds=0.1)
    assert seconds_until_a_task(bench, slots=[0, 1]) == 5


def test_final_tasks_wait_for_a_first_push_that_takes_long():
    bench, _ = stopped_by_an_evaluation(2)
    assert seconds_until_a_task(bench, slots=[0, 1]) == 60


def test_final_tasks_wait_as_long_as_a_push_of_several_batches_takes():
    bench, _ = stopped_by_an_evaluation(2, step_seconds=2.0)
    assert seconds_until_a_task(bench, slots=[0, 1]) == 60


def test_final_tasks_wait_briefly_for_a_worker_that_knows_of_the_stop():
    bench, _ = stopped_by_an_evaluation(2)
    next_work(bench.coordinator, 1, 0, stopped=bench.shard.stopped())
    assert seconds_until_a_task(bench, slots=[0, 1]) == RESEND_SECONDS


def test_final_tasks_do_not_wait_for_a_silent_worker():
    bench, _ = stopped_by_an_evaluation(2)
    assert seconds_until_a_task(bench, slots=[0]) <= 7
    with pytest.raises(Fenced):
        bench.coordinator.heartbeat(Heartbeat(slot=1, incarnation=0))


def test_epoch_completed_after_the_stop_keeps_the_final_evaluation():
    tasks = Tasks()
    tasks.epoch_ended(0, {}, 0.0, validation=True, callbacks=False)
    tasks.export(0)
    tasks.epoch_ended(1, {"loss": 0.5}, 0.0, validation=True, callbacks=False)
    assert [(task.kind, task.epoch) for task in tasks.queue] == [("evaluate", 0), ("export", 0)]
    assert tasks.history[1] == {"loss": 0.5}


def test_saved_history_does_not_change_with_later_results():
    tasks = Tasks()
    tasks.epoch_ended(0, {"loss": 0.5}, 0.0, validation=True, callbacks=False)
    saved = tasks.dump()
    token = (1, 1)
    assert tasks.grant((0, 0), token, 0.0) is not None
    tasks.done(token, {"val_loss": 1.0}, 0.0)
    assert saved["history"] == [{"loss": 0.5}]


def test_export_overtaken_by_another_worker_publishes_nothing(tmp_path):
    artefacts = Artefacts(LocalStorage(tmp_path), "uid")
    artefacts.receive((1, 1), "export", "model.keras", iter([b"x"]))
    artefacts.receive((1, 2), "export", "model.keras", iter([b"y"]))
    with pytest.raises(Overtaken):
        artefacts.publish_model((1, 1), report.succeeded(Bench().coordinator))
    assert artefacts.published() is None


@pytest.mark.parametrize("epochs", [None, 2])
def test_stop_at_the_end_of_an_epoch_evaluates_no_epoch_without_a_batch(epochs):
    bench = Bench(stop=StopAfter(steps=8, epochs=epochs), validation=True, callbacks=True, workers=1)
    tasks = []
    while (work := bench.train(0)).task != "export":
        tasks.append((work.task, work.epoch))
        bench.coordinator.task_done(TaskDone(slot=0, incarnation=0, token=work.token))
    assert tasks == [("evaluate", 0), ("callbacks", 0), ("evaluate", 1), ("callbacks", 1)]
    assert work.epoch == 1


def test_last_push_into_a_new_epoch_is_evaluated():
    bench, leases = stopped_by_an_evaluation(2)
    bench.push(1, leases[1], leases[1].start + 2)
    work = bench.ask(0)
    assert (work.task, work.epoch) == ("evaluate", 1)


def test_unreachable_shard_delays_the_final_tasks_until_the_deadline():
    pushes = LastPushes(shards=2)
    pushes.arrived((0, 0), deadline=5.0)
    assert pushes.comparison_due(4.9)
    assert not pushes.comparison_due(5.0)


def test_push_after_a_comparison_makes_another_one_due():
    pushes = LastPushes(shards=2)
    pushes.arrived((0, 0), deadline=5.0)
    pushes.compared(in_flight=True)
    assert pushes.comparison_due(1.0)
    pushes.compared(in_flight=False)
    assert not pushes.comparison_due(1.0)
    pushes.arrived((1, 0), deadline=6.0)
    assert pushes.comparison_due(1.0)
