"""The manifest of a snapshot. A file belongs to a snapshot only if a manifest names it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, Field
from pydantic_core import to_json

from shoal_trainer.contract import Message
from shoal_trainer.ps.values import ShardState
from shoal_trainer.wire.messages import Applied, ModelSpec

FORMAT = 1
"""Of manifests, ledgers and shards' files. Whoever changes one so that an earlier version would misread it adds 1."""
PIECE = 1000
"""How many elements of a list are made JSON at once: a millisecond or two, in which no other thread runs."""


_SEAL = b',"sha256":"%s"}'
_SEALED = re.compile(rb',"sha256":"([0-9a-f]{64})"}$')


class ShardFile(ShardState):
    """One shard's file: its path relative to `snapshots/`, its size in bytes, its SHA-256, and what it contains."""

    file: str
    size: int
    sha256: str
    applied: list[tuple[int, int, int]] = Field(default_factory=list)
    """[slot, incarnation, seq]: the last push of each worker in the parameters."""

    @property
    def vector(self) -> Applied:
        """`applied` as a mapping."""
        return applied_from_list(self.applied)


class Written(Message):
    """What every version can read of a manifest."""

    format: int = FORMAT


class Head(Written):
    """What fences and cleaning need of a manifest: without the ledger, which may be large. `epoch`: that of PS 0."""

    number: int
    epoch: int
    shards: tuple[ShardFile, ...]


class Manifest(Head):
    """One snapshot of a run. `ledger`: the coordinator's state, opaque here."""

    generation: int = 0
    """The number of rollbacks of the job."""
    run: str = Field(validation_alias=AliasChoices("run", "jobUid"))
    """`JobIdentity.run_id`; an earlier version called it `jobUid`."""
    model: ModelSpec
    ledger: dict[str, Any] = Field(default_factory=dict)
    wall_time: float = 0.0

    def to_json(self) -> str:
        """See `Message`; in pieces, between which other threads run: a ledger of 100,000 files takes 0.1 s."""
        rest = self.model_dump_json(by_alias=True, exclude_none=True, exclude={"ledger"})
        return f'{rest[:-1]},"ledger":{_in_pieces(self.ledger)}}}'

    @property
    def applied(self) -> Applied:
        """The last push of each worker that all shards contain."""
        vectors = [shard.vector for shard in self.shards]
        keys = {key for vector in vectors for key in vector}
        return {key: min(vector.get(key, 0) for vector in vectors) for key in sorted(keys)}


def sealed(body: str) -> bytes:
    """A manifest as it is stored: its last key is the SHA-256 of what is before it, in every version from 1 on."""
    content = body[:-1].encode()
    return content + _SEAL % hashlib.sha256(content).hexdigest().encode()


def is_whole(content: bytes) -> bool:
    """Whether this is as somebody wrote it. Versions before 1 wrote no format and no seal."""
    if (found := _SEALED.search(content)) is not None:
        return hashlib.sha256(content[: found.start()]).hexdigest().encode() == found[1]
    try:
        keys = json.loads(content)
    except ValueError:
        return False
    return isinstance(keys, dict) and keys.keys() >= {"number", "epoch", "shards"} and "format" not in keys


def _in_pieces(value: Any) -> str:
    """A value as JSON, made of long lists piece by piece."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_json(key)}:{_in_pieces(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        if len(value) <= PIECE:
            return "[" + ",".join(map(_in_pieces, value)) + "]"
        parts = (value[low : low + PIECE] for low in range(0, len(value), PIECE))
        return "[" + ",".join(_json(part)[1:-1] for part in parts) + "]"
    return _json(value)


def _json(value: Any) -> str:
    return to_json(value, inf_nan_mode="null").decode()


def applied_to_list(applied: Mapping[tuple[int, int], int]) -> list[tuple[int, int, int]]:
    """A list for JSON: [slot, incarnation, seq], sorted."""
    return sorted((slot, incarnation, seq) for (slot, incarnation), seq in applied.items())


def applied_from_list(entries: list[tuple[int, int, int]]) -> Applied:
    """The inverse of `applied_to_list`."""
    return {(slot, incarnation): seq for slot, incarnation, seq in entries}
