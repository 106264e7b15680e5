"""The pushes that a shard applied since its last published snapshot, and the positions that each of them covers.

Every answer tells a worker what it does not know yet, and the worker follows each shard's journal with one of its own,
so that its copy of the parameters comes with exactly the pushes that are in it. Shard 0, when it adopts the copy,
replays them on the snapshot's ledger; every shard knows from them which pushes it holds.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile

from shoal_trainer.ps.contents import Contents, Push
from shoal_trainer.wire.messages import MAX_JOURNAL, Entry, Journal, Progress, PushMeta


class Log:
    """In order of versions. Beyond `MAX_JOURNAL` parts the oldest are forgotten: older copies are then no use."""

    def __init__(self, floor: int = 0) -> None:
        self.snapshot = floor
        """The version of the newest published snapshot."""
        self._floor = floor
        self._parts: dict[tuple[int, int], int] = {}
        self._entries: deque[Entry] = deque()

    def add(self, version: int, push: Push, meta: PushMeta) -> None:
        """A push was applied and made `version`."""
        steps = meta.steps
        for mark in meta.progress or (Progress(0, -1, 0, 0),):
            self._entries.append(Entry(version, *push, steps, *mark))
            steps = 0
        while len(self._entries) > MAX_JOURNAL:
            self._forget(self._entries[0].version)

    def since(self, version: int) -> Journal:
        """What came after `version`, and after the last snapshot."""
        # From the newest on: what a worker does not know yet is little, and a deque is slow to reach in the middle.
        unknown = list(takewhile(lambda entry: entry.version > version, reversed(self._entries)))
        return Journal(self._floor, tuple(reversed(unknown)))

    def of(self, pushes: Contents) -> tuple[Entry, ...]:
        """What is remembered of these pushes."""
        return tuple(e for e in self._entries if (e.slot, e.incarnation, e.seq) in pushes)

    def published(self, version: int) -> None:
        """A snapshot of this version can be seen by everyone."""
        self.snapshot = max(self.snapshot, version)
        self._forget(version)

    def wrote(self, part: tuple[int, int], version: int) -> None:
        """A part of snapshot (epoch of shard 0, number) was written; it may be published, or never be."""
        self._parts[part] = version

    def published_part(self, part: tuple[int, int]) -> None:
        """Everyone can see that snapshot. A part that another life of this shard wrote says nothing of this one."""
        if (version := self._parts.get(part)) is not None:
            self._parts = {key: later for key, later in self._parts.items() if later > version}
            self.published(version)

    def takes(self, journal: Journal, restored: Contents) -> bool:
        """Whether a copy with this journal follows the snapshot that this shard began with, which holds `restored`.

        A copy from before an earlier loss may have gone another way from an earlier snapshot: its versions are others.
        """
        before = (entry for entry in journal.entries if entry.version <= self.snapshot)
        return journal.floor <= self.snapshot and all(
            (e.slot, e.incarnation, e.seq) in restored for e in before
        )

    def adopt(self, journal: Journal) -> None:
        """A copy was adopted, and its pushes with it."""
        self._floor = self.snapshot
        self._entries = deque(entry for entry in journal.entries if entry.version > self._floor)

    def follow(self, later: Journal) -> None:
        """A worker's side: what an answer tells of the journal that is being followed."""
        known = self._entries[-1].version if self._entries else self._floor
        self._forget(later.floor)
        self._entries.extend(entry for entry in later.entries if entry.version > known)

    def _forget(self, version: int) -> None:
        self._floor = max(self._floor, version)
        while self._entries and self._entries[0].version <= version:
            self._entries.popleft()
