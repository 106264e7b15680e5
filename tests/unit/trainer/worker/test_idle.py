"""Requests of an idle worker to the parameter servers."""

import threading

import pytest

from shoal_trainer.ps.aligned import aligned
from shoal_trainer.wire.messages import PushMeta
from shoal_trainer.worker.loop import End
from tests.unit.trainer.ps.shards import push_to
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.models import job
from tests.unit.trainer.worker.running import SECONDS, Running, wait

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


class Bench:
    """A worker that has trained 4 batches and is idle; its pulls are counted. `push` is another worker's."""

    def __init__(self, start_servers):
        self.coordinator = FakeCoordinator(64, tasks=())
        self.coordinator.hold = True
        servers = start_servers(self.coordinator)
        self.running, self.shard = Running(job(wire="fp32"), servers, self.coordinator), servers.stores[0]
        self.pulls, self.probes, self.seq = [], threading.Semaphore(0), 0
        pull, hello = self.shard.pulling, self.shard.hello

        def counted(*arguments, **options):
            self.pulls.append(self.shard.history.version)
            return pull(*arguments, **options)

        def probed(*arguments, **options):
            self.probes.release()
            return hello(*arguments, **options)

        self.shard.pulling, self.shard.hello = counted, probed
        self.running.start()
        assert self.probes.acquire(timeout=SECONDS)  # the hello of the start
        wait(self.coordinator, lambda: self.coordinator.pushes >= 4)

    def probe(self, count=1):
        for _ in range(count):
            assert self.probes.acquire(timeout=SECONDS)

    def push(self):
        self.seq += 1
        push_to(
            self.shard,
            9,
            0,
            self.seq,
            self.shard.history.version,
            PushMeta(samples=16),
            aligned(self.shard.size),
        )

    def finish(self):
        self.coordinator.hold = False
        assert self.running.join() is End.FINISHED


@pytest.fixture
def bench(start_servers):
    return Bench(start_servers)


def test_idle_worker_pulls_nothing_while_parameters_are_unchanged(bench):
    bench.probe(3)
    assert len(bench.pulls) == 1  # of the join
    bench.finish()


@pytest.mark.nightly
def test_idle_worker_pulls_once_when_the_others_pause(bench):
    bench.probe()
    for _ in range(3):
        bench.push()
        bench.probe()
    assert len(bench.pulls) == 1
    bench.probe(3)
    assert bench.pulls[1:] == [7]
    bench.finish()


@pytest.mark.nightly
def test_idle_worker_begins_new_work_with_fresh_parameters(bench):
    bench.probe()
    bench.push()
    bench.probe()
    bases, push = [], bench.shard.pushing

    def pushed(slot, incarnation, seq, base, *arguments, **options):
        bases.append(base)
        return push(slot, incarnation, seq, base, *arguments, **options)

    bench.shard.pushing = pushed
    with bench.coordinator.lock:
        bench.coordinator.free.append((1, 0, 16))
    bench.finish()
    assert bases == [5]


def test_idle_worker_pushes_its_pending_gradient(bench):
    bench.shard.workers._permits.pulled(0, 4)
    bench.probe(2)
    assert bench.shard.workers._permits.admits(10, 10, 0)
    bench.finish()


@pytest.mark.nightly
def test_an_idle_worker_asks_only_for_the_pushes_that_it_does_not_know(bench):
    """After an evaluation all workers pull at once; a shard's journal has up to 49,152 entries."""
    sent, answer = [], bench.shard.answer

    def counted(*arguments, **options):
        found = answer(*arguments, **options)
        sent.append([entry.version for entry in found.meta.journal.entries])
        return found

    bench.shard.answer = counted
    bench.probe()
    for _ in range(3):
        bench.push()
        bench.probe()
    bench.probe(3)
    with bench.coordinator.lock:
        bench.coordinator.free.append((1, 0, 16))
    bench.finish()
    assert sent[-3:] == [[5, 6, 7], [], [8]]
    journal = bench.running.worker.loop.upstream._followed[0]._journal
    assert [entry.version for entry in journal.since(-1).entries] == list(range(1, 9))
