"""What work a worker gets: the task that is due, else a range of the data, else nothing for now."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count

from shoal_trainer.coordinator.course import Course
from shoal_trainer.coordinator.members import Member, Members
from shoal_trainer.coordinator.protocol import Assignment, Lease
from shoal_trainer.coordinator.ranges import Portion
from shoal_trainer.coordinator.record import Record
from shoal_trainer.ps.contents import Worker

IDLE_SECONDS = 0.2
ASKS_PER_SECOND = 1000
"""The limit for all workers together: of many, each asks less often, and is leased what it trains in that time."""
PUSHES_HELD = 2
"""A worker that holds more than its part gets no more if it is busy until it asks again: for two pushes, of which it
sends one while it computes the other, and the pause."""


class Assigning:
    """Assigns the work of `record`, where `course` lets it, to `members`, under tokens that begin with `term`."""

    def __init__(
        self, record: Record, course: Course, members: Members, term: int, clock: Callable[[], float]
    ) -> None:
        self._record, self._course, self._members = record, course, members
        self._term, self._clock = term, clock
        self._numbers = count(1)

    @property
    def pause(self) -> float:
        """Seconds after which a worker without work asks again."""
        return max(IDLE_SECONDS, self._members.live / ASKS_PER_SECOND)

    def next(self, member: Member) -> Assignment | None:
        """The worker's next task or range; None if there is none for it now."""
        if self._course.waits_for_pushes():
            return None
        if not self._course.evaluation_waits() and (task := self._task(member)) is not None:
            return task
        if (lease := self._lease(member)) is not None:
            return Assignment(kind="data", lease=lease)
        return None

    def busy(self, worker: Worker) -> bool:
        """Whether this worker has samples to train."""
        return self._record.ledger is not None and self._record.ledger.leases.has(worker)

    def holds(self, worker: Worker, assignment: Assignment) -> bool:
        """Whether this worker still holds what it was assigned."""
        if self._record.ledger is None:
            return False
        if assignment.lease is not None:
            lease = self._record.ledger.leases.get(assignment.lease.token)
            return lease is not None and lease.worker == worker
        return self._record.tasks.held(worker, assignment.token) is not None

    def holders(self) -> set[Worker]:
        """The workers that hold a lease, whose last push is awaited, or for which the first task waits."""
        if self._record.ledger is None:
            return set()
        now = self._clock()
        holders = {lease.worker for lease in self._record.ledger.leases.values()}
        holders.update(self._course.last_pushes.workers(now))
        if (awaited := self._record.tasks.awaited(now)) is not None:
            holders.add(awaited)
        return holders

    def _task(self, member: Member) -> Assignment | None:
        tasks, token = self._record.tasks, (self._term, next(self._numbers))
        if (task := tasks.grant(member.worker, token, self._clock())) is None:
            return None
        evaluates, epochs = task.kind == "evaluate", task.epoch + 1
        since = 0 if evaluates else min(member.epochs_told, epochs)
        return Assignment(
            kind="task",
            task=task.kind,
            token=token,
            epoch=task.epoch,
            history=() if evaluates else tuple(tasks.history[since:epochs]),
            since=since,
            learning_rate=tasks.learning_rate,
        )

    def _lease(self, member: Member) -> Lease | None:
        record, ledger = self._record, self._record.ledger
        assert ledger is not None
        assert record.data is not None
        # Callbacks need the parameters near the end of each epoch (EarlyStopping's patience, checkpoints), so training
        # stays at most one epoch ahead of them, and half an epoch until the evaluation begins: else two epochs would be
        # judged by the same parameters. Without callbacks, a late evaluation is skipped.
        half_of = None
        if record.stopping or (record.data.callbacks and record.tasks.lagging):
            return None
        if record.data.callbacks:
            half_of = record.tasks.first_unjudged(ledger.completed, self._trains_first) + 1
        stop_after = record.stop_after.steps
        steps = stop_after - record.counters.steps if stop_after else None
        lease = ledger.grant(member.worker, self._term, self._portion(member), steps, half_of)
        return None if lease is None else record.data.lease_message(lease)

    def _portion(self, member: Member) -> Portion:
        rate, pushes = self._members.rate_of(member), member.push_seconds
        return Portion(
            batch=member.batch_size or self._record.batch_size,
            share=self._members.share(member),
            least=rate * self.pause,
            enough=math.inf if pushes is None else rate * (self.pause + PUSHES_HELD * pushes),
        )

    def _trains_first(self, worker: Worker) -> bool:
        """Whether this worker has steps to do before its task; files are also downloaded ahead, for after it."""
        return self._record.data is not None and self._record.data.size is not None and self.busy(worker)
