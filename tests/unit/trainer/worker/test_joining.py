"""When a worker joins the coordinator."""

import pytest

from shoal_trainer.worker.loop import End
from shoal_trainer.worker.work import Idle
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.models import DATA, job
from tests.unit.trainer.worker.running import Running

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


class Replaced(FakeCoordinator):
    """A coordinator that replaced the one that the heartbeats joined; it assigns no work before a join."""

    def next_work(self, generation=0, stopped=None):
        return super().next_work(generation) if self.joins else Idle(0.01)


def test_coordinator_replaced_while_worker_traces_is_joined(start_servers):
    coordinator = Replaced(DATA.size, tasks=())
    assert Running(job(), start_servers(coordinator), coordinator).start().join() is End.FINISHED
    assert coordinator.joins == [({}, (0, 0, 0))]
