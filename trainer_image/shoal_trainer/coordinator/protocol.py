"""The messages of the control plane: JSON over TLS.

`POST /v1/<name>` with a message returns a message; the output of tasks is streamed to `PUT /v1/files/…`, and the export
gets the output of earlier tasks from `GET /v1/files/…`; `GET /v1/code` is the job's code. A worker's requests carry its
slot and incarnation; 409 (`Fenced`) if the slot has a newer incarnation.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Literal, NamedTuple

from pydantic import Field, NonNegativeInt

from shoal_trainer.contract import Message
from shoal_trainer.coordinator.lease_index import Grant
from shoal_trainer.ps.contents import Span, Worker
from shoal_trainer.wire.messages import MAX_JOURNAL, Entry

FILES = "/v1/files/"
"""Then `<slot>/<incarnation>/<term>/<counter>/<name>`: a file of a task, under the token of the task."""
LATE = 0
"""The term of a file of callbacks that are done (`UnsentFiles`): no process has it, and each copy has its counter."""
CODE = "/v1/code"
"""The archive with the job's code."""
PURPOSE = "control"
"""The purpose of the bearer token of these requests (`Credentials.token`)."""
MAX_BODY = 4 << 20
MAX_LIST = 28 << 20
"""Bytes of the list of files, which only a `Join` contains."""
SHORT_LIST = 64 << 10
"""Bytes of a list that every `Join` contains; a longer one is sent by one worker, when the coordinator asks for it."""
MAX_JOIN = MAX_LIST + MAX_BODY
MAX_FILE = 64 << 30
MAX_TEXT = 4096
MAX_FILES = 65536
MAX_LEFT_OUT = 100
MOST_SECONDS = 1e9
MAX_SPANS = 1 << 20
MAX_ENTRIES = 4 * MAX_JOURNAL
"""A full journal, as much that is kept while a snapshot is written, and the pushes under way."""
PROBE_ERROR = 1e-3
"""Of the largest probe of arrays: another row differs by more, and another machine's rounding by less."""
SCALE_ERROR = 1e-2
"""Of a probe's scale, where a script computes the samples when they are read."""


class DataSpec(Message):
    """The training data: `size` samples with random access, or files of unknown length.

    A `Join` may leave out the list of files, and have its length and digest instead.
    """

    size: int | None = Field(default=None, ge=1)
    files: tuple[str, ...] = ()
    left_out: int = Field(default=0, ge=0)
    left_out_digest: str = Field(default="", max_length=64)
    seed: int = 0
    """Of the order in which they are visited."""
    order: str = Field(default="", max_length=1024)
    """What decides which sample is at a position; "": unknown, or no certain one is."""
    probes: tuple[float, ...] = Field(default=(), max_length=64)
    """Of some samples, a number that rounding may change a little; none: unknown."""
    scales: tuple[float, ...] = Field(default=(), max_length=64)
    """Of the probes; see `Probes`."""
    block: int = Field(default=0, ge=0)
    """So many neighbouring samples are read together; 0: each is read by itself."""
    validation: bool = False
    callbacks: bool = False

    @property
    def amount(self) -> str:
        """The amount in words: "100 samples", "3 files"."""
        files = len(self.files) + self.left_out
        return f"{files:,} files" if self.size is None else f"{self.size:,} samples"

    @cached_property
    def digest(self) -> str:
        """The SHA-256 (hex) of the list of files, also of one that is left out."""
        if self.left_out:
            return self.left_out_digest
        digest = hashlib.sha256()
        for file in self.files:
            name = file.encode()
            digest.update(len(name).to_bytes(8, "big") + name)
        return digest.hexdigest()

    def brief(self) -> DataSpec:
        """The data without a long list of files."""
        if sum(map(len, self.files)) <= SHORT_LIST:
            return self
        left_out = {"left_out": len(self.files), "left_out_digest": self.digest}
        return self.model_copy(update={"files": (), **left_out})

    def file_differences(self, other: DataSpec) -> str:
        """How a worker's list of files differs from this one, the job's."""
        job, worker = set(self.files), set(other.files)
        return (
            f"a worker lists {len(worker):,} files of training data: {len(worker - job):,} of them are new, and "
            f"{len(job - worker):,} of the job's {len(job):,} are missing; the job keeps its own list"
        )

    def differing(self, other: DataSpec) -> float:
        """The share of the compared samples that the probes tell from those of another worker."""
        if not self.probes or not other.probes:
            return 0.0
        if len(self.probes) != len(other.probes):
            return 1.0
        near = [SCALE_ERROR * scale for scale in self.scales]
        if len(near) != len(self.probes):
            near = [PROBE_ERROR * max(map(abs, self.probes))] * len(self.probes)
        apart = [abs(a - b) > c for a, b, c in zip(self.probes, other.probes, near, strict=True)]
        return sum(apart) / len(apart)

    def lease_message(self, lease: Grant) -> Lease:
        """A lease of these data as a message to a worker."""
        segment = lease.segment
        return Lease(
            term=lease.token[0],
            counter=lease.token[1],
            epoch=segment.epoch,
            start=segment.start,
            stop=segment.stop,
            file=self.files[segment.file] if segment.file >= 0 else None,
            number=segment.file,
        )


