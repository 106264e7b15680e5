"""The coordinator of a job: assigns work to the workers, from the first join to the exported model.

It has no I/O and no thread: it is called by the control server, by the shard (`applied`) and by a timer (`tick`). It
shares the shard's lock, so that ledger and parameters change together, and a snapshot contains both in one state.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal_trainer.contract import (
    SILENCE_SECONDS,
    JobIdentity,
    StatusReport,
    StopAfter,
    TerminationMessage,
    WorkerState,
)
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.beside import Beside
from shoal_trainer.coordinator.gathering import Gathering, reclaimed
from shoal_trainer.coordinator.last_pushes import RESEND_SECONDS, LastPushes
from shoal_trainer.coordinator.lease_index import Lease, Segment
from shoal_trainer.coordinator.members import Member, Members
from shoal_trainer.coordinator.model_facts import ModelFacts
from shoal_trainer.coordinator.protocol import (
    Alive,
    Assignment,
    FileEnded,
    Join,
    Joined,
    Leave,
    TaskDone,
)
from shoal_trainer.coordinator.protocol import Lease as LeaseMessage
from shoal_trainer.coordinator.record import Record
from shoal_trainer.coordinator.speeds import Speeds
from shoal_trainer.coordinator.stop_target import target_reached
from shoal_trainer.coordinator.task_queue import Task
from shoal_trainer.errors import Fenced, Unreachable
from shoal_trainer.ps.contents import Contents
from shoal_trainer.ps.shard import AppliedPush, ShardStore, State
from shoal_trainer.wire.messages import Applied

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.2
ASKS_PER_SECOND = 1000
"""The limit for all idle workers together; with many workers, each asks less often."""


class Coordinator:
    """The coordinator of one job, next to shard 0. Thread-safe."""

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
        self.record = Record(job, stop_after, batch_size, shard.shards)
        self.shard = shard
        self.members = Members()
        self.facts = ModelFacts()
        self.speeds = Speeds(shard.shards)
        self.beside = Beside()
        self.finished: TerminationMessage | None = None
        self._lock = shard.lock
        self._clock = clock
        self._last_pushes = LastPushes(shard.shards)
        self._term = shard.boot
        """First part of this process' tokens. Not the epoch, which a restarted container keeps."""
        self._restarted = shard.follows
        self._resumed = False
        """Whether it began with a snapshot of this run."""
        self._ready = False
        self._nothing_left = False
        """Whether shard 0 follows an earlier process of this run, of which neither a snapshot nor a copy is left."""
        self._begun_with = 0
        """The samples in the parameters when the shard became ready."""
        self._gathering = Gathering(clock)
        if self._restarted:  # also without a snapshot: the workers' copies may contain trained parameters
            self._gathering.begin()
        self._wall = wall
        self._task_counter = 0
        self.compare_soon: Callable[[], None] = lambda: None
        self.snapshot_soon: Callable[[], None] = lambda: None  # both calls wake a thread
        shard.stopped = lambda: self._term if self.record.stopping else 0
        shard.on_applied = self.applied
        shard.on_ready = self.ready

    # --- workers --------------------------------------------------------------------------------------------------

    def join(self, request: Join) -> Joined:
        """A worker joins.

        `Fenced` for an older incarnation, `UserError` for other data, `Unreachable` if a rollback or join overtook it.
        """
        with self._lock:
            member = self._contact(request.slot, request.incarnation)
            if request.leases and request.generation != self.shard.history.generation:
                raise Unreachable("the job has rolled back: connect to the parameter servers again")
            if 0 < request.number <= member.join_number:
                raise Unreachable("this worker has sent another request to join")
            member.join_number = request.number
            member.node, member.batch_size = request.node, request.batch_size
            member.device, member.device_name = request.device, request.device_name
            member.devices, member.cores = request.devices, request.cores
            self.facts.tensors = max(self.facts.tensors, request.tensors)
            if member.left:
                member.state = WorkerState.ACTIVE
            for older in self.members.older(request.slot, request.incarnation):
                self._remove(older, WorkerState.FENCED, "its successor has joined")
            self.shard.workers.fence(request.slot, request.incarnation)
            if self.record.set_data(request.data):
                self._replay()
            assert self.record.ledger is not None
            self._count_restart(request.known_samples)
            self._gathering.joined(request.slot)
            self.record.counters.wasted_steps += member.newly_wasted(request)
            joined = Joined(renamed=reclaimed(self.record.ledger, self._term, request))
            if self.record.stopping and joined.renamed:  # it may send a push again
                self._last_pushes.expect((member.slot, member.incarnation), self._clock() + RESEND_SECONDS)
            return joined

    def next_work(
        self,
        slot: int,
        incarnation: int,
        generation: int | None = None,
        number: int | None = None,
        stopped: int | None = None,
    ) -> Assignment:
        """Assign work; none while the worker's parameters are of another generation.

        A request with the same `number` gets the same assignment, if the worker still holds it. `stopped`: see `Next`.
        """
        with self._lock:
            member = self._contact(slot, incarnation)
            if stopped == self._term:
                self._last_pushes.informed((slot, incarnation), self._clock())
            self._advance()
            if self.finished is not None:
                return Assignment(kind="finished", message=self.finished.message)
            if number is not None and number <= member.request_number:
                current = number == member.request_number and self._still_holds(member)
                return (current and member.assignment) or self._idle()  # it might never read a new assignment
            outdated = generation not in {None, self.shard.history.generation}
            waits = self.record.ledger is None or self._gathering.on or outdated or member.left
            member.assignment = self._idle() if waits else self._assign(slot, incarnation)
            member.request_number = number or 0
            return member.assignment

    def heartbeat(
        self,
        slot: int,
        incarnation: int,
        message: str = "",
        flops_per_sample: float | None = None,
        beside: tuple[float, float] = (0.0, 0.0),
    ) -> Alive:
        """Record a heartbeat; the answer asks the first worker that trains to count the model's FLOPs.

        `beside`: the worker's seconds in tasks, and without work, so far.
        """
        with self._lock:
            member, now = self._contact(slot, incarnation), self._clock()
            member.message = message
            tasks, waits = member.passed_beside(*beside)
            if self._trains:
                self.beside.passed(member.rate, tasks, waits)
            if flops_per_sample is not None:
                self.facts.counted(flops_per_sample)
            count = member.steps > 0 and member.pushes(now) and self.facts.wants_flops(now)
            rate = self.record.tasks.learning_rate
            return Alive(finished=self.finished is not None, learning_rate=rate, count_flops=count)

    def file_ended(self, request: FileEnded) -> None:
        """Record the length of a leased file."""
        with self._lock:
            self._contact(request.slot, request.incarnation)
            if self.record.ledger is not None:
                self.record.ledger.file_ended(request.token, request.length)
                self._advance()

    def task_done(self, request: TaskDone) -> Task | None:
        """Record the result of a task; None, without effect, if the task was reassigned."""
        with self._lock:
            self._contact(request.slot, request.incarnation)
            metrics = {n: v for n, v in request.metrics.items() if v is not None and math.isfinite(v)}
            if (
                task := self.record.tasks.done(request.token, metrics, self._clock(), request.learning_rate)
            ) is None:
                return None
            if task.kind == "callbacks" and request.stop:
                self._stop("a callback stopped training")
            if task.kind == "evaluate" and (
                reached := target_reached(self.record.stop_after, request.metrics)
            ):
                self._stop(reached)
            self._advance()
            return task

    def held_task(self, slot: int, incarnation: int, token: tuple[int, int]) -> Task | None:
        """The task that this worker holds under this token; None if it holds none."""
        with self._lock:
            self._contact(slot, incarnation)
            return self.record.tasks.held(slot, incarnation, token)

    def leave(self, request: Leave) -> None:
        """A worker leaves: release the rest of its leases, and refuse later pushes."""
        with self._lock:
            member = self._contact(request.slot, request.incarnation)
            self.record.counters.wasted_steps += member.newly_wasted(request)
            self.shard.workers.leave(request.slot, request.incarnation)
            self._remove(member, WorkerState.DRAINED if self.finished is None else WorkerState.LEFT, "")

    def failed(self, slot: int, incarnation: int, message: str) -> None:
        """A worker ends because of an error in the user's code: release its leases."""
        with self._lock:
            member = self._contact(slot, incarnation)
            self.shard.workers.leave(slot, incarnation)
            self._remove(member, WorkerState.LEFT, message)

    # --- called by the shard --------------------------------------------------------------------------------------

    def ready(self, version: int, applied: Applied) -> None:
        """The shard has its parameters: register the incarnations whose pushes they contain, and replay its journal.

        Called inside its lock.
        """
        self.members.restore_newest(applied)
        self._ready = True
        self._nothing_left = self._restarted and not self._resumed and version == 0
        self._begun_with = self.shard.history.samples
        self._gathering.ready(slot for slot, _ in applied)
        self._replay()

    def applied(self, push: AppliedPush) -> None:
        """Record a push that shard 0 applied. Called inside its lock."""
        member, now = self.members.get(push.slot, push.incarnation), self._clock()
        self.members.contact(member, now)
        if member.first_push_at is None:
            member.first_push_at = self._wall()
        meta = push.meta
        member.last_push = now
        member.pushed(meta.steps, meta.samples, push.staleness, meta.timings)
        if member.device:  # it has joined this coordinator
            self.speeds.pushed(now, member.key, lambda: member.configuration, meta.timings)
        self.record.pace.pushed(now, meta.samples, meta.loss)
        self.record.means.pushed(meta)
        if self._ready and self.record.ledger is not None:
            self.record.counters.steps += meta.steps
            self.record.counters.lost += min(meta.left_out, meta.samples)
            for mark in meta.progress:
                self.record.count(mark)
            if not self._gathering.on:  # workers that have not joined yet may hold leases
                self._stop_after_steps()
        # Its answer reports the stop, so this worker pushes no more.
        self._last_pushes.arrived((push.slot, push.incarnation), now + member.push_limit)

    def count_partial(self, shards: Sequence[Contents], *, at_end: bool = False) -> bool:
        """Count the partial samples of these shards (`sides`); returns whether pushes may be in flight.

        `at_end`: pushes in flight count as partial.
        """
        with self._lock:
            if self.record.ledger is None:
                raise Unreachable("no worker has joined yet, so the data are unknown")
            present = {(member.slot, member.incarnation) for member in self.members.present()}
            marks, in_flight = self.record.partial.count(shards, present, at_end=at_end)
            self.record.counters.partial = sum(mark.stop - mark.start for mark in marks)
            self.record.counters.partial_ranges = self.record.ledger.ranges_of(
                Segment(*mark) for mark in marks
            )
            self._last_pushes.epoch_compared(lambda worker: min(s.last(worker) for s in shards), present)
            if shards[0].spans() == self.shard.history.contents.spans():
                self._last_pushes.compared(in_flight=in_flight)
            return in_flight

    # --- saved and restored -----------------------------------------------------------------------------------------

    @property
    def data_unknown(self) -> bool:
        """Whether no worker has joined since a restart without a ledger: no snapshot may be taken.

        Its ledger would lack the positions in the copies that the shards have adopted.
        """
        return self.record.ledger is None and self._restarted

    @property
    def gathering(self) -> bool:
        """Whether a restarted coordinator waits for the surviving workers."""
        return self._gathering.on

    def load(self, saved: dict[str, Any], *, other_run: bool = False) -> None:
        """Start from a manifest's `ledger`, before any worker joins, and gather the surviving workers.

        `other_run`: the manifest is another run's, none of whose workers survive. Its leases, its reason to stop, its
        export, and the tasks of an epoch that it did not complete are dropped.
        """
        with self._lock:
            if not other_run:
                self._restarted = self._resumed = True
                self._gathering.begin()
            if not saved:
                return
            self.record.load(saved, other_run=other_run)
            self._replay()
            if not other_run:
                assert self.record.ledger is not None
                slots = {slot for slot, _ in self.shard.history.applied}
                self._gathering.expect(slots | {lease.slot for lease in self.record.ledger.leases.values()})

    def rewind(self, saved: dict[str, Any]) -> None:
        """Roll back to a saved record. Call it inside the shard's lock, with the parameters."""
        with self._lock:
            unknown = self.record.data is None
            self.record.rewind(saved)
            if unknown:
                self._replay()
            self._last_pushes.clear()
            self._gathering.end()
            self.speeds.disturbed(self._clock())

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Detect silent workers. Called a few times a second; only this iterates over all members."""
        with self._lock:
            for member in self.members.notice_silence(self._clock()):
                self._fence(member)
            self.shard.workers.set_live(
                sum(self.shard.workers.connected(m.slot) for m in self.members.active()) or 1
            )
            self._advance()
            self._measure()

    def disturbed(self) -> None:
        """A server was lost or rolled back: the speeds before and after it are not to be mixed."""
        with self._lock:
            self.speeds.disturbed(self._clock())

    # --- status ---------------------------------------------------------------------------------------------------

    def status(self) -> StatusReport:
        """The status report, without shards and storage."""
        with self._lock:
            return report.status(self, self._clock())

    def succeeded(self, note: str = "") -> TerminationMessage:
        """The termination message of a successful job, with a note about its model, but without the model's URI."""
        with self._lock:
            return report.succeeded(self, self._clock(), note)

    def end(self, message: TerminationMessage) -> None:
        """The job has ended: answer every request for work with `finished`."""
        with self._lock:
            self.finished = message

    # --- internals ------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Observe who trains: the speeds are sums over a time in which that does not change."""
        now = self._clock()
        if (holder := self.record.tasks.holder) is not None:
            self.members.get(*holder).last_push = now  # it has a task, and will push again
            self.speeds.task(now)
        training = self._trains and not self.record.tasks.ending
        team = [member for member in self.members.active() if member.pushes(now)] if training else []
        slowest = max((member.push_seconds or 0.0 for member in team), default=0.0)
        self.speeds.observe(now, frozenset(member.key for member in team), slowest)

    @property
    def _trains(self) -> bool:
        """Whether there are epochs to train, after all that is known: not the last tasks, nor a recovery."""
        ledger = self.record.ledger
        return not (ledger is None or ledger.finished or self._gathering.on or self.record.stopping)

    def _contact(self, slot: int, incarnation: int) -> Member:
        if incarnation < self.members.newest(slot):
            raise Fenced(f"slot {slot} has a newer incarnation than {incarnation}")
        member = self.members.get(slot, incarnation)
        if member.state is WorkerState.FENCED:
            raise Fenced(
                f"worker {slot} incarnation {incarnation} was silent for too long and has been fenced"
            )
        self.members.contact(member, self._clock())
        self._gathering.heard_of(slot)
        return member

    def _replay(self) -> None:
        """Apply the journal to the ledger once parameters and ledger exist."""
        if self._ready and self.record.ledger is not None:
            self.record.replay(self.shard.history.journal.since(-1).entries)

    def _count_restart(self, known_samples: int) -> None:
        """Count a restart from nothing, once a worker that has survived it says that samples had been trained.

        They are trained again; those in the parameters, which a worker's copy may have saved, are then there twice.
        """
        if self._nothing_left and known_samples > self._begun_with:
            self._nothing_left = False
            self.record.counters.restarted_from_nothing += 1
            self.record.counters.repeated += max(0, self.shard.initial_samples - self._begun_with)

    def _advance(self) -> None:
        """Complete epochs and stop training where due. Called by each request, so it must be cheap."""
        if self.shard.state is State.READY and self._gathering.over():
            self._gathering.end()
            if self.record.ledger is not None:  # the leases of earlier terms that no worker presented
                self.record.ledger.release(lambda lease: lease.token[0] != self._term)
            self._last_pushes.compare_until(self._clock() + SILENCE_SECONDS)  # a push may be sent again
            if self.record.stopping:
                self._expect_last_pushes()
        if self.record.ledger is None or self._gathering.on or self.finished is not None:
            return
        while self.record.tasks.evaluated < self.record.ledger.completed:
            self._end_epoch(self.record.tasks.evaluated)
        self._stop_after_steps()
        if self.record.stopping or self.record.ledger.finished:
            self._finish_training()

    def _idle(self) -> Assignment:
        return Assignment(kind="idle", seconds=max(IDLE_SECONDS, self.shard.workers.live / ASKS_PER_SECOND))

    def _assign(self, slot: int, incarnation: int) -> Assignment:
        """Assign the next task, else the next range; fence silent workers if that frees work for an idle one."""
        assignment = self._next_assignment(slot, incarnation)
        if assignment.kind == "idle" and (silent := self._silent_holders()):
            for member in silent:
                self._fence(member)
            assignment = self._next_assignment(slot, incarnation)
        return assignment

    def _silent_holders(self) -> list[Member]:
        """The silent members that hold a lease, whose last push is awaited, or that the first task waits for."""
        silent = self.members.silent()
        if not silent or self.record.ledger is None:
            return []
        holders = {(lease.slot, lease.incarnation) for lease in self.record.ledger.leases.values()}
        holders |= set(self._last_pushes.workers(self._clock()))
        holders |= {place for place in (self.record.tasks.awaited(self._clock()),) if place is not None}
        return [member for member in silent if (member.slot, member.incarnation) in holders]

    def _next_assignment(self, slot: int, incarnation: int) -> Assignment:
        if self._awaits_last_pushes():
            return self._idle()
        self._task_counter += 1
        token = (self._term, self._task_counter)
        if self.record.tasks.queue and self._last_pushes.evaluation_waits(self._clock()):
            self.compare_soon()
        elif (task := self.record.tasks.grant(slot, incarnation, token, self._clock())) is not None:
            history = tuple(self.record.tasks.history[: task.epoch + 1]) if task.kind == "callbacks" else ()
            return Assignment(
                kind="task",
                task=task.kind,
                token=token,
                epoch=task.epoch,
                history=history,
                learning_rate=self.record.tasks.learning_rate,
            )
        if (lease := self._lease(slot, incarnation)) is not None:
            return Assignment(kind="data", lease=lease)
        return self._idle()

    def _still_holds(self, member: Member) -> bool:
        """Whether this worker still holds its last assignment."""
        if (assignment := member.assignment) is None or self.record.ledger is None:
            return False
        if assignment.lease is not None:
            lease = self.record.ledger.leases.get(assignment.lease.token)
            return lease is not None and _holds(member, lease)
        return self.record.tasks.held(member.slot, member.incarnation, assignment.token) is not None

    def _lease(self, slot: int, incarnation: int) -> LeaseMessage | None:
        ledger = self.record.ledger
        assert ledger is not None
        assert self.record.data is not None
        # Callbacks need the parameters near the end of each epoch (EarlyStopping's patience, checkpoints), so training
        # stays at most one epoch ahead of them, and half an epoch until the evaluation begins: else two epochs would be
        # judged by the same parameters. Without callbacks, a late evaluation is skipped.
        half_of = None
        if self.record.stopping or (self.record.data.callbacks and self.record.tasks.lagging):
            return None
        if self.record.data.callbacks:
            half_of = self.record.tasks.first_unjudged(ledger.completed, self._trains_first) + 1
        limit = None
        if self.record.stop_after.steps:
            leased_steps = -(-ledger.outstanding() // self.record.batch_size)
            remaining = self.record.stop_after.steps - self.record.counters.steps - leased_steps
            if remaining <= 0:
                return None
            limit = remaining * self.record.batch_size
        lease = ledger.grant(slot, incarnation, self._term, limit, half_of)
        return None if lease is None else self.record.data.lease_message(lease)

    def _trains_first(self, place: tuple[int, int]) -> bool:
        """Whether this worker has steps to do before its task; files are also downloaded ahead, for after it."""
        leases = self.record.ledger.leases.values() if self.record.ledger else ()
        return any(lease.segment.file < 0 and (lease.slot, lease.incarnation) == place for lease in leases)

    def _fence(self, member: Member) -> None:
        """Fence a silent worker, so that its pushes are refused, and release its leases."""
        self.shard.workers.fence(member.slot, member.incarnation + 1)
        self._remove(member, WorkerState.FENCED, "silent for too long")

    def _remove(self, member: Member, state: WorkerState, reason: str) -> None:
        works = bool(
            self.record.ledger and any(_holds(member, lease) for lease in self.record.ledger.leases.values())
        )
        works |= (member.slot, member.incarnation) in self._last_pushes.workers(self._clock())
        if state is WorkerState.FENCED and member.state is not WorkerState.FENCED and works:
            self.record.counters.wasted_steps += 1  # at most the step in progress
        member.state = state
        member.message = reason or member.message
        self._last_pushes.drop((member.slot, member.incarnation))
        if self.record.ledger is not None:
            self.record.ledger.release(lambda lease: _holds(member, lease))
        self.record.tasks.release(member.slot, member.incarnation)

    def _end_epoch(self, epoch: int) -> None:
        assert self.record.data is not None
        logs = self.record.means.end(epoch, self.record.pace.loss)
        if self._trains:
            self.beside.epoch_ended(len(self.members.active()))
        self.record.tasks.epoch_ended(
            epoch, logs, validation=self.record.data.validation, callbacks=self.record.data.callbacks
        )
        self._last_pushes.epoch_ended(self.shard.history.applied, self._clock() + RESEND_SECONDS)

    def _stop_after_steps(self) -> None:
        if self.record.stop_after.steps and self.record.counters.steps >= self.record.stop_after.steps:
            self._stop(f"{self.record.counters.steps} steps are done")

    def _stop(self, reason: str) -> None:
        if self.record.stopping:
            return
        self.record.stopping = reason
        self._expect_last_pushes()

    def _expect_last_pushes(self) -> None:
        """After a stop, each worker that holds a lease may push once more."""
        now = self._clock()
        for lease in self.record.ledger.leases.values() if self.record.ledger else ():
            member = self.members.get(lease.slot, lease.incarnation)
            self._last_pushes.expect((lease.slot, lease.incarnation), now + member.push_limit)

    def _awaits_last_pushes(self) -> bool:
        """Whether training has ended, but pushes may arrive that an evaluation would lack and the export contain."""
        if not self.record.stopping and (self.record.ledger is None or not self.record.ledger.finished):
            return False
        now = self._clock()
        if self._last_pushes.workers(now):
            return True
        if self._last_pushes.comparison_due(now):
            self.compare_soon()
            return True
        return False

    def _finish_training(self) -> None:
        """Release all leases if training stops early; after the last pushes, queue the last evaluation and the export.

        The epoch in which training stops has an evaluation unless it has no batch.
        """
        assert self.record.ledger is not None
        if self.record.stopping:
            self.record.ledger.release(lambda _: True)
        if self._awaits_last_pushes():
            return
        begun = self.record.ledger.begun
        last = max(0, self.record.ledger.completed - (0 if begun else 1))
        if begun and self.record.tasks.evaluated <= last and not self.record.tasks.exported:
            self._end_epoch(last)
        if self.record.tasks.export(last):
            self.snapshot_soon()  # a shard that is lost during these tasks would change the model


def _holds(member: Member, lease: Lease) -> bool:
    return (lease.slot, lease.incarnation) == (member.slot, member.incarnation)
