"""Walks over a large shard, piece by piece: pushes that are received, pulls that are sent, snapshots. Pure.

A piece of a push is applied when it arrives, and its answer leaves at once; many pushes do so at the same time. An
answer must still contain one state of the shard, because it may replace the shard's parameters after a loss: some
pushes as a whole, and of those that are still being received a prefix. So a push waits before it would write a piece
that a slower walk has yet to pass, if that walk has passed pieces without this push. It waits briefly: then the other
answer is *torn*, good to train on but not to recover from. Nothing passes a snapshot.

What exactly-once remembers of a push is its worker, its sequence number, and its prefix: the pieces in the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal_trainer.ps.contents import Push, Worker
from shoal_trainer.ps.update_rules import Update
from shoal_trainer.wire.messages import Progress


class Weighed(NamedTuple):
    """How a push is applied: its staleness in versions, its weight, and the optimizer's step (None: it has none)."""

    staleness: int
    weight: float
    update: Update | None


@dataclass(eq=False)
class Begun:
    """A push of which the parameters contain the first `pieces` pieces, and the positions of the data it covers.

    `weighed`: before its first piece, for all of them, whichever request has them; None before that, and of a push that
    an earlier process of the shard has begun.
    """

    worker: Worker
    seq: int
    progress: tuple[Progress, ...] = ()
    pieces: int = 0
    weighed: Weighed | None = None

    @property
    def push(self) -> Push:
        """Its identity."""
        return (*self.worker, self.seq)


@dataclass(eq=False)
class Walk:
    """One walk, at piece `position`. `push`: what it writes; None: it only reads. `steady`: it is never torn."""

    push: Begun | None = None
    steady: bool = False
    position: int = 0
    working: bool = False
    """Whether a thread works on its piece."""
    torn: bool = False
    missing: dict[Begun, int] = field(default_factory=dict)
    """The first piece that it passed without this push; the earlier ones contain it."""

    @property
    def writes(self) -> bool:
        """Whether its next piece changes the parameters; else that piece of its push is in them already."""
        return self.push is not None and self.position == self.push.pieces


class Walks:
    """The open walks over a shard of `pieces` pieces, and the pushes that are in it in part."""

    def __init__(self, pieces: int = 1, begun: Iterable[Begun] = ()) -> None:
        self.pieces = pieces
        self.open: list[Walk] = []
        self.begun: dict[Worker, Begun] = {push.worker: push for push in begun}
        """At most one of each worker: it sends a push again until it is answered."""

    def begin(self, push: Begun | None = None, *, steady: bool = False) -> Walk:
        """Begin a walk; that of an interrupted push goes on where it was interrupted."""
        if push is not None and self.begun.get(push.worker) is not push:
            self.begun[push.worker] = push
            for other in self.open:
                if other.position or other.working:
                    other.missing[push] = 0
        walk = Walk(push, steady)
        self.open.append(walk)
        return walk

    def busy(self, walk: Walk) -> bool:
        """Whether another walk works on the next piece, and one of them writes."""
        at_work = [w for w in self.open if w.working and w is not walk and w.position == walk.position]
        return any(w.writes or walk.writes for w in at_work)

    def held_up(self, walk: Walk) -> list[Walk]:
        """The walks that the next piece of this one would tear."""
        if not walk.writes:
            return []
        return [
            other
            for other in self.open
            if other is not walk
            and not other.torn
            and other.position <= walk.position
            and walk.push in other.missing
        ]

    def take(self, walk: Walk) -> None:
        """Begin to work on the next piece, which is not `busy`."""
        for other in self.held_up(walk):
            other.torn = True
        for push in self.begun.values():
            if push is not walk.push and push.pieces <= walk.position:
                walk.missing.setdefault(push, walk.position)
        walk.working = True

    def done(self, walk: Walk) -> bool:
        """The piece is done; returns whether the push has become complete with it."""
        completes = False
        if walk.writes and walk.push is not None:
            walk.push.pieces += 1
            completes = walk.push.pieces == self.pieces
        walk.position += 1
        walk.working = False
        if completes and walk.push is not None:
            self.abandon(walk.push)
        return completes

    def end(self, walk: Walk) -> None:
        """End a walk; what was applied of its push stays, to be continued."""
        self.open.remove(walk)
        push = walk.push
        if push is not None and not push.pieces and all(other.push is not push for other in self.open):
            self.abandon(push)

    def abandon(self, push: Begun) -> None:
        """Nobody continues this push."""
        if self.begun.get(push.worker) is push:
            del self.begun[push.worker]

    def under_way(self, walk: Walk) -> int:
        """How many other pushes are being applied."""
        pushes = {other.push for other in self.open if other.push is not None and other.push.pieces}
        return sum(push is not walk.push and self.begun.get(push.worker) is push for push in pushes)
