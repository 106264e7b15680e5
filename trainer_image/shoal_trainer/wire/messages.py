"""What workers and parameter servers say to each other; `encoding` writes it in bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from numpy.typing import NDArray
from pydantic import Field

from shoal_trainer.contract import BATCH_SIZE, Message

Applied: TypeAlias = dict[tuple[int, int], int]
"""(slot, incarnation) -> the sequence number of its last push in the parameters of a shard."""

MAX_MARKS = 256
"""Per push. Marks must never be truncated: the missing positions would be trained but stay leased forever."""
MAX_METRICS = 100
MAX_NAME = 255
LOSS = "loss"
"""The name of the loss among the metrics of an epoch."""
"""The longest name of a metric, in bytes."""
MAX_APPLIED = 4096
MAX_JOURNAL = 65536


class WorkerIdentity(NamedTuple):
    """One incarnation of one slot of one run."""

    job_uid: str
    slot: int
    incarnation: int


class Schedule(Message):
    """A Keras learning-rate schedule, by class name and `get_config()`; the parameter server evaluates it."""

    name: str
    config: dict[str, float | int | bool | str | list[float] | list[int] | None] = Field(default_factory=dict)


class OptimizerConfig(Message):
    """An optimizer with Keras' hyperparameters. `delta`: the worker runs the optimizer and pushes differences.

    `batch_size`: the reference; a push of this many samples has weight 1, and a schedule's step is this many samples.
    With `gradient_accumulation_steps` = n, n times as many samples have weight 1; a schedule still counts batches, as
    in Keras. `no_decay`: half-open ranges of the flat vector without weight decay. `normalized`: of differences,
    whether the optimizer that made them divides by the size of gradients.
    """

    name: Literal["sgd", "adam", "adamw", "nadam", "lion", "rmsprop", "adagrad", "delta"] = "sgd"
    learning_rate: float | Schedule = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    beta_1: float = 0.9
    beta_2: float = 0.999
    rho: float = 0.9
    epsilon: float = 1e-7
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.1
    batch_size: int = Field(default=BATCH_SIZE, ge=1)
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    no_decay: tuple[tuple[int, int], ...] = ()
    normalized: bool = False

    def weight(self, samples: int) -> float:
        """The weight of a push of this many samples."""
        return samples / (self.batch_size * self.gradient_accumulation_steps)

    def step_after(self, samples: int) -> int:
        """The schedule's step for the next update: that of its last batch, as in Keras."""
        return samples // self.batch_size + self.gradient_accumulation_steps - 1


class Average(NamedTuple):
    """The values [low, high) of the flat vector, which each step moves to momentum x + (1 - momentum) observed."""

    low: int
    high: int
    momentum: Annotated[float, Field(ge=0, lt=1)]


class ModelSpec(Message):
    """The model on which a worker and a parameter server must agree.

    The flat vector is `parameters` trainable values followed by `statistics` others, such as BatchNormalization's
    moving averages. A pushed vector has gradients in the first part. In the second it has what the batches show for
    the `averages`, and differences (new - pulled) for the rest (`ps/statistics`). `fingerprint`: the SHA-256 (hex) of
    all (path, shape, dtype).
    """

    fingerprint: str = Field(min_length=8, max_length=128)
    parameters: int = Field(ge=1, le=1 << 40)
    statistics: int = Field(default=0, ge=0, le=1 << 40)
    averages: tuple[Average, ...] = ()
    optimizer: OptimizerConfig = OptimizerConfig()

    @property
    def size(self) -> int:
        """The length of the flat vector."""
        return self.parameters + self.statistics


class Held(Message):
    """The parameters of a shard that a worker has: its first ones, or a copy, which has a `version`."""

    version: int | None = None
    generation: int = 0
    floor: int | None = 0
    """That of the copy's journal; None if it has none that would tell what is in the copy."""


class Hello(Message):
    """A worker's first message after the handshake. `held`: what it offers, if anything."""

    model: ModelSpec
    held: Held | None = None


class ShardWelcome(Message):
    """The state of a shard. If (epoch, boot) has changed, the shard was lost in the meantime."""

    index: int
    epoch: int
    boot: int
    version: int = 0
    samples: int = 0
    ready: bool = False
    """Whether it has parameters, and waits for no better ones."""
    wants_copy: bool = False
    """Whether it asks for what the worker's HELLO offers."""
    last_seq: int = 0
    """The sequence number of this worker's last applied push; 0 for none."""
    live_workers: int = 1
    generation: int = 0
    """The number of rollbacks of the job. Copies and leases of another generation are void."""
    stopped: int = 0
    """As `AnswerMeta.stopped`."""


class Progress(NamedTuple):
    """Positions [start, stop) that a push covers, in `epoch` and file number `file` (-1: the data have no files)."""

    epoch: int
    file: int
    start: int
    stop: int


class Entry(NamedTuple):
    """A part of an applied push: the version that it made, its worker, its steps, and the positions that it covers."""

    version: int
    slot: int
    incarnation: int
    seq: int
    steps: int
    epoch: int
    file: int
    start: int
    stop: int


class Journal(NamedTuple):
    """The pushes after version `floor`, in order; earlier ones are in a published snapshot."""

    floor: int = 0
    entries: tuple[Entry, ...] = ()


class BegunPush(NamedTuple):
    """A push of which a shard's parameters contain the first `pieces` pieces only, and the positions it covers.

    `closed`: the version at which it was found that nobody will continue it; -1: its worker may.
    """

    slot: int
    incarnation: int
    seq: int
    pieces: int
    closed: int
    progress: tuple[Progress, ...]


