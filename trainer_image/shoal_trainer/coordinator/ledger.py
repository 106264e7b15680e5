"""The data ledger: which positions of each epoch are done, leased or free. Pure; saved in every snapshot.

A lease starts as a **range**; when it is released, the rest of it is free again. Each epoch visits the ranges in its
own seeded order, and opens as soon as the previous one has nothing free, so no worker waits at its end. Of data that
are read in blocks, which are larger than the ranges of small data, a worker goes on behind its last range for a while
if that is free. A lease of a file of unknown length has no stop.

A position is **done** when it is applied to the parameters, under whichever lease. So pushes under a reassigned lease
are counted correctly, and a journal can be replayed on an older ledger.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from shoal_trainer.coordinator.lease_index import END, Lease, Leases, Segment, Token
from shoal_trainer.ps.contents import Worker
from shoal_trainer.ps.positions import Positions

MAX_AHEAD = 4096
"""Pushes for epochs more than this many beyond the open ones are ignored as invalid."""

MIN_RANGES = 32
"""Per epoch, if the data are large enough: keeps the tail of an epoch short."""
MAX_BATCHES = 64
"""Per range: limits the work that a lost worker delays."""
AHEAD_BATCHES = 2048
"""Small epochs may be leased this many batches ahead, so that other workers have work until the lease of a lost worker
is released."""
AHEAD_EPOCHS = 64
STRETCH_BLOCKS = 2
"""About what one worker is granted in a row: more would be read once, and fewer samples mixed."""
MAX_RANGES = 1 << 14
"""Per epoch, which takes precedence over `MAX_BATCHES`: every snapshot contains all ranges."""


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
        self.size = size
        self.files = files
        self.seed = seed
        self.epochs = epochs
        batches_per_epoch = 0 if size is None else size // batch_size
        batches = max(
            1, min(MAX_BATCHES, batches_per_epoch // MIN_RANGES), -(-batches_per_epoch // MAX_RANGES)
        )
        self.range_size = batch_size * batches
        self.ahead = 1
        if batches_per_epoch and not in_step:
            self.ahead = max(1, min(AHEAD_EPOCHS, AHEAD_BATCHES // batches_per_epoch))
        self.lengths: dict[int, int] = {}
        self.open_epochs: dict[int, EpochState] = {}
        self.leases = Leases()
        self.stretch = STRETCH_BLOCKS * block
        """A worker that was granted so many samples in a row goes on elsewhere."""
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
        self._stretches[worker[0]] = _stretched(self._stretches.get(worker[0]), segment)
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
        if self.size is not None:
            return self.size
        return sum(self.lengths.values()) if len(self.lengths) == self.files else None

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

    def ranges_per_epoch(self) -> int:
        """The number of ranges in an epoch."""
        return self.files if self.size is None else -(-self.size // self.range_size)

    def ranges_of(self, segments: Iterable[Segment]) -> set[tuple[int, int]]:
        """(epoch, number) of each range that the segments overlap."""
        found = set()
        for epoch, file, start, stop in segments:
            first, last = max(0, file), max(0, file)
            if file < 0 and stop is not None:
                first, last = start // self.range_size, max(start, stop - 1) // self.range_size
            found |= {(epoch, number) for number in range(first, last + 1)}
        return found

    def visiting(self, epoch: int) -> list[Segment]:
        """All segments of an epoch in the order in which they are granted to workers that do not go on."""
        if self.size is None:
            segments = [Segment(epoch, file, 0, self.lengths.get(file)) for file in range(self.files)]
        else:
            starts = range(0, self.size, self.range_size)
            segments = [
                Segment(epoch, -1, start, min(start + self.range_size, self.size)) for start in starts
            ]
        random.Random(f"{self.seed}/{epoch}").shuffle(segments)
        return segments

    def alone(self, epoch: int) -> Iterator[Segment]:
        """All segments of an epoch as they are granted to a worker that is the only one."""
        free, stretch = deque(self.visiting(epoch)), None
        while free:
            segment = self._follow(free, stretch) or free.popleft()
            stretch = _stretched(stretch, segment)
            yield segment

    # --- snapshots ------------------------------------------------------------------------------------------------

    def frozen(self) -> Callable[[], dict[str, Any]]:
        """The state now; the result makes JSON of it, without the lock that this ledger is used under.

        With 100,000 files, JSON takes a quarter of a second.
        """
        lengths, leases = dict(self.lengths), list(self.leases.values())
        numbers = {
            "size": self.size,
            "files": self.files,
            "seed": self.seed,
            "rangeSize": self.range_size,
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
        if saved["size"] != self.size or saved["files"] != self.files:
            raise ValueError("the saved ledger is for other data")
        self.seed = str(saved["seed"])
        self.range_size = int(saved["rangeSize"])
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
            state.free = deque(self.visiting(epoch))
        return state.free

    def _next_free(self, half_of: int | None, stretch: Segment | None) -> Segment | None:
        while self.total() != 0:  # else each epoch is over when it opens
            for epoch in sorted(self.open_epochs):
                free = self._free(epoch)
                kept = self.ranges_per_epoch() // 2 if epoch == half_of else 0
                while len(free) > kept:
                    pieces = self._open(self._follow(free, stretch) or free.popleft())
                    if pieces:
                        free.extendleft(reversed(pieces[1:]))
                        return pieces[0]
            self._complete()
            last = self.completed + self.ahead if half_of is None else half_of
            if self.opened > last or (self.epochs is not None and self.opened >= self.epochs):
                return None
            self._open_next()
        return None

    def _follow(self, free: deque[Segment], stretch: Segment | None) -> Segment | None:
        """Take what is free behind a stretch; None if nothing is, or if the stretch is over."""
        if stretch is None or stretch.stop is None or stretch.stop - stretch.start >= self.stretch:
            return None
        begin = *stretch[:2], stretch.stop
        following = next((segment for segment in free if segment[:3] == begin), None)
        if following is not None:
            free.remove(following)
        return following

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
        files = range(-1, 0) if self.size is not None else range(self.files)
        epochs = min(self.opened + MAX_AHEAD, math.inf if self.epochs is None else self.epochs)
        within = self.size is None or (segment.stop is not None and segment.stop <= self.size)
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


def _stretched(stretch: Segment | None, segment: Segment) -> Segment:
    """What a worker was granted in a row, with the newest segment."""
    if stretch is None or (*stretch[:2], stretch.stop) != segment[:3]:
        return segment
    return segment._replace(start=stretch.start)
