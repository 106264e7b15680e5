"""The state of one shard: parameters, optimizer, and which pushes are in them.

It is the part of the parameter server that knows no socket. All calls are short and safe from any thread; one lock
makes them one after the other, and `on_applied` runs inside it, so that what the coordinator counts and what the
parameters hold never differ. A shard is EMPTY until a worker gives it first values, RECOVERING for a bounded moment
after a restart (the newest of its snapshot and the workers' copies wins), and READY from then on.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping

import numpy as np

from shoal_trainer.contract import Staleness
from shoal_trainer.errors import ProtocolError, Unreachable, UserError
from shoal_trainer.ps import kernels, schedules
from shoal_trainer.ps.attendance import Attendance
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.ps.contents import Contents
from shoal_trainer.ps.journal import Log
from shoal_trainer.ps.kernels import Buffer, Vector
from shoal_trainer.ps.layout import bounds
from shoal_trainer.ps.merging import Merger
from shoal_trainer.ps.optimizers import Optimizer, Update, compile_for
from shoal_trainer.ps.recovery import Recovery
from shoal_trainer.ps.values import Answer, AppliedPush, ShardCopy, State, difference, remember, same_shapes
from shoal_trainer.wire.messages import AnswerMeta, Applied, ModelSpec, PushMeta, ShardWelcome

EXPONENTS = {"Constant": 0.0, "InverseSquareRoot": 0.5, "Inverse": 1.0}


class ShardStore(Attendance):
    """Shard `index` of `shards`, at `epoch` (the incarnation of its pod); `boot` tells restarts in place apart.

    `follows`: another one was here before, in an earlier pod or container; None: as `epoch` tells. `recovery_seconds`
    counts from the first worker's hello. `on_applied` and `on_ready` run under the lock: cheap,
    and not calling back.
    """

    def __init__(
        self,
        index: int,
        shards: int,
        epoch: int,
        *,
        boot: int | None = None,
        follows: bool | None = None,
        staleness: Staleness | None = None,
        recovery_seconds: float = 0.75,
        clock: Callable[[], float] = time.monotonic,
        on_applied: Callable[[AppliedPush], None] | None = None,
        on_ready: Callable[[int, Applied], None] | None = None,
    ) -> None:
        super().__init__(staleness, clock)
        self.index = index
        self.shards = shards
        self.epoch = epoch
        self.boot = secrets.randbits(63) if boot is None else boot
        self.generation = 0
        self.on_applied = on_applied
        self.on_ready = on_ready
        self.samples = 0
        self.updates = 0
        """Gradients that the optimizer's state has seen: the step of Adam."""
        self.model: ModelSpec | None = None
        self.applied: Applied = {}
        self.journal = Log()
        self.contents = Contents()
        """Which pushes are in the parameters."""
        self.follows = epoch > 0 if follows is None else follows
        self._state = State.RECOVERING if self.follows else State.EMPTY
        self._recovery = Recovery(recovery_seconds)
        self._parameters: Vector = aligned(0)
        self._optimizer: Optimizer | None = None
        self._merger = Merger()
        self._other_run = False
        self._restored = Contents()
        """Which pushes the snapshot holds that it began with."""

    # --- the model ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """EMPTY, RECOVERING or READY now."""
        with self.lock:
            self._settle()
            return self._state

    @property
    def size(self) -> int:
        """How many values the shard holds; 0 before a model is known."""
        return int(self._parameters.size)

    def hello(
        self,
        slot: int,
        incarnation: int,
        model: ModelSpec,
        copy_version: int | None = None,
        generation: int = 0,
    ) -> ShardWelcome:
        """Agree on the model; `UserError` if this shard holds another one.

        A worker without a copy may say hello again to learn the state of the shard; it computes no gradient then.
        """
        if self.model is None:
            compile_for(model.optimizer)  # not under the lock: without a cache it takes seconds
        with self.lock:
            self._members.check(slot, incarnation)
            if self.model is None:
                self._allocate(model)
            elif self._other_run and self.model != model and same_shapes(self.model, model):
                self._take_optimizer(model)
                self._other_run = False
            elif self.model != model:
                raise UserError(difference(self.model, model))
            self._permits.forget(slot)
            self._recovery.begin(self._clock())
            wants = copy_version is not None and self._wants(copy_version, generation)
            if wants:
                self._recovery.coming(slot)
            else:
                self._recovery.heard(slot)
            self._settle()
            return self._welcome(slot, incarnation, wants)

    def initialize(self, values: Vector) -> None:
        """Take first values, unless there are some: the first writer wins."""
        with self.lock:
            self._check_size(values)
            self._settle()
            if self._state is State.EMPTY:
                self._parameters[:] = values
                self._become_ready()

    def offer(
        self, slot: int, incarnation: int, version: int, meta: AnswerMeta, io: Buffer, *, generation: int = 0
    ) -> ShardWelcome:
        """Adopt a worker's copy of the parameters if it is newer than those of this recovering shard."""
        with self.lock:
            self._members.check(slot, incarnation)
            self._check_size(io)
            fits = self.journal.takes(meta.journal, self._restored)
            if fits and self._wants(version, generation):
                kernels.adopt(self._parameters, io)
                self.version, self.samples, self.generation = version, meta.samples, generation
                self._take_applied(meta.applied)
                self.journal.adopt(meta.journal)
                self.contents = Contents(self._restored.spans())
                for entry in self.journal.since(-1).entries:
                    self.contents.add((entry.slot, entry.incarnation, entry.seq))
                self._recovery.adopted()
                if self._state is State.EMPTY:
                    self._become_ready()
            self._recovery.heard(slot)
            self._settle()
            return self._welcome(slot, incarnation, False)

    # --- reading and writing --------------------------------------------------------------------------------------

    def pull(self, slot: int, io: Buffer, *, boot: int | None = None, idle: bool = False) -> Answer:
        """Fill `io` with the parameters. `idle`: the worker computes no gradient, and nobody is to wait for one."""
        with self.lock:
            self._check_ready(io, boot)
            kernels.encode(self._parameters, io)
            answer = self._answer(slot, -1)
            if idle:
                self._permits.forget(slot)
            return answer

    def push(
        self,
        slot: int,
        incarnation: int,
        seq: int,
        base: int,
        meta: PushMeta,
        io: Buffer,
        *,
        boot: int | None = None,
    ) -> Answer:
        """Apply the mean gradient (or what a worker's optimizer made of it) in `io`, and leave the parameters there."""
        with self.lock:
            if self._repeated(slot, incarnation, seq, io, boot):
                return self._answer(slot, base)
            optimizer, w = self._optimizer, self._parameters
            if optimizer is None:
                raise Unreachable("the shard has no model yet")
            config = optimizer.config
            tau = max(0, self.version - base)
            weight = config.weight(meta.samples) / max(1, tau) ** EXPONENTS[self.staleness.policy]
            rate = meta.learning_rate
            if not math.isfinite(rate):
                rate = schedules.learning_rate(config.learning_rate, config.step_after(self.samples))
            trainable = optimizer.size
            spoilt = optimizer.apply(
                w[:trainable], io[:trainable], Update(rate * weight, self.updates + 1, self.live_workers)
            )
            # Statistics move by themselves towards what each worker sees: a delayed correction is taken in part.
            if trainable < w.size:
                spoilt |= kernels.add(w[trainable:], io[trainable:], np.float32(1 / max(1, tau)))
            self._members.pushed(slot, incarnation, spoilt=spoilt)
            self.updates += 1
            return self._applied(slot, incarnation, seq, base, tau, weight, meta, False)

    def delta(
        self,
        slot: int,
        incarnation: int,
        seq: int,
        base: int,
        meta: PushMeta,
        io: Buffer,
        *,
        merge: bool = False,
        boot: int | None = None,
    ) -> Answer:
        """Parameters += scale * the difference in `io`; `merge`: by Adasum with those that came before it."""
        with self.lock:
            if self._repeated(slot, incarnation, seq, io, boot):
                return self._answer(slot, base)
            if merge:
                spoilt = self._merger.merge(self._parameters, io, self._clock())
            else:
                spoilt = kernels.add(self._parameters, io, np.float32(meta.scale))
            self._members.pushed(slot, incarnation, spoilt=spoilt)
            tau = max(0, self.version - base)
            return self._applied(slot, incarnation, seq, base, tau, meta.scale, meta, True)

    def wait_ready(self, timeout: float) -> bool:
        """Wait until the shard can be read; False if it cannot after `timeout` seconds.

        The usual case takes no lock: one worker's gradient comes in while another's is applied under it, and each
        request looks again when it has the lock.
        """
        seen = self._state
        if seen is State.READY:
            return True
        with self.changed:
            deadline = self._clock() + timeout
            while self.state is State.RECOVERING and (left := deadline - self._clock()) > 0:
                self.changed.wait(min(left, self._recovery.left(self._clock())))
            return self._state is State.READY

    # --- snapshots ------------------------------------------------------------------------------------------------

    def copy(self) -> ShardCopy | None:
        """The shard at this moment (copied under the lock); None while it cannot be read."""
        with self.lock:
            self._settle()
            if self._state is not State.READY or self.model is None or self._optimizer is None:
                return None
            low, high = bounds(self.model.size, self.shards)[self.index]
            arrays = {"parameters": self._parameters} | self._optimizer.state
            arrays = {name: values.copy() for name, values in arrays.items()}
            counts = (self.epoch, self.version, self.samples, self.updates)
            spec, applied = self.model, dict(self.applied)
            held = (applied, arrays, self.contents.spans(), self.generation)
            return ShardCopy(self.index, self.shards, *counts, low, high, spec, *held)

    def restore(self, copy: ShardCopy, *, other_run: bool = False, weights_only: bool = False) -> None:
        """Begin from a snapshot, before any worker connects; then RECOVERING until the workers' copies are known.

        `other_run`: the snapshot of another run. It holds no push of this one, and the first worker may reconfigure
        the optimizer. Workers may still have newer copies, if this run was lost before its first snapshot.
        `weights_only`: of another run, only its weights.
        """
        with self.lock:
            self._allocate(copy.model)
            self._check_size(copy.arrays["parameters"])
            self._parameters[:] = copy.arrays["parameters"]
            self._other_run = other_run or weights_only
            if self._optimizer is not None and not weights_only:
                for name, values in self._optimizer.state.items():
                    values[:] = copy.arrays[name]
                self.updates = copy.updates
            self._state = State.RECOVERING
            if self._other_run:
                self.samples = 0 if weights_only else copy.samples
                self._recovery.restored(None)
                return
            self.version, self.samples, self.generation = copy.version, copy.samples, copy.generation
            self._take_applied(copy.applied)
            self.journal = Log(copy.version)
            self._restored = Contents(copy.contents)
            self.contents = Contents(copy.contents)
            self._recovery.restored({slot for slot, _ in copy.applied})

    def roll_back(self, copy: ShardCopy) -> None:
        """Begin again from a snapshot, while workers are here: READY at once, for their copies are given up.

        Another `boot` has every push that is under way refused; the generation, every copy of what was.
        """
        with self.lock:
            self.boot = secrets.randbits(63)
            self._merger = Merger()
            self._permits.forget_all()
            self.restore(copy)
            self._become_ready()

    # --- inside the lock ------------------------------------------------------------------------------------------

    def _allocate(self, model: ModelSpec) -> None:
        low, high = bounds(model.size, self.shards)[self.index]
        self._parameters = aligned(high - low)
        self._take_optimizer(model)

    def _take_optimizer(self, model: ModelSpec) -> None:
        """Configure the optimizer; state of the same name and meaning stays. One that finds none begins anew."""
        compile_for(model.optimizer)
        low, high = bounds(model.size, self.shards)[self.index]
        held = {} if self._optimizer is None else self._optimizer.state
        self._optimizer = Optimizer(model.optimizer, low, max(0, min(high, model.parameters) - low), held)
        if not self._optimizer.state.keys() <= held.keys():
            self.updates = 0
        self.model = model

    def _take_applied(self, applied: Mapping[tuple[int, int], int]) -> None:
        """A slot's newest incarnation in `applied` fences the older ones, as it did on the shard that was lost."""
        self.applied = dict(applied)
        for slot, incarnation in applied:
            self.fence(slot, incarnation)

    def _settle(self) -> None:
        """Leave RECOVERING when everyone who is expected has been heard, or time is up."""
        if self._state is State.RECOVERING and self._recovery.over(self._clock()):
            if self._recovery.known:
                self._become_ready()
            else:
                self._state = State.EMPTY
                self.changed.notify_all()

    def _become_ready(self) -> None:
        self._state = State.READY
        if self.on_ready is not None:
            self.on_ready(self.version, dict(self.applied))
        self.changed.notify_all()

    def _wants(self, version: int, generation: int) -> bool:
        self._settle()
        newer = (generation, version) > (self.generation, self.version)
        return self._state is not State.READY and newer

    def _gone(self, slot: int) -> None:
        self._recovery.gone(slot)

    def _welcome(self, slot: int, incarnation: int, wants: bool) -> ShardWelcome:
        return ShardWelcome(
            index=self.index,
            epoch=self.epoch,
            boot=self.boot,
            version=self.version,
            samples=self.samples,
            initialized=self._state is State.READY or self._recovery.known,
            recovering=self._state is State.RECOVERING,
            wants_copy=wants,
            last_seq=self.applied.get((slot, incarnation), 0),
            live_workers=self.live_workers,
            generation=self.generation,
            stopped=self.stopped,
        )

    def _repeated(self, slot: int, incarnation: int, seq: int, io: Buffer, boot: int | None) -> bool:
        """Whether this push is in the parameters already; then `io` is filled and nothing else changes."""
        self._members.check(slot, incarnation)
        self._check_ready(io, boot)
        if seq < 1:
            raise ProtocolError("sequence numbers begin at 1")
        if seq > self.applied.get((slot, incarnation), 0):
            return False
        kernels.encode(self._parameters, io)
        return True

    def _applied(
        self,
        slot: int,
        incarnation: int,
        seq: int,
        base: int,
        tau: int,
        weight: float,
        meta: PushMeta,
        delta: bool,
    ) -> Answer:
        self.version += 1
        self.samples += meta.samples
        remember(self.applied, slot, incarnation, seq)
        self._permits.pushed(slot, base)
        self.contents.add((slot, incarnation, seq))
        self.journal.add(self.version, (slot, incarnation, seq), meta)
        if self.on_applied is not None:
            self.on_applied(AppliedPush(slot, incarnation, seq, self.version, tau, weight, meta, delta))
        self.changed.notify_all()
        return self._answer(slot, base)

    def _answer(self, slot: int, known: int) -> Answer:
        """`known`: up to which version the worker knows the journal; -1: nothing of it."""
        if self.staleness.max is not None and self._members.has(slot):
            self._permits.pulled(slot, self.version)
        journal = self.journal.since(known)
        meta = AnswerMeta(self.samples, self.live_workers, dict(self.applied), journal, self.stopped)
        return Answer(self.version, meta)

    def _check_size(self, values: Buffer) -> None:
        if values.shape != self._parameters.shape:
            raise ProtocolError(f"shard {self.index} holds {self.size} values, the message {values.size}")

    def _check_ready(self, io: Buffer, boot: int | None) -> None:
        self._settle()
        if boot is not None and boot != self.boot:
            raise Unreachable("the request was meant for the shard before its restart")
        if self._state is not State.READY:
            raise Unreachable(f"shard {self.index} is {self._state.value.lower()}")
        self._check_size(io)


__all__ = ["Answer", "AppliedPush", "ShardCopy", "ShardStore", "State"]
