"""The pushes that a shard applied since its last published snapshot, with the positions that each covers.

Answers carry the entries that a worker lacks. The worker keeps a copy of each shard's journal (`followed`), so that a
copy of the parameters that it offers names exactly the pushes in it. Shard 0 replays them on the snapshot's ledger.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import takewhile

from shoal_trainer.ps.contents import Contents, Push
from shoal_trainer.wire.messages import MAX_JOURNAL, Entry, Journal, Progress, PushMeta

log = logging.getLogger(__name__)

NEARLY_FULL = MAX_JOURNAL * 3 // 4


class PushJournal:
    """Entries in order of versions. Beyond `MAX_JOURNAL` the oldest are dropped: the workers' copies are refused then.

    A journal that is `nearly_full` needs a snapshot before that. What a copy for a snapshot had is kept while that is
    written: the shards are copied one after the other, and must tell what the pushes cover in which they differ.
    """

    def __init__(self, floor: int = 0) -> None:
        self.snapshot = floor
        """The version of the newest published snapshot."""
        self._floor = floor
        self._parts: dict[tuple[int, int], int] = {}
        """Versions of written snapshot parts, by (epoch of shard 0, snapshot number)."""
        self._entries: deque[Entry] = deque()
        self._copied = floor
        """The version of the newest copy for a snapshot."""
        self._kept: deque[Entry] = deque()
        """What was dropped since of what that copy had: at most a journal."""

    def add(self, version: int, push: Push, meta: PushMeta) -> None:
        """Record the push that made `version`."""
        steps = meta.steps
        for mark in meta.progress or (Progress(0, -1, 0, 0),):
            self._entries.append(Entry(version, *push, steps, *mark))
            steps = 0
        if len(self._entries) > MAX_JOURNAL and self._floor <= self.snapshot:
            log.warning(
                "more than %d ranges of the data since the last snapshot, of version %d: until the next one, the "
                "workers' copies of the parameters could not replace this shard's", MAX_JOURNAL, self.snapshot,
            )  # fmt: skip
        while len(self._entries) > MAX_JOURNAL:
            dropped = self._drop(self._entries[0].version)
            self._kept.extend(entry for entry in dropped if entry.version <= self._copied)

    @property
    def nearly_full(self) -> bool:
        """Whether only a quarter of its entries is left."""
        return len(self._entries) >= NEARLY_FULL

    def since(self, version: int) -> Journal:
        """The entries after `version` and after the last snapshot."""
        # From the newest on: a worker lacks only a few entries, and a deque is slow to index in the middle.
        newer = list(takewhile(lambda entry: entry.version > version, reversed(self._entries)))
        return Journal(self._floor, tuple(reversed(newer)))

    def recorded(self) -> tuple[Entry, ...]:
        """All entries, with those that are kept for a snapshot."""
        return (*self._kept, *self._entries)

    def copied(self, version: int) -> None:
        """The shard was copied for a snapshot at this version, with which it is compared when all are written."""
        self._copied = version
        self._kept.clear()

    def published(self, version: int) -> None:
        """Drop the entries up to the version of a published snapshot."""
        self.snapshot = max(self.snapshot, version)
        self._drop(version)
        while self._kept and self._kept[0].version <= version:
            self._kept.popleft()

    def part_written(self, part: tuple[int, int], version: int) -> None:
        """Record the version of a part of snapshot (epoch of shard 0, number), which may be published later."""
        self._parts[part] = version

    def published_part(self, part: tuple[int, int]) -> None:
        """Drop the entries of a part's snapshot. A part that an earlier process of this shard wrote is ignored."""
        if (version := self._parts.get(part)) is not None:
            self._parts = {key: later for key, later in self._parts.items() if later > version}
            self.published(version)

    def accepts(self, journal: Journal, restored: Contents) -> bool:
        """Whether a copy with this journal continues the snapshot that this shard began with.

        `restored`: the pushes in that snapshot. A copy from before an earlier loss may have diverged from it.
        """
        before = (entry for entry in journal.entries if entry.version <= self.snapshot)
        return journal.floor <= self.snapshot and all(
            (e.slot, e.incarnation, e.seq) in restored for e in before
        )

    def adopt(self, journal: Journal) -> None:
        """Replace the entries by those of an adopted copy."""
        self._floor = self.snapshot
        self._entries = deque(entry for entry in journal.entries if entry.version > self._floor)

    def follow(self, later: Journal) -> None:
        """Append the new entries of an answer, on the worker's side."""
        known = self._entries[-1].version if self._entries else self._floor
        self._drop(later.floor)
        self._entries.extend(entry for entry in later.entries if entry.version > known)

    def _drop(self, version: int) -> list[Entry]:
        self._floor = max(self._floor, version)
        dropped = []
        while self._entries and self._entries[0].version <= version:
            dropped.append(self._entries.popleft())
        return dropped
