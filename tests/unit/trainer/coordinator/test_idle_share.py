"""How much of the workers' time has something to train, from one worker to a thousand, in virtual time."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest

from shoal_trainer.contract import JobIdentity, StopAfter
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.assigning import ASKS_PER_SECOND, IDLE_SECONDS
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.members import IDLE_TOLD_SECONDS
from shoal_trainer.coordinator.protocol import DataSpec, FileEnded, Heartbeat, Join, Lease, TaskDone
from shoal_trainer.coordinator.ranges import FILE_PIECES
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.ps.values import AppliedPush
from shoal_trainer.wire.messages import Progress, PushMeta, Timings
from shoal_trainer.worker.feed import DEPTH, REFILL
from tests.unit.trainer.coordinator.bench import Bench, next_work

BATCH = 32
STEP = 0.2
TICK_SECONDS = 0.25


class Worker:
    """It reads batches ahead as `worker/feed.py` does; a step takes `seconds`."""

    def __init__(self, slot: int, seconds: float, batch: int) -> None:
        self.slot, self.seconds, self.batch = slot, seconds, batch
        self.queue: deque[tuple[Lease, int, int]] = deque()
        self.step: tuple[Lease, int, int] | None = None
        self.lease: Lease | None = None
        self.at = self.pushes = 0
        self.waits = False
        self.busy_seconds = 0.0


class Job:
    """A job whose workers have steps of these `seconds`, and tasks that take no time. `files`: their lengths."""

    def __init__(
        self,
        seconds: list[float],
        stop: StopAfter,
        *,
        size: int | None = None,
        files: tuple[int, ...] = (),
        callbacks: bool = False,
        batch: int = BATCH,
    ) -> None:
        self.now, self.files = 0.0, files
        self.steps = self.short = self.leases = 0
        shard = ShardStore(0, 1, 0, clock=lambda: self.now)
        job = JobIdentity(namespace="n", name="j", uid="u")
        self.coordinator = Coordinator(job, stop, BATCH, shard, clock=lambda: self.now)
        self.coordinator.ready(0, {})
        names = tuple(map(str, range(len(files))))
        data = DataSpec(size=size, files=names, callbacks=callbacks)
        self.workers = [Worker(slot, each, batch) for slot, each in enumerate(seconds)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers, self._jitter = count(), random.Random(0)
        for worker in self.workers:
            shard.workers.connect(worker.slot, 0)
            self.coordinator.join(Join(slot=worker.slot, incarnation=0, data=data, batch_size=batch))
            self._at(0.0, partial(self._read, worker))
        self._tick()

    def idle(self) -> float:
        """The share of the workers' time in which they train nothing."""
        while not self.coordinator.record.over:
            self.now, _, happens = heapq.heappop(self._events)
            happens()
        return 1 - sum(worker.busy_seconds for worker in self.workers) / self.now / len(self.workers)

    def _at(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), happens))

    def _tick(self) -> None:
        self.coordinator.tick()
        self._at(TICK_SECONDS, self._tick)

    def _asks_again(self, worker: Worker) -> None:
        worker.waits = False
        self._read(worker)

    def _read(self, worker: Worker) -> None:
        """Read ahead, and begin the next step."""
        depth = DEPTH if len(worker.queue) <= REFILL else 0
        while len(worker.queue) < depth and not worker.waits:
            if (lease := worker.lease) is None:
                work = next_work(self.coordinator, worker.slot)
                if work.kind == "task":
                    self.coordinator.task_done(TaskDone(slot=worker.slot, incarnation=0, token=work.token))
                elif work.kind == "data":
                    worker.lease, worker.at = work.lease, work.lease.start
                    self.leases += 1
                else:
                    worker.waits = True
                    self._at(work.seconds, partial(self._asks_again, worker))
                continue
            stop = self.files[lease.number] if lease.stop is None else lease.stop
            end = min(worker.at + worker.batch, stop)
            worker.queue.append((lease, worker.at, end))
            worker.at, worker.lease = end, lease if end < stop else None
        if worker.queue and worker.step is None:
            worker.step = worker.queue.popleft()
            seconds = worker.seconds * self._jitter.uniform(0.9, 1.1)
            worker.busy_seconds += seconds
            self._at(seconds, partial(self._push, worker))

    def _push(self, worker: Worker) -> None:
        assert worker.step is not None
        (lease, start, end), worker.step = worker.step, None
        worker.pushes, self.steps = worker.pushes + 1, self.steps + 1
        self.short += end - start < worker.batch
        marks = (Progress(lease.epoch, lease.number, start, end),)
        meta = PushMeta(samples=end - start, timings=Timings(step=worker.seconds), progress=marks)
        self.coordinator.applied(
            AppliedPush(worker.slot, 0, worker.pushes, self.steps, 0, 1.0, meta, delta=True)
        )
        if lease.stop is None and end == self.files[lease.number]:
            self.coordinator.file_ended(
                FileEnded(slot=worker.slot, incarnation=0, token=lease.token, length=end)
            )
        self._read(worker)