class Lease(Message):
    """A leased range: positions [start, stop) of the data, or of `file` (`stop` None: to its end), in `epoch`.

    `number`: the index of the file in the job's list. (`term`, `counter`) is the fencing token; the term identifies the
    process of parameter server 0.
    """

    term: int
    counter: int
    epoch: int
    start: int
    stop: int | None = None
    file: str | None = None
    number: int = -1

    @property
    def token(self) -> tuple[int, int]:
        """The fencing token."""
        return self.term, self.counter


class Caller(Message):
    """The worker that sends the request."""

    slot: int = Field(ge=0)
    incarnation: int = Field(ge=0)

    @property
    def worker(self) -> Worker:
        """(slot, incarnation)."""
        return self.slot, self.incarnation


class WithWaste(Caller):
    """A request that also counts the worker's wasted steps."""

    wasted_steps: int = Field(default=0, ge=0)
    """All its steps so far that were discarded or lost."""
    wasted_acknowledged: int = Field(default=0, ge=0)
    """Those of them in an earlier request that was answered."""


class Join(WithWaste):
    """A worker joins; again after the loss of parameter server 0, with the unfinished rest of its leases."""

    data: DataSpec
    batch_size: int = Field(ge=1, le=10**9)
    node: str = Field(default="", max_length=256)
    device: str = Field(default="CPU", max_length=63)
    """Its accelerator as in the operator's catalogue, and as TensorFlow names it."""
    device_name: str = Field(default="", max_length=256)
    devices: int = Field(default=1, ge=1, le=64)
    """Accelerators; 1 without one."""
    cores: float = Field(default=0.0, ge=0, le=4096)
    """CPU cores; 0: unknown."""
    tensors: int = Field(default=0, ge=0, le=10**9)
    """Trainable variables of the model."""
    precision: str = Field(default="", max_length=256)
    """The types that it computes with; see `layout.precision_of`."""
    known_samples: int = Field(default=0, ge=0)
    """Samples in the parameters when this worker last reached shard 0, which was lost since; 0: it was not."""
    leases: tuple[Lease, ...] = Field(default=(), max_length=4096)
    generation: int = Field(default=0, ge=0)
    """Of the leases."""
    number: int = Field(default=0, ge=0)
    """Grows with each request of this worker to join, and each `UnsentFiles`. One that a later one overtook is refused:
    its leases may be done, and its files sent. 0: not counted."""
    unsent: tuple[str, ...] = Field(default=(), max_length=MAX_FILES)
    called: int | None = None
    written: dict[str, int] = Field(default_factory=dict, max_length=MAX_FILES)
    """See `UnsentFiles`, whose `names` are `unsent`."""


