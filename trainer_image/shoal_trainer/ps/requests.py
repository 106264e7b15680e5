"""What each request does to a shard while it walks over its pieces (`streams`): a pull, a push, the copy of a snapshot.

All but `work`, which a large shard does outside of it, runs under the shard's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from shoal_trainer.errors import Unreachable
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.contents import Worker
from shoal_trainer.ps.pieces import Payload, nbytes, parts
from shoal_trainer.ps.streams import Request
from shoal_trainer.ps.update_rules import divides_by_size, free_pace
from shoal_trainer.ps.values import Answer, AppliedPush, ShardCopy
from shoal_trainer.ps.walks import Walk, Walks, Weighed
from shoal_trainer.wire.messages import PushMeta

if TYPE_CHECKING:
    from shoal_trainer.ps.shard import ShardStore


class _OnShard:
    """Of a shard that is READY, and that is neither restarted nor rolled back meanwhile. `boot`: None for any.

    `worker`: whose request it is, which is not replaced meanwhile; None: no worker's.
    """

    def __init__(self, shard: ShardStore, boot: int | None, walk: Walk, worker: Worker | None) -> None:
        assert shard.model is not None
        self.shard, self.model, self.walk = shard, shard.model, walk
        self._boot, self._whose = boot, worker
        self._walks: Walks = shard.history.walks

    def check(self) -> None:
        """See `Request`."""
        if self._whose is not None:
            self.shard.workers.check(*self._whose)
        self.shard.check_ready(self._boot)
        if self.shard.history.walks is not self._walks:
            raise Unreachable("the shard was rolled back to a snapshot")


class Pull(_OnShard, Request[Answer]):
    """See `ShardStore.pulling`."""

    def __init__(
        self,
        shard: ShardStore,
        boot: int | None,
        walk: Walk,
        worker: Worker,
        known: int,
        ahead: float,
        *,
        idle: bool,
    ) -> None:
        super().__init__(shard, boot, walk, worker)
        self._slot, self._known, self._ahead, self._idle = worker[0], known, ahead, idle

    def work(self, io: Payload, writes: bool) -> None:  # noqa: ARG002
        """See `Request`."""
        self.shard.read(io, self._ahead)

    def finish(self) -> Answer:
        """See `Request`."""
        answer = self.shard.answer(self._slot, self._known, self.walk)
        if self._idle:
            self.shard.workers.expect_no_push(self._slot)
        return answer


class Pushing(_OnShard, Request[Answer]):
    """See `ShardStore.pushing`.

    The weight of a gradient and its optimizer step are fixed before its first piece is applied, and kept with the push:
    one that was interrupted and is sent again is one step.
    """

    def __init__(
        self,
        shard: ShardStore,
        boot: int | None,
        walk: Walk,
        worker: Worker,
        seq: int,
        base: int,
        meta: PushMeta,
        ahead: float,
        *,
        delta: bool,
    ) -> None:
        super().__init__(shard, boot, walk, worker)
        self._worker, self._seq, self._base, self._meta = worker, seq, base, meta
        self._ahead, self._delta = 0.0 if delta else ahead, delta
        self._received, self._non_finite = 0, False
        self._met = np.zeros(3)
        """What was learned of it by comparison with the last gradient; see `Agreement`."""

    def prepare(self) -> None:
        """See `Request`."""
        assert self.walk.push is not None
        if self.walk.push.weighed is None:
            self.walk.push.weighed = self._weigh()

    def _weigh(self) -> Weighed:
        shard, history, meta = self.shard, self.shard.history, self._meta
        # Above the version: computed on updates that were lost with an earlier process of this shard. Pushes that
        # are under way come before this one.
        staleness = abs(history.version - self._base) + history.walks.under_way(self.walk)
        if self._delta or meta.skipped:
            return Weighed(staleness, 0.0 if meta.skipped else meta.scale, None)
        config = self.model.optimizer.config
        own = history.pushed_since(self._worker[0], self._base)  # in flight then; see `Damping`
        shard.damping.free, shard.damping.divides = free_pace(config), divides_by_size(config)
        shard.damping.agreement = self.model.agreement() if shard.workers.live > 1 else 0.0
        damped = shard.damping.apply(max(0, staleness - own), shard.workers.live, meta.length)
        weight = config.weight(meta.samples) * damped.factor
        if damped.factor == 0:  # a learning rate of 0 would not keep it out of the moments
            return Weighed(staleness, 0.0, None)
        update = self.model.next_update(meta, weight, history.samples, damped.pace, self._ahead)
        return Weighed(staleness, weight, update)

    def work(self, io: Payload, writes: bool) -> None:
        """See `Request`."""
        if not writes:
            self.shard.read(io, self._ahead)
            return
        assert self.walk.push is not None
        weighed = self.walk.push.weighed
        assert weighed is not None
        self._received += nbytes(io)
        with self.shard.load.working():
            if self._delta:
                self._non_finite |= self.model.add(io, self._meta.scale)
            else:
                if weighed.update is not None and self.shard.workers.live > 1:
                    self._met += self.model.meet(self._worker[0], io)
                self._non_finite |= self.model.apply_gradient(
                    io, weighed.update, self._meta.steps, weighed.staleness
                )

    def complete(self) -> None:
        """See `Request`."""
        shard, (slot, incarnation) = self.shard, self._worker
        assert self.walk.push is not None
        assert self.walk.push.weighed is not None
        staleness, weight, _ = self.walk.push.weighed
        shard.load.applied(self._received, self._meta.steps)
        self.model.sampled.learn(self._met)
        shard.workers.pushed(slot, incarnation, self._base, non_finite=self._non_finite)
        shard.history.record(self._worker, self._seq, self._meta)
        if shard.on_applied is not None:
            made = slot, incarnation, self._seq, shard.history.version
            shard.on_applied(AppliedPush(*made, staleness, weight, self._meta, self._delta))
        shard.changed.notify_all()

    def finish(self) -> Answer:
        """See `Request`."""
        return self.shard.answer(self._worker[0], self._base, self.walk)


class Copying(_OnShard, Request[ShardCopy]):
    """See `ShardStore.copy`."""

    def __init__(self, shard: ShardStore, also: Callable[[], None]) -> None:
        assert shard.model is not None
        self._also = also
        self._source = shard.model.arrays()
        self._arrays = {name: aligned(values.size) for name, values in self._source.items()}
        # Begun when there is memory for it: no push may overtake it.
        super().__init__(shard, shard.boot, shard.history.walks.begin(steady=True), None)

    def work(self, io: Payload, writes: bool) -> None:  # noqa: ARG002
        """See `Request`."""
        for part, _ in parts(io):
            for name, values in self._source.items():
                self._arrays[name][part] = values[part]

    def finish(self) -> ShardCopy:
        """See `Request`."""
        self._also()
        shard, model, history = self.shard, self.model, self.shard.history
        history.journal.copied(history.version)
        # Of a push that began behind the copy nothing was copied, and its optimizer step is not in it either.
        weighed = (push.weighed for push, first in self.walk.missing.items() if not first)
        behind = [found.update for found in weighed if found is not None and found.update is not None]
        return ShardCopy.model_construct(  # thousands of pushes are not checked under the lock
            index=shard.index,
            shards=shard.shards,
            epoch=shard.epoch,
            version=history.version,
            samples=history.samples,
            updates=model.updates - len(behind),
            low=model.low,
            high=model.high,
            model=model.spec,
            applied=dict(history.applied),
            arrays=self._arrays,
            pushes=history.contents.spans(),
            begun=history.begun(self.walk),
            generation=history.generation,
            pace=model.pace,
            filled=min([model.filled, *(update.filled for update in behind)]),
            agreement=model.sampled.mean,
            usual=shard.damping.length.value,
        )