class MetricSum(NamedTuple):
    """A metric of the training data over the samples of a push: its mean is `total` / `weight`."""

    name: str
    total: float
    weight: float


class Timings(NamedTuple):
    """The duration of a worker's last step and of its parts, in seconds."""

    step: float = 0.0
    compute: float = 0.0
    pull: float = 0.0
    push: float = 0.0
    input: float = 0.0
    wait: float = 0.0
    """In which slower workers held a push up, in no other part. The server that is told the others knows it."""


class PushMeta(NamedTuple):
    """What a push says of its gradient, which is the mean of `steps` batches of together so many `samples`."""

    samples: int
    steps: int = 1
    loss: float = math.nan
    learning_rate: float | None = None
    """Instead of the optimizer's, for schedules that only the worker can evaluate."""
    scale: float = 1.0
    """Only for differences: parameters += scale * difference."""
    timings: Timings = Timings()
    progress: tuple[Progress, ...] = ()
    metrics: tuple[MetricSum, ...] = ()
    """Of a push of several epochs those of each, in the order of its marks; they begin with its loss."""
    length: float = math.nan
    """The Euclidean length of the gradient in all shards."""
    left_out: int = 0
    """Those of `samples` whose gradient was not finite (`on_nan="skip"`), and is not in it."""
    skipped: bool = False
    """There is no gradient, so that the optimizer takes no step, but samples and statistics count."""


@dataclass(frozen=True, slots=True)
class Push:
    """One update of a worker. It has the same sequence number on all shards, also when it is resent.

    `base_versions`: the version of the parameters on which it was computed, per shard. `ahead`: after how many more
    updates the worker's next gradient will arrive; the answer has the parameters expected there.
    """

    seq: int
    base_versions: tuple[int, ...]
    meta: PushMeta
    ahead: float = 0.0


class AnswerMeta(NamedTuple):
    """What a shard says with its parameters."""

    samples: int = 0
    live_workers: int = 1
    applied: Mapping[tuple[int, int], int] = MappingProxyType({})
    """The last push of each worker. Empty if the worker has all before the journal's entries: these tell it."""
    journal: Journal = Journal()
    stopped: int = 0
    """The coordinator process that has ended training, whose leases are void; 0: training continues."""
    begun: tuple[BegunPush, ...] = ()
    """The pushes that the parameters contain in part; without those in a published snapshot that nobody continues."""
    torn: bool = False
    """Whether the parameters are of several states of the shard, so that it could not recover from them."""
    factor: float = 1.0
    """By what the rate of a gradient of normal staleness and one batch is multiplied now; see `Damping.rate`."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """The answer to a pull or push, without the parameters. Tuples have one item per shard."""

    versions: tuple[int, ...]
    answers: tuple[AnswerMeta, ...]
    """Of a push, each journal has only what came after the base version."""
    push_seconds: float = 0.0
    """The time in which the requests were sent."""
    pull_seconds: float = 0.0
    """The rest, to the last byte received; includes the servers' work, unless more was sent meanwhile."""
    wait_seconds: float = 0.0
    """In neither of them: slower workers held the push up or, once it was applied, others its worker in a round."""
    made: int | None = None
    """The version that the push made in shard 0, if the parameters are newer."""
    filled: float = 0.0
    """How much of Adam's first moment in shard 0 is gradients (`update_rules.fill`); 0: its server does not say."""

    @property
    def samples(self) -> int:
        """The samples seen by shard 0."""
        return self.answers[0].samples

    @property
    def live_workers(self) -> int:
        """The workers connected to shard 0."""
        return self.answers[0].live_workers

    @property
    def stopped(self) -> int:
        """Shard 0's; see `AnswerMeta`."""
        return self.answers[0].stopped

    def staleness(self, base: int) -> int:
        """How many updates were applied between version `base` of shard 0 and the push that this answers."""
        return max(0, (self.versions[0] if self.made is None else self.made) - 1 - base)


@dataclass(frozen=True, slots=True)
class Copy:
    """The parameters that a worker has, for shards that have none as good; `flat` makes them when one asks.

    `pulled`: with which answer they came, unchanged since; None: the worker's first ones.
    """

    flat: Callable[[], NDArray[Any]]
    pulled: Pulled | None = None
    generation: int = 0

    def held(self, shard: int) -> Held:
        """What it offers to a shard."""
        if self.pulled is None:
            return Held()
        answer = self.pulled.answers[shard]
        floor = None if answer.torn else answer.journal.floor
        return Held(version=self.pulled.versions[shard], generation=self.generation, floor=floor)

    def meta(self, shard: int) -> AnswerMeta | None:
        """What a shard needs to know of it; None of first parameters."""
        return None if self.pulled is None else self.pulled.answers[shard]._replace(stopped=0, factor=1.0)


@dataclass(frozen=True, slots=True)
class Welcome:
    """The state of all shards."""

    shards: tuple[ShardWelcome, ...]

    @property
    def ready(self) -> bool:
        """Whether every shard is, and all have the same generation, so that their parameters belong together."""
        return all(shard.ready and shard.generation == self.generation for shard in self.shards)

    @property
    def generation(self) -> int:
        """The generation of shard 0."""
        return self.shards[0].generation

    @property
    def boots(self) -> tuple[tuple[int, int], ...]:
        """(epoch, boot) of each shard. If one has changed, that shard has lost its parameters."""
        return tuple((shard.epoch, shard.boot) for shard in self.shards)
