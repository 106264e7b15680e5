"""What the coordinator asks of another shard: the seam at which tests put one into their own process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal_trainer.contract import ShardReport
from shoal_trainer.coordinator.protocol import Pushes
from shoal_trainer.ps.contents import Span, Worker
from shoal_trainer.snapshot.manifest import ShardFile


class OtherShard(Protocol):
    """Another shard. Each call raises `Unreachable` if it does not answer, or is not ready."""

    def snapshot(self, number: int, epoch: int, published: int, generation: int = 0) -> ShardFile:
        """Write its part of a snapshot; `published`: see `SnapshotShard`."""

    def roll_back(self, generation: int) -> None:
        """Roll back to the snapshot with which this generation begins."""

    def pushes(self, wanted: Sequence[Span]) -> Pushes:
        """The pushes that it holds, and the journal entries of the `wanted` ones."""

    def report(self) -> ShardReport:
        """Its entry in the status report."""

    def fence(self, older: Sequence[Worker], left: Sequence[Worker]) -> None:
        """Refuse these workers; see `FenceWorkers`."""
