"""The leases that this worker holds: known to the thread that reads ahead and to the loop that trains.

After the loss of parameter server 0 a lease that goes on has another token. What was read under the old one stays
valid, so everyone asks here for the present token of a piece of work; None means that somebody else has it now.
What a push covers is told in positions, which no new token changes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from shoal_trainer.wire.messages import Progress, Push
from shoal_trainer.worker.work import DataWork, Token

MAX_ANSWERS = 4096
"""Remembered to tell how many steps were in vain when a server comes back older."""


class Leases:
    """Thread-safe; a lease is in it from its grant until its last sample is in the parameters."""

    def __init__(self) -> None:
        self.generation = 0
        self._lock = threading.Lock()
        self._ends: dict[Token, tuple[DataWork, int]] = {}
        self._renamed: dict[Token, Token | None] = {}
        self._answered_to: dict[Token, int] = {}
        self._stopped: int | None = None
        """The coordinator process that ended training: what it granted earlier may still arrive."""
        self._answers: deque[tuple[int, int]] = deque(maxlen=MAX_ANSWERS)

    def grant(self, work: DataWork) -> None:
        """A lease was given to this worker; one that was asked for before the job went back is none any more."""
        with self._lock:
            if work.generation == self.generation and work.token[0] != self._stopped:
                self._ends[work.token] = (work, work.start)

    def mark(self, token: Token, end: int) -> Progress | None:
        """What the next piece of the lease, up to `end`, covers; None where the lease is another worker's now."""
        with self._lock:
            now = self._now(token)
            if now is None:
                return None
            work, start = self._ends[now]
            self._ends[now] = (work, end)
            return Progress(work.epoch, work.number, start, end)

    def token(self, token: Token) -> Token | None:
        """The present token of a lease."""
        with self._lock:
            return self._now(token)

    def answered(self, push: Push) -> None:
        """The servers have answered this push: a lease that ends within it is forgotten.

        One mark may cover several leases that follow each other.
        """
        with self._lock:
            self._answers.append((push.seq, push.steps))
            for mark in push.progress:
                for token, (work, _) in list(self._ends.items()):
                    stop = mark.stop if work.stop is None else min(mark.stop, work.stop)
                    if (work.epoch, work.number) != mark[:2] or max(mark.start, work.start) >= stop:
                        continue
                    self._answered_to[token] = stop
                    if stop == work.stop:
                        del self._ends[token], self._answered_to[token]

    def lost(self, after: int) -> int:
        """The servers came back without the pushes after this sequence number; returns how many steps those were."""
        with self._lock:
            steps = sum(steps for seq, steps in self._answers if seq > after)
            self._answers = deque((a for a in self._answers if a[0] <= after), maxlen=MAX_ANSWERS)
            return steps

    def begin_again(self, generation: int) -> None:
        """The job has gone back to a snapshot: every lease is void, and what was answered is undone."""
        with self._lock:
            self.generation = generation
            self._renamed |= dict.fromkeys(self._ends)
            self._ends.clear()
            self._answered_to.clear()
            self._answers.clear()

    def void(self, term: int) -> None:
        """The coordinator process `term` (0: none) has ended training: forget every lease that it granted."""
        with self._lock:
            self._stopped = term or self._stopped
            for token in [token for token in self._ends if term and token[0] == term]:
                del self._ends[token]
                self._answered_to.pop(token, None)
                self._renamed[token] = None

    def drop(self, token: Token) -> None:
        """Forget a lease."""
        with self._lock:
            now = self._now(token)
            if now is not None:
                del self._ends[now]
                self._answered_to.pop(now, None)

    def held(self) -> dict[Token, DataWork]:
        """Every lease, from where its answered pushes end: this worker will push the rest of it."""
        with self._lock:
            return {
                token: replace(work, start=self._answered_to.get(token, work.start))
                for token, (work, _) in self._ends.items()
            }

    def rename(self, presented: Collection[Token], tokens: Mapping[Token, Token]) -> None:
        """The coordinator's answer to what was `held`: presented leases that it does not name are somebody else's.

        A lease that goes on begins where its answered pushes end: what came before is another token's. One that was
        granted since is kept: the thread that reads ahead may ask as soon as the coordinator has answered.
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

    def _now(self, token: Token) -> Token | None:
        now: Token | None = token
        while now is not None and now in self._renamed:
            now = self._renamed[now]
        return now if now in self._ends else None


def joined(marks: Iterable[Progress | None]) -> tuple[Progress, ...]:
    """The same positions with as few marks as follow each other."""
    found: list[Progress] = []
    for mark in marks:
        if mark is None:
            continue
        follows = found and (found[-1].epoch, found[-1].file, found[-1].stop) == mark[:3]
        found.append(mark._replace(start=found.pop().start) if follows else mark)
    return tuple(found)
