"""One request that walks over a shard piece by piece, from any thread: a pull, a push, or the copy of a snapshot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from shoal_trainer.ps.pieces import Payload, Window
from shoal_trainer.ps.walks import Walk, Walks

T = TypeVar("T")


class Stream(Generic[T]):
    """Works through the pieces of a shard in order; only the last one, which completes it, is worked on under the lock.

    `check` raises if the request may not go on. `prepare` is called under the lock before the first piece that changes
    the parameters, and `work` for each piece: with its values, and whether it changes the parameters. `complete` is
    called under the lock when a push has become complete, then `finish` makes the result.
    """

    def __init__(
        self,
        walk: Walk,
        walks: Walks,
        moved: threading.Condition,
        size: int,
        piece: int,
        *,
        check: Callable[[], None],
        work: Callable[[Payload, bool], None],
        finish: Callable[[Walk], T],
        prepare: Callable[[], None] = lambda: None,
        complete: Callable[[], None] = lambda: None,
    ) -> None:
        self._walk, self._walks, self._moved = walk, walks, moved
        self._size, self._piece = size, piece
        self._check, self._prepare, self._work = check, prepare, work
        self._complete, self._finish = complete, finish
        self._result: T | None = None
        self._prepared = False

    @property
    def result(self) -> T:
        """What `finish` has made, after the last piece."""
        assert self._result is not None
        return self._result

    def spans(self) -> Iterator[tuple[int, int]]:
        """The range of values of each piece."""
        for index in range(self._walks.pieces):
            yield index * self._piece, min(self._size, (index + 1) * self._piece)

    @property
    def held_up(self) -> bool:
        """Whether the next piece would tear the answer of another walk, which moves on."""
        with self._moved:
            return bool(self._walks.held_up(self._walk))

    @property
    def blocked(self) -> bool:
        """Whether `step` would wait: for another thread's work on the piece, or for a snapshot."""
        with self._moved:
            return self._must_wait()

    def wait(self, seconds: float) -> None:
        """Wait, at most this long, while the stream is held up."""
        with self._moved:
            self._moved.wait_for(lambda: not self._walks.held_up(self._walk), seconds)

    def step(self, values: Payload, first: int | None = None) -> None:
        """Work on the next piece, in place. `values` has it, or (from value `first` on) more than it."""
        low = self._walk.position * self._piece
        high = min(self._size, low + self._piece)
        io = Window(values, low if first is None else first, low, high, self._size)
        with self._moved:
            self._check()
            while self._must_wait():
                self._moved.wait()
                self._check()
            writes = self._walk.writes
            if writes and not self._prepared:
                self._prepare()
                self._prepared = True
            self._walks.take(self._walk)
            last = self._walk.position + 1 == self._walks.pieces
            if last:
                self._do(io, writes)
        if not last:
            self._do(io, writes)

    def run(self, values: Payload) -> T:
        """Work on all pieces of `values` at once."""
        with self._moved:
            try:
                for _ in self.spans():
                    self.step(values, 0)
            finally:
                self.close()
        return self.result

    def close(self) -> None:
        """End the walk, wherever it is."""
        with self._moved:
            if self._walk in self._walks.open:
                self._walks.end(self._walk)
            self._moved.notify_all()

    def _must_wait(self) -> bool:
        return self._walks.busy(self._walk) or any(w.steady for w in self._walks.held_up(self._walk))

    def _do(self, io: Payload, writes: bool) -> None:
        try:
            self._work(io, writes)
        except BaseException:
            self._walk.working = False
            raise
        with self._moved:
            if self._walks.done(self._walk):
                self._complete()
            if self._walk.position == self._walks.pieces:
                self._result = self._finish(self._walk)
            self._moved.notify_all()
