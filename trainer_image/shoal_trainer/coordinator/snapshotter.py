"""Takes the snapshots: a thread on PS 0 that has all shards write their part and publishes the manifest.

Neither the copy nor its writing holds the shard's lock for long. An unreachable storage does not stop
training: the next attempt comes with the next interval, and each reason is logged once. A snapshot may be of many
gigabytes: what the storage refuses for a moment is tried again for some seconds, while what else is written stands.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from shoal_trainer.background import Background, Wish
from shoal_trainer.contract import SnapshotPolicy
from shoal_trainer.coordinator.control_client import ShardControl
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.reconciler import Reconciler
from shoal_trainer.coordinator.task_queue import Tasks
from shoal_trainer.errors import Fenced, TrainerError, Unreachable
from shoal_trainer.ps.shard import ShardCopy, ShardStore
from shoal_trainer.snapshot.manifest import Manifest, ShardFile
from shoal_trainer.snapshot.store import SnapshotStore

log = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_SECONDS = 5.0
"""After the first failure of a scheduled snapshot; doubled after each further one."""
STANDING_SECONDS = 20.0
"""After it first began, a part or the manifest may begin again, while other parts stand: after 1, 2, 4 and 8 s."""
IN_A_ROW = "rollbacksInARow"
"""Key of a manifest's ledger: how many rollbacks led to it. Absent from a snapshot of new parameters."""
LEFT_OUT = "leftOut"
"""Key of a manifest's ledger beside it: the batches of these rollbacks, as segments."""


@dataclass(frozen=True)
class _Said:
    """What a manifest says, and another one is taken if it would say anything else.

    `version`: of shard 0. `ending`: whether training had ended. `missing`: the files of callbacks that the storage
    lacked. `rollbacks`: those that led to these very parameters, as its ledger has them.
    """

    version: int = -1
    ending: bool = False
    missing: frozenset[str] = frozenset()
    rollbacks: Mapping[str, Any] = field(default_factory=dict)


