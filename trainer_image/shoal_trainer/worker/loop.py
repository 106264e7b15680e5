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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shoal_trainer.errors import Unreachable, UserError
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.wire.messages import Pulled, Push, PushMeta, Timings
from shoal_trainer.worker.beside import Beside
from shoal_trainer.worker.cadence import Cadence
from shoal_trainer.worker.callbacks import rate_of, set_rate
from shoal_trainer.worker.coordination import ControlPlane
from shoal_trainer.worker.exchange import Exchange
from shoal_trainer.worker.feed import EndOfFile, Failed, Feed, Item, Ready
from shoal_trainer.worker.flat_model import FlatModel, Step
from shoal_trainer.worker.leases import Leases, joined
from shoal_trainer.worker.optimizers import Placement
from shoal_trainer.worker.send import Send, length
from shoal_trainer.worker.upstream import ADDING, PROBE_SECONDS, Upstream
from shoal_trainer.worker.work import Finished, TaskWork, reporting

log = logging.getLogger(__name__)


MAX_LEFT_OUT = 20
"""So many batches in a row that `on_nan="skip"` leaves out are no bad samples: the parameters themselves diverged."""


LATE_SECONDS = 10.0
"""So long after the batch before it, one that Keras would accumulate is not waited for: other workers may wait too."""


class End(Enum):
    """Why the loop ended."""

    FINISHED = "finished"
    DRAINED = "drained"


@dataclass(frozen=True)
class Policy:
    """The job's options for the loop. `accumulates`: `gradient_accumulation_steps` is one of the steps' reasons."""

    sequential: bool = False
    rounds: bool = False
    steps_per_push: int = 1
    accumulates: bool = False
    on_nan: Literal["stop", "skip", "rollback"] = "stop"


