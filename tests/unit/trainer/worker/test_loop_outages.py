"""The real worker when a server is lost, an answer is lost, or the coordinator is unreachable."""

import threading
import time

import keras
import pytest

from shoal_trainer import Training
from shoal_trainer.errors import Unreachable
from shoal_trainer.worker import cadence
from shoal_trainer.worker.loop import End
from shoal_trainer.worker.work import TaskWork
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.models import DATA, functional, job
from tests.unit.trainer.worker.running import SECONDS, Running, wait


def test_restored_server_gets_the_newer_copy_of_the_worker(start_servers):
    coordinator = FakeCoordinator(DATA.size, epochs=8, tasks=("evaluate",))
    servers = start_servers(coordinator)
    running = Running(job(), servers, coordinator).start()
    wait(coordinator, lambda: coordinator.pushes >= 10)
    saved = servers.stores[0].copy()
    wait(coordinator, lambda: coordinator.pushes >= 20)
    servers.stop(0)
    version = servers.stores[0].history.version
    loop = running.worker.loop
    deadline = time.monotonic() + SECONDS
    while loop.steps < version + 3:  # it continues with local steps
        assert time.monotonic() < deadline
        assert running.end is None
        threading.Event().wait(0.01)
    servers.start(0, epoch=1, restore=saved)
    assert running.join() is End.FINISHED
    assert len(coordinator.joins) == 2
    assert [wasted.known_samples > 0 for _, wasted in coordinator.joins] == [False, True]
    # the copy is at most one push behind, and that push is resent
    assert servers.stores[0].history.samples >= 8 * DATA.size - 2 * 16
    assert [coordinator.applied[epoch, -1].total for epoch in range(8)] == [DATA.size] * 8


WORKERS, PUSHES = 3, 20


def lose_with_pushes_in_flight(servers, coordinator):
    """Save the shard when all workers have pushed; `PUSHES` later, stop it while a push of each worker is unanswered.

    One of these pushes has been applied by then, the others are applied after it. Returns the saved copies. The first
    push of each worker waits for those of the others, so that a late one still finds work.
    """
    shard, saved, arrived = servers.stores[0], [], threading.Semaphore(0)
    push, first = shard.pushing, threading.Barrier(WORKERS, timeout=SECONDS)

    def arriving(*arguments, **options):
        if not shard.history.applied:
            first.wait()
        arrived.release()
        return push(*arguments, **options)

    def applied(push):
        coordinator.on_applied(push)
        if not saved and len(shard.history.applied) == WORKERS:
            saved.append(shard.copy())
        if not saved or push.version < saved[0].version + PUSHES:
            arrived.acquire()
        elif push.version == saved[0].version + PUSHES:
            for _ in range(WORKERS):
                assert arrived.acquire(timeout=SECONDS)
            servers.stop(0)

    shard.pushing, shard.on_applied = arriving, applied
    return saved


def test_lost_shard_loses_one_push_of_each_worker_and_gets_it_again(start_servers, monkeypatch):
    for share in ("PULL_SHARE", "ROUND_SHARE"):  # a pull would wait for the shard that waits for the pushes
        monkeypatch.setattr(cadence, share, 0.0)
    coordinator = FakeCoordinator(DATA.size, epochs=2, tasks=())
    servers = start_servers(coordinator)
    shard, saved = servers.stores[0], lose_with_pushes_in_flight(servers, coordinator)
    workers = [Running(job(), servers, coordinator, slot=slot) for slot in range(WORKERS)]
    for worker in workers:
        worker.start()
    wait(coordinator, lambda: saved and coordinator.pushes == saved[0].version + PUSHES + WORKERS - 1)
    servers.start(0, epoch=1, restore=saved[0])
    assert [worker.join() for worker in workers] == [End.FINISHED] * WORKERS
    successor, (version, applied) = servers.stores[0], servers.ready[-1]
    assert shard.history.version - version == WORKERS
    assert {worker: seq - applied[worker] for worker, seq in shard.history.applied.items()} == dict.fromkeys(
        applied, 1
    )
    assert successor.history.samples == 2 * DATA.size
    assert successor.history.contents.spans() == tuple(
        (*worker, 1, seq + 1) for worker, seq in sorted(successor.history.applied.items())
    )
    assert [coordinator.applied[epoch, -1].total for epoch in range(2)] == [DATA.size] * 2


