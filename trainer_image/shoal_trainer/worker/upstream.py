"""What a worker owes to the parameter servers, and how it stands with them after an outage or a roll back.

After an outage it brings what they have missed, in order. After a roll back (another generation) it brings nothing:
what it computed, and every lease that it held, came after the snapshot to which the whole job has gone back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace

from shoal_trainer.errors import Unreachable
from shoal_trainer.ps import kernels, schedules
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.ps.journal import PushJournal
from shoal_trainer.wire.messages import Copy, Pulled, Welcome
from shoal_trainer.worker.buffers import Buffers
from shoal_trainer.worker.exchange import Exchange
from shoal_trainer.worker.feed import EndOfFile, Item, Ready
from shoal_trainer.worker.flat_model import FlatModel, Step
from shoal_trainer.worker.leases import Leases
from shoal_trainer.worker.optimizers import Placement
from shoal_trainer.worker.outage import MAX_STEPS, Outage
from shoal_trainer.worker.send import Send
from shoal_trainer.worker.work import Coordinator, DataWork, Token, Wasted

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.25
PROBE_SECONDS = 1.0
"""An idle worker asks the servers for their state this often: it would not notice a lost server otherwise."""


class Upstream:
    """The servers' side of the loop: the parameters, what is under way, what is not sent, and what to do about it."""

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
        self._buffers = Buffers(flat_model.layout.size, flat_model.dtype, flat_model.alias)
        self._pulled: Pulled | None = None
        self._journals: tuple[PushJournal, ...] = ()
        self._wasted = self._told = 0
        self._generation = 0
        self._boots: tuple[tuple[int, int], ...] = ()
        self._seq = 0
        self._under_way: tuple[Future[Pulled], Send] | None = None
        self._unsent: list[Send] = []
        self._outage: Outage | None = None
        self._reconnect: Future[Welcome] | None = None
        self._held: Item | None = None
        self._last_push = self._heard = clock()
        self._pile: list[tuple[Step, Ready]] = []
        self._outdated = False
        """Whether newer parameters are to be pulled before the next step."""
        self._probed: tuple[int, ...] = ()
        """The shards' versions at the last probe."""

    # --- while idle -----------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Notice a lost server; once the other workers pause, pull the newest parameters.

        If the servers are lost during an evaluation, the copies of the idle workers are all that is left.
        """
        self._heard = self._clock()
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
        self._outdated = (
            True  # an idle worker has no permit (bounded staleness): its next step begins with a pull
        )

    def _refresh(self, *, idle: bool) -> None:
        """Take the present parameters; no exchange is in flight. `idle`: no step follows at once."""
        try:
            pulled = self._exchange.pull(self._buffers.spare, idle=idle).result()
        except Unreachable as error:
            self._begin_outage(error, None)
        else:
            self._begin_from(pulled)
        self._heard = self._clock()

    # --- an outage ------------------------------------------------------------------------------------------------

    def _begin_outage(self, error: Unreachable, send: Send | None) -> None:
        """`send`: what was under way."""
        log.warning("a parameter server is away (%s): training on locally", error)
        assert self._pulled is not None
        self._outage = self._alone(None if send is None else send.push.learning_rate)
        if send is not None:
            self._outage.absorb(send.update, send.push.samples, gradient=not send.local)
            self._unsent.append(send)
        for step, ready in self._pile:
            self._step_alone(step, ready)
        self._pile.clear()
        self._reconnect = self._offer()

    def _alone(self, rate: float | None, *, max_steps: int = MAX_STEPS) -> Outage:
        """What is needed to train on from the present parameters."""
        assert self._pulled is not None
        config = self._placement.config
        if rate is None:
            rate = schedules.learning_rate(config.learning_rate, config.step_after(self._pulled.samples))
        size = self._flat_model.layout.trainable
        return Outage(self._buffers.current, config, size, rate, self._clock, max_steps=max_steps)

    def _begin_from(self, pulled: Pulled) -> None:
        """What was pulled just now, and with it the whole journal of each shard, is current."""
        self._buffers.swap()
        self._pulled, self._outdated = pulled, False
        self._leases.void(pulled.stopped)
        self._journals = tuple(PushJournal(journal.floor) for journal in pulled.journals)
        for journal, told in zip(self._journals, pulled.journals, strict=True):
            journal.follow(told)

    def _offer(self) -> Future[Welcome]:
        """Say hello, with the present parameters for a shard that has lost them."""
        assert self._pulled is not None
        journals = tuple(journal.since(-1) for journal in self._journals)
        copy = Copy(self._buffers.current, replace(self._pulled, journals=journals), self._generation)
        return self._exchange.connect(lambda: copy)

    def _step_alone(self, step: Step, ready: Ready) -> None:
        assert self._outage is not None
        mark = self._leases.mark(ready.work.token, ready.batch.end)
        if mark is not None:
            self._outage.step(step.update, ready.batch.samples, mark, gradient=not step.skipped)

    def _come_back(self, welcome: Welcome) -> None:
        """Bring the servers what they have missed, in order, and go on with their parameters."""
        assert self._outage is not None
        assert self._pulled is not None
        outage, lost = self._outage, welcome.boots != self._boots
        try:
            if welcome.generation != self._generation:
                pulled = self._begin_again(welcome)
            else:
                pulled = self._catch_up(outage, welcome)
        except Unreachable:
            self._reconnect = self._offer()
            return
        self._begin_from(pulled)
        self._boots = welcome.boots
        self._outage = self._reconnect = None
        self._last_push = self._heard = self._clock()
        log.warning("the parameter servers are back%s", ", restored" if lost else "")

    def _catch_up(self, outage: Outage, welcome: Welcome) -> Pulled:
        """Bring the servers what they have missed, and take their parameters."""
        assert self._pulled is not None
        if not welcome.initialized:  # nothing is left of the parameters but the workers' copies
            first = aligned(self._buffers.current.size)
            kernels.decode(self._buffers.current, first)
            self._exchange.initialize(first).result()
        if welcome.boots[0] != self._boots[0]:
            self._rejoin(welcome.shards[0].last_seq)
        if stopped := welcome.shards[0].stopped:
            self._wasted += outage.steps
            outage.taken()
            # Else a successor that knows of no stop would grant the lease again, without the dropped steps.
            self._leases.void(stopped)
        elif outage.steps:
            self._seq += 1
            self._unsent.append(outage.as_send(self._seq, self._pulled.versions))
        live = max(self._pulled.live_workers, welcome.shards[0].live_workers)
        while self._unsent:
            self._resend(self._unsent[0], live)
            self._leases.answered(self._unsent.pop(0).push)
        # Only what is pulled comes with the whole journal: the one of before may tell of pushes that are lost.
        return self._exchange.pull(self._buffers.spare).result()

    def _resend(self, send: Send, live: int) -> None:
        if send.local:
            self._exchange.push_delta(
                send.update, self._buffers.spare, send.push, scale=1.0 / live, merge=False
            ).result()
        else:
            self._exchange.push_pull(send.update, self._buffers.spare, send.push).result()

    def _rejoin(self, surviving: int) -> None:
        """Shard 0 was lost, and the ledger with it: present the leases; they may have other tokens now."""
        self._wasted += self._leases.lost(surviving)
        held = self._leases.held()
        self._leases.rename(held.keys(), self._join_coordinator(held))

    def _join_coordinator(self, held: Mapping[Token, DataWork]) -> Mapping[Token, Token]:
        renamed = self._coordinator.join(held, Wasted(self._wasted, self._told))
        self._told = self._wasted
        return renamed

    # --- going back -----------------------------------------------------------------------------------------------

    def _go_back(self, step: Step, ready: Ready) -> None:
        """Have the whole job return to its newest snapshot, and this worker with it."""
        for _, piled in self._pile:
            self._leases.mark(piled.work.token, piled.batch.end)
        batch = self._leases.mark(ready.work.token, ready.batch.end)
        self._wasted += 1
        if batch is None:  # somebody else's by now, and that worker will meet it
            return
        if self._under_way is not None:
            (future, send), self._under_way = self._under_way, None
            try:
                future.result()
            except Unreachable:
                self._wasted += send.push.steps
        while not self._drain.is_set():
            try:
                self._coordinator.diverged(self._generation, batch, f"loss {step.loss}")
            except Unreachable as error:
                log.warning("cannot have the job rolled back yet: %s", error)
                self._drain.wait(RETRY_SECONDS)
            else:
                break
        self._give_up()
        if self._outage is None:
            self._outage = self._alone(None, max_steps=0)
            self._reconnect = self._exchange.connect(lambda: None)

    def _give_up(self) -> None:
        """What is computed and not answered was in vain."""
        local = 0 if self._outage is None else self._outage.steps
        self._wasted += local + len(self._pile) + sum(send.push.steps for send in self._unsent)
        self._pile.clear()
        self._unsent.clear()
        if self._outage is not None:
            self._outage.taken()

    def _begin_again(self, welcome: Welcome) -> Pulled:
        """The job has gone back: nothing that this worker has or holds is worth anything; the snapshot's parameters."""
        self._give_up()
        if isinstance(self._held, EndOfFile):
            self._held = None
        self._join_coordinator({})
        pulled = self._exchange.pull(self._buffers.spare).result()
        self._seq = max(self._seq, *(shard.last_seq for shard in welcome.shards))
        self._leases.begin_again(welcome.generation)
        self._generation = welcome.generation
        return pulled
