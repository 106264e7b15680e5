"""A job in virtual time: the real parameter-server shard and the worker's real look-ahead; workers as a queue of times.

A step takes 100 ms, more or less by worker and step. The server answers one push or pull after the other. A worker
waits for the others as in the rounds of the server while the real rule of workers (`Cadence`) lets it take part; else
its exchange is beside its next step, which it computes on the newest parameters. So staleness arises as in a cluster.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchmarks.networks import Vector
from benchmarks.tasks import BATCH, data_of, network_of, on_worker, optimizer_of, updates_of
from shoal_trainer.contract import Staleness
from shoal_trainer.ps import schedules
from shoal_trainer.ps.shard import Answer, ShardCopy, ShardStore
from shoal_trainer.ps.update_rules import Optimizer, Update
from shoal_trainer.wire.messages import (
    AnswerMeta,
    Held,
    ModelSpec,
    OptimizerConfig,
    Progress,
    Pulled,
    Push,
    PushMeta,
)
from shoal_trainer.worker.anticipation import Anticipation
from shoal_trainer.worker.cadence import Cadence
from shoal_trainer.worker.on_host import HostInclusion
from shoal_trainer.worker.outage import Outage
from shoal_trainer.worker.send import Send, length

RECOVERY_SECONDS = 60.0
"""Longer than a server waits for workers' copies."""
STEP_SECONDS = 0.1
EXCHANGE_SECONDS = 0.0003
"""Measured with 9,000 parameters on loopback: a push that is answered with the parameters."""
FIXED_SHARE = 0.2
"""The share of a step of 32 samples that a smaller batch does not save."""

Policy = Literal["Constant", "InverseSquareRoot", "Inverse"]
Speeds = Literal["equal", "slower", "straggler", "mixed", "unequal"]
"""Equal: steps vary by a tenth. Unequal: by a third, and workers differ by up to 2x. Straggler: equal, but for one of
half speed; slower: one whose steps are 1.4 times as long. Mixed: half of the workers have a quarter of the speed."""


@dataclass(frozen=True)
class Job:
    """One run. `rate`: a multiple of the learning rate of the task's optimizer."""

    task: str
    workers: int
    seed: int
    optimizer: str = "momentum"
    rate: float = 1.0
    speeds: Speeds = "unequal"
    batch: int = BATCH
    """Samples of a worker's step; learning rates are for 32."""
    policy: Policy = "InverseSquareRoot"
    overlaps: bool = False
    anticipates: bool = True
    """Whether gradients are computed where they will be applied."""
    rounds: bool = True
    """Whether workers may take part in rounds."""
    exchange: float = EXCHANGE_SECONDS
    """How long the server is busy with a push and a pull, with one as long as with the other."""
    churn: int = 0
    """One worker is lost and replaced after so many updates; 0: none."""
    shorter: float = 1.0
    """All-reduce: its optimizer's moments last so many times fewer steps (arXiv 2205.10287)."""


