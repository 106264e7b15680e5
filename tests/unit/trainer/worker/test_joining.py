"""When a worker joins the coordinator."""

import threading

import pytest

from shoal_trainer.worker.compose import build_flat_model, compose
from shoal_trainer.worker.loop import End
from shoal_trainer.worker.work import Idle
from tests.unit.trainer.worker.fakes import FakeCoordinator, Servers
from tests.unit.trainer.worker.models import DATA, job

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


class Replaced(FakeCoordinator):
    """A coordinator that replaced the one that the heartbeats joined; it assigns no work before a join."""

    def next_work(self, generation=0, stopped=None):
        return super().next_work(generation) if self.joins else Idle(0.01)


def test_coordinator_replaced_while_worker_traces_is_joined(tmp_path):
    coordinator = Replaced(DATA.size, tasks=())
    servers = Servers(tmp_path / "secret", coordinator)
    training, config, drain, ends = job(), servers.config(), threading.Event(), []
    worker = compose(
        training, config, build_flat_model(training, config), coordinator, servers.credentials, drain
    )
    thread = threading.Thread(target=lambda: ends.append(worker.run(lambda _hung: None)), daemon=True)
    thread.start()
    thread.join(20)
    try:
        assert ends == [End.FINISHED]
        assert coordinator.joins == [({}, (0, 0, 0))]
    finally:
        drain.set()
        worker.close()
        servers.close()
