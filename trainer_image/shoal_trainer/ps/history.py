"""Which pushes the parameters of a shard contain, as a whole or in part, and how many samples they trained.

Its owner holds the shard's lock. It never fences: a worker that is named here is, by `workers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile

from shoal_trainer.errors import ProtocolError, Unreachable
from shoal_trainer.ps.contents import KEPT_INCARNATIONS, Contents, Worker
from shoal_trainer.ps.journal import PushJournal
from shoal_trainer.ps.values import ShardCopy
from shoal_trainer.ps.walks import Begun, Walk, Walks
from shoal_trainer.wire.messages import AnswerMeta, Applied, BegunPush, Journal, PushMeta

APPLIED_INCARNATIONS = 4
"""Per slot: the number of incarnations in `applied`."""


def pushed(applied: Applied, worker: Worker, seq: int) -> None:
    """This is a worker's last push; of its slot, only the newest incarnations are kept."""
    if worker not in applied:
        older = sorted(key for key in applied if key[0] == worker[0])
        for key in older[: max(0, len(older) + 1 - APPLIED_INCARNATIONS)]:
            del applied[key]
    applied[worker] = seq


class History:
    """The history of a shard's parameters; a copy of them that is newer replaces it.

    `version`: the pushes that were applied. `generation`: the rollbacks of the job.
    """

    def __init__(self) -> None:
        self.version = 0
        self.samples = 0
        self.generation = 0
        self.applied: Applied = {}
        """The last push of each worker, of the newest incarnations."""
        self.undone: Applied = {}
        """`applied` before the rollbacks: the steps of these pushes are counted already."""
        self.journal = PushJournal()
        self.contents = Contents()
        """The pushes in the parameters."""
        self.walks = Walks()
        """The requests under way, and the pushes of which a part is in the parameters."""
        self.journal_fills: Callable[[], None] = lambda: None
        """Called, under the shard's lock, when the journal becomes nearly full; set by whoever takes snapshots."""
        self._closed: dict[Begun, int] = {}
        """Pushes of which a part is in the parameters and which nobody continues, and the version then, in its order.

        Of each slot at most those of `KEPT_INCARNATIONS`.
        """
        self._given_up: Applied = {}
        """The last one of each worker."""
        self._last_of: dict[int, int] = {}
        """The version that each slot's last push made."""
        self.restored = False
        """Whether the shard began with a snapshot of this run."""
        self._restored = Contents()
        """The pushes in the snapshot from which the shard was restored."""
        self._restored_begun: tuple[BegunPush, ...] = ()

    def in_pieces(self, pieces: int) -> None:
        """The shard has a model, which is walked over in so many pieces."""
        self.walks = Walks(pieces)

    def workers(self) -> Iterator[Worker]:
        """The workers whose pushes are in the parameters: older incarnations may no longer push."""
        yield from self.applied
        yield from (push.worker for push in (*self.walks.begun.values(), *self._closed))

    def last_seq(self, worker: Worker) -> int:
        """The last push of a worker that was applied, also if it was undone since; 0: none."""
        return max(self.applied.get(worker, 0), self.undone.get(worker, 0))

    def pushed_since(self, slot: int, version: int) -> bool:
        """Whether this slot has pushed since that version."""
        return self._last_of.get(slot, -1) > version

    # --- one push -------------------------------------------------------------------------------------------------

    def begin(self, worker: Worker, seq: int, meta: PushMeta) -> Begun | None:
        """The push to apply; None if it was applied before."""
        if seq < 1:
            raise ProtocolError(f"sequence number {seq}: sequence numbers begin at 1")
        if seq <= self.applied.get(worker, 0):
            return None
        begun = self.walks.begun.get(worker)
        given_up = seq <= self._given_up.get(worker, 0)
        if given_up or (begun is not None and begun.seq > seq):
            raise Unreachable(f"worker {worker[0]}-{worker[1]} has sent a later push than {seq}")
        for push in list(self.walks.begun.values()):
            older = push.worker[0] == worker[0] and push.worker < worker
            if older or (push.worker == worker and push.seq < seq):
                self._close(push)
        return begun if begun is not None and begun.seq == seq else Begun(worker, seq, meta.progress)

    def record(self, worker: Worker, seq: int, meta: PushMeta) -> None:
        """A push was applied as a whole."""
        slot, incarnation = worker
        self.version += 1
        self._last_of[slot] = self.version
        self.samples += meta.samples
        pushed(self.applied, worker, seq)
        self.contents.add((slot, incarnation, seq))
        filled = self.journal.nearly_full
        self.journal.add(self.version, (slot, incarnation, seq), meta)
        if self.journal.nearly_full and not filled:
            self.journal_fills()

    def close_those(self, refused: Callable[[Worker], bool]) -> None:
        """Nobody will continue the pushes of workers that are `refused`; those under way are left for the next time."""
        under_way = {walk.push for walk in self.walks.open}
        for push in list(self.walks.begun.values()):
            if refused(push.worker) and push not in under_way:
                self._close(push)

    def _close(self, push: Begun) -> None:
        """Nobody will continue this push. As in `Contents`, pushes of older incarnations are forgotten."""
        self.walks.abandon(push)
        if push.pieces:
            self._closed[push] = self.version
            self._given_up[push.worker] = push.seq
        slot, incarnation = push.worker
        for other in [other for other in self._closed if other.worker[0] == slot]:
            if other.worker[1] <= incarnation - KEPT_INCARNATIONS:
                del self._closed[other]
                self._given_up.pop(other.worker, None)

    # --- told -----------------------------------------------------------------------------------------------------

    def begun(self, seen: Walk | None = None, floor: int = 0) -> tuple[BegunPush, ...]:
        """The pushes of which only a part is in the parameters, or in what a walk has seen of them.

        Without those given up before the version `floor`.
        """

        def contained(push: Begun) -> int:
            return push.pieces if seen is None else seen.missing.get(push, push.pieces)

        # From the newest on: each answer needs a few of thousands.
        given_up = list(takewhile(lambda one: one[1] >= floor, reversed(self._closed.items())))
        open_ones = ((push, -1) for push in self.walks.begun.values())
        return tuple(
            BegunPush(*push.push, pieces, closed, push.progress)
            for push, closed in (*reversed(given_up), *open_ones)
            if (pieces := contained(push))
        )

    # --- replaced -------------------------------------------------------------------------------------------------

    def accepts(self, journal: Journal) -> bool:
        """Whether a worker's copy with this journal continues the snapshot that the shard began with."""
        return self.journal.accepts(journal, self._restored)

    def adopt(self, version: int, generation: int, meta: AnswerMeta) -> None:
        """That of a worker's copy, which the journal accepts."""
        self.version, self.samples, self.generation = version, meta.samples, generation
        self.applied = dict(meta.applied)
        self.journal.adopt(meta.journal)
        self.contents = Contents(self._restored.spans())
        for entry in self.journal.since(-1).entries:
            self.contents.add((entry.slot, entry.incarnation, entry.seq))
        # The copy names what its part of the history has begun; what was given up before that is in both.
        older = (push for push in self._restored_begun if 0 <= push.closed < meta.journal.floor)
        self._set_begun((*older, *meta.begun))

    def forget(self, generation: int, samples: int) -> None:
        """Nothing is known of how the parameters came about, but the samples that trained them."""
        self.version, self.samples, self.generation = 0, samples, generation
        self.applied = {}
        self.journal, self.contents = PushJournal(), Contents()
        self._set_begun(())

    def load(self, copy: ShardCopy) -> None:
        """That of a snapshot of this run."""
        self.restored = True
        self.version, self.samples, self.generation = copy.version, copy.samples, copy.generation
        self.applied = dict(copy.applied)
        self.journal = PushJournal(copy.version)
        self._restored, self._restored_begun = Contents(copy.pushes), copy.begun
        self.contents = Contents(copy.pushes)
        self._last_of.clear()
        self._set_begun(copy.begun)

    def undo(self) -> None:
        """The job rolls back; a snapshot is loaded next."""
        self.undone |= {worker: self.last_seq(worker) for worker in self.applied}

    def _set_begun(self, pushes: Iterable[BegunPush]) -> None:
        known = {
            Begun((push.slot, push.incarnation), push.seq, push.progress, push.pieces): push.closed
            for push in pushes
            if (push.slot, push.incarnation, push.seq) not in self.contents
        }
        self.walks = Walks(self.walks.pieces, (push for push, closed in known.items() if closed < 0))
        given_up = sorted(known.items(), key=lambda one: one[1])
        self._closed = {push: closed for push, closed in given_up if closed >= 0}
        self._given_up = {push.worker: push.seq for push in sorted(self._closed, key=lambda push: push.seq)}
