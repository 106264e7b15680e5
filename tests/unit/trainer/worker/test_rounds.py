"""When a worker waits for the others after its pushes."""

from __future__ import annotations

import pytest

from shoal_trainer.worker.cadence import ROUND_SHARE
from tests.unit.trainer.worker.scripted import Bench

STEP = 1.0


def run(bench: Bench, steps: int) -> list[bool]:
    """Steps of a second; whether each push waited for the others."""
    pushed, bench.step_seconds = len(bench.server.pushes), STEP
    for _ in range(steps):
        bench.loop._train(bench.batch())
    bench.loop.upstream.collect()
    return [push in bench.server.rounds for push in bench.server.pushes[pushed:]]


def share(bench: Bench, of_round: float) -> None:
    """A push and a pull take this part of what they may take in a round."""
    bench.server.seconds = of_round * ROUND_SHARE * STEP


@pytest.mark.parametrize("options", [{"rounds": False}, {"rounds": False, "sequential": True}])
def test_switched_off_or_alone_a_worker_waits_for_nobody(options: dict[str, bool]) -> None:
    bench = Bench(**options)
    bench.server.live = 4
    assert not any(run(bench, 5))
    alone = Bench(rounds=True)
    assert not any(run(alone, 5))


def test_worker_waits_for_the_others_where_its_messages_take_little_time() -> None:
    bench = Bench(rounds=True)
    bench.server.live = 4
    share(bench, 0.9)
    assert run(bench, 30)[-20:] == [True] * 20
    assert bench.loop.upstream.in_flight is None
    assert not bench.loop._overlapped
    share(bench, 1.1)  # all push at once
    assert run(bench, 40)[-20:] == [False] * 20
    share(bench, 0.9)  # as before it took part
    assert run(bench, 30)[-20:] == [False] * 20
    share(bench, 0.4)
    assert run(bench, 40)[-20:] == [True] * 20
    share(bench, 1.1)
    assert run(bench, 40)[-20:] == [False] * 20
    share(bench, 0.4)
    assert run(bench, 30)[-20:] == [False] * 20
    bench.server.live = 3
    assert run(bench, 30)[-20:] == [True] * 20


def test_worker_goes_on_alone_where_its_steps_begin_late() -> None:
    """What an exchange costs is all that is no step and no wait: also what its push and its pull do not see."""
    bench = Bench(rounds=True)
    bench.server.live = 4
    share(bench, 0.4)
    bench.server.wait = 0.3 * STEP
    bench.server.late = 0.4 * ROUND_SHARE * STEP
    assert run(bench, 30)[-20:] == [True] * 20
    bench.server.late = 1.2 * ROUND_SHARE * STEP
    assert run(bench, 100)[-50:] == [False] * 50


def test_next_gradient_is_expected_where_the_worker_waits_for_its_answer() -> None:
    bench = Bench(rounds=True)
    bench.server.live = 4
    share(bench, 1.1)
    run(bench, 3)
    overlapped = bench.server.pushes[-1].ahead
    share(bench, 0.0)
    run(bench, 30)
    assert bench.server.pushes[-1].ahead == overlapped - 1  # no gradient of its own is in flight
