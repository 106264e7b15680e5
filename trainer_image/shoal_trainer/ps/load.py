"""The work of a shard: cumulative counters over the life of its process, from which its capacity follows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Load:
    """See `ShardReport`. Changed under the shard's lock."""

    busy_seconds: float = 0.0
    updates: int = 0
    bytes_received: int = 0
    busy_answers: int = 0

    def add(self, seconds: float, nbytes: int) -> None:
        """Count an applied push of so many bytes, which took so long to apply and to answer."""
        self.busy_seconds += seconds
        self.updates += 1
        self.bytes_received += nbytes
