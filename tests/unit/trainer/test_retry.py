"""Retries of an unreachable service: their pauses, their log messages and their end."""

import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.contract import EXIT_DRAINED
from shoal_trainer.errors import Unreachable, UserError
from shoal_trainer.retry import Backoff, until_reachable


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
    assert until_reachable(call, "the data", SimpleNamespace(wait=waited.append)) == "the answer"
    assert waited == [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    messages = [record.message for record in caplog.records]
    assert [("503" in text, "no answer" in text) for text in messages] == [(True, False), (False, True)]
    assert all(text.startswith("waiting for the data: ") for text in messages)


def test_longest_pause_is_configurable():
    waited = []
    until_reachable(
        Flaky(*["no answer"] * 5), "the storage", SimpleNamespace(wait=waited.append), longest=1.0
    )
    assert waited == [0.25, 0.5, 1, 1, 1]


def test_user_error_is_not_retried():
    tries = []

    def call():
        tries.append(1)
        raise UserError("fix it")

    with pytest.raises(UserError):
        until_reachable(call, "the data")
    assert len(tries) == 1


def test_stop_ends_the_retries():
    stop = threading.Event()
    stop.set()
    with pytest.raises(SystemExit) as ended:
        until_reachable(Flaky("no answer"), "the storage", stop)
    assert ended.value.code == EXIT_DRAINED


@given(
    first=st.floats(0.001, 10),
    factor=st.floats(1, 1000),
    jitter=st.floats(0, 0.9),
    attempts=st.integers(1, 20),
    stopped=st.booleans(),
)
def test_pauses_double_up_to_the_longest_within_the_jitter(first, factor, jitter, attempts, stopped):
    waited = []
    event = SimpleNamespace(wait=lambda pause: waited.append(pause) or stopped)
    longest = first * factor
    backoff = Backoff(first, longest, jitter)
    for _ in range(2):
        assert all(backoff.wait(event) is stopped for _ in range(attempts))
        backoff.reset()
    expected = [min(first * 2**attempt, longest) for attempt in range(attempts)] * 2
    for pause, mean in zip(waited, expected, strict=True):
        assert mean * (1 - jitter) * 0.999 <= pause <= mean * (1 + jitter) * 1.001


def test_reason_is_new_when_it_changes_or_after_a_reset():
    backoff = Backoff()
    assert [backoff.is_new(Unreachable(reason)) for reason in "aabba"] == [True, False, True, False, True]
    backoff.reset()
    assert backoff.is_new(Unreachable("a"))