class Course:
    """The course of a run: `samples` seen at `now` (seconds), and how its parameters are judged.

    Data come in an order and workers have speeds that depend on the seed only.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.data, self.network = data_of(job.task), network_of(job.task)
        self.rng = np.random.default_rng(job.seed)
        self.config = _at_rate(optimizer_of(job.task, job.optimizer), job.rate)
        self.now = 0.0
        self.samples = 0
        self.first = self.network.start(self.rng)
        self.own: dict[int, Callable[[Vector, Vector], Vector]] = {}
        """The optimizers that run on workers."""
        factors = {
            "equal": np.ones(job.workers),
            "unequal": self.rng.uniform(2 / 3, 4 / 3, job.workers),
            "straggler": np.where(np.arange(job.workers) == 0, 2.0, 1.0),
            "slower": np.where(np.arange(job.workers) == 0, 1.4, 1.0),
            "mixed": np.where(np.arange(job.workers) < job.workers // 2, 4.0, 1.0),
        }[job.speeds]
        self.speed = STEP_SECONDS * (FIXED_SHARE + (1 - FIXED_SHARE) * job.batch / BATCH) * factors
        self.order: Any = itertools.chain.from_iterable(
            self.rng.permutation(self.data.x.shape[0]) for _ in itertools.count()
        )

    def advance(self) -> None:
        """Apply the next update."""
        raise NotImplementedError

    def parameters(self) -> Vector:
        """The current parameters."""
        raise NotImplementedError

    def train(self, updates: int) -> None:
        """Apply this many batches of 32, in the order of their times."""
        until = self.samples + updates * BATCH
        while self.samples < until:
            self.advance()

    def accuracy(self) -> float:
        """The current accuracy on the test set."""
        return self.network.judge(self.parameters(), self.data.test_x, self.data.test_y)[0]

    def loss(self) -> float:
        """The current mean cross-entropy on the test set."""
        return self.network.judge(self.parameters(), self.data.test_x, self.data.test_y)[1]

    @property
    def updates(self) -> int:
        """How many batches of 32 the whole run has."""
        return updates_of(self.job.task)

    @property
    def share(self) -> float:
        """The steps so far, as a share of what the workers would have made if none had waited."""
        return self.samples / self.job.batch / (self.now * float((1 / self.speed).sum()))

    def gradient(self, flat: Vector, samples: int = 0) -> Vector:
        """That of the next batch."""
        batch = list(itertools.islice(self.order, samples or self.job.batch))
        return self.network.gradient(flat, self.data.x[batch], self.data.y[batch])

    def update(self, worker: int, flat: Vector, samples: int = 0) -> Vector:
        """What a worker pushes: the gradient of the next batch, or the difference that its own optimizer makes."""
        found = self.gradient(flat, samples)
        if self.config.name != "delta":
            return found
        if worker not in self.own:
            self.own[worker] = on_worker(self.job.optimizer, self.job.rate, self.network.size)
        return self.own[worker](flat, found)

    def step_seconds(self, worker: int) -> float:
        """How long the next step of a worker takes."""
        spread = 0.3 if self.job.speeds == "unequal" else 0.1
        return float(self.speed[worker] * self.rng.uniform(1 - spread, 1 + spread))


class AllReduce(Course):
    """Synchronous workers: one step of Keras' optimizer on the mean of their gradients, when the slowest is there."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._parameters = self.first.copy()
        self._optimizer, self._steps = Optimizer(_shorter(self.config, job.shorter), 0, self.network.size), 0

    def advance(self) -> None:
        """One step of all."""
        workers = self.job.workers
        self.now += max(map(self.step_seconds, range(workers)))
        rate = schedules.learning_rate(self.config.learning_rate, self.config.step_after(self.samples))
        gradient = self.update(0, self._parameters, workers * self.job.batch)
        self._steps += 1
        self._optimizer.apply(self._parameters, gradient, Update(rate, self._steps))
        self.samples += workers * self.job.batch

    def parameters(self) -> Vector:
        """The same on all workers."""
        return self._parameters


