"""The values that a shard returns, and pure functions on them."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from pydantic import ConfigDict

from shoal_trainer.contract import Message
from shoal_trainer.ps.contents import Span
from shoal_trainer.ps.kernels import Vector
from shoal_trainer.wire.messages import AnswerMeta, Applied, BegunPush, ModelSpec, PushMeta


class State(StrEnum):
    """Whether a shard can be read and written."""

    RECOVERING = "Recovering"
    READY = "Ready"


class AppliedPush(NamedTuple):
    """An update that was applied: the version that it made, its staleness in versions, and its weight.

    `delta`: a difference that was added, not a gradient for the optimizer.
    """

    slot: int
    incarnation: int
    seq: int
    version: int
    staleness: int
    weight: float
    meta: PushMeta
    delta: bool


class Answer(NamedTuple):
    """The answer to a pull or push, without the parameters. `filled`: of Adam's first moment (`update_rules`)."""

    version: int
    meta: AnswerMeta
    filled: float = 0.0


class ShardState(Message):
    """What a snapshot knows of a shard at one moment, but its values."""

    index: int
    shards: int
    epoch: int
    version: int
    samples: int = 0
    updates: int = 0
    pace: float | None = None
    """The pace of `Damping` at which the optimizer's velocity was made; None: unknown."""
    filled: float | None = None
    """How much of Adam's first moment is gradients; None: unknown. See `update_rules.fill`."""
    agreement: float = 0.0
    """How far gradients agreed, by samples of them; see `Agreement`."""
    usual: float | None = None
    """The usual length of gradients; None: unknown."""
    low: int
    high: int
    pushes: tuple[Span, ...] = ()
    """All pushes in the parameters."""
    begun: tuple[BegunPush, ...] = ()
    """The pushes of which a part is in the parameters."""


class ShardCopy(ShardState):
    """A shard at one moment, as a snapshot stores it.

    `arrays`: `parameters` (high - low values) and the optimizer's state (trainable values only), fp32.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: ModelSpec
    applied: Applied
    arrays: dict[str, Vector]
    generation: int = 0


def same_shapes(job: ModelSpec, worker: ModelSpec) -> bool:
    """Whether two models are equal except for how they are trained."""
    return job.model_copy(update={"optimizer": worker.optimizer, "averages": worker.averages}) == worker


def mismatch(job: ModelSpec, worker: ModelSpec, *, other_run: bool = False) -> str:
    """How a worker's model differs from the job's, and what to do. `other_run`: the job's is that of `initialFrom`."""
    of = "the run that this one starts from" if other_run else "the job's model"
    if job.parameters != worker.parameters or job.statistics != worker.statistics:
        difference = (
            f"{of} has {job.parameters} trainable and {job.statistics} other values, "
            f"this worker's {worker.parameters} and {worker.statistics}"
        )
    elif job.fingerprint != worker.fingerprint:
        difference = f"the names, shapes or types of this worker's variables differ from {of}"
    elif job.averages != worker.averages:
        difference = "this worker's BatchNormalization has another momentum"
    else:
        difference = "this worker's optimizer is configured differently from the job's"
    if other_run:
        return (
            f"{difference}: build the same model, frozen layers included, or leave initialFrom out and load that run's "
            "model/model.keras where you build yours"
        )
    return f"{difference}: build the same model in every worker, or start a new run"
