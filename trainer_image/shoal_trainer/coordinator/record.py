"""The coordinator's record: what is done, what is held, what was counted; how it is saved, and how it comes back.

After the loss of parameter server 0 a new one replays on the snapshot's ledger the pushes that are in the surviving
parameters beyond the snapshot (the journal that came with them), so ledger, counters and parameters are of one moment
again. Then it **gathers**: for a moment it grants nothing and lets the workers that survived tell what they hold and
will push themselves, so that nobody else is given it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from shoal_trainer.contract import JobIdentity, StopAfter
from shoal_trainer.coordinator.counters import Counters, wasted_by
from shoal_trainer.coordinator.leased import Segment
from shoal_trainer.coordinator.ledger import Ledger
from shoal_trainer.coordinator.pace import Pace
from shoal_trainer.coordinator.partial import Partial
from shoal_trainer.coordinator.protocol import DataSpec, Join, Renamed
from shoal_trainer.coordinator.tasks import Tasks
from shoal_trainer.errors import UserError
from shoal_trainer.ps.recovery import JITTER, longest_pause
from shoal_trainer.ps.shard import ShardStore, State
from shoal_trainer.wire.messages import Applied, Entry, Progress

log = logging.getLogger(__name__)

GATHER_SECONDS = 5.0


class Record:
    """Of one job. What changes it holds the shard's lock."""

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
        """The reconciler's."""
        self.ledger: Ledger | None = None
        self.data: DataSpec | None = None
        self._told_files = False
        self.pace = Pace()
        self.shard = shard
        self._stopping = ""
        self._term = shard.boot
        """What begins the tokens of this process: not the epoch, which stays where its container is started again."""
        self._lock = shard.lock
        self._clock = clock
        self._saved: dict[str, Any] | None = None
        self._restarted = shard.follows
        # One that follows another gathers even without a snapshot: the workers' copies may hold what was trained.
        self._gather_until: float | None = math.inf if self._restarted else None
        self._ready = False
        self._expected: set[int] | None = None

    @property
    def begun(self) -> bool:
        """Whether something was trained, by this process or by one before it."""
        return self.pace.begun or self._saved is not None

    @property
    def stopping(self) -> str:
        """Why training ends before its passes do; "" while it goes on. The shard's answers tell the workers."""
        return self._stopping

    @stopping.setter
    def stopping(self, why: str) -> None:
        self._stopping = why
        self.shard.stopped = self._term if why else 0

    def ready(self, version: int, applied: Applied) -> None:
        """The shard has its parameters (called inside its lock): what its journal tells of is in them."""
        del version
        self._ready = True
        if self._gather_until not in {None, math.inf}:
            # Survivors join once they see that the shard is ready: at their next hello.
            pause = longest_pause(len(applied)) * (1 + JITTER)
            self._gather_until = max(self._gather_until, self._clock() + 2 * pause + 1)
        self._replay()

    # --- saved and restored -----------------------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether no worker has said yet, after a loss, what the data are: this is no moment to save.

        Of copies that the shards have adopted meanwhile the ledger would not know what they cover.
        """
        return self.ledger is None and self._restarted

    def dump(self) -> dict[str, Any]:
        """The coordinator's part of a snapshot's manifest. Call it inside the shard's lock, with the copy."""
        if self.ledger is None or self.data is None:
            return dict(self._saved or {})
        return {
            "ledger": self.ledger.dump(),
            "tasks": self.tasks.dump(),
            "counters": self.counters.dump(),
            "data": self.data.model_dump(mode="json"),
            "stopping": self.stopping,
            "loss": self.pace.loss,
        }

    def load(self, saved: dict[str, Any], *, other_run: bool = False) -> None:
        """Begin from a manifest's `ledger`, before any worker is here, and gather the survivors.

        `other_run`: what its workers held is free, and why it ended is no reason to end this one. There are survivors
        only of this run, where this process is not its first.
        """
        with self._lock:
            if not other_run:
                self._restarted, self._gather_until = True, math.inf
            if not saved:
                return
            if "partial" in saved:
                self.partial.load(saved["partial"], self.shard.shards, other_run=other_run)
            self._saved = saved
            self._agree(DataSpec.model_validate(saved["data"]))
            assert self.ledger is not None
            if other_run:
                self.ledger.release(lambda _: True)
                self.stopping = ""
                return
            self._expected = {slot for slot, _ in self.shard.applied}
            self._expected |= {lease.slot for lease in self.ledger.leases.values()}

    def rewind(self, saved: dict[str, Any]) -> None:
        """Go back to a ledger while workers are here. Call it inside the shard's lock, with the parameters.

        What anybody holds is taken back, and the steps that are undone were in vain.
        """
        with self._lock:
            self._saved = saved
            wasted = wasted_by(saved, self.counters)
            if "partial" in saved:
                self.partial.load(saved["partial"], self.shard.shards)
            if self.data is None:
                self._agree(DataSpec.model_validate(saved["data"]))
            else:
                self._resume(saved)
            self.counters.wasted_steps = wasted
            self._expected = self._gather_until = None

    def blank_ledger(self, data: DataSpec) -> Ledger:
        """The ledger with which this job begins."""
        return Ledger(
            size=data.size,
            files=len(data.files),
            batch_size=self.batch_size,
            seed=self.job.uid,
            epochs=self.stop_after.epochs,
            in_step=data.callbacks or self.stop_after.metric is not None,
        )

    # --- gathering ------------------------------------------------------------------------------------------------

    @property
    def gathering(self) -> bool:
        """Whether a restored coordinator still waits for the workers that survived."""
        return self._gather_until is not None

    def _begin_gathering(self) -> None:
        """Somebody is here: from now on a moment for the others."""
        if self._gather_until == math.inf:
            self._gather_until = self._clock() + GATHER_SECONDS

    def _gathered(self) -> bool:
        """Whether everybody who is expected has spoken, or had the time to."""
        if self._gather_until is None or self.shard.state is not State.READY:
            return False
        return self._expected == set() or self._clock() >= self._gather_until

    def _end_gathering(self) -> None:
        """Everybody who survived has spoken: what nobody claimed is free."""
        self._gather_until = None
        if self.ledger is not None:
            self.ledger.release(lambda lease: lease.token[0] != self._term)

    def _reclaim(self, request: Join) -> tuple[Renamed, ...]:
        """A survivor of the loss of parameter server 0 tells what it held: from its last answered push on."""
        ledger, renamed = self.ledger, []
        assert ledger is not None
        for held in request.held:
            if held.term == self._term:
                lease = ledger.leases.get(held.token)
            else:
                segment = Segment(held.epoch, held.number, held.start, held.stop)
                lease = ledger.reclaim(request.slot, request.incarnation, self._term, segment)
            if lease is not None:
                renamed.append(Renamed(old=held.token, new=lease.token))
        return tuple(renamed)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _agree(self, data: DataSpec) -> None:
        """The first list of files is the job's, whatever others see later: a lease tells its file by name."""
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
                f"This worker's training data are not the job's: {data.words} here, {self.data.words} there. "
                "Every worker must see the same data."
            )
        if self.data.files != data.files and not self._told_files:
            self._told_files = True
            log.warning("%s", self.data.beside(data))
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

    def _replay(self) -> None:
        """Bring the ledger to the moment of the parameters, once both are there."""
        if not self._ready or self.ledger is None:
            return
        for entry in self.shard.journal.since(-1).entries:
            self.counters.steps += entry.steps
            self._count(entry)

    def _count(self, part: Progress | Entry) -> None:
        """These positions are in the parameters; those that were there before are in them once more now."""
        assert self.ledger is not None
        for again in self.ledger.apply(Segment(part.epoch, part.file, part.start, part.stop)):
            self.counters.repeated += (again.stop or again.start) - again.start
            self.counters.repeated_ranges |= {(again.epoch, r) for r in self.ledger.range_of(again)}
