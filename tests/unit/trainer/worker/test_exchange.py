"""How often a worker tries to connect to a lost parameter server, and that it keeps no connection when it ends."""

import random
import threading
from types import SimpleNamespace

import pytest

from shoal_trainer.errors import Unreachable
from shoal_trainer.ps.recovery import JITTER
from shoal_trainer.wire.messages import AnswerMeta, Copy, Pulled, Push, PushMeta
from shoal_trainer.worker.exchange import Again, Exchange

ATTEMPTS = 8


def pauses(copy, told=None):
    """The pauses in seconds between attempts to connect when one server does not answer."""
    found = []
    waits = ([] if told is None else told).append

    def hello(_model, _copy):
        raise Unreachable("shard 1")

    client = SimpleNamespace(hello=hello, close=lambda: None)
    exchange = Exchange(client, None, rng=random.Random(0), waits=waits)
    exchange._stop = SimpleNamespace(
        is_set=lambda: len(found) >= ATTEMPTS, wait=found.append, set=lambda: None
    )
    with pytest.raises(Unreachable):
        exchange.connect(copy).result(10)
    exchange.close()
    return found


def test_the_job_is_told_why_a_worker_waits_for_its_servers():
    told = []
    pauses(copy_of(10), told)
    assert told == ["waits for the parameter servers: shard 1"] * ATTEMPTS


def copy_of(workers):
    return SimpleNamespace(pulled=SimpleNamespace(live_workers=workers))


@pytest.mark.parametrize(
    ("copy", "expected"),
    [
        (copy_of(10), [0.25] * ATTEMPTS),
        (copy_of(333), [0.25, 0.5] + [1.0] * 6),
        (copy_of(5000), [0.25, 0.5, 1.0, 2.0] + [3.0] * 4),
        (Copy(lambda: None), [0.25, 0.5, 1.0, 2.0] + [3.0] * 4),
    ],
    ids=["10", "333", "5000", "no-copy"],
)
def test_pauses_double_up_to_a_limit_that_grows_with_the_workers(copy, expected):
    found = pauses(copy)
    assert found == pytest.approx(expected, rel=JITTER)
    assert len(set(found)) == ATTEMPTS


@pytest.mark.parametrize(("early", "cheap", "answered", "made"), [
    (False, False, False, ["push", "wait", "pull"]),
    (True, False, False, ["push", "wait", "pull"]),
    (False, False, True, ["push_pull", "wait", "pull"]),
    (True, False, True, ["push_pull", "wait"]),
    (True, True, True, ["push_pull", "wait", "pull"]),
])  # fmt: skip
def test_parameters_are_pulled_just_before_they_are_needed(early, cheap, answered, made):
    calls, waited = [], []

    def call(name, version, **seconds):
        def made(*_arguments, **_options):
            calls.append(name)
            return Pulled((version,), (AnswerMeta(),), **seconds)

        return made

    def hurried(seconds):
        calls.append("wait")
        waited.append(seconds)
        return early

    client = SimpleNamespace(
        push=call("push", 5, push_seconds=0.25), push_pull=call("push_pull", 5, push_seconds=0.25),
        pull=call("pull", 7, pull_seconds=0.5), close=lambda: None,
    )  # fmt: skip
    exchange = Exchange(client, None, clock=lambda: 0.0)
    again = Again(2.0, SimpleNamespace(wait=hurried), cheap=cheap, answered=answered)
    found = exchange.push_pull(None, None, Push(1, (4,), PushMeta(1)), again).result(10)
    exchange.close()
    assert (calls, waited) == (made, [2.0])
    assert found.staleness(4) == 0  # others' pushes came after its own
    assert found.versions == ((7,) if "pull" in made else (5,))
    assert found.push_seconds == 0.25


def test_worker_that_ends_pulls_nothing():
    client = SimpleNamespace(
        push=lambda *_: "versions", push_pull=lambda *_: "parameters", close=lambda: None
    )
    exchange = Exchange(client, None)
    exchange.end()
    again = Again(60.0, threading.Event(), cheap=True, answered=False)
    again.hurry.set()
    assert exchange.push_pull(None, None, None, again).result(10) == "versions"
    exchange.close()


def test_what_is_opened_while_it_is_closed_is_closed_too():
    told, closed = [], threading.Event()

    def hello(_model, _copy):
        exchange.close()
        told.append("open")
        return SimpleNamespace(ready=True)

    def close():
        told.append("closed")
        if len(told) == 3:
            closed.set()

    exchange = Exchange(SimpleNamespace(hello=hello, close=close), None)
    exchange.connect(Copy(lambda: None))
    assert closed.wait(10)
    assert told == ["closed", "open", "closed"]
