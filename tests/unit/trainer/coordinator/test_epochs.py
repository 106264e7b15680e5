"""The order of epochs and tasks, and when training stops."""

import math

import pytest

from shoal_trainer.contract import Phase, StopAfter
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.protocol import DataSpec, Heartbeat, Leave, TaskDone
from shoal_trainer.errors import UserError
from tests.unit.trainer.coordinator.bench import Bench


def test_worker_trains_exports_and_finishes():
    bench = Bench(workers=1)
    work = bench.train(0)
    assert (work.kind, work.task) == ("task", "export")
    done = TaskDone(slot=0, incarnation=0, token=work.token)
    assert bench.coordinator.task_done(done) is not None
    assert bench.coordinator.task_done(done) is None
    bench.coordinator.end(report.succeeded(bench.coordinator))
    assert bench.ask(0).kind == "finished"
    status = report.status(bench.coordinator)
    assert (status.phase, status.step, status.samples) == (Phase.SUCCEEDED, 4, 8)
    assert report.ranges(bench.coordinator.record).once == 4


def test_numbers_of_the_end_are_short():
    """With 17 digits each, those of 80 metrics did not fit in a termination message, and some were left out."""
    bench = Bench(validation=True, workers=1)
    work = bench.train(0)
    numbers = {"val_accuracy": 2 / 3, "val_mse": 4.2123456789e-7}
    bench.coordinator.task_done(TaskDone(slot=0, incarnation=0, token=work.token, metrics=numbers))
    end = report.succeeded(bench.coordinator)
    assert {name: end.metrics[name] for name in numbers} == {"val_accuracy": 0.666667, "val_mse": 4.21235e-7}


def test_tasks_of_an_epoch_run_in_order_and_see_its_logs():
    bench = Bench(validation=True, callbacks=True, workers=1)
    kinds, work = [], bench.train(0)
    while work.kind == "task":
        kinds.append(work.task)
        if work.task == "callbacks":
            assert work.history[0]["val_accuracy"] == 0.75
            assert work.history[0]["loss"] == 0.5
        metrics = {"val_accuracy": 0.75} if work.task == "evaluate" else {}
        bench.coordinator.task_done(TaskDone(slot=0, incarnation=0, token=work.token, metrics=metrics))
        work = bench.ask(0)
    assert kinds == ["evaluate", "callbacks", "export"]
    assert report.metrics(bench.coordinator.record) == {"val_accuracy": 0.75}


def test_each_epoch_is_told_once_to_the_worker_that_runs_its_callbacks():
    """Else all of a long run's history is sent with each of its epochs, and made under the shard's lock."""
    bench, epochs = Bench(stop=StopAfter(epochs=20), callbacks=True), list[tuple[dict[str, float], ...]]()
    bench.join(0)
    while (work := bench.train(0, told=(1, len(epochs)))).task == "callbacks":
        assert work.since == work.epoch
        epochs.append(work.history)
        bench.coordinator.task_done(TaskDone(slot=0, incarnation=0, token=work.token))
    assert [len(told) for told in epochs] == [1] * 20
    assert (work.task, work.since, work.history) == ("export", 20, ())


@pytest.mark.parametrize("told", [(0, 0), (7, 1)])
def test_worker_of_an_earlier_version_or_process_is_told_all_epochs(told):
    bench = Bench(stop=StopAfter(epochs=2), callbacks=True)
    bench.join(0)
    for epoch in range(2):
        work = bench.train(0, told=told)
        bench.coordinator.task_done(TaskDone(slot=0, incarnation=0, token=work.token))
        assert (work.since, len(work.history)) == (0, epoch + 1)


def test_reported_epoch_is_complete_after_its_tasks():
    bench = Bench(validation=True, callbacks=True, workers=1)
    work, reports = bench.train(0), []
    while work.kind == "task":
        reports += report.status(bench.coordinator).epochs
        metrics = {"val_accuracy": 0.75} if work.task == "evaluate" else {}
        bench.coordinator.task_done(TaskDone(slot=0, incarnation=0, token=work.token, metrics=metrics))
        work = bench.ask(0)
    after = {"loss": 0.5, "val_accuracy": 0.75}
    assert [(each.epoch, each.metrics, each.complete) for each in reports] == [
        (0, {"loss": 0.5}, False),
        (0, after, False),
        (0, after, True),
    ]


def test_training_stops_at_the_target_metric():
    bench = Bench(stop=StopAfter(epochs=50, metric="accuracy", value=0.9), validation=True, workers=1)
    while (work := bench.ask(0)).kind == "data":
        bench.push(0, work.lease, work.lease.stop)
    assert work.task == "evaluate"
    metrics = {"val_accuracy": 0.95, "val_loss": 0.1}
    bench.coordinator.task_done(TaskDone(slot=0, incarnation=0, token=work.token, metrics=metrics))
    kinds = [bench.ask(0).task for _ in range(1)]
    assert kinds in (["evaluate"], ["export"])
    assert "accuracy reached 0.95" in report.status(bench.coordinator).message
    assert report.ranges(bench.coordinator.record).never == 0  # it does not promise the other 49 epochs


