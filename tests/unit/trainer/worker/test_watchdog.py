"""A step that does not end is told from one that is slow."""

import pytest

from shoal_trainer.worker.watchdog import FACTOR, FIRST_SECONDS, LEAST_SECONDS, Watchdog
from tests.unit.trainer.ps.shards import Clock


@pytest.mark.parametrize(
    ("before", "seconds", "hangs"),
    [
        ([], FIRST_SECONDS, False),  # it may compile
        ([], FIRST_SECONDS + 1, True),
        ([0.1, 0.2], 600, False),
        ([0.1, 0.2], 601, True),
        ([60.0, 0.1], 1200, False),
        ([60.0, 0.1], 1201, True),
    ],
)
def test_a_step_hangs_after_a_multiple_of_the_longest(before, seconds, hangs):
    clock = Clock()
    watchdog = Watchdog(clock)
    for each in before:
        with watchdog.watch("a step"):
            clock.now += each
    clock.now += 10_000  # no step
    assert watchdog.hung() is None
    with watchdog.watch("a step on samples 0-8"):
        clock.now += seconds
        found = watchdog.hung()
    assert (found is not None) == hangs
    if hangs:
        assert f"a step on samples 0-8 has not ended in {seconds:.0f} s" in str(found)
    assert watchdog.hung() is None


def test_a_task_may_take_longer_than_a_step_and_an_evaluation_as_long_as_it_gets_on():
    clock = Clock()
    watchdog = Watchdog(clock)
    with watchdog.watch("a step"):
        clock.now += 0.1
    with watchdog.watch("the task evaluate of epoch 1", FIRST_SECONDS):
        for _ in range(5):
            clock.now += FIRST_SECONDS
            assert watchdog.hung() is None
            watchdog.moved()
        clock.now += FACTOR * FIRST_SECONDS + 1  # a batch took an hour before
        assert "the task evaluate of epoch 1 has not ended in 72001 s" in str(watchdog.hung())
    with watchdog.watch("a step"):
        clock.now += LEAST_SECONDS + 1
        assert watchdog.hung() is not None
    watchdog.moved()
    assert watchdog.hung() is None
