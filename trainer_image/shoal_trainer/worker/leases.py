"""The leases that this worker holds, shared by the read-ahead thread and the training loop.

After the loss of parameter server 0 a lease continues under a new token. Batches read under the old token stay valid:
`token` returns the current one, or None if the lease was reassigned. Pushes contain positions, not tokens.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from shoal_trainer.wire.messages import Progress, Push
from shoal_trainer.worker.work import DataWork, Token

MAX_ANSWERS = 4096
"""Kept to count the wasted steps when a server restarts from an older state."""


class Leases:
    """Holds a lease from its grant until its last sample is applied. Thread-safe."""

    def __init__(self) -> None:
        self.generation = 0
        self._lock = threading.Lock()
        self._ends: dict[Token, tuple[DataWork, int]] = {}
        self._renamed: dict[Token, Token | None] = {}
        self._answered_to: dict[Token, int] = {}
        self.stopped: int | None = None
        """The term of the coordinator process that ended training; its answers with leases may arrive later."""
        self._answers: deque[tuple[int, int]] = deque(maxlen=MAX_ANSWERS)

    def grant(self, work: DataWork) -> None:
        """Add a lease, unless it was requested before a rollback or the end of training."""
        with self._lock:
            if work.generation == self.generation and work.token[0] != self.stopped:
                self._ends[work.token] = (work, work.start)

    def mark(self, token: Token, end: int) -> Progress | None:
        """The positions from the previous mark of the lease up to `end`; None if the lease was reassigned."""
        with self._lock:
            current = self._current(token)
            if current is None:
                return None
            work, start = self._ends[current]
            self._ends[current] = (work, end)
            return Progress(work.epoch, work.number, start, end)

    def token(self, token: Token) -> Token | None:
        """The current token of a lease; None if it was reassigned."""
        with self._lock:
            return self._current(token)

    def revoked(self, work: DataWork) -> bool:
        """Whether this worker lost the lease: it was reassigned, training has ended, or it was rolled back.

        A completed lease was not lost.
        """
        with self._lock:
            newest = self._newest(work.token)
            return newest is None or newest[0] == self.stopped or work.generation != self.generation

    def answered(self, push: Push) -> None:
        """Record an applied push, and remove the leases that it completes.

        One mark may cover several adjacent leases.
        """
        with self._lock:
            self._answers.append((push.seq, push.meta.steps))
            for mark in push.meta.progress:
                for token, (work, _) in list(self._ends.items()):
                    stop = mark.stop if work.stop is None else min(mark.stop, work.stop)
                    if (work.epoch, work.number) != mark[:2] or max(mark.start, work.start) >= stop:
                        continue
                    self._answered_to[token] = stop
                    if stop == work.stop:
                        del self._ends[token], self._answered_to[token]

    def lost(self, after: int) -> int:
        """The servers lost the pushes after this sequence number; returns their number of steps."""
        with self._lock:
            steps = sum(steps for seq, steps in self._answers if seq > after)
            self._answers = deque((a for a in self._answers if a[0] <= after), maxlen=MAX_ANSWERS)
            return steps

    def reset(self, generation: int) -> None:
        """Drop all leases and answers after a rollback to this generation."""
        with self._lock:
            self.generation = generation
            self.stopped = None  # a rollback undoes a stop
            self._renamed |= dict.fromkeys(self._ends)
            self._ends.clear()
            self._answered_to.clear()
            self._answers.clear()

    def void(self, term: int) -> None:
        """Drop the leases granted by the coordinator process `term`, which has ended training. 0: none."""
        with self._lock:
            self.stopped = term or self.stopped
            for token in [token for token in self._ends if term and token[0] == term]:
                del self._ends[token]
                self._answered_to.pop(token, None)
                self._renamed[token] = None

    def drop(self, token: Token) -> None:
        """Remove a lease."""
        with self._lock:
            current = self._current(token)
            if current is not None:
                del self._ends[current]
                self._answered_to.pop(current, None)

    def held(self) -> dict[Token, DataWork]:
        """The unfinished rest of each lease."""
        with self._lock:
            return {
                token: replace(work, start=self._answered_to.get(token, work.start))
                for token, (work, _) in self._ends.items()
            }

    def unread(self, ends: Mapping[Token, int]) -> bool:
        """Whether a lease has more than was pushed, and than the batches that end at `ends`, by lease."""
        with self._lock:
            taken = {self._newest(token): end for token, end in ends.items()}
            left = ((work.stop, max(end, taken.get(token, end))) for token, (work, end) in self._ends.items())
            return any(stop is None or end < stop for stop, end in left)

    def rename(self, presented: Collection[Token], tokens: Mapping[Token, Token]) -> None:
        """Apply the coordinator's answer to a join: drop the `presented` leases without a new token.

        A lease that continues starts where its answered pushes end. Leases granted since the join are kept.
        """
        with self._lock:
            ends, self._ends = self._ends, {}
            answered_to, self._answered_to = self._answered_to, {}
            for old, (work, end) in ends.items():
                new = tokens.get(old) if old in presented else old
                if new is not None:
                    self._ends[new] = (replace(work, start=answered_to.get(old, work.start)), end)
                if new != old:
                    self._renamed[old] = new

    def _current(self, token: Token) -> Token | None:
        newest = self._newest(token)
        return newest if newest in self._ends else None

    def _newest(self, token: Token) -> Token | None:
        newest: Token | None = token
        while newest is not None and newest in self._renamed:
            newest = self._renamed[newest]
        return newest


def joined(marks: Iterable[Progress | None]) -> tuple[Progress, ...]:
    """Merge adjacent marks."""
    merged: list[Progress] = []
    for mark in marks:
        if mark is None:
            continue
        follows = merged and (merged[-1].epoch, merged[-1].file, merged[-1].stop) == mark[:3]
        merged.append(mark._replace(start=merged.pop().start) if follows else mark)
    return tuple(merged)
