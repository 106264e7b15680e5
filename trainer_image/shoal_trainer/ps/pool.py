"""The memory of messages in flight, in pieces, which bounds a server's memory.

A request holds its pieces from its header until they are sent in the answer, and each sent piece is given to the
request that has waited longest. So one worker's answer and the next one's gradient share the memory of one message. A
request without a piece waits, and TCP back-pressure stops its worker. A stream holds one small piece for as long as it
takes.

A worker that stalls, or whose link is slow, holds its pieces for seconds. After a while they no longer count, so that
others get memory of their own: otherwise one slow worker would slow down all.
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
from shoal_trainer.ps.aligned import ALIGNMENT
from shoal_trainer.ps.coding import in_memory
from shoal_trainer.ps.pieces import Pieces
from shoal_trainer.wire.header import Codec

log = logging.getLogger(__name__)

Piece = NDArray[np.uint8]

PIECE_BYTES = 4 << 20
"""The largest piece."""
POOL_BYTES = 10 << 20
"""The usual size of the pool, without a share of the model."""
MODEL_SHARE = 0.1
"""The share of the bytes of the parameters and the optimizer's state that is added to it."""
MAX_MESSAGES = 64
RESERVED = 160 << 20
"""The part of the pod's memory that is neither model nor messages: the interpreter, threads, buffers of sockets."""
SLOW_RATE = 30_000_000
SLOW_SECONDS = 1.0, 10.0
"""A request is slow if it holds all its pieces for longer than a message takes at this many bytes per second, but at
least and at most for these times. A link of 1 Gb/s is four times as fast, and a message goes both ways."""
MAX_SLOW = 3
"""The number of slow requests whose memory does not count."""