def test_samples_that_a_worker_left_out_are_lost_and_not_repeated():
    """`on_nan="skip"`: their batch is pushed without its gradient."""
    bench = Bench(workers=1)
    lease = bench.ask(0).lease
    bench.push(0, lease, lease.start + 2, loss=math.nan, left_out=2)
    assert bench.coordinator.record.counters.lost == 2
    bench.train(0)
    assert report.status(bench.coordinator).data.model_dump(include={"lost", "repeated", "partial"}) == {
        "lost": 2,
        "repeated": 0,
        "partial": 0,
    }


def test_missing_target_metric_is_a_user_error():
    bench = Bench(stop=StopAfter(epochs=1, metric="f1", value=0.9), validation=True, workers=1)
    work = bench.train(0)
    with pytest.raises(UserError, match=r"stopAfter\.metric is 'f1'"):
        bench.coordinator.task_done(
            TaskDone(slot=0, incarnation=0, token=work.token, metrics={"val_loss": 1.0})
        )


@pytest.mark.parametrize("callbacks", [True, False])
def test_training_runs_at_most_one_epoch_ahead_of_callbacks(callbacks):
    bench = Bench(stop=StopAfter(epochs=4), validation=True, callbacks=callbacks)
    for slot in (0, 1):
        bench.join(slot)
    held = bench.train(0)
    assert (held.task, held.epoch) == ("evaluate", 0)
    work = bench.train(1)  # while the evaluation runs
    epochs = bench.coordinator.record.ledger.completed
    assert epochs == (2 if callbacks else 4)
    bench.coordinator.task_done(TaskDone(slot=0, incarnation=0, token=held.token, metrics={"val_loss": 1.0}))
    if callbacks:
        assert work.kind == "idle"
        assert bench.ask(1).kind == "idle"  # the worker that evaluated has the parameters for the callbacks
        held = bench.ask(0)
        assert (held.task, held.epoch) == ("callbacks", 0)
        bench.coordinator.task_done(TaskDone(slot=0, incarnation=0, token=held.token))
        assert bench.ask(0).epoch == 1
        assert bench.ask(1).kind == "data"


@pytest.mark.parametrize("validation", [True, False])
def test_no_two_epochs_are_judged_by_the_same_parameters(validation):
    """Whichever worker is slow: half of the next epoch is left when the tasks of an epoch begin."""
    bench = Bench(stop=StopAfter(epochs=4), validation=validation, callbacks=True)
    for slot in (0, 1):
        bench.join(slot)
    held = bench.ask(0)  # the first range of the epoch, for long
    assert bench.train(1).kind == "idle"
    assert report.status(bench.coordinator).samples == 2 * (3 + 2)  # of 4 ranges in an epoch
    bench.finish(0, held.lease)
    held = bench.ask(1)
    assert (held.task, held.epoch) == ("evaluate" if validation else "callbacks", 0)
    assert bench.train(0).kind == "idle"
    assert bench.coordinator.record.ledger.completed == 2  # judged now: the next epoch may end


def test_a_worker_that_asked_early_trains_its_steps_before_it_evaluates():
    bench = Bench(stop=StopAfter(epochs=4), validation=True, callbacks=True)
    for slot in (0, 1):
        bench.join(slot)
    last = [bench.ask(0) for _ in range(4)][-1]
    ahead = bench.ask(1)
    assert (last.lease.epoch, ahead.lease.epoch) == (0, 1)
    for lease in list(bench.coordinator.record.ledger.leases.values())[:4]:
        bench.finish(0, bench.data.lease_message(lease))
    assert bench.ask(1).task == "evaluate"
    assert bench.train(0).kind == "idle"
    assert report.status(bench.coordinator).samples == 2 * (4 + 1)
    bench.finish(1, ahead.lease)
    assert bench.train(0).kind == "idle"
    assert report.status(bench.coordinator).samples == 2 * (4 + 4)


def test_an_epoch_of_one_range_is_leased_whole():
    bench = Bench(stop=StopAfter(epochs=4), callbacks=True)
    bench.data = bench.data.model_copy(update={"size": 2})
    for slot in (0, 1):
        bench.join(slot)
    assert [bench.ask(slot).lease.epoch for slot in (0, 1)] == [0, 1]


def evaluated(workers=2):
    """A job of one epoch, all of whose samples are trained and which worker 0 has evaluated."""
    bench = Bench(validation=True, callbacks=True)
    for slot in range(workers):
        bench.join(slot)
    held = bench.train(0)
    bench.coordinator.task_done(TaskDone(slot=0, incarnation=0, token=held.token, metrics={"val_loss": 1.0}))
    assert bench.ask(1).kind == "idle"
    return bench


