"""The local steps of an outage are pushed as `Training(outage_merge=…)` says."""

import pytest

from shoal_trainer.ps.buffers import aligned
from shoal_trainer.worker.flat_model import Step
from tests.unit.trainer.worker.scripted import SIZE, Bench


@pytest.mark.parametrize(("policy", "merge"), [({}, False), ({"outage_merge": "adasum"}, True)])
def test_local_steps_are_averaged_or_merged_by_adasum(policy, merge):
    bench = Bench(**policy)
    bench.server.reachable = False
    bench.loop._probe()
    bench.loop._local_step(Step(aligned(SIZE), 0.1, finite=True), bench.batch())
    bench.server.reachable = True
    bench.loop._end_outage(bench.server.welcome())
    assert bench.server.deltas == [(1.0, merge)]
