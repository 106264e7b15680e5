"""How long gradients usually are: by which a long one is told, and which one with something to learn is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal_trainer.ps.damping import Damping
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig, PushMeta
from tests.unit.trainer.ps.shards import MODEL, grad, pull_from, push_to, ready
from tests.unit.trainer.snapshot.saving import save


def factors(lengths: np.ndarray | list[float]) -> np.ndarray:
    """What is applied of gradients of these lengths, with three workers."""
    damping = Damping(0.0)
    return np.array([damping.apply(2, 3, float(length)).factor for length in lengths])


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_batches_with_nothing_to_learn_do_not_shorten_the_others(share: float) -> None:
    """As with a hinge or a rare class."""
    short = np.random.default_rng(0).random(4000) < share
    found = factors(np.where(short, 1e-3, 1.0))
    assert found[2000:][~short[2000:]].mean() > 0.5 * (1 - share) ** 0.5


@pytest.mark.parametrize(("spread", "kept"), [(0.1, 0.95), (0.3, 0.80), (0.5, 0.63), (1.0, 0.55)])
def test_what_is_applied_of_lengths_that_vary(spread: float, kept: float) -> None:
    """A spread of 0.5 is that of digits; up to it this is with what docs/benchmarks/convergence.md was measured."""
    lengths = np.random.default_rng(1).lognormal(0, spread, 8000)
    assert (factors(lengths) * lengths)[2000:].mean() / lengths[2000:].mean() == pytest.approx(kept, abs=0.03)


def test_a_first_gradient_that_is_short_does_not_shorten_the_next() -> None:
    assert (factors([0.1] + [1.0] * 100) < 0.9).sum() <= 2


@pytest.mark.parametrize("at", [1, 2, 5, 10])
def test_one_of_the_first_that_is_far_too_long_is_shortened(at: int) -> None:
    """It counted in what it was compared with, and then nothing was shortened for a thousand pushes."""
    found = factors([1.0] * at + [1e3] + [1.0] * 60 + [5.0])
    assert found[at] == pytest.approx(1e-3)
    assert found[-1] == pytest.approx(0.2, rel=0.1)


def test_one_that_is_far_too_long_is_soon_forgotten() -> None:
    found = factors([1.0] * 50 + [1e6] + [1.0] * 60 + [5.0])
    assert found[50] == pytest.approx(1e-6)
    assert found[-1] == pytest.approx(0.2, rel=0.1)


def test_lengths_that_grow_are_shortened_to_what_was_usual() -> None:
    lengths = [1.0] * 100 + list(1.05 ** np.arange(200))
    assert factors(lengths)[-1] * lengths[-1] == pytest.approx(1.002**200, rel=0.02)


def test_a_snapshot_knows_it_and_one_of_before_loads(tmp_path: Path) -> None:
    shard = ready()
    shard.workers.connect(1, 0)
    shard.hello(1, 0, MODEL)
    for seq in range(1, 8):
        push_to(shard, 0, 0, seq, seq - 1, PushMeta(1, length=2.0), grad(0.1))
    store = SnapshotStore(LocalStorage(tmp_path))
    save(store, [shard])
    found = store.load_newest(0, 1)
    assert found is not None
    for kept, applied in ((found[1], 0.25), (found[1].model_copy(update={"usual": None}), 1.0)):
        successor = ShardStore(0, 1, 1)
        successor.restore(kept)
        assert successor.damping.apply(1, 3, 8.0).factor == pytest.approx(applied)


# --- a hinge that most samples satisfy: 8 % are of a rare kind, told by a small feature -------------------------------

VALUES, DECAY, BATCH, PUSHES, SAMPLES = 20, 1e-4, 4, 4000, 1000


def hinge_of_the_rare_kind(live: int, **optimizer: float | str) -> float:
    """After so many pushes of workers in turns, each on the parameters of its last answer."""
    rng = np.random.default_rng(0)
    y, x = rng.choice([-1.0, 1.0], SAMPLES), 0.05 * rng.normal(size=(SAMPLES, VALUES))
    rare = rng.random(SAMPLES) < 0.08
    x[:, 0] += np.where(rare, 0, 3.0) * y
    x[:, 1] += np.where(rare, 0.3, 0) * y
    config = OptimizerConfig.model_validate({"name": "sgd", "batch_size": BATCH} | optimizer)
    shard = ShardStore(0, 1, 0)
    for slot in range(live):
        shard.workers.connect(slot, 0)
        shard.hello(slot, 0, ModelSpec(fingerprint="f" * 64, parameters=VALUES, optimizer=config))
    shard.offer(0, 0, grad(0.0, VALUES))
    held = []
    for slot in range(live):
        io = grad(0.0, VALUES)
        held.append((io, pull_from(shard, slot, io).version))
    for count in range(PUSHES):
        slot = count % live
        flat, base = held[slot]
        rows = rng.integers(0, SAMPLES, BATCH)
        wrong = y[rows] * (x[rows] @ flat) < 1
        gradient = 2 * DECAY * flat - (wrong * y[rows]) @ x[rows] / BATCH
        io, meta = gradient.astype(np.float32), PushMeta(BATCH, length=float(np.linalg.norm(gradient)))
        held[slot] = io, push_to(shard, slot, 0, count // live + 1, base, meta, io).version
    return float(np.maximum(0, 1 - y * (x @ held[0][0]))[rare].mean())


@pytest.mark.parametrize(
    ("live", "optimizer"), [(2, {"learning_rate": 0.5}), (4, {"learning_rate": 0.05, "momentum": 0.9})]
)
def test_many_workers_learn_what_few_batches_have(live: int, optimizer: dict[str, float]) -> None:
    alone, together = (hinge_of_the_rare_kind(workers, **optimizer) for workers in (1, live))
    assert together < 2 * alone + 0.1  # of 1 at the first parameters
