"""One request that walks over a shard piece by piece, from any thread: a pull, a push, or the copy of a snapshot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

from shoal_trainer.ps.pieces import Payload, Window
from shoal_trainer.ps.walks import Walk, Walks

T = TypeVar("T")


class Request(Generic[T]):
    """What a stream does. All but `work` are called under the lock."""

    walk: Walk

    def check(self) -> None:
        """Raise if the request may not go on."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Called before each piece that changes the parameters."""

    def work(self, io: Payload, writes: bool) -> None:
        """Work on a piece. `writes`: it changes the parameters."""
        raise NotImplementedError

    def complete(self) -> None:
        """Called when a push has become complete."""

    def finish(self) -> T:
        """Called after the last piece; the result."""
        raise NotImplementedError


class Stream(Generic[T]):
    """Works through the pieces of a shard in order; only the last, which completes it, is worked on under the lock."""

    def __init__(
        self, request: Request[T], walks: Walks, moved: threading.Condition, size: int, piece: int
    ) -> None:
        self._request, self._walk = request, request.walk
        self._walks, self._moved = walks, moved
        self._size, self._piece = size, piece
        self._result: T | None = None

    @property
    def result(self) -> T:
        """What `Request.finish` has made, after the last piece."""
        assert self._result is not None
        return self._result

    def spans(self) -> Iterator[tuple[int, int]]:
        """The range of values of each piece."""
        for index in range(self._walks.pieces):
            yield index * self._piece, min(self._size, (index + 1) * self._piece)

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
            self._request.check()
            while self._must_wait():
                self._moved.wait()
                self._request.check()
            writes = self._walk.writes
            if writes:
                self._request.prepare()
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
            self._request.work(io, writes)
        except BaseException:
            self._walk.working = False
            raise
        with self._moved:
            if self._walks.done(self._walk):
                self._request.complete()
            if self._walk.position == self._walks.pieces:
                self._result = self._request.finish()
            self._moved.notify_all()
