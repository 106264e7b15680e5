"""A worker's life: join, train on what it is given, ride through outages, do tasks, leave.

While a step computes, the push of the step before it and the pull of the next parameters are under way, so that the
network costs time only where it takes longer than a step. The price is one step of staleness; `staleness.max = 0`
waits for each push instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

import numpy as np
import numpy.typing as npt

from shoal_trainer.errors import Unreachable, UserError
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.wire.messages import Pulled, Push, Timings, Welcome
from shoal_trainer.worker.exchange import Exchange
from shoal_trainer.worker.feed import EndOfFile, Feed, Item, Ready
from shoal_trainer.worker.flat_model import FlatModel, Step
from shoal_trainer.worker.layout import Average
from shoal_trainer.worker.leases import Leases, joined
from shoal_trainer.worker.optimizers import Placement
from shoal_trainer.worker.send import Send, combined, full
from shoal_trainer.worker.upstream import PROBE_SECONDS, RETRY_SECONDS, Upstream
from shoal_trainer.worker.work import Coordinator, Finished, TaskWork

log = logging.getLogger(__name__)

LEAVE_SECONDS = 10.0
"""How long a worker that was told to stop waits for its last push."""


class End(Enum):
    """Why the loop ended."""

    FINISHED = "finished"
    DRAINED = "drained"


@dataclass(frozen=True)
class Policy:
    """How the loop is to behave; all of it comes from the job."""

    sequential: bool = False
    steps_per_push: int = 1
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    averages: tuple[Average, ...] = ()


class Loop(Upstream):
    """One worker. `run` blocks until the job has ended or `drain` is set, and says which."""

    def __init__(
        self,
        flat_model: FlatModel,
        placement: Placement,
        exchange: Exchange,
        feed: Feed,
        coordinator: Coordinator,
        leases: Leases,
        do_task: Callable[[TaskWork, npt.NDArray[np.float32]], None],
        drain: threading.Event,
        policy: Policy,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(flat_model, placement, exchange, coordinator, leases, drain, clock)
        self._feed = feed
        self._do_task = do_task
        self._policy = policy
        self._input_seconds = self._compute_seconds = 0.0
        self._behind = 1
        """How many pushes came between the parameters of the last push and it."""
        self.steps = 0

    # --- the story ------------------------------------------------------------------------------------------------

    def run(self) -> End:
        """Join, then work until there is no more to do."""
        self._join()
        self._feed.start()
        while not self._drain.is_set():
            if isinstance(self._held, Finished) or self._coordinator.finished():
                self._leave()
                return End.FINISHED
            if self._outage is not None:
                self._ride()
                continue
            began = self._clock()
            item = self._take(timeout=0.1)
            self._input_seconds += self._clock() - began
            if isinstance(item, Ready):
                self._train(item)
            elif item is None:
                self._idle()
            elif isinstance(item, TaskWork | EndOfFile):
                self._settle()
                self._do(item)
            else:
                self._collect()
                if isinstance(item, BaseException) and self._outage is None:
                    raise item
                self._held = item
        self._leave()
        return End.DRAINED

    def _idle(self) -> None:
        """Nothing to train at the moment: push what is piled up, for nothing may come to fill the pile."""
        base = self._pulled
        self._collect()
        if self._outage is not None:
            return
        if self._pile and base is not None:
            self._send(base)
        elif self._clock() - self._heard >= PROBE_SECONDS:
            self._probe()
            self._input_seconds, self._last_push = 0.0, self._clock()

    def _settle(self) -> None:
        """See all that is computed into the parameters: what is done next may take long, or tells that it is there."""
        base = self._pulled
        self._collect()
        if self._outage is None and self._pile and base is not None:
            self._send(base)
            self._collect()

    def _do(self, item: TaskWork | EndOfFile) -> None:
        """Do what is done once; during an outage it is held."""
        if self._outage is not None:
            self._held = item
            return
        if isinstance(item, TaskWork):
            self._run_task(item)
        else:
            self._file_ended(item)
        self._input_seconds, self._last_push = 0.0, self._clock()

    def _run_task(self, task: TaskWork) -> None:
        """Do a task at the present parameters; without a parameter server it is held, and the outage begins.

        The parameters come over the loop's own connections. A second client of this slot would greet a restarted
        server without a copy, and the server would no longer wait for the copy that the loop holds.
        """
        flat: npt.NDArray[np.float32] = aligned(self._flat_model.layout.size, np.float32)
        try:
            self._exchange.pull(flat, idle=True, exact=True).result()
        except Unreachable as error:
            self._held = task
            self._begin_outage(error, None)
            return
        self._do_task(task, flat)
        self._outdated = True
        self._feed.go_on()

    def _join(self) -> None:
        """Connect, give the first parameters unless another worker was first, join the coordinator, and pull.

        The heartbeats joined before the model was traced; parameter server 0 may have been replaced since then, and
        only `_boots` would show it. If it is replaced now, the pull fails.
        """
        while not self._drain.is_set():
            try:
                welcome = self._wait(self._exchange.connect(lambda: None))
                if welcome is None:
                    return
                if not welcome.initialized:
                    self._exchange.initialize(self._flat_model.initial()).result()
                self._join_coordinator({})
                pulled = self._exchange.pull(self._buffers.spare).result()
            except Unreachable as error:
                log.info("joining: %s", error)
                self._drain.wait(RETRY_SECONDS)
                continue
            self._begin_from(pulled)
            self._boots, self._generation = welcome.boots, welcome.generation
            self._leases.begin_again(welcome.generation)
            self._seq = max(shard.last_seq for shard in welcome.shards)
            self._last_push = self._clock()
            return

    # --- a step ---------------------------------------------------------------------------------------------------

    def _train(self, ready: Ready) -> None:
        if self._outdated:
            self._refresh(idle=False)
            if self._outage is not None:
                self._train_alone(ready)
                return
        assert self._pulled is not None
        base = self._pulled
        began = self._clock()
        updates = self._placement.config.step_after(base.samples)
        step = self._checked(self._flat_model.step(self._buffers.tensor, ready.batch, updates), ready)
        if step is None:
            return
        self._compute_seconds = self._clock() - began + (self._compute_seconds if self._pile else 0.0)
        self._pile.append((step, ready))
        self.steps += 1
        if not full(self._pile, self._policy.steps_per_push):
            return
        self._collect()
        if self._outage is not None:
            return
        self._send(base)
        if self._policy.sequential:
            self._collect()

    def _send(self, base: Pulled) -> None:
        """Hand what is piled up to the exchange thread."""
        # What is somebody else's by now is not pushed: it would be in the parameters twice.
        self._pile = [piled for piled in self._pile if self._leases.token(piled[1].work.token) is not None]
        if not self._pile:
            return
        skipped = all(step.skipped for step, _ in self._pile)
        behind = 1 if skipped else self._behind  # a difference is not divided by the pushes in between
        update, samples, loss = combined(self._pile, self._policy.averages, behind)
        steps = len(self._pile)
        marks = [self._leases.mark(ready.work.token, ready.batch.end) for _, ready in self._pile]
        self._pile.clear()
        now = self._clock()
        self._seq += 1
        rate = self._placement.rate
        push = Push(
            seq=self._seq,
            samples=samples,
            base_versions=base.versions,
            progress=joined(marks),
            loss=loss,
            timings=Timings(
                (now - self._last_push) / steps,
                self._compute_seconds / steps,
                base.pull_seconds / steps,
                base.push_seconds / steps,
                self._input_seconds / steps,
            ),
            learning_rate=None if rate is None else rate(base.samples),
            steps=steps,
        )
        self._input_seconds, self._last_push = 0.0, now
        if skipped:  # a difference passes by the optimizer: momentum and Adam's step stay, as in Keras
            future = self._exchange.push_delta(update, self._buffers.spare, push, scale=1.0, merge=False)
        else:
            future = self._exchange.push_pull(update, self._buffers.spare, push)
        self._under_way = (future, Send(update, push, local=skipped))

    def _collect(self) -> None:
        """Wait for the exchange that is under way; its parameters become current. `Unreachable` begins an outage."""
        if self._under_way is None:
            return
        (future, send), self._under_way = self._under_way, None
        try:
            pulled = future.result()
        except Unreachable as error:
            self._begin_outage(error, send)
        else:
            for journal, later in zip(self._journals, pulled.journals, strict=True):
                journal.follow(later)
            self._pulled = pulled
            self._behind = max(1, pulled.versions[0] - 1 - send.push.base_versions[0])
            self._buffers.swap()
            self._leases.answered(send.push)
            self._leases.void(pulled.stopped)
            self._flat_model.reuse(send.update)
        self._heard = self._clock()

    def _checked(self, step: Step, ready: Ready) -> Step | None:
        """The step, as it may be pushed; None where the job goes back to a snapshot because of it."""
        if step.finite:
            return step
        if self._policy.on_nan == "rollback":
            self._go_back(step, ready)
            return None
        if self._policy.on_nan == "skip":
            log.warning("the loss is not finite: batch before position %d skipped", ready.batch.end)
            return replace(step, update=np.zeros_like(step.update), skipped=True)
        raise UserError(
            f"The loss or its gradient is not finite (loss {step.loss}) in epoch {ready.work.epoch + 1}. Lower the "
            "learning rate, clip gradients (clipnorm=…), look for bad samples, or set Training(on_nan=…) to "
            '"skip" or "rollback".'
        )

    # --- an outage ------------------------------------------------------------------------------------------------

    def _ride(self) -> None:
        """One turn while a server is away: reconnect if it is back, else a local step, else wait a little."""
        assert self._outage is not None
        assert self._reconnect is not None
        if self._reconnect.done():
            self._come_back(self._reconnect.result())
            return
        if self._held is not None or self._outage.exhausted:
            self._wait(self._reconnect, turns=1)
            return
        item = self._take(timeout=0.05)
        if not isinstance(item, Ready):
            self._held = item
            return
        self._train_alone(item)

    def _train_alone(self, ready: Ready) -> None:
        """A local step."""
        assert self._outage is not None
        self._outage.parameters_into(self._buffers.spare)
        assert self._pulled is not None
        updates = self._placement.config.step_after(self._pulled.samples)
        step = self._checked(self._flat_model.step(self._buffers.spare_tensor, ready.batch, updates), ready)
        if step is not None:
            self._step_alone(step, ready)
            self.steps += 1

    # --- small things ---------------------------------------------------------------------------------------------

    def _take(self, timeout: float) -> Item | None:
        if self._held is not None:
            item, self._held = self._held, None
            return item
        found = self._feed.get(timeout)
        void = isinstance(found, Ready) and self._leases.token(found.work.token) is None
        return None if void else found

    def _wait(self, future: Future[Welcome], turns: int | None = None) -> Welcome | None:
        """The future's result; None where the worker is told to stop (or after so many turns of 0.1 s)."""
        while not self._drain.is_set() and turns != 0:
            try:
                return future.result(timeout=0.1)
            except FutureTimeout:
                turns = None if turns is None else turns - 1
        return None

    def _file_ended(self, item: EndOfFile) -> None:
        token = self._leases.token(item.work.token)
        if token is None:
            return
        try:
            self._coordinator.file_ended(token, item.length)
        except Unreachable as error:
            log.warning("cannot tell the length of %s yet: %s", item.work.file, error)
            self._held = item
            self._probe()
            if self._outage is None:
                self._drain.wait(PROBE_SECONDS)
        else:
            self._leases.drop(token)

    def _leave(self) -> None:
        """Told to stop: the step is finished; see its push through, and give back the rest of the leases."""
        self._feed.stop()
        if self._under_way is not None:
            try:
                self._under_way[0].result(timeout=LEAVE_SECONDS)
            except (Unreachable, FutureTimeout) as error:
                log.warning("the last push did not arrive: %s", error)
        self._exchange.close()  # what did not arrive by now is to be trained by somebody else, and not to come late
        try:
            self._coordinator.leave()
        except Unreachable as error:
            log.warning("could not say goodbye: %s", error)
