"""The coordinator of a job: assigns work to the workers, from the first join to the exported model.

It has no I/O and no thread: it is called by the control server, by the shard (`applied`) and by a timer (`tick`). It
shares the shard's lock, so that ledger and parameters change together, and a snapshot contains both in one state.

A call notes what has happened, in `members` and `record`; what follows is decided by `course`, and what a worker gets
to do by `assigning`. How the process gets parameters and ledger is in `beginning`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from shoal_trainer.contract import JobIdentity, StopAfter, TerminationMessage, WorkerState
from shoal_trainer.coordinator.assigning import Assigning
from shoal_trainer.coordinator.beginning import Beginning
from shoal_trainer.coordinator.course import Course
from shoal_trainer.coordinator.departures import Departures
from shoal_trainer.coordinator.file_list import FileList
from shoal_trainer.coordinator.gathering import reclaimed
from shoal_trainer.coordinator.last_pushes import RESEND_SECONDS
from shoal_trainer.coordinator.lease_index import Segment
from shoal_trainer.coordinator.members import Member, Members
from shoal_trainer.coordinator.model_facts import ModelFacts
from shoal_trainer.coordinator.protocol import (
    Alive,
    Assignment,
    Failed,
    FileEnded,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Next,
    TaskDone,
    UnsentFiles,
)
from shoal_trainer.coordinator.record import Record
from shoal_trainer.coordinator.speeds import Speeds
from shoal_trainer.coordinator.stop_target import target_reached
from shoal_trainer.coordinator.stuck import Stuck
from shoal_trainer.coordinator.task_queue import Task
from shoal_trainer.errors import Fenced, Overtaken, Unreachable, UserError
from shoal_trainer.ps.contents import Contents, Worker
from shoal_trainer.ps.shard import AppliedPush, ShardStore
from shoal_trainer.wire.messages import Applied

SILENT = "silent for too long"


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
        self.blank = partial(Record, job, stop_after, batch_size, shard.shards)
        """Makes the record of this job before training."""
        self.record = self.blank()
        self.shard = shard
        self.members = Members()
        self.stuck = Stuck()
        self.facts = ModelFacts()
        self.speeds = Speeds(shard.shards)
        self.finished: TerminationMessage | None = None
        self.lock = shard.lock
        self.clock, self._wall = clock, wall
        self._term = shard.boot
        """First part of this process' tokens. Not the epoch, which a restarted container keeps."""
        self.course = Course(self.record, self.members, shard, self._term, clock)
        self._assigning = Assigning(self.record, self.course, self.members, self._term, clock)
        self._file_list = FileList(clock)
        self.departures = Departures(self.record, self.course.last_pushes, shard.workers, clock)
        self.beginning = Beginning(self.record, self.course, shard)
        shard.stopped = lambda: self._term if self.record.stopping else 0
        shard.on_applied = self.applied
        shard.on_ready = self.ready

    # --- workers --------------------------------------------------------------------------------------------------

    def join(self, request: Join) -> Joined:
        """A worker joins.

        `Fenced` for an older incarnation, `UserError` for other data, `Unreachable` if a rollback or join overtook it,
        or another worker is sending the list of files that this one may have to send.
        """
        with self.lock:
            member = self._contact(request.worker)
            if request.leases and request.generation != self.shard.history.generation:
                raise Unreachable("the job has rolled back: connect to the parameter servers again")
            _check_newest(member, request)
            if self.record.wants_files(request.data):
                return self._file_list.ask(request.worker)
            self._file_list.joins(request.worker)
            member.joins(request)
            self.facts.tensors = max(self.facts.tensors, request.tensors)
            self.facts.precision = self.facts.precision or request.precision
            self.departures.succeeded(self.members.older(request.worker), request.worker)
            if self.record.set_data(request.data, request.batch_size):
                self.beginning.replay()
            assert self.record.ledger is not None
            # Before others run callbacks.
            self.record.tasks.joins(request.worker, request.unsent, request.called, request.written)
            self.beginning.survived(request.known_samples)
            self.course.gathering.joined(request.slot)
            self.record.counters.wasted_steps += member.newly_wasted(request)
            joined = Joined(renamed=reclaimed(self.record.ledger, self._term, request))
            if self.record.stopping and joined.renamed:  # it may send a push again
                self.course.last_pushes.expect(request.worker, self.clock() + RESEND_SECONDS)
            return joined

    def next_work(self, request: Next) -> Assignment:
        """Assign work; none while the worker's parameters are of another generation.

        A request with the same `number` gets the same assignment, if the worker still holds it.
        """
        with self.lock:
            member = self._contact(request.worker)
            if request.stopped == self._term:
                self.course.last_pushes.informed(request.worker, self.clock())
            self._advance()
            if self.finished is not None:
                return Assignment(kind="finished", message=self.finished.message)
            if request.number > member.request_number:
                term, epochs = request.told
                member.epochs_told = epochs if term == self._term else 0
                current = request.generation == self.shard.history.generation
                assigns = current and self.course.grants and not member.left
                member.assignment = self._assign(member) if assigns else None
                idle = member.assignment is None and not self._assigning.busy(request.worker)
                member.idle_since = min(member.idle_since, self.clock()) if idle else math.inf
                member.request_number = request.number
            elif request.number < member.request_number:
                return self._idle()  # nobody might ever read its answer
            assigned = member.assignment
            if assigned is not None and self._assigning.holds(request.worker, assigned):
                return assigned
            return self._idle()

    def heard(self, worker: Worker) -> None:
        """This worker has made contact; `Fenced` if it was replaced."""
        with self.lock:
            self._contact(worker)

    def heartbeat(self, request: Heartbeat) -> Alive:
        """Record a heartbeat; the answer asks the first worker that trains to count the model's FLOPs."""
        with self.lock:
            member, now = self._contact(request.worker), self.clock()
            member.message = request.message
            self.stuck.heard(member, request.reading_seconds, request.outage_seconds, now)
            passed = member.passed_beside(request.task_seconds, request.wait_seconds)
            self.course.passed_beside(self.members.rate_of(member), *passed)
            if request.flops_per_sample is not None:
                self.facts.counted(request.flops_per_sample)
            count = member.steps > 0 and member.pushes(now) and self.facts.wants_flops(now)
            rate = self.record.tasks.learning_rate
            return Alive(finished=self.finished is not None, learning_rate=rate, count_flops=count)

    def file_ended(self, request: FileEnded) -> None:
        """Record the length of a leased file; `UserError` once all are empty."""
        with self.lock:
            self._contact(request.worker)
            if self.record.ledger is not None:
                self.record.ledger.file_ended(request.token, request.length)
                if self.record.ledger.total() == 0:
                    raise UserError("Every file of the training data is empty.")
                self._advance()

    def task_done(self, request: TaskDone) -> Task | None:
        """Record the result of a task; None, without effect, if the task was reassigned.

        `Unreachable` while the files of the last callbacks have yet to be sent: nobody would write them again, if their
        worker were lost, and nothing else is to be done.
        """
        with self.lock:
            self._contact(request.worker)
            held = self.record.tasks.held(request.worker, request.token)
            last = held is not None and held.kind == "callbacks" and (request.stop or self.record.over)
            if last and self.record.tasks.files.sender is not None:
                raise Unreachable("the storage has yet to take the files of the last callbacks")
            metrics = {n: v for n, v in request.metrics.items() if v is not None and math.isfinite(v)}
            task = self.record.tasks.done(request.token, metrics, self.clock(), request.learning_rate)
            if task is None:
                return None
            self.record.tasks.leave_out(request.left_out, request.written)
            if task.kind == "callbacks" and request.stop:
                self.course.stop("a callback stopped training")
            if task.kind == "evaluate" and (
                reached := target_reached(self.record.stop_after, request.metrics)
            ):
                self.course.stop(reached)
            self._advance()
            return task

    def unsent_files(self, request: UnsentFiles) -> None:
        """Files of callbacks come later. `Overtaken` if another worker has run callbacks since.

        `Unreachable` if a later word of this worker overtook it.
        """
        with self.lock:
            tasks, member = self.record.tasks, self._contact(request.worker)
            _check_newest(member, request)
            member.word_number = max(member.word_number, request.number)
            copies = dict(zip(request.names, request.copies, strict=False))
            said = request.names, request.called, request.written, copies
            if member.left or not tasks.sends_later(request.worker, *said):
                raise Overtaken("another worker runs the callbacks now")
            tasks.leave_out(request.left_out, request.written)
            if not request.names:  # it has sent all, and a snapshot may say that they are lost
                self.course.snapshot_soon()

    def sends_later(self, worker: Worker, name: str) -> bool:
        """Whether this worker may send this file of callbacks that are done.

        `Unreachable`, and no refusal, before it has told this process which come: it may know better than a snapshot.
        """
        with self.lock:
            member = self._contact(worker)
            may = self.record.tasks.files.missing.get(name) == worker
            if not may and member.word_number == 0:
                raise Unreachable("this worker has not said yet which files come later")
            return may

    def lacks(self, name: str) -> bool:
        """Whether the storage does not have this file of callbacks as it was written last."""
        with self.lock:
            return name in self.record.tasks.files.missing

    def held_task(self, worker: Worker, token: tuple[int, int]) -> Task | None:
        """The task that this worker holds under this token; None if it holds none."""
        with self.lock:
            self._contact(worker)
            return self.record.tasks.held(worker, token)

    def leave(self, request: Leave) -> None:
        """A worker leaves: release the rest of its leases, and refuse later pushes. Files that still wait are lost."""
        with self.lock:
            member = self._contact(request.worker)
            self.record.counters.wasted_steps += member.newly_wasted(request)
            if request.files is not None and self.record.tasks.files.are_of(request.worker):
                with suppress(Overtaken):
                    self.unsent_files(request.files)
            self.departures.left(
                member, WorkerState.DRAINED if self.finished is None else WorkerState.LEFT, ""
            )

    def failed(self, request: Failed) -> None:
        """A worker ends because of an error in the user's code: release its leases."""
        with self.lock:
            self.departures.left(self._contact(request.worker), WorkerState.LEFT, request.message)

    # --- called by the shard --------------------------------------------------------------------------------------

    def ready(self, version: int, applied: Applied) -> None:
        """The shard has its parameters: register the incarnations whose pushes they contain. Called inside its lock."""
        self.members.restore_newest(applied)
        self.beginning.ready(version, applied)

    def applied(self, push: AppliedPush) -> None:
        """Record a push that shard 0 applied. Called inside its lock."""
        member, now = self.members.get((push.slot, push.incarnation)), self.clock()
        self.members.contact(member, now)
        if member.first_push_at is None:
            member.first_push_at = self._wall()
        meta = push.meta
        member.trained_until(now)
        self.stuck.pushed(member, now)
        member.pushed(meta.steps, meta.samples, push.staleness, meta.timings)
        if member.device:  # it has joined this coordinator
            self.speeds.pushed(now, member.worker, lambda: member.configuration, meta.timings)
        self.record.pace.pushed(now, meta.samples, meta.loss, member.push_seconds or 0.0)
        if self.beginning.complete:
            assert self.record.ledger is not None
            if all(mark.epoch < self.record.ledger.opened for mark in meta.progress):
                self.record.means.pushed(meta)
            self.record.counters.steps += meta.steps
            self.record.counters.lost += min(meta.left_out, meta.samples)
            for mark in meta.progress:
                self.record.count(mark)
            self.course.stop_after_steps()
        # Its answer reports the stop, so this worker pushes no more.
        self.course.last_pushes.arrived(member.worker, now + member.push_limit)

    def count_partial(self, shards: Sequence[Contents], differs: Contents, *, at_end: bool = False) -> bool:
        """Count the partial samples of these shards (`sides`); returns whether pushes may be in flight.

        `differs`: see `partial`. `at_end`: pushes in flight count as partial.
        """
        with self.lock:
            if (ledger := self.record.ledger) is None:
                raise Unreachable("no worker has joined yet, so the data are unknown")
            present = {member.worker for member in self.members.present()}
            marks, in_flight = self.record.partial.count(shards, differs, present, at_end=at_end)
            marks = [mark for mark in marks if ledger.exists(Segment(*mark))]
            self.record.counters.partial = sum(mark.stop - mark.start for mark in marks)
            self.record.counters.partial_ranges = ledger.ranges.under(Segment(*mark) for mark in marks)
            last_pushes = self.course.last_pushes
            last_pushes.epoch_compared(lambda worker: min(s.last(worker) for s in shards), present)
            if shards[0] == self.shard.history.contents:
                last_pushes.compared(in_flight=in_flight)
            return in_flight

    # --- saved and restored -----------------------------------------------------------------------------------------

    def load(self, saved: dict[str, Any], *, other_run: bool = False) -> None:
        """Start from a manifest's `ledger`, before any worker joins, and gather the surviving workers.

        `other_run`: the manifest is another run's, none of whose workers survive. Its leases, its reason to stop, its
        export, and the tasks of an epoch that it did not complete are dropped.
        """
        with self.lock:
            self.beginning.load(saved, other_run=other_run)

    def rewind(self, saved: dict[str, Any]) -> None:
        """Roll back to a saved record. Call it inside the shard's lock, with the parameters."""
        with self.lock:
            unknown = self.record.data is None
            self.record.rewind(saved)
            if unknown:
                self.beginning.replay()
            self.course.last_pushes.clear()
            self.course.gathering.end()
            self.speeds.disturbed(self.clock())

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Detect silent workers. Called a few times a second; only this iterates over all members."""
        with self.lock:
            for member in self.members.notice_silence(self.clock()):
                self.departures.fence(member, SILENT)
            self.stuck.notice(self.members.active())
            self._take_back(idle=False)
            self.shard.workers.set_live(
                sum(self.shard.workers.connected(m.slot) for m in self.members.active()) or 1
            )
            self.members.measure()
            self._advance()
            self._measure()

    def complete_epochs(self) -> list[dict[str, float]]:
        """The metrics of the epochs that are complete, also their tasks. The same list until they change."""
        with self.lock:
            return self.record.tasks.complete()

    def deserted(self) -> bool:
        """Whether every worker has left."""
        with self.lock:
            return not self.members.present()

    def steps_by_slot(self) -> dict[int, int]:
        """The pushed steps of each slot's workers that this process has seen."""
        with self.lock:
            steps: Counter[int] = Counter()
            for member in self.members.known.values():
                steps[member.slot] += member.steps
            return dict(steps)

    def disturbed(self) -> None:
        """A server was lost or rolled back: the speeds before and after it are not to be mixed."""
        with self.lock:
            self.speeds.disturbed(self.clock())

    def end(self, message: TerminationMessage) -> None:
        """The job has ended: answer every request for work with `finished`."""
        with self.lock:
            self.finished = message

    # --- internals ------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Observe who trains: the speeds are sums over a time in which that does not change."""
        now, tasks = self.clock(), self.record.tasks
        if tasks.holder is not None:
            self.members.get(tasks.holder).trained_until(now)
            self.speeds.task(now)
        training = self.course.trains and not tasks.ending
        active = self.members.active() if training else []
        late = [member for member in active if member.worker in self.speeds.team and member.stalls(now)]
        team = [*(member for member in active if member.pushes(now)), *late]
        doubted = min((member.last_push for member in late), default=math.inf)
        slowest = max((member.push_seconds or 0.0 for member in team), default=0.0)
        pushing = frozenset(member.worker for member in team)
        gone = self.speeds.team - pushing
        left = self.members.left(gone) if training else gone
        self.speeds.observe(now, pushing, slowest, left, doubted)

    def _contact(self, worker: Worker) -> Member:
        slot, incarnation = worker
        if incarnation < self.members.newest(slot):
            raise Fenced(f"slot {slot} has a newer incarnation than {incarnation}")
        member = self.members.get(worker)
        if member.state is WorkerState.FENCED:
            raise Fenced(f"worker {slot} incarnation {incarnation} has been fenced: {member.message}")
        self.members.contact(member, self.clock())
        self.course.gathering.heard_of(slot)
        return member

    def _advance(self) -> None:
        if self.finished is None:
            self.course.advance()

    def _idle(self) -> Assignment:
        return Assignment(kind="idle", seconds=self._assigning.pause)

    def _assign(self, member: Member) -> Assignment | None:
        """Assign the next task, else the next range; fence workers that hold up this one, as it is idle."""
        assignment = self._assigning.next(member)
        if assignment is None and self._assigning.busy(member.worker):
            return None
        if assignment is None and (silent := self._holders(self.members.silent())):
            for each in silent:
                self.departures.fence(each, SILENT)
            assignment = self._assigning.next(member)
        if assignment is None and not member.outage_seconds:  # else it could not train what others hold
            self.stuck.reaches(member, self.clock())
            if self._take_back(idle=True):
                assignment = self._assigning.next(member)
        return assignment

    def _take_back(self, *, idle: bool) -> bool:
        """Fence the worker that holds work and has been stuck for longest, if there is one; returns whether it is."""
        if stuck := self._holders(self.stuck.found(idle=idle)):
            self.record.counters.taken_back += 1
            self.departures.fence(stuck[0], self.stuck.taken(stuck[0], self.clock(), idle=idle))
        return bool(stuck)

    def _holders(self, members: Sequence[Member]) -> list[Member]:
        """Those of these members that hold work."""
        holders = self._assigning.holders() if members else set()
        return [member for member in members if member.worker in holders]


def _check_newest(member: Member, request: Join | UnsentFiles) -> None:
    """`Unreachable` if this worker has said something newer: what it gave up may come later still."""
    if 0 < request.number <= member.word_number:
        raise Unreachable("this worker has sent another request to join, or word about its files, since")
