"""Bounded staleness: the gradients in flight, and which push may be applied. Callers hold the shard's lock."""

from __future__ import annotations

from collections import deque
from itertools import chain


class Permits:
    """The parameter versions on which the gradients in flight are computed.

    The push with the oldest version never waits, so workers cannot deadlock, and none waits for a worker that has left.
    """

    def __init__(self) -> None:
        self._pulled: dict[int, deque[int]] = {}
        self._waiting: dict[int, int] = {}
        self._admitted: set[int] = set()
        """The workers whose pushes are admitted and not applied yet: each will make another version."""
        self._here: set[int] = set()
        """The workers with a push that has arrived and is not answered yet: they wait for a server."""
        self._oldest: int | None = None
        """The minimum of both, so that a waiting push does not compute it again; None after a change."""

    def pulled(self, slot: int, version: int, gradients: int = 1) -> None:
        """A worker pulled `version` and will push so many gradients computed on it."""
        self._pulled.setdefault(slot, deque(maxlen=16)).extend([version] * gradients)
        self._oldest = None

    def pushed(self, slot: int, base: int) -> None:
        """A gradient computed on `base` was applied; the worker sends none on an older version."""
        self._admitted.discard(slot)
        self._drop_before(slot, base)
        if (versions := self._pulled.get(slot)) and versions[0] == base:
            versions.popleft()

    def forget(self, slot: int) -> None:
        """Expect no gradient from this worker."""
        self._pulled.pop(slot, None)
        self._oldest = None

    def give_up(self, slot: int, version: int, bound: int) -> None:
        """Stop waiting for workers whose gradients one more push would make staler than `bound`."""
        for other in [other for other in self._pulled if other != slot]:
            versions = self._pulled[other]
            if versions and version + 1 - versions[0] > bound:
                del self._pulled[other]
        self._oldest = None

    def arrive(self, slot: int, base: int) -> bool:
        """A push arrived and may have to wait. The worker sends no gradient on an older version than `base`.

        Returns whether other pushes may be admitted now.
        """
        dropped = self._drop_before(slot, base)
        self._waiting[slot] = base
        self._here.add(slot)
        return dropped

    def waits(self, slot: int) -> bool:
        """Whether a push that has arrived still has to be admitted; not after `clear`."""
        return slot in self._waiting

    def leave(self, slot: int) -> None:
        """The push no longer waits: it is admitted."""
        self._waiting.pop(slot, None)
        self._admitted.add(slot)
        self._oldest = None

    def ended(self, slot: int) -> None:
        """The admitted push is answered, or will not be: its connection broke."""
        self._admitted.discard(slot)
        self._here.discard(slot)

    @property
    def computed(self) -> bool:
        """Whether an oldest gradient in flight is still computed: who waits for it waits for its worker."""
        oldest = self._find_oldest()
        pulled = self._pulled.items()
        return any(versions and versions[0] == oldest for slot, versions in pulled if slot not in self._here)

    def admits(self, base: int, version: int, bound: int) -> bool:
        """Whether the push may be applied to `version` without making another gradient staler than `bound`.

        `base`: of a push that has arrived. All pushes that are admitted may be applied before it.
        """
        oldest = self._find_oldest()
        return oldest is None or base <= oldest or version + len(self._admitted) + 1 - oldest <= bound

    def clear(self) -> None:
        """Forget all versions: a rollback restarts them at an older one."""
        self._pulled.clear()
        self._waiting.clear()
        self._admitted.clear()
        self._here.clear()
        self._oldest = None

    def _find_oldest(self) -> int | None:
        if self._oldest is None:
            pulled = (versions[0] for versions in self._pulled.values() if versions)
            self._oldest = min(chain(pulled, self._waiting.values()), default=None)
        return self._oldest

    def _drop_before(self, slot: int, version: int) -> bool:
        versions, dropped = self._pulled.get(slot), False
        while versions and versions[0] < version:
            versions.popleft()
            dropped = True
        self._oldest = None
        return dropped
