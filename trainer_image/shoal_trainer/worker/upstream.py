"""The worker's state towards the parameter servers, and its recovery after an outage or a rollback.

After an outage the worker pushes, in order, what the servers lack. After a rollback (another generation) it discards
its unsent steps and its leases, because they are newer than the snapshot.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any

from shoal_trainer.errors import Unreachable
from shoal_trainer.ps import kernels, schedules
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.journal import PushJournal
from shoal_trainer.retry import Backoff
from shoal_trainer.wire.messages import Copy, Progress, Pulled, Welcome
from shoal_trainer.worker.anticipation import Anticipation
from shoal_trainer.worker.buffers import Buffers
from shoal_trainer.worker.exchange import Exchange
from shoal_trainer.worker.feed import EndOfFile, Item, Ready
from shoal_trainer.worker.flat_model import FlatModel, Step
from shoal_trainer.worker.leases import Leases
from shoal_trainer.worker.optimizers import Placement
from shoal_trainer.worker.outage import MAX_STEPS, Outage
from shoal_trainer.worker.send import Pile, Send
from shoal_trainer.worker.work import About, Coordinator, DataWork, Token, Wasted

log = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
"""An idle worker probes the servers this often, to detect a lost server."""


class Upstream:
    """The loop's exchange with the servers: parameters, the push in flight, unsent pushes, outages and rollbacks."""

    def __init__(
        self,
        flat_model: FlatModel,
        placement: Placement,
        exchange: Exchange,
        coordinator: Coordinator,
        leases: Leases,
        drain: threading.Event,
        clock: Callable[[], float],
    ) -> None:
        self._flat_model, self._placement = flat_model, placement
        self._exchange, self._coordinator = exchange, coordinator
        self._leases = leases
        self._drain = drain
        self._clock = clock
        self._buffers = Buffers(flat_model.layout.size, flat_model.dtype, flat_model.alias, flat_model.upload)
        self._anticipation = Anticipation(
            placement.config, flat_model.layout.trainable, flat_model.inclusion()
        )
        self._pulled: Pulled | None = None
        self._journals: tuple[PushJournal, ...] = ()
        self._wasted = self._acknowledged = 0
        self._generation = 0
        self._boots: tuple[tuple[int, int], ...] = ()
        self._seq = 0
        self._in_flight: tuple[Future[Pulled], Send] | None = None
        self._copy: Future[Any] | None = None
        """Of the answer's parameters, on its way to an accelerator."""
        self._unsent: list[Send] = []
        self._outage: Outage | None = None
        self._reconnect: Future[Welcome] | None = None
        self._deferred: Item | None = None
        """An item that waits for the end of an outage."""
        self._last_push = self._last_answer = clock()
        self._pending = Pile(flat_model.mean())
        """Steps that are not pushed yet."""
        self._outdated = False
        """Whether to pull newer parameters before the next step."""
        self._probed: tuple[int, ...] = ()
        """The shards' versions at the last probe."""

    # --- while idle -----------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Detect a lost server; once the other workers pause, pull the newest parameters.

        The copies of idle workers are needed if the servers are lost during an evaluation.
        """
        self._last_answer = self._clock()
        try:
            welcome = self._exchange.probe().result()
        except Unreachable as error:
            self._begin_outage(error, None)
            return
        assert self._pulled is not None
        self._leases.void(welcome.shards[0].stopped)
        versions = tuple(shard.version for shard in welcome.shards)
        paused, self._probed = versions == self._probed, versions
        if paused and versions != self._pulled.versions:
            self._refresh(idle=True)
        # Without a pull, the next step would have no permit (bounded staleness).
        self._outdated = True

    def _refresh(self, *, idle: bool) -> None:
        """Pull the current parameters; no exchange may be in flight. `idle`: no step follows at once."""
        try:
            ahead = 0.0 if idle else self._anticipation.ahead(in_flight=False)
            pulled = self._exchange.pull(self._buffers.spare, idle=idle, ahead=ahead).result()
        except Unreachable as error:
            self._begin_outage(error, None)
        else:
            self._use(pulled)
        self._last_answer = self._clock()

    # --- an outage ------------------------------------------------------------------------------------------------

    def _begin_outage(self, error: Unreachable, send: Send | None) -> None:
        """Start local training. `send`: the interrupted push."""
        message = f"a parameter server is unreachable ({error})"
        log.warning("%s: training continues locally", message)
        self._coordinator.set_message(message, About.OUTAGE)
        assert self._pulled is not None
        self._outage = self._local_training(None if send is None else send.push.learning_rate)
        if send is not None:
            self._outage.absorb(send)
            self._unsent.append(send)
        if self._pending:
            self._local_steps()
        self._reconnect = self._reconnect_with_copy()

    def _local_training(self, rate: float | None, *, max_steps: int = MAX_STEPS) -> Outage:
        """Local training from the current parameters."""
        assert self._pulled is not None
        config = self._placement.config
        if rate is None:
            rate = schedules.learning_rate(config.learning_rate, config.step_after(self._pulled.samples))
        size = self._flat_model.layout.trainable
        averages = self._flat_model.averages
        return Outage(
            self._buffers.current, config, size, rate, self._clock, averages=averages, max_steps=max_steps
        )

    def _use(self, pulled: Pulled) -> None:
        """Make pulled parameters current, with the complete journal of each shard that came with them."""
        self._buffers.swap()
        self._pulled, self._outdated = pulled, False
        self._leases.void(pulled.stopped)
        self._journals = tuple(PushJournal(journal.floor) for journal in pulled.journals)
        for journal, received in zip(self._journals, pulled.journals, strict=True):
            journal.follow(received)

    def _reconnect_with_copy(self) -> Future[Welcome]:
        """Connect, and offer the current parameters to shards that have lost them."""
        assert self._pulled is not None
        journals = tuple(journal.since(-1) for journal in self._journals)
        copy = Copy(self._buffers.current, replace(self._pulled, journals=journals), self._generation)
        return self._exchange.connect(lambda: copy)

    def _local_steps(self) -> None:
        """Apply the pending steps to the local parameters, as one push."""
        assert self._outage is not None
        pile = self._pending
        if marks := self._marks():
            self._outage.step(
                pile.update(), pile.samples, marks, gradient=not pile.skipped, left_out=pile.left_out
            )
        pile.clear()

    def _marks(self) -> list[Progress]:
        """The marks of the pending steps, without those of reassigned leases, whose samples another worker pushes.

        A coordinator takes all leases or none while steps are pending, so none has to be taken out of their sum.
        """
        steps = self._pending.steps
        marks = [self._leases.mark(step.ready.work.token, step.ready.batch.end) for step in steps]
        self._wasted += marks.count(None)
        return [mark for mark in marks if mark is not None]

    def _end_outage(self, welcome: Welcome) -> None:
        """Push what the servers lack, and continue with their parameters; after a rollback, only the latter."""
        assert self._outage is not None
        assert self._pulled is not None
        outage, lost = self._outage, welcome.boots != self._boots
        try:
            if welcome.generation != self._generation:
                pulled = self._roll_back(welcome)
            else:
                pulled = self._catch_up(outage, welcome)
        except Unreachable:
            self._reconnect = self._reconnect_with_copy()
            return
        self._use(pulled)
        self._boots = welcome.boots
        self._outage = self._reconnect = None
        self._coordinator.set_message("", About.OUTAGE)
        self._last_push = self._last_answer = self._clock()
        log.warning("the parameter servers are reachable again%s", " after a restart" if lost else "")

    def _catch_up(self, outage: Outage, welcome: Welcome) -> Pulled:
        """Push what the servers lack, and pull their parameters."""
        assert self._pulled is not None
        if not welcome.initialized:  # only the workers' copies of the parameters are left
            first = aligned(self._buffers.current.size)
            kernels.decode(self._buffers.current, first)
            self._exchange.initialize(first, self._pulled.samples).result()
        if welcome.boots[0] != self._boots[0]:
            self._rejoin(welcome.shards[0].last_seq)
        if stopped := welcome.shards[0].stopped:
            self._wasted += outage.steps
            outage.rebase()
            # Otherwise a successor that does not know of the stop would renew the lease without the dropped steps.
            self._leases.void(stopped)
        elif outage.steps:
            self._seq += 1
            self._unsent.append(outage.as_send(self._seq, self._pulled.versions))
        live = max(self._pulled.live_workers, welcome.shards[0].live_workers)
        while self._unsent:
            answer = self._resend(self._unsent[0], live)
            self._leases.answered(self._unsent.pop(0).push)
            if answer.stopped:  # no push may follow
                self._wasted += sum(send.push.steps for send in self._unsent)
                self._unsent.clear()
                self._leases.void(answer.stopped)
        # A pull returns the complete journal; the worker's own may contain lost pushes.
        return self._exchange.pull(self._buffers.spare).result()

    def _resend(self, send: Send, live: int) -> Pulled:
        out, push = self._buffers.spare, send.push
        if send.local:
            return self._exchange.push_delta(send.update, out, push, scale=1.0 / live).result()
        return self._exchange.push_pull(send.update, out, push).result()

    def _rejoin(self, surviving: int) -> None:
        """Present the leases after the loss of shard 0 and its ledger; they may get new tokens."""
        self._wasted += self._leases.lost(surviving)
        leases, known = self._leases.held(), 0 if self._pulled is None else self._pulled.samples
        self._leases.rename(leases.keys(), self._join_coordinator(leases, known))

    def _join_coordinator(
        self, leases: Mapping[Token, DataWork], known_samples: int = 0
    ) -> Mapping[Token, Token]:
        renamed = self._coordinator.join(leases, Wasted(self._wasted, self._acknowledged, known_samples))
        self._acknowledged = self._wasted
        return renamed

    def _report_wasted(self) -> None:
        """Report wasted steps that no join has reported."""
        if self._wasted > self._acknowledged:
            with contextlib.suppress(Unreachable):
                self._join_coordinator({})

    # --- rollback -------------------------------------------------------------------------------------------------

    def _report_divergence(self, step: Step, ready: Ready) -> None:
        """Make the whole job roll back to its newest snapshot, and reconnect."""
        for pending in self._pending.steps:
            self._leases.mark(pending.ready.work.token, pending.ready.batch.end)
        batch = self._leases.mark(ready.work.token, ready.batch.end)
        self._wasted += 1
        if batch is None:  # reassigned: the other worker will report it
            return
        if self._in_flight is not None:
            (future, send), self._in_flight = self._in_flight, None
            send.hurry.set()
            try:
                future.result()
            except Unreachable:
                self._wasted += send.push.steps
        backoff = Backoff(longest=PROBE_SECONDS)
        while not self._drain.is_set():
            try:
                self._coordinator.diverged(self._generation, batch, f"loss {step.loss}")
                break
            except Unreachable as error:
                if backoff.is_new(error):
                    log.warning("cannot request a rollback yet: %s", error)
                backoff.wait(self._drain)
        # The marked positions are not pushed, so no lease may continue. The coordinator has released them.
        self._leases.reset(self._generation)
        self._discard_unsent()
        if self._outage is None:
            self._outage = self._local_training(None, max_steps=0)
            self._reconnect = self._exchange.connect(lambda: None)

    def _discard_unsent(self) -> None:
        """Discard all steps without an answer, and count them as wasted."""
        local = 0 if self._outage is None else self._outage.steps
        self._wasted += local + len(self._pending) + sum(send.push.steps for send in self._unsent)
        self._pending.clear()
        self._unsent.clear()
        if self._outage is not None:
            self._outage.rebase()

    def _roll_back(self, welcome: Welcome) -> Pulled:
        """Discard steps and leases from before the rollback, and pull the snapshot's parameters."""
        self._discard_unsent()
        if isinstance(self._deferred, EndOfFile):
            self._deferred = None
        self._join_coordinator({})
        pulled = self._exchange.pull(self._buffers.spare).result()
        self._seq = max(self._seq, *(shard.last_seq for shard in welcome.shards))
        self._leases.reset(welcome.generation)
        self._generation = welcome.generation
        return pulled

    # --- helpers --------------------------------------------------------------------------------------------------

    def _wait(self, future: Future[Welcome], turns: int | None = None) -> Welcome | None:
        """The future's result; None if `drain` is set, or after this many turns of 0.1 s."""
        while not self._drain.is_set() and turns != 0:
            try:
                return future.result(timeout=0.1)
            except FutureTimeout:
                turns = None if turns is None else turns - 1
        return None
