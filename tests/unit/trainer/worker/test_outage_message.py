"""What a worker says to the coordinator in an outage, and what it hears; its learning rate then."""

import numpy as np
import pytest

from shoal_trainer.errors import Fenced
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.wire.messages import OptimizerConfig, Progress
from shoal_trainer.worker.optimizers import Placement
from tests.unit.trainer.worker.scripted import SIZE, Bench


def test_outage_is_reported_until_the_servers_are_reachable_again():
    bench = Bench()
    bench.server.reachable = False
    bench.loop.upstream.probe()
    assert bench.coordinator.outage == "a parameter server is unreachable (the server is lost)"
    bench.loop.upstream.end_outage(bench.server.welcome())  # lost again
    assert bench.coordinator.outage
    bench.server.reachable = True
    bench.loop.upstream.end_outage(bench.server.welcome())
    assert bench.coordinator.outage == ""


def test_worker_whose_local_steps_are_used_up_ends_when_it_is_fenced():
    bench = Bench()
    bench.server.reachable = False
    bench.loop.upstream.probe()
    bench.loop.upstream.outage._max_steps = 0

    def refused():
        raise Fenced("its ranges went to others")

    bench.coordinator.finished = refused
    with pytest.raises(Fenced, match="its ranges went to others"):
        bench.run()


FOUND_BY = {
    "a probe": lambda upstream: upstream.probe(),
    "a pull": lambda upstream: upstream.refresh(idle=False),
    "a task": lambda upstream: upstream.pull_exact(aligned(SIZE)),
}


@pytest.mark.parametrize("found", FOUND_BY.values(), ids=FOUND_BY)
@pytest.mark.parametrize("told", ["callback", "schedule", "compile"])
def test_local_steps_have_the_learning_rate_of_a_push(told, found):
    bench, config = Bench(), OptimizerConfig(learning_rate=0.5)
    upstream = bench.loop.upstream
    upstream._placement = Placement(config, rate=(lambda _: 0.25) if told != "compile" else None)
    if told == "callback":
        bench.coordinator.learning_rate = lambda: 0.125
    bench.server.reachable = False
    found(upstream)
    upstream.outage.step(np.ones(SIZE, np.float32), config.batch_size, [Progress(0, -1, 0, 1)])
    assert upstream.local_parameters()[0] == {"callback": -0.125, "schedule": -0.25, "compile": -0.5}[told]
