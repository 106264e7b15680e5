"""The main loop of a worker: join, train, train locally during outages, run tasks, leave.

The push of a step and the pull of the next parameters overlap with the next step, which computes on what is expected to
come of them (`anticipation`). The loop waits for each push instead with `staleness.max = 0`, and where a push and a
pull take so little time that it takes part in rounds (`ps/rounds`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shoal_trainer.errors import Unreachable, UserError
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.retry import Backoff
from shoal_trainer.wire.messages import Pulled, Push, Timings
from shoal_trainer.worker.beside import Beside
from shoal_trainer.worker.cadence import Cadence
from shoal_trainer.worker.callbacks import rate_of, set_rate
from shoal_trainer.worker.exchange import Exchange
from shoal_trainer.worker.feed import EndOfFile, Failed, Feed, Item, Ready
from shoal_trainer.worker.flat_model import FlatModel, Step
from shoal_trainer.worker.leases import Leases, joined
from shoal_trainer.worker.optimizers import Placement
from shoal_trainer.worker.send import Send, length
from shoal_trainer.worker.upstream import PROBE_SECONDS, Upstream
from shoal_trainer.worker.work import JOINED, Coordinator, Finished, TaskWork, Wasted, reporting

log = logging.getLogger(__name__)

LEAVE_SECONDS = 10.0
"""How long a worker that stops waits for its last push."""


class End(Enum):
    """Why the loop ended."""

    FINISHED = "finished"
    DRAINED = "drained"


@dataclass(frozen=True)
class Policy:
    """The job's options for the loop."""

    sequential: bool = False
    rounds: bool = False
    steps_per_push: int = 1
    on_nan: Literal["stop", "skip", "rollback"] = "stop"


