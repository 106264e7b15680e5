"""The local steps of an outage are pushed as a share of their difference."""

from shoal_trainer.ps.aligned import aligned
from shoal_trainer.worker.flat_model import Step
from tests.unit.trainer.worker.scripted import SIZE, Bench


def test_local_steps_are_averaged():
    bench = Bench()
    bench.server.reachable = False
    bench.loop.upstream.probe()
    bench.loop.upstream.pending.add(Step(aligned(SIZE), 0.1, finite=True), bench.batch())
    bench.loop.upstream.local_steps()
    bench.server.reachable = True
    bench.loop.upstream.end_outage(bench.server.welcome())
    assert bench.server.deltas == [1.0]