def speeds(workers: int, *, equal: bool) -> list[float]:
    """Seconds of a step: equal, or up to four times as long as those of others."""
    draw = random.Random(1)
    return [STEP if equal else STEP * 4 ** draw.uniform(-0.5, 0.5) for _ in range(workers)]


def lost_at_the_end(workers: int) -> float:
    """Seconds: what the slowest one has read ahead, and a request more of each, takes no longer."""
    return 4 * STEP + max(IDLE_SECONDS, workers / ASKS_PER_SECOND)


@pytest.mark.parametrize("callbacks", [False, True])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize(
    ("workers", "steps"),
    [(1, 40), (2, 40), (8, 40), (24, 20), (64, 8), pytest.param(200, 50, marks=pytest.mark.nightly)],
)
def test_few_workers_and_many_have_something_to_train(workers, steps, equal, callbacks):
    """Two epochs of so many steps of each worker."""
    size, seconds = BATCH * workers * steps, speeds(workers, equal=equal)
    job = Job(seconds, StopAfter(epochs=2), size=size, callbacks=callbacks)
    assert job.idle() * job.now <= lost_at_the_end(workers)
    assert job.short == 0
    assert job.leases <= 20 * workers + 80


@pytest.mark.nightly
def test_a_thousand_workers_have_something_to_train_and_ask_no_more_than_the_coordinator_answers():
    size = BATCH * 1000 * 100
    job = Job(speeds(1000, equal=False), StopAfter(epochs=2), size=size, callbacks=True)
    assert job.idle() <= 0.05
    assert job.short == 0
    assert job.leases <= ASKS_PER_SECOND * job.now / 2


@pytest.mark.parametrize("callbacks", [False, True])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 8, pytest.param(200, marks=pytest.mark.nightly)])
def test_files_are_cut_where_workers_would_wait_for_one(workers, equal, callbacks):
    """Three epochs of four files for each worker, whose lengths are learned in the first one."""
    steps = 8
    files = (BATCH * steps,) * (4 * workers)
    job = Job(speeds(workers, equal=equal), StopAfter(epochs=3), files=files, callbacks=callbacks)
    assert job.idle() * job.now <= lost_at_the_end(workers) + STEP * steps / FILE_PIECES
    assert job.leases <= 2 * 3 * len(files)


@pytest.mark.parametrize("batch", [BATCH, 8 * BATCH])
def test_steps_are_shared_by_all_workers_in_full_batches_of_their_own(batch):
    job = Job(speeds(32, equal=False), StopAfter(steps=600), size=10**8, batch=batch)
    assert job.idle() * job.now <= lost_at_the_end(32)
    assert (job.steps, job.short) == (600, 0)


def test_ranges_are_whole_batches_of_a_worker_with_a_larger_one_than_the_job():
    job = Job(speeds(4, equal=True), StopAfter(epochs=1), size=20_000, batch=8 * BATCH)
    job.idle()
    assert job.short == 1


def test_workers_that_have_had_nothing_to_train_for_long_are_told():
    """Of files nobody knows the length before the first one has read them."""
    bench = Bench(stop=StopAfter(epochs=1))
    bench.data = DataSpec(files=("a", "b"))
    for slot in range(5):
        bench.join(slot)
    kinds = [bench.ask(slot).kind for slot in range(5)]
    assert kinds == ["data", "data", "idle", "idle", "idle"]
    said = []
    for _ in range(round(IDLE_TOLD_SECONDS)):
        bench.now += 1.0
        said.append(report.status(bench.coordinator).message)
        for slot in range(5):
            bench.coordinator.heartbeat(Heartbeat(slot=slot, incarnation=0))
        assert bench.ask(2).kind == "idle"
        assert bench.ask(1).kind == "idle", "it asks for the file after the one that it trains"
    assert set(said[:-1]) == {""}
    assert said[-1] == "3 of 5 workers have nothing to train"
    bench.coordinator.course.stop("a callback stopped training")
    assert report.status(bench.coordinator).message == "a callback stopped training"
