"""The course of a job: it gathers the survivors of a restart, trains, stops, and runs the last tasks.

It decides what follows from what is known, when the coordinator calls it under its lock. Restarted, it grants nothing
until the surviving workers have presented their leases (`gathering`). Epochs end when all their data are applied;
training ends with the last of them or with a reason to stop. Then pushes may still arrive (`last_pushes`): an
evaluation would lack them and the export contain them, so both wait.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal_trainer.contract import BesideSums
from shoal_trainer.coordinator.gathering import Gathering
from shoal_trainer.coordinator.last_pushes import RESEND_SECONDS, LastPushes
from shoal_trainer.coordinator.members import SILENCE_SECONDS, Members
from shoal_trainer.coordinator.record import Record
from shoal_trainer.ps.shard import ShardStore, State


class Course:
    """Of the job of `record`, in the process that is named `term` in its tokens."""

    def __init__(
        self,
        record: Record,
        members: Members,
        shard: ShardStore,
        term: int,
        clock: Callable[[], float],
    ) -> None:
        self._record, self._members = record, members
        self._shard, self._term, self._clock = shard, term, clock
        self.gathering = Gathering(clock)
        self.last_pushes = LastPushes(shard.shards)
        self.beside = BesideSums()
        self.compare_soon: Callable[[], None] = lambda: None
        self.snapshot_soon: Callable[[], None] = lambda: None  # both calls wake a thread

    # --- where it is ----------------------------------------------------------------------------------------------

    @property
    def grants(self) -> bool:
        """Whether the data are known, and no survivor of a restart may hold them."""
        return self._record.ledger is not None and not self.gathering.on

    @property
    def trains(self) -> bool:
        """Whether there are epochs to train, after all that is known: not the last tasks, nor a recovery."""
        return self.grants and not self._record.over

    def waits_for_pushes(self) -> bool:
        """Whether training has ended, but pushes may arrive that an evaluation would lack and the export contain."""
        now = self._clock()
        if not self._record.over:
            return False
        if self.last_pushes.workers(now):
            return True
        return self.last_pushes.comparison_due(now) and self._compare()

    def evaluation_waits(self) -> bool:
        """Whether a shard may lack pushes of the epoch that is to be evaluated next."""
        return (
            bool(self._record.tasks.queue)
            and self.last_pushes.evaluation_waits(self._clock())
            and self._compare()
        )

    def _compare(self) -> bool:
        self.compare_soon()
        return True

    def passed_beside(self, rate: float, tasks: float, waits: float) -> None:
        """A worker of this `rate` (samples/s) spent seconds in tasks and without work, before the last step."""
        if self.trains:
            self.beside = self.beside.plus(tasks=rate * tasks, waits=rate * waits)

    # --- what moves it --------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Complete epochs and stop training where due. Called by each request, so it must be cheap."""
        record = self._record
        if self._shard.state is State.READY and self.gathering.over():
            self._end_gathering()
        if record.ledger is None or self.gathering.on:
            return
        while record.tasks.evaluated < record.ledger.completed:
            self._end_epoch(record.tasks.evaluated)
        self.stop_after_steps()
        if record.over:
            self._finish_training()

    def stop_after_steps(self) -> None:
        """Stop at the limit of steps, unless workers that have not joined yet may hold leases."""
        counted, limit = self._record.counters.steps, self._record.stop_after.steps
        if limit and counted >= limit and not self.gathering.on:
            self.stop(f"{counted} steps are done")

    def stop(self, reason: str) -> None:
        """Stop training early; the first reason counts."""
        if not self._record.stopping:
            self._record.stopping = reason
            self._expect_last_pushes()

    def _end_gathering(self) -> None:
        self.gathering.end()
        if self._record.ledger is not None:  # the leases of earlier terms that no worker presented
            self._record.ledger.release(lambda lease: lease.token[0] != self._term)
        self.last_pushes.compare_until(self._clock() + SILENCE_SECONDS)  # a push may be sent again
        if self._record.stopping:
            self._expect_last_pushes()

    def _expect_last_pushes(self) -> None:
        """After a stop, each worker that holds a lease may push once more."""
        now = self._clock()
        for lease in self._record.ledger.leases.values() if self._record.ledger else ():
            self.last_pushes.expect(lease.worker, now + self._members.get(lease.worker).push_limit)

    def _end_epoch(self, epoch: int) -> None:
        record = self._record
        assert record.data is not None
        logs = record.means.end(epoch, record.pace.loss)
        if self.trains:
            self.beside = self.beside.plus(epochs=1, others=max(len(self._members.active()) - 1, 0))
        record.tasks.epoch_ended(
            epoch, logs, self._clock(), validation=record.data.validation, callbacks=record.data.callbacks
        )
        self.last_pushes.epoch_ended(self._shard.history.applied, self._clock() + RESEND_SECONDS)

    def _finish_training(self) -> None:
        """Release all leases if training stops early; after the last pushes, queue the last evaluation and the export.

        The epoch in which training stops has an evaluation unless it has no batch.
        """
        record = self._record
        assert record.ledger is not None
        if record.stopping:
            record.ledger.release(lambda _: True)
        if self.waits_for_pushes():
            return
        begun = record.ledger.begun
        last = max(0, record.ledger.completed - (0 if begun else 1))
        if begun and record.tasks.evaluated <= last and not record.tasks.exported:
            self._end_epoch(last)
        if record.tasks.export(last):
            self.snapshot_soon()  # a shard that is lost during these tasks would change the model
