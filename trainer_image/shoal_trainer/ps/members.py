"""A shard's view of the workers: which incarnation of each slot may write, connections, and gradients in flight.

Plain bookkeeping without a lock: the caller holds the shard's.
"""

from __future__ import annotations

import logging
from collections import deque

from shoal_trainer.errors import Fenced

log = logging.getLogger(__name__)


class Members:
    """Newest incarnations and open connections by slot. `said`: the coordinator's count of live workers."""

    def __init__(self) -> None:
        self.said: int | None = None
        self._newest: dict[int, int] = {}
        self._connections: dict[int, int] = {}
        self._spoilt: dict[int, int] = {}
        self._left: dict[int, int] = {}

    @property
    def live(self) -> int:
        """How many workers share the parameters; at least 1."""
        return max(1, len(self._connections) if self.said is None else self.said)

    def has(self, slot: int) -> bool:
        """Whether a worker of this slot is connected."""
        return slot in self._connections

    def connect(self, slot: int, incarnation: int) -> None:
        """Count a connection; its incarnation fences older ones."""
        self._left.pop(slot, None)
        self.check(slot, incarnation)
        self._newest[slot] = incarnation
        self._connections[slot] = self._connections.get(slot, 0) + 1

    def disconnect(self, slot: int) -> bool:
        """Discount a connection; returns whether the slot has another one."""
        left = self._connections.get(slot, 0) - 1
        if left > 0:
            self._connections[slot] = left
        else:
            self._connections.pop(slot, None)
        return left > 0

    def fence(self, slot: int, minimum_incarnation: int) -> bool:
        """Refuse all older incarnations of a slot from now on; returns whether that changes anything."""
        before = self._newest.get(slot, 0)
        self._newest[slot] = max(minimum_incarnation, before)
        return minimum_incarnation > before

    def leave(self, slot: int, incarnation: int) -> None:
        """The worker pushes no more; a new connection of it revokes that."""
        self._left[slot] = incarnation

    def check(self, slot: int, incarnation: int) -> None:
        """`Fenced` if a newer incarnation of this slot is known, or this one has left."""
        newest = self._newest.get(slot, 0)
        if incarnation == self._left.get(slot):
            raise Fenced(f"worker {slot}-{incarnation} has left: its leases are reassigned")
        if incarnation < newest:
            raise Fenced(
                f"slot {slot} has incarnation {newest}; incarnation {incarnation} may no longer write"
            )

    def pushed(self, slot: int, incarnation: int, *, spoilt: bool) -> None:
        """A push was applied; log non-finite values once for each worker."""
        if spoilt and self._spoilt.get(slot, -1) < incarnation:
            self._spoilt[slot] = incarnation
            log.warning(
                "worker %d-%d pushed values that are not finite: they were taken as 0", slot, incarnation
            )


class Permits:
    """Bounded staleness: which versions the gradients in flight are computed on.

    The oldest one never waits, so no two workers wait for each other, and none waits for a worker that has left.
    """

    def __init__(self) -> None:
        self._pulled: dict[int, deque[int]] = {}
        self._waiting: dict[int, int] = {}

    def pulled(self, slot: int, version: int) -> None:
        """A worker pulled these parameters and will push a gradient computed on them."""
        self._pulled.setdefault(slot, deque(maxlen=8)).append(version)

    def pushed(self, slot: int, base: int) -> None:
        """A worker's gradient on `base` is applied; earlier ones will not come."""
        versions = self._pulled.get(slot)
        while versions and versions[0] <= base:
            versions.popleft()

    def forget(self, slot: int) -> None:
        """A worker has left."""
        self._pulled.pop(slot, None)

    def give_up(self, slot: int, version: int, bound: int) -> None:
        """Stop waiting for workers whose gradients one more push would make older than `bound`."""
        for other in [other for other in self._pulled if other != slot]:
            versions = self._pulled[other]
            if versions and version + 1 - versions[0] > bound:
                del self._pulled[other]

    def arrive(self, slot: int, base: int) -> None:
        """A push arrived and may have to wait."""
        self._waiting[slot] = base

    def leave(self, slot: int) -> None:
        """The push no longer waits."""
        self._waiting.pop(slot, None)

    def admits(self, slot: int, base: int, version: int, bound: int) -> bool:
        """Whether the push may be applied to `version` without making another gradient older than `bound`."""
        others = [versions[0] for other, versions in self._pulled.items() if other != slot and versions]
        others += [value for other, value in self._waiting.items() if other != slot]
        oldest = min(others, default=base)
        return base <= oldest or version + 1 - oldest <= bound

    def forget_all(self) -> None:
        """The shard was rolled back: versions restart at an older one."""
        self._pulled.clear()
        self._waiting.clear()
