"""Counters of a whole run, which are saved in snapshots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NUMBERS = ("repeated", "partial", "lost", "wasted_steps", "steps", "rollbacks", "restarted_from_nothing")


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
    repeated_ranges: set[tuple[int, int]] = field(default_factory=set)
    partial_ranges: set[tuple[int, int]] = field(default_factory=set)

    def dump(self) -> dict[str, Any]:
        """As JSON."""
        return {name: getattr(self, name) for name in NUMBERS} | {
            "repeated_ranges": sorted(self.repeated_ranges),
            "partial_ranges": sorted(self.partial_ranges),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """The inverse of `dump`."""
        for name in NUMBERS:
            setattr(self, name, int(saved.get(name, 0)))
        self.repeated_ranges = {(int(e), int(r)) for e, r in saved["repeated_ranges"]}
        self.partial_ranges = {(int(e), int(r)) for e, r in saved["partial_ranges"]}


def wasted_after_rollback(saved: dict[str, Any], current: Counters) -> int:
    """The wasted steps after a rollback to a saved record: the current ones, and the steps that it undoes."""
    return current.wasted_steps + max(0, current.steps - int(saved["counters"]["steps"]))
