"""The message of an outage in the heartbeats."""

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
