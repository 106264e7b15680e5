"""The coordinator's saved state (ledger, tasks, counters), and its recovery.

After the loss of parameter server 0, its replacement replays the journal of the surviving parameters on the snapshot's
ledger, so that ledger, counters and parameters match. Then it **gathers**: for up to `GATHER_SECONDS`, and longer for
workers that are alive, it grants nothing, so that surviving workers can present their leases and keep them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from shoal_trainer.contract import SILENCE_SECONDS, JobIdentity, StopAfter
from shoal_trainer.coordinator.beside import Beside
from shoal_trainer.coordinator.counters import Counters, wasted_after_rollback
from shoal_trainer.coordinator.epoch_means import EpochMeans
from shoal_trainer.coordinator.last_pushes import LastPushes
from shoal_trainer.coordinator.lease_index import Segment
from shoal_trainer.coordinator.ledger import Ledger
from shoal_trainer.coordinator.pace import Pace
from shoal_trainer.coordinator.partial import Partial
from shoal_trainer.coordinator.protocol import DataSpec, Join, Renamed
from shoal_trainer.coordinator.speeds import Speeds
from shoal_trainer.coordinator.task_queue import Tasks
from shoal_trainer.errors import UserError
from shoal_trainer.ps.recovery import JITTER, longest_pause
from shoal_trainer.ps.shard import ShardStore, State
from shoal_trainer.wire.messages import Applied, Entry, Progress

log = logging.getLogger(__name__)

GATHER_SECONDS = 5.0
ALIVE_SECONDS = 55.0
"""Gathering takes this much longer while a worker is alive that has not joined: it may hold leases."""


class Record:
    """The saved state of one job. Changes require the shard's lock."""

    def __init__(
        self,
        job: JobIdentity,
        stop_after: StopAfter,
        batch_size: int,
        shard: ShardStore,
        clock: Callable[[], float],
    ) -> None:
        self.job = job
        self.stop_after = stop_after
        self.batch_size = batch_size
        self.tasks = Tasks()
        self.counters = Counters()
        self.partial = Partial()
        """Used by the reconciler."""
        self._last_pushes = LastPushes(shard.shards)
        self.ledger: Ledger | None = None
        self.data: DataSpec | None = None
        self._warned_files = False
        self.pace = Pace()
        self.means = EpochMeans()
        self.speeds = Speeds(shard.shards)
        self.beside = Beside()
        self.shard = shard
        self._stopping = ""
        self._term = shard.boot
        """First part of this process' tokens. Not the epoch, which a restarted container keeps."""
        self._lock = shard.lock
        self._clock = clock
        self._saved: dict[str, Any] | None = None
        self._restarted = shard.follows
        self._resumed = False
        """Whether it began with a snapshot of this run."""
        # Also without a snapshot: the workers' copies may contain trained parameters.
        self._gather_until: float | None = math.inf if self._restarted else None
        self._ready = False
        self._nothing_left = False
        """Whether shard 0 follows an earlier process of this run, of which neither a snapshot nor a copy is left."""
        self._begun_with = 0
        """The samples in the parameters when the shard became ready."""
        self._expected: set[int] | None = None
        self._joined: set[int] = set()
        self._heard: dict[int, float] = {}
        """When each slot last made contact while the coordinator gathers."""

    @property
    def begun(self) -> bool:
        """Whether training has begun, in this process or an earlier one."""
        return self.pace.begun or self._saved is not None

    @property
    def stopping(self) -> str:
        """Why training stops before its epochs are complete; "" if it does not. The shard's answers carry it."""
        return self._stopping

    @stopping.setter
    def stopping(self, reason: str) -> None:
        self._stopping = reason
        self.shard.stopped = self._term if reason else 0

    def ready(self, version: int, applied: Applied) -> None:
        """Replay the journal once the shard has its parameters. Called inside its lock."""
        self._ready = True
        self._nothing_left = self._restarted and not self._resumed and version == 0
        self._begun_with = self.shard.history.samples
        if self._expected is not None:  # some may have joined after the snapshot
            self._expected |= {slot for slot, _ in applied}
        if self._gather_until not in {None, math.inf}:
            # Surviving workers join when they next connect and find the shard ready.
            pause = longest_pause(len(applied)) * (1 + JITTER)
            self._gather_until = max(self._gather_until, self._clock() + 2 * pause + 1)
        self._replay()

    # --- saved and restored -----------------------------------------------------------------------------------------

    @property
    def data_unknown(self) -> bool:
        """Whether no worker has joined since a restart without a ledger: no snapshot may be taken.

        Its ledger would lack the positions in the copies that the shards have adopted.
        """
        return self.ledger is None and self._restarted

    def dump(self) -> dict[str, Any]:
        """The coordinator's part of a snapshot's manifest. Call it inside the shard's lock."""
        if self.ledger is None or self.data is None:
            return dict(self._saved or {})
        return {
            "ledger": self.ledger.dump(),
            "tasks": self.tasks.dump(),
            "counters": self.counters.dump(),
            "data": self.data.model_dump(mode="json"),
            "stopping": self.stopping,
            "loss": self.pace.loss,
            "means": self.means.dump(),
        }

    def load(self, saved: dict[str, Any], *, other_run: bool = False) -> None:
        """Start from a manifest's `ledger`, before any worker joins, and gather the surviving workers.

        `other_run`: the manifest is another run's, none of whose workers survive. Its leases, its reason to stop, its
        export, and the tasks of an epoch that it did not complete are dropped.
        """
        with self._lock:
            if not other_run:
                self._restarted, self._gather_until, self._resumed = True, math.inf, True
            if not saved:
                return
            if "partial" in saved:
                self.partial.load(saved["partial"], self.shard.shards, other_run=other_run)
            self._saved = saved
            self._set_data(DataSpec.model_validate(saved["data"]))
            assert self.ledger is not None
            if other_run:
                self.ledger.release(lambda _: True)
                self.stopping = ""
                self.tasks.resume_after(self.ledger.completed)
                return
            self._expected = {slot for slot, _ in self.shard.history.applied}
            self._expected |= {lease.slot for lease in self.ledger.leases.values()}
            self._expected = self._expected or None  # a snapshot from before the first lease names no worker

    def rewind(self, saved: dict[str, Any]) -> None:
        """Roll back to a saved record. Call it inside the shard's lock, with the parameters.

        All leases are released, and the undone steps count as wasted.
        """
        with self._lock:
            self._saved = saved
            self._last_pushes.clear()
            wasted = wasted_after_rollback(saved, self.counters)
            if "partial" in saved:
                self.partial.load(saved["partial"], self.shard.shards)
            if self.data is None:
                self._set_data(DataSpec.model_validate(saved["data"]))
            else:
                self._resume(saved)
            self.counters.wasted_steps = wasted
            self._expected = self._gather_until = None
            self.speeds.disturbed(self._clock())

    def blank_ledger(self, data: DataSpec) -> Ledger:
        """The ledger of this job before training."""
        return Ledger(
            size=data.size,
            files=len(data.files),
            batch_size=self.batch_size,
            seed=self.job.run_id,
            epochs=self.stop_after.epochs,
            in_step=data.callbacks or self.stop_after.metric is not None,
        )

    # --- gathering ------------------------------------------------------------------------------------------------

    @property
    def gathering(self) -> bool:
        """Whether a restarted coordinator is waiting for the surviving workers."""
        return self._gather_until is not None

    def _heard_of(self, slot: int) -> None:
        """A worker made contact. The first contact starts the time limit of the gathering."""
        if self._gather_until is not None:
            self._heard[slot] = self._clock()
            self._gather_until = min(self._gather_until, self._clock() + GATHER_SECONDS)

    def _gathered(self) -> bool:
        """Whether all expected workers have joined, or the time is over.

        A worker joins when it has noticed the loss and reached every server again; until then it is only heard of.
        """
        if self._gather_until is None or self.shard.state is not State.READY:
            return False
        if self._expected is not None and self._expected <= self._joined:
            return True
        now = self._clock()
        alive = any(
            now - heard <= SILENCE_SECONDS for slot, heard in self._heard.items() if slot not in self._joined
        )
        return now >= self._gather_until + (ALIVE_SECONDS if alive else 0.0)

    def _end_gathering(self) -> None:
        """Release the leases of earlier terms that no worker presented."""
        self._gather_until = None
        if self.ledger is not None:
            self.ledger.release(lambda lease: lease.token[0] != self._term)

    def _reclaim(self, request: Join) -> tuple[Renamed, ...]:
        """Renew the leases that a worker presents after the loss of parameter server 0."""
        ledger, renamed = self.ledger, []
        assert ledger is not None
        for old in request.leases:
            if old.term == self._term:
                lease = ledger.leases.get(old.token)
            else:
                segment = Segment(old.epoch, old.number, old.start, old.stop)
                lease = ledger.reclaim(request.slot, request.incarnation, self._term, segment)
            if lease is not None:
                renamed.append(Renamed(old=old.token, new=lease.token))
        return tuple(renamed)

    # --- internals ------------------------------------------------------------------------------------------------

    def _count_restart(self, known_samples: int) -> None:
        """Count a restart from nothing, once a worker that has survived it says that samples had been trained.

        They are trained again; those in the parameters, which a worker's copy may have saved, are then there twice.
        """
        if self._nothing_left and known_samples > self._begun_with:
            self._nothing_left = False
            self.counters.restarted_from_nothing += 1
            self.counters.repeated += max(0, self.shard.initial_samples - self._begun_with)

    def _set_data(self, data: DataSpec) -> None:
        """Set the job's data at the first join, and compare later ones. The first list of files stays the job's."""
        if self.data is None:
            if data.size is None and not data.files:
                raise UserError(
                    "The training data are empty: give Indexed a size, or Files a pattern that matches."
                )
            self.data = data
            self.ledger = self.blank_ledger(data)
            if self._saved is not None:
                self._resume(self._saved)
            self._replay()
            return
        if self.data.size != data.size:
            raise UserError(
                f"This worker's training data are not the job's: {data.amount} here, {self.data.amount} there. "
                "Every worker must see the same data."
            )
        if self.data.files != data.files and not self._warned_files:
            self._warned_files = True
            log.warning("%s", self.data.file_differences(data))
        if (data.validation, data.callbacks) != (self.data.validation, self.data.callbacks):
            self.data = self.data.model_copy(
                update={"validation": data.validation, "callbacks": data.callbacks}
            )
            assert self.ledger is not None
            self.ledger.ahead = self.blank_ledger(self.data).ahead

    def _resume(self, saved: dict[str, Any]) -> None:
        assert self.ledger is not None
        self.ledger.load(saved["ledger"])
        self.tasks.load(saved["tasks"])
        self.counters.load(saved["counters"])
        self.stopping = str(saved["stopping"])
        self.pace.loss = saved["loss"]
        self.means.load(saved["means"])

    def _replay(self) -> None:
        """Apply the journal to the ledger once parameters and ledger exist."""
        if not self._ready or self.ledger is None:
            return
        for entry in self.shard.history.journal.since(-1).entries:
            self.counters.steps += entry.steps
            self._count(entry)

    def _count(self, part: Progress | Entry) -> None:
        """Record applied positions, and count those that had been applied before."""
        assert self.ledger is not None
        for repeated in self.ledger.apply(Segment(part.epoch, part.file, part.start, part.stop)):
            self.counters.repeated += (repeated.stop or repeated.start) - repeated.start
            self.counters.repeated_ranges |= self.ledger.ranges_of([repeated])
