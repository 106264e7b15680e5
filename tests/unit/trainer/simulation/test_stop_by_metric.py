"""A job that an evaluation stops: the exported parameters are those of its last evaluation."""

import pytest

from tests.unit.trainer.simulation import worker
from tests.unit.trainer.simulation.world import World

SEEDS = 40


@pytest.mark.parametrize("seed", range(SEEDS))
def test_exported_parameters_are_those_of_the_final_evaluation(seed, monkeypatch):
    tasks = []
    task = worker.Worker.task

    def recorded(self, work, flat):
        tasks.append((work.kind, flat.copy(), bool(self.world.server.coordinator.stopping)))
        return task(self, work, flat)

    monkeypatch.setattr(worker.Worker, "task", recorded)
    world = World(seed, workers=1 + seed % 5, faults=0.0, ps_faults=0)
    coordinator = world.server.coordinator
    task_done = coordinator.task_done

    def stops(request):
        done = task_done(request)
        if done is not None and done.kind == "evaluate" and done.epoch == 0:
            with coordinator._lock:
                coordinator._stop("the target is reached")
                coordinator._advance()
        return done

    coordinator.task_done = stops
    world.run()
    evaluated = [flat for kind, flat, stopping in tasks if kind == "evaluate" and stopping]
    exported = [flat for kind, flat, _ in tasks if kind == "export"]
    assert (evaluated[-1] == exported[-1]).all()
