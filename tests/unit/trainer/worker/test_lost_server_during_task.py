"""A parameter server that is lost as a worker begins a task: the worker's copy survives and the task is done."""

import numpy as np
import pytest

from shoal_trainer.worker.loop import End
from tests.unit.trainer.ps.shards import pull_from
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.models import DATA, job
from tests.unit.trainer.worker.running import Running

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


class LosesServer(FakeCoordinator):
    """Calls `lose` when it assigns the first task."""

    def next_work(self, generation=0, stopped=None):
        work = super().next_work(generation)
        if self.lose is not None and type(work).__name__ == "TaskWork":
            lose, self.lose = self.lose, None
            lose()
        return work


@pytest.mark.by_day(1)
@pytest.mark.parametrize("snapshot", [False, True], ids=["no-snapshot", "older-snapshot"])
def test_server_lost_at_task_adopts_the_copy_of_the_worker_at_task(start_servers, snapshot):
    coordinator = LosesServer(DATA.size, tasks=("evaluate",))
    servers = start_servers(coordinator)
    saved, last = [], []

    def applied(push):
        coordinator.on_applied(push)
        if push.version == 5:
            saved.append(servers.stores[0].copy())

    def lose():
        old = servers.stores[0]
        flat = np.zeros(old.size, np.float32)
        pull_from(old, 0, flat)
        last.append((old.history.version, flat))
        servers.stop(0)
        servers.start(0, epoch=1, restore=saved[0] if snapshot else None)

    coordinator.lose = lose
    servers.stores[0].on_applied = applied
    assert Running(job(wire="fp32"), servers, coordinator).start().join() is End.FINISHED
    version, expected = last[0]
    assert servers.stores[0].history.version == version
    flat = np.zeros(servers.stores[0].size, np.float32)
    pull_from(servers.stores[0], 0, flat)
    assert np.array_equal(flat, expected)
    assert [kind for kind, *_ in coordinator.results] == ["evaluate"]
