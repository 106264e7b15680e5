"""A task that never ends is given to another worker, although its own sends heartbeats; that one is replaced."""

import pytest

from shoal_trainer.worker.watchdog import FIRST_SECONDS, Watchdog
from tests.unit.trainer.simulation import worker
from tests.unit.trainer.simulation.worker import Killed
from tests.unit.trainer.simulation.world import World


@pytest.mark.by_day(3)
@pytest.mark.parametrize("kind", ["evaluate", "export"])
@pytest.mark.parametrize("seed", range(4))
def test_hung_task_is_reassigned_and_its_worker_replaced(seed, kind, monkeypatch):
    task, hung, done = worker.Worker.task, [], []

    def hangs_once(self, work, flat):
        if work.kind == kind and not hung:
            hung.append((self, self.world.now))
            watchdog = Watchdog(self.world.clock)
            with watchdog.watch("the task", FIRST_SECONDS):
                while watchdog.hung() is None:
                    self.world.sleep(self, 0.1)
                    self.world.now += 4.0
            self.loop.leave()  # as `abandon` does for the worker, whose process then ends
            raise Killed
        task(self, work, flat)
        done.append((work.kind, work.epoch, self))

    monkeypatch.setattr(worker.Worker, "task", hangs_once)
    world = World(seed, workers=3, faults=0.0, ps_faults=0)
    world.run()
    ((lost, began),) = hung
    assert world.now > began + FIRST_SECONDS
    assert world.slots[lost.slot].incarnation == lost.incarnation + 1
    assert len({each[:2] for each in done}) == len(done)
    assert kind in {each[0] for each in done if each[2] is not lost}
