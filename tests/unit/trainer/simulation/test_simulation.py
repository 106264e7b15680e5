"""Seeded faults against the real state machines: every run keeps the data guarantees."""

import os
from itertools import pairwise

import numpy as np
import pytest

from dev.night import of_tonight
from shoal_trainer.coordinator import report
from shoal_trainer.ps import journal
from shoal_trainer.snapshot.manifest import Manifest
from tests.unit.trainer.simulation.job import EPOCHS, PIECE, SAMPLES, STEPS_AT
from tests.unit.trainer.simulation.server import AnotherRun
from tests.unit.trainer.simulation.world import World

SEEDS = int(os.environ.get("SHOAL_SEEDS", "6"))
CHUNKS = max(23, SEEDS // 100 | 1)
"""The seeds of a test are split into at most this many parts, so that each ends within its timeout.

What is done with a seed depends on its remainders by 3, 4, 5, 7 and 11. None of these divides the number of parts (23,
and 101 in the nights), and so each part has some of each kind.
"""


def seeded(part=1):
    """Parametrize with the first of the seeds, one part of `part`, some at a time; at night those of the night."""
    seeds = range(-(-SEEDS // part))
    parts = [seeds[chunk::CHUNKS] for chunk in of_tonight(range(min(CHUNKS, len(seeds))))]
    return pytest.mark.parametrize("seeds", parts, ids=[str(each[0]) for each in parts])


def steps_per_push(seed):
    return (1, 3, 1, 3, 1, 1, 1)[seed % 7]


def bf16(seed):
    return seed % 11 % 2 == 1


def pieces(world, index):
    """The final parameters of a shard, by piece."""
    assert world.final is not None
    server = world.servers[index] if index else world.final
    copy = server.shard.copy()
    assert copy is not None
    values = copy.arrays["parameters"].reshape(-1, PIECE)
    if world.gradients:
        values = unweighted(world, server.shard.model.updates, values)
    assert np.all(values == np.round(values))
    return values.astype(int)


def unweighted(world, updates, values):
    """The counters of gradients without their weights: each step has one of the weights that its push got, once."""
    counters, begun = np.zeros_like(values), set()
    for step in range(world.steps):
        found = {float(value) for value in values[:, STEPS_AT + step]} - {0.0}
        # A server that restarts with a part of a push weighs the rest once more.
        assert len(found) <= 1 or world.faults.ps_losses, f"step {step} has the weights {found} in one shard"
        push = world.pushes.get(step)  # None: a local step of an outage
        assert found <= ({1.0} if push is None else world.weights.get(push, set())), f"step {step}: {found}"
        if push is not None and found:
            begun.add(push)
        pieces = values[:, STEPS_AT + step] != 0
        counters[pieces, STEPS_AT + step] = 1
        for epoch, at in world.covers[step]:
            counters[pieces, epoch * SAMPLES + at] += 1
    if not world.faults.ps_losses:
        assert updates == len(begun)
    return counters


def range_of(world, sample):
    """The number of the range that a sample is in."""
    if world.lengths is not None:
        return world.file_of(sample)
    return sample // world.final.coordinator.record.ledger.ranges.length


def everywhere(world):
    return np.concatenate([pieces(world, index) for index in range(world.shards)])


def applied_steps(world):
    """Which steps are in the final parameters. A push counts with its last piece of shard 0."""
    steps = everywhere(world)[:, STEPS_AT : STEPS_AT + world.steps]
    return steps[world.counts_with, np.arange(world.steps)] > 0


def counts(world):
    """How often each sample of each epoch is in the final parameters."""
    if not world.resized:
        return pieces(world, 0)[-1, : SAMPLES * EPOCHS]
    found = np.zeros(SAMPLES * EPOCHS, int)
    for step in np.flatnonzero(applied_steps(world)):
        for epoch, at in world.covers[step]:
            found[epoch * SAMPLES + at] += 1
    return found


def partial(world, context):
    """The samples, as (epoch, position), that are in some shards or pieces only."""
    steps = everywhere(world)[:, STEPS_AT : STEPS_AT + world.steps]
    assert steps.max() == 1, context
    uneven = np.flatnonzero(steps.min(axis=0) != steps.max(axis=0))
    return [sample for step in uneven for sample in world.covers[step]]


def check_partial(world, context):
    """Check that exactly the samples in some shards or pieces only were counted as partial."""
    samples, counters = partial(world, context), world.final.coordinator.record.counters
    assert counters.partial == len(samples), context
    assert counters.partial_ranges == {(epoch, range_of(world, at)) for epoch, at in samples}, context
    return len(samples)


def check_lineage(world, context):
    """No gradient from before a rollback is in the parameters after it; no older server publishes after a newer one."""
    counters, generation = world.final.coordinator.record.counters, world.final.shard.history.generation
    if counters.rollbacks == 0:
        assert counters.lost == 0, context
    steps = np.flatnonzero(pieces(world, 0)[:, STEPS_AT : STEPS_AT + world.steps].any(axis=0)).tolist()
    steps = [
        step for step in steps if step >= world.resized_at
    ]  # before, shard 0 was another part of the model
    undone = {step for step in steps if world.computed_in[step] < generation} - world.kept.get(
        generation, set()
    )
    assert not undone, f"{context}: {undone}"
    manifests = [
        Manifest.model_validate_json(data) for name, data in world.storage.created if "/manifest-" in name
    ]
    for older, newer in pairwise(manifests):
        assert older.number < newer.number, context
        assert older.epoch <= newer.epoch, context
        assert older.epoch < newer.epoch or older.generation <= newer.generation, context


def check_steps(world, context):
    """The steps in the parameters are counted, and no more are wasted than were computed in vain.

    But for a step of each worker that was replaced, or saw the loss of a server: nobody knows whether one was in
    progress. Nor does anyone hear of those of a worker whose last words were lost. And who waits for the others after
    its push (`rounds`) does not know whether it has arrived.
    """
    counters = world.final.coordinator.record.counters
    applied = np.count_nonzero(applied_steps(world))
    assert counters.steps == applied, context
    replaced = len(world.workers) - len(world.slots)
    in_vain = world.steps + world.diverged - applied
    unsure = replaced + world.faults.ps_losses * len(world.slots)
    too_many = not world.rounds and counters.wasted_steps > in_vain + unsure
    too_few = world.faults.ps_losses == replaced == world.unheard == 0 and counters.wasted_steps < in_vain
    assert not too_many, f"{context}: {counters.wasted_steps} of {in_vain}"
    assert not too_few, f"{context}: {counters.wasted_steps} of {in_vain}"


def check(seed, world):
    applied = counts(world)
    counters = world.final.coordinator.record.counters
    surplus, missing = np.maximum(applied - 1, 0).sum(), np.maximum(1 - applied, 0).sum()
    context = f"seed {seed}, {world.shards} shards: {world.describe()}"
    if world.faults.ps_losses == 0 and counters.rollbacks == 0:
        assert (surplus, missing, counters.repeated, counters.lost) == (0, 0, 0, 0), context
    assert (surplus, missing) == (counters.repeated, counters.lost), context
    assert surplus <= world.losses.most_repeated(), context
    epochs_and_samples = (divmod(int(at), SAMPLES) for at in np.flatnonzero(applied > 1))
    expected = {(epoch, range_of(world, at)) for epoch, at in epochs_and_samples}
    assert counters.repeated_ranges == expected, context
    # Shards that begin with parts of several count what all of these have.
    uneven = counters.partial if world.resized else 0
    assert 0 <= applied.sum() - world.final.shard.history.samples <= uneven, context
    assert report.ranges(world.final.coordinator.record).never == 0, context
    check_lineage(world, context)
    check_steps(world, context)


def play(seed, world):
    """Run to the end, and check what was applied once, again or in a part of the shards."""
    world.run()
    world.end()
    check(seed, world)
    check_partial(world, f"seed {seed}: {world.describe()}")


@seeded()
def test_each_sample_is_applied_once_or_counted(seeds):
    for seed in seeds:
        begins_with = AnotherRun(1 + seed % 2, 1, seed) if seed % 5 == 1 else None
        faults = (0.5, 1.0, 2.0)[seed % 3]
        world = World(
            seed, workers=1 + seed % 4, faults=faults, ps_faults=seed % 4, begins_with=begins_with,
            steps_per_push=steps_per_push(seed), bf16=bf16(seed),
        )  # fmt: skip
        world.run()
        check(seed, world)


@seeded(2)
def test_gradients_are_applied_once_with_one_weight(seeds):
    """Also of a push that is interrupted between the pieces of a shard and sent again, while others come and go."""
    for seed in seeds:
        faults, shards = (0.5, 1.0, 2.0)[seed % 3], (1, 1, 2)[seed % 3]
        world = World(
            seed, workers=1 + seed % 5, faults=faults, ps_faults=seed % 4, shards=shards, streams=seed % 2 == 0,
            gradients=True, bf16=bf16(seed),
        )  # fmt: skip
        play(seed, world)


@seeded(5)
def test_samples_in_some_shards_only_are_counted(seeds):
    for seed in seeds:
        faults, shards = (0.5, 1.0, 2.0)[seed % 3], 2 + seed % 2
        begins_with = AnotherRun(1 + seed % 2, shards, seed) if seed % 5 == 1 else None
        world = World(
            seed, workers=1 + seed % 4, faults=faults, ps_faults=1 + seed % 4, shards=shards,
            begins_with=begins_with, steps_per_push=steps_per_push(seed),
        )  # fmt: skip
        play(seed, world)


@seeded(2)
def test_pushes_in_pieces_are_applied_once_or_counted(seeds):
    """Of large shards, where many pushes are applied at the same time, and a vanished worker leaves a part of one."""
    for seed in seeds:
        faults, shards = (0.5, 1.0, 2.0)[seed % 3], (1, 1, 2)[seed % 3]
        world = World(
            seed, workers=1 + seed % 5, faults=faults, ps_faults=seed % 4, shards=shards, streams=True,
            steps_per_push=steps_per_push(seed), survival=(0.0, 0.7)[seed % 2], bf16=bf16(seed),
        )  # fmt: skip
        play(seed, world)


@seeded(3)
def test_files_are_applied_once_or_counted(seeds):
    """Their lengths become known in the first epoch, perhaps to a server that is lost; lists of files arrive late."""
    for seed in seeds:
        faults, shards = (0.5, 1.0, 2.0)[seed % 3], (1, 2, 1, 3)[seed % 4]
        world = World(
            seed, workers=1 + seed % 4, faults=faults, ps_faults=seed % 5, shards=shards, files=True,
            steps_per_push=steps_per_push(seed), survival=(0.0, 0.7)[seed % 2], mean=seed % 11 % 4 == 1,
        )  # fmt: skip
        play(seed, world)


@seeded(3)
def test_no_gradient_is_staler_than_the_bound(seeds):
    """Where its worker pulled since it connected, and no push has waited in vain for another one."""
    for seed in seeds:
        faults, shards = (0.2, 0.5, 1.0)[seed % 3], (1, 1, 2)[seed % 3]
        world = World(
            seed, workers=2 + seed % 3, faults=faults, ps_faults=seed % 2, shards=shards, bound=4 + seed % 4,
            gradients=seed % 2 == 0,
        )  # fmt: skip
        world.run()
        world.end()
        check(seed, world)
        assert world.awaited


@seeded(3)
def test_hung_reads_hold_up_nobody_for_ever(seeds):
    """Also if such a worker comes back when others have its ranges, by then in work or done."""
    for seed in seeds:
        faults, shards = (0.2, 0.5, 1.0)[seed % 3], (1, 1, 2)[seed % 3]
        world = World(
            seed, workers=1 + seed % 4, faults=faults, ps_faults=seed % 5 % 3, shards=shards, hangs=True,
            steps_per_push=steps_per_push(seed), streams=seed % 2 == 0,
        )  # fmt: skip
        world.run(20_000, calm_after=100 + 37 * (seed % 50))
        world.end()
        check(seed, world)
        check_partial(world, f"seed {seed}: {world.describe()}")


@seeded(2)
def test_copies_that_another_history_has_overtaken(seeds):
    """One comes back when others have trained its ranges again, or its server was lost or rolled back once more."""
    for seed in seeds:
        faults, shards = (0.5, 1.0)[seed % 2], (1, 1, 2)[seed % 3]
        world = World(
            seed, workers=1 + seed % 4, faults=faults, ps_faults=0.5, shards=shards, forks=True,
            steps_per_push=steps_per_push(seed), streams=seed % 2 == 0, bf16=bf16(seed),
        )  # fmt: skip
        world.run(40_000, calm_after=4000)
        world.end()
        check(seed, world)


@seeded(4)
def test_job_that_is_resumed_with_another_number_of_shards(seeds):
    """From a snapshot whose parts differ by the pushes that were on their way."""
    for seed in seeds:
        sizes = ((1, 2), (2, 3), (2, 1), (3, 2), (3, 1, 2))[seed % 5]
        world = World(
            seed, workers=1 + seed % 4, faults=(0.5, 1.0, 2.0)[seed % 3], ps_faults=seed % 2, shards=sizes[0],
            resizes=sizes[1:], steps_per_push=steps_per_push(seed), streams=seed % 2 == 0, bf16=bf16(seed),
        )  # fmt: skip
        play(seed, world)
        assert not world.resizes


@seeded(2)
def test_job_ends_after_the_last_fault(seeds):
    """No later fault hides the damage of an earlier one."""
    for seed in seeds:
        faults, shards = (1.0, 2.0, 4.0)[seed % 3], (1, 1, 2, 3)[seed % 4]
        world = World(
            seed, workers=1 + seed % 4, faults=faults, ps_faults=1 + seed % 8, shards=shards,
            steps_per_push=steps_per_push(seed),
        )  # fmt: skip
        world.run(20_000, calm_after=100 + 37 * (seed % 50))
        world.end()
        check(seed, world)


@seeded(2)
def test_replaced_server_that_keeps_running_corrupts_no_data(seeds):
    """Its workers stay connected until it finds its successor's claim in the storage."""
    for seed in seeds:
        shards = (1, 1, 2, 3)[seed % 4]
        world = World(seed, workers=1 + seed % 5, ps_faults=2 + 2 * (seed % 4), shards=shards, survival=0.7)
        world.run()
        world.end()
        check(seed, world)
        if shards > 1:
            check_partial(world, f"seed {seed}: {world.describe()}")


@seeded(3)
def test_storage_that_loses_answers_and_a_server_that_dies_while_it_writes(seeds):
    """What was written may be there, or not; the outage may outlast the server; several are lost in one."""
    for seed in seeds:
        faults, shards = (0.5, 1.0, 2.0)[seed % 3], (1, 2, 1, 3)[seed % 4]
        begins_with = AnotherRun(1 + seed % 2, shards, seed) if seed % 5 == 1 else None
        world = World(
            seed, workers=1 + seed % 4, faults=faults, ps_faults=1 + seed % 4, shards=shards, mean=True,
            begins_with=begins_with, steps_per_push=steps_per_push(seed), streams=seed % 5 == 0,
            survival=(0.0, 0.0, 0.7)[seed % 3],
        )  # fmt: skip
        world.run()
        world.end()
        check(seed, world)
        if shards > 1:
            check_partial(world, f"seed {seed}: {world.describe()}")


@seeded(3)
def test_snapshots_that_are_damaged_full_storage_and_late_listings(seeds):
    """An older snapshot is used, or none, by all shards or by some; the pushes of a copy are then not all known.

    Of partial pushes, those are counted whose samples a journal still names: a published snapshot drops them.
    """
    for seed in seeds:
        faults, shards = (0.5, 1.0, 2.0)[seed % 3], (1, 2, 1, 3)[seed % 4]
        world = World(
            seed, workers=1 + seed % 4, faults=faults, ps_faults=1 + seed % 4, shards=shards, worn=True,
            steps_per_push=steps_per_push(seed), streams=seed % 5 == 0, survival=(0.0, 0.7)[seed % 2],
        )  # fmt: skip
        if unnamed(world):
            continue
        check(seed, world)
        if shards > 1:
            assert world.final.coordinator.record.counters.partial <= len(partial(world, seed))
        else:
            check_partial(world, seed)


@seeded(4)
def test_journals_that_overflow(seeds, monkeypatch):
    """A copy that the lost shard could not continue from is refused, and the snapshot is used instead.

    Before the first snapshot such a copy is all there is. The job begins with it, and cannot say what it has trained.
    """
    monkeypatch.setattr(journal, "MAX_JOURNAL", 6)
    for seed in seeds:
        world = World(
            seed, workers=1 + seed % 4, ps_faults=1 + seed % 4, steps_per_push=steps_per_push(seed),
            shards=1 + seed % 2, overflows=True,
        )  # fmt: skip
        if not unnamed(world):
            check(seed, world)
            told, samples = world.final.coordinator.record.counters.partial, partial(world, seed)
            assert told <= len(samples) if world.shards > 1 else told == len(samples)


def unnamed(world):
    """Run to the end; whether a shard had to begin with what no counter has, which are too low then."""
    world.run()
    world.end()
    if not world.unnamed:
        return False
    counters = world.final.coordinator.record.counters
    assert counters.repeated <= np.maximum(counts(world) - 1, 0).sum() + counters.lost
    assert report.ranges(world.final.coordinator.record).never == 0
    return True


@seeded(10)
def test_many_workers(seeds):
    for seed in seeds:
        world = World(
            seed, workers=6 + 3 * (seed % 4), ps_faults=(2, 0, 1, 3, 0)[seed % 5], shards=(2, 1)[seed % 2],
            streams=seed % 3 == 0, steps_per_push=steps_per_push(seed),
        )  # fmt: skip
        play(seed, world)


def test_same_seed_gives_the_same_run():
    def outcome(seed):
        world = World(seed, ps_faults=2)
        world.run()
        return world.now, world.faults.kills, world.faults.ps_losses, world.steps

    assert outcome(7) == outcome(7)
    assert outcome(7) != outcome(8)


def test_run_without_faults_wastes_no_step():
    world = World(1, faults=0.0, ps_faults=0)
    world.run()
    assert world.steps == SAMPLES * EPOCHS / 2
    assert world.final.coordinator.record.counters.wasted_steps == 0
    assert np.all(counts(world) == 1)


@seeded(2)
def test_steps_that_nobody_applied_are_counted(seeds):
    """Of workers that are drained or rolled back while they do not reach the shard."""
    for seed in seeds:
        world = World(seed, workers=1 + seed % 4, ps_faults=0, steps_per_push=steps_per_push(seed))
        world.loss, faults = 0.0, world.faults
        faults.events = (
            (0.01, faults.drain_worker),
            (0.03, faults.cut_off_data),
            (0.004, faults.take_snapshot),
        )
        world.run()
        coordinator = world.final.coordinator
        applied = np.count_nonzero(pieces(world, 0)[-1, STEPS_AT : STEPS_AT + world.steps])
        over = coordinator.record.counters.wasted_steps - (world.steps + world.diverged - applied)
        # Who waits for the others after its push does not know whether it has arrived; who pulls later, after that.
        assert over >= 0, f"seed {seed}: {over}"
        assert world.rounds or over <= world.unpulled, f"seed {seed}: {over}"


@seeded(5)
def test_leases_in_lost_answers_do_not_block_the_end(seeds):
    """No worker is lost, so an unknown lease is not released by the end of its worker."""
    for seed in seeds:
        world = World(seed, workers=1 + seed % 3, faults=1.0, ps_faults=8, safe=True)
        world.loss = 0.02
        world.run()
        check(seed, world)


@seeded(2)
def test_training_that_stops_early_ends_and_counts_its_repeats(seeds):
    for seed in seeds:
        shards = (1, 1, 2)[seed % 3]
        world = World(seed, workers=1 + seed % 4, ps_faults=seed % 6, shards=shards, steps=10 + seed % 30)
        world.run(20_000, calm_after=100 + 37 * (seed % 50))
        world.end()
        applied, counters = counts(world), world.final.coordinator.record.counters
        assert np.maximum(applied - 1, 0).sum() == counters.repeated, seed
        assert applied.sum() == world.final.shard.history.samples, seed
        assert counters.steps >= 10 + seed % 30, seed
        assert report.ranges(world.final.coordinator.record).never == 0, seed
