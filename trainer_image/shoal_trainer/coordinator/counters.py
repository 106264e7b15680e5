"""Counters of a whole run, which are saved in snapshots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counters:
    """Samples unless a name says otherwise. Ranges are (epoch, number)."""

    repeated: int = 0
    partial: int = 0
    lost: int = 0
    wasted_steps: int = 0
    steps: int = 0
    rollbacks: int = 0
    restarted_from_nothing: int = 0
    taken_back: int = 0
    """How often a worker's leases were (see `stuck`)."""
    repeated_ranges: set[tuple[int, int]] = field(default_factory=set)
    partial_ranges: set[tuple[int, int]] = field(default_factory=set)

    def dump(self) -> dict[str, Any]:
        """As JSON."""
        return {name: sorted(kept) if isinstance(kept, set) else kept for name, kept in vars(self).items()}

    def load(self, saved: dict[str, Any]) -> None:
        """The inverse of `dump`; an earlier version may lack some."""
        for name, kept in vars(Counters()).items():
            ranges = isinstance(kept, set)
            value = saved.get(name, kept)
            setattr(self, name, {(int(e), int(r)) for e, r in value} if ranges else int(value))

    def keep(self, current: Counters) -> None:
        """Have no less than these of what happened to workers and servers: it is no property of the parameters."""
        for name in ("taken_back", "restarted_from_nothing"):
            setattr(self, name, max(getattr(self, name), getattr(current, name)))


def wasted_after_rollback(saved: dict[str, Any], current: Counters) -> int:
    """The wasted steps after a rollback to a saved record: the current ones, and the steps that it undoes."""
    return current.wasted_steps + max(0, current.steps - int(saved["counters"]["steps"]))
