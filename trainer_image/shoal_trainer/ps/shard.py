"""One shard: its parameters and optimizer, the pushes that they contain, and the shard's life cycle.

It has no sockets. Calls are short and thread-safe: one lock serializes them, and `on_applied` runs under it, so the
coordinator's counts always match the parameters. The pieces of a large shard are worked on outside of the lock
(`streams`); a push counts with its last piece. A shard is RECOVERING until it has parameters, after a restart for a
bounded time (the best of its snapshot and the workers' copies win; see `recovery`), and READY from then on.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from shoal_trainer.contract import ShardReport, Staleness
from shoal_trainer.errors import ProtocolError, Unreachable, UserError
from shoal_trainer.ps.damping import Damping
from shoal_trainer.ps.history import History
from shoal_trainer.ps.load import Load
from shoal_trainer.ps.model_state import ModelState
from shoal_trainer.ps.pieces import PIECE_VALUES, Payload
from shoal_trainer.ps.recovery import NOTHING, Origin, Recovery, Worth
from shoal_trainer.ps.requests import Copying, Pull, Pushing
from shoal_trainer.ps.streams import Request, Stream
from shoal_trainer.ps.values import Answer, AppliedPush, ShardCopy, State, mismatch, same_shapes
from shoal_trainer.ps.walks import Walk
from shoal_trainer.ps.workers import Workers
from shoal_trainer.wire.messages import AnswerMeta, Applied, Held, Journal, ModelSpec, PushMeta, ShardWelcome

T = TypeVar("T")
NO_ANSWER = AnswerMeta()

LARGE_VALUES = 2 << 20
"""Larger shards are walked over piece by piece. The kernels need a few ms for this many values."""

EXPONENTS = {"Constant": 0.0, "InverseSquareRoot": 0.5, "Inverse": 1.0}
"""The learning rate is divided by the normal staleness to this power; see `Damping`."""


class ShardStore:
    """Shard `index` of `shards`, at `epoch` (the incarnation of its pod); `boot` identifies the process.

    `follows`: whether an earlier pod or container served this shard; None: if `epoch` > 0. `recovery_seconds`: the wait
    for workers' copies, from the hello of the first worker with one. `on_applied` and `on_ready` run under the lock:
    they must be cheap and must not call the shard. `large`, `piece`: a shard of more values is walked over in pieces.
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
        large: int = LARGE_VALUES,
        piece: int = PIECE_VALUES,
    ) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified when the shard may be READY, or a push that waits be admitted."""
        self._clock = clock
        staleness = staleness or Staleness()
        self.history = History()
        released = threading.Condition(self.lock)
        self.workers = Workers(staleness.max, lambda: self.history.version, self.changed, released, clock)
        self.stopped: Callable[[], int] = lambda: 0
        """See `AnswerMeta.stopped`; set by the coordinator."""
        self.index = index
        self.shards = shards
        self.epoch = epoch
        self.boot = self.first_boot = secrets.randbits(63) if boot is None else boot
        """`boot` changes at each rollback; `first_boot` identifies the process."""
        self.on_applied = on_applied
        self.on_ready = on_ready
        self.model: ModelState | None = None
        """None until the first worker or a snapshot defines the model."""
        self.damping = Damping(EXPONENTS[staleness.policy])
        self.load = Load(clock)
        self.initial_samples = 0
        """Those in the parameters whose pushes are not known: see `Origin.COPY`."""
        self.follows = epoch > 0 if follows is None else follows
        self._state = State.RECOVERING
        self._recovery = Recovery(recovery_seconds, follows=self.follows)
        self._other_run = False
        self._other_samples = 0
        """Those of another run."""
        self._large, self._piece = large, piece
        self._moved = threading.Condition(self.lock)
        """Notified when a walk has moved."""

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

    @property
    def piece(self) -> int:
        """The values that a request sends and receives at a time; 0: all at once."""
        return self._piece if self.size > self._large else 0

    def disconnect(self, slot: int) -> None:
        """Unregister a connection of a worker."""
        with self.lock:
            if self.workers.disconnect(slot):
                self._recovery.disconnected(slot, self._clock())

    def hello(self, slot: int, incarnation: int, model: ModelSpec, held: Held | None = None) -> ShardWelcome:
        """Agree on the model with a worker, and ask for its parameters if they are better than a recovering shard's.

        `held`: what it offers. A worker may repeat this call to read the shard's state; it computes no gradient
        meanwhile. `UserError` if the shard holds another model, `Fenced` for a replaced worker.
        """
        with self.lock:
            self.workers.check(slot, incarnation)
            if self.model is None:
                self._use_model(ModelState(model, self.index, self.shards))
            elif self.model.spec != model:
                if not (self._other_run and same_shapes(self.model.spec, model)):
                    raise UserError(mismatch(self.model.spec, model, other_run=self._other_run))
                self.model.reconfigure(model)
            self._other_run = False
            self.workers.expect_no_push(slot)
            wanted = False
            if self.state is not State.READY:
                offered, whole = NOTHING, False
                if held is not None:
                    journal = None if held.floor is None else Journal(held.floor)
                    offered = self._worth(held.version, held.generation, journal)
                    whole = held.version is not None and journal is not None
                wanted = self._recovery.hello(slot, offered, self._clock(), whole=whole)
                self._settle()
            return self._welcome(slot, incarnation, wanted)

    def check_wanted(self, slot: int) -> None:
        """Before a worker sends its parameters: `Unreachable` if the shard has others by now that are as good."""
        with self.lock:
            if self.state is State.READY or not self._recovery.begins(slot, self._clock()):
                raise Unreachable(
                    f"shard {self.index} has parameters that are as good as those of this worker"
                )

    def offer(
        self,
        slot: int,
        incarnation: int,
        io: Payload,
        version: int | None = None,
        meta: AnswerMeta = NO_ANSWER,
        *,
        generation: int = 0,
    ) -> ShardWelcome:
        """Adopt a worker's parameters (fp32 or bf16) if they are better than those of a shard that is not READY.

        `version`, `meta`, `generation`: of its copy; without a version they are its first ones. Of those whose history
        is not known the parameters are taken alone, and their samples: their training is not lost.
        """
        with self.lock:
            self.workers.check(slot, incarnation)
            model = self._check_size(io)
            worth = self._worth(version, generation, None if meta.torn else meta.journal)
            if self.state is not State.READY and worth > self._recovery.have:
                model.adopt(io)
                if worth.origin is Origin.KNOWN:
                    self.history.adopt(worth.version, generation, meta)
                    self.initial_samples = 0
                    self._fence_replaced()
                else:
                    self.history.forget(generation, meta.samples)
                    self.initial_samples = meta.samples - self._other_samples
                self._recovery.adopted(worth, (slot for slot, _ in self.history.applied), self._clock())
            self._recovery.sent(slot, self._clock())
            self._settle()
            return self._welcome(slot, incarnation, False)

    # --- reading and writing --------------------------------------------------------------------------------------

    def pulling(
        self,
        slot: int,
        incarnation: int,
        *,
        boot: int | None = None,
        idle: bool = False,
        ahead: float = 0.0,
        known: int = -1,
    ) -> Stream[Answer]:
        """Write the parameters piece by piece (fp32 or bf16). `idle`: the worker computes no gradient on them.

        `boot` is checked if given: `Unreachable` if the shard has restarted, or has no parameters yet. `ahead`: write
        those expected after so many more updates. `known`: as in `answer`. `Fenced` for a replaced worker: others would
        wait for a gradient that it may not push.
        """
        worker = slot, incarnation
        with self.lock:
            self.workers.check(*worker)
            self.check_ready(boot)
            walk = self.history.walks.begin()
            return self._stream(Pull(self, boot, walk, worker, known, ahead, idle=idle))

    def pushing(
        self,
        slot: int,
        incarnation: int,
        seq: int,
        base: int,
        meta: PushMeta,
        *,
        delta: bool = False,
        boot: int | None = None,
        ahead: float = 0.0,
    ) -> Stream[Answer]:
        """Apply the mean gradient of a request (or the step of a worker's optimizer), and write the parameters to it.

        `base`: the version on which it was computed. `delta`: parameters += `meta.scale` * the request. `ahead`: write
        the parameters expected after so many more updates. A repeated `seq` is answered, but not applied again.
        `Fenced` for a replaced worker, `Unreachable` as in `pulling`.

        It counts with its last piece. If it is interrupted, its first pieces are in the parameters. A resend of it is
        answered and applied from there.
        """
        worker = slot, incarnation
        with self.lock:
            self.workers.check(slot, incarnation)
            self.check_ready(boot)
            walk = self.history.walks.begin(self.history.begin(worker, seq, meta))
            return self._stream(Pushing(self, boot, walk, worker, seq, base, meta, ahead, delta=delta))

    def check_rate(self, meta: PushMeta | None, ahead: float) -> None:
        """`UserError` if the schedule cannot be evaluated for a push (None: for a pull) that would begin now."""
        with self.lock:
            if self.model is not None:
                self.model.check_rate(meta, self.history.samples, ahead)

    def run(self, stream: Stream[T], io: Payload) -> T:
        """All of a request at once, in place. `ProtocolError` if `io` has another size."""
        try:
            self._check_size(io)
        except ProtocolError:
            stream.close()
            raise
        return stream.run(io)

    def report(self) -> ShardReport:
        """Its entry in the status report, without its snapshot."""
        with self.lock:
            return ShardReport(
                index=self.index,
                epoch=self.epoch,
                boot=self.first_boot,
                version=self.history.version,
                generation=self.history.generation,
                ready=self.state is State.READY,
                busy_seconds=self.load.busy_seconds,
                updates=self.load.updates,
                batches=self.load.batches,
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

    def copy(
        self, between: Callable[[], None] = lambda: None, also: Callable[[], None] = lambda: None
    ) -> ShardCopy | None:
        """A copy of one state of the shard; None unless it is READY. `Unreachable` if it is rolled back meanwhile.

        A large shard is copied piece by piece, and no push may overtake the copy: so none waits longer than for
        a piece, and nothing else holds the lock. `also` is called under the lock at the end, in the state that the copy
        has; `between` without it, between the pieces.
        """
        with self.lock:
            self._settle()
            if self._state is not State.READY or self.model is None:
                return None
            self.history.close_those(self.workers.refuses)  # answers name them until this copy is published
            stream = self._stream(Copying(self, also))
        try:
            for index, _ in enumerate(stream.spans()):
                if index:
                    between()
                stream.step(self.model.parameters, 0)
        finally:
            stream.close()
        return stream.result

    def restore(self, copy: ShardCopy, *, other_run: bool = False, weights_only: bool = False) -> None:
        """Load a snapshot before any worker connects; then RECOVERING, as workers may hold newer copies.

        `other_run`: a snapshot of another run. It contains no push of this one, and the first worker may configure
        another optimizer. `weights_only`: load only the parameters of another run.
        """
        with self.lock:
            if self.model is None or self.model.spec != copy.model:
                self._use_model(ModelState(copy.model, self.index, self.shards))
            model = self._check_size(copy.arrays["parameters"])
            model.load(copy.arrays)
            self._other_run = other_run or weights_only
            if not weights_only:
                model.load_optimizer(copy.arrays, copy.updates, copy.pace, copy.agreement, copy.filled)
            self._state = State.RECOVERING
            if self._other_run:
                self.history.samples = self._other_samples = 0 if weights_only else copy.samples
                self._recovery.restored(Worth(origin=Origin.COPY))
                return
            self.damping.length.load(copy.usual)
            self.history.load(copy)
            self._fence_replaced()
            have = Worth(copy.generation, Origin.KNOWN, copy.version)
            self._recovery.restored(have, (slot for slot, _ in copy.applied))

    def roll_back(self, copy: ShardCopy) -> None:
        """Load a snapshot while workers are connected. The shard is READY at once; workers' copies are discarded.

        The new `boot` rejects the pushes in flight, and the new generation rejects older copies.
        """
        with self.lock:
            self.boot = secrets.randbits(63)  # no piece of a push or pull follows those that are worked on
            self._moved.wait_for(lambda: not any(walk.working for walk in self.history.walks.open))
            self.boot = secrets.randbits(63)  # a HELLO meanwhile was answered with the generation of before
            self.workers.expect_no_pushes()
            self.history.undo()
            self.restore(copy)
            self._become_ready()

    # --- under the lock -------------------------------------------------------------------------------------------

    def _fence_replaced(self) -> None:
        """Fence replaced incarnations as the lost shard did."""
        for worker in self.history.workers():
            self.workers.fence(*worker)

    def _worth(self, version: int | None, generation: int, journal: Journal | None) -> Worth:
        """That of a worker's parameters. `journal`: None if the copy is torn; without entries before they are sent."""
        if version is None:
            return Worth(origin=Origin.FIRST)
        # A copy without a push tells nothing of what is in it to a shard that has no snapshot of this run.
        tells = version > 0 or self.history.restored
        if tells and journal is not None and self.history.accepts(journal):
            return Worth(generation, Origin.KNOWN, version)
        # The ledger goes on from the snapshot: parameters without a history do not.
        return NOTHING if self.history.restored else Worth(generation, Origin.COPY, version)

    def _use_model(self, model: ModelState) -> None:
        self.model = model
        self.history.in_pieces(-(-self.size // self.piece) if self.piece else 1)

    def _settle(self) -> None:
        """Leave RECOVERING once there are parameters, and no better ones are waited for."""
        recovery = self._recovery
        if self._state is State.RECOVERING and recovery.have > NOTHING and recovery.over(self._clock()):
            self._become_ready()

    def _become_ready(self) -> None:
        self._state = State.READY
        if self.on_ready is not None:
            self.on_ready(self.history.version, dict(self.history.applied))
        self.changed.notify_all()

    def _welcome(self, slot: int, incarnation: int, wants_copy: bool) -> ShardWelcome:
        return ShardWelcome(
            index=self.index,
            epoch=self.epoch,
            boot=self.boot,
            version=self.history.version,
            samples=self.history.samples,
            ready=self._state is State.READY,
            wants_copy=wants_copy,
            last_seq=self.history.last_seq((slot, incarnation)),
            live_workers=self.workers.live,
            generation=self.history.generation,
            stopped=self.stopped(),
        )

    def _stream(self, request: Request[T]) -> Stream[T]:
        return Stream(request, self.history.walks, self._moved, self.size, self.piece or max(1, self.size))

    def read(self, io: Payload, ahead: float) -> None:
        """Write the parameters to `io`, those expected after `ahead` more updates."""
        assert self.model is not None
        if ahead:
            pace = self.damping.pace(self.workers.live)
            self.model.anticipate(io, ahead, self.damping.rate(pace), pace, self.history.samples)
        else:
            self.model.encode(io)

    def answer(self, slot: int, known: int, walk: Walk) -> Answer:
        """`known`: the version up to which the worker has the journal; -1: it has none."""
        assert self.model is not None
        self.workers.pulled(slot)
        journal = self.history.journal.since(known)
        begun = self.history.begun(walk, journal.floor)
        applied = dict(self.history.applied) if known < journal.floor else {}
        counts = self.history.samples, self.workers.live, applied
        factor = self.damping.rate(self.damping.pace(self.workers.live))
        meta = AnswerMeta(*counts, journal, self.stopped(), begun, walk.torn, factor)
        return Answer(self.history.version, meta, self.model.filled)

    def _check_size(self, values: Payload) -> ModelState:
        if self.model is None or values.shape != self.model.parameters.shape:
            raise ProtocolError(f"shard {self.index} holds {self.size} values, the message {values.size}")
        return self.model

    def check_ready(self, boot: int | None) -> None:
        """`Unreachable` unless it is READY, and the same since `boot` if that is given."""
        self._settle()
        if boot is not None and boot != self.boot:
            raise Unreachable("the request is for the shard before its restart")
        if self._state is not State.READY:
            raise Unreachable(f"shard {self.index} is {self._state.value.lower()}")


__all__ = ["Answer", "AppliedPush", "ShardCopy", "ShardStore", "State"]
