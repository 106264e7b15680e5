"""The exported parameters are those of the last evaluation, whether the job stops early or completes its epochs."""

import os

import pytest

from tests.unit.trainer.simulation import worker
from tests.unit.trainer.simulation.world import World

SEEDS = 40 if "SHOAL_SEEDS" in os.environ else 4


def stop_after_first_evaluation(coordinator):
    task_done = coordinator.task_done

    def stops(request):
        done = task_done(request)
        if done is not None and done.kind == "evaluate" and done.epoch == 0:
            with coordinator.lock:
                coordinator.course.stop("the target is reached")
                coordinator._advance()
        return done

    coordinator.task_done = stops


@pytest.mark.by_day(3)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_exported_parameters_are_those_of_the_final_evaluation(shards, early, monkeypatch):
    tasks = []
    task = worker.Worker.task

    def recorded(self, work, flat):
        tasks.append((work.kind, flat.copy()))
        return task(self, work, flat)

    monkeypatch.setattr(worker.Worker, "task", recorded)
    for seed in range(SEEDS):
        tasks.clear()
        world = World(seed, workers=1 + seed % 5, faults=0.0, ps_faults=0, shards=shards)
        if early:
            stop_after_first_evaluation(world.server.coordinator)
        world.run()
        (*_, (evaluate, evaluated), (export, exported)) = tasks
        assert (evaluate, export) == ("evaluate", "export"), seed
        assert (evaluated == exported).all(), seed
