"""How a worker detects the end of training and of the job."""

import threading

import pytest

from shoal_trainer.errors import Unreachable
from shoal_trainer.worker.loop import End
from shoal_trainer.worker.run_task import run_task
from shoal_trainer.worker.tasks import Outcome
from shoal_trainer.worker.work import Finished, Idle, TaskWork
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.models import DATA, job
from tests.unit.trainer.worker.running import Running, wait

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
TERM = 7


class Stops(FakeCoordinator):
    """One long lease; training stops with push 10, and the job ends once the worker reports that it knows."""

    def __init__(self):
        super().__init__(DATA.size, size=DATA.size, epochs=2, tasks=())
        self.term = TERM

    def on_applied(self, push):
        super().on_applied(push)
        if self.pushes == 10:
            self.shard.stopped = lambda: TERM
            self.free = []

    def next_work(self, generation=0, stopped=None):
        return Finished() if stopped == TERM else super().next_work(generation)


def test_worker_stops_pushing_when_an_answer_ends_training(start_servers):
    coordinator = Stops()
    servers = start_servers(coordinator)
    coordinator.shard = servers.stores[0]
    assert Running(job(), servers, coordinator).start().join() is End.FINISHED
    assert coordinator.pushes == 10


def test_worker_in_an_outage_ends_when_the_job_has_finished(start_servers):
    coordinator = FakeCoordinator(64, tasks=())
    coordinator.hold = True
    servers = start_servers(coordinator)
    running = Running(job(), servers, coordinator).start()
    wait(coordinator, lambda: coordinator.pushes >= 4)
    servers.stop(0)
    while running.worker.loop.upstream.outage is None:
        threading.Event().wait(0.01)
    coordinator.hold = False
    assert running.join() is End.FINISHED


def test_worker_with_a_deferred_task_ends_when_the_job_has_finished(start_servers):
    coordinator = FakeCoordinator(64, tasks=("callbacks",))
    coordinator.hold = True
    servers = start_servers(coordinator)
    running = Running(job(), servers, coordinator).start()
    wait(coordinator, lambda: coordinator.pushes >= 4)
    servers.stop(0)
    coordinator.hold = False
    while not isinstance(running.worker.loop._deferred, TaskWork):
        threading.Event().wait(0.01)
    coordinator.next_work = lambda *_: Idle(0.01)
    coordinator.job_finished = True
    assert running.join() is End.FINISHED


def test_unsendable_result_is_dropped_when_the_job_has_finished():
    class Gone(FakeCoordinator):
        def task_done(self, *_, **__):
            self.job_finished = True
            raise Unreachable("PS 0 has ended")

    run_task(TaskWork((0, 1), "evaluate"), Outcome, Gone(0), threading.Event())
