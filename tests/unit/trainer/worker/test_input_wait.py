"""The input wait of workers: measured by the loop, reported by the coordinator, shown in the table."""

import io
import threading
from collections import deque

import pytest
import tensorflow as tf
from prometheus_client import CollectorRegistry
from rich.console import Console

from shoal_trainer import Indexed
from shoal_trainer.contract import Phase, StatusReport
from shoal_trainer.coordinator.members import Members
from shoal_trainer.coordinator.metrics import StatusCollector
from shoal_trainer.run.table import render
from shoal_trainer.wire.messages import Timings
from shoal_trainer.worker.feed import DEPTH, Feed, Ready
from shoal_trainer.worker.loop import End
from shoal_trainer.worker.work import DataWork, Finished
from tests.unit.trainer.ps.shards import Clock
from tests.unit.trainer.worker.fakes import FakeCoordinator, Servers
from tests.unit.trainer.worker.models import DATA, job
from tests.unit.trainer.worker.running import SECONDS, Running

STEP = 0.1


class Timed:
    """The real feed in virtual time: the data function takes `seconds` per batch, `DEPTH` batches ahead."""

    def __init__(self, feed, clock, seconds):
        self.feed, self.clock, self.seconds = feed, clock, seconds
        self.places = deque([0.0] * DEPTH)
        self.read = 0.0
        self.start, self.stop, self.task_finished = feed.start, feed.stop, feed.task_finished
        self.upcoming = feed.upcoming

    def get(self, timeout):
        item = self.feed.get(timeout)
        if isinstance(item, Ready):
            self.read = max(self.read, self.places.popleft()) + self.seconds
            self.clock.now = max(self.clock.now, self.read)
            self.places.append(self.clock.now)
        return item


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("seconds", "share"), [(0.01, 0.0), (0.09, 0.0), (0.2, 0.5), (0.4, 0.75)])
def test_input_wait_is_the_reading_time_beyond_the_step(tmp_path, seconds, share):
    coordinator = FakeCoordinator(
        DATA.size, epochs=3, tasks=()
    )  # so that the first batches, read without waiting, hardly count
    servers = Servers(tmp_path, coordinator)
    clock, members = Clock(), Members()
    applied = coordinator.on_applied

    def seen(push):
        members.get((push.slot, push.incarnation)).pushed(1, push.meta.samples, 0, push.meta.timings)
        applied(push)

    servers.stores[0].on_applied = seen
    running = Running(job(), servers, coordinator)
    loop, step = running.worker.loop, running.flat_model.step

    def compute(*given):
        clock.now += STEP
        return step(*given)

    running.flat_model.step = compute
    loop._clock, loop._feed = clock, Timed(loop._feed, clock, seconds)
    try:
        assert running.start().join() is End.FINISHED
    finally:
        servers.close()
    assert members.input_wait() == pytest.approx(share, abs=0.02)


def test_batches_are_read_ahead_during_a_step():
    gate, read = threading.Semaphore(DEPTH * 16), threading.Semaphore(0)

    def samples(start, stop):
        def each():
            for position in range(start, stop):
                gate.acquire()
                read.release()
                yield float(position), 0

        return tf.data.Dataset.from_generator(
            each, output_signature=(tf.TensorSpec((), tf.float32), tf.TensorSpec((), tf.int64))
        )

    works = iter([DataWork((0, 1), 0, 0, 512), Finished()])
    feed = Feed(Indexed(512, samples, shuffle=0), 16, lambda: next(works), [].append)
    feed.start()
    try:
        for _ in range(DEPTH * 16):
            assert read.acquire(timeout=SECONDS)
        # During a step, `DEPTH` batches are read, although the data function then blocks.
        ends = [item.batch.end for _ in range(DEPTH) if isinstance(item := feed.get(SECONDS), Ready)]
        assert ends == [16 * (n + 1) for n in range(DEPTH)]
        assert feed.get(0.0) is None
        gate.release(16)
        late = feed.get(SECONDS)
        assert isinstance(late, Ready)
        assert late.batch.end == 16 * (DEPTH + 1)
    finally:
        feed.stop()
        gate.release(1024)


def test_input_wait_is_averaged_over_active_workers():
    members = Members()
    assert members.input_wait() is None
    members.get((0, 0)).pushed(1, 16, 0, Timings(step=0.3, input=0.0))
    members.get((1, 0)).pushed(1, 16, 0, Timings(step=0.1, input=0.1))
    members.get((2, 0))
    assert members.input_wait() == pytest.approx(0.25)


def test_input_wait_is_exported_and_shown_when_high():
    def shown(wait):
        console = Console(width=140, file=io.StringIO())
        console.print(render(report(wait), title="digits"))
        return console.file.getvalue()

    def report(wait):
        return StatusReport(job_uid="u", phase=Phase.TRAINING, input_wait=wait)

    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: report(0.25)))
    assert registry.get_sample_value("shoal_input_wait_ratio") == 0.25
    assert "workers wait for input 25% of the time" in shown(0.25)
    assert "for input" not in shown(0.01)
    assert "for input" not in shown(None)
