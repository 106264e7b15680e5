"""Accuracy after equal samples for 1 to 16 workers with uneven delays, by staleness and momentum rule (digits)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from benchmarks.harness import Measurement, summary
from shoal_trainer.contract import Staleness
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig, PushMeta

BATCH, HIDDEN, PASSES = 32, 64, 12
SHAPES = ((64, HIDDEN), (HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,))
SIZES = [int(np.prod(shape)) for shape in SHAPES]
WORKERS = (1, 4, 8, 16)
RULES = {
    "1/sqrt(tau), corrected momentum (default)": ("InverseSquareRoot", True),
    "1/sqrt(tau), momentum as configured": ("InverseSquareRoot", False),
    "1/tau, corrected momentum": ("Inverse", True),
    "1/tau, momentum as configured": ("Inverse", False),
    "constant, corrected momentum": ("Constant", True),
    "constant, momentum as configured": ("Constant", False),
}
RATES = (0.05, 0.15)
"""The rate that is best for one worker, and three times it: a default must bear both."""
PLOT = Path("docs/benchmarks/convergence.png")

Vector = NDArray[np.float32]


def _parts(flat: Vector) -> list[Vector]:
    cuts = np.cumsum(SIZES)[:-1]
    return [part.reshape(shape) for part, shape in zip(np.split(flat, cuts), SHAPES, strict=True)]


def _forward(flat: Vector, x: Vector) -> tuple[list[Vector], Vector]:
    w1, b1, w2, b2, w3, b3 = _parts(flat)
    first = np.maximum(x @ w1 + b1, 0)
    second = np.maximum(first @ w2 + b2, 0)
    return [first, second], second @ w3 + b3


def _gradient(flat: Vector, x: Vector, y: Any) -> Vector:
    """Mean gradient of the cross-entropy of a network 64-64-64-10."""
    (first, second), logits = _forward(flat, x)
    _, _, w2, _, w3, _ = _parts(flat)
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    d2 = (p @ w3.T) * (second > 0)
    d1 = (d2 @ w2.T) * (first > 0)
    parts = (x.T @ d1, d1.sum(0), first.T @ d2, d2.sum(0), second.T @ p, p.sum(0))
    return np.concatenate([part.ravel() for part in parts]).astype(np.float32)


def accuracy(workers: int, policy: str, corrected: bool, rate: float, seed: int) -> float:
    """Test accuracy after `PASSES` passes over the data, by the real shard in virtual time.

    Each worker has a speed of its own (up to 2x apart) and each step's time varies by a third; it computes on the
    parameters that came with its last push, so staleness arises as it does in a cluster.
    """
    images, labels = load_digits(return_X_y=True)
    x, test_x, y, test_y = train_test_split(
        (images / 16).astype(np.float32), labels, test_size=0.25, random_state=0, stratify=labels
    )
    rng = np.random.default_rng(seed)
    start = [rng.standard_normal(s) * (2 / s[0]) ** 0.5 if len(s) == 2 else np.zeros(s) for s in SHAPES]
    optimizer = OptimizerConfig(
        learning_rate=rate, momentum=0.9, batch_size=BATCH, momentum_correction=corrected
    )
    shard = ShardStore(0, 1, 0, staleness=Staleness(policy=policy))  # type: ignore[arg-type]
    shard.hello(0, 0, ModelSpec(fingerprint="0" * 64, parameters=sum(SIZES), optimizer=optimizer))
    shard.initialize(np.concatenate([part.ravel() for part in start]).astype(np.float32))
    shard.set_live_workers(workers)
    speed = rng.uniform(0.5, 1.0, workers)
    held: dict[int, tuple[int, Vector]] = {}
    queue: list[tuple[float, int]] = []
    for worker in range(workers):
        out = np.empty(sum(SIZES), np.float32)
        held[worker] = (shard.pull(worker, out).version, out)
        heapq.heappush(queue, (speed[worker] * rng.uniform(0.7, 1.3), worker))
    order: Any = itertools.chain.from_iterable(rng.permutation(len(x)) for _ in itertools.count())
    seqs = [0] * workers
    for _ in range(PASSES * len(x) // BATCH):
        now, worker = heapq.heappop(queue)
        base, flat = held[worker]
        batch = list(itertools.islice(order, BATCH))
        with np.errstate(all="ignore"):  # a run that diverges is a result
            io = _gradient(flat, x[batch], y[batch])
        seqs[worker] += 1
        answer = shard.push(worker, 0, seqs[worker], base, PushMeta(samples=BATCH), io)
        held[worker] = (answer.version, io)
        heapq.heappush(queue, (now + speed[worker] * rng.uniform(0.7, 1.3), worker))
    final = np.empty(sum(SIZES), np.float32)
    shard.pull(0, final)
    with np.errstate(all="ignore"):
        _, logits = _forward(final, test_x)
    return float((np.nan_to_num(logits).argmax(1) == test_y).mean())


def measure(quick: bool = False) -> Iterator[Measurement]:
    """Each figure is the median of seeds, with the worst and the best one."""
    seeds = range(1 if quick else 5)
    rows: list[tuple[str, float, int, Measurement]] = []
    for (label, (policy, corrected)), rate, workers in itertools.product(RULES.items(), RATES, WORKERS):
        values = [accuracy(workers, policy, corrected, rate, seed) for seed in seeds]
        name = f"accuracy, {workers} workers, rate {rate}, {label}"
        row = summary(name, values, "", f"test set after {PASSES} passes over the digits")
        rows.append((label, rate, workers, row))
        yield row
    if not quick:
        _plot(rows)


def _plot(rows: list[tuple[str, float, int, Measurement]]) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(RATES), figsize=(11, 4.2), sharey=True)
    for axis, rate in zip(axes, RATES, strict=True):
        for label in RULES:
            mine = [row for row in rows if row[0] == label and row[1] == rate]
            axis.plot([w for _, _, w, _ in mine], [m.value for *_, m in mine], marker="o", label=label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(WORKERS, [str(w) for w in WORKERS])
        axis.set_xlabel("workers")
        axis.set_title(f"learning rate {rate}, momentum 0.9")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"test accuracy after {PASSES} passes")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=110)
    plt.close(figure)
