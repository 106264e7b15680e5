"""When a worker pulls a second time, and what it does first: send a push, or make the next step's parameters."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from shoal_trainer.wire.messages import AnswerMeta, Pulled, Push
from shoal_trainer.worker.cadence import PULL_SHARE, RESERVE, STEADY, Cadence
from shoal_trainer.worker.send import Send
from tests.unit.trainer.worker.scripted import Bench

PERIOD = 1.0


def after(cadence: Cadence, pull_seconds: float) -> float | None:
    """When the second pull begins after an answer whose pull took so long; None if there is none."""
    base = Pulled((1,), (AnswerMeta(live_workers=2),), pull_seconds=pull_seconds)
    cadence.pushes(PERIOD, PERIOD - pull_seconds, base)
    again = cadence.again(base, threading.Event())
    return None if again is None else again.after


def test_second_pull_begins_early_enough_for_the_longest_of_the_last_ones() -> None:
    cadence = Cadence(rounds=False, sequential=False)
    assert after(cadence, 0.01) == pytest.approx((1 - RESERVE) * PERIOD - 0.02)
    assert after(cadence, 2 * PULL_SHARE) is None
    late = [after(cadence, 0.01) or 0.0 for _ in range(20)]
    assert late[0] == pytest.approx((1 - RESERVE) * PERIOD - 0.8 * 2 * PULL_SHARE)
    assert late == sorted(late)
    assert late[-1] == pytest.approx((1 - RESERVE) * PERIOD - 0.02)


def test_pushes_are_answered_with_parameters_until_steps_are_steady() -> None:
    cadence, base = Cadence(rounds=False, sequential=False), Pulled((1,), (AnswerMeta(live_workers=2),))

    def answered(busy: float, period: float = PERIOD) -> bool:
        cadence.pushes(period, busy, base)
        again = cadence.again(base, threading.Event())
        assert again is not None
        return again.answered

    assert [answered(PERIOD) for _ in range(STEADY + 2)] == [True] * STEADY + [False] * 2
    assert answered(0.8 * PERIOD)  # its pull was waited for
    assert [answered(0.95 * PERIOD) for _ in range(STEADY)] == [True] * (STEADY - 1) + [False]


def order(answers: type[Future[Pulled]], **policy: bool) -> list[tuple[str, int]]:
    """What a worker does in three steps: its pushes, and parameters with what a push will do, by the push's number."""
    bench, found = Bench(**policy), list[tuple[str, int]]()
    upstream, server = bench.loop.upstream, bench.server
    include, push_pull = upstream.anticipation.include, server.push_pull

    def included(current: Any, send: Send, pulled: Pulled) -> Any:
        found.append(("parameters", send.push.seq))
        return include(current, send, pulled)

    def pushed(update: Any, out: Any, push: Push, **options: Any) -> Future[Pulled]:
        found.append(("push", push.seq))
        answer = answers()
        answer.set_result(push_pull(update, out, push, **options).result())
        return answer

    upstream.anticipation.include, server.push_pull = included, pushed
    for _ in range(3):
        bench.loop._train(bench.batch())
    return found


class Late(Future[Pulled]):
    """An answer that is waited for."""

    def done(self) -> bool:
        """See `Future`."""
        return False


def test_next_parameters_are_made_before_a_push_unless_answers_are_waited_for() -> None:
    """Both pass over memory. Where exchanges take longer than steps, a push is not to wait."""
    assert order(Future)[-4:] == [("parameters", 2), ("push", 2), ("parameters", 3), ("push", 3)]
    assert order(Late) == [("push", 1), ("parameters", 1), ("push", 2), ("parameters", 2), ("push", 3)]


def test_worker_that_waits_for_its_answers_adds_nothing_to_them() -> None:
    assert order(Future, sequential=True) == [("push", 1), ("push", 2), ("push", 3)]
