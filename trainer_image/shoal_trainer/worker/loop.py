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

from shoal_trainer.errors import Unreachable, UserError
from shoal_trainer.ps import schedules
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.wire.messages import Copy, Pulled, Push, Timings, Welcome
from shoal_trainer.worker.buffers import Buffers, decode
from shoal_trainer.worker.exchange import Exchange
from shoal_trainer.worker.feed import EndOfFile, Feed, Item, Ready
from shoal_trainer.worker.glue import Glue, Step
from shoal_trainer.worker.leases import Leases, joined
from shoal_trainer.worker.optimizers import Placement
from shoal_trainer.worker.outage import Outage
from shoal_trainer.worker.send import Send, combined
from shoal_trainer.worker.work import Coordinator, Finished, TaskWork

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.25
PROBE_SECONDS = 1.0
"""A worker with nothing to do pulls this often: it would not notice the loss of a server otherwise, and when work comes
it begins with fresh parameters."""
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
    on_nan: Literal["stop", "skip"] = "stop"


class Loop:
    """One worker. `run` blocks until the job has ended or `drain` is set, and says which."""

    def __init__(
        self,
        glue: Glue,
        placement: Placement,
        exchange: Exchange,
        feed: Feed,
        coordinator: Coordinator,
        leases: Leases,
        do_task: Callable[[TaskWork], None],
        drain: threading.Event,
        policy: Policy,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._glue, self._placement = glue, placement
        self._exchange, self._feed, self._coordinator = exchange, feed, coordinator
        self._leases = leases
        self._do_task = do_task
        self._drain = drain
        self._policy = policy
        self._clock = clock
        self._buffers = Buffers(glue.layout.size, glue.dtype, glue.alias)
        self._pulled: Pulled | None = None
        self._wasted = 0
        self._boots: tuple[tuple[int, int], ...] = ()
        self._seq = 0
        self._under_way: tuple[Future[Pulled], Send] | None = None
        self._unsent: list[Send] = []
        self._outage: Outage | None = None
        self._reconnect: Future[Welcome] | None = None
        self._held: Item | None = None
        self._input_seconds = 0.0
        self._last_push = self._heard = clock()
        self._pile: list[tuple[Step, Ready]] = []
        self.steps = 0

    # --- the story ------------------------------------------------------------------------------------------------

    def run(self) -> End:
        """Join, then work until there is no more to do."""
        self._join()
        self._feed.start()
        while not self._drain.is_set():
            if self._outage is not None:
                self._ride()
                continue
            began = self._clock()
            item = self._take(timeout=0.1)
            self._input_seconds += self._clock() - began
            if isinstance(item, Ready):
                self._train(item)
            elif item is None:
                self._collect()
                if self._outage is None and self._clock() - self._heard >= PROBE_SECONDS:
                    self._refresh()
            else:
                self._collect()
                if self._outage is not None:
                    self._held = item
                elif isinstance(item, Finished):
                    self._leave()
                    return End.FINISHED
                elif isinstance(item, BaseException):
                    raise item
                else:
                    self._do(item)
        self._leave()
        return End.DRAINED

    def _do(self, item: TaskWork | EndOfFile) -> None:
        """What is done once; while somebody is away it is held, and tried again."""
        try:
            if isinstance(item, TaskWork):
                self._do_task(item)
            else:
                self._file_ended(item)
        except Unreachable as error:
            log.warning("cannot give back a result now, will do so again: %s", error)
            self._held = item
            self._drain.wait(RETRY_SECONDS)
        self._input_seconds, self._last_push = 0.0, self._clock()

    def _join(self) -> None:
        """Connect, give the first parameters unless another worker was first, and pull."""
        while not self._drain.is_set():
            try:
                welcome = self._wait(self._exchange.connect(lambda: None))
                if welcome is None:
                    return
                if not welcome.initialized:
                    self._exchange.initialize(self._glue.initial()).result()
                self._pulled = self._exchange.pull(self._buffers.spare).result()
            except Unreachable as error:
                log.info("joining: %s", error)
                continue
            self._buffers.swap()
            self._boots = welcome.boots
            self._seq = max(shard.last_seq for shard in welcome.shards)
            self._last_push = self._clock()
            return

    # --- a step ---------------------------------------------------------------------------------------------------

    def _train(self, ready: Ready) -> None:
        assert self._pulled is not None
        base = self._pulled
        began = self._clock()
        step = self._checked(self._glue.step(self._buffers.tensor, ready.batch), ready)
        self._pile.append((step, ready))
        compute = self._clock() - began
        self.steps += 1
        if len(self._pile) < self._policy.steps_per_push:
            return
        self._collect()
        if self._outage is not None:
            for piled, of in self._pile:
                self._step_alone(piled, of)
            self._pile.clear()
            return
        self._send(base, compute)
        if self._policy.sequential:
            self._collect()

    def _send(self, base: Pulled, compute: float) -> None:
        """Hand what is piled up to the exchange thread."""
        # What is somebody else's by now is not pushed: it would be in the parameters twice.
        self._pile = [piled for piled in self._pile if self._leases.token(piled[1].work.token) is not None]
        if not self._pile:
            return
        update, samples, loss = combined(self._pile)
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
                now - self._last_push, compute, base.pull_seconds, base.push_seconds, self._input_seconds
            ),
            learning_rate=None if rate is None else rate(base.samples),
        )
        self._input_seconds, self._last_push = 0.0, now
        future = self._exchange.push_pull(update, self._buffers.spare, push)
        self._under_way = (future, Send(update, push))

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
            assert self._pulled is not None
            both = zip(self._pulled.journals, pulled.journals, strict=True)
            self._pulled = replace(pulled, journals=tuple(known.then(later) for known, later in both))
            self._buffers.swap()
            self._leases.answered(send.push)
        self._heard = self._clock()

    def _refresh(self) -> None:
        """Take the present parameters; nothing is under way."""
        try:
            self._pulled = self._exchange.pull(self._buffers.spare).result()
        except Unreachable as error:
            self._begin_outage(error, None)
        else:
            self._buffers.swap()
        self._input_seconds, self._last_push = 0.0, self._clock()
        self._heard = self._last_push

    def _checked(self, step: Step, ready: Ready) -> Step:
        if step.finite:
            return step
        if self._policy.on_nan == "skip":
            log.warning("the loss is not finite: batch before position %d skipped", ready.batch.end)
            return replace(step, update=np.zeros_like(step.update))
        raise UserError(
            f"The loss or its gradient is not finite (loss {step.loss}) in epoch {ready.work.epoch + 1}. Lower the "
            'learning rate, clip gradients (clipnorm=…), look for bad samples, or set Training(on_nan="skip").'
        )

    # --- an outage ------------------------------------------------------------------------------------------------

    def _begin_outage(self, error: Unreachable, send: Send | None) -> None:
        """`send`: what was under way."""
        log.warning("a parameter server is away (%s): training on locally", error)
        assert self._pulled is not None
        config = self._placement.config
        rate = None if send is None else send.push.learning_rate
        if rate is None:
            rate = schedules.learning_rate(config.learning_rate, self._pulled.samples // config.batch_size)
        self._outage = Outage(self._buffers.current, config, self._glue.layout.trainable, rate, self._clock)
        if send is not None:
            self._outage.absorb(send.update)
            self._unsent.append(send)
        copy = Copy(self._buffers.current, self._pulled)
        self._reconnect = self._exchange.connect(lambda: copy)

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
        self._outage.parameters_into(self._buffers.spare)
        step = self._checked(self._glue.step(self._buffers.spare_tensor, item.batch), item)
        self._step_alone(step, item)
        self.steps += 1

    def _step_alone(self, step: Step, ready: Ready) -> None:
        assert self._outage is not None
        mark = self._leases.mark(ready.work.token, ready.batch.end)
        if mark is not None:
            self._outage.step(step.update, ready.batch.samples, mark)

    def _come_back(self, welcome: Welcome) -> None:
        """Bring the servers what they have missed, in order, and go on with their parameters."""
        assert self._outage is not None
        assert self._pulled is not None
        outage, lost = self._outage, welcome.boots != self._boots
        try:
            if not welcome.initialized:  # nothing is left of the parameters but the workers' copies
                first = aligned(self._buffers.current.size)
                decode(self._buffers.current, first)
                self._exchange.initialize(first).result()
            if welcome.boots[0] != self._boots[0]:
                self._rejoin(welcome.shards[0].last_seq)
            if outage.steps:
                self._unsent.append(self._local_steps(outage))
            live = max(self._pulled.live_workers, welcome.shards[0].live_workers)
            while self._unsent:
                self._resend(self._unsent[0], live)
                self._leases.answered(self._unsent.pop(0).push)
            # Only what is pulled comes with the whole journal: the one of before may tell of pushes that are lost.
            pulled = self._exchange.pull(self._buffers.spare).result()
        except Unreachable:
            copy = Copy(self._buffers.current, self._pulled)
            self._reconnect = self._exchange.connect(lambda: copy)
            return
        self._buffers.swap()
        self._pulled, self._boots = pulled, welcome.boots
        self._outage = self._reconnect = None
        self._last_push = self._heard = self._clock()
        log.warning("the parameter servers are back%s", ", restored" if lost else "")

    def _local_steps(self, outage: Outage) -> Send:
        """The outage's local steps as something to send; from now on they count as sent by other means."""
        delta = aligned(self._glue.layout.size, self._glue.dtype)
        outage.difference_into(delta)
        self._seq += 1
        assert self._pulled is not None
        push = Push(
            seq=self._seq,
            samples=outage.samples,
            base_versions=self._pulled.versions,
            progress=joined(outage.progress),
            steps=outage.steps,
        )
        outage.taken()
        return Send(delta, push, local=True)

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
        self._leases.rename(self._coordinator.join(self._leases.held(), self._wasted))
        self._wasted = 0

    # --- small things ---------------------------------------------------------------------------------------------

    def _take(self, timeout: float) -> Item | None:
        if self._held is not None:
            item, self._held = self._held, None
            return item
        return self._feed.get(timeout)

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
        try:
            self._coordinator.leave()
        except Unreachable as error:
            log.warning("could not say goodbye: %s", error)
