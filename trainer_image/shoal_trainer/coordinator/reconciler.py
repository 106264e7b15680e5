"""Compares what is in the shards, so that `partial` is what the parameters say and no estimate.

It asks each shard which pushes it holds, and those that have one what it covers. That happens when a shard came back,
at each snapshot (whose manifest remembers what the journals forget with it), and before the job's end is told.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.protocol import Pushes
from shoal_trainer.errors import TrainerError, Unreachable
from shoal_trainer.ps.contents import Contents, Span, uneven
from shoal_trainer.ps.shard import ShardStore, State

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
END_SECONDS = 3.0
"""How long the job's end waits for pushes that are under way, or for a shard that does not answer."""


class Asked(Protocol):
    """Another shard."""

    def pushes(self, of: Sequence[Span]) -> Pushes:
        """Which pushes are in it, and what those of `of` cover. `Unreachable` while it is away or not ready."""


def tell(shard: ShardStore, of: Sequence[Span]) -> Pushes:
    """What a shard answers when it is asked."""
    with shard.lock:
        if shard.state is not State.READY:
            raise Unreachable(f"shard {shard.index} is {shard.state.value.lower()}")
        wanted = Contents(of)
        return Pushes(held=shard.contents.spans(), entries=shard.journal.of(wanted) if wanted else ())


class Reconciler:
    """Beside the coordinator, on shard 0. `others`: the other shards, in order. May be used from several threads."""

    def __init__(
        self,
        shard: ShardStore,
        others: Sequence[Asked],
        coordinator: Coordinator,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shard, self._others, self._coordinator = shard, others, coordinator
        self._clock = clock
        self._lock = threading.Lock()
        self._untold: set[Span] = set()
        self._due = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        """Begin to look whenever it is due."""
        if self._others:
            self._thread.start()

    def stop(self) -> None:
        """Look no more by oneself."""
        self._stop.set()
        self._due.set()

    def due(self) -> None:
        """A shard came back: look soon."""
        self._due.set()

    def look(self, *, at_end: bool = False) -> bool:
        """Count what is partial now; whether nothing of it may yet come. `Unreachable` if a shard cannot be asked."""
        with self._lock:
            held = [Contents(tell(self._shard, ()).held)]
            held += [Contents(other.pushes(()).held) for other in self._others]
            self._learn(held)
            return not self._coordinator.compare(held, at_end=at_end)

    def beside(self, parts: Sequence[Sequence[Span]]) -> dict[str, Any]:
        """What the manifest of a snapshot with these contents has to remember.

        `Unreachable` where a shard no longer knows what it held a moment ago, for it was lost: once for each such push.
        """
        with self._lock:
            held = [Contents(part) for part in parts]
            untold = set(self._learn(held).spans())
            if new := untold - self._untold:
                self._untold |= new
                raise Unreachable("a shard was lost while its part of the snapshot was written")
            self._coordinator.compare(held)
            return self._coordinator.partial.dump(held)

    def published(self, parts: Sequence[Sequence[Span]]) -> None:
        """That snapshot can be seen by everyone."""
        with self._lock:
            self._coordinator.partial.published([Contents(part) for part in parts])

    def settle(self) -> None:
        """Before the end is told: count once more, and wait a little for what is under way."""
        if not self._others:
            return
        until, said = self._clock() + END_SECONDS, ""
        while True:
            try:
                said = ""
                if self.look(at_end=True):
                    return
            except TrainerError as error:
                said = str(error)
            if self._clock() >= until or self._stop.wait(RETRY_SECONDS / 4):
                break
        if said:
            log.warning("what is partial was counted without the latest of every shard: %s", said)

    def _learn(self, held: Sequence[Contents]) -> Contents:
        """Ask for what is not known; returns what nobody could tell."""
        partial, differs = self._coordinator.partial, uneven(held)
        if unknown := partial.unknown(differs):
            partial.learn(tell(self._shard, unknown.spans()).entries)
        for other in self._others:
            if unknown := partial.unknown(differs):
                partial.learn(other.pushes(unknown.spans()).entries)
        return partial.unknown(differs)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._due.wait()
            self._due.clear()
            try:
                self.look()
            except TrainerError as error:
                log.debug("cannot compare the shards yet: %s", error)
                self._stop.wait(RETRY_SECONDS)
                self._due.set()
