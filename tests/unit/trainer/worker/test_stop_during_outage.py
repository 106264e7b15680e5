"""A worker that learns after an outage that training has ended."""

from concurrent.futures import Future

from shoal_trainer.errors import Unreachable
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.worker.flat_model import Step
from tests.unit.trainer.worker.scripted import SIZE, TERM, Bench


def test_lease_of_dropped_local_steps_is_not_presented_to_a_successor():
    """A successor that knows of no stop would grant it again, and the dropped samples would never be pushed."""
    bench = Bench()
    bench.server.reachable = False
    bench.loop.upstream.probe()
    bench.loop.upstream.pending.add(Step(aligned(SIZE), 0.1, finite=True), bench.batch())
    bench.loop.upstream.local_steps()
    bench.server.stopped = TERM
    bench.loop.upstream.end_outage(bench.server.welcome())  # then the server is lost again
    assert bench.leases.held() == {}


def test_local_steps_are_dropped_when_the_interrupted_push_reaches_the_end_of_training():
    """The final evaluation waits for one push of each worker."""
    bench = Bench()
    bench.loop._train(bench.batch())
    interrupted = Future()
    interrupted.set_exception(Unreachable("the server is lost"))
    bench.loop.upstream.in_flight = (interrupted, bench.loop.upstream.in_flight[1])
    bench.server.reachable = False
    bench.loop.upstream.collect()
    bench.loop._train_locally(bench.batch(2))
    bench.server.reachable = True
    bench.server.pushes.clear()
    welcome = bench.server.welcome()
    bench.server.stopped = TERM
    bench.loop.upstream.end_outage(welcome)
    assert [push.seq for push in bench.server.pushes] == [1]
    assert bench.server.deltas == []
    assert bench.loop.upstream.wasted == 1
    assert bench.leases.held() == {}
