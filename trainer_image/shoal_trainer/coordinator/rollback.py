"""Rollback: the whole job returns to its newest snapshot, because a batch gave a loss that is not finite.

A rollback is one more manifest: the newest one's files, the next **generation**, and a ledger in which nothing is
leased and the batch counts as lost. That manifest commits the rollback: a process that starts later begins with it,
and a stop that is decided while it is written is undone with everything since the snapshot.
Then shard 0 restores its parameters and the ledger under one lock, and the other shards are told (`other_shard`).
Workers see the new generation and drop their copies and leases; pushes of an older generation are refused.

The limit counts rollbacks without a newer snapshot between them: a long job may skip a few bad batches, but one that
never gets past its snapshot fails. A snapshot from which not one push was applied may itself be the reason: then the
job returns to the next older one, and to the batches that it left out before.

A worker whose accelerator is faulty would have the job roll back until that limit. If one slot alone has sent the last
reports, and other workers have pushed since, it is the worker and not the job: it ends, and its batch is another's.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.counters import Counters, wasted_after_rollback
from shoal_trainer.coordinator.lease_index import Segment
from shoal_trainer.coordinator.ledger import Ledger
from shoal_trainer.coordinator.protocol import DataSpec, Diverged
from shoal_trainer.coordinator.snapshotter import IN_A_ROW, LEFT_OUT, Snapshotter
from shoal_trainer.errors import FaultyDevice, Fenced, Unreachable, UserError
from shoal_trainer.ps.shard import ShardCopy, ShardStore
from shoal_trainer.snapshot.manifest import Manifest
from shoal_trainer.snapshot.store import SnapshotStore

log = logging.getLogger(__name__)

MAX_IN_A_ROW = 3
TAKING_SECONDS = 3.0
"""How long a report waits for a snapshot in progress: less than the timeout of the worker, which sends it again."""
FIRST_SECONDS = 60.0
"""How long the first snapshot of a run may fail until a rollback is given up."""
SUSPECT_REPORTS = 3
"""From one slot in a row: with sound accelerators it is chance that the same worker meets all bad batches."""


class Rollback:
    """Runs on PS 0. `fenced` as the snapshotter's; `done` is called when shard 0 has returned to a snapshot."""

    def __init__(
        self,
        shard: ShardStore,
        coordinator: Coordinator,
        store: SnapshotStore,
        snapshotter: Snapshotter,
        *,
        fenced: Callable[[Fenced], None],
        done: Callable[[], None] = lambda: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._shard, self._coordinator = shard, coordinator
        self._store, self._snapshotter = store, snapshotter
        self._fenced, self._done, self._wall = fenced, done, wall
        self._reporters: deque[int] = deque(maxlen=SUSPECT_REPORTS - 1)
        """The slots whose reports led to the last rollbacks."""
        self._steps: dict[int, int] = {}
        """Of each slot, as of the last rollback."""
        self._unanswered = False
        """Whether a manifest was sent to the storage and its answer was lost: the rollback may be committed."""
        snapshotter.settle = self._settle

    def diverged(self, report: Diverged) -> None:
        """Roll back, unless another worker's report has already rolled this generation back.

        `UserError` if there is no snapshot, or the limit is reached; `FaultyDevice` if only this worker's gradients are
        not finite; `Unreachable` if the storage is, or is in use.
        """
        self._coordinator.heard(report.worker)
        with self._taking():
            if self._void(report):
                return
            if self._suspects(report):
                raise _faulty(report)
            found = self._find()
            if found is None or not found[0].ledger:
                failed, because = self._snapshotter.trouble()
                why = f": {because}" if because else ""
                elsewhere = self._coordinator.beginning.elsewhere
                if (elsewhere or because) and failed < FIRST_SECONDS:
                    self._snapshotter.schedule()
                    what = "the model that this run began with" if elsewhere else "what to roll back to"
                    raise Unreachable(f"{what} is not saved yet{why}")
                if self._alone(report):
                    raise _faulty(report)
                raise UserError(f"{_place(report)} There is no snapshot yet to roll back to{why}. {ADVICE}")
            manifest, copy, newest = found
            if manifest.generation <= report.generation:  # older: the newer snapshots are damaged
                if self._void(report):  # training stopped while the snapshot was read
                    return
                manifest = self._publish(manifest, newest, report)
            undone = self._apply(manifest, copy)
            self._reporters.append(report.slot)
            self._steps = self._coordinator.steps_by_slot()
        log.warning(
            "%s Rolled back to snapshot %d: version %d, step %d; %d updates are undone, the batch is skipped",
            _place(report), manifest.number, copy.version, self._coordinator.record.counters.steps, undone,
        )  # fmt: skip

    def overtaken(self, generation: int) -> None:
        """Another shard is of this later generation: shard 0 began with an older one, as its own part was damaged.

        So all return to the newest snapshot that shard 0 can read. `Unreachable` if there is none.
        """
        with self._taking():
            self._settle()
            if self._shard.history.generation >= generation or self._coordinator.finished is not None:
                return
            found = self._store.load_newest(0, self._shard.shards)
            if found is None or not found[0].ledger:
                raise Unreachable(f"shard 0 can read no snapshot, and others are of generation {generation}")
            manifest, copy = found
            if manifest.epoch > self._shard.epoch:
                raise Unreachable("another parameter server 0 has published a snapshot")
            if manifest.generation < generation:
                in_a_row, left_out = int(manifest.ledger.get(IN_A_ROW, 0)), _left_out(manifest)
                manifest = self._commit(manifest, generation + 1, in_a_row, left_out)
            undone = self._apply(manifest, copy)
        log.warning(
            "the part of shard 0 in the snapshots of generation %d cannot be read: rolled back to snapshot %d, version "
            "%d; %d updates of shard 0 are undone",
            generation, manifest.number, copy.version, undone,
        )  # fmt: skip

    def _apply(self, manifest: Manifest, copy: ShardCopy) -> int:
        """Return shard 0 to a committed rollback; returns how many updates that undoes. Under `taking`.

        `Unreachable` once the job has ended: its history is of the model that was exported.
        """
        with self._shard.lock:
            # While its manifest was on its way; who reported asks again.
            if self._coordinator.finished is not None:
                raise Unreachable("the job has ended")
            undone = self._shard.history.version - copy.version
            self._shard.roll_back(copy.model_copy(update={"generation": manifest.generation}))
            self._coordinator.rewind(manifest.ledger)
        self._snapshotter.set_latest(manifest, copy.version)
        self._unanswered = False
        self._done()
        return undone

    def _settle(self) -> None:
        """Before the next snapshot: finish a rollback that is committed, although its answer was lost. Under `taking`.

        Else a snapshot of what it undoes would follow it. The worker that reported may be gone. Once the job has ended
        that snapshot is wanted: it is of the model that was exported.
        """
        if not self._unanswered or self._coordinator.finished is not None:
            return
        found = self._store.load_newest(0, self._shard.shards)
        if found is not None and found[0].generation > self._shard.history.generation:
            undone = self._apply(*found)
            log.warning(
                "finished the rollback to snapshot %d: %d updates are undone", found[0].number, undone
            )
        self._unanswered = False

    @contextlib.contextmanager
    def _taking(self) -> Iterator[None]:
        taking = self._snapshotter.taking
        if not taking.acquire(timeout=TAKING_SECONDS):
            raise Unreachable("a snapshot is being written")
        try:
            yield
        finally:
            taking.release()

    def _void(self, report: Diverged) -> bool:
        """Whether the report needs no rollback: there was one, or training has ended and the batch is not pushed.

        Nor does one of positions that are not this worker's.
        """
        batch = Segment(report.epoch, report.file, report.start, report.stop)
        with self._shard.lock:
            ledger = self._coordinator.record.ledger
            if ledger is not None and all(
                lease.worker != report.worker for lease in ledger.leases.overlapping(batch)
            ):
                return True
            over = self._coordinator.record.stopping or self._coordinator.finished is not None
            return bool(over) or report.generation != self._shard.history.generation

    def _suspects(self, report: Diverged) -> bool:
        """Whether the last rollbacks were this worker's as well, and others have pushed since the last one."""
        return len(self._reporters) == SUSPECT_REPORTS - 1 and self._only_reporter(report, self._steps)

    def _alone(self, report: Diverged) -> bool:
        """Whether no other worker has reported, and others have pushed: where the job would end, this worker does.

        If it is the model, the next one to report ends the job.
        """
        alone = self._only_reporter(report, {})
        self._reporters.append(report.slot)
        return alone

    def _only_reporter(self, report: Diverged, before: Mapping[int, int]) -> bool:
        """Whether no other slot is among the last reporters, and others have pushed more steps than `before`."""
        steps = self._coordinator.steps_by_slot()
        others = any(steps[slot] > before.get(slot, 0) for slot in steps if slot != report.slot)
        return others and set(self._reporters) <= {report.slot}

    def _find(self) -> tuple[Manifest, ShardCopy, Manifest] | None:
        """The snapshot to return to, and the newest manifest; None if there is none.

        Which one it is to be is known before it is read: the memory has room for one.
        """
        newest = next(self._store.manifests(), None)
        if newest is not None and self._untrained(newest) and (older := self._older(newest)) is not None:
            return *older, newest
        found = self._store.load_newest(0, self._shard.shards)
        return None if found is None else (*found, found[0])

    def _untrained(self, newest: Manifest) -> bool:
        """Whether the job was rolled back to this snapshot, and no push was applied since."""
        with self._shard.lock:
            same = newest.generation == self._shard.history.generation
            return same and IN_A_ROW in newest.ledger and self._shard.history.version == _version(newest)

    def _older(self, than: Manifest) -> tuple[Manifest, ShardCopy] | None:
        """The next older snapshot; a rollback's manifest names the files of an earlier one."""

        def wanted(manifest: Manifest) -> bool:
            return bool(manifest.ledger) and _version(manifest) < _version(than)

        return self._store.load_other(0, self._shard.shards, wanted)

    def _publish(self, to: Manifest, newest: Manifest, report: Diverged) -> Manifest:
        """Commit the rollback to a snapshot. `newest`: the one that exists."""
        in_a_row = 1 + (int(to.ledger.get(IN_A_ROW, 0)) if to is newest else 0)
        if in_a_row > MAX_IN_A_ROW:
            if self._alone(report):
                raise _faulty(report)
            raise UserError(
                f"{_place(report)} The job was rolled back {MAX_IN_A_ROW} times to snapshot {newest.number} "
                f"without reaching a newer one. {ADVICE}"
            )
        batch = Segment(report.epoch, report.file, report.start, report.stop)
        return self._commit(to, report.generation + 1, in_a_row, [*_left_out(newest), batch])

    def _commit(self, to: Manifest, generation: int, in_a_row: int, left_out: Sequence[Segment]) -> Manifest:
        """Publish that this generation begins with a snapshot, without the batches that are left out."""
        saved, coordinator = to.ledger, self._coordinator
        with self._shard.lock:
            blank = coordinator.record.blank_ledger(DataSpec.model_validate(saved["data"]))
            ledger = amended(saved, blank, left_out, coordinator.record.counters)
            ledger["tasks"] = coordinator.record.tasks.rewound(saved["tasks"])
        ledger |= {IN_A_ROW: in_a_row, LEFT_OUT: list(left_out)}
        changes: dict[str, Any] = {
            "number": self._store.next_number(),
            "epoch": self._shard.epoch,
            "generation": generation,
            "ledger": ledger,
            "wall_time": self._wall(),
        }
        try:
            return self._store.publish(to.model_copy(update=changes))
        except Fenced as error:  # this server is fenced, not the worker that reports
            self._fenced(error)
            raise Unreachable(str(error)) from None
        except Unreachable:
            self._unanswered = True
            self._snapshotter.schedule()
            raise


def amended(
    saved: dict[str, Any], ledger: Ledger, batches: Sequence[Segment], current: Counters
) -> dict[str, Any]:
    """The ledger to roll back to: the saved one, with nothing leased, and the batches done but counted as lost.

    `ledger`: a blank one of this job; `current`: the current counters.
    """
    counters = Counters()
    ledger.load(saved["ledger"])
    counters.load(saved["counters"])
    ledger.release(lambda _: True)
    before = ledger.done_samples
    for batch in batches:
        ledger.apply(batch)
    counters.lost += ledger.done_samples - before
    counters.rollbacks = current.rollbacks + 1
    counters.wasted_steps = wasted_after_rollback(saved, current)
    counters.keep(current)
    return saved | {"ledger": ledger.dump(), "counters": counters.dump()}


def _left_out(manifest: Manifest) -> list[Segment]:
    return [Segment(*segment) for segment in manifest.ledger.get(LEFT_OUT, ())]


def _version(manifest: Manifest) -> int:
    """That of shard 0, whose pushes are counted."""
    return next(part.version for part in manifest.shards if part.index == 0)


ADVICE = "Lower the learning rate, clip gradients (clipnorm=…), or look for bad samples."


def _faulty(report: Diverged) -> FaultyDevice:
    return FaultyDevice(
        f"{_place(report)} All such reports are of worker {report.slot}, and the gradients of the others are finite: "
        "its accelerator may be faulty."
    )


def _place(report: Diverged) -> str:
    file = f" of file {report.file}" if report.file >= 0 else ""
    return (
        f"The loss or its gradient is not finite ({report.reason}) in epoch {report.epoch + 1}, "
        f"positions {report.start} to {report.stop}{file}, of worker {report.slot}."
    )
