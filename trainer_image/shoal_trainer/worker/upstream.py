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
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal_trainer.errors import Unreachable
from shoal_trainer.ps import schedules
from shoal_trainer.ps.followed import Followed
from shoal_trainer.retry import Backoff
from shoal_trainer.wire.messages import Copy, Progress, Pulled, Welcome
from shoal_trainer.worker.answers import Answers
from shoal_trainer.worker.anticipation import Anticipation
from shoal_trainer.worker.buffers import Buffers
from shoal_trainer.worker.coordination import ControlPlane
from shoal_trainer.worker.exchange import Again, Exchange
from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.flat_model import FlatModel, Step
from shoal_trainer.worker.leases import Leases
from shoal_trainer.worker.optimizers import Placement
from shoal_trainer.worker.outage import MAX_STEPS, Outage
from shoal_trainer.worker.send import Pile, Send
from shoal_trainer.worker.work import JOINED, About, DataWork, Token, Wasted

log = logging.getLogger(__name__)

ADDING = "adding up the steps of a push"
PROBE_SECONDS = 1.0
"""An idle worker probes the servers this often, to detect a lost server."""


class Upstream:
    """A worker's exchange with the servers: parameters, the push in flight, unsent pushes, outages and rollbacks.

    It knows nothing of the loop, which reads `pulled` (None before the join) and `outage` (None while the servers are
    reachable), and adds steps to `pending`.
    """

    def __init__(
        self,
        flat_model: FlatModel,
        placement: Placement,
        exchange: Exchange,
        coordinator: ControlPlane,
        leases: Leases,
        drain: threading.Event,
        watch: Callable[[str], AbstractContextManager[None]],
        clock: Callable[[], float],
    ) -> None:
        self._flat_model, self._placement = flat_model, placement
        self._exchange, self._coordinator = exchange, coordinator
        self.answers = Answers(exchange, drain, clock)
        self._leases = leases
        self._drain = drain
        self._watch, self._clock = watch, clock
        self._buffers = Buffers(flat_model.layout, flat_model.vector)
        self.anticipation = Anticipation(
            placement.config, flat_model.layout.trainable, flat_model.inclusion()
        )
        self.pulled: Pulled | None = None
        self._followed: tuple[Followed, ...] = ()
        self.wasted = self._acknowledged = 0
        self.generation = 0
        self._boots: tuple[tuple[int, int], ...] = ()
        self._seq = 0
        self.in_flight: tuple[Future[Pulled], Send] | None = None
        self._expected: Any = None
        """The parameters with what the push in flight will do to them, if they are made already."""
        self._early = False
        """Whether the last answer had come before it was waited for."""
        self._copy: Future[Any] | None = None
        """Of the answer's parameters, on its way to an accelerator."""
        self._unsent: list[Send] = []
        self.outage: Outage | None = None
        self.reconnect: Future[Welcome] | None = None
        self.last_answer = clock()
        self.pending = Pile(flat_model.mean())
        """Steps that are not pushed yet."""
        self.outdated = False
        """Whether to pull newer parameters before the next step."""
        self._probed: tuple[int, ...] = ()
        """The shards' versions at the last probe."""

    # --- pushes ---------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Connect with the first parameters, which a new job needs, join the coordinator, and pull.

        The heartbeats have joined before the model was traced; this join reaches a coordinator that was replaced since.
        If parameter server 0 is replaced after this join, the pull fails.
        """
        backoff, started = Backoff(longest=PROBE_SECONDS), self._clock()
        first = Copy(self._flat_model.initial)
        while not self._drain.is_set():
            try:
                welcome = self.answers.wait(self._exchange.connect(first))
                if welcome is None:
                    return
                self._join_coordinator({})
                greeted = self._clock()
                pulled = self._pull()
            except Unreachable as error:
                if backoff.is_new(error):
                    log.info("joining: %s", error)
                backoff.wait(self._drain)
                continue
            self._use(pulled)
            self._boots, self.generation = welcome.boots, welcome.generation
            self._leases.reset(welcome.generation)
            self._seq = max(shard.last_seq for shard in welcome.shards)
            now = self._clock()
            log.info("%s: hello %.3f s, pull %.3f s", JOINED, greeted - started, now - greeted)
            return

    def parameters(self) -> Any:
        """The current parameters, a tensor, with what the push in flight will do to them."""
        if self.in_flight is None:
            return self._buffers.copy
        if self._expected is None:
            self._expected = self._anticipate(self.in_flight[1])
        return self._expected

    def _anticipate(self, send: Send) -> Any:
        assert self.pulled is not None
        return self.anticipation.include(self._buffers.copy, send, self.pulled)

    def local_parameters(self) -> Any:
        """Those of an outage, a tensor."""
        assert self.outage is not None
        self.outage.parameters_into(self._buffers.spare)
        return self._buffers.spare_tensor

    def send(self, send: Send, again: Again | None, *, in_round: bool, waits: bool) -> None:
        """Pass a push to the exchange thread; `again`: see `Exchange`. `waits`: nothing is computed meanwhile.

        If exchanges are faster than steps, the next step's parameters are made before: both take turns at the memory.
        """
        self._expected = self._anticipate(send) if self._early and not waits else None
        out = self._buffers.spare
        if in_round:
            future = self._exchange.submit(lambda client: client.push_round(send.update, out, send.push))
        else:
            future = self._exchange.push_pull(send.update, out, send.push, again=again)
        self.in_flight = (future, send)
        self._copy = self._flat_model.vector.upload_when(future, self._buffers.spare_tensor)

    def learning_rate(self, samples: int) -> float | None:
        """That of a push after so many samples, if the servers do not know it: of a callback, or of a schedule here."""
        if self._placement.on_server and (rate := self._coordinator.learning_rate()) is not None:
            return rate
        return None if self._placement.rate is None else self._placement.rate(samples)

    def next_seq(self) -> int:
        """The sequence number of the next push."""
        self._seq += 1
        return self._seq

    def collect(self) -> None:
        """Wait for the push in flight and use its parameters; if a server is unreachable, begin an outage."""
        if self.in_flight is None:
            return
        (future, send), self.in_flight = self.in_flight, None
        early, self._early = future.done(), False
        send.hurry.set()
        try:
            pulled = self.answers.of(future)
        except Unreachable as error:
            self._begin_outage(error, send)
        else:
            self._early = early
            self._follow(pulled)
            self.anticipation.answered(pulled, send.push.base_versions[0], overlapped=send.overlapped)
            with self._watch("copying parameters to the accelerator"):
                self._buffers.swap(None if self._copy is None else self._copy.result())
            self._leases.answered(send.push)
            self._flat_model.vector.reuse(send.update)
        self.last_answer = self._clock()

    def pull_exact(self, flat: npt.NDArray[np.float32]) -> Pulled | None:
        """Get the parameters of an evaluation or export; None if an outage begins instead."""
        try:
            pulled = self.answers.ask(lambda client: client.pull(flat, idle=True, exact=True))
        except Unreachable as error:
            self._begin_outage(error, None)
            return None
        self.outdated = True
        return pulled

    def leave(self) -> None:
        """Wait for the push in flight, and release the leases."""
        if self.in_flight is not None:
            self._exchange.end()
            self.in_flight[1].hurry.set()
            try:
                self.answers.last(self.in_flight[0])
            except Unreachable as error:
                log.warning("the last push was not answered: %s", error)
                self.wasted += self.in_flight[1].push.meta.steps
        self._exchange.close()  # before the leases are released: a push must not arrive after that
        self._discard_unsent()
        try:
            self._coordinator.leave(Wasted(self.wasted, self._acknowledged), self.answers.left())
        except Unreachable as error:
            log.warning("cannot report that this worker leaves: %s", error)

    # --- while idle -----------------------------------------------------------------------------------------------

    def probe(self) -> None:
        """Detect a lost server; once the other workers pause, pull the newest parameters.

        The copies of idle workers are needed if the servers are lost during an evaluation.
        """
        self.last_answer = self._clock()
        try:
            welcome = self.answers.ask(lambda client: client.probe())
        except Unreachable as error:
            self._begin_outage(error, None)
            return
        assert self.pulled is not None
        self._leases.void(welcome.shards[0].stopped)
        versions = tuple(shard.version for shard in welcome.shards)
        paused, self._probed = versions == self._probed, versions
        if paused and versions != self.pulled.versions:
            self.refresh(idle=True)
        # Without a pull, the next step would have no permit (bounded staleness).
        self.outdated = True

    def refresh(self, *, idle: bool) -> None:
        """Pull the current parameters; no exchange may be in flight. `idle`: no step follows at once."""
        try:
            ahead = 0.0 if idle else self.anticipation.ahead(in_flight=False)
            # The servers are those of the last pull: after an outage they would be asked for everything.
            known = () if self.pulled is None else self.pulled.versions
            pulled = self._pull(idle=idle, ahead=ahead, known=known)
        except Unreachable as error:
            self._begin_outage(error, None)
        else:
            self._buffers.swap()
            self._follow(pulled)
            self.outdated = False
        self.last_answer = self._clock()

    # --- an outage ------------------------------------------------------------------------------------------------

    def _begin_outage(self, error: Unreachable, send: Send | None) -> None:
        """Start local training. `send`: the interrupted push."""
        message = f"a parameter server is unreachable ({error})"
        log.warning("%s: training continues locally", message)
        self._coordinator.set_message(message, About.OUTAGE)
        assert self.pulled is not None
        self.outage = self._local_training()
        if send is not None:
            self.outage.absorb(send)
            self._unsent.append(send)
        if self.pending:
            self.local_steps()
        self.reconnect = self._reconnect_with_copy()

    def _local_training(self, *, max_steps: int = MAX_STEPS) -> Outage:
        """Local training from the current parameters, at the learning rate of a push now."""
        assert self.pulled is not None
        config, samples = self._placement.config, self.pulled.samples
        if (rate := self.learning_rate(samples)) is None:
            rate = schedules.learning_rate(config.learning_rate, config.step_after(samples))
        size = self._flat_model.layout.trainable
        averages = self._flat_model.averages
        return Outage(
            self._buffers.current, config, size, rate, self._clock, averages=averages, max_steps=max_steps
        )

    def _use(self, pulled: Pulled) -> None:
        """Make pulled parameters current, with the complete history of each shard that came with them."""
        self._buffers.swap()
        self.outdated = False
        self._followed = tuple(map(Followed, pulled.answers))
        self._follow(pulled)

    def _follow(self, pulled: Pulled) -> None:
        """Take over an answer that has of each shard's history what this worker lacks."""
        for followed, answer in zip(self._followed, pulled.answers, strict=True):
            followed.follow(answer)
        self.pulled = pulled
        self._leases.void(pulled.stopped)

    def _reconnect_with_copy(self) -> Future[Welcome]:
        """Connect, and offer the current parameters to shards that have lost them."""
        assert self.pulled is not None
        known = zip(self._followed, self.pulled.answers, strict=True)
        answers = tuple(followed.complete(answer) for followed, answer in known)
        current = self._buffers.current
        copy = Copy(lambda: current, replace(self.pulled, answers=answers), self.generation)
        return self._exchange.connect(copy)

    def local_steps(self) -> None:
        """Apply the pending steps to the local parameters, as one push."""
        assert self.outage is not None
        pile = self.pending
        if marks := self.marks():
            with self._watch(ADDING):
                update = pile.update()
            self.outage.step(update, pile.samples, marks, gradient=not pile.skipped, left_out=pile.left_out)
        pile.clear()

    def marks(self) -> list[Progress]:
        """The marks of the pending steps, without those of reassigned leases, whose samples another worker pushes.

        A coordinator takes all leases or none while steps are pending, so none has to be taken out of their sum.
        """
        steps = self.pending.steps
        marks = [self._leases.mark(step.ready.work.token, step.ready.batch.end) for step in steps]
        self.wasted += marks.count(None)
        return [mark for mark in marks if mark is not None]

    def end_outage(self, welcome: Welcome) -> None:
        """Push what the servers lack, and continue with their parameters; after a rollback, only the latter."""
        assert self.outage is not None
        assert self.pulled is not None
        outage, lost = self.outage, welcome.boots != self._boots
        try:
            if welcome.generation != self.generation:
                pulled = self._roll_back(welcome)
            else:
                pulled = self._catch_up(outage, welcome)
        except Unreachable:
            self.reconnect = self._reconnect_with_copy()
            return
        self._use(pulled)
        self._boots = welcome.boots
        self.outage = self.reconnect = None
        self._coordinator.set_message("", About.OUTAGE)
        self.last_answer = self._clock()
        log.warning("the parameter servers are reachable again%s", " after a restart" if lost else "")

    def _catch_up(self, outage: Outage, welcome: Welcome) -> Pulled:
        """Push what the servers lack, and pull their parameters."""
        assert self.pulled is not None
        if welcome.boots[0] != self._boots[0]:
            self._rejoin(welcome.shards[0].last_seq)
        if stopped := welcome.shards[0].stopped:
            self._discard_steps()
            # Otherwise a successor that does not know of the stop would renew the lease without the dropped steps.
            self._leases.void(stopped)
        elif outage.steps:
            self._seq += 1
            self._unsent.append(outage.as_send(self._seq, self.pulled.versions))
        live = max(self.pulled.live_workers, welcome.shards[0].live_workers)
        while self._unsent:
            answer = self._resend(self._unsent[0], live)
            self._leases.answered(self._unsent.pop(0).push)
            if answer.stopped:  # no push may follow
                self.wasted += sum(send.push.meta.steps for send in self._unsent)
                self._unsent.clear()
                self._leases.void(answer.stopped)
        # A pull returns the complete journal; the worker's own may contain lost pushes.
        return self._pull()

    def _resend(self, send: Send, live: int) -> Pulled:
        out, push = self._buffers.spare, send.push
        if send.local:
            push = replace(push, meta=push.meta._replace(scale=1.0 / live))
            return self.answers.ask(lambda client: client.push_delta(send.update, out, push))
        return self.answers.ask(lambda client: client.push_pull(send.update, out, push))

    def _rejoin(self, surviving: int) -> None:
        """Present the leases after the loss of shard 0 and its ledger; they may get new tokens."""
        self.wasted += self._leases.lost(surviving)
        leases, known = self._leases.held(), 0 if self.pulled is None else self.pulled.samples
        self._leases.rename(leases.keys(), self._join_coordinator(leases, known))

    def _join_coordinator(
        self, leases: Mapping[Token, DataWork], known_samples: int = 0
    ) -> Mapping[Token, Token]:
        renamed = self._coordinator.join(leases, Wasted(self.wasted, self._acknowledged, known_samples))
        self._acknowledged = self.wasted
        return renamed

    def report_wasted(self) -> None:
        """Report wasted steps that no join has reported."""
        if self.wasted > self._acknowledged:
            with contextlib.suppress(Unreachable):
                self._join_coordinator({})

    # --- rollback -------------------------------------------------------------------------------------------------

    def report_divergence(self, step: Step, ready: Ready) -> None:
        """Make the whole job roll back to its newest snapshot, and reconnect."""
        for pending in self.pending.steps:
            self._leases.mark(pending.ready.work.token, pending.ready.batch.end)
        batch = self._leases.mark(ready.work.token, ready.batch.end)
        self.wasted += 1
        if batch is None:  # reassigned: the other worker will report it
            return
        if self.in_flight is not None:
            (future, send), self.in_flight = self.in_flight, None
            send.hurry.set()
            try:
                self.answers.of(future)
            except Unreachable:
                self._unsent.append(send)
        backoff = Backoff(longest=PROBE_SECONDS)
        while not self._drain.is_set():
            try:
                self._coordinator.diverged(self.generation, batch, f"loss {step.loss}")
                break
            except Unreachable as error:
                if backoff.is_new(error):
                    log.warning("cannot request a rollback yet: %s", error)
                backoff.wait(self._drain)
        # The marked positions are not pushed, so no lease may continue. The coordinator has released them.
        self._leases.reset(self.generation)
        self._discard_steps()
        if self.outage is None:
            self.outage = self._local_training(max_steps=0)
            self.reconnect = self._reconnect_with_copy()

    def _discard_unsent(self, undone: int = 0) -> None:
        """Discard all steps without an answer, and count them as wasted, but for those that a rollback has `undone`."""
        self._discard_steps()
        self.wasted += sum(send.push.meta.steps for send in self._unsent if send.push.seq > undone)
        self._unsent.clear()

    def _discard_steps(self) -> None:
        """Discard the steps of no push, and count them as wasted."""
        self.wasted += len(self.pending)
        self.pending.clear()
        if self.outage is not None:
            self.wasted += self.outage.steps
            self.outage.rebase()

    def _roll_back(self, welcome: Welcome) -> Pulled:
        """Discard steps and leases from before the rollback, and pull the snapshot's parameters."""
        self._discard_unsent(welcome.shards[0].last_seq)
        self._join_coordinator({})
        pulled = self._pull()
        self._seq = max(self._seq, *(shard.last_seq for shard in welcome.shards))
        self._leases.reset(welcome.generation)
        self.generation = welcome.generation
        return pulled

    # --- helpers --------------------------------------------------------------------------------------------------

    def _pull(self, *, idle: bool = False, ahead: float = 0.0, known: tuple[int, ...] = ()) -> Pulled:
        """Pull the parameters into the spare buffer."""
        out = self._buffers.spare
        return self.answers.ask(lambda client: client.pull(out, idle=idle, ahead=ahead, known=known))
