"""Compares the pushes that the shards hold, to count the samples that only some shards have.

It lists the pushes of each shard, and reads the positions of those that some shards, or some pieces of one, lack from
the journals. It runs
after a shard restarts, at each snapshot (the journals then drop entries), before the final tasks, and before the job
ends.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from shoal_trainer.background import Background
from shoal_trainer.coordinator.control_client import ShardControl
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.partial import Partial
from shoal_trainer.coordinator.protocol import Pushes
from shoal_trainer.errors import TrainerError, Unreachable
from shoal_trainer.ps.contents import Contents, Span, uneven
from shoal_trainer.ps.shard import ShardStore, State
from shoal_trainer.snapshot.manifest import ShardFile
from shoal_trainer.wire.messages import BegunPush, Entry, Progress

log = logging.getLogger(__name__)

AGAIN_SECONDS = 0.25
"""Between comparisons while pushes are in flight: requests may schedule the next one at once."""
END_SECONDS = 3.0
"""How long the job's end waits for pushes in flight, or for a shard that does not answer."""


def pushes_of(shard: ShardStore, wanted: Sequence[Span]) -> Pushes:
    """The pushes of a shard of this process, as the answer to `AskPushes`."""
    with shard.lock:
        if shard.state is not State.READY:
            raise Unreachable(f"shard {shard.index} is {shard.state.value.lower()}")
        spans, begun = shard.history.contents.spans(), shard.history.begun()
        recorded = shard.history.journal.recorded() if wanted else ()
    asked = Contents(wanted)  # looked up without the lock: a full journal takes a while
    entries = (entry for entry in recorded if (entry.slot, entry.incarnation, entry.seq) in asked)
    under_way = (entry for push in begun for entry in _entries(push, asked))
    return Pushes(spans=spans, begun=_spans(begun), entries=(*entries, *under_way))


def _spans(begun: Iterable[BegunPush]) -> tuple[Span, ...]:
    return tuple((push.slot, push.incarnation, push.seq, push.seq + 1) for push in begun)


def _entries(push: BegunPush, wanted: Contents) -> Iterator[Entry]:
    identity = push.slot, push.incarnation, push.seq
    if identity in wanted:
        for mark in push.progress or (Progress(0, -1, 0, 0),):
            yield Entry(0, *identity, 0, *mark)


def sides(shards: Sequence[tuple[Iterable[Span], Iterable[Span]]]) -> list[Contents]:
    """The contents of the last piece of each shard, then, where they differ, of the first pieces.

    Each shard is given as the pushes that it holds, and those that it holds in part. Like shards, the ends of a shard
    may hold different pushes.
    """
    last = [Contents(spans) for spans, _ in shards]
    if not any(begun for _, begun in shards):
        return last
    return last + [Contents((*spans, *begun)) for spans, begun in shards]


class Reconciler(Background):
    """Runs on PS 0; compares when woken. `others`: the other shards, in order. Thread-safe."""

    def __init__(
        self,
        shard: ShardStore,
        others: Sequence[ShardControl],
        coordinator: Coordinator,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("reconciler", self._compare_again)
        self._shard, self._others, self._coordinator = shard, others, coordinator
        self._clock = clock
        self._lock = threading.Lock()
        self._unexplained: set[Span] = set()

    def compare(self, *, at_end: bool = False) -> bool:
        """Count the partial samples; returns whether no push is in flight. `Unreachable` if a shard is."""
        with self._lock:
            generation = self._shard.history.generation
            shards = [pushes_of(self._shard, ()), *(other.pushes(()) for other in self._others)]
            contents = sides([(pushes.spans, pushes.begun) for pushes in shards])
            differs = uneven(contents)
            self._learn(differs, generation)
            with self._partial(generation):
                return not self._coordinator.count_partial(contents, differs, at_end=at_end)

    def manifest_part(self, files: Sequence[ShardFile]) -> dict[str, Any]:
        """The partial pushes for the manifest of a snapshot of these files.

        `Unreachable`, once per push, if no journal has a push because a shard was lost after it wrote its part.
        """
        with self._lock:
            contents, generation = _contents(files), self._shard.history.generation
            differs = uneven(contents)
            self._know(files, differs, generation)
            unexplained = set(self._learn(differs, generation).spans())
            if new := unexplained - self._unexplained:
                self._unexplained |= new
                raise Unreachable("a shard was lost while its part of the snapshot was written")
            # Not counted: a push that was in flight at the cut may have arrived, and its worker may have left.
            with self._partial(generation) as known:
                known.compared(contents, differs)
                return known.dump(contents, differs, len(files))

    def published(self, files: Sequence[ShardFile]) -> None:
        """The snapshot of these files was published."""
        contents = _contents(files)
        differs = uneven(contents)
        with self._lock, self._partial(self._shard.history.generation) as known:
            known.published(contents, differs)
        self.wake()

    def settle(self) -> None:
        """Compare before the job ends, and wait up to `END_SECONDS` for pushes in flight."""
        until, reason = self._clock() + END_SECONDS, ""
        while True:
            try:
                reason = ""
                if self.compare(at_end=True):
                    return
            except TrainerError as error:
                reason = str(error)
            if self._clock() >= until or self.stopped.wait(AGAIN_SECONDS):
                break
        if reason:
            log.warning("partial samples were counted without the latest pushes of every shard: %s", reason)

    @contextlib.contextmanager
    def _partial(self, generation: int) -> Iterator[Partial]:
        """The partial pushes of this generation, under the shard's lock; `Unreachable` if a rollback replaced them."""
        with self._shard.lock:
            if self._shard.history.generation != generation:
                raise Unreachable("the job was rolled back while its shards were compared")
            yield self._coordinator.record.partial

    def _know(self, files: Sequence[ShardFile], differs: Contents, generation: int) -> None:
        """The files state the positions of the pushes that they hold in part."""
        with self._partial(generation) as known:
            for file in files:
                known.learn(entry for push in file.begun for entry in _entries(push, differs))

    def _learn(self, differs: Contents, generation: int) -> Contents:
        """Read the positions of unknown pushes from the journals; returns the pushes that no journal has."""
        journals: list[Callable[[Sequence[Span]], Pushes]] = [partial(pushes_of, self._shard)]
        journals += [other.pushes for other in self._others]
        for journal in journals:
            with self._partial(generation) as known:
                unknown = known.unknown(differs)
            if unknown:
                entries = _asked(journal, unknown.spans()).entries  # of another shard: not under the lock
                with self._partial(generation) as known:
                    known.learn(entries)
        with self._partial(generation) as known:
            return known.unknown(differs)

    def _compare_again(self) -> None:
        if not self.compare():
            self.stopped.wait(AGAIN_SECONDS)


def _asked(journal: Callable[[Sequence[Span]], Pushes], wanted: Sequence[Span]) -> Pushes:
    """Its answer, for which it is asked twice: without it all parts of a snapshot would be written again."""
    try:
        return journal(wanted)
    except Unreachable:
        return journal(wanted)


def _contents(files: Sequence[ShardFile]) -> list[Contents]:
    return sides([(file.pushes, _spans(file.begun)) for file in files])
