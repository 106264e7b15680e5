"""The data ledger: which positions of each epoch are done, leased or free. Pure; saved in every snapshot.

A lease starts as a **range** (ranges.py); when it is released, the rest of it is free again. An epoch opens as soon as
the previous one has nothing free, so no worker waits at its end. A lease of a file of unknown length has no stop.

A position is **done** when it is applied to the parameters, under whichever lease. So pushes under a reassigned lease
are counted correctly, and a journal can be replayed on an older ledger.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from shoal_trainer.coordinator.lease_index import END, Lease, Leases, Segment, Token
from shoal_trainer.coordinator.ranges import Ranges, stretched
from shoal_trainer.ps.contents import Worker
from shoal_trainer.ps.positions import Positions

MAX_AHEAD = 4096
"""Pushes for epochs more than this many beyond the open ones are ignored as invalid."""

AHEAD_BATCHES = 2048
"""Small epochs may be leased this many batches ahead, so that other workers have work until the lease of a lost worker
is released."""
AHEAD_EPOCHS = 64


@dataclass
class EpochState:
    """The free segments of an epoch in visiting order, and the done positions of each file.

    `free` may contain positions that are done or leased: `grant` skips them, so that replaying a push needs no search.
    None: the whole epoch, not listed yet. A push may name an epoch far ahead, and the list of each takes a while.
    """

    free: deque[Segment] | None = None
    done: dict[int, Positions] = field(default_factory=dict)

    def done_in(self, file: int) -> Positions:
        """The done positions of a file (-1: data without files)."""
        return self.done.setdefault(file, Positions())


class Ledger:
    """Epochs over `size` samples or `files` files. `epochs` None: no limit.

    `in_step`: at most one epoch ahead, because the end of each epoch is evaluated. Otherwise as many small epochs ahead
    as make `AHEAD_BATCHES`. `block`: as of `Source`.
    """

    def __init__(
        self,
        *,
        size: int | None,
        files: int,
        batch_size: int,
        seed: str,
        epochs: int | None,
        in_step: bool = True,
        block: int = 0,
    ) -> None:
        self.ranges = Ranges.of(size=size, files=files, batch_size=batch_size, seed=seed, block=block)
        self.epochs = epochs
        self.ahead = 1
        batches_per_epoch = 0 if size is None else size // batch_size
        if batches_per_epoch and not in_step:
            self.ahead = max(1, min(AHEAD_EPOCHS, AHEAD_BATCHES // batches_per_epoch))
        self.lengths: dict[int, int] = {}
        self.open_epochs: dict[int, EpochState] = {}
        self.leases = Leases()
        self._stretches: dict[int, Segment] = {}
        """By slot: what its worker was granted in a row."""
        self.completed = 0
        """Epochs 0 … completed-1 are complete; the next one is the current one."""
        self.done_samples = 0
        self.opened = 0
        self._counter = 0
        self._outstanding = 0

    # --- leases ---------------------------------------------------------------------------------------------------

    def grant(
        self, worker: Worker, term: int, limit: int | None = None, half_of: int | None = None
    ) -> Lease | None:
        """Lease the next free segment, at most `limit` samples of it; None if nothing is free.

        `half_of`: no more than half of the ranges of this epoch are leased now, and none of a later one.
        """
        found = self._next_free(half_of, self._stretches.get(worker[0]))
        if found is None:
            return None
        segment = found
        if limit is not None and segment.stop is not None and segment.stop - segment.start > limit:
            cut = segment.start + max(1, limit)
            self._free(segment.epoch).appendleft(segment._replace(start=cut))
            segment = segment._replace(stop=cut)
        self._stretches[worker[0]] = stretched(self._stretches.get(worker[0]), segment)
        return self._lease(worker, term, segment)

    def apply(self, segment: Segment) -> list[Segment]:
        """Record that these positions were applied; returns those that had been applied before."""
        stop = segment.start if segment.stop is None else segment.stop
        if not self._exists(segment) or segment.start >= stop:
            return []
        while self.opened <= segment.epoch:
            self._open_next()
        state = self.open_epochs.get(segment.epoch)
        if state is None:
            return [segment]
        fresh = state.done_in(segment.file).add(segment.start, stop)
        self.done_samples += sum(end - begin for begin, end in fresh)
        repeated: list[Segment] = []
        if fresh != [(segment.start, stop)]:
            gaps = Positions(fresh).gaps(segment.start, stop)
            repeated = [segment._replace(start=a, stop=b) for a, b in gaps]
        for lease in self.leases.overlapping(segment):
            leased = lease.segment
            if leased.stop is not None:
                self._outstanding -= sum(max(0, min(b, leased.stop) - max(a, leased.start)) for a, b in fresh)
            if not self.rest(lease):
                self.leases.remove(lease.token)
        self._complete()
        return repeated

    def file_ended(self, token: Token, length: int) -> None:
        """Record the length of the leased file; the lease is removed once all its samples are applied."""
        lease = self.leases.get(token)
        if lease is None:
            return
        self.lengths[lease.segment.file] = length
        self._outstanding -= self._samples(lease)
        lease = replace(lease, segment=lease.segment._replace(stop=length))
        self._outstanding += self._samples(lease)
        self.leases.add(lease)
        if not self.rest(lease):
            self.leases.remove(token)
            self._complete()

    def rest(self, lease: Lease) -> list[Segment]:
        """The parts of a lease that are not done."""
        segment = lease.segment
        gaps = self.open_epochs[segment.epoch].done_in(segment.file).gaps(segment.start, segment.end)
        return [segment._replace(start=start, stop=None if stop == END else stop) for start, stop in gaps]

    def release(self, holds: Callable[[Lease], bool]) -> None:
        """Remove the leases for which `holds` is true; the rest of each is granted next, to who does not go on."""
        for lease in [lease for lease in self.leases.values() if holds(lease)]:
            self._release(lease)

    def reclaim(self, worker: Worker, term: int, segment: Segment) -> Lease | None:
        """Lease a segment again to the worker that held it before a restart; None if it is done or reassigned.

        Overlapping leases of other terms are released. Idempotent.
        """
        if not self._exists(segment):
            return None
        while self.opened <= segment.epoch:
            self._open_next()
        state = self.open_epochs.get(segment.epoch)
        gaps = [] if state is None else state.done_in(segment.file).gaps(segment.start, segment.end)
        if not gaps:
            return None
        segment = segment._replace(start=gaps[0][0])
        for lease in self.leases.overlapping(segment):
            if lease.token[0] != term:
                self._release(lease)
        if others := self.leases.overlapping(segment):
            first = others[0]
            if first.segment.start <= segment.start:
                return first if first.worker == worker else None
            segment = segment._replace(stop=first.segment.start)
        return self._lease(worker, term, segment)

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether all epochs are complete; never without a limit."""
        return self.epochs is not None and self.completed >= self.epochs

    @property
    def begun(self) -> bool:
        """Whether samples of epochs that are not complete are done."""
        return any(done.total for state in self.open_epochs.values() for done in state.done.values())

    def total(self) -> int | None:
        """Samples per epoch; None until every file has been read to its end."""
        if self.ranges.size is not None:
            return self.ranges.size
        return sum(self.lengths.values()) if len(self.lengths) == self.ranges.files else None

    def counts(self) -> tuple[int, int]:
        """(done, leased) samples of the current epoch."""
        if self.finished:
            return self.total() or 0, 0
        current = self.open_epochs.get(self.completed)
        done = 0 if current is None else sum(positions.total for positions in current.done.values())
        return done, sum(
            self._samples(lease) for lease in self.leases.values() if lease.segment.epoch == self.completed
        )

    def outstanding(self) -> int:
        """Leased samples in all epochs, except of files of unknown length."""
        return self._outstanding

    # --- snapshots ------------------------------------------------------------------------------------------------

    def frozen(self) -> Callable[[], dict[str, Any]]:
        """The state now; the result makes JSON of it, without the lock that this ledger is used under.

        With 100,000 files, JSON takes a quarter of a second.
        """
        lengths, leases = dict(self.lengths), list(self.leases.values())
        numbers = {
            "size": self.ranges.size,
            "files": self.ranges.files,
            "seed": self.ranges.seed,
            "rangeSize": self.ranges.length,
            "completed": self.completed,
            "opened": self.opened,
            "doneSamples": self.done_samples,
            "counter": self._counter,
        }
        passes = [
            (
                epoch,
                list(state.done),
                *Positions.share(state.done.values()),
                None if state.free is None else list(state.free),
            )
            for epoch, state in self.open_epochs.items()
        ]

        def dump() -> dict[str, Any]:
            return numbers | {
                "lengths": sorted(lengths.items()),
                "passes": [
                    [
                        epoch,
                        [
                            [file, list(zip(a, b, strict=True))]
                            for file, a, b in zip(files, starts, stops, strict=True)
                        ],
                        free,
                    ]
                    for epoch, files, starts, stops, free in passes
                ],
                "leases": [[*lease.token, *lease.worker, *lease.segment] for lease in leases],
            }

        return dump

    def dump(self) -> dict[str, Any]:
        """The state as JSON."""
        return self.frozen()()

    def load(self, saved: dict[str, Any]) -> None:
        """Restore the result of `dump`. Raises ValueError, KeyError or TypeError if it is invalid."""
        if saved["size"] != self.ranges.size or saved["files"] != self.ranges.files:
            raise ValueError("the saved ledger is for other data")
        self.ranges.seed = str(saved["seed"])
        self.ranges.length = int(saved["rangeSize"])
        self.lengths = {int(file): int(length) for file, length in saved["lengths"]}
        self.open_epochs = {
            int(epoch): EpochState(
                None if free is None else deque(Segment(*segment) for segment in free),
                {int(file): Positions(intervals) for file, intervals in done},
            )
            for epoch, done, free in saved["passes"]
        }
        self.leases = Leases()
        for term, counter, slot, incarnation, epoch, file, start, stop in saved["leases"]:
            self.leases.add(Lease((term, counter), (slot, incarnation), Segment(epoch, file, start, stop)))
        self._outstanding = sum(map(self._samples, self.leases.values()))
        self.completed = int(saved["completed"])
        self.opened = int(saved["opened"])
        self.done_samples = int(saved["doneSamples"])
        self._counter = max(self._counter, int(saved["counter"]))  # tokens must be unique

    # --- internals ------------------------------------------------------------------------------------------------

    def _free(self, epoch: int) -> deque[Segment]:
        """The free segments of an open epoch, listed at the first call."""
        state = self.open_epochs[epoch]
        if state.free is None:
            state.free = deque(self.ranges.visiting(epoch, self.lengths))
        return state.free

    def _next_free(self, half_of: int | None, stretch: Segment | None) -> Segment | None:
        while self.total() != 0:  # else each epoch is over when it opens
            for epoch in sorted(self.open_epochs):
                free = self._free(epoch)
                kept = self.ranges.per_epoch // 2 if epoch == half_of else 0
                while len(free) > kept:
                    pieces = self._open(self.ranges.next_of(free, stretch))
                    if pieces:
                        free.extendleft(reversed(pieces[1:]))
                        return pieces[0]
            self._complete()
            last = self.completed + self.ahead if half_of is None else half_of
            if self.opened > last or (self.epochs is not None and self.opened >= self.epochs):
                return None
            self._open_next()
        return None

    def _open(self, segment: Segment) -> list[Segment]:
        """The parts of a segment of `free` that are neither done nor leased."""
        done = self.open_epochs[segment.epoch].done_in(segment.file)
        leased = Positions()
        for lease in self.leases.overlapping(segment):
            leased.add(lease.segment.start, lease.segment.end)
        stop = self.lengths.get(segment.file, END) if segment.stop is None else segment.stop
        open_now = [
            piece for gap in done.gaps(segment.start, max(segment.start, stop)) for piece in leased.gaps(*gap)
        ]
        return [segment._replace(start=a, stop=None if b == END else b) for a, b in open_now]

    def _open_next(self) -> None:
        epoch = self.opened
        self.opened += 1
        self.open_epochs[epoch] = EpochState()

    def _lease(self, worker: Worker, term: int, segment: Segment) -> Lease:
        self._counter += 1
        lease = Lease((term, self._counter), worker, segment)
        self.leases.add(lease)
        self._outstanding += self._samples(lease)
        return lease

    def _release(self, lease: Lease) -> None:
        self.leases.remove(lease.token)
        self._outstanding -= self._samples(lease)
        self._free(lease.segment.epoch).extendleft(reversed(self.rest(lease)))

    def _samples(self, lease: Lease) -> int:
        """Samples of a lease that are not done; 0 if its end is unknown."""
        if lease.segment.stop is None:
            return 0
        return sum(piece.end - piece.start for piece in self.rest(lease))

    def _exists(self, segment: Segment) -> bool:
        """Whether the data have these positions, which come from the network."""
        files = range(-1, 0) if self.ranges.size is not None else range(self.ranges.files)
        epochs = min(self.opened + MAX_AHEAD, math.inf if self.epochs is None else self.epochs)
        within = self.ranges.size is None or (segment.stop is not None and segment.stop <= self.ranges.size)
        return segment.file in files and 0 <= segment.epoch < epochs and segment.start >= 0 and within

    def _complete(self) -> None:
        """Close, in order, the epochs with no free or leased positions."""
        while self.completed in self.open_epochs:
            if self.leases.in_epoch(self.completed):
                return
            free = self._free(self.completed)
            while free and not self._open(free[0]):
                free.popleft()
            if free:
                return
            del self.open_epochs[self.completed]
            self.completed += 1
