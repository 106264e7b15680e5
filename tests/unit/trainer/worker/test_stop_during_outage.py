"""A worker that learns after an outage that training has ended."""

from shoal_trainer.ps.buffers import aligned
from shoal_trainer.worker.flat_model import Step
from tests.unit.trainer.worker.scripted import SIZE, TERM, Bench


def test_lease_of_dropped_local_steps_is_not_presented_to_a_successor():
    """A successor that knows of no stop would grant it again, and the dropped samples would never be pushed."""
    bench = Bench()
    bench.server.reachable = False
    bench.loop._probe()
    bench.loop._local_step(Step(aligned(SIZE), 0.1, finite=True), bench.batch())
    bench.server.stopped = TERM
    bench.loop._end_outage(bench.server.welcome())  # then the server is lost again
    assert bench.leases.held() == {}