class Asynchronous(Course):
    """ParameterServerStrategy's rule: each gradient is one step of Keras' optimizer, whatever came in between."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._parameters = self.first.copy()
        self._optimizer, self._steps = Optimizer(self.config, 0, self.network.size), 0
        self._computing = [self.first.copy() for _ in range(job.workers)]
        self._queue = [(self.step_seconds(worker), worker) for worker in range(job.workers)]
        heapq.heapify(self._queue)

    def advance(self) -> None:
        """One step of one worker."""
        self.now, worker = heapq.heappop(self._queue)
        rate = schedules.learning_rate(self.config.learning_rate, self.config.step_after(self.samples))
        gradient = self.update(worker, self._computing[worker])
        self._steps += 1
        self._optimizer.apply(self._parameters, gradient, Update(rate, self._steps))
        self.samples += self.job.batch
        self._computing[worker] = self._parameters.copy()
        heapq.heappush(self._queue, (self.now + self.step_seconds(worker), worker))

    def parameters(self) -> Vector:
        """Those of the server."""
        return self._parameters


class VirtualJob(Course):
    """Workers and a parameter server of Shoal."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.known: dict[int, int] = {}
        self.shard = self._server(0)
        self.model = ModelSpec(fingerprint="0" * 64, parameters=self.network.size, optimizer=self.config)
        self.shard.hello(0, 0, self.model)
        self.shard.offer(0, 0, self.first)
        self.shard.workers.set_live(job.workers)
        self.held: dict[int, tuple[int, Vector]] = {}
        """The version and the parameters of each worker's last answer."""
        self.computing: dict[int, tuple[int, Vector]] = {}
        """Those on which it computes, which may include a gradient in flight."""
        self.flights: dict[int, Send] = {}
        self.metas: dict[int, AnswerMeta] = {}
        self.queue: list[tuple[float, int]] = []
        """When each worker that computes ends its step."""
        self.waiting: dict[int, tuple[int, float, Answer, float]] = {}
        """Of each worker that waits for others: its push's base and `ahead`, its answer, and when that was made."""
        self.cadences: dict[int, Cadence] = {}
        self.pulled: dict[int, Pulled] = {}
        """The last answer of each worker, with the times of the exchange."""
        self.began: dict[int, float] = {}
        self.pushed: dict[int, float] = {}
        """When the step of each worker began, and its last push was sent."""
        self.free_at = 0.0
        """When the server can answer the next request."""
        self.seqs = [0] * job.workers
        self.incarnations = [0] * job.workers
        self.anticipations: dict[int, Anticipation] = {}
        for worker in range(job.workers):
            self._join(worker)

    def advance(self) -> None:
        """The next push."""
        worker = self._next()
        if self.job.churn and self.shard.history.version % self.job.churn == self.job.churn - 1:
            self._replace(worker)
            worker = self._next()
        self._push(worker)

    def _next(self) -> int:
        """The next worker that ends its step, after the waits that are over before."""
        while (over := self.shard.workers.rounds.next()) <= self.queue[0][0]:
            self.now = over
            self._release()
        self.now, worker = heapq.heappop(self.queue)
        return worker

    def _release(self) -> None:
        """The workers whose wait is over pull, and begin their next step."""
        for worker in self.shard.workers.rounds.release(self.now):
            self._go_on(worker)

    def _go_on(self, worker: int) -> None:
        base, ahead, answer, made_at = self.waiting.pop(worker)
        version, made = self._pull(worker, ahead), answer.version
        self.held[worker] = self.computing[worker] = version
        released, ends = max(self.now, made_at), self._served(max(self.now, made_at))
        self.pulled[worker] = pulled = Pulled(
            (version[0],), (answer.meta,), made=made, pull_seconds=ends - released,
            push_seconds=made_at - self.pushed[worker], wait_seconds=released - made_at,
        )  # fmt: skip
        self.anticipations[worker].answered(pulled, base, overlapped=False)
        self._begin(worker, ends)

    def _begin(self, worker: int, at: float) -> None:
        self.began[worker] = at
        heapq.heappush(self.queue, (at + self.step_seconds(worker), worker))

    def _served(self, at: float) -> float:
        """When the server has answered a request that arrives at this time."""
        self.free_at = max(at, self.free_at) + self.job.exchange / 2
        return self.free_at

    def _push(self, worker: int) -> None:
        """A worker ends its step, pushes, and begins the next one or waits."""
        base, flat = self.computing[worker]
        anticipation, overlaps = self.anticipations[worker], self.job.overlaps
        io = self.update(worker, flat)
        meta = PushMeta(self.job.batch, length=length(io, io.size))
        push = Push(self.seqs[worker], (base,), meta)
        flight = Send(io.copy(), push, overlapped=worker in self.flights)
        self.seqs[worker] += 1
        ahead = anticipation.ahead(in_flight=overlaps) if self.job.anticipates else 0.0
        who = worker, self.incarnations[worker], self.seqs[worker]
        answer = self.shard.run(self.shard.pushing(*who, base, meta, ahead=ahead), io)
        self.samples += self.job.batch
        self.metas[worker] = answer.meta
        cadence, made_at = self.cadences[worker], self._served(self.now)
        cadence.pushes(self.now - self.pushed[worker], self.now - self.began[worker], self.pulled[worker])
        self.pushed[worker] = self.now
        if cadence.in_round and not overlaps:
            self.waiting[worker] = base, ahead, answer, made_at
            self.shard.workers.rounds.arrive(worker, self.now, math.inf)
            self._release()
            return
        self._begin(worker, self.now)
        self.pulled[worker] = pulled = Pulled(
            (answer.version,), (answer.meta,),
            pull_seconds=self._served(made_at) - made_at, push_seconds=made_at - self.now,
        )  # fmt: skip
        before = self.held[worker]
        self.held[worker] = answer.version, io
        if not overlaps:
            anticipation.answered(pulled, base, overlapped=False)
            self.computing[worker] = self.held[worker]
            return
        # The next step begins before this answer, with the one before.
        self.computing[worker] = before
        if self.job.anticipates:
            said = answer.meta._replace(samples=self.known.get(worker, 0))
            known = Pulled((before[0],), (said,))
            ahead_of = anticipation.include(before[1], flight, known)
            self.computing[worker] = before[0], ahead_of.copy()
        anticipation.answered(pulled, base, overlapped=flight.overlapped)
        self.known[worker], self.flights[worker] = answer.meta.samples, flight

    def _join(self, worker: int) -> None:
        self.shard.workers.connect(worker, self.incarnations[worker])
        size = self.network.size
        self.anticipations[worker] = Anticipation(self.config, size, HostInclusion(size, lambda array: array))
        self.computing[worker] = self.held[worker] = self._pull(worker)
        self.known[worker] = self.shard.history.samples
        self.flights.pop(worker, None)
        self.cadences[worker] = Cadence(rounds=self.job.rounds, sequential=False)
        meta = AnswerMeta(self.known[worker], self.shard.workers.live)
        self.pulled[worker] = Pulled((self.held[worker][0],), (meta,))
        self.pushed[worker] = self.now
        self._begin(worker, self.now)

    def _replace(self, worker: int) -> None:
        """The worker is lost with the step that it computes; another one takes its slot at once."""
        self.incarnations[worker] += 1
        self.seqs[worker] = 0
        self.own.pop(worker, None)
        self.shard.workers.rounds.forget(worker)
        self._release()
        self._join(worker)

    def shrink(self, workers: int) -> None:
        """Only the first `workers` go on; the others leave with the step that they compute."""
        self._end_waits()
        for worker in range(workers, self.job.workers):
            self.shard.workers.rounds.forget(worker)
        self.queue = [(at, worker) for at, worker in self.queue if worker < workers]
        heapq.heapify(self.queue)
        self.shard.workers.set_live(workers)

    def _end_waits(self) -> None:
        for worker in list(self.waiting):
            self.shard.workers.rounds.forget(worker)
            self._go_on(worker)

    def outage(self, steps: int) -> None:
        """An outage of the server, in which each worker takes `steps` local steps; then they push their differences.

        As in the real worker, with its `Outage`: the difference is scaled by 1/W.
        """
        self._end_waits()
        workers, rate = self.job.workers, schedules.learning_rate(self.config.learning_rate, 0)
        for worker in range(workers):
            base, flat = self.held[worker]
            alone = Outage(flat, self.config, self.network.size, rate, lambda: 0.0)
            local = flat.copy()
            for _ in range(steps):
                alone.step(self.gradient(local), BATCH, [Progress(0, -1, 0, 0)])
                alone.parameters_into(local)
            delta = np.empty_like(flat)
            alone.difference_into(delta)
            self.seqs[worker] += 1
            meta = PushMeta(samples=steps * BATCH, steps=steps, scale=1.0 / workers)
            stream = self.shard.pushing(worker, 0, self.seqs[worker], base, meta, delta=True)
            answer = self.shard.run(stream, delta)
            self.samples += meta.samples
            self.held[worker] = self.computing[worker] = (answer.version, delta)

    def lose_server(self, snapshot: ShardCopy, *, copies: bool) -> int:
        """Replace the server by one with this snapshot and, if `copies`, with the newest copy of a worker.

        Returns how many updates are lost.
        """
        self._end_waits()
        lost = self.shard.history.version
        self.shard = self._server(1)
        self.shard.restore(snapshot)
        for worker in range(self.job.workers):
            version, flat = self.held[worker]
            if self.shard.hello(worker, 0, self.model, Held(version=version) if copies else None).wants_copy:
                self.shard.offer(worker, 0, flat.copy(), version, self.metas[worker])
        self.now += RECOVERY_SECONDS
        self.shard.workers.set_live(self.job.workers)
        self.held = {worker: self._pull(worker) for worker in range(self.job.workers)}
        self.computing = dict(self.held)
        return lost - self.shard.history.version

    def parameters(self) -> Vector:
        """Those that an evaluation pulls."""
        return self._pull(0)[1]

    def _server(self, epoch: int) -> ShardStore:
        policy = Staleness(policy=self.job.policy)
        return ShardStore(0, 1, epoch, staleness=policy, clock=lambda: self.now)

    def _pull(self, worker: int, ahead: float = 0.0) -> tuple[int, Vector]:
        out = np.empty(self.network.size, np.float32)
        return self.shard.run(self.shard.pulling(worker, 0, ahead=ahead), out).version, out


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


SCALED = {"initial_learning_rate", "warmup_target"}


def _shorter(config: OptimizerConfig, times: float) -> OptimizerConfig:
    """`config` with moments that last so many times fewer steps, and at least one."""
    decays = ("momentum", "beta_1", "beta_2", "rho")
    shorter = {name: max(0.0, 1 - times * (1 - getattr(config, name))) for name in decays}
    return config.model_copy(update=shorter)


def _at_rate(config: OptimizerConfig, rate: float) -> OptimizerConfig:
    """`config` with `rate` times its learning rate."""
    if isinstance(config.learning_rate, float):
        return config.model_copy(update={"learning_rate": rate * config.learning_rate})
    schedule = config.learning_rate
    scaled = {
        key: value * rate if isinstance(value, float) and key in SCALED else value
        for key, value in schedule.config.items()
    }
    return config.model_copy(update={"learning_rate": schedule.model_copy(update={"config": scaled})})