def test_idle_worker_notices_a_lost_server(start_servers):
    coordinator = FakeCoordinator(64, tasks=())
    coordinator.hold = True
    servers = start_servers(coordinator)
    running = Running(job(), servers, coordinator).start()
    wait(coordinator, lambda: coordinator.pushes >= 4)
    saved = servers.stores[0].copy()
    servers.stop(0)
    servers.start(0, epoch=1, restore=saved)
    deadline = time.monotonic() + SECONDS
    while len(coordinator.joins) < 2:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    coordinator.hold = False
    assert running.join() is End.FINISHED


def test_wasted_steps_are_reported_until_acknowledged(start_servers):
    coordinator = FakeCoordinator(DATA.size)
    running = Running(job(), start_servers(coordinator), coordinator)
    loop, answered, reports = running.worker.loop, coordinator.join, []

    def lost(_leases, wasted):
        reports.append(wasted)
        raise Unreachable("the answer was lost")

    coordinator.join = lost
    loop.upstream.wasted = 3
    with pytest.raises(Unreachable):
        loop.upstream._join_coordinator({})
    coordinator.join = answered
    for more in (2, 1):
        loop.upstream.wasted += more
        loop.upstream._join_coordinator({})
    assert reports + [wasted for _, wasted in coordinator.joins] == [(3, 0, 0), (5, 0, 0), (6, 5, 0)]
    running.worker.close()


def test_push_with_a_lost_answer_is_applied_once(start_servers):
    coordinator = FakeCoordinator(DATA.size, epochs=4, tasks=())
    servers = start_servers(coordinator)
    running = Running(job(), servers, coordinator).start()
    for pushes in (5, 15, 25):  # of a slow outage all that is left may be one push
        wait(
            coordinator,
            lambda pushes=pushes: coordinator.pushes >= pushes or coordinator.samples == 4 * DATA.size,
        )
        servers.reconnect(0)
    assert running.join() is End.FINISHED
    assert servers.stores[0].history.samples == 4 * DATA.size
    assert coordinator.samples == 4 * DATA.size


class Forgetful(FakeCoordinator):
    """Loses the answer to the first result."""

    def task_done(self, work, metrics, files, *, stop, message, learning_rate=None):
        super().task_done(work, metrics, files, stop=stop, message=message)
        if len(self.results) == 1:
            raise Unreachable("the answer is lost")


class Unanswering(FakeCoordinator):
    """From the tenth push on, answers no request for work until all leased samples are trained."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.unanswered = 0

    def next_work(self, generation=0, stopped=None):
        with self.lock:
            leased = sum(work.stop - work.start for work in self.leased.values())
            if self.pushes >= 10 and (self.unanswered < 3 or self.samples < leased):
                self.unanswered += 1
                raise Unreachable("the coordinator is lost")
        return super().next_work(generation, stopped)


def test_leases_are_trained_while_the_coordinator_is_unreachable(start_servers, monkeypatch):
    monkeypatch.setattr("shoal_trainer.worker.feed.FIRST_PAUSE", 0.01)
    coordinator = Unanswering(DATA.size, epochs=2, tasks=())
    servers = start_servers(coordinator)
    running = Running(job(), servers, coordinator).start()
    assert running.join() is End.FINISHED
    loop = running.worker.loop
    assert coordinator.unanswered >= 3
    assert coordinator.samples == servers.stores[0].history.samples == 2 * DATA.size
    assert [coordinator.applied[epoch, -1].total for epoch in range(2)] == [DATA.size] * 2
    assert (loop.steps, loop.upstream.wasted, len(coordinator.joins)) == (coordinator.pushes, 0, 1)


def test_task_result_with_a_lost_answer_is_resent_not_recomputed(start_servers):
    coordinator = Forgetful(64, tasks=("callbacks",))
    servers = start_servers(coordinator)
    seen = []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, _logs: seen.append(epoch))
    training = Training(model=functional, data=DATA, callbacks=lambda: [callback])
    coordinator.tasks = [TaskWork((0, 1), "callbacks", 0, ({"loss": 1.0},))]
    assert Running(training, servers, coordinator).start().join() is End.FINISHED
    assert seen == [0]
    assert [kind for kind, *_ in coordinator.results] == ["callbacks", "callbacks"]