def test_callbacks_of_an_evaluator_that_leaves_are_reassigned():
    bench = evaluated()
    bench.coordinator.leave(Leave(slot=0, incarnation=0))
    assert bench.ask(1).task == "callbacks"


def test_callbacks_of_a_replaced_evaluator_are_reassigned():
    bench = evaluated()
    bench.join(0, incarnation=1)
    assert bench.ask(1).task == "callbacks"


def test_callbacks_do_not_wait_long_for_an_evaluator_that_asks_for_no_work():
    bench = evaluated()
    for _ in range(29):
        bench.now += 1.0
        for slot in (0, 1):
            bench.coordinator.heartbeat(Heartbeat(slot=slot, incarnation=0))
        assert bench.ask(1).kind == "idle"
    bench.now += 1.0
    assert bench.ask(1).task == "callbacks"
    assert bench.ask(0).kind == "idle"


def test_callbacks_of_a_lost_evaluator_are_reassigned_when_another_worker_idles():
    bench = evaluated()
    for _ in range(7):
        bench.now += 1.0
        bench.coordinator.heartbeat(Heartbeat(slot=1, incarnation=0))
        bench.coordinator.tick()
    assert bench.ask(1).task == "callbacks"


def test_callbacks_are_any_workers_after_a_restart_of_the_server():
    new = evaluated().successor()
    for slot in (0, 1):
        new.join(slot)
    new.now += 1.0  # for workers with copies
    assert new.ask(1).task == "callbacks"


def called(validation=True):
    """A job of two epochs: worker 0 has run the callbacks of the first one, and the second one is trained."""
    bench = Bench(stop=StopAfter(epochs=2), validation=validation, callbacks=True)
    for slot in (0, 1):
        bench.join(slot)
    for kind in ("evaluate", "callbacks") if validation else ("callbacks",):
        held = bench.train(0) if kind == "evaluate" or not validation else bench.ask(0)
        assert held.task == kind
        bench.coordinator.task_done(TaskDone(slot=0, incarnation=0, token=held.token, metrics={}))
    while (held := bench.ask(1)).kind == "data":
        bench.finish(1, held.lease)
    return bench


@pytest.mark.parametrize("validation", [True, False])
def test_worker_that_ran_callbacks_runs_those_of_the_next_epochs(validation):
    """Each worker that runs any makes them, and replays the epochs before: a run of its own at a tracker."""
    bench = called(validation)
    assert bench.ask(1).kind == "idle"
    assert bench.ask(0).task == ("evaluate" if validation else "callbacks")


@pytest.mark.parametrize("validation", [True, False])
def test_callbacks_go_to_another_worker_when_theirs_is_gone(validation):
    bench = called(validation)
    bench.coordinator.leave(Leave(slot=0, incarnation=0))
    assert bench.ask(1).task == ("evaluate" if validation else "callbacks")


def test_evaluation_does_not_wait_long_for_the_worker_that_ran_callbacks():
    bench = called()
    for _ in range(30):
        assert bench.ask(1).kind == "idle"
        bench.now += 1.0
        for slot in (0, 1):
            bench.coordinator.heartbeat(Heartbeat(slot=slot, incarnation=0))
    assert bench.ask(1).task == "evaluate"


def test_step_limit_is_exact():
    bench = Bench(stop=StopAfter(steps=6), workers=1)
    bench.train(0)
    assert bench.coordinator.record.counters.steps == 6


def test_non_finite_metric_is_dropped_and_reaches_no_target():
    bench = Bench(stop=StopAfter(epochs=1, metric="loss", value=0.9), validation=True, workers=1)
    work = bench.train(0)
    done = TaskDone(
        slot=0, incarnation=0, token=work.token, metrics={"val_loss": math.nan, "val_accuracy": 0.5}
    )
    bench.coordinator.task_done(TaskDone.model_validate_json(done.to_json()))  # JSON has no NaN
    assert bench.coordinator.record.tasks.history[0]["val_accuracy"] == 0.5
    assert "val_loss" not in bench.coordinator.record.tasks.history[0]
    assert bench.ask(0).task == "export"
    assert report.status(bench.coordinator).message == ""


def test_no_more_is_leased_than_the_steps_that_are_left():
    bench = Bench(stop=StopAfter(steps=3))
    leased = 0
    for slot in range(4):
        bench.join(slot, data=DataSpec(size=8000))  # a range has many batches
        while (work := bench.ask(slot)).kind == "data":
            leased += work.lease.stop - work.lease.start
    assert leased == 3 * 2


def test_nothing_is_leased_after_a_stop():
    bench = Bench(stop=StopAfter(epochs=3), workers=1)
    assert bench.ask(0).kind == "data"
    assert report.status(bench.coordinator).data.leased == 2
    bench.coordinator.course.stop("a callback stopped training")
    bench.coordinator.tick()
    assert report.status(bench.coordinator).data.leased == 0
