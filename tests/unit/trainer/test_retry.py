"""Retries of an unreachable service: their pauses, their log messages and their end."""

import threading
from types import SimpleNamespace

import pytest

from shoal_trainer.contract import EXIT_DRAINED
from shoal_trainer.errors import Unreachable, UserError
from shoal_trainer.retry import until_reachable


class Flaky:
    """Raises Unreachable with these messages, the last one first, then answers."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def __call__(self):
        if self.answers:
            raise Unreachable(self.answers.pop())
        return "the answer"


def test_retries_back_off_and_log_each_reason_once(caplog):
    waited = []
    call = Flaky(*["no answer"] * 6, *["503"] * 4)
    assert until_reachable(call, SimpleNamespace(wait=waited.append), "the data") == "the answer"
    assert waited == [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    messages = [record.message for record in caplog.records]
    assert [("503" in text, "no answer" in text) for text in messages] == [(True, False), (False, True)]
    assert all(text.startswith("waiting for the data: ") for text in messages)


def test_longest_pause_is_configurable():
    waited = []
    until_reachable(
        Flaky(*["no answer"] * 5), SimpleNamespace(wait=waited.append), "the storage", longest=1.0
    )
    assert waited == [0.25, 0.5, 1, 1, 1]


def test_user_error_is_not_retried():
    tries = []

    def call():
        tries.append(1)
        raise UserError("fix it")

    with pytest.raises(UserError):
        until_reachable(call, threading.Event(), "the data")
    assert len(tries) == 1


def test_stop_ends_the_retries():
    stop = threading.Event()
    stop.set()
    with pytest.raises(SystemExit) as ended:
        until_reachable(Flaky("no answer"), stop, "the storage")
    assert ended.value.code == EXIT_DRAINED
