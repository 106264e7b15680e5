"""The manifest of a snapshot: a file that no manifest names is not part of any snapshot."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from shoal_trainer.contract import Message
from shoal_trainer.wire.messages import Applied, ModelSpec, applied_from_list


class ShardFile(Message):
    """One shard's file: its path (relative to `snapshots/`), length, SHA-256, and content."""

    index: int
    shards: int
    epoch: int
    version: int
    samples: int = 0
    updates: int = 0
    low: int
    high: int
    file: str
    size: int
    sha256: str
    applied: list[tuple[int, int, int]] = Field(default_factory=list)
    """[slot, incarnation, seq]: the last push of each that is in the parameters."""

    pushes: list[tuple[int, int, int, int]] = Field(default_factory=list)
    """[slot, incarnation, first, end): the numbers of all pushes that are in the parameters."""

    @property
    def vector(self) -> Applied:
        """`applied` as a mapping."""
        return applied_from_list(self.applied)


class Manifest(Message):
    """One snapshot of a run. `epoch` is PS 0's; `ledger` is the coordinator's own, opaque here."""

    version: int = 1
    number: int
    epoch: int
    generation: int = 0
    """How often the job was rolled back."""
    job_uid: str
    shards: tuple[ShardFile, ...]
    model: ModelSpec
    ledger: dict[str, Any] = Field(default_factory=dict)
    wall_time: float = 0.0

    @property
    def applied(self) -> Applied:
        """The pushes that every shard holds: the minimum over the shards."""
        vectors = [shard.vector for shard in self.shards]
        keys = {key for vector in vectors for key in vector}
        return {key: min(vector.get(key, 0) for vector in vectors) for key in sorted(keys)}
