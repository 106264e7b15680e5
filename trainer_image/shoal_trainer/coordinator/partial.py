"""Partial pushes, which only some shards hold, and the positions that they cover. Pure; saved in every snapshot.

The set of partial pushes is computed from the contents of the shards each time. Only the positions are kept here,
because the shards' journals drop them at the next snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shoal_trainer.ps.contents import Contents, Push, Worker, arriving, forgotten, uneven
from shoal_trainer.wire.messages import Entry, Progress


class Partial:
    """The positions of pushes that some shards lacked at a comparison: partial ones, and some that were in flight."""

    def __init__(self) -> None:
        self._covers: dict[Push, list[Progress]] = {}
        self._whole: set[Push] = set()
        """Those of them that all shards held at the last comparison."""
        self._permanent: list[Progress] = []
        """Of forgotten incarnations, of the run that this one started from, and from before a change of shards."""

    def unknown(self, pushes: Contents) -> Contents:
        """The pushes whose positions are not known."""
        missing = Contents()
        for push in pushes:
            if push not in self._covers:
                missing.add(push)
        return missing

    def learn(self, entries: Iterable[Entry]) -> None:
        """Add the positions of unknown pushes from a shard's journal."""
        covered: dict[Push, list[Progress]] = {}
        for e in entries:
            marks = covered.setdefault((e.slot, e.incarnation, e.seq), [])
            if e.start < e.stop:
                marks.append(Progress(e.epoch, e.file, e.start, e.stop))
        for push, marks in covered.items():
            self._covers.setdefault(push, marks)

    def compared(self, shards: Sequence[Contents]) -> Contents:
        """Note which of the known pushes all shards hold now; returns those that some lack."""
        differs = uneven(shards)
        known = self._covers.keys() - forgotten(shards, self._covers)
        self._whole = {push for push in known if push not in differs} | (self._whole - known)
        return differs

    def count(
        self, shards: Sequence[Contents], present: set[Worker], *, at_end: bool = False
    ) -> tuple[list[Progress], bool]:
        """The positions of partial pushes, and whether pushes of `present` workers may be in flight.

        Pushes in flight count as partial only `at_end`.
        """
        differs = self.compared(shards)
        marks, any_in_flight = self._for_good(shards), False
        for push in differs:
            in_flight = push[:2] in present and arriving(shards, push)
            any_in_flight |= in_flight
            if at_end or not in_flight:
                marks += self._covers.get(push, [])
        return marks, any_in_flight

    def published(self, shards: Sequence[Contents]) -> None:
        """A snapshot with these contents was published: drop the pushes that all shards hold."""
        differs = uneven(shards)
        self._permanent = self._for_good(shards)
        self._covers = {push: marks for push, marks in self._covers.items() if push in differs}
        self._whole &= self._covers.keys()

    def dump(self, shards: Sequence[Contents], count: int) -> dict[str, Any]:
        """The state for a snapshot of `count` shards with these contents, as JSON."""
        differs = uneven(shards)
        return {
            "shards": count,
            "pushes": [[*push, marks] for push, marks in self._covers.items() if push in differs],
            "forGood": self._for_good(shards),
        }

    def load(self, saved: dict[str, Any], shards: int, *, other_run: bool = False) -> None:
        """The inverse of `dump`, for `shards` shards.

        From an `other_run` or with another number of shards, the partial pushes are permanent: the shards' contents
        start empty.
        """
        self._permanent = [Progress(*mark) for mark in saved["forGood"]]
        self._covers = {
            (int(slot), int(incarnation), int(seq)): [Progress(*mark) for mark in marks]
            for slot, incarnation, seq, marks in saved["pushes"]
        }
        if other_run or saved.get("shards", shards) != shards:
            self._permanent += [mark for marks in self._covers.values() for mark in marks]
            self._covers = {}

    def _for_good(self, shards: Sequence[Contents]) -> list[Progress]:
        """The permanent positions, with those of incarnations that the contents have forgotten since."""
        partial = forgotten(shards, self._covers) - self._whole
        return [*self._permanent, *(mark for push in partial for mark in self._covers[push])]
