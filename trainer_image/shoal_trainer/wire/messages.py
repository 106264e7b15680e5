"""The values of the data plane, as both sides hold them, and their bytes.

What is rare and open to change (HELLO, WELCOME) is JSON; what goes with every step (push, answer) is a fixed binary
layout, a few tens of bytes beside the parameters themselves. Every decoder takes bytes from the network: it raises
`ProtocolError` for anything that it does not expect, and its memory is bounded by the bytes that it was given.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from numpy.typing import NDArray
from pydantic import Field, ValidationError

from shoal_trainer.contract import Message
from shoal_trainer.errors import ProtocolError

Applied: TypeAlias = dict[tuple[int, int], int]
"""(slot, incarnation) -> sequence number of its last push that is in the parameters of a shard."""

M = TypeVar("M", bound=Message)

MAX_MARKS = 256
"""Of one push. What a push covers must never be cut short: it would be trained, and leased for ever."""
MAX_APPLIED = 4096
MAX_JOURNAL = 65536


class WorkerIdentity(NamedTuple):
    """Who pushes: one incarnation of one slot of one run."""

    job_uid: str
    slot: int
    incarnation: int


class Schedule(Message):
    """One of Keras' learning-rate schedules: its class name and `get_config()`, evaluated by the parameter server."""

    name: str
    config: dict[str, float | int | bool | str | list[float] | list[int] | None] = Field(default_factory=dict)


class OptimizerConfig(Message):
    """An optimizer as Keras configures it. `delta`: the worker runs its own optimizer and pushes differences.

    `batch_size` is the reference: a push of so many samples has weight 1, and one step of a schedule is so many
    samples. With `gradient_accumulation_steps` weight 1 takes as many times that (a schedule counts batches, as Keras
    has it). `no_decay` are half-open ranges of the flat vector that weight decay leaves alone.
    `momentum_correction`: mu := max(0, mu - (1 - 1/W)) for W live workers (Mitliagkas et al., arXiv 1605.09774).
    """

    name: Literal["sgd", "adam", "adamw", "adagrad", "delta"] = "sgd"
    learning_rate: float | Schedule = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.1
    batch_size: int = Field(default=128, ge=1)
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    no_decay: tuple[tuple[int, int], ...] = ()
    momentum_correction: bool = True

    def weight(self, samples: int) -> float:
        """What a push of so many samples counts."""
        return samples / (self.batch_size * self.gradient_accumulation_steps)

    def step_after(self, samples: int) -> int:
        """The step of a learning-rate schedule for the next update: Keras takes it with the last of its batches."""
        return samples // self.batch_size + self.gradient_accumulation_steps - 1


class ModelSpec(Message):
    """What worker and parameter server must agree on before a number is exchanged.

    The flat vector is `parameters` trainable values followed by `statistics` others (BatchNorm's moving averages):
    a pushed vector holds gradients in the first part and differences (new - pulled) in the second.
    `fingerprint` is the SHA-256 (hex) of all (path, shape, dtype).
    """

    fingerprint: str = Field(min_length=8, max_length=128)
    parameters: int = Field(ge=1, le=1 << 40)
    statistics: int = Field(default=0, ge=0, le=1 << 40)
    optimizer: OptimizerConfig = OptimizerConfig()

    @property
    def size(self) -> int:
        """Length of the flat vector."""
        return self.parameters + self.statistics


class Hello(Message):
    """The first message of a worker on a proven connection. The last two are of the copy that it could offer."""

    model: ModelSpec
    copy_version: int | None = None
    generation: int = 0


class ShardWelcome(Message):
    """The state of a shard as a worker finds it. A change of (epoch, boot) means that the shard was lost meanwhile."""

    index: int
    epoch: int
    boot: int
    version: int = 0
    samples: int = 0
    initialized: bool = False
    recovering: bool = False
    wants_copy: bool = False
    last_seq: int = 0
    """The last push of this very worker that the shard applied; 0 for none."""
    live_workers: int = 1
    generation: int = 0
    """How often the job has gone back to a snapshot on purpose: what is of another generation is worth nothing."""
    stopped: int = 0
    """As `AnswerMeta.stopped`."""


