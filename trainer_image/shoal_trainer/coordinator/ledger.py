"""The data ledger: which positions of each epoch are done, leased or free. Pure; saved in every snapshot.

A lease is a **range** or a piece of one (ranges.py); when it is released, the rest of it is free again. A worker goes
on with the range of its last piece; others get a piece of that when nothing else is free. An epoch opens as soon as the
previous one has nothing free, so no worker waits at its end. A lease of a file of unknown length has no stop.

A position is **done** when it is applied to the parameters, under whichever lease. So pushes under a reassigned lease
are counted correctly, and a journal can be replayed on an older ledger.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal_trainer.coordinator.epoch_state import EpochState
from shoal_trainer.coordinator.lease_index import END, Grant, LeaseIndex, Segment, Token
from shoal_trainer.coordinator.ranges import ALONE, FILE_PIECES, Portion, Ranges
from shoal_trainer.ps.contents import Worker
from shoal_trainer.ps.positions import Positions

MAX_AHEAD = 4096
"""Pushes for epochs more than this many beyond the open ones are ignored as invalid."""

AHEAD_EPOCHS = 64
"""Epochs that nothing judges may be leased so far ahead: others have work until the lease of a lost worker is released,
however small the epochs and many the workers."""


class Ledger:
    """Epochs over `size` samples or `files` files. `epochs` None: no limit.

    `in_step`: at most one epoch ahead, because the end of each epoch is evaluated. So it is with files: an open epoch
    knows what is done of each. `block`: as of `Source`.
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
        self._batch_size = batch_size
        self.ranges = Ranges.of(size=size, files=files, batch_size=batch_size, seed=seed, block=block)
        self.epochs = epochs
        self.ahead = 1 if in_step or size is None else AHEAD_EPOCHS
        self.lengths: dict[int, int] = {}
        self._known = 0
        """The sum of the lengths."""
        self.open_epochs: dict[int, EpochState] = {}
        self.leases = LeaseIndex()
        self._held: Counter[Worker] = Counter()
        self.completed = 0
        """Epochs 0 … completed-1 are complete; the next one is the current one."""
        self.done_samples = 0
        self.opened = 0
        self._counter = 0

    # --- leases ---------------------------------------------------------------------------------------------------

    def grant(
        self,
        worker: Worker,
        term: int,
        portion: Portion = ALONE,
        steps: int | None = None,
        half_of: int | None = None,
    ) -> Grant | None:
        """Lease a portion of the next free segment; None if nothing is free, or if the worker holds enough for now.

        `steps`: so many are left of all. `half_of`: no more than half of this epoch is leased now, and nothing of a
        later one.
        """
        left, leased = self._left(half_of), sum(state.leased.total() for state in self.open_epochs.values())
        if steps is not None:
            limit = portion.batch * (steps - self.leased_steps())
            left = limit if left is None else min(left, limit)
            if limit <= 0:
                return None
        samples = math.inf
        if left is not None:
            samples = portion.of(left, leased, self.held(worker), self._piece)
        if samples == 0 or (segment := self._next_free(worker[0], half_of)) is None:
            return None
        if left is not None and segment.stop is not None:
            cut = segment.start + portion.cut(samples, left, segment.stop - segment.start)
            if cut < segment.stop:
                self.open_epochs[segment.epoch].rests[worker[0]] = segment._replace(start=cut)
                segment = segment._replace(stop=cut)
        return self._lease(worker, term, segment, portion.batch)

    def apply(self, segment: Segment) -> list[Segment]:
        """Record that these positions were applied; returns those that had been applied before."""
        stop = segment.start if segment.stop is None else segment.stop
        if not self.exists(segment) or segment.start >= stop:
            return []
        while self.opened <= segment.epoch:
            self._open_next()
        state = self.open_epochs.get(segment.epoch)
        if state is None:
            return [segment]
        fresh = state.apply(segment)
        self.done_samples += sum(end - begin for begin, end in fresh)
        repeated: list[Segment] = []
        if fresh != [(segment.start, stop)]:
            gaps = Positions(fresh).gaps(segment.start, stop)
            repeated = [segment._replace(start=a, stop=b) for a, b in gaps]
        for lease in self.leases.overlapping(segment):
            begin, end = lease.segment.start, self._end(lease.segment)
            if end is not None:
                self._count(lease, -sum(max(0, min(b, end) - max(a, begin)) for a, b in fresh))
            if not self.rest(lease):
                self.leases.remove(lease.token)
        self._complete()
        return repeated

    def file_ended(self, token: Token, length: int) -> None:
        """Record the length of the leased file; the lease is removed once all its samples are applied."""
        lease = self.leases.get(token)
        if lease is None:
            return
        file, found = lease.segment.file, self.leases.overlapping
        held = [each for epoch in self.open_epochs for each in found(Segment(epoch, file, 0, None))]
        for each in held:
            self._count(each, -self._samples(each))
        self._known += length - self.lengths.get(file, 0)
        self.lengths[file] = length
        for each in held:
            self._count(each, self._samples(each))
        lease = replace(lease, segment=lease.segment._replace(stop=length))
        self.leases.add(lease)
        if not self.rest(lease):
            self.leases.remove(token)
            self._complete()

    def exists(self, segment: Segment) -> bool:
        """Whether the data have these positions, which come from the network."""
        files = range(-1, 0) if self.ranges.size is not None else range(self.ranges.files)
        epochs = min(self.opened + MAX_AHEAD, math.inf if self.epochs is None else self.epochs)
        within = self.ranges.size is None or (segment.stop is not None and segment.stop <= self.ranges.size)
        return segment.file in files and 0 <= segment.epoch < epochs and segment.start >= 0 and within

    def rest(self, lease: Grant) -> list[Segment]:
        """The parts of a lease that are not done."""
        segment = lease.segment
        gaps = self.open_epochs[segment.epoch].done_in(segment.file).gaps(segment.start, segment.end)
        return [segment._replace(start=start, stop=None if stop == END else stop) for start, stop in gaps]

    def release(self, holds: Callable[[Grant], bool]) -> None:
        """Remove the leases for which `holds` is true; the rest of each is granted next, to who does not go on."""
        for lease in [lease for lease in self.leases.values() if holds(lease)]:
            self._release(lease)

    def reclaim(self, worker: Worker, term: int, segment: Segment, batch: int) -> Grant | None:
        """Lease a segment again to the worker that held it before a restart; None if it is done or reassigned.

        Overlapping leases of other terms are released. Idempotent.
        """
        if not self.exists(segment):
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
        return self._lease(worker, term, segment, batch)

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether all epochs are complete; never without a limit."""
        return self.epochs is not None and self.completed >= self.epochs

    @property
    def begun(self) -> bool:
        """Whether samples of epochs that are not complete are done."""
        return any(state.samples for state in self.open_epochs.values())

    def total(self) -> int | None:
        """Samples per epoch; None until every file has been read to its end."""
        if self.ranges.size is not None:
            return self.ranges.size
        return self._known if len(self.lengths) == self.ranges.files else None

    def counts(self) -> tuple[int, int]:
        """(done, leased) samples of the current epoch."""
        if self.finished:
            return self.total() or 0, 0
        current = self.open_epochs.get(self.completed)
        return (0, 0) if current is None else (current.samples, current.leased.total())

    def held(self, worker: Worker) -> int:
        """The samples that this worker holds and that are not done, except of files of unknown length."""
        return self._held[worker]

    def leased_steps(self) -> int:
        """The steps that are leased in all epochs and not done, except of files of unknown length."""
        return sum(
            -(-samples // batch)
            for state in self.open_epochs.values()
            for batch, samples in state.leased.items()
        )

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
                state.all_free(),
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
        self._known = sum(self.lengths.values())
        self.open_epochs = {}
        for epoch, done, free in saved["passes"]:
            state = self.open_epochs[int(epoch)] = EpochState()
            state.free = None if free is None else deque(Segment(*segment) for segment in free)
            state.done = {int(file): Positions(intervals) for file, intervals in done}
            state.samples = sum(positions.total for positions in state.done.values())
        self.leases, self._held = LeaseIndex(), Counter()
        for term, counter, slot, incarnation, epoch, file, start, stop in saved["leases"]:
            segment = Segment(epoch, file, start, stop)
            self._hold(Grant((term, counter), (slot, incarnation), segment, self._batch_size))
        self.completed = int(saved["completed"])
        self.opened = int(saved["opened"])
        self.done_samples = int(saved["doneSamples"])
        self._counter = max(self._counter, int(saved["counter"]))  # tokens must be unique

    # --- internals ------------------------------------------------------------------------------------------------

    def _listed(self, epoch: int) -> EpochState:
        """An open epoch with its free segments, which are listed at the first call."""
        state = self.open_epochs[epoch]
        if state.free is None:
            state.free = deque(self.ranges.visiting(epoch, self.lengths))
        return state

    def _last(self, half_of: int | None) -> int:
        """The last epoch of which something may be leased now."""
        last = self.completed + self.ahead if half_of is None else half_of
        return last if self.epochs is None else min(last, self.epochs - 1)

    def _next_free(self, slot: int, half_of: int | None) -> Segment | None:
        while self.total() != 0:  # else each epoch is over when it opens
            for epoch in sorted(epoch for epoch in self.open_epochs if epoch <= self._last(half_of)):
                state = self._listed(epoch)
                while epoch != half_of or self._half_free(state):
                    if (segment := state.take(slot)) is None:
                        break
                    if pieces := self._open(segment):
                        state.give_back(pieces[1:])
                        return pieces[0]
            self._complete()
            if self.opened > self._last(half_of):
                return None
            self._open_next()
        return None

    def _half_free(self, state: EpochState) -> bool:
        """Whether more than half of an epoch is free: of its samples, or of its files until all lengths are known."""
        if (total := self.total()) is None:
            return len(state.free or ()) + len(state.rests) > self.ranges.files // 2
        return total - state.taken > total // 2

    def _left(self, half_of: int | None) -> int | None:
        """The free samples that may be leased now; None until all lengths are known."""
        if (total := self.total()) is None:
            return None
        last = self._last(half_of)
        free = {
            epoch: max(0, total - state.taken) for epoch, state in self.open_epochs.items() if epoch <= last
        }
        kept = min(total // 2, free.get(last, total)) if half_of == last else 0
        return sum(free.values()) + max(0, last + 1 - self.opened) * total - kept

    @property
    def _piece(self) -> float:
        """Of a file, the least that is leased of it."""
        return (self.total() or 0) / self.ranges.files / FILE_PIECES if self.ranges.files else 0

    def _open(self, segment: Segment) -> list[Segment]:
        """The parts of a segment of `free` that are neither done nor leased."""
        done = self.open_epochs[segment.epoch].done_in(segment.file)
        leased = Positions()
        for lease in self.leases.overlapping(segment):
            leased.add(lease.segment.start, lease.segment.end)
        end = self._end(segment)
        stop = END if end is None else end
        open_now = [
            piece for gap in done.gaps(segment.start, max(segment.start, stop)) for piece in leased.gaps(*gap)
        ]
        return [segment._replace(start=a, stop=None if b == END else b) for a, b in open_now]

    def _open_next(self) -> None:
        epoch = self.opened
        self.opened += 1
        self.open_epochs[epoch] = EpochState()

    def _lease(self, worker: Worker, term: int, segment: Segment, batch: int) -> Grant:
        self._counter += 1
        lease = Grant((term, self._counter), worker, segment, batch)
        self._hold(lease)
        return lease

    def _hold(self, lease: Grant) -> None:
        self.leases.add(lease)
        self._count(lease, self._samples(lease))

    def _release(self, lease: Grant) -> None:
        self.leases.remove(lease.token)
        self._count(lease, -self._samples(lease))
        self._listed(lease.segment.epoch).give_back(self.rest(lease))

    def _count(self, lease: Grant, samples: int) -> None:
        """So many samples more of a lease are not done."""
        self.open_epochs[lease.segment.epoch].leased[lease.batch] += samples
        self._held[lease.worker] += samples
        if not self._held[lease.worker]:
            del self._held[lease.worker]

    def _end(self, segment: Segment) -> int | None:
        """The stop of a segment, or the end of its file; None if that is unknown."""
        return self.lengths.get(segment.file) if segment.stop is None else segment.stop

    def _samples(self, lease: Grant) -> int:
        """Samples of a lease that are not done; 0 if its end is unknown."""
        if (end := self._end(lease.segment)) is None:
            return 0
        return sum(max(0, min(piece.end, end) - piece.start) for piece in self.rest(lease))

    def _complete(self) -> None:
        """Close, in order, the epochs with no free or leased positions."""
        while self.completed in self.open_epochs:
            if self.leases.in_epoch(self.completed):
                return
            state = self._listed(self.completed)
            while (segment := state.take(-1)) is not None:
                if pieces := self._open(segment):
                    state.give_back(pieces)
                    return
            del self.open_epochs[self.completed]
            self.completed += 1
