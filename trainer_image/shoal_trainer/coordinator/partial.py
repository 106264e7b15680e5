"""Partial pushes, which only some shards hold, and the positions that they cover. Pure; saved in every snapshot.

The set of partial pushes is computed from the contents of the shards each time, before their lock is taken: `differs`,
of `uneven`. Only the positions are kept here, because the shards' journals drop them at the next snapshot. A shard that
has returned to a snapshot may have lost tens of thousands, which it will lack for the rest of the run: these are kept
as ranges, once a snapshot has them as partial, so that nothing is done for each of them under the shard's lock again
and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shoal_trainer.ps.contents import Contents, Push, Worker, arriving, forgotten, settled
from shoal_trainer.wire.messages import Entry, Progress


class Partial:
    """The positions of pushes that some shards lacked at a comparison: partial ones, and some that were in flight."""

    def __init__(self) -> None:
        self._covers: dict[Push, list[Progress]] = {}
        self._known = Contents()
        """The pushes that it has, as ranges."""
        self._settled = Contents()
        """Those that some shard can no longer get: their positions are permanent, which counts too much where the
        shards that have one lose it later, to a snapshot's damaged file."""
        self._whole: set[Push] = set()
        """Those of them that all shards held at the last comparison."""
        self._permanent: list[Progress] = []
        """Of settled pushes, of forgotten incarnations, of the run that this one started from, and from before a change
        of shards."""

    def unknown(self, pushes: Contents) -> Contents:
        """The pushes whose positions are not known."""
        return pushes.without(self._settled).without(self._known)

    def learn(self, entries: Iterable[Entry]) -> None:
        """Add the positions of unknown pushes from a shard's journal."""
        covered: dict[Push, list[Progress]] = {}
        for e in entries:
            marks = covered.setdefault((e.slot, e.incarnation, e.seq), [])
            if e.start < e.stop:
                marks.append(Progress(e.epoch, e.file, e.start, e.stop))
        for push, marks in covered.items():
            if push not in self._covers and push not in self._settled:
                self._covers[push] = marks
                self._known.add(push)

    def compared(self, shards: Sequence[Contents], differs: Contents) -> Contents:
        """Note which of the known pushes all shards hold now; returns those that some lack, without the settled."""
        differs = differs.without(self._settled)
        known = self._covers.keys() - forgotten(shards, self._covers)
        self._whole = (known & set(self._known.without(differs))) | (self._whole - known)
        return differs

    def count(
        self, shards: Sequence[Contents], differs: Contents, present: set[Worker], *, at_end: bool = False
    ) -> tuple[list[Progress], bool]:
        """The positions of partial pushes, and whether pushes of `present` workers may be in flight.

        Pushes in flight count as partial only `at_end`.
        """
        differs = self.compared(shards, differs)
        in_flight: set[Push] = set()
        for slot, incarnation, start, stop in differs.spans():
            if (slot, incarnation) in present:
                last = min(contents.last((slot, incarnation)) for contents in shards)
                later = ((slot, incarnation, seq) for seq in range(max(start, last + 1), stop))
                in_flight.update(push for push in later if arriving(shards, push))
        marks = self._for_good(shards)
        for push in self._known.within(differs):
            if at_end or push not in in_flight:
                marks += self._covers[push]
        return marks, bool(in_flight)

    def published(self, shards: Sequence[Contents], differs: Contents) -> None:
        """A snapshot with these contents was published: drop the pushes that all shards hold, and settle others."""
        partial = self._known.within(differs)
        for_good = settled(shards, partial)
        marks = [mark for push in for_good for mark in self._covers[push]]
        self._permanent = _joined([*self._for_good(shards), *marks])
        self._settled = Contents((*self._settled.within(differs).spans(), *for_good.spans()))
        self._keep({push: self._covers[push] for push in partial.without(for_good)})
        self._whole &= self._covers.keys()

    def dump(self, shards: Sequence[Contents], differs: Contents, count: int) -> dict[str, Any]:
        """The state for a snapshot of `count` shards with these contents, as JSON."""
        return {
            "shards": count,
            "pushes": [[*push, self._covers[push]] for push in self._known.within(differs)],
            "settled": self._settled.spans(),
            "forGood": self._for_good(shards),
        }

    def load(self, saved: dict[str, Any], shards: int, *, other_run: bool = False) -> None:
        """The inverse of `dump`, for `shards` shards.

        From an `other_run` or with another number of shards, the partial pushes are permanent: the shards' contents
        start empty.
        """
        self._permanent = [Progress(*mark) for mark in saved["forGood"]]
        self._settled = Contents(saved.get("settled", ()))  # an earlier version had none
        covers = {
            (int(slot), int(incarnation), int(seq)): [Progress(*mark) for mark in marks]
            for slot, incarnation, seq, marks in saved["pushes"]
        }
        if other_run or saved.get("shards", shards) != shards:
            self._permanent += [mark for marks in covers.values() for mark in marks]
            self._settled, covers = Contents(), {}
        self._keep(covers)

    def _keep(self, covers: dict[Push, list[Progress]]) -> None:
        self._covers = covers
        self._known = Contents((*push, push[2] + 1) for push in covers)

    def _for_good(self, shards: Sequence[Contents]) -> list[Progress]:
        """The permanent positions, with those of incarnations that the contents have forgotten since."""
        partial = forgotten(shards, self._covers) - self._whole
        return [*self._permanent, *(mark for push in partial for mark in self._covers[push])]


def _joined(marks: Iterable[Progress]) -> list[Progress]:
    """The same positions, as often as they are named, in as few ranges as possible."""
    result: list[Progress] = []
    for mark in sorted(marks):
        if result and result[-1][:2] == mark[:2] and result[-1].stop == mark.start:
            result[-1] = result[-1]._replace(stop=mark.stop)
        else:
            result.append(mark)
    return result
