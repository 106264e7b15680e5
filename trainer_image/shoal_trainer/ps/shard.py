"""One shard: its parameters and optimizer, the pushes that they contain, and the shard's life cycle.

It has no sockets. Calls are short and thread-safe: one lock serializes them, and `on_applied` runs under it, so the
coordinator's counts always match the parameters. A shard is EMPTY until a worker initializes it, RECOVERING for a
bounded time after a restart (the newest of its snapshot and the workers' copies wins), and READY from then on.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping

from shoal_trainer.contract import ShardReport, Staleness
from shoal_trainer.errors import ProtocolError, Unreachable, UserError
from shoal_trainer.ps.contents import Contents
from shoal_trainer.ps.damping import Damping
from shoal_trainer.ps.journal import PushJournal
from shoal_trainer.ps.load import Load
from shoal_trainer.ps.model_state import ModelState
from shoal_trainer.ps.pieces import Payload
from shoal_trainer.ps.recovery import Recovery
from shoal_trainer.ps.values import Answer, AppliedPush, ShardCopy, State, mismatch, record_push, same_shapes
from shoal_trainer.ps.workers import WorkerRegistry
from shoal_trainer.wire.messages import AnswerMeta, Applied, ModelSpec, PushMeta, ShardWelcome

EXPONENTS = {"Constant": 0.0, "InverseSquareRoot": 0.5, "Inverse": 1.0}
"""The learning rate is divided by the normal staleness to this power; see `Damping`."""


class ShardStore(WorkerRegistry):
    """Shard `index` of `shards`, at `epoch` (the incarnation of its pod); `boot` identifies the process.

    `follows`: whether an earlier pod or container served this shard; None: if `epoch` > 0. `recovery_seconds`: the wait
    for workers' copies, from the hello of the first worker with one. `on_applied` and `on_ready` run under the lock:
    they must be cheap and must not call the shard.
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
        self.boot = self.first_boot = secrets.randbits(63) if boot is None else boot
        """`boot` changes at each rollback; `first_boot` identifies the process."""
        self.generation = 0
        self.on_applied = on_applied
        self.on_ready = on_ready
        self.samples = 0
        self.model: ModelState | None = None
        """None until the first worker or a snapshot defines the model."""
        self.applied: Applied = {}
        self.journal = PushJournal()
        self.contents = Contents()
        """The pushes in the parameters."""
        self.damping = Damping(EXPONENTS[self.staleness.policy])
        self._last_of: dict[int, int] = {}
        """The version that each slot's last push made."""
        self.load = Load()
        self.initial_samples = 0
        """See `initialize`."""
        self.follows = epoch > 0 if follows is None else follows
        self._state = State.RECOVERING if self.follows else State.EMPTY
        self._recovery = Recovery(recovery_seconds)
        self._other_run = False
        self._restored = Contents()
        """The pushes in the snapshot from which the shard was restored."""

    # --- the model ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The current state."""
        with self.lock:
            self._settle()
            return self._state

    @property
    def size(self) -> int:
        """The number of values in this shard; 0 before a model is known."""
        return 0 if self.model is None else int(self.model.parameters.size)

    def hello(
        self,
        slot: int,
        incarnation: int,
        model: ModelSpec,
        copy_version: int | None = None,
        generation: int = 0,
    ) -> ShardWelcome:
        """Agree on the model with a worker, and request its copy if it is newer than this recovering shard.

        `copy_version`: None without a copy. A worker without a copy may repeat this call to read the shard's state; it
        computes no gradient meanwhile. `UserError` if the shard holds another model, `Fenced` for a replaced worker.
        """
        with self.lock:
            self._members.check(slot, incarnation)
            if self.model is None:
                self.model = ModelState(model, self.index, self.shards)
            elif self.model.spec != model:
                if not (self._other_run and same_shapes(self.model.spec, model)):
                    raise UserError(mismatch(self.model.spec, model))
                self.model.reconfigure(model)
            self._other_run = False
            self._expect_no_push(slot)
            self._recovery.begin(self._clock(), has_copy=copy_version is not None)
            wants_copy = copy_version is not None and self._is_newer(copy_version, generation)
            if wants_copy:
                self._recovery.requested(slot)
            else:
                self._recovery.answered(slot)
            self._settle()
            return self._welcome(slot, incarnation, wants_copy)

    def initialize(self, values: Payload, samples: int = 0) -> None:
        """Set the first parameters (fp32); ignored if the shard already has some.

        `samples`: those in the copy of a worker that had trained before the shard lost everything else.
        """
        with self.lock:
            model = self._check_size(values)
            self._settle()
            if self._state is State.EMPTY:
                model.set(values)
                self.initial_samples = samples
                self._become_ready()

    def offer(
        self, slot: int, incarnation: int, version: int, meta: AnswerMeta, io: Payload, *, generation: int = 0
    ) -> ShardWelcome:
        """Adopt a worker's copy of the parameters (fp32 or bf16) if it is newer than this recovering shard."""
        with self.lock:
            self._members.check(slot, incarnation)
            model = self._check_size(io)
            accepted = self.journal.accepts(meta.journal, self._restored)
            if accepted and self._is_newer(version, generation):
                model.adopt(io)
                self.version, self.samples, self.generation = version, meta.samples, generation
                self._set_applied(meta.applied)
                self.journal.adopt(meta.journal)
                self.contents = Contents(self._restored.spans())
                for entry in self.journal.since(-1).entries:
                    self.contents.add((entry.slot, entry.incarnation, entry.seq))
                self._recovery.adopted(worker for worker, _ in self.applied)
                if self._state is State.EMPTY:
                    self._become_ready()
            self._recovery.answered(slot)
            self._settle()
            return self._welcome(slot, incarnation, False)

    # --- reading and writing --------------------------------------------------------------------------------------

    def pull(
        self,
        slot: int,
        io: Payload,
        *,
        boot: int | None = None,
        idle: bool = False,
        ahead: float = 0.0,
        known: int = -1,
    ) -> Answer:
        """Write the parameters to `io` (fp32 or bf16). `idle`: the worker computes no gradient on them.

        `boot` is checked if given: `Unreachable` if the shard has restarted, or has no parameters yet. `ahead`: write
        those expected after so many more updates. `known`: as in `_answer`.
        """
        with self.lock:
            model = self._check_ready(io, boot)
            if ahead:
                pace = self.damping.pace(self._members.live)
                model.anticipate(io, ahead, pace**-self.damping.exponent, pace, self.samples)
            else:
                model.encode(io)
            answer = self._answer(slot, known)
            if idle:
                self._expect_no_push(slot)
            return answer

    def push(
        self,
        slot: int,
        incarnation: int,
        seq: int,
        base: int,
        meta: PushMeta,
        io: Payload,
        *,
        boot: int | None = None,
        ahead: float = 0.0,
    ) -> Answer:
        """Apply the mean gradient in `io` (or the step of a worker's optimizer), and write the parameters to `io`.

        `base`: the version on which it was computed. `ahead`: write the parameters expected after so many more updates.
        A repeated `seq` is answered, but not applied again.
        `Fenced` for a replaced worker, `Unreachable` as in `pull`.
        """
        with self.lock:
            if (model := self._begin_push(slot, incarnation, seq, io, boot)) is None:
                return self._answer(slot, base)
            started = self._clock()
            # Above the version: computed on updates that were lost with an earlier process of this shard.
            tau = abs(self.version - base)
            own = self._last_of.get(slot, -1) > base  # in flight then; see `Damping`
            self.damping.normalizes = model.optimizer.config.name not in {"sgd", "delta"}
            damped = self.damping.apply(max(0, tau - own), self._members.live, meta.length)
            weight = model.optimizer.config.weight(meta.samples) * damped.factor
            non_finite = model.apply_gradient(io, meta, weight, tau, self.samples, damped.pace, ahead)
            self._members.pushed(slot, incarnation, non_finite=non_finite)
            self.load.add(self._clock() - started, io)
            return self._applied(slot, incarnation, seq, base, tau, weight, meta, False)

    def delta(
        self,
        slot: int,
        incarnation: int,
        seq: int,
        base: int,
        meta: PushMeta,
        io: Payload,
        *,
        boot: int | None = None,
    ) -> Answer:
        """Parameters += `meta.scale` * `io`. Otherwise as `push`."""
        with self.lock:
            if (model := self._begin_push(slot, incarnation, seq, io, boot)) is None:
                return self._answer(slot, base)
            started = self._clock()
            non_finite = model.add(io, meta.scale)
            self.load.add(self._clock() - started, io)
            self._members.pushed(slot, incarnation, non_finite=non_finite)
            tau = abs(self.version - base)
            return self._applied(slot, incarnation, seq, base, tau, meta.scale, meta, True)

    def report(self) -> ShardReport:
        """Its entry in the status report, without its snapshot."""
        with self.lock:
            return ShardReport(
                index=self.index,
                epoch=self.epoch,
                boot=self.first_boot,
                version=self.version,
                ready=self.state is State.READY,
                busy_seconds=self.load.busy_seconds,
                updates=self.load.updates,
                bytes_received=self.load.bytes_received,
                busy_answers=self.load.busy_answers,
            )

    def wait_ready(self, timeout: float) -> bool:
        """Wait until the shard is READY; False if it is not after `timeout` seconds.

        If READY, it takes no lock: a gradient can be received while another one is applied.
        """
        seen = self._state
        if seen is State.READY:
            return True
        with self.changed:
            deadline = self._clock() + timeout
            while self.state is State.RECOVERING and (remaining := deadline - self._clock()) > 0:
                self.changed.wait(min(remaining, self._recovery.remaining(self._clock())))
            return self._state is State.READY

    # --- snapshots ------------------------------------------------------------------------------------------------

    def copy(self) -> ShardCopy | None:
        """A copy of the shard, made under the lock; None unless it is READY."""
        with self.lock:
            self._settle()
            if self._state is not State.READY or self.model is None:
                return None
            return ShardCopy(
                index=self.index,
                shards=self.shards,
                epoch=self.epoch,
                version=self.version,
                samples=self.samples,
                updates=self.model.updates,
                low=self.model.low,
                high=self.model.high,
                model=self.model.spec,
                applied=dict(self.applied),
                arrays=self.model.arrays(),
                contents=self.contents.spans(),
                generation=self.generation,
            )

    def restore(self, copy: ShardCopy, *, other_run: bool = False, weights_only: bool = False) -> None:
        """Load a snapshot before any worker connects; then RECOVERING, as workers may hold newer copies.

        `other_run`: a snapshot of another run. It contains no push of this one, and the first worker may configure
        another optimizer. `weights_only`: load only the parameters of another run.
        """
        with self.lock:
            if self.model is None or self.model.spec != copy.model:
                self.model = ModelState(copy.model, self.index, self.shards)
            self._check_size(copy.arrays["parameters"])
            self.model.load(copy.arrays)
            self._other_run = other_run or weights_only
            if not weights_only:
                self.model.load_optimizer(copy.arrays, copy.updates)
            self._state = State.RECOVERING
            if self._other_run:
                self.samples = 0 if weights_only else copy.samples
                self._recovery.restored(None)
                return
            self.version, self.samples, self.generation = copy.version, copy.samples, copy.generation
            self._set_applied(copy.applied)
            self.journal = PushJournal(copy.version)
            self._restored = Contents(copy.contents)
            self.contents = Contents(copy.contents)
            self._recovery.restored({slot for slot, _ in copy.applied})

    def roll_back(self, copy: ShardCopy) -> None:
        """Load a snapshot while workers are connected. The shard is READY at once; workers' copies are discarded.

        The new `boot` rejects the pushes in flight, and the new generation rejects older copies.
        """
        with self.lock:
            self.boot = secrets.randbits(63)
            self._permits.clear()
            self._last_of.clear()
            self.restore(copy)
            self._become_ready()

    # --- under the lock -------------------------------------------------------------------------------------------

    def _set_applied(self, applied: Mapping[tuple[int, int], int]) -> None:
        """Set `applied`, and fence replaced incarnations as the lost shard did."""
        self.applied = dict(applied)
        for slot, incarnation in applied:
            self.fence(slot, incarnation)

    def _settle(self) -> None:
        """Leave RECOVERING once the wait for workers' copies is over."""
        if self._state is State.RECOVERING and self._recovery.over(self._clock()):
            if self._recovery.has_parameters:
                self._become_ready()
            else:
                self._state = State.EMPTY
                self.changed.notify_all()

    def _become_ready(self) -> None:
        self._state = State.READY
        if self.on_ready is not None:
            self.on_ready(self.version, dict(self.applied))
        self.changed.notify_all()

    def _is_newer(self, version: int, generation: int) -> bool:
        """Whether a copy is newer than a shard that is not READY yet."""
        self._settle()
        newer = (generation, version) > (self.generation, self.version)
        return self._state is not State.READY and newer

    def _disconnected(self, slot: int) -> None:
        self._recovery.disconnected(slot)

    def _welcome(self, slot: int, incarnation: int, wants_copy: bool) -> ShardWelcome:
        return ShardWelcome(
            index=self.index,
            epoch=self.epoch,
            boot=self.boot,
            version=self.version,
            samples=self.samples,
            initialized=self._state is State.READY or self._recovery.has_parameters,
            recovering=self._state is State.RECOVERING,
            wants_copy=wants_copy,
            last_seq=self.applied.get((slot, incarnation), 0),
            live_workers=self.live_workers,
            generation=self.generation,
            stopped=self.stopped,
        )

    def _begin_push(
        self, slot: int, incarnation: int, seq: int, io: Payload, boot: int | None
    ) -> ModelState | None:
        """The model to update; None if this push was applied before: then the parameters are written to `io`."""
        self._members.check(slot, incarnation)
        model = self._check_ready(io, boot)
        if seq < 1:
            raise ProtocolError(f"sequence number {seq}: sequence numbers begin at 1")
        if seq > self.applied.get((slot, incarnation), 0):
            return model
        model.encode(io)
        return None

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
        self._last_of[slot] = self.version
        self.samples += meta.samples
        record_push(self.applied, slot, incarnation, seq)
        self._permits.pushed(slot, base)
        self.contents.add((slot, incarnation, seq))
        self.journal.add(self.version, (slot, incarnation, seq), meta)
        if self.on_applied is not None:
            self.on_applied(AppliedPush(slot, incarnation, seq, self.version, tau, weight, meta, delta))
        self.changed.notify_all()
        return self._answer(slot, base)

    def _answer(self, slot: int, known: int) -> Answer:
        """`known`: the version up to which the worker has the journal; -1: it has none."""
        if self.staleness.max is not None and self._members.has(slot):
            self._permits.pulled(slot, self.version)
        journal = self.journal.since(known)
        meta = AnswerMeta(self.samples, self._members.live, dict(self.applied), journal, self.stopped)
        return Answer(self.version, meta)

    def _check_size(self, values: Payload) -> ModelState:
        if self.model is None or values.shape != self.model.parameters.shape:
            raise ProtocolError(f"shard {self.index} holds {self.size} values, the message {values.size}")
        return self.model

    def _check_ready(self, io: Payload, boot: int | None) -> ModelState:
        self._settle()
        if boot is not None and boot != self.boot:
            raise Unreachable("the request is for the shard before its restart")
        if self._state is not State.READY:
            raise Unreachable(f"shard {self.index} is {self._state.value.lower()}")
        return self._check_size(io)


__all__ = ["Answer", "AppliedPush", "ShardCopy", "ShardStore", "State"]
