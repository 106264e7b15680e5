"""The job's brain: decides what each worker does next, from the first hello to the exported model.

It does no I/O and has no thread: calls come from the control server, from the shard (`applied`, inside the shard's
lock) and from a clock (`tick`). Its lock is the shard's own, so ledger and parameters change together, and a snapshot
sees both at one moment.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from shoal_trainer.contract import (
    JobIdentity,
    StatusReport,
    StopAfter,
    TerminationMessage,
    WorkerState,
)
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.leased import Lease, Segment
from shoal_trainer.coordinator.members import Member, Members
from shoal_trainer.coordinator.protocol import FileEnded, Given, Join, Joined, TaskDone
from shoal_trainer.coordinator.protocol import Lease as LeaseMessage
from shoal_trainer.coordinator.record import Record
from shoal_trainer.coordinator.target import target_reached
from shoal_trainer.coordinator.tasks import Task
from shoal_trainer.errors import Fenced, Unreachable
from shoal_trainer.ps.contents import Contents
from shoal_trainer.ps.shard import AppliedPush, ShardStore
from shoal_trainer.wire.messages import Applied

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.2
ASKS_PER_SECOND = 1000
"""Idle workers ask again less often where more than this many requests a second would come from them together."""


class Coordinator(Record):
    """One job, beside shard 0 of its parameters. All methods may be called from any thread."""

    def __init__(
        self,
        job: JobIdentity,
        stop_after: StopAfter,
        batch_size: int,
        shard: ShardStore,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(job, stop_after, batch_size, shard, clock)
        self.members = Members()
        self.finished: TerminationMessage | None = None
        self._wall = wall
        self._task_counter = 0
        self._last_pushes: dict[tuple[int, int], float] = {}
        """After a stop: the workers that held leases, and until when a last push of each is waited for."""
        shard.on_applied = self.applied
        shard.on_ready = self.ready

    # --- workers --------------------------------------------------------------------------------------------------

    def join(self, request: Join) -> Joined:
        """A worker says hello.

        `Fenced` for an older incarnation, `UserError` where it has other data, `Unreachable` where the job has gone
        back since it got what it holds.
        """
        with self._lock:
            member = self._hear(request.slot, request.incarnation)
            if request.held and request.generation != self.shard.generation:
                raise Unreachable("the job has gone back to a snapshot: say hello to the parameter servers")
            member.node, member.pool, member.batch_size = request.node, request.pool, request.batch_size
            if member.state in {WorkerState.DRAINED, WorkerState.LEFT}:
                member.state = WorkerState.ACTIVE
            for older in self.members.older(request.slot, request.incarnation):
                self._lose(older, WorkerState.FENCED, "its successor is here")
            self.shard.fence(request.slot, request.incarnation)
            self._agree(request.data)
            if self._expected is not None:
                self._expected.discard(request.slot)
            # What a request told whose answer was lost comes once more.
            told = max(member.wasted_steps, request.wasted_told)
            member.wasted_steps = max(told, request.wasted_steps)
            self.counters.wasted_steps += member.wasted_steps - told
            return Joined(renamed=self._reclaim(request))

    def next_work(
        self, slot: int, incarnation: int, generation: int | None = None, number: int | None = None
    ) -> Given:
        """What this worker is to do now; nothing, as long as its parameters are of another generation.

        Asked again with the same `number`: the same again, if the worker still holds it.
        """
        with self._lock:
            member = self._hear(slot, incarnation)
            self._advance()
            if self.finished is not None:
                return Given(kind="finished", message=self.finished.message)
            behind = generation not in {None, self.shard.generation}
            gone = member.state in {WorkerState.DRAINED, WorkerState.LEFT}  # it asked before it said goodbye
            if self.ledger is None or self.gathering or behind or gone:
                return self._idle()
            if number is None or member.asked != number or not self._still_holds(member):
                member.asked, member.given = number, self._give(slot, incarnation)
            assert member.given is not None
            return member.given

    def heartbeat(self, slot: int, incarnation: int, message: str = "") -> bool:
        """A worker is alive; whether the job has finished."""
        with self._lock:
            self._hear(slot, incarnation).message = message
            return self.finished is not None

    def file_ended(self, request: FileEnded) -> None:
        """A file's length is known."""
        with self._lock:
            self._hear(request.slot, request.incarnation)
            if self.ledger is not None:
                self.ledger.file_ended(request.token, request.length)
                self._advance()

    def task_done(self, request: TaskDone) -> Task | None:
        """A task's result; None (and nothing changes) where the task is somebody else's by now."""
        with self._lock:
            self._hear(request.slot, request.incarnation)
            metrics = {n: v for n, v in request.metrics.items() if v is not None and math.isfinite(v)}
            if (task := self.tasks.done(request.token, metrics)) is None:
                return None
            if task.kind == "callbacks" and request.stop:
                self._stop("a callback asked for the end of training")
            if task.kind == "evaluate" and (reached := target_reached(self.stop_after, request.metrics)):
                self._stop(reached)
            self._advance()
            return task

    def held_task(self, slot: int, incarnation: int, token: tuple[int, int]) -> Task | None:
        """The task that this worker holds under this token: only for it files may be uploaded."""
        with self._lock:
            self._hear(slot, incarnation)
            return self.tasks.held(slot, incarnation, token)

    def leave(self, slot: int, incarnation: int) -> None:
        """It goes on purpose: the exact rest of what it held is free again, and a push that comes late is refused."""
        with self._lock:
            member = self._hear(slot, incarnation)
            self.shard.leave(slot, incarnation)
            self._lose(member, WorkerState.DRAINED if self.finished is None else WorkerState.LEFT, "")

    def failed(self, slot: int, incarnation: int, message: str) -> None:
        """It ends because the user's code is at fault; what it held is free again."""
        with self._lock:
            member = self._hear(slot, incarnation)
            self.shard.leave(slot, incarnation)
            self._lose(member, WorkerState.LEFT, message)

    # --- the shard's side -----------------------------------------------------------------------------------------

    def ready(self, version: int, applied: Applied) -> None:
        """The shard has its parameters: whose pushes are in them is known, though none has joined this process."""
        self.members.replaced(applied)
        super().ready(version, applied)

    def applied(self, push: AppliedPush) -> None:
        """Shard 0 applied a push (called inside its lock): the ledger moves with the parameters."""
        member = self.members.get(push.slot, push.incarnation)
        now = self._clock()
        self.members.hear(member, now)
        if member.first_push_at is None:
            member.first_push_at = self._wall()
        meta = push.meta
        member.pushed(meta.steps, meta.samples, push.staleness, meta.timings)
        self.pace.pushed(now, meta.samples, meta.loss)
        if self._ready and self.ledger is not None:
            self.counters.steps += meta.steps
            for mark in meta.progress:
                self._count(mark)
            self._stop_after_steps()
        self._last_pushes.pop((push.slot, push.incarnation), None)  # its answer reports the stop

    def compare(self, shards: Sequence[Contents], *, at_end: bool = False) -> bool:
        """Count what is in some shards only; whether some of it may yet come (`at_end`: that counts, too)."""
        with self._lock:
            if self.ledger is None:
                raise Unreachable("no worker has said yet what the data are")
            present = {(member.slot, member.incarnation) for member in self.members.present()}
            marks, expected = self.partial.count(shards, present, at_end=at_end)
            self.counters.partial = sum(mark.stop - mark.start for mark in marks)
            ranges = ((m.epoch, r) for m in marks for r in self.ledger.range_of(Segment(*m)))
            self.counters.partial_ranges = set(ranges)
            return expected

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """What follows from time. Called a few times a second: alone it looks at every member."""
        with self._lock:
            for member in self.members.notice_silence(self._clock()):
                self._give_up(member)
            self.shard.set_live_workers(max(1, len(self.members.active())))
            self._advance()

    # --- telling --------------------------------------------------------------------------------------------------

    def status(self) -> StatusReport:
        """What the coordinator tells about the job. Shards and storage are the caller's to add."""
        with self._lock:
            return report.status(self, self._clock())

    def succeeded(self, note: str = "") -> TerminationMessage:
        """The message that ends the job, with a note on its model; where that lies is the caller's to add."""
        with self._lock:
            return report.succeeded(self, self._clock(), note)

    def end(self, message: TerminationMessage) -> None:
        """The job has ended: from now on every worker is told so."""
        with self._lock:
            self.finished = message

    # --- inside ---------------------------------------------------------------------------------------------------

    def _hear(self, slot: int, incarnation: int) -> Member:
        if incarnation < self.members.newest(slot):
            raise Fenced(f"slot {slot} has a newer incarnation than {incarnation}")
        member = self.members.get(slot, incarnation)
        if member.state is WorkerState.FENCED:
            raise Fenced(
                f"worker {slot} incarnation {incarnation} was silent for too long and has been given up"
            )
        self.members.hear(member, self._clock())
        self._begin_gathering()
        return member

    def _advance(self) -> None:
        """What follows from all that has happened so far; cheap, for each request does it."""
        if self._gathered():
            self._end_gathering()
        if self.ledger is None or self.gathering or self.finished is not None:
            return
        self._end_passes()
        self._stop_after_steps()
        if self.stopping or self.ledger.finished:
            self._wind_up()

    def _idle(self) -> Given:
        return Given(kind="idle", seconds=max(IDLE_SECONDS, self.shard.live_workers / ASKS_PER_SECOND))

    def _give(self, slot: int, incarnation: int) -> Given:
        """The next task, else the next range."""
        given = self._next_for(slot, incarnation)
        if given.kind == "idle" and (silent := self._silent_holders()):
            # What a worker that is probably gone held goes to those that ask.
            for member in silent:
                self._give_up(member)
            given = self._next_for(slot, incarnation)
        return given

    def _silent_holders(self) -> list[Member]:
        """The silent members that hold what others could do: a lease, or the first task."""
        silent = self.members.silent()
        if not silent or self.ledger is None:
            return []
        holders = {(lease.slot, lease.incarnation) for lease in self.ledger.leases.values()}
        holders |= {task.holder for task in self.tasks.queue[:1] if task.holder is not None}
        return [member for member in silent if (member.slot, member.incarnation) in holders]

    def _next_for(self, slot: int, incarnation: int) -> Given:
        if self._settling():
            return self._idle()
        self._task_counter += 1
        token = (self._term, self._task_counter)
        if (task := self.tasks.grant(slot, incarnation, token)) is not None:
            history = tuple(self.tasks.history[: task.epoch + 1])
            return Given(kind="task", task=task.kind, token=token, epoch=task.epoch, history=history)
        if (lease := self._lease(slot, incarnation)) is not None:
            return Given(kind="data", lease=lease)
        return self._idle()

    def _still_holds(self, member: Member) -> bool:
        """Whether what this worker was given last is its own as it was."""
        given = member.given
        if given is None or self.ledger is None:
            return False
        if given.lease is not None:
            lease = self.ledger.leases.get(given.lease.token)
            return lease is not None and _holds(member, lease)
        return self.tasks.held(member.slot, member.incarnation, given.token) is not None

    def _lease(self, slot: int, incarnation: int) -> LeaseMessage | None:
        ledger = self.ledger
        assert ledger is not None
        assert self.data is not None
        # Callbacks judge passes (EarlyStopping's patience, the name of a checkpoint): training goes no further ahead of
        # them than a pass. Without them an evaluation that comes late is left out.
        if self.stopping or (self.data.callbacks and self.tasks.behind):
            return None
        limit = None
        if self.stop_after.steps:
            left = self.stop_after.steps - self.counters.steps - -(-ledger.outstanding() // self.batch_size)
            if left <= 0:
                return None
            limit = left * self.batch_size
        lease = ledger.grant(slot, incarnation, self._term, limit)
        return None if lease is None else self.data.told(lease)

    def _give_up(self, member: Member) -> None:
        """Fence a silent worker, so that nothing of it is taken any more, and free what it held."""
        self.shard.fence(member.slot, member.incarnation + 1)
        self._lose(member, WorkerState.FENCED, "silent for too long")

    def _lose(self, member: Member, state: WorkerState, why: str) -> None:
        held = bool(self.ledger and any(_holds(member, lease) for lease in self.ledger.leases.values()))
        if state is WorkerState.FENCED and member.state is not WorkerState.FENCED and held:
            self.counters.wasted_steps += 1  # the step that it was in, at the most
        member.state = state
        member.message = why or member.message
        self._last_pushes.pop((member.slot, member.incarnation), None)
        if self.ledger is not None:
            self.ledger.release(lambda lease: _holds(member, lease))
        self.tasks.release(member.slot, member.incarnation)

    def _end_passes(self) -> None:
        assert self.ledger is not None
        assert self.data is not None
        while self.tasks.evaluated < self.ledger.completed:
            logs = {} if self.pace.loss is None else {"loss": round(self.pace.loss, 6)}
            self.tasks.pass_ended(
                self.tasks.evaluated, logs, validation=self.data.validation, callbacks=self.data.callbacks
            )

    def _stop_after_steps(self) -> None:
        if self.stop_after.steps and self.counters.steps >= self.stop_after.steps:
            self._stop(f"{self.counters.steps} steps are done")

    def _stop(self, why: str) -> None:
        if self.stopping:
            return
        self.stopping = why
        now = self._clock()
        if self.ledger is not None:
            holders = {(lease.slot, lease.incarnation) for lease in self.ledger.leases.values()}
            self._last_pushes = {who: now + self.members.get(*who).patience for who in holders}

    def _settling(self) -> bool:
        """Whether pushes computed before the stop may still arrive: what is judged would not be what is exported."""
        if self._last_pushes:
            now = self._clock()
            self._last_pushes = {who: until for who, until in self._last_pushes.items() if now < until}
        return bool(self._last_pushes)

    def _wind_up(self) -> None:
        """Training is over: take what is leased back, evaluate what was not, export."""
        assert self.ledger is not None
        assert self.data is not None
        if self.stopping:
            self.ledger.release(lambda _: True)
        last = max(0, self.ledger.completed - (0 if self.stopping else 1))
        if self.stopping and self.tasks.evaluated <= last and not self.tasks.exported:
            logs = {} if self.pace.loss is None else {"loss": round(self.pace.loss, 6)}
            self.tasks.pass_ended(last, logs, validation=self.data.validation, callbacks=self.data.callbacks)
        self.tasks.export(last)


def _holds(member: Member, lease: Lease) -> bool:
    return (lease.slot, lease.incarnation) == (member.slot, member.incarnation)
