"""A step that does not end is told from one that is slow."""

from dataclasses import replace

import numpy as np
import pytest

from shoal_trainer import Indexed
from shoal_trainer.errors import HungStep
from shoal_trainer.worker.feed import Feed
from shoal_trainer.worker.loop import ALONE_SECONDS
from shoal_trainer.worker.upstream import PROBE_SECONDS
from shoal_trainer.worker.watchdog import FACTOR, FIRST_SECONDS, LEAST_SECONDS, Watchdog
from shoal_trainer.worker.work import DataWork, Finished
from tests.unit.trainer.ps.shards import Clock
from tests.unit.trainer.worker.scripted import Bench


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


@pytest.mark.parametrize(
    ("trained", "hung", "ends"),
    [
        (0.0, FIRST_SECONDS + 1, False),  # nobody can read: the storage is away, which is waited for
        (2 * ALONE_SECONDS, FIRST_SECONDS + 1, True),
        (2 * ALONE_SECONDS, FIRST_SECONDS - 5, False),
    ],
)
def test_a_read_that_hangs_on_one_worker_only_ends_it(trained, hung, ends):
    """Its lease would be kept for ever, and the epoch would never end."""
    bench = Bench()
    versions = iter(range(5, 10**6))
    welcome = bench.server.welcome

    def probed():
        found = welcome()
        version = next(versions) if bench.now <= trained else 1000
        return replace(found, shards=(found.shards[0].model_copy(update={"version": version}),))

    def idle():
        bench.now += PROBE_SECONDS
        bench.loop._idle()

    bench.server.welcome = probed
    with bench.feed.reads.watch("a read of samples 0-8", FIRST_SECONDS):
        while bench.now < trained + 5 * PROBE_SECONDS:
            idle()
        bench.now = hung
        if ends:
            with pytest.raises(HungStep, match=r"a read of samples 0-8 has not ended in 360\d s"):
                idle()
        else:
            idle()
    idle()  # it reads no more


def test_the_feed_tells_how_long_it_reads():
    seen = []

    def parse(row):
        seen.append(feed.reads.since)
        return np.float32(row)

    works = iter([DataWork((1, 1), 0, 0, 4), Finished()])
    feed = Feed(
        Indexed.from_items(np.arange(4), parse), 4, lambda: next(works), lambda _work: None, clock=lambda: 7.0
    )
    feed._run()
    assert seen == [7.0] * 4
    assert feed.reads.since is None
