"""The wait of a restarted coordinator for the workers that survived.

For up to `GATHER_SECONDS`, and longer for workers that are alive, it grants nothing, so that they can present their
leases and keep them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from shoal_trainer.coordinator.lease_index import Segment
from shoal_trainer.coordinator.ledger import Ledger
from shoal_trainer.coordinator.members import SILENCE_SECONDS
from shoal_trainer.coordinator.protocol import Join, Renamed
from shoal_trainer.ps.recovery import JITTER, longest_pause

GATHER_SECONDS = 5.0
ALIVE_SECONDS = 55.0
"""Gathering takes this much longer while a worker is alive that has not joined: it may hold leases."""


class Gathering:
    """Goes on from `begin` until `end`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.begun = False
        """Whether it has ever begun: this process follows another one of the run."""
        self._until: float | None = None
        self._expected: set[int] | None = None
        self._joined: set[int] = set()
        self._heard: dict[int, float] = {}
        """When each slot last made contact."""

    @property
    def on(self) -> bool:
        """Whether the survivors are waited for."""
        return self._until is not None

    def begin(self) -> None:
        """Wait for the first worker without a limit."""
        self.begun, self._until = True, math.inf

    def end(self) -> None:
        """Wait no more."""
        self._until = self._expected = None

    def expect(self, slots: Iterable[int]) -> None:
        """The workers that a snapshot names; one from before the first lease names none."""
        self._expected = set(slots) or None

    def ready(self, slots: Iterable[int]) -> None:
        """The shard has its parameters, with pushes of these workers: some may have joined after the snapshot."""
        slots = set(slots)
        if self._expected is not None:
            self._expected |= slots
        if self._until not in {None, math.inf}:
            # Surviving workers join when they next connect and find the shard ready.
            pause = longest_pause(len(slots)) * (1 + JITTER)
            self._until = max(self._until, self._clock() + 2 * pause + 1)

    def heard_of(self, slot: int) -> None:
        """A worker made contact. The first contact starts the time limit."""
        if self._until is not None:
            self._heard[slot] = self._clock()
            self._until = min(self._until, self._clock() + GATHER_SECONDS)

    def joined(self, slot: int) -> None:
        """A worker has joined, with the leases that it holds."""
        self._joined.add(slot)

    def over(self) -> bool:
        """Whether all expected workers have joined, or the time is over.

        A worker joins when it has noticed the loss and reached every server again; until then it is only heard of.
        """
        if self._until is None:
            return False
        if self._expected is not None and self._expected <= self._joined:
            return True
        now = self._clock()
        alive = any(
            now - heard <= SILENCE_SECONDS for slot, heard in self._heard.items() if slot not in self._joined
        )
        return now >= self._until + (ALIVE_SECONDS if alive else 0.0)


def reclaimed(ledger: Ledger, term: int, request: Join) -> tuple[Renamed, ...]:
    """Renew the leases of earlier terms that a worker presents."""
    renamed = []
    for old in request.leases:
        if old.term == term:
            lease = ledger.leases.get(old.token)
        else:
            segment = Segment(old.epoch, old.number, old.start, old.stop)
            lease = ledger.reclaim(request.worker, term, segment, request.batch_size)
        if lease is not None:
            renamed.append(Renamed(old=old.token, new=lease.token))
    return tuple(renamed)
