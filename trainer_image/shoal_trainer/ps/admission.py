"""Bookkeeping about a shard's workers: incarnations, connections, and gradients in flight.

It has no lock of its own; callers hold the shard's.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import chain

from shoal_trainer.errors import Fenced

log = logging.getLogger(__name__)


class Incarnations:
    """The newest incarnation and the open connections of each slot."""

    def __init__(self) -> None:
        self.reported_live: int | None = None
        """The coordinator's count of live workers; None: count connections."""
        self._newest: dict[int, int] = {}
        self._connections: dict[int, int] = {}
        self._non_finite: dict[int, int] = {}
        """The newest incarnation of each slot for which non-finite values were logged."""
        self._left: dict[int, int] = {}

    @property
    def live(self) -> int:
        """The number of live workers; at least 1."""
        return max(1, len(self._connections) if self.reported_live is None else self.reported_live)

    def has(self, slot: int) -> bool:
        """Whether a worker of this slot is connected."""
        return slot in self._connections

    def connect(self, slot: int, incarnation: int) -> None:
        """Count a connection; older incarnations of the slot are fenced. A worker that had left may come back."""
        self._check_newest(slot, incarnation)
        self._left.pop(slot, None)  # not before: an older incarnation must not make a late push acceptable
        self._newest[slot] = incarnation
        self._connections[slot] = self._connections.get(slot, 0) + 1

    def disconnect(self, slot: int) -> bool:
        """Remove a connection; returns whether the slot has another one."""
        remaining = self._connections.get(slot, 0) - 1
        if remaining > 0:
            self._connections[slot] = remaining
        else:
            self._connections.pop(slot, None)
        return remaining > 0

    def fence(self, slot: int, minimum_incarnation: int) -> bool:
        """Refuse older incarnations of a slot from now on; returns whether any is newly refused."""
        before = self._newest.get(slot, 0)
        self._newest[slot] = max(minimum_incarnation, before)
        return minimum_incarnation > before

    def leave(self, slot: int, incarnation: int) -> bool:
        """Refuse pushes of this worker until it connects again; returns whether it is newly refused."""
        newly = self._left.get(slot) != incarnation
        self._left[slot] = incarnation
        return newly

    def refused(self) -> tuple[dict[int, int], dict[int, int]]:
        """By slot: the oldest incarnation that may push, and the one that has left."""
        return dict(self._newest), dict(self._left)

    def check(self, slot: int, incarnation: int) -> None:
        """`Fenced` if the slot has a newer incarnation, or if this worker has left."""
        if incarnation == self._left.get(slot):
            raise Fenced(f"worker {slot}-{incarnation} has left: its leases are reassigned")
        self._check_newest(slot, incarnation)

    def _check_newest(self, slot: int, incarnation: int) -> None:
        if incarnation < (newest := self._newest.get(slot, 0)):
            raise Fenced(
                f"slot {slot} has incarnation {newest}; incarnation {incarnation} may no longer write"
            )

    def pushed(self, slot: int, incarnation: int, *, non_finite: bool) -> None:
        """Log a push with non-finite values, once per worker."""
        if non_finite and self._non_finite.get(slot, -1) < incarnation:
            self._non_finite[slot] = incarnation
            log.warning("worker %d-%d pushed non-finite values: they were replaced by 0", slot, incarnation)


class Permits:
    """Bounded staleness: the parameter versions on which the gradients in flight are computed.

    The push with the oldest version never waits, so workers cannot deadlock, and none waits for a worker that has left.
    """

    def __init__(self) -> None:
        self._pulled: dict[int, deque[int]] = {}
        self._waiting: dict[int, int] = {}
        self._admitted: set[int] = set()
        """The workers whose pushes are admitted and not applied yet: each will make another version."""
        self._oldest: int | None = None
        """The minimum of both, so that a waiting push does not compute it again; None after a change."""

    def pulled(self, slot: int, version: int) -> None:
        """A worker pulled `version` and will push a gradient computed on it."""
        self._pulled.setdefault(slot, deque(maxlen=8)).append(version)
        self._oldest = None

    def pushed(self, slot: int, base: int) -> None:
        """A gradient computed on `base` was applied; the worker sends none on this version or an older one."""
        self._admitted.discard(slot)
        self._drop_before(slot, base + 1)

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
        """The admitted push is applied, or will not be: its connection broke."""
        self._admitted.discard(slot)

    def admits(self, base: int, version: int, bound: int) -> bool:
        """Whether the push may be applied to `version` without making another gradient staler than `bound`.

        `base`: of a push that has arrived. All pushes that are admitted may be applied before it.
        """
        if self._oldest is None:
            pulled = (versions[0] for versions in self._pulled.values() if versions)
            self._oldest = min(chain(pulled, self._waiting.values()), default=version)
        return base <= self._oldest or version + len(self._admitted) + 1 - self._oldest <= bound

    def clear(self) -> None:
        """Forget all versions: a rollback restarts them at an older one."""
        self._pulled.clear()
        self._waiting.clear()
        self._admitted.clear()
        self._oldest = None

    def _drop_before(self, slot: int, version: int) -> bool:
        versions, dropped = self._pulled.get(slot), False
        while versions and versions[0] < version:
            versions.popleft()
            dropped = True
        self._oldest = None
        return dropped
