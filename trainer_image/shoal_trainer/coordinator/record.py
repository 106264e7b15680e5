"""What a snapshot keeps of a job beside its parameters: ledger, tasks, counters. No lock, no clock, no shard.

After the loss of parameter server 0, its replacement replays the journal of the surviving parameters on the snapshot's
ledger, so that ledger, counters and parameters match.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

from shoal_trainer.contract import JobIdentity, StopAfter
from shoal_trainer.coordinator.counters import Counters, wasted_after_rollback
from shoal_trainer.coordinator.epoch_means import EpochMeans
from shoal_trainer.coordinator.lease_index import Segment
from shoal_trainer.coordinator.ledger import Ledger
from shoal_trainer.coordinator.pace import Pace
from shoal_trainer.coordinator.partial import Partial
from shoal_trainer.coordinator.protocol import DataSpec
from shoal_trainer.coordinator.task_queue import Tasks
from shoal_trainer.errors import UserError
from shoal_trainer.wire.messages import Entry, Progress

log = logging.getLogger(__name__)

OTHERS = 3 / 4
"""Of the compared samples more than that differ where a worker has another split or order."""


class Record:
    """The saved state of one job with so many `shards`."""

    def __init__(self, job: JobIdentity, stop_after: StopAfter, batch_size: int, shards: int) -> None:
        self.job = job
        self.stop_after = stop_after
        self.batch_size = batch_size
        self.tasks = Tasks()
        self.counters = Counters()
        self.partial = Partial()
        """Used by the reconciler."""
        self.pace = Pace()
        self.means = EpochMeans()
        self.ledger: Ledger | None = None
        self.data: DataSpec | None = None
        """Both None until the first worker joins or a snapshot is loaded."""
        self.stopping = ""
        """Why training stops before its epochs are complete; "" if it does not."""
        self._shards = shards
        self._saved: dict[str, Any] | None = None
        self._warned_files = False
        self._warned_probes: set[tuple[float, ...]] = set()
        """Of workers, each of which joins with its own again and again."""

    @property
    def begun(self) -> bool:
        """Whether training has begun, in this process or an earlier one."""
        return self.pace.begun or self._saved is not None

    @property
    def over(self) -> bool:
        """Whether training has ended, by a stop or with its last epoch; its last tasks may follow."""
        return bool(self.stopping) or (self.ledger is not None and self.ledger.finished)

    def frozen(self) -> Callable[[], dict[str, Any]]:
        """The coordinator's part of a snapshot's manifest. Call it under the shard's lock, its result without."""
        if self.ledger is None or self.data is None:
            return dict
        ledger, data = self.ledger.frozen(), self.data
        small = {
            "tasks": self.tasks.dump(),
            "counters": self.counters.dump(),
            "stopping": self.stopping,
            "loss": self.pace.loss,
            "means": self.means.dump(),
        }
        return lambda: {"ledger": ledger(), "data": data.model_dump(mode="json")} | small

    def dump(self) -> dict[str, Any]:
        """What `frozen` makes."""
        return self.frozen()()

    def load(self, saved: dict[str, Any], *, other_run: bool = False) -> None:
        """The inverse of `dump`, before any worker joins. `other_run`: see `Coordinator.load`."""
        if "partial" in saved:
            self.partial.load(saved["partial"], self._shards, other_run=other_run)
        self._saved = saved
        self.set_data(DataSpec.model_validate(saved["data"]))
        if other_run:
            assert self.ledger is not None
            self.ledger.release(lambda _: True)
            self.stopping = ""
            self.tasks.resume_after(self.ledger.completed)
            if not self.ledger.begun and self.data is not None:  # the next epoch may be of other data
                self.data = self.data.model_copy(update={"order": "", "probes": (), "scales": ()})

    def rewind(self, saved: dict[str, Any]) -> None:
        """Return to a saved record. All leases are released, and the undone steps count as wasted."""
        self._saved = saved
        current = copy.copy(self.counters)  # what was counted while the manifest was put, too
        if "partial" in saved:
            self.partial.load(saved["partial"], self._shards)
        if self.data is None:
            self.set_data(DataSpec.model_validate(saved["data"]))
        else:
            self._resume(saved)
        self.counters.keep(current)
        self.counters.wasted_steps = wasted_after_rollback(saved, current)

    def blank_ledger(self, data: DataSpec, batch_size: int = 0) -> Ledger:
        """The ledger of this job before training, for a worker with this `batch_size`."""
        return Ledger(
            size=data.size,
            files=len(data.files),
            batch_size=max(self.batch_size, batch_size),
            seed=str(data.seed),
            epochs=self.stop_after.epochs,
            in_step=data.callbacks or self.stop_after.metric is not None,
            block=data.block,
        )

    def wants_files(self, data: DataSpec) -> bool:
        """Whether the list that these data leave out is needed: as the job's, or to say how it differs."""
        if not data.left_out or self.data is None:
            return bool(data.left_out)
        return self.data.size is None and self.data.digest != data.digest and not self._warned_files

    def set_data(self, data: DataSpec, batch_size: int = 0) -> bool:
        """Set the job's data at the first join, then True; compare later ones. The first list of files stays the job's.

        `batch_size`: the worker's; ranges are whole batches of it if it is larger than the job's. `UserError` if the
        data are empty, or others than the job's.
        """
        if self.data is None:
            if data.size is None and not data.files:
                raise UserError(
                    "The training data are empty: give Indexed a size, or Files a pattern that matches."
                )
            self.data = data
            self.ledger = self.blank_ledger(data, batch_size)
            if self._saved is not None:
                self._resume(self._saved)
            return True
        if self.data.size != data.size:
            raise UserError(
                f"This worker's training data are not the job's: {data.amount} here, {self.data.amount} there. "
                "Every worker must see the same data."
            )
        self._check_order(data)
        if self.data.digest != data.digest and not self._warned_files:
            self._warned_files = True
            log.warning("%s", self.data.file_differences(data))
        options = {name: getattr(data, name) for name in ("validation", "callbacks", "block")}
        if options != {name: getattr(self.data, name) for name in options}:
            self.data = self.data.model_copy(update=options)
            assert self.ledger is not None
            self.ledger.ahead = self.blank_ledger(self.data).ahead
        return False

    def _check_order(self, data: DataSpec) -> None:
        """`UserError` if this worker finds other samples at the job's positions: some would be trained twice."""
        assert self.data is not None
        # Saved by an earlier version, or by a run whose order is not continued; or the first worker compared none.
        if not (self.data.order and self.data.probes):
            taken = {"order": self.data.order or data.order, "probes": data.probes, "scales": data.scales}
            self.data = self.data.model_copy(update=taken)
        if data.order and data.order != self.data.order:
            raise UserError(
                f"This worker reads the training data in another order than the job: {data.order} here, "
                f"{self.data.order} there. Every worker must use the same numbers, and an image of the same version of "
                "Shoal, also after a pause of the job; a new run may use others."
            )
        differing = self.data.differing(data)
        if not differing:
            return
        others = (
            "has other training samples than the job at the same positions, so some would be trained twice and others "
            "never. Every worker must see the same data in the same order: give a random split its seed "
            "(train_test_split(…, random_state=0)), and sort what is read from a folder."
        )
        # What a script computes of a sample may be random, or change with the time and the machine.
        if not data.scales or (differing > OTHERS and not self.begun):
            raise UserError(f"This worker {others}")
        if data.probes not in self._warned_probes:
            self._warned_probes.add(data.probes)
            log.warning("a worker (%.0f %% of what was compared) %s", 100 * differing, others)

    def replay(self, entries: Iterable[Entry]) -> None:
        """Apply the journal to the ledger."""
        for entry in entries:
            self.counters.steps += entry.steps
            self.count(entry)

    def count(self, part: Progress | Entry) -> None:
        """Record applied positions, and count those that had been applied before."""
        assert self.ledger is not None
        for repeated in self.ledger.apply(Segment(part.epoch, part.file, part.start, part.stop)):
            self.counters.repeated += (repeated.stop or repeated.start) - repeated.start
            self.counters.repeated_ranges |= self.ledger.ranges.under([repeated])

    def _resume(self, saved: dict[str, Any]) -> None:
        assert self.ledger is not None
        self.ledger.load(saved["ledger"])
        self.tasks.load(saved["tasks"])
        self.counters.load(saved["counters"])
        self.stopping = str(saved["stopping"])
        self.pace.loss = saved["loss"]
        self.means.load(saved["means"])