class Equipment(NamedTuple):
    """What a worker computes with, the number of variables of its model, and its precision: fields of `Join`."""

    device: str = "CPU"
    device_name: str = ""
    devices: int = 1
    cores: float = 0.0
    tensors: int = 0
    precision: str = ""


UNKNOWN = Equipment()


class Renamed(Message):
    """A lease that continues under another token."""

    old: tuple[int, int]
    new: tuple[int, int]


class Joined(Message):
    """The presented leases that continue, with their new tokens; the others are done or reassigned.

    `wants_files`: it has not joined, because the coordinator does not know its list of files; join again with the list.
    """

    renamed: tuple[Renamed, ...] = ()
    wants_files: bool = False


class Next(Caller):
    """Requests work. Data are leased only to workers with parameters of the current generation.

    A retry after a lost answer has the same `number` and gets the same assignment.
    """

    number: int = Field(ge=1)
    generation: int = Field(default=0, ge=0)
    stopped: int | None = None
    """The term that this worker knows to have ended training. It holds no lease of that term."""
    told: tuple[int, NonNegativeInt] = (0, 0)
    """(term, epochs): this worker has the logs of so many, as that process told them for this generation."""


class Assignment(Message):
    """A worker's next work: a lease of data, a task, nothing for `seconds`, or the end of the job."""

    kind: Literal["data", "task", "idle", "finished"]
    lease: Lease | None = None
    task: Literal["evaluate", "callbacks", "export"] | None = None
    token: tuple[int, int] = (0, 0)
    epoch: int = 0
    history: tuple[dict[str, float], ...] = ()
    """The logs of each epoch so far, from epoch `since` on: the worker has the others."""
    since: int = Field(default=0, ge=0)
    learning_rate: float | None = None
    """For callbacks: the job's learning rate, if a callback has set it."""
    seconds: float = 0.0
    message: str = ""


class Heartbeat(Caller):
    """A worker is alive. `message` appears in the status."""

    message: str = Field(default="", max_length=MAX_TEXT)
    flops_per_sample: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The answer to `count_flops`: of one sample's forward pass; 0: they cannot be counted."""
    task_seconds: float = Field(default=0.0, ge=0, le=MOST_SECONDS, allow_inf_nan=False)
    """In all tasks of this worker so far."""
    wait_seconds: float = Field(default=0.0, ge=0, le=MOST_SECONDS, allow_inf_nan=False)
    """In which this worker had no work, so far."""
    reading_seconds: float = Field(default=0.0, ge=0, le=MOST_SECONDS, allow_inf_nan=False)
    """For how long the read of the next batch of its lease has taken by now, with its repetitions; 0: there is none."""
    outage_seconds: float = Field(default=0.0, ge=0, le=MOST_SECONDS, allow_inf_nan=False)
    """For how long this worker has not reached all parameter servers; 0: it reaches them."""


class Alive(Message):
    """The answer to a heartbeat: whether the job has finished, and the learning rate that a callback has set."""

    finished: bool = False
    learning_rate: float | None = None
    count_flops: bool = False
    """Asks this worker to count the model's FLOPs."""


class FileEnded(Caller):
    """A leased file has `length` samples."""

    token: tuple[int, int]
    length: int = Field(ge=0)


