"""The job's brain: decides what each worker does next, from the first hello to the exported model.

It does no I/O and has no thread: calls come from the control server, from the shard (`applied`, inside the shard's
lock) and from a clock (`tick`). Its lock is the shard's own, so ledger and parameters change together, and a snapshot
sees both at one moment.

After the loss of parameter server 0 a new one replays on the snapshot's ledger the pushes that are in the surviving
parameters beyond the snapshot (the journal that came with them), so ledger, counters and parameters are of one moment
again. Then it **gathers**: for a moment it grants nothing and lets the workers that survived tell what they hold and
will push themselves, so that nobody else is given it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal_trainer.contract import (
    JobIdentity,
    StatusReport,
    StopAfter,
    TerminationMessage,
    WorkerState,
)
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.counters import Counters, wasted_by
from shoal_trainer.coordinator.ledger import Lease, Ledger, Segment
from shoal_trainer.coordinator.members import Member, Members
from shoal_trainer.coordinator.pace import Pace
from shoal_trainer.coordinator.partial import Partial
from shoal_trainer.coordinator.protocol import DataSpec, FileEnded, Given, Join, Joined, Renamed, TaskDone
from shoal_trainer.coordinator.protocol import Lease as LeaseMessage
from shoal_trainer.coordinator.target import target_reached
from shoal_trainer.coordinator.tasks import Task, Tasks
from shoal_trainer.errors import Fenced, Unreachable, UserError
from shoal_trainer.ps.contents import Contents
from shoal_trainer.ps.shard import AppliedPush, ShardStore, State
from shoal_trainer.wire.messages import Applied, Entry, Progress

log = logging.getLogger(__name__)

GATHER_SECONDS = 5.0
IDLE_SECONDS = 0.2


class Coordinator:
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
        self.job = job
        self.stop_after = stop_after
        self.batch_size = batch_size
        self.members = Members()
        self.tasks = Tasks()
        self.counters = Counters()
        self.partial = Partial()
        """The reconciler's."""
        self.ledger: Ledger | None = None
        self.data: DataSpec | None = None
        self.finished: TerminationMessage | None = None
        self.stopping = ""
        """Why training ends before its passes do."""
        self.pace = Pace()
        self.shard = shard
        self._term = shard.boot
        """What begins the tokens of this process: not the epoch, which stays where its container is started again."""
        self._lock = shard.lock
        self._clock, self._wall = clock, wall
        self._saved: dict[str, Any] | None = None
        self._restarted = shard.epoch > 0
        # One that follows another gathers even without a snapshot: the workers' copies may hold what was trained.
        self._gather_until: float | None = math.inf if self._restarted else None
        self._ready = False
        self._expected: set[int] | None = None
        self._task_counter = 0
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
            self.tick()
            if self.finished is not None:
                return Given(kind="finished", message=self.finished.message)
            behind = generation not in {None, self.shard.generation}
            gone = member.state in {WorkerState.DRAINED, WorkerState.LEFT}  # it asked before it said goodbye
            if self.ledger is None or self.gathering or behind or gone:
                return Given(kind="idle", seconds=IDLE_SECONDS)
            if number is None or member.asked != number or not self._still_holds(member):
                member.asked, member.given = number, self._give(slot, incarnation)
            assert member.given is not None
            return member.given

    def heartbeat(self, slot: int, incarnation: int, message: str = "") -> None:
        """It is alive."""
        with self._lock:
            self._hear(slot, incarnation).message = message

    def file_ended(self, request: FileEnded) -> None:
        """A file's length is known."""
        with self._lock:
            self._hear(request.slot, request.incarnation)
            if self.ledger is not None:
                self.ledger.file_ended(request.token, request.length)
                self.tick()

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
            self.tick()
            return task

    def held_task(self, slot: int, incarnation: int, token: tuple[int, int]) -> Task | None:
        """The task that this worker holds under this token: only for it files may be uploaded."""
        with self._lock:
            self._hear(slot, incarnation)
            return self.tasks.held(slot, incarnation, token)

    def leave(self, slot: int, incarnation: int) -> None:
        """It goes on purpose: the exact rest of what it held is free again."""
        with self._lock:
            member = self._hear(slot, incarnation)
            self._lose(member, WorkerState.DRAINED if self.finished is None else WorkerState.LEFT, "")

    def failed(self, slot: int, incarnation: int, message: str) -> None:
        """It ends because the user's code is at fault; what it held is free again."""
        with self._lock:
            member = self._hear(slot, incarnation)
            self._lose(member, WorkerState.LEFT, message)

    # --- the shard's side -----------------------------------------------------------------------------------------

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

    def ready(self, version: int, applied: Applied) -> None:
        """The shard has its parameters (called inside its lock): what its journal tells of is in them."""
        del version, applied
        self._ready = True
        self._replay()

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

    @property
    def begun(self) -> bool:
        """Whether something was trained, by this process or by one before it."""
        return self.pace.begun or self._saved is not None

    @property
    def gathering(self) -> bool:
        """Whether a restored coordinator still waits for the workers that survived."""
        return self._gather_until is not None

    def tick(self) -> None:
        """What follows from time alone, and from everything that has happened."""
        with self._lock:
            now = self._clock()
            for member in self.members.notice_silence(now):
                self._give_up(member)
            self.shard.set_live_workers(max(1, len(self.members.active())))
            if self._gather_until is not None and self.shard.state is State.READY:
                late = now >= self._gather_until
                if late or (self._expected is not None and not self._expected):
                    self._end_gathering()
            if self.ledger is None or self.gathering or self.finished is not None:
                return
            self._end_passes()
            if not self.stopping and self.stop_after.steps and self.counters.steps >= self.stop_after.steps:
                self._stop(f"{self.counters.steps} steps are done")
            if self.stopping or self.ledger.finished:
                self._wind_up()

    # --- telling --------------------------------------------------------------------------------------------------

    def status(self) -> StatusReport:
        """What the coordinator tells about the job. Shards and storage are the caller's to add."""
        with self._lock:
            return report.status(self, self._clock())

    def succeeded(self, model_uri: str, model_digest: str) -> TerminationMessage:
        """The message that ends the job, for its model is in the storage."""
        with self._lock:
            return report.succeeded(self, self._clock(), model_uri, model_digest)

    def end(self, message: TerminationMessage) -> None:
        """The job has ended: from now on every worker is told so."""
        with self._lock:
            self.finished = message

    # --- snapshots ------------------------------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether no worker has said yet, after a loss, what the data are: this is no moment to save.

        Of copies that the shards have adopted meanwhile the ledger would not know what they cover.
        """
        return self.ledger is None and self._restarted

    def dump(self) -> dict[str, Any]:
        """The coordinator's part of a snapshot's manifest. Call it inside the shard's lock, with the copy."""
        if self.ledger is None or self.data is None:
            return dict(self._saved or {})
        return {
            "ledger": self.ledger.dump(),
            "tasks": self.tasks.dump(),
            "counters": self.counters.dump(),
            "data": self.data.model_dump(mode="json"),
            "stopping": self.stopping,
            "loss": self.pace.loss,
        }

    def load(self, saved: dict[str, Any], *, other_run: bool = False) -> None:
        """Begin from a manifest's `ledger`, before any worker is here, and gather the survivors.

        `other_run`: what its workers held is free, and why it ended is no reason to end this one. There are survivors
        only of this run, where this process is not its first.
        """
        with self._lock:
            if not other_run:
                self._restarted, self._gather_until = True, math.inf
            if not saved:
                return
            if "partial" in saved:  # there are several shards
                self.partial.load(saved["partial"], other_run=other_run)
            self._saved = saved
            self._agree(DataSpec.model_validate(saved["data"]))
            assert self.ledger is not None
            if other_run:
                self.ledger.release(lambda _: True)
                self.stopping = ""
                return
            self._expected = {slot for slot, _ in self.shard.applied}
            self._expected |= {lease.slot for lease in self.ledger.leases.values()}

    def rewind(self, saved: dict[str, Any]) -> None:
        """Go back to a ledger while workers are here. Call it inside the shard's lock, with the parameters.

        What anybody holds is taken back, and the steps that are undone were in vain.
        """
        with self._lock:
            self._saved = saved
            wasted = wasted_by(saved, self.counters)
            if "partial" in saved:
                self.partial.load(saved["partial"])
            if self.data is None:
                self._agree(DataSpec.model_validate(saved["data"]))
            else:
                self._resume(saved)
            self.counters.wasted_steps = wasted
            self._expected = self._gather_until = None

    def blank_ledger(self, data: DataSpec) -> Ledger:
        """The ledger with which this job begins."""
        return Ledger(
            size=data.size,
            files=len(data.files),
            batch_size=self.batch_size,
            seed=self.job.uid,
            epochs=self.stop_after.epochs,
        )

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
        if self._gather_until == math.inf:
            self._gather_until = self._clock() + GATHER_SECONDS
        return member

    def _agree(self, data: DataSpec) -> None:
        if self.data is None:
            if data.size is None and not data.files:
                raise UserError(
                    "The training data are empty: give Indexed a size, or Files a pattern that matches."
                )
            self.data = data
            self.ledger = self.blank_ledger(data)
            if self._saved is not None:
                self._resume(self._saved)
            self._replay()
        elif (self.data.size, self.data.files) != (data.size, data.files):
            mine, theirs = self.data.size or len(self.data.files), data.size or len(data.files)
            raise UserError(
                f"This worker's training data are not the job's: {theirs} {'samples' if data.size else 'files'} here, "
                f"{mine} {'samples' if self.data.size else 'files'} there. Every worker must see the same data."
            )
        elif (data.validation, data.callbacks) != (self.data.validation, self.data.callbacks):
            self.data = data

    def _resume(self, saved: dict[str, Any]) -> None:
        assert self.ledger is not None
        self.ledger.load(saved["ledger"])
        self.tasks.load(saved["tasks"])
        self.counters.load(saved["counters"])
        self.stopping = str(saved["stopping"])
        self.pace.loss = saved["loss"]

    def _give(self, slot: int, incarnation: int) -> Given:
        """The next task, else the next range."""
        given = self._next_for(slot, incarnation)
        if given.kind == "idle" and (silent := self.members.silent()):
            # Nobody waits for one that is probably gone: what it held goes to those who ask.
            for member in silent:
                self._give_up(member)
            given = self._next_for(slot, incarnation)
        return given

    def _next_for(self, slot: int, incarnation: int) -> Given:
        self._task_counter += 1
        token = (self._term, self._task_counter)
        if (task := self.tasks.grant(slot, incarnation, token)) is not None:
            history = tuple(self.tasks.history[: task.epoch + 1])
            return Given(kind="task", task=task.kind, token=token, epoch=task.epoch, history=history)
        if (lease := self._lease(slot, incarnation)) is not None:
            return Given(kind="data", lease=lease)
        return Given(kind="idle", seconds=IDLE_SECONDS)

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
        if self.stopping:
            return None
        limit = None
        if self.stop_after.steps:
            left = self.stop_after.steps - self.counters.steps - -(-ledger.outstanding() // self.batch_size)
            if left <= 0:
                return None
            limit = left * self.batch_size
        lease = ledger.grant(slot, incarnation, self._term, limit)
        assert self.data is not None
        return None if lease is None else self.data.told(lease)

    def _reclaim(self, request: Join) -> tuple[Renamed, ...]:
        """A survivor of the loss of parameter server 0 tells what it held: from its last answered push on."""
        ledger, renamed = self.ledger, []
        assert ledger is not None
        for held in request.held:
            if held.term == self._term:
                lease = ledger.leases.get(held.token)
            else:
                segment = Segment(held.epoch, held.number, held.start, held.stop)
                lease = ledger.reclaim(request.slot, request.incarnation, self._term, segment)
            if lease is not None:
                renamed.append(Renamed(old=held.token, new=lease.token))
        return tuple(renamed)

    def _end_gathering(self) -> None:
        """Everybody who survived has spoken: what nobody claimed is free."""
        self._gather_until = None
        if self.ledger is not None:
            self.ledger.release(lambda lease: lease.token[0] != self._term)

    def _replay(self) -> None:
        """Bring the ledger to the moment of the parameters, once both are there."""
        if not self._ready or self.ledger is None:
            return
        for entry in self.shard.journal.since(-1).entries:
            self.counters.steps += entry.steps
            self._count(entry)

    def _count(self, part: Progress | Entry) -> None:
        """These positions are in the parameters; those that were there before are in them once more now."""
        assert self.ledger is not None
        for again in self.ledger.apply(Segment(part.epoch, part.file, part.start, part.stop)):
            self.counters.repeated += (again.stop or again.start) - again.start
            self.counters.repeated_ranges |= {(again.epoch, r) for r in self.ledger.range_of(again)}

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

    def _stop(self, why: str) -> None:
        self.stopping = self.stopping or why

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
