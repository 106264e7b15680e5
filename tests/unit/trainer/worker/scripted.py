"""A loop without threads, against scripted answers of one parameter server."""

import math
import threading
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from shoal_trainer.data.batch import Batch
from shoal_trainer.errors import Unreachable
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.wire.messages import AnswerMeta, OptimizerConfig, Pulled, ShardWelcome, Welcome
from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.flat_model import Step
from shoal_trainer.worker.leases import Leases
from shoal_trainer.worker.loop import Loop, Policy
from shoal_trainer.worker.on_host import HostInclusion, HostMean
from shoal_trainer.worker.optimizers import Placement
from shoal_trainer.worker.work import About, DataWork

SIZE, TERM = 4, 111


class Server:
    """Its answers. `stopped`: the term that has ended training; `reachable`: False while it is lost.

    `live`: workers; `seconds`: of a push and a pull together, `wait`: for other workers, `late`: until the next step;
    `rounds`: the pushes that wait for other workers.
    """

    def __init__(self, passes):
        self.stopped, self.reachable, self.pushes, self.deltas, self.rounds = 0, True, [], [], []
        self.live, self.seconds, self.wait, self.late = 1, 0.0, 0.0, 0.0
        self.generation = self.last_seq = 0
        self._passes = passes

    def submit(self, call):
        return call(self)

    def pull(self, *_arguments, **_options):
        return self._answer(self.pulled)

    def push_pull(self, _update, _out, push, again=None):
        if self.reachable:
            self.pushes.append(push)
        return self._answer(self.pulled)

    def push_round(self, update, out, push):
        self.rounds.append(push)
        self._passes(self.seconds + self.wait + self.late)
        answer = self.push_pull(update, out, push)
        if self.reachable:
            answer._result = replace(answer.result(), wait_seconds=self.wait)
        return answer

    def push_delta(self, _delta, _out, push):
        if self.reachable:
            self.pushes.append(push)
            self.deltas.append(push.meta.scale)
        return self._answer(self.pulled)

    def probe(self):
        return self._answer(self.welcome)

    def connect(self, _copy):
        return self._answer(self.welcome) if self.reachable else Future()

    def end(self):
        pass

    close = end

    def pulled(self):
        answer = AnswerMeta(live_workers=self.live, stopped=self.stopped)
        return Pulled((5,), (answer,), pull_seconds=self.seconds)

    def welcome(self):
        welcome = ShardWelcome(index=0, epoch=0, boot=TERM, version=5, ready=True, stopped=self.stopped)
        return Welcome(
            (welcome.model_copy(update={"generation": self.generation, "last_seq": self.last_seq}),)
        )

    def _answer(self, make):
        future = Future()
        if self.reachable:
            future.set_result(make())
        else:
            future.set_exception(Unreachable("the server is lost"))
        return future


class Coordinator:
    """Records the reports."""

    def __init__(self):
        self.outage, self.reports, self.diverged_batches, self.rate = "", [], [], None

    def join(self, leases, wasted):
        assert not leases
        self.reports.append(wasted.steps)
        return {}

    def diverged(self, _generation, batch, _reason):
        self.diverged_batches.append(batch)

    def set_message(self, message, about):
        if about is About.OUTAGE:
            self.outage = message

    def learning_rate(self):
        return self.rate

    def finished(self):
        return False

    def leave(self, wasted, _seconds):
        self.reports.append(wasted.steps)


class Bench:
    """A worker that has pulled, and holds a lease of the positions 0 to 8."""

    def __init__(self, *, keras_model=None, placement=None, task=None, **policy):
        self.server, self.coordinator, self.leases, self.now = (
            Server(self.passes),
            Coordinator(),
            Leases(),
            0.0,
        )
        self.items, self.loss, self.step_seconds = [], 0.1, 0.0
        vector = SimpleNamespace(
            dtype=np.float32, alias=lambda flat: flat, upload=lambda tensor: tensor, upload_when=lambda *_: None,
            on_devices=lambda tensor: tensor, reuse=lambda _update: None,
        )  # fmt: skip
        model = SimpleNamespace(
            layout=SimpleNamespace(size=SIZE, trainable=SIZE), vector=vector, step=self.step, averages=(),
            mean=lambda: HostMean(SIZE, SIZE), inclusion=lambda: HostInclusion(SIZE, lambda flat: flat),
            still=lambda _parameters: aligned(SIZE), model=keras_model,
        )  # fmt: skip
        feed = SimpleNamespace(
            start=lambda: None,
            stop=lambda: None,
            upcoming=lambda: None,
            get=lambda _timeout: self.items.pop(0) if self.items else None,
            task_finished=lambda: None,
        )
        self.feed = feed
        self.loop = Loop(
            model, placement or Placement(OptimizerConfig()), self.server, feed, self.coordinator, self.leases, task,
            threading.Event(), Policy(**policy), clock=lambda: self.now,
        )  # fmt: skip
        self.loop.upstream._use(self.server.pulled())
        self.loop.upstream._boots = ((0, TERM),)
        self.work = DataWork((TERM, 1), 0, 0, 8)
        self.leases.grant(self.work)

    def passes(self, seconds):
        """Time passes."""
        self.now += seconds

    def step(self, *_arguments):
        self.passes(self.step_seconds)
        return Step(aligned(SIZE), self.loss, math.isfinite(self.loss))

    def run(self):
        """The loop, once it has joined."""
        self.loop.upstream.join = lambda: None
        return self.loop.run()

    def batch(self, start=0):
        return Ready(self.work, Batch(np.arange(2), None, np.ones(2, np.float32), 2, start + 2))