class Loop(Upstream):
    """The loop of one worker."""

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
        watch: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(flat_model, placement, exchange, coordinator, leases, drain, clock)
        self._feed = feed
        self._do_task = do_task
        self._policy = policy
        self._watch = watch
        self._input_seconds = self._compute_seconds = 0.0
        self._computed_on: Any = None
        self._overlapped = False
        """Whether an earlier push was in flight while the pending steps were computed."""
        self._cadence = Cadence(rounds=policy.rounds, sequential=policy.sequential)
        self._followed_rate: float | None = None
        self._compiled_rate: float | None = None
        self.steps = 0
        self.beside = Beside()

    # --- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> End:
        """Join, then work until the job has ended or `drain` is set."""
        self._join()
        self._feed.start()
        while not self._drain.is_set():
            if isinstance(self._deferred, Finished) or self._coordinator.finished():
                self.leave()
                return End.FINISHED
            if self._outage is not None:
                self._outage_turn()
                continue
            started = self._clock()
            item = self._next_item(timeout=0.1)
            self._input_seconds += self._clock() - started
            if isinstance(item, Ready):
                self._train(item)
            elif item is None:
                self._idle()
            elif isinstance(item, TaskWork | EndOfFile):
                self._flush()
                self._handle(item)
            elif isinstance(item, Failed):
                if not self._discarded(item, item.error):
                    raise item.error
            else:
                self._collect()
                if isinstance(item, BaseException) and self._outage is None:
                    raise item
                self._deferred = item
        self.leave()
        return End.DRAINED

    def _idle(self) -> None:
        """Without work: push the pending steps, else probe the servers from time to time."""
        base = self._pulled
        self._collect()
        if self._outage is not None:
            return
        if self._pending and base is not None:
            self._send(base)
        elif self._clock() - self._last_answer >= PROBE_SECONDS:
            self._probe()
            if self._outage is None:
                self._report_wasted()
            self._waited()
        elif not self._leases.held():  # else the data are slow, which is the step's time
            self._waited()

    def _waited(self) -> None:
        """What passed since the last push belongs to no step."""
        now = self._clock()
        self.beside.waited(now - self._last_push)
        self._input_seconds, self._last_push = 0.0, now

    def _flush(self) -> None:
        """Push all steps and wait for the answers, before a task or the report of a file's length."""
        base = self._pulled
        self._collect()
        if self._outage is None and self._pending and base is not None:
            self._send(base)
            self._collect()

    def _handle(self, item: TaskWork | EndOfFile) -> None:
        """Run a task or report the length of a file; during an outage, defer it."""
        if self._outage is not None:
            self._deferred = item
            return
        if isinstance(item, TaskWork):
            self.beside.task_begins(self._last_push)
            self._run_task(item)
        else:
            self._file_ended(item)
        self._input_seconds, self._last_push = 0.0, self._clock()
        self.beside.task_ended(self._last_push)

    def _run_task(self, task: TaskWork) -> None:
        """Run a task with the current parameters; if a server is unreachable, defer it and begin an outage.

        The parameters are pulled over the loop's connections: a second client of this slot would connect to a restarted
        server without a copy, and the server would not wait for the loop's copy.
        """
        flat: npt.NDArray[np.float32] = aligned(self._flat_model.layout.size, np.float32)
        try:
            self._exchange.pull(flat, idle=True, exact=True).result()
        except Unreachable as error:
            self._deferred = task
            self._begin_outage(error, None)
            return
        self._do_task(task, flat)
        self._outdated = True
        self._feed.task_finished()

    def _join(self) -> None:
        """Connect, initialize the parameters unless another worker has, join the coordinator, and pull.

        The heartbeats have joined before the model was traced; this join reaches a coordinator that was replaced since.
        If parameter server 0 is replaced after this join, the pull fails.
        """
        backoff, started = Backoff(longest=PROBE_SECONDS), self._clock()
        while not self._drain.is_set():
            try:
                welcome = self._wait(self._exchange.connect(lambda: None))
                if welcome is None:
                    return
                if not welcome.initialized:
                    self._exchange.initialize(self._flat_model.initial()).result()
                self._join_coordinator({})
                greeted = self._clock()
                pulled = self._exchange.pull(self._buffers.spare).result()
            except Unreachable as error:
                if backoff.is_new(error):
                    log.info("joining: %s", error)
                backoff.wait(self._drain)
                continue
            self._use(pulled)
            self._boots, self._generation = welcome.boots, welcome.generation
            self._leases.reset(welcome.generation)
            self._seq = max(shard.last_seq for shard in welcome.shards)
            self._last_push = self._clock()
            now = self._last_push
            log.info("%s: hello %.3f s, pull %.3f s", JOINED, greeted - started, now - greeted)
            return

    # --- a step ---------------------------------------------------------------------------------------------------

    def _train(self, ready: Ready) -> None:
        if self._outdated:
            self._refresh(idle=False)
            if self._outage is not None:
                self._train_locally(ready)
                return
            if self._leases.token(ready.work.token) is None:
                return
        assert self._pulled is not None
        base = self._pulled
        started = self._clock()
        if not self._placement.on_server:
            self._follow_rate()
        updates = self._placement.config.step_after(base.samples)
        if (step := self._step(self._parameters(base), ready, updates)) is None:
            return
        self._compute_seconds = self._clock() - started + (self._compute_seconds if self._pending else 0.0)
        self._pending.add(step, ready)
        self.steps += 1
        if not self._pending.full(self._policy.steps_per_push):
            return
        self._collect()
        if self._outage is not None:
            return
        self._send(base)
        if self._cadence.waits:
            self._collect()

    def _parameters(self, base: Pulled) -> Any:
        """The parameters to compute on. Steps of one push share them."""
        if not self._pending:
            tensor = self._buffers.copy
            if self._in_flight is not None:
                tensor = self._anticipation.include(tensor, self._in_flight[1], base)
            self._overlapped = self._in_flight is not None
            self._computed_on = self._flat_model.on_device(tensor)
        return self._computed_on

    def _step(self, parameters: Any, ready: Ready, updates: int) -> Step | None:
        """Run one step, while the next batch goes to the accelerator; None if it is discarded. Errors name the data."""
        try:
            what = f"a training step on {ready.work.source}"
            with self._watch(what), reporting(self._coordinator, what, self._clock):
                step = self._flat_model.step(parameters, ready.batch, updates, self._feed.upcoming())
        except UserError as error:
            if self._discarded(ready, error):
                return None
            raise UserError(f"{ready.work.source}: {error}") from error
        return self._check_finite(step, ready, parameters)

    def _send(self, base: Pulled) -> None:
        """Pass the pending steps to the exchange thread as one push."""
        pile = self._pending
        if not (marks := self._marks()):
            pile.clear()
            return
        update, steps = pile.update(), len(pile)
        now = self._clock()
        self._cadence.pushes(now - self._last_push, self._compute_seconds + self._input_seconds, base)
        self._seq += 1
        push = Push(
            seq=self._seq,
            samples=pile.samples,
            left_out=pile.left_out,
            base_versions=base.versions,
            progress=joined(marks),
            loss=pile.loss,
            timings=Timings(
                (now - self._last_push) / steps,
                self._compute_seconds / steps,
                base.pull_seconds / steps,
                base.push_seconds / steps,
                self._input_seconds / steps,
            ),
            learning_rate=self._learning_rate(base),
            steps=steps,
            metrics=pile.metrics,
            ahead=self._anticipation.ahead(in_flight=not self._cadence.waits),
            length=length(update, self._flat_model.layout.trainable) if base.live_workers > 1 else math.nan,
            skipped=pile.skipped,
        )
        pile.clear()
        self._input_seconds, self._last_push = 0.0, now
        send = Send(update, push, overlapped=self._overlapped)
        if self._cadence.in_round:
            future = self._exchange.push_round(update, self._buffers.spare, push)
        else:
            again = self._cadence.again(base, send.hurry)
            future = self._exchange.push_pull(update, self._buffers.spare, push, again=again)
        self._in_flight = (future, send)
        self._copy = self._flat_model.upload_when(future, self._buffers.spare_tensor)

    def _follow_rate(self) -> None:
        """Give the optimizer on this worker the learning rate that a callback has set; else that of `compile()`."""
        rate = self._coordinator.learning_rate()
        if rate == self._followed_rate:
            return
        if self._followed_rate is None:
            self._compiled_rate = rate_of(self._flat_model.model)
        self._followed_rate = rate
        if (new := self._compiled_rate if rate is None else rate) is not None:
            set_rate(self._flat_model.model, new)

    def _learning_rate(self, base: Pulled) -> float | None:
        """The learning rate of a push that the servers do not know: set by a callback, or known to the worker only."""
        if self._placement.on_server and (rate := self._coordinator.learning_rate()) is not None:
            return rate
        return None if self._placement.rate is None else self._placement.rate(base.samples)

    def _collect(self) -> None:
        """Wait for the push in flight and use its parameters; if a server is unreachable, begin an outage."""
        if self._in_flight is None:
            return
        (future, send), self._in_flight = self._in_flight, None
        send.hurry.set()
        try:
            pulled = future.result()
        except Unreachable as error:
            self._begin_outage(error, send)
        else:
            for journal, later in zip(self._journals, pulled.journals, strict=True):
                journal.follow(later)
            self._pulled = pulled
            self._anticipation.answered(pulled, send.push.base_versions[0], overlapped=send.overlapped)
            self._buffers.swap(None if self._copy is None else self._copy.result())
            self._leases.answered(send.push)
            self._leases.void(pulled.stopped)
            self._flat_model.reuse(send.update)
        self._last_answer = self._clock()

    def _check_finite(self, step: Step, ready: Ready, parameters: Any) -> Step | None:
        """Apply `on_nan` to the step; None if it is discarded."""
        if step.finite:
            return step
        if self._policy.on_nan == "rollback":
            self._report_divergence(step, ready)
            return None
        if self._policy.on_nan == "skip":
            log.warning("the loss is not finite: skipping the batch before position %d", ready.batch.end)
            return replace(step, update=self._flat_model.still(parameters), skipped=True, left_out=True)
        if self._discarded(ready, f"the loss is {step.loss}"):
            return None
        what = "gradient" if math.isfinite(step.loss) else "loss"
        raise UserError(
            f"The {what} is not finite (loss {step.loss}) in epoch {ready.work.epoch + 1}. Lower the "
            "learning rate, clip gradients (clipnorm=…), look for bad samples, or set Training(on_nan=…) to "
            '"skip" or "rollback".'
        )

    def _discarded(self, item: Ready | Failed, why: object) -> bool:
        """Discard what does not fail the job, as training has ended; during an outage, which hides that, defer it."""
        self._collect()
        if self._outage is None:
            self._probe()
        if not self._leases.revoked(item.work):
            if self._outage is None:
                return False
            self._deferred = item
        log.warning("%s: %s: %s", item.work.source, "deferred" if self._deferred else "discarded", why)
        self._wasted += isinstance(item, Ready)
        return True

    # --- an outage ------------------------------------------------------------------------------------------------

    def _outage_turn(self) -> None:
        """End the outage if the servers are reachable, else take a local step, else wait briefly."""
        assert self._outage is not None
        assert self._reconnect is not None
        if self._reconnect.done():
            self._end_outage(self._reconnect.result())
            return
        if self._deferred is not None or self._outage.exhausted:
            self._wait(self._reconnect, turns=1)
            return
        item = self._next_item(timeout=0.05)
        if not isinstance(item, Ready):
            self._deferred = item
            return
        self._train_locally(item)

    def _train_locally(self, ready: Ready) -> None:
        assert self._outage is not None
        self._outage.parameters_into(self._buffers.spare)
        assert self._pulled is not None
        updates = self._placement.config.step_after(self._pulled.samples)
        if (step := self._step(self._buffers.spare_tensor, ready, updates)) is not None:
            self._pending.add(step, ready)
            self._local_steps()
            self.steps += 1

    # --- helpers --------------------------------------------------------------------------------------------------

    def _next_item(self, timeout: float) -> Item | None:
        item, self._deferred = self._deferred, None
        if item is None:
            item = self._feed.get(timeout)
        reassigned = isinstance(item, Ready) and self._leases.token(item.work.token) is None
        return None if reassigned else item

    def _file_ended(self, item: EndOfFile) -> None:
        token = self._leases.token(item.work.token)
        if token is None:
            return
        try:
            self._coordinator.file_ended(token, item.length)
        except Unreachable as error:
            log.warning("cannot report the length of %s yet: %s", item.work.file, error)
            self._deferred = item
            self._probe()
            if self._outage is None:
                self._drain.wait(PROBE_SECONDS)
        else:
            self._leases.drop(token)

    def leave(self) -> None:
        """Wait for the push in flight, and release the leases."""
        self._feed.stop()
        if self._in_flight is not None:
            self._in_flight[1].hurry.set()
            try:
                self._in_flight[0].result(timeout=LEAVE_SECONDS)
            except (Unreachable, FutureTimeout) as error:
                log.warning("the last push was not answered: %s", error)
        self._exchange.close()  # before the leases are released: a push must not arrive after that
        self._wasted += len(self._pending) + (0 if self._outage is None else self._outage.steps)
        try:
            self._coordinator.leave(Wasted(self._wasted, self._acknowledged))
        except Unreachable as error:
            log.warning("cannot report that this worker leaves: %s", error)
