"""Tasks and their results when the coordinator or the data is unreachable."""

import math
import threading

import pytest

from shoal_trainer.errors import Interrupted, Overtaken, ProtocolError, Unauthorized, Unreachable, UserError
from shoal_trainer.worker.run_task import run_task
from shoal_trainer.worker.tasks import Outcome
from shoal_trainer.worker.work import TaskWork, waiting_for

WORK = TaskWork((0, 1), "evaluate", 2)


class Answers:
    """A coordinator that raises these errors, one per call, then accepts the result."""

    def __init__(self, *errors):
        self.errors, self.results, self.messages = list(errors), [], []
        self.job_finished = False

    def finished(self):
        return self.job_finished

    def set_message(self, message):
        self.messages.append(message)

    def task_done(self, work, metrics, files, *, stop, message, learning_rate=None):
        if self.errors:
            raise self.errors.pop(0)
        self.results.append((work, metrics, stop, message))


class Drain(threading.Event):
    def wait(self, timeout=None):
        return self.is_set()


def test_task_runs_once_and_its_result_is_sent_until_accepted():
    runs, answers = [], Answers(Unreachable("away"), Unreachable("away"))

    def run():
        runs.append(1)
        return Outcome({"val_loss": 0.5}, message="what it lacks")

    run_task(WORK, run, answers, Drain())
    assert (len(runs), answers.results) == (1, [(WORK, {"val_loss": 0.5}, False, "what it lacks")])
    assert [message for message in answers.messages if message == "evaluate: away"] == ["evaluate: away"] * 2
    assert answers.messages[-1] == ""


def test_task_that_hangs_is_reported_with_its_name(monkeypatch):
    now, answers, texts = [100.0], Answers(), []
    monkeypatch.setattr(waiting_for, "__defaults__", (lambda: now[0],))

    def run():
        texts.append(answers.messages[-1]())
        now[0] += 300
        texts.append(answers.messages[-1]())
        return Outcome()

    run_task(WORK, run, answers, Drain())
    assert texts == ["", "has waited 300 s for the task evaluate of epoch 3"]
    assert answers.messages[-1] == ""


def test_interrupted_task_sends_no_result():
    def run():
        raise Interrupted("the worker has to leave")

    answers = Answers()
    run_task(WORK, run, answers, Drain())
    assert (answers.results, answers.messages[-1]) == ([], "")


def test_large_result_is_sent_again_after_as_long_as_it_took():
    now, waited = [0.0], []

    class Slow(Answers):
        def task_done(self, *arguments, **more):
            now[0] += 20.0
            super().task_done(*arguments, **more)

    class Waits(Drain):
        def wait(self, timeout=None):
            waited.append(timeout)

    answers = Slow(*[Unreachable("the storage is away")] * 8)
    run_task(WORK, Outcome, answers, Waits(), clock=lambda: now[0])
    assert len(answers.results) == 1
    assert waited == [0.25, 0.5, 1, 2, 4, 8, 16, 20]


def test_task_is_retried_and_reported_while_its_data_is_unreachable():
    answers, waited = Answers(), []
    outage = [Unreachable("s3://bucket/part-3: no answer")] * 7

    class Waits(Drain):
        def wait(self, timeout=None):
            waited.append(timeout)

    def run():
        if outage:
            raise outage.pop()
        return Outcome({"val_loss": 0.5}, message="what it lacks")

    run_task(WORK, run, answers, Waits())
    assert answers.results == [(WORK, {"val_loss": 0.5}, False, "what it lacks")]
    texts = [message for message in answers.messages if isinstance(message, str)]
    assert texts == ["evaluate: s3://bucket/part-3: no answer"] * 7 + [""]
    assert waited == [0.25, 0.5, 1, 2, 4, 4, 4]


def test_result_of_a_reassigned_task_is_dropped():
    answers = Answers(Overtaken("this worker does not hold this task"))
    run_task(WORK, Outcome, answers, Drain())
    assert answers.results == []


def test_rejected_result_is_a_user_error():
    with pytest.raises(UserError, match="result of the task 'evaluate': a file of the model is named"):
        run_task(WORK, Outcome, Answers(ProtocolError("a file of the model is named manifest.json")), Drain())


def test_unauthorized_result_raises_unauthorized():
    with pytest.raises(Unauthorized):
        run_task(WORK, Outcome, Answers(Unauthorized("no valid token for this job")), Drain())


def test_non_finite_metric_is_logged(caplog):
    answers = Answers()
    run_task(WORK, lambda: Outcome({"val_loss": math.nan, "val_accuracy": 0.9}), answers, Drain())
    assert answers.results
    assert "val_loss of epoch 3 is not finite" in caplog.text
