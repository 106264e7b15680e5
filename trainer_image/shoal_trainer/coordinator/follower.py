"""Handles the coordinator's requests on the other shards: snapshot, list pushes, roll back, fence workers."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from shoal_trainer.contract import Message
from shoal_trainer.coordinator.http import Handler
from shoal_trainer.coordinator.protocol import (
    AskPushes,
    AskReport,
    FenceWorkers,
    RollBackShard,
    SnapshotShard,
)
from shoal_trainer.coordinator.reconciler import pushes_of
from shoal_trainer.errors import Fenced, SnapshotError, Unreachable, UserError
from shoal_trainer.ps.shard import ShardCopy, ShardStore, State
from shoal_trainer.snapshot.manifest import Manifest, ShardFile
from shoal_trainer.snapshot.store import SnapshotStore

log = logging.getLogger(__name__)


class Follower:
    """The control requests of a shard other than shard 0. `between`: called between the pieces of a copy."""

    def __init__(
        self, shard: ShardStore, store: SnapshotStore, between: Callable[[], None] = lambda: None
    ) -> None:
        self._shard, self._between = shard, between
        self._store = store
        self._second_copy = threading.Lock()
        """Held by the request that has another copy of the model in memory, so that there are never three."""
        self._written: dict[tuple[int, int], ShardFile] = {}
        """The newest part that was written, by its snapshot (epoch of shard 0, number)."""
        self._epoch = 0
        """The highest of a PS 0 that has told whom to refuse."""
        self.saved = -math.inf
        """When the newest written part of a snapshot was requested, by `time.monotonic`."""
        self.failed: UserError | None = None
        """Why this shard cannot roll back: the process must end the job with this error."""

    @property
    def writing(self) -> bool:
        """Whether a part of a snapshot is being written, or the shard rolls back."""
        return self._second_copy.locked()

    def handlers(self) -> Mapping[str, Handler]:
        """The handler of each request of the control port."""
        return {
            "snapshot": self._snapshot,
            "pushes": self._pushes,
            "roll-back": self._roll_back,
            "report": self._report,
            "fence": self._fence,
        }

    def _snapshot(self, request: SnapshotShard) -> Message:
        requested, snapshot = time.monotonic(), (request.epoch, request.number)
        if request.again and snapshot in self._written:
            return self._written[snapshot]
        with self._with_memory():
            if request.again:  # one that begins only now would differ too much from those of the other shards
                raise Unreachable(f"shard {self._shard.index} has not written its part")
            # PS 0 has removed what was written in an earlier attempt at this snapshot, if it has the same storage.
            written, self._written = self._written, {}
            for (_, number), earlier in written.items():
                self._store.discard(number, earlier)
            file = self._write_part(request)
            self._written, self.saved = {snapshot: file}, requested
            return file

    def _write_part(self, request: SnapshotShard) -> ShardFile:
        """Its part of a snapshot. `Unreachable` before it has finite parameters of the requested generation."""
        shard = self._shard
        if shard.state is State.READY and shard.history.generation != request.generation:
            raise Unreachable(
                f"shard {shard.index} is at generation {shard.history.generation}, not {request.generation}"
            )
        copy = shard.copy(self._between)
        if copy is None:
            raise Unreachable(f"shard {shard.index} has no parameters yet")
        if copy.generation != request.generation:
            raise Unreachable(f"shard {shard.index} has been rolled back")
        with shard.lock:
            journal = shard.history.journal
            journal.published_part((request.epoch, request.published))
        try:
            file = self._store.write_shard(request.number, request.epoch, copy)
        except SnapshotError as error:
            raise Unreachable(str(error)) from None
        with shard.lock:
            journal.part_written((request.epoch, request.number), copy.version)
        return file

    def _report(self, _: AskReport) -> Message:
        return self._shard.report().model_copy(update={"snapshot_idle_seconds": self._store.idle_seconds()})

    def _pushes(self, request: AskPushes) -> Message:
        return pushes_of(self._shard, request.wanted)

    def _fence(self, request: FenceWorkers) -> None:
        if request.epoch < self._epoch:  # to one that was replaced, and reaches no worker, all are silent
            raise Fenced(f"parameter server 0 has an incarnation {self._epoch}, this is {request.epoch}")
        self._epoch = request.epoch
        for worker in request.older:
            self._shard.workers.fence(*worker)
        for worker in request.left:
            self._shard.workers.leave(*worker)

    def _roll_back(self, request: RollBackShard) -> None:
        shard = self._shard
        if shard.history.generation >= request.generation:
            return
        with self._with_memory():
            manifest, copy = self._load(request.generation)
            shard.roll_back(copy)
            log.warning("rolled back to snapshot %d: version %d", manifest.number, copy.version)

    @contextlib.contextmanager
    def _with_memory(self) -> Iterator[None]:
        """PS 0 repeats requests, also while the storage makes an earlier one hang."""
        if not self._second_copy.acquire(blocking=False):
            raise Unreachable(f"shard {self._shard.index} is still writing or reading another snapshot")
        try:
            yield
        finally:
            self._second_copy.release()

    def _load(self, generation: int) -> tuple[Manifest, ShardCopy]:
        shard = self._shard
        try:
            found = self._store.load_generation(generation, shard.index, shard.shards)
        except SnapshotError as error:
            if shard.state is State.RECOVERING:  # a worker may have a copy of this generation
                raise Unreachable(str(error)) from None
            self.failed = UserError(
                f"Shard {shard.index} cannot load the snapshot that the job has rolled back to: {error}. To continue "
                "from an older snapshot, remove the manifests in snapshots/ that name this file, and start a new run "
                "with training.initialFrom (--initial-from) set to the folder of this run."
            )
            raise self.failed from None
        if found is None:
            raise Unreachable(f"the storage has no snapshot of generation {generation} yet")
        return found
