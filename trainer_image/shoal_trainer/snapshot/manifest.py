"""The manifest of a snapshot. A file belongs to a snapshot only if a manifest names it."""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, Field

from shoal_trainer.contract import Message
from shoal_trainer.wire.messages import Applied, BegunPush, ModelSpec, applied_from_list


class ShardFile(Message):
    """One shard's file: its path relative to `snapshots/`, its size in bytes, its SHA-256, and what it contains."""

    index: int
    shards: int
    epoch: int
    version: int
    samples: int = 0
    updates: int = 0
    pace: float | None = None
    """At which the optimizer's velocity was made; None in files of versions that did not write it."""
    low: int
    high: int
    file: str
    size: int
    sha256: str
    applied: list[tuple[int, int, int]] = Field(default_factory=list)
    """[slot, incarnation, seq]: the last push of each worker in the parameters."""

    pushes: list[tuple[int, int, int, int]] = Field(default_factory=list)
    """[slot, incarnation, first, last + 1]: the sequence numbers of all pushes in the parameters."""

    begun: list[BegunPush] = Field(default_factory=list)
    """The pushes of which a part is in the parameters."""

    @property
    def vector(self) -> Applied:
        """`applied` as a mapping."""
        return applied_from_list(self.applied)


class Head(Message):
    """What fences and cleaning need of a manifest: without the ledger, which may be large. `epoch`: that of PS 0."""

    number: int
    epoch: int
    shards: tuple[ShardFile, ...]


class Manifest(Head):
    """One snapshot of a run. `ledger`: the coordinator's state, opaque here."""

    version: int = 1
    generation: int = 0
    """The number of rollbacks of the job."""
    run: str = Field(validation_alias=AliasChoices("run", "jobUid"))
    """`JobIdentity.run_id`; an earlier version called it `jobUid`."""
    model: ModelSpec
    ledger: dict[str, Any] = Field(default_factory=dict)
    wall_time: float = 0.0

    @property
    def applied(self) -> Applied:
        """The last push of each worker that all shards contain."""
        vectors = [shard.vector for shard in self.shards]
        keys = {key for vector in vectors for key in vector}
        return {key: min(vector.get(key, 0) for vector in vectors) for key in sorted(keys)}
