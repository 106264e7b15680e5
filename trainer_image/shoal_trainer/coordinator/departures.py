"""How a worker goes: its pushes are refused, and what it held is released. Called under the shard's lock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from shoal_trainer.contract import WorkerState
from shoal_trainer.coordinator.last_pushes import LastPushes
from shoal_trainer.coordinator.members import Member
from shoal_trainer.coordinator.record import Record
from shoal_trainer.ps.contents import Worker
from shoal_trainer.ps.workers import Workers

log = logging.getLogger(__name__)


class Departures:
    """Of the workers of one job, which push to shard 0."""

    def __init__(
        self, record: Record, last_pushes: LastPushes, workers: Workers, clock: Callable[[], float]
    ) -> None:
        self._record, self._last_pushes, self._workers, self._clock = record, last_pushes, workers, clock
        self.refused: Callable[[], None] = lambda: None
        """Called when shard 0 refuses another worker: the other shards are to be told (`other_shard`)."""

    def fence(self, member: Member, why: str) -> None:
        """Refuse the pushes of a lost worker, and release its leases."""
        self._workers.fence(member.slot, member.incarnation + 1)
        self.refused()
        self._release(member, WorkerState.FENCED, why)

    def succeeded(self, older: Iterable[Member], worker: Worker) -> None:
        """This worker has joined: refuse the pushes of its predecessors, and release their leases."""
        for member in older:
            self._release(member, WorkerState.FENCED, "its successor has joined")
        self._workers.fence(*worker)
        self.refused()

    def left(self, member: Member, state: WorkerState, reason: str) -> None:
        """It has left: refuse its pushes, and release its leases."""
        self._workers.leave(*member.worker)
        self.refused()
        self._release(member, state, reason)

    def _release(self, member: Member, state: WorkerState, reason: str) -> None:
        ledger, worker = self._record.ledger, member.worker
        works = worker in self._last_pushes.workers(self._clock())
        if ledger is not None:
            works |= any(lease.worker == worker for lease in ledger.leases.values())
            ledger.release(lambda lease: lease.worker == worker)
        if state is WorkerState.FENCED and member.state is not WorkerState.FENCED and works:
            self._record.counters.wasted_steps += 1  # at most the step in progress
        member.state = state
        member.message = reason or member.message
        self._last_pushes.drop(worker)
        if lost := self._record.tasks.release(worker):
            log.warning("files of callbacks are lost with worker %d-%d: %s", *worker, ", ".join(lost))
