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
        self._computed: bool | None = None
        """The minimum of both, and `computed`, so that not every push looks at all workers; None: unknown."""

    def pulled(self, slot: int, version: int, gradients: int = 1) -> None:
        """A worker pulled `version` and will push so many gradients computed on it."""
        self._change(slot, version)
        self._pulled.setdefault(slot, deque(maxlen=16)).extend([version] * gradients)

    def pushed(self, slot: int, base: int) -> None:
        """A gradient computed on `base` was applied; the worker sends none on an older version."""
        self._change(slot)
        self._admitted.discard(slot)
        self._drop_before(slot, base)
        if (versions := self._pulled.get(slot)) and versions[0] == base:
            versions.popleft()

    def forget(self, slot: int) -> None:
        """Expect no gradient from this worker."""
        self._change(slot)
        self._pulled.pop(slot, None)

    def give_up(self, slot: int, version: int, bound: int) -> None:
        """Stop waiting for workers whose gradients one more push would make staler than `bound`."""
        for other in [other for other in self._pulled if other != slot]:
            versions = self._pulled[other]
            if versions and version + 1 - versions[0] > bound:
                self._change(other)
                del self._pulled[other]

    def arrive(self, slot: int, base: int) -> bool:
        """A push arrived and may have to wait. The worker sends no gradient on an older version than `base`.

        Returns whether other pushes may be admitted now.
        """
        self._change(slot, base)
        dropped = self._drop_before(slot, base)
        self._waiting[slot] = base
        self._here.add(slot)
        return dropped

    def waits(self, slot: int) -> bool:
        """Whether a push that has arrived still has to be admitted; not after `clear`."""
        return slot in self._waiting

    def leave(self, slot: int) -> None:
        """The push no longer waits: it is admitted."""
        self._change(slot)
        self._waiting.pop(slot, None)
        self._admitted.add(slot)

    def ended(self, slot: int) -> None:
        """The admitted push is answered, or will not be: its connection broke."""
        self._change(slot)
        self._admitted.discard(slot)
        self._here.discard(slot)

    @property
    def computed(self) -> bool:
        """Whether a push waits and an oldest gradient in flight is still computed: it waits for that one's worker."""
        if self._waiting and self._computed is None:
            oldest, pulled = self._find_oldest(), self._pulled.items()
            self._computed = any(
                versions and versions[0] == oldest for slot, versions in pulled if slot not in self._here
            )
        return bool(self._waiting and self._computed)

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
        self._oldest = self._computed = None

    def _change(self, slot: int, version: int | None = None) -> None:
        """Before a change of what is known of a worker, by this version: if all of it is younger, the oldest stays."""
        versions = self._pulled.get(slot)
        known = version, versions[0] if versions else None, self._waiting.get(slot)
        if self._oldest is None or any(each is not None and each <= self._oldest for each in known):
            self._oldest = self._computed = None

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
        return dropped
