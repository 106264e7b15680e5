"""The memory of requests in flight, in pieces, which bounds a server's memory.

A request holds its pieces from the first byte of its payload until they are sent in the answer, and each sent piece is
given to the request that has waited longest. So one worker's answer and the next one's gradient share the memory of one
message. A request without a piece waits, and TCP back-pressure stops its worker.

A worker on a slow link holds its pieces for seconds. If the oldest request waits for so long, the pool grows by one
message, up to `MAX_EXTRA`, and shrinks later; otherwise one slow link would slow down all workers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from shoal_trainer.errors import Unreachable
from shoal_trainer.ps.pieces import Pieces
from shoal_trainer.wire.header import Codec

log = logging.getLogger(__name__)

Piece = NDArray[np.uint8]

PIECE_BYTES = 4 << 20
POOL_BYTES = 10 << 20
"""The usual size of the pool, without a share of the model."""
MODEL_SHARE = 0.2
"""The share of the bytes of the parameters and the optimizer's state that is added to it."""
SLOW_RATE = 125_000_000
SLOW_SECONDS = 1.0, 10.0
"""A link of 1 Gb/s has this many bytes per second. Links are slow if the oldest request waits for longer than one takes
for a message in both directions, but at least and at most for these times."""
KEEP_SECONDS = 60.0
"""How long additional memory is kept after it was last needed."""
MAX_EXTRA = 7


class Loan:
    """The pieces of one message of `nbytes`, in order. It may wait for them for `patience` seconds in all."""

    def __init__(self, pool: PiecePool, nbytes: int, patience: float) -> None:
        self.nbytes = nbytes
        self.patience = patience
        self.waited = 0.0
        """Seconds so far."""
        self.granted: list[Piece] = []
        """The pieces so far; often more than are in use yet."""
        self.missing = nbytes
        """Bytes that are not granted yet."""
        self.first_since: float | None = None
        """When it became the oldest that misses pieces, or the pool grew for it."""
        self.changed = threading.Condition(pool.lock)
        self._pool = pool
        self._returned = 0

    def take(self) -> Iterator[Piece]:
        """The pieces in order; waits for each. `Unreachable` when its patience is at an end."""
        for index in range(-(-self.nbytes // PIECE_BYTES)):
            if index >= len(self.granted):
                self._pool.wait(self, index)
            yield self.granted[index]

    def payload(self, codec: Codec) -> Pieces:
        """All pieces as values."""
        return Pieces([piece.view(codec.dtype) for piece in self.granted])

    def return_after_use(self) -> Iterator[Piece]:
        """The pieces in order; each is given back when the next one is asked for."""
        for piece in self.granted[self._returned :]:
            yield piece
            self._returned += 1
            self._pool.give_back(piece)

    def outstanding(self) -> list[Piece]:
        """The pieces that were not given back yet."""
        return self.granted[self._returned :]


class PiecePool:
    """Pieces for messages, allocated on demand and reused.

    Usually they have at most `limit` + `MODEL_SHARE` x the bytes of the model; always enough for one message.
    """

    def __init__(self, limit: int = POOL_BYTES, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.lock = threading.Lock()
        self.extra = 0
        """By how many messages the pool has grown."""
        self.made = 0
        """Bytes of all pieces, lent or free."""
        self._lent = 0
        self._free: defaultdict[int, list[Piece]] = defaultdict(list)
        """By size; the piece that was used last is the next one to be used."""
        self._queue: deque[Loan] = deque()
        """Loans that miss pieces, oldest first. Only the first one gets any, so two never wait for each other."""
        self._limit = self._usual = limit
        self._message = 0
        """The size of the newest message."""
        self._clock = clock
        self._needed = clock()
        """When the additional memory was last in use."""

    @contextlib.contextmanager
    def lend(self, nbytes: int, model_bytes: int = 0, *, patience: float = math.inf) -> Iterator[Loan]:
        """A loan of `nbytes`, given back at the end. `model_bytes`: those of parameters and optimizer."""
        loan = Loan(self, nbytes, patience)
        with self.lock:
            self._usual, self._message = self._limit + int(MODEL_SHARE * model_bytes), nbytes
            self._queue.append(loan)
            self._grant()
        try:
            yield loan
        finally:
            with self.lock:
                if loan.missing:
                    self._queue.remove(loan)
                for piece in loan.outstanding():
                    self._give_back(piece)
                self._grant()

    def wait(self, loan: Loan, index: int) -> None:
        """Wait until the loan has piece `index`."""
        begin, slow = self._clock(), _slow_seconds(loan.nbytes)
        with self.lock:
            while len(loan.granted) <= index:
                now = self._clock()
                remaining = loan.patience - loan.waited - (now - begin)
                if remaining <= 0:
                    raise Unreachable("no memory is free: workers on slow links hold all of it")
                if not self._grow(now):
                    # A link that becomes slow sends no notification, so check again after a pause.
                    loan.changed.wait(min(remaining, slow))
        loan.waited += self._clock() - begin

    def give_back(self, piece: Piece) -> None:
        """Take a piece back before the end of its loan."""
        with self.lock:
            self._give_back(piece)
            self._grant()

    # --- under the lock -------------------------------------------------------------------------------------------

    def _grant(self) -> None:
        """Give free and new pieces to the oldest loans."""
        while self._queue:
            loan = self._queue[0]
            if loan.first_since is None:
                loan.first_since = self._clock()
            while loan.missing:
                size = min(loan.missing, PIECE_BYTES)
                if (piece := self._take(size, loan.nbytes)) is None:
                    return
                loan.granted.append(piece)
                loan.missing -= size
                loan.changed.notify()
            self._queue.popleft()

    def _take(self, size: int, message: int) -> Piece | None:
        usual = max(self._usual, message)
        limit = usual + self.extra * message
        if not self._free[size]:
            self._drop(limit - size)
            if self.made + size > limit:
                return None
            self.made += size
            self._free[size].append(_allocate(size))
        self._lent += size
        if self._lent > usual:
            self._needed = self._clock()
        return self._free[size].pop()

    def _give_back(self, piece: Piece) -> None:
        self._lent -= piece.nbytes
        self._free[piece.nbytes].append(piece)
        now = self._clock()
        if self.extra and now - self._needed > KEEP_SECONDS:
            self.extra -= 1
            self._needed = now
        self._drop(max(self._usual, self._message) + self.extra * self._message)

    def _drop(self, limit: int) -> None:
        """Free memory until all pieces have at most `limit` bytes, or none is free."""
        for pieces in self._free.values():
            while pieces and self.made > limit:
                self.made -= pieces.pop().nbytes

    def _grow(self, now: float) -> bool:
        """Grow by a message if the oldest loan has waited for too long."""
        loan = self._queue[0]
        since = now if loan.first_since is None else loan.first_since
        if self.extra >= MAX_EXTRA or now - since < _slow_seconds(loan.nbytes):
            return False
        self.extra += 1
        loan.first_since = now
        log.info("workers on slow links hold the memory for messages: adding that of one message")
        self._grant()
        return True


def _allocate(size: int) -> Piece:
    # Not by malloc, which keeps what is freed, and fragments.
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def _slow_seconds(message: int) -> float:
    least, most = SLOW_SECONDS
    return min(most, max(least, 2 * message / SLOW_RATE))
