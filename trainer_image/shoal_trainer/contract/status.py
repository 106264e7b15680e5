"""What comes out while a job runs: the coordinator's status report."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import FailFast, Field
from pydantic.dataclasses import dataclass

from shoal_trainer.contract.figures import (
    MOST_FLOPS,
    Amount,
    Count,
    Figure,
    Metrics,
    Name,
    Number,
    ShortText,
    Text,
    UnixTime,
)
from shoal_trainer.contract.message import SMALL, Message
from shoal_trainer.contract.sums import MAX_SPEEDS, BesideSums, PassedSums, SpeedSums

MAX_WORKERS = 1024
"""In a report; at least the largest number of slots of a job."""
MAX_SHARDS = 64
MAX_EPOCHS = 16
"""The newest ones."""


class WorkerState(StrEnum):
    """The state of a worker as seen by the coordinator."""

    ACTIVE = "Active"
    SILENT = "Silent"
    DRAINED = "Drained"
    LEFT = "Left"
    FENCED = "Fenced"


@dataclass(frozen=True, slots=True, kw_only=True, config=SMALL)
class WorkerReport:
    """One (slot, incarnation). The list of reports is bounded, newest incarnation of each slot first."""

    slot: Count
    incarnation: Count
    state: WorkerState
    steps: Count = 0
    samples: Count = 0
    last_seen_seconds: Number = 0.0
    """Seconds since its last request, on the coordinator's monotonic clock."""
    last_push_seconds: Number = 0.0
    """Seconds since its last applied push, with which `steps` and `samples` grew, without those in `beside_seconds`: a
    speed is from push to push. A coordinator of an earlier version does not tell: as if it came with the report."""
    first_push_at: UnixTime = None
    """Unix seconds of its first accepted push."""
    step_seconds: Figure = None
    compute_seconds: Figure = None
    pull_seconds: Figure = None
    push_seconds: Figure = None
    input_seconds: Figure = None
    wait_seconds: Figure = None
    """Of a step, how long slower workers held its push up (`staleness.max`), in none of its other parts. A coordinator
    of an earlier version does not tell, and has it in `pull_seconds` or `push_seconds`; so has a worker of one, for
    which a newer coordinator tells it twice."""
    staleness: Figure = None
    batch_size: Count = 0
    device: Name = ""
    """Its accelerator by the name of the operator's catalogue ("T4"), "CPU" without one, "" before it has said so."""
    device_name: Name = ""
    """The same as TensorFlow names it ("Tesla T4")."""
    devices: Count = 1
    """Accelerators; 1 for "CPU"."""
    cores: Number = 0.0
    """CPU cores that it may use, 0.5 for half of one; 0: unknown."""
    node: Name = ""
    beside_seconds: Number = 0.0
    """In tasks, and without work: of its time, what `step_seconds` leave out. Cumulative."""
    message: ShortText = ""


class ShardReport(Message):
    """One shard: its epoch, the number of updates applied, and its last snapshot (Unix seconds).

    `busy_seconds`, `updates`, `batches`, `bytes_received` and `busy_answers` are cumulative over the life of the
    shard's process (`boot`): a reader takes differences as long as `boot` stays the same. `busy_seconds` / `updates` is
    the time that one update costs the shard, from which its capacity follows at any number of workers.
    """

    index: Count
    epoch: Count
    boot: int = 0
    """Identifies the process, other than the epoch, which a restarted container keeps."""
    version: Count = 0
    generation: Count = 0
    """The rollbacks of the job that are in its parameters."""
    ready: bool = True
    last_snapshot_at: UnixTime = None
    busy_seconds: Amount = 0.0
    """Time in which the shard worked on pushes: the optimizer's update and the conversion of the answer.

    A moment counts once, however many threads work in it.
    """
    updates: Count = 0
    """Pushes applied by this process."""
    batches: Count = 0
    """Those whose gradients came with these pushes; 0: a shard of an earlier version does not tell, one with each."""
    bytes_received: Count = 0
    """Of gradients and differences, without headers."""
    busy_answers: Count = 0
    """How often a request was told to wait for memory: the workers send more than the shard takes."""
    snapshot_idle_seconds: Amount = 0.0
    """For how long nothing of its part of a snapshot was written; 0: none is being written."""


class DataReport(Message):
    """Samples of the current epoch by state, and three counters of samples over the whole run.

    `repeated`: applied more than once. `partial`: applied on some shards only. `lost`: left out by `on_nan`.
    """

    done: Count = 0
    leased: Count = 0
    total: Count | None = None
    """Samples of one pass over all data; None until it is known (files are counted in the first epoch)."""
    repeated: Count = 0
    partial: Count = 0
    lost: Count = 0


