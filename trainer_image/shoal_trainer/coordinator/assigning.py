"""What work a worker gets: the task that is due, else a range of the data, else nothing for now."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from shoal_trainer.coordinator.course import Course
from shoal_trainer.coordinator.protocol import Assignment
from shoal_trainer.coordinator.protocol import Lease as LeaseMessage
from shoal_trainer.coordinator.record import Record
from shoal_trainer.ps.contents import Worker

IDLE_SECONDS = 0.2
ASKS_PER_SECOND = 1000
"""The limit for all idle workers together; with many workers, each asks less often."""


class Assigning:
    """Assigns the work of `record`, where `course` lets it, under tokens that begin with `term`."""

    def __init__(self, record: Record, course: Course, term: int, clock: Callable[[], float]) -> None:
        self._record, self._course, self._term, self._clock = record, course, term, clock
        self._numbers = count(1)

    def next(self, worker: Worker) -> Assignment | None:
        """The worker's next task or range; None if there is none for it now."""
        if self._course.waits_for_pushes():
            return None
        if not self._course.evaluation_waits() and (task := self._task(worker)) is not None:
            return task
        if (lease := self._lease(worker)) is not None:
            return Assignment(kind="data", lease=lease)
        return None

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

    def _task(self, worker: Worker) -> Assignment | None:
        tasks, token = self._record.tasks, (self._term, next(self._numbers))
        if (task := tasks.grant(worker, token, self._clock())) is None:
            return None
        return Assignment(
            kind="task",
            task=task.kind,
            token=token,
            epoch=task.epoch,
            history=() if task.kind == "evaluate" else tuple(tasks.history[: task.epoch + 1]),
            learning_rate=tasks.learning_rate,
        )

    def _lease(self, worker: Worker) -> LeaseMessage | None:
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
        limit = None
        if record.stop_after.steps:
            leased_steps = -(-ledger.outstanding() // record.batch_size)
            remaining = record.stop_after.steps - record.counters.steps - leased_steps
            if remaining <= 0:
                return None
            limit = remaining * record.batch_size
        lease = ledger.grant(worker, self._term, limit, half_of)
        return None if lease is None else record.data.lease_message(lease)

    def _trains_first(self, worker: Worker) -> bool:
        """Whether this worker has steps to do before its task; files are also downloaded ahead, for after it."""
        leases = self._record.ledger.leases.values() if self._record.ledger else ()
        return any(lease.segment.file < 0 and lease.worker == worker for lease in leases)
