"""Compares the pushes that the shards hold, so that `partial` is exact and not an estimate.

It asks each shard which pushes it holds, and for those that some shards lack, which positions they cover. It does so
after a shard restarted, at each snapshot (whose manifest keeps what the journals then drop), and before the job ends.
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
"""How long the job's end waits for pushes in flight, or for a shard that does not answer."""


class Asked(Protocol):
    """Another shard."""

    def pushes(self, of: Sequence[Span]) -> Pushes:
        """Which pushes it holds, and what those in `of` cover. `Unreachable` if it does not answer or is not ready."""


def tell(shard: ShardStore, of: Sequence[Span]) -> Pushes:
    """A shard's answer to the reconciler."""
    with shard.lock:
        if shard.state is not State.READY:
            raise Unreachable(f"shard {shard.index} is {shard.state.value.lower()}")
        wanted = Contents(of)
        return Pushes(held=shard.contents.spans(), entries=shard.journal.entries_of(wanted) if wanted else ())


class Reconciler:
    """Runs on PS 0. `others`: the other shards, in order. Thread-safe."""

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
        self._unexplained: set[Span] = set()
        self._due = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        """Start the thread, if there are other shards."""
        if self._others:
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread; `look` still works."""
        self._stop.set()
        self._due.set()

    def due(self) -> None:
        """A shard restarted: compare soon."""
        self._due.set()

    def look(self, *, at_end: bool = False) -> bool:
        """Count what is partial now; returns whether none of it may still arrive. `Unreachable` if a shard is."""
        with self._lock:
            held = [Contents(tell(self._shard, ()).held)]
            held += [Contents(other.pushes(()).held) for other in self._others]
            self._learn(held)
            return not self._coordinator.compare(held, at_end=at_end)

    def beside(self, parts: Sequence[Sequence[Span]]) -> dict[str, Any]:
        """What the manifest of a snapshot with these contents has to keep.

        `Unreachable` if a shard was lost since it wrote its part and no journal knows a push: once for each such push.
        """
        with self._lock:
            held = [Contents(part) for part in parts]
            unexplained = set(self._learn(held).spans())
            if new := unexplained - self._unexplained:
                self._unexplained |= new
                raise Unreachable("a shard was lost while its part of the snapshot was written")
            self._coordinator.compare(held)
            return self._coordinator.partial.dump(held)

    def published(self, parts: Sequence[Sequence[Span]]) -> None:
        """The snapshot with these contents was published."""
        with self._lock:
            self._coordinator.partial.published([Contents(part) for part in parts])

    def settle(self) -> None:
        """Before the job ends: compare once more, and wait a little for pushes in flight."""
        if not self._others:
            return
        until, reason = self._clock() + END_SECONDS, ""
        while True:
            try:
                reason = ""
                if self.look(at_end=True):
                    return
            except TrainerError as error:
                reason = str(error)
            if self._clock() >= until or self._stop.wait(RETRY_SECONDS / 4):
                break
        if reason:
            log.warning("partial samples were counted without the latest pushes of every shard: %s", reason)

    def _learn(self, held: Sequence[Contents]) -> Contents:
        """Ask for what the unknown pushes cover; returns those that no shard knows."""
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
                continue
            except TrainerError as error:
                log.debug("cannot compare the shards yet: %s", error)
            except Exception:
                log.exception("cannot compare the shards yet")
            self._stop.wait(RETRY_SECONDS)
            self._due.set()