class Loan:
    """The pieces of one message of `nbytes`, in order. It may wait for them for `patience` seconds in all."""

    def __init__(self, pool: PiecePool, nbytes: int, patience: float) -> None:
        self.nbytes = nbytes
        self.patience = patience
        self.waited = 0.0
        """Seconds so far."""
        self.pieces: deque[Piece] = deque()
        """Those that were granted, often ahead of their use, and not given back."""
        # All pieces are equal, so that one message can use those of another.
        self.count = -(-nbytes // PIECE_BYTES)
        self.piece_bytes = -(-nbytes // (max(1, self.count) * ALIGNMENT)) * ALIGNMENT
        self.missing = self.count
        """Pieces that are not granted yet."""
        self.changed = threading.Condition(pool.lock)
        self._pool = pool

    def take(self) -> Iterator[Piece]:
        """The pieces in order; waits for each. `Unreachable` when its patience is at an end."""
        for index in range(self.count):
            if index >= len(self.pieces):
                self._pool.wait(self, index)
            yield self._used(index, self.pieces[index])

    def granted(self, seconds: float, *, whole: bool) -> bool:
        """Wait, at most `seconds`, for the first piece, or for all of them; returns whether they are there."""
        return self._pool.wait_granted(self, self.count if whole else min(1, self.count), seconds)

    def payload(self, codec: Codec, trainable: int) -> Pieces:
        """All pieces as values, of which the first are trainable."""
        used = (self._used(index, piece) for index, piece in enumerate(self.pieces))
        return in_memory(used, trainable, codec.dtype)

    def return_after_use(self) -> Iterator[Piece]:
        """The pieces in order; each is given back when the next one is asked for."""
        for index in range(self.count):
            yield self._used(index, self.pieces[0])
            self._pool.give_back(self)

    def _used(self, index: int, piece: Piece) -> Piece:
        """The part of piece `index` that the message uses: the last one may be shorter."""
        return piece[: self.nbytes - index * self.piece_bytes]


class PiecePool:
    """Pieces for messages, allocated on demand and reused.

    Without slow requests they have at most `limit` + `MODEL_SHARE` x the bytes of the model, always enough for one
    message; or what the pod's limit of `memory` leaves beside the model and a copy of it, up to `MAX_MESSAGES`. With
    memory for one message only, the shard would run at the speed of one worker's link.
    """

    def __init__(
        self,
        limit: int = POOL_BYTES,
        *,
        memory: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.Lock()
        self.made = 0
        """Bytes of all pieces, lent or free."""
        self._free: defaultdict[int, list[Piece]] = defaultdict(list)
        """By size; the piece that was used last is the next one to be used."""
        self._waiting: deque[Loan] = deque()
        """Loans that miss pieces, oldest first. Only the first one gets any, so two never wait for each other."""
        self._complete: dict[Loan, float] = {}
        """Loans that got all their pieces, oldest first, and when."""
        self._limit = self._usual = limit
        self._memory = memory
        self._clock = clock

    @contextlib.contextmanager
    def lend(self, nbytes: int, model_bytes: int = 0, *, patience: float = math.inf) -> Iterator[Loan]:
        """A loan of `nbytes`, given back at the end. `model_bytes`: those of parameters and optimizer."""
        loan = Loan(self, nbytes, patience)
        try:
            with self.lock:
                self._usual = self._limit + int(MODEL_SHARE * model_bytes)
                if self._memory is not None:
                    spare = self._memory - RESERVED - 2 * model_bytes  # a snapshot copies the model
                    self._usual = max(self._usual, min(spare, MAX_MESSAGES * nbytes))
                self._waiting.append(loan)
                self._grant()
            yield loan
        finally:
            with self.lock:
                if self._complete.pop(loan, None) is None:
                    self._waiting.remove(loan)
                while loan.pieces:
                    self._give_back(loan)
                self._grant()

    def wait(self, loan: Loan, index: int) -> None:
        """Wait until the loan has piece `index`."""
        begin = self._clock()
        with self.lock:
            while len(loan.pieces) <= index:
                remaining = loan.patience - loan.waited - (self._clock() - begin)
                if remaining <= 0:
                    raise Unreachable("no memory is free: other requests hold all of it")
                # A request that becomes slow sends no notification, so check again after a pause.
                loan.changed.wait(min(remaining, SLOW_SECONDS[0]))
                self._grant()
        loan.waited += self._clock() - begin

    def wait_granted(self, loan: Loan, count: int, seconds: float) -> bool:
        """Wait, at most `seconds`, until the loan has `count` pieces; returns whether it has."""
        deadline = self._clock() + seconds
        with self.lock:
            while len(loan.pieces) < count:
                if (remaining := deadline - self._clock()) <= 0:
                    return False
                loan.changed.wait(min(remaining, SLOW_SECONDS[0]))
                self._grant()
            return True

    def give_back(self, loan: Loan) -> None:
        """Take back the first piece of a loan before its end."""
        with self.lock:
            self._give_back(loan)
            self._grant()

    # --- under the lock -------------------------------------------------------------------------------------------

    def _grant(self) -> None:
        """Give free and new pieces to the oldest loans."""
        while self._waiting:
            loan = self._waiting[0]
            while loan.missing:
                if (piece := self._take(loan)) is None:
                    return
                loan.pieces.append(piece)
                loan.missing -= 1
                loan.changed.notify()
            self._complete[self._waiting.popleft()] = self._clock()

    def _take(self, loan: Loan) -> Piece | None:
        free, size = self._free[loan.piece_bytes], loan.piece_bytes
        if free:
            return free.pop()
        self._drop(limit := self._most(loan) - size)
        if self.made > limit:
            return None
        try:
            piece = _allocate(size)
        except OSError as error:
            log.warning("cannot allocate memory for a message: %s", error)
            self._drop(0)
            return None
        self.made += size
        return piece

    def _give_back(self, loan: Loan) -> None:
        self._free[loan.piece_bytes].append(loan.pieces.popleft())
        if self.made > self._usual:
            self._drop(self._most(loan))

    def _most(self, loan: Loan) -> int:
        """The most bytes that all pieces may have, so that `loan` gets all its pieces in the end."""
        now = self._clock()
        slow = [
            len(one.pieces) * one.piece_bytes
            for one, since in self._complete.items()
            if now - since >= _slow_seconds(one.nbytes)
        ]
        return max(self._usual, loan.count * loan.piece_bytes) + sum(slow[:MAX_SLOW])

    def _drop(self, limit: int) -> None:
        """Free memory until all pieces have at most `limit` bytes, or none is free."""
        for pieces in self._free.values():
            while pieces and self.made > limit:
                self.made -= len(pieces.pop())


def _slow_seconds(message: int) -> float:
    least, most = SLOW_SECONDS
    return min(most, max(least, message / SLOW_RATE))


def _allocate(size: int) -> Piece:
    # Not by malloc, which keeps what is freed, and fragments.
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
