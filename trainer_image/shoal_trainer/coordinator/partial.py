"""What is in some shards only: which pushes those are, and what they cover. Pure; part of every snapshot.

Nothing is added up here. A push is partial while some shards have it and others do not, whatever was lost and came
back in between, so the figure is made anew from what the shards hold. Only what such a push covers has to be
remembered, for the shards' journals forget it at the next snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shoal_trainer.ps.contents import KEPT_INCARNATIONS, Contents, Push, Worker, arriving, uneven
from shoal_trainer.wire.messages import Entry, Progress


class Partial:
    """Knows what pushes cover that were on some shards only when somebody looked."""

    def __init__(self) -> None:
        self._covers: dict[Push, list[Progress]] = {}
        self._for_good: list[Progress] = []
        """Of workers of long ago, of the run that this one began from, and of when there were more or fewer shards."""

    def unknown(self, pushes: Contents) -> Contents:
        """Those of which it is not known what they cover."""
        found = Contents()
        for push in pushes:
            if push not in self._covers:
                found.add(push)
        return found

    def learn(self, entries: Iterable[Entry]) -> None:
        """A shard's journal tells of pushes that were not known."""
        told: dict[Push, list[Progress]] = {}
        for e in entries:
            marks = told.setdefault((e.slot, e.incarnation, e.seq), [])
            if e.start < e.stop:
                marks.append(Progress(e.epoch, e.file, e.start, e.stop))
        for push, marks in told.items():
            self._covers.setdefault(push, marks)

    def count(
        self, shards: Sequence[Contents], present: set[Worker], *, at_end: bool = False
    ) -> tuple[list[Progress], bool]:
        """What is partial of these contents, and whether some of it may yet come, for its worker is `present`.

        What may yet come counts at the end only.
        """
        marks, expected = list(self._for_good), False
        for push in uneven(shards):
            coming = push[:2] in present and arriving(shards, push)
            expected |= coming
            if at_end or not coming:
                marks += self._covers.get(push, [])
        return marks, expected

    def published(self, shards: Sequence[Contents]) -> None:
        """A snapshot holds these contents: what all of them have is on every shard from now on."""
        differs = uneven(shards)
        newest: dict[int, int] = {}
        for contents in shards:
            for slot, incarnation in contents.newest().items():
                newest[slot] = max(incarnation, newest.get(slot, 0))
        kept: dict[Push, list[Progress]] = {}
        for push, marks in self._covers.items():
            if push in differs:
                kept[push] = marks
            elif push[1] <= newest.get(push[0], 0) - KEPT_INCARNATIONS:
                self._for_good += marks
        self._covers = kept

    def dump(self, shards: Sequence[Contents]) -> dict[str, Any]:
        """As JSON: what is needed beside a snapshot with these contents."""
        differs = uneven(shards)
        return {
            "shards": len(shards),
            "pushes": [[*push, marks] for push, marks in self._covers.items() if push in differs],
            "forGood": self._for_good,
        }

    def load(self, saved: dict[str, Any], shards: int, *, other_run: bool = False) -> None:
        """The inverse of `dump`, where there are so many shards now.

        Of an `other_run`, or where the parameters are cut into more or fewer shards now, what each shard holds begins
        anew, and none of these pushes can come any more.
        """
        self._for_good = [Progress(*mark) for mark in saved["forGood"]]
        self._covers = {
            (int(slot), int(incarnation), int(seq)): [Progress(*mark) for mark in marks]
            for slot, incarnation, seq, marks in saved["pushes"]
        }
        if other_run or saved.get("shards", shards) != shards:
            self._for_good += [mark for marks in self._covers.values() for mark in marks]
            self._covers = {}
