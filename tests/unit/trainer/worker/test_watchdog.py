"""A step that does not end is told from one that is slow."""

import pytest

from shoal_trainer.worker.watchdog import CHECK_SECONDS, FACTOR, FIRST_SECONDS, LEAST_SECONDS, Watchdog
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


def frozen(seconds, *, first):
    """A step within which the whole process is frozen, as in a paused virtual machine; `first`: what goes on then."""
    clock = Clock()
    watchdog = Watchdog(clock)
    for _ in range(3):
        with watchdog.watch("a step"):
            clock.now += 1.0
    watchdog.checked()
    with watchdog.watch("a step"):
        clock.now += seconds
        if first == "the watchdog":
            assert watchdog.checked() is None
        clock.now += 1.0
    watchdog.checked()
    return clock, watchdog


@pytest.mark.parametrize("first", ["the watchdog", "the step"])
def test_a_step_of_a_process_that_was_frozen_has_not_taken_that_time(first):
    clock, watchdog = frozen(FIRST_SECONDS, first=first)
    with watchdog.watch("a step"):
        for _ in range(int(LEAST_SECONDS / CHECK_SECONDS)):
            clock.now += CHECK_SECONDS
            assert watchdog.checked() is None
        for _ in range(2):
            clock.now += CHECK_SECONDS
            found = watchdog.checked()
    assert "the longest before took" in str(found)
