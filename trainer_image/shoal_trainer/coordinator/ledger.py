"""The data ledger: which positions of each pass over the data are done, leased, or free. Pure; part of every snapshot.

A **range** is what a lease begins as; a lease that is given back leaves the rest of its range, exactly. Positions are
visited in a seeded order of ranges, another one in each pass. A pass begins when the one before it has nothing free
left, so nobody waits at its end. With files the length is learned: a lease has no stop until somebody met the end.

**Done** is what the parameters hold, whoever pushed it and under which lease: so a push is counted right even where its
lease is somebody else's by now, and a journal of pushes can be replayed on a ledger of an earlier moment.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from shoal_trainer.coordinator.leased import END, Lease, Leased, Segment, Token
from shoal_trainer.ps.positions import Positions

MAX_AHEAD = 4096
"""A push may speak of so many passes beyond those that are open; more is none of ours."""

RANGES_IN_A_PASS = 32
"""At least so many ranges where the data are large enough: the tail of a pass is short."""
MAX_BATCHES = 64
"""At most so many batches in a range: what a vanished worker delays."""
AHEAD_BATCHES = 2048
"""So many batches beyond the pass that is being completed may be given out: what a vanished worker holds of it is free
only when its silence is noticed, and nobody else is to stand still until then."""
AHEAD_PASSES = 64
MAX_RANGES = 1 << 14
"""But no more ranges in a pass than these, however large the data: every snapshot tells of all of them."""


@dataclass
class Pass:
    """One pass over the data: what is free, in the order in which it will be visited, and what is done of each file.

    What is pushed or leased without having been granted from `free` stays in it and is passed over when its turn comes:
    to look for it would cost a walk over all of them, for each push that is replayed after a loss.
    """

    free: deque[Segment] = field(default_factory=deque)
    done: dict[int, Positions] = field(default_factory=dict)

    def of(self, file: int) -> Positions:
        """What is done of a file (-1: of the data)."""
        return self.done.setdefault(file, Positions())


class Ledger:
    """Passes over `size` samples, or over `files` files; `epochs` None: until somebody says stop.

    One pass ahead at most, so that a pass ends soon after the next one began; where they need not be in step
    (`in_step`: something judges them), as many small ones as make `AHEAD_BATCHES`.
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
    ) -> None:
        self.size = size
        self.files = files
        self.seed = seed
        self.epochs = epochs
        in_a_pass = 0 if size is None else size // batch_size
        batches = max(1, min(MAX_BATCHES, in_a_pass // RANGES_IN_A_PASS), -(-in_a_pass // MAX_RANGES))
        self.range_size = batch_size * batches
        self.ahead = 1 if in_step or not in_a_pass else max(1, min(AHEAD_PASSES, AHEAD_BATCHES // in_a_pass))
        self.lengths: dict[int, int] = {}
        self.passes: dict[int, Pass] = {}
        self.leases = Leased()
        self.completed = 0
        """Passes 0 … completed-1 are complete."""
        self.done_samples = 0
        self.opened = 0
        self._counter = 0
        self._outstanding = 0

    # --- leases ---------------------------------------------------------------------------------------------------

    def grant(self, slot: int, incarnation: int, term: int, limit: int | None = None) -> Lease | None:
        """The next free segment, at most `limit` samples of it; None where nothing is free."""
        found = self._next_free()
        if found is None:
            return None
        of, segment = found
        if limit is not None and segment.stop is not None and segment.stop - segment.start > limit:
            cut = segment.start + max(1, limit)
            of.free.appendleft(segment._replace(start=cut))
            segment = segment._replace(stop=cut)
        return self._lease(slot, incarnation, term, segment)

    def apply(self, segment: Segment) -> list[Segment]:
        """A push over these positions is in the parameters; returns those of them that were there before."""
        stop = segment.start if segment.stop is None else segment.stop
        if not self._ours(segment) or segment.start >= stop:
            return []
        while self.opened <= segment.epoch:
            self._open_next()
        of = self.passes.get(segment.epoch)
        if of is None:
            return [segment]
        fresh = of.of(segment.file).add(segment.start, stop)
        self.done_samples += sum(end - begin for begin, end in fresh)
        seen = Positions(fresh)
        again = [segment._replace(start=a, stop=b) for a, b in seen.gaps(segment.start, stop)]
        for lease in self.leases.overlapping(segment):
            held = lease.segment
            if held.stop is not None:
                self._outstanding -= sum(max(0, min(b, held.stop) - max(a, held.start)) for a, b in fresh)
            if not self.rest(lease):
                self.leases.remove(lease.token)
        self._complete()
        return again

    def file_ended(self, token: Token, length: int) -> None:
        """The file of this lease has `length` samples; the lease ends where its last push takes it there."""
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
        """What of a lease is not done yet."""
        segment = lease.segment
        gaps = self.passes[segment.epoch].of(segment.file).gaps(segment.start, segment.end)
        return [segment._replace(start=start, stop=None if stop == END else stop) for start, stop in gaps]

    def release(self, holds: Callable[[Lease], bool]) -> None:
        """Take the leases for which `holds` is true back: their rests are the next to be given out."""
        for lease in [lease for lease in self.leases.values() if holds(lease)]:
            self._release(lease)

    def reclaim(self, slot: int, incarnation: int, term: int, segment: Segment) -> Lease | None:
        """A lease of what a worker holds of old and will push itself; None where that is done, or somebody else's.

        Leases of another `term` are nobody's by now. Asking again gives the same lease.
        """
        if not self._ours(segment):
            return None
        while self.opened <= segment.epoch:
            self._open_next()
        of = self.passes.get(segment.epoch)
        gaps = [] if of is None else of.of(segment.file).gaps(segment.start, segment.end)
        if of is None or not gaps:
            return None
        segment = segment._replace(start=gaps[0][0])
        for lease in self.leases.overlapping(segment):
            if lease.token[0] != term:
                self._release(lease)
        if others := self.leases.overlapping(segment):
            first = others[0]
            if first.segment.start <= segment.start:
                mine = (first.slot, first.incarnation) == (slot, incarnation)
                return first if mine else None
            segment = segment._replace(stop=first.segment.start)
        return self._lease(slot, incarnation, term, segment)

    # --- telling --------------------------------------------------------------------------------------------------

    @property
    def current(self) -> int:
        """The pass that is being completed."""
        return self.completed

    @property
    def finished(self) -> bool:
        """Whether all passes that were asked for are complete."""
        return self.epochs is not None and self.completed >= self.epochs

    def total(self) -> int | None:
        """Samples of a pass; None until every file has been read to its end."""
        if self.size is not None:
            return self.size
        return sum(self.lengths.values()) if len(self.lengths) == self.files else None

    def counts(self) -> tuple[int, int]:
        """(done, leased) samples of the current pass."""
        if self.finished:
            return self.total() or 0, 0
        current = self.passes.get(self.completed)
        done = 0 if current is None else sum(positions.total for positions in current.done.values())
        return done, sum(
            self._samples(lease) for lease in self.leases.values() if lease.segment.epoch == self.completed
        )

    def outstanding(self) -> int:
        """Samples that are leased, in all epochs (of files of unknown length: none)."""
        return self._outstanding

    def ranges_in_a_pass(self) -> int:
        """How many ranges a pass has."""
        return self.files if self.size is None else -(-self.size // self.range_size)

    def range_of(self, segment: Segment) -> range:
        """The numbers of the ranges that a segment touches."""
        if segment.file >= 0 or segment.stop is None:
            return range(max(0, segment.file), max(0, segment.file) + 1)
        return range(
            segment.start // self.range_size, max(segment.start, segment.stop - 1) // self.range_size + 1
        )

    def visiting(self, epoch: int) -> list[Segment]:
        """All segments of a pass, in the order in which they are given out."""
        if self.size is None:
            segments = [Segment(epoch, file, 0, self.lengths.get(file)) for file in range(self.files)]
        else:
            starts = range(0, self.size, self.range_size)
            segments = [
                Segment(epoch, -1, start, min(start + self.range_size, self.size)) for start in starts
            ]
        random.Random(f"{self.seed}/{epoch}").shuffle(segments)
        return segments

    # --- snapshots ------------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return {
            "size": self.size,
            "files": self.files,
            "seed": self.seed,
            "rangeSize": self.range_size,
            "lengths": sorted(self.lengths.items()),
            "passes": [
                [
                    epoch,
                    [[file, done.intervals()] for file, done in of.done.items()],
                    list(of.free),
                ]
                for epoch, of in self.passes.items()
            ],
            "leases": [
                [*lease.token, lease.slot, lease.incarnation, *_plain(lease.segment)]
                for lease in self.leases.values()
            ],
            "completed": self.completed,
            "opened": self.opened,
            "doneSamples": self.done_samples,
            "counter": self._counter,
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Take over what `dump` gave. Raises ValueError, KeyError or TypeError for anything else."""
        if saved["size"] != self.size or saved["files"] != self.files:
            raise ValueError("the ledger is of other data")
        self.seed = str(saved["seed"])
        self.range_size = int(saved["rangeSize"])
        self.lengths = {int(file): int(length) for file, length in saved["lengths"]}
        self.passes = {
            int(epoch): Pass(
                deque(Segment(*segment) for segment in free),
                {int(file): Positions(intervals) for file, intervals in done},
            )
            for epoch, done, free in saved["passes"]
        }
        self.leases = Leased()
        for term, counter, slot, incarnation, epoch, file, start, stop in saved["leases"]:
            self.leases.add(Lease((term, counter), slot, incarnation, Segment(epoch, file, start, stop)))
        self._outstanding = sum(map(self._samples, self.leases.values()))
        self.completed = int(saved["completed"])
        self.opened = int(saved["opened"])
        self.done_samples = int(saved["doneSamples"])
        self._counter = max(self._counter, int(saved["counter"]))  # no token is given twice

    # --- inside ---------------------------------------------------------------------------------------------------

    def _next_free(self) -> tuple[Pass, Segment] | None:
        while True:
            for _, of in sorted(self.passes.items()):
                while of.free:
                    pieces = self._open(of.free.popleft())
                    if pieces:
                        of.free.extendleft(reversed(pieces[1:]))
                        return of, pieces[0]
            self._complete()
            if self.opened > self.completed + self.ahead or (
                self.epochs is not None and self.opened >= self.epochs
            ):
                return None
            self._open_next()

    def _open(self, segment: Segment) -> list[Segment]:
        """What of a segment that was free when it was put there is neither done nor leased by now."""
        done = self.passes[segment.epoch].of(segment.file)
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
        self.passes[epoch] = Pass(deque(self.visiting(epoch)))

    def _lease(self, slot: int, incarnation: int, term: int, segment: Segment) -> Lease:
        self._counter += 1
        lease = Lease((term, self._counter), slot, incarnation, segment)
        self.leases.add(lease)
        self._outstanding += self._samples(lease)
        return lease

    def _release(self, lease: Lease) -> None:
        self.leases.remove(lease.token)
        self._outstanding -= self._samples(lease)
        self.passes[lease.segment.epoch].free.extendleft(reversed(self.rest(lease)))

    def _samples(self, lease: Lease) -> int:
        """Samples of a lease that are not done; 0 where its end is unknown."""
        if lease.segment.stop is None:
            return 0
        return sum(piece.end - piece.start for piece in self.rest(lease))

    def _ours(self, segment: Segment) -> bool:
        """Whether there are such positions: what the network brings is checked before it costs anything."""
        files = range(-1, 0) if self.size is not None else range(self.files)
        most = self.opened + MAX_AHEAD if self.epochs is None else self.epochs
        within = self.size is None or (segment.stop is not None and segment.stop <= self.size)
        return segment.file in files and 0 <= segment.epoch < most and segment.start >= 0 and within

    def _complete(self) -> None:
        """Close the passes of which nothing is free or leased, in order."""
        while self.completed in self.passes:
            of = self.passes[self.completed]
            if self.leases.in_pass(self.completed):
                return
            while of.free and not self._open(of.free[0]):
                of.free.popleft()
            if of.free:
                return
            del self.passes[self.completed]
            self.completed += 1


def _plain(segment: Segment) -> Iterable[int | None]:
    return segment.epoch, segment.file, segment.start, segment.stop
