"""The leases that this worker holds: known to the thread that reads ahead and to the loop that trains.

After the loss of parameter server 0 a lease that goes on has another token. What was read under the old one stays
valid, so everyone asks here for the present token of a piece of work; None means that somebody else has it now.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from shoal_trainer.wire.messages import Progress, Push
from shoal_trainer.worker.work import Answered, DataWork, Token

MAX_ANSWERS = 4096
"""Remembered for a coordinator that comes back from a snapshot: more than any worker pushes between two of them."""


class Leases:
    """Thread-safe; a lease is in it from its grant until its last sample is in the parameters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[Token, tuple[DataWork, int]] = {}
        self._renamed: dict[Token, Token | None] = {}
        self._answered_to: dict[Token, int] = {}
        self._answers: deque[Answered] = deque(maxlen=MAX_ANSWERS)

    def grant(self, work: DataWork) -> None:
        """A lease was given to this worker."""
        with self._lock:
            self._ends[work.token] = (work, work.start)

    def mark(self, token: Token, end: int) -> Progress | None:
        """What a push says that takes the lease to position `end`; None where the lease is another worker's now."""
        with self._lock:
            now = self._now(token)
            if now is None:
                return None
            self._ends[now] = (self._ends[now][0], end)
            return Progress(*now, end)

    def present(self, mark: Progress) -> Progress | None:
        """The same progress under the lease's present token."""
        with self._lock:
            now = self._now((mark.epoch, mark.lease))
            return None if now is None else Progress(*now, mark.offset_end)

    def token(self, token: Token) -> Token | None:
        """The present token of a lease."""
        with self._lock:
            return self._now(token)

    def answered(self, push: Push) -> None:
        """The servers have answered this push: a lease that ends with it is forgotten, the push is remembered."""
        with self._lock:
            steps = push.steps
            for mark in push.progress:
                now = self._now(mark[:2])
                if now is None:
                    continue
                work = self._ends[now][0]
                self._answers.append(Answered(push.seq, now, work, mark.offset_end, steps))
                steps = 0
                self._answered_to[now] = mark.offset_end
                if work.stop == mark.offset_end:
                    del self._ends[now], self._answered_to[now]

    def answers(self) -> list[Answered]:
        """The newest answered pushes, oldest first."""
        with self._lock:
            return list(self._answers)

    def lost(self, after: int) -> None:
        """The servers came back without the pushes after this sequence number, and have been told so."""
        with self._lock:
            kept = [answer for answer in self._answers if answer.seq <= after]
            self._answers.clear()
            self._answers.extend(kept)

    def drop(self, token: Token) -> None:
        """Forget a lease."""
        with self._lock:
            now = self._now(token)
            if now is not None:
                del self._ends[now]
                self._answered_to.pop(now, None)

    def held(self) -> dict[Token, tuple[DataWork, Progress]]:
        """Every lease and how far this worker has trained it."""
        with self._lock:
            return {token: (work, Progress(*token, end)) for token, (work, end) in self._ends.items()}

    def rename(self, tokens: Mapping[Token, Token]) -> None:
        """The coordinator's answer to `held`: leases that are not in it are no longer this worker's.

        A lease that goes on begins where its answered pushes end: what came before is another token's.
        """
        with self._lock:
            ends, self._ends = self._ends, {}
            answered_to, self._answered_to = self._answered_to, {}
            for old, (work, end) in ends.items():
                new = tokens.get(old)
                if new is not None:
                    self._ends[new] = (replace(work, start=answered_to.get(old, work.start)), end)
                if new != old:
                    self._renamed[old] = new

    def _now(self, token: Token) -> Token | None:
        now: Token | None = token
        while now is not None and now in self._renamed:
            now = self._renamed[now]
        return now if now in self._ends else None
