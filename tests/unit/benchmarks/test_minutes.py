"""Planning all jobs, minute after minute: the jobs of the benchmark train, and most choices are kept."""

from __future__ import annotations

import pytest

from benchmarks.minutes import World, measure
from shoal.sizing.fleet.kept import Kept


@pytest.mark.nightly
def test_jobs_train_and_their_choices_are_kept() -> None:
    world, kept = World(4), Kept()
    begun = [job.samples_left or 0.0 for job in world.jobs]
    for _ in range(3):
        plan = world.plan(kept)
        before = dict(kept)
        world.pass_minute(plan)
    assert all((job.samples_left or 0.0) < work for job, work in zip(world.jobs, begun, strict=True))
    world.plan(kept)
    assert sum(kept[name][0] is before[name][0] for name in kept) >= 2
    assert len(list(measure(2, 1))) == 2
