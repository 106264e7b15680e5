"""A non-finite step while training ends or a server is unreachable."""

import math

import pytest

from shoal_trainer.errors import UserError
from tests.unit.trainer.worker.scripted import TERM, Bench


def test_non_finite_step_fails_the_job():
    bench = Bench()
    bench.loss = math.nan
    with pytest.raises(UserError, match="not finite"):
        bench.loop._train(bench.batch())


@pytest.mark.parametrize("in_flight", [False, True])
def test_non_finite_step_after_the_stop_is_discarded(in_flight):
    bench = Bench()
    if in_flight:
        bench.loop._train(bench.batch())
    bench.loss, bench.server.stopped = math.nan, TERM
    bench.loop._train(bench.batch(2 * in_flight))
    assert bench.loop.upstream.outage is None
    assert bench.loop.upstream.wasted == 1


def test_batch_of_a_lease_that_the_pull_voids_is_not_computed():
    bench = Bench()
    bench.loop.upstream.probe()
    bench.server.stopped = TERM
    bench.loop._train(bench.batch())
    assert bench.loop.steps == 0


@pytest.mark.parametrize("recovered", [False, True], ids=["non-finite again", "finite"])
def test_batch_of_a_non_finite_local_step_is_repeated_after_the_outage(recovered):
    bench = Bench()
    bench.server.reachable = False
    bench.loop.upstream.probe()
    bench.loss = math.nan
    bench.items = [bench.batch()]
    bench.loop._outage_turn()
    assert bench.loop.upstream.outage is not None
    bench.server.reachable = True
    bench.loop.upstream.end_outage(bench.server.welcome())
    repeated = bench.loop._next_item(0.0)
    assert repeated is not None
    if recovered:
        bench.loss = 0.1
        bench.loop._train(repeated)
        assert [push.meta.progress for push in bench.server.pushes] == [((0, -1, 0, 2),)]
    else:
        with pytest.raises(UserError, match="not finite"):
            bench.loop._train(repeated)


def test_batch_of_a_non_finite_local_step_is_dropped_if_training_has_ended():
    bench = Bench()
    bench.server.reachable = False
    bench.loop.upstream.probe()
    bench.loss = math.nan
    bench.items = [bench.batch()]
    bench.loop._outage_turn()
    bench.server.reachable, bench.server.stopped = True, TERM
    bench.loop.upstream.end_outage(bench.server.welcome())
    assert bench.loop._next_item(0.0) is None


def test_no_lease_continues_after_a_reported_divergence():
    """The marked positions are not pushed: a successor that renewed the lease would wait for them forever."""
    bench = Bench(on_nan="rollback")
    bench.loop._train(bench.batch())
    bench.loss = math.nan
    bench.loop._train(bench.batch(2))
    assert [(batch.start, batch.stop) for batch in bench.coordinator.diverged_batches] == [(2, 4)]
    assert bench.leases.held() == {}