class ModelReport(Message):
    """What is exchanged of the job's model, and what one sample of it costs."""

    fingerprint: str = Field(pattern=r"^[0-9a-f]{64}$")
    """The SHA-256 (hex) of the layout: path, shape and dtype of every exchanged tensor. The only one in the project:
    workers, shards, snapshots and SpeedProfiles use it."""
    parameters: int = Field(ge=0, le=10**15)
    """Trainable values."""
    tensors: int = Field(ge=0, le=10**9)
    """Trainable variables; 0: unknown."""
    flops_per_sample: float | None = Field(None, ge=0, le=MOST_FLOPS)
    """Floating point operations of one sample's forward pass (a multiply-add is two); None until a worker has counted
    them, 0 where they cannot be counted."""
    precision: Name = ""
    """The types that layers with variables compute with, by name, with `+` between them; "": not known."""


class Phase(StrEnum):
    """The phase of the trainer."""

    STARTING = "Starting"
    TRAINING = "Training"
    FINISHING = "Finishing"  # evaluation, callbacks, export
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class EpochReport(Message):
    """A finished epoch, from 0. `complete`: its evaluation and callbacks are done, or another epoch's replace them."""

    epoch: Count
    metrics: Metrics = Field(default_factory=dict)
    """The loss and metrics of training and of the evaluation, as in the logs of Keras."""
    complete: bool = False


class StatusReport(Message):
    """The coordinator's report. After a rollback, or a restart of PS 0 from a snapshot, counters may fall.

    Every list is bounded and is given up at its first error: the operator keeps one report of each job, and an image is
    its user's own.
    """

    job_uid: Text
    phase: Phase
    epoch: Count = 0
    """The current epoch of training, from 0. (The epoch of a shard is in `shards`.)"""
    epochs_total: Count | None = None
    step: Count = 0
    samples: Count = 0
    loss: Figure = None
    metrics: Metrics = Field(default_factory=dict)
    """Those of training in the newest epoch, also if it is not over, and those of the newest evaluation (`val_…`)."""
    epochs: Annotated[tuple[EpochReport, ...], FailFast(), Field(max_length=MAX_EPOCHS)] = ()
    """The newest finished epochs, in order."""
    samples_per_second: Figure = None
    progress_percent: Figure = None
    remaining_seconds: Figure = None
    samples_left: Figure = None
    """Samples still to be trained until `stopAfter`; None if it is a metric, or the data's size is unknown."""
    wasted_steps: Count = 0
    rollbacks: Count = 0
    """How often the job returned to its newest snapshot because of a non-finite loss."""
    restarted_from_nothing: Count = 0
    """How often all data were trained again from the beginning, because parameter server 0 was lost, and with it every
    snapshot (`storage: ephemeral`). Samples that a worker's copy of the parameters saved are in `data.repeated`."""
    leases_taken_back: Count = 0
    """How often a worker was fenced because it trained nothing of what it had leased: see `coordinator/stuck`."""
    goodput: Figure = None
    """Share of the computed steps that count, 0 to 1."""
    input_wait: Figure = None
    """Share of the active workers' time spent waiting for the next batch, 0 to 1."""
    data: DataReport = DataReport()
    workers: Annotated[tuple[WorkerReport, ...], FailFast(), Field(max_length=MAX_WORKERS)] = ()
    shards: Annotated[tuple[ShardReport, ...], FailFast(), Field(max_length=MAX_SHARDS)] = ()
    model: ModelReport | None = None
    """None until a worker has connected."""
    speed: Annotated[tuple[SpeedSums, ...], FailFast(), Field(max_length=MAX_SPEEDS)] = ()
    """The measured steps by configuration, cumulative over the life of the coordinator's process (`speed_epoch`): a
    reader takes differences, so that a missed report loses nothing."""
    speed_epoch: Text = ""
    """Identifies the process whose sums `speed` and `beside` are: with another one they begin at 0."""
    beside: PassedSums = BesideSums()
    """What passed beside training steps, cumulative like `speed`."""
    snapshots_fail_seconds: Amount = 0.0
    """For how long every attempt at a snapshot has failed, or one has been going on; 0: the last one succeeded."""
    snapshots_fail_because: Text = ""
    """Why the last one failed."""
    snapshots_stay_because: Text = ""
    """Why old ones cannot be removed; empty if they can."""
    message: Text = ""

    @property
    def messages(self) -> tuple[str, ...]:
        """The message of the job, those of its workers, which say what they wait for, and what fills the storage."""
        at_work = {WorkerState.ACTIVE, WorkerState.SILENT}
        waiting = (w for w in self.workers if w.message and w.state in at_work)
        said = (f"worker {w.slot}-{w.incarnation}: {w.message}" for w in waiting)
        stay = self.snapshots_stay_because
        full = f"old snapshots are not removed: {stay}" if stay else ""
        return tuple(filter(None, (self.message, *said, full)))
