"""Which steps count as wasted, and when they are reported."""

import pytest

from shoal_trainer.worker.upstream import PROBE_SECONDS
from tests.unit.trainer.worker.scripted import TERM, Bench


def test_dropped_step_after_the_stop_is_reported_while_idle():
    bench = Bench()
    bench.loop._train(bench.batch())
    bench.server.stopped = TERM
    bench.loop._train(bench.batch(2))  # its push is in flight
    bench.loop._train(bench.batch(4))  # the answer reports the stop
    assert len(bench.server.pushes) == 2
    for _ in range(2):
        bench.now += PROBE_SECONDS
        bench.loop._idle()
    assert bench.coordinator.reports == [1]


def test_local_steps_are_reported_as_wasted_when_the_worker_leaves():
    bench = Bench()
    bench.server.reachable = False
    bench.loop.upstream.probe()
    for start in (0, 2):
        bench.loop._train_locally(bench.batch(start))
    bench.loop.leave()
    assert bench.coordinator.reports == [2]


def test_interrupted_and_local_pushes_are_reported_as_wasted_when_the_worker_leaves():
    bench = Bench()
    bench.loop._train(bench.batch())
    bench.server.reachable = False
    bench.loop._train(bench.batch(2))  # its push is interrupted
    bench.loop.upstream.collect()
    assert bench.loop.upstream.outage is not None
    bench.loop._train_locally(bench.batch(4))
    bench.loop.leave()
    assert bench.coordinator.reports == [2]


def test_push_without_an_answer_is_reported_as_wasted_when_the_worker_leaves():
    bench = Bench()
    bench.server.reachable = False
    bench.loop._train(bench.batch())
    bench.loop.leave()
    assert bench.coordinator.reports == [1]


def test_local_step_of_a_lost_lease_is_wasted():
    bench = Bench()
    bench.server.reachable = False
    bench.loop.upstream.probe()
    bench.leases.void(TERM)
    bench.loop._train_locally(bench.batch())
    assert bench.loop.upstream.wasted == 1


def test_worker_without_wasted_steps_reports_none():
    bench = Bench()
    bench.loop._train(bench.batch())
    bench.now += PROBE_SECONDS
    bench.loop._idle()
    assert bench.coordinator.reports == []
    bench.loop.leave()
    assert bench.coordinator.reports == [0]


def test_probe_that_finds_a_lost_server_reports_nothing():
    """A join without leases would count as the arrival of this worker at a successor, which would reassign them."""
    bench = Bench()
    bench.loop.upstream.wasted = 1
    bench.server.reachable = False
    bench.now += PROBE_SECONDS
    bench.loop._idle()
    assert bench.loop.upstream.outage is not None
    assert bench.coordinator.reports == []


@pytest.mark.parametrize(("applied", "wasted"), [(0, 1), (1, 0)])
def test_interrupted_push_that_a_rollback_has_undone_is_wasted_once(applied, wasted):
    """If it was applied, the coordinator counts it with the other steps that it undoes."""
    bench = Bench()
    bench.server.reachable = False
    bench.loop._train(bench.batch())
    bench.loop.upstream.collect()
    bench.server.reachable = True
    bench.server.generation, bench.server.last_seq = 1, applied
    bench.loop.upstream.end_outage(bench.server.welcome())
    assert bench.coordinator.reports == [wasted]