class Progress(NamedTuple):
    """What a push covers: positions [start, stop) of pass `epoch`, of file number `file` (-1: there are no files)."""

    epoch: int
    file: int
    start: int
    stop: int


class Entry(NamedTuple):
    """A part of a push that is in a shard: the version that it made, whose it is, its steps, and what it covers."""

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
    """The pushes after version `floor`, in order; what came before is in a published snapshot."""

    floor: int = 0
    entries: tuple[Entry, ...] = ()


class Timings(NamedTuple):
    """Seconds that the worker's last step took, in parts."""

    step: float = 0.0
    compute: float = 0.0
    pull: float = 0.0
    push: float = 0.0
    input: float = 0.0


@dataclass(frozen=True, slots=True)
class Push:
    """One update of a worker: the same sequence number goes to all shards, and again when it is sent again.

    `samples` is the true count behind the mean gradient. `base_versions` are the versions (one for each shard) of the
    parameters that it was computed on. `learning_rate` overrides the optimizer's, for schedules that only the worker
    can evaluate. `steps` are the batches behind it.
    """

    seq: int
    samples: int
    base_versions: tuple[int, ...]
    progress: tuple[Progress, ...] = ()
    loss: float = math.nan
    timings: Timings = Timings()
    learning_rate: float | None = None
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Pulled:
    """What came with the parameters: for each shard its version and which pushes are in it."""

    versions: tuple[int, ...]
    applied: tuple[Mapping[tuple[int, int], int], ...]
    samples: int
    """Samples that shard 0 has seen."""
    live_workers: int
    shard_samples: tuple[int, ...] = ()
    push_seconds: float = 0.0
    """From the first byte sent to the last one."""
    pull_seconds: float = 0.0
    """From then until the last byte of the answers, the servers' work among it."""
    journals: tuple[Journal, ...] = ()
    """For each shard, its pushes since its last snapshot; with the answer to a push, those after its base version."""
    stopped: int = 0
    """Shard 0's; see `AnswerMeta`."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A worker's copy of the parameters exactly as it was pulled, to be offered to a shard that lost its own."""

    flat: NDArray[Any]
    pulled: Pulled
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """All shards as a worker finds them."""

    shards: tuple[ShardWelcome, ...]

    @property
    def initialized(self) -> bool:
        """Whether every shard holds parameters."""
        return all(shard.initialized for shard in self.shards)

    @property
    def alike(self) -> bool:
        """Whether every shard has gone back as often as the others: else the parameters are of two moments."""
        return all(shard.generation == self.generation for shard in self.shards)

    @property
    def generation(self) -> int:
        """Shard 0's."""
        return self.shards[0].generation

    @property
    def boots(self) -> tuple[tuple[int, int], ...]:
        """(epoch, boot) of each shard: another value than before means that parameters were lost."""
        return tuple((shard.epoch, shard.boot) for shard in self.shards)


# --- bytes ---------------------------------------------------------------------------------------------------------

_PUSH = struct.Struct("<II3f5fH")
_MARK = struct.Struct("<IiQQ")
_ANSWER = struct.Struct("<QIHQIQ")
_ENTRY = struct.Struct("<QIIQIIiQQ")
_APPLIED = struct.Struct("<IIQ")


class PushMeta(NamedTuple):
    """What a push tells one shard beside the numbers in the header."""

    samples: int
    steps: int = 1
    loss: float = math.nan
    learning_rate: float = math.nan
    scale: float = 1.0
    """Of a difference: parameters += scale * difference."""
    timings: Timings = Timings()
    progress: tuple[Progress, ...] = ()


class AnswerMeta(NamedTuple):
    """What an answer with parameters tells beside the numbers in the header."""

    samples: int = 0
    live_workers: int = 1
    applied: Mapping[tuple[int, int], int] = MappingProxyType({})
    journal: Journal = Journal()
    stopped: int = 0
    """The coordinator process that has ended training: every lease that it granted is void. 0: training goes on."""