class Loop:
    """The loop of one worker."""

    def __init__(
        self,
        flat_model: FlatModel,
        placement: Placement,
        exchange: Exchange,
        feed: Feed,
        coordinator: ControlPlane,
        leases: Leases,
        do_task: Callable[[TaskWork, npt.NDArray[np.float32]], None],
        drain: threading.Event,
        policy: Policy,
        *,
        watch: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.upstream = Upstream(flat_model, placement, exchange, coordinator, leases, drain, watch, clock)
        self._flat_model, self._placement = flat_model, placement
        self._coordinator, self._leases, self._drain, self._clock = coordinator, leases, drain, clock
        self._feed = feed
        self._do_task = do_task
        self._policy = policy
        self._watch = watch
        self._input_seconds = self._compute_seconds = 0.0
        self._computed_on: Any = None
        self._overlapped = False
        """Whether an earlier push was in flight while the pending steps were computed."""
        self._cadence = Cadence(rounds=policy.rounds, sequential=policy.sequential)
        self._left_out = 0
        """Batches in a row that were not finite."""
        self._deferred: Item | None = None
        """An item that waits for the end of an outage."""
        self._last_push = self._last_step = clock()
        self._compiled_rate = None if placement.on_server else rate_of(flat_model.model)
        self._followed_rate = self._compiled_rate
        self.steps = 0
        self.beside = Beside()

    # --- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> End:
        """Join, then work until the job has ended or `drain` is set."""
        self.upstream.join()
        self._last_push = self._clock()
        self._feed.start()
        while not self._drain.is_set():
            if isinstance(self._deferred, Finished) or self._coordinator.finished():
                self.leave()
                return End.FINISHED
            if self.upstream.outage is not None:
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
                self.upstream.collect()
                if isinstance(item, BaseException) and self.upstream.outage is None:
                    raise item
                self._deferred = item
        self._flush()  # what is computed and not pushed yet
        self.leave()
        return End.DRAINED

    def _idle(self) -> None:
        """Without work: push the pending steps, else probe the servers from time to time."""
        if self._accumulating():
            return
        base = self.upstream.pulled
        self.upstream.collect()
        if self.upstream.outage is not None:
            return
        if self.upstream.pending and base is not None:
            self._send(base)
        elif self._clock() - self.upstream.last_answer >= PROBE_SECONDS:
            self.upstream.probe()
            if self.upstream.outage is None:
                self.upstream.report_wasted()
            self._waited()
        elif not self._leases.held():  # else the data are slow, which is the step's time
            self._waited()

    def _accumulating(self) -> bool:
        """Whether the pending steps wait for a batch that is only slow: Keras makes one update, at any speed."""
        pending = self.upstream.pending
        ends = {step.ready.work.token: step.ready.batch.end for step in pending.steps}
        late = self._clock() - self._last_step >= LATE_SECONDS
        return bool(ends) and self._policy.accumulates and not late and self._leases.unread(ends)

    def _waited(self) -> None:
        """What passed since the last push belongs to no step."""
        now = self._clock()
        self.beside.waited(now - self._last_push)
        self._input_seconds, self._last_push = 0.0, now

    def _flush(self) -> None:
        """Push all steps and wait for the answers, before a task or the report of a file's length."""
        base = self.upstream.pulled
        self.upstream.collect()
        if self.upstream.outage is None and self.upstream.pending and base is not None:
            self._send(base, waits=True)
            self.upstream.collect()

    def _handle(self, item: TaskWork | EndOfFile) -> None:
        """Run a task or report the length of a file; during an outage, defer it."""
        if self.upstream.outage is not None:
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
        if (pulled := self.upstream.pull_exact(flat)) is None:
            self._deferred = task
            return
        self._flat_model.updates = self._placement.config.step_after(pulled.samples)
        self._do_task(task, flat)
        self._followed_rate = None  # its callbacks may have set that of the model
        self._feed.task_finished()

    # --- a step ---------------------------------------------------------------------------------------------------

    def _train(self, ready: Ready) -> None:
        if self.upstream.outdated:
            self.upstream.refresh(idle=False)
            if self.upstream.outage is not None:
                self._train_locally(ready)
                return
            if self._leases.token(ready.work.token) is None:
                return
        assert self.upstream.pulled is not None
        base = self.upstream.pulled
        started = self._clock()
        updates = self._placement.config.step_after(base.samples)
        if (step := self._step(self._parameters, ready, updates)) is None:
            return
        self._compute_seconds = (
            self._clock() - started + (self._compute_seconds if self.upstream.pending else 0.0)
        )
        with self._watch(ADDING):
            self.upstream.pending.add(step, ready)
        self._last_step = self._clock()
        self.steps += 1
        if not self.upstream.pending.full(self._policy.steps_per_push):
            return
        self.upstream.collect()
        if self.upstream.outage is not None:
            return
        self._send(base)
        if self._cadence.waits:
            self.upstream.collect()

    def _parameters(self) -> Any:
        """The parameters to compute on. Steps of one push share them."""
        if not self.upstream.pending:
            self._overlapped = self.upstream.in_flight is not None
            self._computed_on = self._flat_model.vector.on_devices(self.upstream.parameters())
        return self._computed_on

    def _local_parameters(self) -> Any:
        """Those of an outage."""
        return self._flat_model.vector.on_devices(self.upstream.local_parameters())

    def _step(self, placed: Callable[[], Any], ready: Ready, updates: int) -> Step | None:
        """Run one step on what `placed` gives, while the next batch goes to the accelerator; None if discarded."""
        if not self._placement.on_server:
            self._follow_rate()
        try:
            what = f"a training step on {ready.work.source}"
            with self._watch(what), reporting(self._coordinator, what, self._clock):
                parameters = placed()
                step = self._flat_model.step(parameters, ready.batch, updates, self._feed.upcoming())
        except UserError as error:
            if self._discarded(ready, error):
                return None
            raise UserError(f"{self._feed.place(ready.work)}: {error}") from error
        return self._check_finite(step, ready, parameters)

    def _send(self, base: Pulled, *, waits: bool = False) -> None:
        """Pass the pending steps to the exchange thread as one push. `waits`: its answer is waited for in any case."""
        pile = self.upstream.pending
        if not (marks := self.upstream.marks()):
            pile.clear()
            return
        with self._watch(ADDING):
            update, steps = pile.update(), len(pile)
        now = self._clock()
        self._cadence.pushes(now - self._last_push, self._compute_seconds + self._input_seconds, base)
        meta = PushMeta(
            pile.samples,
            steps,
            pile.loss,
            self.upstream.learning_rate(base.samples),
            timings=Timings(
                (now - self._last_push) / steps,
                self._compute_seconds / steps,
                base.pull_seconds / steps,
                base.push_seconds / steps,
                self._input_seconds / steps,
            ),
            progress=joined(marks),
            metrics=pile.metrics,
            length=length(update, self._flat_model.layout.trainable) if base.live_workers > 1 else math.nan,
            left_out=pile.left_out,
            skipped=pile.skipped,
        )
        ahead = self.upstream.anticipation.ahead(in_flight=not self._cadence.waits)
        push = Push(self.upstream.next_seq(), base.versions, meta, ahead)
        pile.clear()
        self._input_seconds, self._last_push = 0.0, now
        send = Send(update, push, overlapped=self._overlapped)
        in_round = self._cadence.in_round
        again = None if in_round else self._cadence.again(base, send.hurry)
        self.upstream.send(send, again, in_round=in_round, waits=waits or self._cadence.waits)

    def _follow_rate(self) -> None:
        """Give the optimizer on this worker the learning rate that a callback has set; else that of `compile()`."""
        told = self._coordinator.learning_rate()
        rate = self._compiled_rate if told is None else told
        if rate is not None and rate != self._followed_rate:
            set_rate(self._flat_model.model, rate)
            self._followed_rate = rate

    def _check_finite(self, step: Step, ready: Ready, parameters: Any) -> Step | None:
        """Apply `on_nan` to the step; None if it is discarded."""
        if step.finite:
            self._left_out = 0
            return step
        if self._policy.on_nan == "rollback":
            self.upstream.report_divergence(step, ready)
            return None
        self._left_out += 1
        if self._policy.on_nan == "skip" and self._left_out <= MAX_LEFT_OUT:
            log.warning("the loss is not finite: skipping the batch before position %d", ready.batch.end)
            return replace(step, update=self._flat_model.still(parameters), skipped=True, left_out=True)
        if self._discarded(ready, f"the loss is {step.loss}"):
            return None
        what = "gradient" if math.isfinite(step.loss) else "loss"
        often = f", as in the {MAX_LEFT_OUT} batches before" if self._left_out > MAX_LEFT_OUT else ""
        raise UserError(
            f"The {what} is not finite (loss {step.loss}) in epoch {ready.work.epoch + 1}{often}. Lower the "
            "learning rate, clip gradients (clipnorm=…), look for bad samples, or set Training(on_nan=…) to "
            '"skip" or "rollback".'
        )

    def _discarded(self, item: Ready | Failed, why: object) -> bool:
        """Discard what does not fail the job, as training has ended; during an outage, which hides that, defer it."""
        self.upstream.collect()
        if self.upstream.outage is None:
            self.upstream.probe()
        if not self._leases.revoked(item.work):
            if self.upstream.outage is None:
                return False
            self._deferred = item
        log.warning("%s: %s: %s", item.work.source, "deferred" if self._deferred else "discarded", why)
        self.upstream.wasted += isinstance(item, Ready)
        return True

    # --- an outage ------------------------------------------------------------------------------------------------

    def _outage_turn(self) -> None:
        """End the outage if the servers are reachable, else take a local step, else wait briefly."""
        assert self.upstream.outage is not None
        assert self.upstream.reconnect is not None
        if self.upstream.reconnect.done():
            generation = self.upstream.generation
            self.upstream.end_outage(self.upstream.reconnect.result())
            if self.upstream.outage is None:
                self._last_push = self._clock()
            if self.upstream.generation != generation and isinstance(self._deferred, EndOfFile):
                self._deferred = None  # of a lease from before the rollback
            return
        if self._deferred is not None or self.upstream.outage.exhausted:
            self.upstream.answers.wait(self.upstream.reconnect, turns=1)
            return
        item = self._next_item(timeout=0.05)
        if not isinstance(item, Ready):
            self._deferred = item
            return
        self._train_locally(item)

    def _train_locally(self, ready: Ready) -> None:
        assert self.upstream.pulled is not None
        updates = self._placement.config.step_after(self.upstream.pulled.samples)
        if (step := self._step(self._local_parameters, ready, updates)) is not None:
            with self._watch(ADDING):
                self.upstream.pending.add(step, ready)
            self.upstream.local_steps()
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
            self.upstream.probe()
            if self.upstream.outage is None:
                self._drain.wait(PROBE_SECONDS)
        else:
            self._leases.drop(token)

    def leave(self) -> None:
        """Wait for the push in flight, and release the leases."""
        self._feed.stop()
        self.upstream.leave()
