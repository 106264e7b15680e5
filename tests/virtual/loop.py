"""Runs a coroutine in virtual time: hours in seconds, and the same every time."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, ParamSpec, TypeVar

import looptime

P = ParamSpec("P")
T = TypeVar("T")
BEGIN = datetime(2026, 3, 2, 8, tzinfo=UTC)


class _Inline(ThreadPoolExecutor):
    """Runs at once what would run in a thread: a plan then takes no virtual time, and always the same."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def play(story: Callable[[], Coroutine[Any, Any, T]], seed: int = 0) -> T:
    """The result of the story, which runs in an event loop of its own. Its random numbers follow from the seed.

    Shoal's log is silent meanwhile: faults are what stories are made of.
    """
    random.seed(seed)
    log = logging.getLogger("shoal")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        # Nothing runs beside the loop, so that it needs no idle turns before it moves the time.
        with asyncio.Runner(loop_factory=lambda: looptime.new_event_loop(start=0, noop_cycles=0)) as runner:
            runner.get_loop().set_default_executor(_Inline(1))
            return runner.run(story())
    finally:
        log.setLevel(before)


def now() -> float:
    """Virtual seconds since the beginning."""
    return asyncio.get_running_loop().time()


def wall() -> datetime:
    """The virtual wall clock."""
    return BEGIN + timedelta(seconds=now())


def stamp() -> str:
    """The wall clock as Kubernetes writes it."""
    return wall().strftime("%Y-%m-%dT%H:%M:%SZ")


def later(seconds: float) -> str:
    """The wall clock in so many seconds."""
    return (wall() + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def played(story: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """A test that is a story of its own."""

    @functools.wraps(story)
    def test(*arguments: P.args, **fixtures: P.kwargs) -> T:
        return play(lambda: story(*arguments, **fixtures))

    return test
