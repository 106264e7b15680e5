"""What a worker says to the coordinator in an outage, and what it hears."""

import pytest

from shoal_trainer.errors import Fenced
from tests.unit.trainer.worker.scripted import Bench


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
