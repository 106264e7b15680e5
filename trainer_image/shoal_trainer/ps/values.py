"""The values that come out of a shard, and small rules about them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shoal_trainer.ps.contents import Span
from shoal_trainer.ps.kernels import Vector
from shoal_trainer.wire.messages import AnswerMeta, Applied, ModelSpec, PushMeta

KEPT_INCARNATIONS = 4
"""Of each slot: how many incarnations the vector of applied pushes remembers."""


class State(StrEnum):
    """Whether a shard can be read and written."""

    EMPTY = "Empty"
    RECOVERING = "Recovering"
    READY = "Ready"


class AppliedPush(NamedTuple):
    """One update, as it was just applied. `version` is the one that it made, `staleness` in versions."""

    slot: int
    incarnation: int
    seq: int
    version: int
    staleness: int
    weight: float
    meta: PushMeta
    delta: bool


class Answer(NamedTuple):
    """What goes back with parameters."""

    version: int
    meta: AnswerMeta


@dataclass(frozen=True)
class ShardCopy:
    """A shard at one moment: what a snapshot holds. `arrays`: `parameters` (all) and the optimizer's (trainable)."""

    index: int
    shards: int
    epoch: int
    version: int
    samples: int
    updates: int
    low: int
    high: int
    model: ModelSpec
    applied: Applied
    arrays: dict[str, Vector]
    contents: tuple[Span, ...] = ()
    """Which pushes are in it."""
    generation: int = 0


def same_shapes(held: ModelSpec, given: ModelSpec) -> bool:
    """Whether two models differ in their optimizer at most."""
    return held.model_copy(update={"optimizer": given.optimizer}) == given


def difference(held: ModelSpec, given: ModelSpec) -> str:
    """What is not the same in the model that a worker brings, and what to do."""
    if held.parameters != given.parameters or held.statistics != given.statistics:
        what = (
            f"the job's model has {held.parameters} trainable and {held.statistics} other values, "
            f"this worker's {given.parameters} and {given.statistics}"
        )
    elif held.fingerprint != given.fingerprint:
        what = "the names, shapes or types of this worker's variables differ from the job's model"
    else:
        what = "this worker's optimizer is configured otherwise than the job's"
    return f"{what}: build the same model in every worker, or start a new run"


def remember(applied: Applied, slot: int, incarnation: int, seq: int) -> None:
    """Note a push in the vector, and forget a slot's incarnations of long ago."""
    if (slot, incarnation) not in applied:
        older = sorted(key for key in applied if key[0] == slot)
        for key in older[: max(0, len(older) + 1 - KEPT_INCARNATIONS)]:
            del applied[key]
    applied[slot, incarnation] = seq
