"""A velocity goes as far as it should, whatever the number of workers before and after a snapshot of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal_trainer.ps.model_state import ModelState
from shoal_trainer.ps.shard import ShardCopy, ShardStore
from shoal_trainer.ps.update_rules import adam_momentum, filled_by, momentum_at
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig, PushMeta
from tests.unit.trainer.ps.shards import Clock, grad, pull_from, push_to
from tests.unit.trainer.snapshot.saving import save

N = 8
CONFIG = OptimizerConfig(name="sgd", momentum=0.9, learning_rate=0.01, batch_size=1)
MODEL = ModelSpec(fingerprint="f" * 64, parameters=N, optimizer=CONFIG)


class Job:
    """A shard to which `workers` push the same gradient in turn."""

    def __init__(self, workers: int, config: OptimizerConfig = CONFIG) -> None:
        self.seq = 0
        self.workers = workers
        self.shard = ShardStore(0, 1, 0, boot=1)
        self.shard.hello(0, 0, MODEL.model_copy(update={"optimizer": config}))
        self.shard.offer(0, 0, grad(0.0))

    def push(self, gradient: float, times: int) -> np.ndarray:
        """`times` updates; the last answer."""
        self.shard.workers.set_live(self.workers)
        for _ in range(times):
            self.seq += 1
            base = max(0, self.shard.history.version - (self.workers - 1))
            io = grad(gradient)
            push_to(self.shard, self.seq % 64, 0, self.seq, base, PushMeta(1), io)
        return io

    @property
    def model(self) -> ModelState:
        assert self.shard.model is not None
        return self.shard.model

    def still_goes(self) -> float:
        """How far the velocity moves the parameters, without further gradients."""
        before = float(self.model.parameters[0])
        self.push(0.0, 3000)
        return float(self.model.parameters[0]) - before

    def snapshot(self) -> tuple[ShardCopy, float]:
        """Of the shard, and how far its velocity should go."""
        copy = self.shard.copy()
        assert copy is not None
        assert copy.pace is not None
        mu = momentum_at(CONFIG, copy.pace)
        return copy, float(copy.arrays["momentum"][0]) * mu / (1 - mu)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("before", "after"), [(16, 2), (1, 16), (4, 4), (8, 8), (16, 16)])
def test_velocity_goes_as_far_after_a_restart(before: int, after: int, tmp_path: Path) -> None:
    job = Job(before)
    job.push(1.0, 200)
    _, expected = job.snapshot()
    store = SnapshotStore(LocalStorage(tmp_path))
    save(store, [job.shard])
    found = store.load_newest(0, 1)
    assert found is not None
    again = Job(after)
    again.seq = job.seq
    clock = Clock()
    again.shard = ShardStore(0, 1, 1, boot=2, clock=clock)
    again.shard.restore(found[1])
    again.shard.hello(0, 0, MODEL)
    clock.now += 100
    assert again.still_goes() == pytest.approx(expected, rel=0.02)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("before", "after"), [(4, 16), (1, 32), (16, 4)])
def test_velocity_goes_as_far_after_a_rollback(before: int, after: int) -> None:
    job = Job(before)
    job.push(1.0, 200)
    copy, expected = job.snapshot()
    job.workers = after
    job.push(1.0, 200)
    job.shard.roll_back(copy.model_copy(update={"generation": 1}))
    assert job.still_goes() == pytest.approx(expected, rel=0.02)


def test_answer_looks_ahead_at_the_pace_of_the_snapshot() -> None:
    """The answer to a pull after a rollback is where one update without a gradient leads."""
    job = Job(1)
    job.push(1.0, 50)
    copy, _ = job.snapshot()
    job.workers = 16
    job.push(1.0, 100)
    job.shard.roll_back(copy.model_copy(update={"generation": 1}))
    ahead = grad(0.0)
    pull_from(job.shard, 0, ahead, ahead=1.0)
    # The zero gradient's own staleness moves the pace a little.
    np.testing.assert_allclose(ahead, job.push(0.0, 1), rtol=0.02)


def test_file_without_a_pace_rescales_nothing_at_the_first_update() -> None:
    job = Job(16)
    job.push(1.0, 200)
    copy, _ = job.snapshot()
    job.shard.roll_back(copy.model_copy(update={"generation": 1, "pace": None}))
    job.push(0.0, 1)
    velocity = float(job.model.optimizer.state["momentum"][0])
    assert job.model.pace is not None
    mu = momentum_at(CONFIG, job.model.pace)
    assert velocity == pytest.approx(mu * float(copy.arrays["momentum"][0]), rel=1e-5)


def test_what_fills_adams_first_moment_is_that_of_the_snapshot(tmp_path: Path) -> None:
    """It was made at several paces, of which the number of updates does not tell."""
    job = Job(1, CONFIG.model_copy(update={"name": "adam"}))
    job.push(1.0, 20)
    job.workers = 16
    job.push(1.0, 20)
    store = SnapshotStore(LocalStorage(tmp_path))
    save(store, [job.shard])
    found = store.load_newest(0, 1)
    assert found is not None
    filled = job.model.filled
    job.push(1.0, 9)
    job.shard.roll_back(found[1].model_copy(update={"generation": 1}))
    assert job.model.filled == filled


def test_file_without_what_fills_adams_moment_is_taken_to_be_of_its_pace() -> None:
    job = Job(4, CONFIG.model_copy(update={"name": "adam"}))
    job.push(1.0, 5)
    copy = job.shard.copy()
    assert copy is not None
    assert copy.pace is not None
    job.shard.roll_back(copy.model_copy(update={"generation": 1, "filled": None}))
    assert job.model.filled == filled_by(adam_momentum(CONFIG, copy.pace), 5)


def test_agreement_is_that_of_the_snapshot(tmp_path: Path) -> None:
    """Else gradients that agree would go too far until it is learned again."""
    job = Job(16)
    job.push(1.0, 200)
    store = SnapshotStore(LocalStorage(tmp_path))
    save(store, [job.shard])
    found = store.load_newest(0, 1)
    assert found is not None
    assert found[1].agreement == job.model.sampled.mean == pytest.approx(1, abs=1e-3)
    job.shard.roll_back(found[1].model_copy(update={"generation": 1}))
    job.push(1.0, 1)
    assert job.model.agreement() == pytest.approx(1, abs=1e-3)
    assert job.shard.damping.rate(15.0) == pytest.approx(31**-0.5, rel=1e-3)
    job.shard.roll_back(
        found[1].model_copy(update={"generation": 2, "agreement": 0.0})
    )  # a file of before it was written
    job.push(1.0, 1)
    assert job.shard.damping.rate(15.0) > (15 / 4) ** -0.5 * 0.99
