"""Seeded faults against the real state machines: what is promised about data holds in every run."""

import os

import numpy as np
import pytest

from shoal_trainer.coordinator import report
from tests.unit.trainer.simulation.world import PASSES, SAMPLES, STEPS_AT, World, another_run

SEEDS = int(os.environ.get("SHOAL_SEEDS", "500"))
CHUNKS = max(20, SEEDS // 100)
"""Tests that share the seeds: each ends well within its time, however many seeds there are."""


def held(world, index):
    """What is left in a shard."""
    assert world.final is not None
    server = world.servers[index] if index else world.final
    copy = server.shard.copy()
    assert copy is not None
    found = copy.arrays["parameters"]
    assert np.all(found == np.round(found))
    return found.astype(int)


def counts(world):
    """How often each sample of each pass is in the surviving parameters."""
    return held(world, 0)[: SAMPLES * PASSES]


def check_partial(world, told):
    """What is in some shards only, as the parameters have it, is what was counted."""
    steps = np.array([held(world, index)[STEPS_AT : STEPS_AT + world.steps] for index in range(world.shards)])
    assert steps.max() == 1, told
    samples = [
        one for step in np.flatnonzero(steps.min(axis=0) != steps.max(axis=0)) for one in world.covers[step]
    ]
    counters = world.final.coordinator.counters
    assert counters.partial == len(samples), told
    size = world.final.coordinator.ledger.range_size
    assert counters.partial_ranges == {(epoch, at // size) for epoch, at in samples}, told
    return len(samples)


def check(seed, world):
    applied = counts(world)
    counters = world.final.coordinator.counters
    surplus, missing = np.maximum(applied - 1, 0).sum(), np.maximum(1 - applied, 0).sum()
    told = f"seed {seed}, {world.shards} shards: {world.describe()}"
    if world.ps_losses == 0 and counters.rollbacks == 0:
        assert (surplus, missing, counters.repeated, counters.lost) == (0, 0, 0, 0), told
    assert (surplus, missing) == (counters.repeated, counters.lost), told
    size = world.final.coordinator.ledger.range_size
    truth = {(int(at) // SAMPLES, int(at) % SAMPLES // size) for at in np.flatnonzero(applied > 1)}
    assert counters.repeated_ranges == truth, told
    assert applied.sum() == world.final.shard.samples, told
    assert report.ranges(world.final.coordinator).never == 0, told


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.timeout(600)
def test_each_sample_is_applied_once_or_counted(chunk):
    for seed in range(chunk, SEEDS, CHUNKS):
        begins_with = another_run(1) if seed % 5 == 4 else None
        faults = (0.5, 1.0, 2.0)[seed % 3]
        world = World(seed, workers=1 + seed % 4, faults=faults, ps_faults=seed % 4, begins_with=begins_with)
        world.run()
        check(seed, world)


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.timeout(600)
def test_what_is_in_some_shards_only_is_counted(chunk):
    for seed in range(chunk, SEEDS // 5, CHUNKS):
        faults, shards = (0.5, 1.0, 2.0)[seed % 3], 2 + seed % 2
        begins_with = another_run(shards) if seed % 5 == 4 else None
        world = World(
            seed, workers=1 + seed % 4, faults=faults, ps_faults=1 + seed % 4, shards=shards,
            begins_with=begins_with,
        )  # fmt: skip
        world.run()
        world.end()
        check(seed, world)
        check_partial(world, f"seed {seed}: {world.describe()}")


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.timeout(600)
def test_when_the_faults_are_over_the_job_ends(chunk):
    """No later fault mends what an earlier one left behind."""
    for seed in range(chunk, SEEDS // 2, CHUNKS):
        faults, shards = (1.0, 2.0, 4.0)[seed % 3], (1, 1, 2, 3)[seed % 4]
        world = World(seed, workers=1 + seed % 4, faults=faults, ps_faults=1 + seed % 8, shards=shards)
        world.run(20_000, calm_after=100 + 37 * (seed % 50))
        world.end()
        check(seed, world)


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.timeout(600)
def test_a_server_that_lives_on_beside_its_successor_harms_nothing(chunk):
    """Its workers' connections stay where they are, until it sees in the storage that it was replaced."""
    for seed in range(chunk, SEEDS // 2, CHUNKS):
        shards = (1, 1, 2, 3)[seed % 4]
        world = World(seed, workers=1 + seed % 5, ps_faults=2 + 2 * (seed % 4), shards=shards, alive=0.7)
        world.run()
        world.end()
        check(seed, world)
        if shards > 1:
            check_partial(world, f"seed {seed}: {world.describe()}")


def test_a_run_is_the_same_for_the_same_seed():
    def story(seed):
        world = World(seed, ps_faults=2)
        world.run()
        return world.now, world.kills, world.ps_losses, world.steps

    assert story(7) == story(7)
    assert story(7) != story(8)


def test_without_faults_no_step_is_in_vain():
    world = World(1, faults=0.0, ps_faults=0)
    world.run()
    assert world.steps == SAMPLES * PASSES / 2
    assert world.final.coordinator.counters.wasted_steps == 0
    assert np.all(counts(world) == 1)


@pytest.mark.parametrize("chunk", range(8))
def test_what_is_given_to_nobody_keeps_no_job_from_its_end(chunk):
    """No worker is lost here: what went astray in a lost answer or beside a restart, no end of a worker would free."""
    for seed in range(chunk, SEEDS // 5, 8):
        world = World(seed, workers=1 + seed % 3, faults=1.0, ps_faults=8, safe=True)
        world.loss = 0.02
        world.run()
        check(seed, world)
