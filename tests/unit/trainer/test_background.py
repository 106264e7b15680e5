"""A thread that repeats a call: when it is woken, after its pause, and after every error."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from shoal_trainer import background
from shoal_trainer.background import Background, Wish
from shoal_trainer.errors import Unreachable

SECONDS = 120


class Calls:
    """Makes the listed results, one in each call, then stops the thread."""

    def __init__(self, *results: float | Exception | None, pause: float | None = None) -> None:
        self.results = list(results)
        self.during: Callable[[], None] = lambda: None
        self.ended = threading.Event()
        self.thread = Background("calls", self, pause=pause)

    def __call__(self) -> float | None:
        self.during()
        result = self.results.pop(0)
        if not self.results:
            self.thread.stop()
            self.ended.set()
        if isinstance(result, Exception):
            raise result
        return result


def test_it_waits_for_the_first_wake_and_then_for_the_pause_of_each_call() -> None:
    calls = Calls(0.0, 0.001, None)
    calls.thread.start()
    assert not calls.ended.wait(0.01)
    calls.thread.wake()
    assert calls.ended.wait(SECONDS)


def test_a_wake_during_a_call_is_another_call() -> None:
    calls = Calls(None, None)
    calls.during = calls.thread.wake
    calls.thread.start()
    calls.thread.wake()
    assert calls.ended.wait(SECONDS)


def test_an_error_ends_nothing_and_only_one_that_is_unexpected_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "RETRY_SECONDS", 0.001)
    calls = Calls(Unreachable("no answer"), RuntimeError("can't start new thread"), None, pause=0.0)
    with caplog.at_level(logging.INFO):
        calls.thread.start()
        assert calls.ended.wait(SECONDS)
    assert [record.getMessage() for record in caplog.records] == ["calls: trying again"]
    assert "can't start new thread" in caplog.text


def test_a_wish_during_an_attempt_is_open_after_it() -> None:
    wish = Wish()
    assert not wish.open
    assert wish.wait(0)
    wish.make()
    attempt = wish.number
    wish.make()
    wish.fulfil(attempt)
    assert wish.open
    assert not wish.wait(0)
    wish.fulfil(wish.number)
    assert wish.wait(0)