class Snapshotter(Background):
    """Takes snapshots of all shards, when scheduled, when the journal fills, and every `policy.every_seconds`.

    Calls `fenced` when a newer epoch has published, and `between` between the pieces of a copy.
    """

    def __init__(
        self,
        shard: ShardStore,
        others: Sequence[ShardControl],
        coordinator: Coordinator,
        reconciler: Reconciler,
        store: SnapshotStore,
        policy: SnapshotPolicy,
        *,
        fenced: Callable[[Fenced], None],
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
        executor: Callable[[int], Executor] = ThreadPoolExecutor,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__("snapshots", self._take_again, pause=float(policy.every_seconds))
        self._shard, self._others = shard, others
        self._coordinator, self._store, self._policy = coordinator, store, policy
        self._reconciler = reconciler
        self._fenced, self._wall, self._clock = fenced, wall, clock
        self._sleep = sleep or self.stopped.wait
        self._executor, self._between = executor, between
        self._wish, self._retry = Wish(), RETRY_SECONDS
        self.taking = threading.Lock()
        """Held while a manifest is written."""
        self._newest = _Said()
        """By the newest manifest: an attempt that fails changes nothing of it."""
        self._published = 0
        self._tries_since: float | None = None
        self._logged = ""
        """Why there was no snapshot, as logged."""
        self._waits = ""
        """What is tried again while the rest of a snapshot stands."""
        self.not_removed = ""
        """Why old snapshots are still there."""
        self._untidy = True
        """Whether an attempt may have left files: one that failed, or one of the process before this one."""
        self.last: Manifest | None = None
        shard.history.journal_fills = self.schedule
        self.settle: Callable[[], None] = lambda: None
        """Called before a snapshot: finishes a rollback."""

    def schedule(self) -> None:
        """Take a snapshot soon, ahead of the next interval, and try again until it succeeds."""
        self._wish.make()
        self.wake()

    def settled(self, timeout: float) -> bool:
        """Wait until scheduled snapshots are published; False if they are not after `timeout` seconds."""
        return self._wish.wait(timeout)

    def trouble(self) -> tuple[float, str]:
        """For how many seconds no attempt has succeeded, and why the last one failed; (0, "") if it has succeeded."""
        since = self._tries_since
        return (0.0, "") if since is None else (self._clock() - since, self._waits or self._logged)

    def take(self) -> Manifest | None:
        """Take a snapshot; None if nothing has changed since the last one, or there are no parameters yet."""
        with self.taking:
            self.settle()
            with self._shard.lock:
                said = self._would_say()
                if said == self._newest or self._coordinator.beginning.data_unknown:
                    return None
            frozen: Callable[[], dict[str, Any]] = dict

            def cut() -> None:
                nonlocal said, frozen
                frozen = self._coordinator.record.frozen()
                said = self._would_say()

            if (copy := self._shard.copy(self._between, cut)) is None:
                return None
            number = max(self._store.next_number(), 1 + (self.last.number if self.last else 0))
            files = self._write(number, copy)
            ledger = frozen()
            if ledger:  # even with one shard: their number may change between snapshots
                ledger |= {**said.rollbacks, "partial": self._reconciler.manifest_part(files)}
            manifest = Manifest(
                number=number,
                epoch=self._shard.epoch,
                generation=copy.generation,
                run=self._coordinator.record.job.run_id,
                shards=files,
                model=copy.model,
                ledger=ledger,
                wall_time=self._wall(),
            )
            self.last = self._standing(lambda: self._publish(manifest))
            with self._shard.lock:
                self._shard.history.journal.published(copy.version)
            self._reconciler.published(files)
            self._newest, self._published = said, number
            self._untidy = False
            self._prune()
            return self.last

    def set_latest(self, manifest: Manifest, version: int) -> None:
        """The job is at this snapshot, and this version of shard 0: it begins there, or was rolled back to it.

        Call it before `start`, or while holding `taking`.
        """
        self.last = manifest
        rollbacks = {key: manifest.ledger[key] for key in (IN_A_ROW, LEFT_OUT) if key in manifest.ledger}
        saved = Tasks()
        if manifest.ledger:
            saved.load(manifest.ledger["tasks"])
        # Of files that were lost since, the next one tells.
        self._newest = _Said(version, saved.ending, frozenset(saved.files.missing), rollbacks)

    def _would_say(self) -> _Said:
        """What a manifest of now would say. Under the shard's lock."""
        version, tasks, newest = self._shard.history.version, self._coordinator.record.tasks, self._newest
        rollbacks = newest.rollbacks if version == newest.version else {}  # none led to new parameters
        return _Said(version, tasks.ending, frozenset(tasks.files.missing), rollbacks)

    def _write(self, number: int, copy: ShardCopy) -> tuple[ShardFile, ...]:
        epoch = self._shard.epoch
        if self._untidy:
            for other in self._others:  # it may still write its part of what is removed
                report = other.report()
                if report.snapshot_idle_seconds:
                    raise Unreachable(
                        f"shard {report.index} is still writing its part of an earlier snapshot"
                    )
            self._prune()
        self._untidy = True
        if not self._others:
            return (self._store.write_shard(number, epoch, copy),)
        with self._executor(len(self._others)) as pool:
            asked = (number, epoch, self._published, copy.generation)
            parts = [pool.submit(self._standing, partial(other.snapshot, *asked)) for other in self._others]
            own = self._standing(lambda: self._store.write_shard(number, epoch, copy))
            return (own, *(part.result() for part in parts))

    def _publish(self, manifest: Manifest) -> Manifest:
        if self._others:
            self._store.check(manifest.shards[1:])
        return self._store.publish(manifest)

    def _standing(self, step: Callable[[], T]) -> T:
        """The result of a step of a snapshot of which other steps stand, though it may be refused for some seconds.

        A part that began much later would differ too much from the others. A server that stops does not wait: its final
        snapshot comes after this one, and has little time.
        """
        until, pause = self._clock() + STANDING_SECONDS, 1.0
        try:
            while True:
                try:
                    return step()
                except Unreachable as error:
                    if self._clock() + pause > until or self.stopped.is_set():
                        raise
                    if str(error) not in {self._waits, self._logged}:
                        log.warning("a snapshot waits, what else is written of it stands: %s", error)
                    self._waits = str(error)
                    self._sleep(pause)
                    if self.stopped.is_set():
                        raise
                pause *= 2
        finally:
            self._waits = ""

    def _prune(self) -> None:
        """Remove what is not to be kept; a new snapshot does not depend on it.

        As long as there are only copies of what the job was rolled back to, no older snapshot gives way to them: the
        next rollback may need it.
        """
        retain = sys.maxsize if self._newest.rollbacks else self._policy.retain
        try:
            self._store.prune(retain, self._shard.epoch)
        except (TrainerError, OSError) as error:
            if str(error) != self.not_removed:
                log.warning("old snapshots cannot be removed, and take up space in the storage: %s", error)
            self.not_removed = str(error)
        else:
            self.not_removed = ""

    def _take_again(self) -> float:
        every, wish = float(self._policy.every_seconds), self._wish.number
        if self._try():
            self._retry = RETRY_SECONDS
            self._wish.fulfil(wish)
        elif self._wish.open:
            pause, self._retry = min(every, self._retry), 2 * self._retry
            return pause
        return every

    def _try(self) -> bool:
        """Take a snapshot; returns whether the newest one is up to date. Stops the thread if another server follows."""
        self._tries_since = self._clock() if self._tries_since is None else self._tries_since
        try:
            self.take()
        except Fenced as error:
            self._fenced(error)
            self.stop()
            return False
        except (TrainerError, OSError) as error:
            if str(error) != self._logged:
                log.warning("no snapshot could be taken, training goes on: %s", error)
            self._logged = str(error)
            return False
        except Exception as error:
            log.exception("no snapshot could be taken, training goes on")
            self._logged = repr(error)
            return False
        if self._logged:
            log.warning("snapshots can be taken again")
        self._logged, self._tries_since = "", None
        return True
