"""What this process began with: nothing, what an earlier one of the run has left, or another run's model.

The parameters come with the shard, of a snapshot or of workers' copies, and the ledger with a manifest or the first
join. Once both are there, the shard's journal is applied to the ledger. Called under the shard's lock.
"""

from __future__ import annotations

from typing import Any

from shoal_trainer.coordinator.course import Course
from shoal_trainer.coordinator.record import Record
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.wire.messages import Applied, OptimizerConfig


class Beginning:
    """Of the coordinator of one job, next to shard 0."""

    def __init__(self, record: Record, course: Course, shard: ShardStore) -> None:
        self._record, self._course, self._shard = record, course, shard
        self.elsewhere = False
        """Whether it began with another run's: the first snapshot of this one is of that model."""
        self._optimizer: OptimizerConfig | None = None
        """The other run's, until it is known which this one has."""
        self._resumed = False
        """Whether it began with a snapshot of this run."""
        self._has_parameters = False
        self._anew_from: int | None = None
        """If shard 0 follows a process of this run of which neither a snapshot nor a complete copy is left: the samples
        that another run had trained."""
        if shard.follows:  # also without a snapshot: the workers' copies may contain trained parameters
            course.gathering.begin()

    @property
    def complete(self) -> bool:
        """Whether parameters and ledger are there: from then on pushes count."""
        return self._has_parameters and self._record.ledger is not None

    @property
    def data_unknown(self) -> bool:
        """Whether no worker has joined since a restart without a ledger, or a begin with another run's weights.

        No snapshot may be taken: its ledger would lack the positions in the copies that the shards have adopted, and
        no rollback could return to it.
        """
        return self._record.ledger is None and (self._course.gathering.begun or self.elsewhere)

    def load(self, saved: dict[str, Any], *, other_run: bool) -> None:
        """See `Coordinator.load`."""
        self.elsewhere = other_run
        if not other_run:
            self._resumed = True
            self._course.gathering.begin()
        if not saved:
            return
        if other_run and self._shard.model is not None:
            self._optimizer = self._shard.model.spec.optimizer
        self._record.load(saved, other_run=other_run)
        self.replay()
        if not other_run:
            assert self._record.ledger is not None
            holders = (lease.worker for lease in self._record.ledger.leases.values())
            self._course.gathering.expect(slot for slot, _ in (*self._shard.history.applied, *holders))

    def ready(self, version: int, applied: Applied) -> None:
        """The shard has its parameters, of this version, with the pushes `applied`."""
        self._has_parameters = True
        anew = self._course.gathering.begun and not self._resumed and version == 0
        self._anew_from = self._shard.history.samples - self._shard.initial_samples if anew else None
        self._course.gathering.ready(slot for slot, _ in applied)
        if self._optimizer is not None:
            self._continues(self._optimizer)
            self._optimizer = None
        self.replay()

    def _continues(self, other: OptimizerConfig) -> None:
        """What a callback of the other run made of the learning rate goes on with the optimizer that it was made for.

        Not with another one, nor from another rate. And what runs on the workers begins anew.
        """
        assert self._shard.model is not None
        own = self._shard.model.spec.optimizer
        if own.name == "delta" or (own.name, own.learning_rate) != (other.name, other.learning_rate):
            self._record.tasks.learning_rate = None

    def survived(self, known_samples: int) -> None:
        """Count a restart from nothing, once a worker that has survived it says that samples had been trained.

        They are trained again; those in the parameters, which a worker's copy may have saved, are then there twice.
        """
        if self._anew_from is not None and known_samples > self._anew_from:
            self._record.counters.restarted_from_nothing += 1
            self._record.counters.repeated += self._shard.initial_samples
            self._anew_from = None

    def replay(self) -> None:
        """Apply the journal to the ledger, once parameters and ledger exist."""
        if self.complete:
            self._record.replay(self._shard.history.journal.since(-1).entries)
            if self.elsewhere and self._shard.history.version == 0:
                self._course.snapshot_soon()  # else a rollback would have nothing to return to