class TaskDone(Caller):
    """A task is done and its files are uploaded. A non-finite metric is None.

    `message`: for the termination message, about files that an export lacks.
    """

    token: tuple[int, int]
    metrics: dict[str, float | None] = Field(default_factory=dict, max_length=1024)
    files: tuple[str, ...] = Field(default=(), max_length=MAX_FILES)
    left_out: dict[str, str] = Field(default_factory=dict, max_length=MAX_LEFT_OUT)
    """The files of callbacks that the storage can never have, and why."""
    written: dict[str, int] = Field(default_factory=dict, max_length=MAX_FILES)
    """The epoch whose callbacks wrote each of them; none: unknown."""
    stop: bool = False
    message: str = Field(default="", max_length=MAX_TEXT)
    learning_rate: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Of all workers from now on, set by a callback."""


class UnsentFiles(Caller):
    """The files of callbacks that this worker sends when the storage takes them; none once it has them all.

    Said before the task is done, and again before each attempt to send them: an answer may have been lost.
    """

    names: tuple[str, ...] = Field(default=(), max_length=MAX_FILES)
    copies: tuple[int, ...] = Field(default=(), max_length=MAX_FILES)
    """The number of the copy of each, under which it is uploaded; none: unknown."""
    called: int | None = None
    """The newest epoch whose callbacks this worker has run; None: unknown."""
    written: dict[str, int] = Field(default_factory=dict, max_length=MAX_FILES)
    """The epoch whose callbacks wrote each of them, and each that this worker has given up; none: unknown."""
    left_out: dict[str, str] = Field(default_factory=dict, max_length=MAX_LEFT_OUT)
    """See `TaskDone`."""
    number: int = Field(default=0, ge=0)
    """See `Join`: both are counted together."""


class Leave(WithWaste):
    """A worker leaves the job."""

    files: UnsentFiles | None = None
    """Its last word about them, in the same request: a server that hangs takes 10 s for each. None: unknown."""


class Failed(Caller):
    """A worker ends because of an error in the user's code."""

    message: str = Field(max_length=MAX_TEXT)


class Diverged(Caller):
    """A batch has a non-finite loss or gradient at parameters of this generation: the job must roll back."""

    generation: int = Field(ge=0)
    epoch: int = Field(ge=0)
    file: int = Field(default=-1, ge=-1)
    start: int = Field(ge=0)
    stop: int = Field(ge=1)
    reason: str = Field(max_length=MAX_TEXT)


class SnapshotShard(Message):
    """Makes another parameter server write its part of snapshot `number`; answered by a `ShardFile`.

    `published`: the newest published snapshot of this `epoch`; 0 for none. `again`: only answer, if it is written.
    """

    number: int = Field(ge=1)
    epoch: int = Field(ge=0)
    published: int = Field(default=0, ge=0)
    generation: int = Field(default=0, ge=0)
    again: bool = False


class AskReport(Message):
    """Asks another parameter server for its `ShardReport`."""


class AskPushes(Message):
    """Asks another parameter server for its pushes, and for the journal entries of the `wanted` ones."""

    wanted: tuple[Span, ...] = Field(default=(), max_length=MAX_JOURNAL)


class Pushes(Message):
    """The pushes that a shard holds, also those in part, and the journal entries of the wanted ones."""

    spans: tuple[Span, ...] = Field(default=(), max_length=MAX_SPANS)
    begun: tuple[Span, ...] = Field(default=(), max_length=MAX_SPANS)
    entries: tuple[Entry, ...] = Field(default=(), max_length=MAX_ENTRIES)


class RollBackShard(Message):
    """Makes another parameter server roll back to the snapshot with which this generation begins."""

    generation: int = Field(ge=1)


class FenceWorkers(Message):
    """Makes another parameter server refuse workers: incarnations before those of `older`, and all that `left`.

    `epoch`: that of PS 0.
    """

    epoch: int = Field(default=0, ge=0)
    older: tuple[Worker, ...] = Field(default=(), max_length=MAX_SPANS)
    left: tuple[Worker, ...] = Field(default=(), max_length=MAX_SPANS)


class Done(Message):
    """An empty answer."""


REQUESTS: dict[str, type[Message]] = {
    "join": Join,
    "next": Next,
    "heartbeat": Heartbeat,
    "file-ended": FileEnded,
    "task-done": TaskDone,
    "unsent-files": UnsentFiles,
    "leave": Leave,
    "failed": Failed,
    "snapshot": SnapshotShard,
    "pushes": AskPushes,
    "report": AskReport,
    "diverged": Diverged,
    "roll-back": RollBackShard,
    "fence": FenceWorkers,
}