def encode_push(meta: PushMeta) -> bytes:
    """The bytes of `meta`; `ProtocolError` where it covers more than a push can tell."""
    marks = meta.progress
    if len(marks) > MAX_MARKS:
        raise ProtocolError(
            f"a push covers {len(marks)} stretches of the data, {MAX_MARKS} at most can be told"
        )
    head = _PUSH.pack(
        meta.samples, meta.steps, meta.loss, meta.learning_rate, meta.scale, *meta.timings, len(marks)
    )
    return head + b"".join(_MARK.pack(*mark) for mark in marks)


def decode_push(data: bytes | bytearray | memoryview) -> PushMeta:
    """The push that `encode_push` wrote; `ProtocolError` for anything else."""
    if len(data) < _PUSH.size:
        raise ProtocolError(f"a push's description has {len(data)} bytes, at least {_PUSH.size} are needed")
    samples, steps, loss, rate, scale, *seconds, count = _PUSH.unpack_from(data)
    if count > MAX_MARKS or len(data) != _PUSH.size + count * _MARK.size:
        raise ProtocolError("a push's description does not have the length that it states")
    if not math.isfinite(scale) or not all(math.isfinite(second) for second in seconds):
        raise ProtocolError("a push's description holds a number that is not finite")
    progress = tuple(Progress(*mark) for mark in _MARK.iter_unpack(data[_PUSH.size :]))
    return PushMeta(samples, steps, loss, rate, scale, Timings(*seconds), progress)


def encode_answer(meta: AnswerMeta) -> bytes:
    """The bytes of `meta`."""
    entries = list(meta.applied.items())[-MAX_APPLIED:]
    journal = meta.journal
    counts = meta.samples, meta.live_workers, len(entries)
    head = _ANSWER.pack(*counts, journal.floor, len(journal.entries), meta.stopped)
    applied = b"".join(_APPLIED.pack(slot, incarnation, seq) for (slot, incarnation), seq in entries)
    return head + applied + b"".join(_ENTRY.pack(*entry) for entry in journal.entries)


def decode_answer(data: bytes | bytearray | memoryview) -> AnswerMeta:
    """The answer that `encode_answer` wrote; `ProtocolError` for anything else."""
    if len(data) < _ANSWER.size:
        raise ProtocolError(
            f"an answer's description has {len(data)} bytes, at least {_ANSWER.size} are needed"
        )
    samples, live, count, floor, entries, stopped = _ANSWER.unpack_from(data)
    middle = _ANSWER.size + count * _APPLIED.size
    if count > MAX_APPLIED or entries > MAX_JOURNAL or len(data) != middle + entries * _ENTRY.size:
        raise ProtocolError("an answer's description does not have the length that it states")
    applied = {(slot, inc): seq for slot, inc, seq in _APPLIED.iter_unpack(data[_ANSWER.size : middle])}
    journal = Journal(floor, tuple(Entry(*entry) for entry in _ENTRY.iter_unpack(data[middle:])))
    return AnswerMeta(samples, live, applied, journal, stopped)


def decode_json(kind: type[M], data: bytes | bytearray | memoryview) -> M:
    """A JSON message from the network; `ProtocolError` if it is none of that kind."""
    try:
        return kind.model_validate_json(bytes(data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"not a valid {kind.__name__}: {where}: {first['msg']}") from None


def applied_to_list(applied: Mapping[tuple[int, int], int]) -> list[tuple[int, int, int]]:
    """The vector as JSON can hold it: [slot, incarnation, seq] in order."""
    return sorted((slot, incarnation, seq) for (slot, incarnation), seq in applied.items())


def applied_from_list(entries: list[tuple[int, int, int]]) -> Applied:
    """The inverse of `applied_to_list`."""
    return {(slot, incarnation): seq for slot, incarnation, seq in entries}
