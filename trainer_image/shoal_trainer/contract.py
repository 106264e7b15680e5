"""The contract between the operator and the trainer: the only module of the trainer that the operator imports.

It defines the runtime configuration that the operator passes to a pod, the status report that the coordinator serves,
the termination message that ends a job, and shared constants. It imports nothing heavy.

The two images are upgraded independently, so unknown keys are ignored: either side may add fields.
Times are in seconds, sizes in bytes and counts in samples unless a name says otherwise.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator
from pydantic.alias_generators import to_camel

VERSION = 1
CONFIG_ENV = "SHOAL_CONFIG"
"""The environment variable with a pod's `RuntimeConfig` as JSON."""

ACCELERATORS_ENV = "SHOAL_ACCELERATORS"
"""The environment variable with how many GPUs the limits of a worker's container have."""

SECRET_DIR = "/var/run/shoal/secret"
"""The mount path of the job's Secret: `key` (32 bytes), `key-id`, `tls.crt`, `tls.key`."""

STORAGE_DIR = "/var/run/shoal/storage"
"""The mount path of the job's volume claim or ephemeral volume; its URI is `file://` + this."""

CODE_DIR = "/var/run/shoal/code"
"""The mount path of the job's code from a ConfigMap, first on the path of workers."""
CODE_ARCHIVE = "code.zip"
"""The file in it that has packages and what is large; Python imports from it."""


def code_name(namespace: str, digest: str) -> str:
    """Where an archive that is larger than a ConfigMap lies in the job's storage. `digest`: its SHA-256 (hex)."""
    return f"{namespace}/code-{digest}.zip"


EPOCH_LINE = "epoch report: "
"""PS 0 logs each complete epoch in a line that ends in this and an `EpochReport` as JSON: the history of the job for
whoever may read logs. After a rollback an epoch may come again; the last line counts."""

DATA_PORT = 7070
CONTROL_PORT = 7071
METRICS_PORT = 7072

EXIT_OK = 0
EXIT_USER = 2
"""The user's code or configuration is wrong; a restart cannot help."""
EXIT_FENCED = 4
"""A newer incarnation has replaced this process."""
EXIT_DRAINED = 143
"""The process stopped on SIGTERM. Not 0, which Kubernetes would count as success."""


class Message(BaseModel):
    """Base of all messages: camelCase in JSON, frozen, unknown keys ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore", ser_json_inf_nan="null"
    )

    def to_json(self) -> str:
        """The message as compact JSON with camelCase keys."""
        return self.model_dump_json(by_alias=True, exclude_none=True)


class Role(StrEnum):
    """The role of a pod."""

    PS = "ps"
    WORKER = "worker"


class JobIdentity(Message):
    """A job and its run: a job that is deleted and applied again has another `uid`.

    `run`: the name of a run that continues under another uid; empty: the uid names it.
    """

    namespace: str
    name: str
    uid: str
    run: str = ""

    @property
    def run_id(self) -> str:
        """What identifies the run among those of the job."""
        return self.run or self.uid

    @property
    def prefix(self) -> str:
        """The folder of the run: all its files are under `<storage>/<prefix>/`."""
        return f"{self.namespace}/{self.name}/{self.run_id}"


FALLS = (
    "loss", "error", "(root_)?mean_squared_error", "r?mse", "mean_absolute_error", "mae", "mape", "msle",
    "mean_absolute_percentage_error", "mean_squared_logarithmic_error", "log_?cosh(_error)?", "huber(_loss)?",
    "poisson", "(squared_|categorical_)?hinge", "bce", "((binary|(sparse_)?categorical)_)?(focal_)?crossentropy",
    "kl_divergence", "kullback_leibler_divergence", "kld", "ctc", "circle", "perplexity", "false_(positives|negatives)",
)  # fmt: skip
"""Patterns of metrics that improve as they decrease: Keras' losses and errors, by all of their names."""
AT_MOST_ONE = (
    "((binary|(sparse_)?(top_(k|[0-9]+)_)?categorical|(sparse_)?top_(k|[0-9]+))_)?acc(uracy)?", "((roc|pr)_)?auc",
    "(precision|recall|sensitivity|specificity)(_at_(precision|recall|sensitivity|specificity))?",
    "f1(_?score)?", "f_?beta_score", "(one_hot_)?(mean_|binary_|m)?io_?u", "r2(_score)?", "cosine_similarity",
    "(concordance|pearson)_correlation",
)  # fmt: skip
"""Patterns of metrics that improve as they increase up to 1."""
RISES = (*AT_MOST_ONE, "true_(positives|negatives)")
"""Patterns of metrics that improve as they increase."""


def names_of(*patterns: str) -> str:
    """A pattern for RE2 and Python that matches these names, optionally with `val_` before or `_1` after them."""
    return f"(?i)^(val_)?({'|'.join(patterns)})(_[0-9]+)?$"


class StopAfter(Message):
    """When training ends: after N epochs or steps of the whole job, or when a metric reaches a value."""

    epochs: int | None = None
    steps: int | None = None
    metric: str | None = None
    value: float | None = Field(None, allow_inf_nan=False)
    mode: Literal["Min", "Max"] | None = None
    """Whether the metric must decrease or increase to the value; None: inferred from its name."""

    @property
    def direction(self) -> Literal["Min", "Max"] | None:
        """The mode, or the one inferred from the metric's name; None if it cannot be inferred."""
        if self.mode is not None or self.metric is None:
            return self.mode
        if re.match(names_of(*FALLS), self.metric):
            return "Min"
        return "Max" if re.match(names_of(*RISES), self.metric) else None

    @model_validator(mode="after")
    def _together(self) -> StopAfter:
        if (self.metric is None) != (self.value is None):
            raise ValueError("stopAfter.metric and stopAfter.value go together: set both or neither")
        return self


class Staleness(Message):
    """The learning rate over n**p, p = 0, 1/2, 1, of the normal staleness n (`ps/damping.py`). `max`: bounded.

    `rounds`: whether workers wait for each other (`ps/rounds.py`) where pushes take little time.
    """

    max: int | None = None
    policy: Literal["Constant", "InverseSquareRoot", "Inverse"] = "InverseSquareRoot"
    rounds: bool = True


class SnapshotPolicy(Message):
    """The interval between snapshots, and how many are kept."""

    every_seconds: int = 60
    retain: int = 3


class InitialFrom(Message):
    """Another run to resume from."""

    uri: str
    weights_only: bool = False


class Shard(Message):
    """The address of a parameter server: the ClusterIP Service of the shard."""

    host: str
    data_port: int = DATA_PORT
    control_port: int = CONTROL_PORT


class AcceleratorBatch(Message):
    """The batch size of workers whose accelerator's name contains all words of `accelerator`; "CPU": no accelerator."""

    accelerator: str
    batch_size: int


class RuntimeConfig(Message):
    """The configuration of a pod, in the environment variable `SHOAL_CONFIG`.

    `index` is the slot of a worker or the shard of a parameter server; `incarnation` counts its pods, and is the epoch
    of a shard. It begins at `first_incarnation`, which is above those of an earlier job that had the same run.
    """

    version: int = VERSION
    job: JobIdentity
    role: Role
    index: int
    incarnation: int
    first_incarnation: int = 0
    parameter_servers: tuple[Shard, ...]
    entrypoint: str
    args: dict[str, JsonValue] = Field(default_factory=dict)
    code_digest: str = ""
    """Of the archive with the job's code in the storage (`code_name`); empty: it is in a ConfigMap or the image."""
    batch_size: int = 128
    """Samples per step of a worker."""
    batch_sizes: tuple[AcceleratorBatch, ...] = ()
    """Batch sizes per accelerator: the first entry that matches replaces `batch_size`."""
    reference_batch_size: int | None = None
    """A push of this many samples has weight 1; None: `batch_size`."""
    stop_after: StopAfter = StopAfter(epochs=1)
    staleness: Staleness = Staleness()
    snapshot: SnapshotPolicy = SnapshotPolicy()
    storage_uri: str
    initial_from: InitialFrom | None = None
    secret_dir: str = SECRET_DIR
    bind_host: str = "0.0.0.0"  # the operator sets the pod's own address through the downward API
    data_tls: bool = False
    node_name: str = ""
    grace_seconds: float = 60.0
    """From SIGTERM until the pod is killed."""
    cores: float = 0.0
    """CPU cores of the node, if its pool says so: a limit of the node is not visible in a container. 0: unknown."""


# --- the coordinator's status report ------------------------------------------------------------------------------

# Bounds of what is read: an image is its user's own, and a reader computes with what it reports.
LARGEST = 2**53
"""Counts beyond it are none, and JSON's readers do not agree about them."""
CENTURY = 4102444800
"""2100-01-01 in Unix seconds; a time in milliseconds is beyond it."""
MOST_LOG = 7 * math.log(10)
"""Of the seconds of a step: 10^7 are a third of a year, and 10^-7 are none by any clock."""
MOST_FLOPS = 1e20


def _finite(value: float) -> bool:
    return abs(value) <= 1e18  # also false for NaN


def _figures(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {
        name: value
        for name, value in values.items()
        if value is not None and (not isinstance(value, float) or _finite(value))
    }


Count = Annotated[int, Field(ge=0, le=LARGEST)]
Difference = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=LARGEST)]
UnixTime = Annotated[float | None, Field(ge=0, lt=CENTURY)]
Figure = Annotated[
    float | None, AfterValidator(lambda value: value if value is not None and _finite(value) else None)
]
"""A measurement that may be missing: None if it is not finite."""
Metrics = Annotated[dict[str, float], BeforeValidator(_figures)]
"""Values by name, without those that are not finite."""

STATUS_PATH = "/v1/status"
"""GET over TLS on the control port of PS 0, with `Authorization: Bearer <status_token(key)>`."""


def status_token(key: bytes) -> str:
    """The bearer token of the status endpoint, derived from the job's key, which is never sent."""
    return hmac.new(key, b"shoal/v1/status", hashlib.sha256).hexdigest()


class WorkerState(StrEnum):
    """The state of a worker as seen by the coordinator."""

    ACTIVE = "Active"
    SILENT = "Silent"
    DRAINED = "Drained"
    LEFT = "Left"
    FENCED = "Fenced"


class WorkerReport(Message):
    """One (slot, incarnation). The list of reports is bounded, newest incarnation of each slot first."""

    slot: Count
    incarnation: Count
    state: WorkerState
    steps: Count = 0
    samples: Count = 0
    last_seen_seconds: Number = 0.0
    """Seconds since its last request, on the coordinator's monotonic clock."""
    first_push_at: UnixTime = None
    """Unix seconds of its first accepted push."""
    step_seconds: Figure = None
    compute_seconds: Figure = None
    pull_seconds: Figure = None
    push_seconds: Figure = None
    input_seconds: Figure = None
    staleness: Figure = None
    batch_size: Count = 0
    device: str = ""
    """Its accelerator by the name of the operator's catalogue ("T4"), "CPU" without one, "" before it has said so."""
    device_name: str = ""
    """The same as TensorFlow names it ("Tesla T4")."""
    devices: Count = 1
    """Accelerators; 1 for "CPU"."""
    cores: Number = 0.0
    """CPU cores that it may use, 0.5 for half of one; 0: unknown."""
    node: str = ""
    beside_seconds: Number = 0.0
    """In tasks, and without work: of its time, what `step_seconds` leave out. Cumulative."""
    message: str = ""


class ShardReport(Message):
    """One shard: its epoch, the number of updates applied, and its last snapshot (Unix seconds).

    `busy_seconds`, `updates`, `bytes_received` and `busy_answers` are cumulative over the life of the shard's process
    (`boot`): a reader takes differences as long as `boot` stays the same. `busy_seconds` / `updates` is the time that
    one update costs the shard, from which its capacity follows at any number of workers.
    """

    index: Count
    epoch: Count
    boot: int = 0
    """Identifies the process, other than the epoch, which a restarted container keeps."""
    version: Count = 0
    ready: bool = True
    last_snapshot_at: UnixTime = None
    busy_seconds: Amount = 0.0
    """Time in which the shard worked on pushes: the optimizer's update and the conversion of the answer.

    A moment counts once, however many threads work in it.
    """
    updates: Count = 0
    """Pushes applied by this process."""
    bytes_received: Count = 0
    """Of gradients and differences, without headers."""
    busy_answers: Count = 0
    """How often a request was told to wait for memory: the workers send more than the shard takes."""


class DataReport(Message):
    """Samples of the current epoch by state, and three counters of samples over the whole run.

    `repeated`: applied more than once. `partial`: applied on some shards only. `lost`: left out by `on_nan`.
    """

    done: Count = 0
    leased: Count = 0
    total: Count | None = None
    samples_per_epoch: Count | None = None
    """Samples of one pass over all data; None until it is known (files are counted in the first epoch)."""
    repeated: Count = 0
    partial: Count = 0
    lost: Count = 0


class ModelReport(Message):
    """What is exchanged of the job's model, and what one sample of it costs."""

    fingerprint: str = Field(max_length=128)
    """The SHA-256 (hex) of the layout: path, shape and dtype of every exchanged tensor. The only one in the project:
    workers, shards, snapshots and SpeedProfiles use it."""
    parameters: int = Field(ge=0, le=10**15)
    """Trainable values."""
    tensors: int = Field(ge=0, le=10**9)
    """Trainable variables; 0: unknown."""
    flops_per_sample: float | None = Field(None, ge=0, le=MOST_FLOPS)
    """Floating point operations of one sample's forward pass (a multiply-add is two); None until a worker has counted
    them, or where they cannot be counted."""


class Sums(Message):
    """Sums that one process adds to: a reader that takes differences loses nothing with a report that it missed."""

    def since(self, earlier: Self) -> Self:
        """What was added after `earlier`, a report of the same sums."""
        fields = type(self).model_fields
        return type(self)(**{name: getattr(self, name) - getattr(earlier, name) for name in fields})

    def plus(self, **more: float) -> Self:
        """These sums with more in some of them."""
        return self.model_copy(update={name: getattr(self, name) + value for name, value in more.items()})


class LogSums(Sums):
    """Count, sum and sum of squares of ln(seconds) of one part of a step, and the sum of the seconds.

    Step times are skewed and their spread is a ratio, so their logarithms are summed: they say how sure a mean is. What
    many steps take together is the plain mean: where one step in six waits 80 ms for its share of a core, no mean of
    logarithms tells it.
    """

    count: Difference = 0
    total: Number = 0.0
    squares: Number = 0.0
    seconds: Number = 0.0

    @property
    def mean(self) -> float:
        """The mean of ln(seconds); 0 for none."""
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """The population variance of ln(seconds), at least 0."""
        return max(0.0, self.squares / self.count - self.mean**2) if self.count else 0.0


def _measured(sums: LogSums) -> LogSums:
    """Sums that measured times can have: none is longer than 10^7 s, or shorter than 10^-7."""
    longest = MOST_LOG * sums.count
    if not (
        abs(sums.total) <= longest
        and 0 <= sums.squares <= MOST_LOG * longest
        and 0 <= sums.seconds <= math.exp(MOST_LOG) * sums.count
    ):
        raise ValueError(f"no times between 1e-7 and 1e7 s have these sums: {sums}")
    return sums


MeasuredSums = Annotated[LogSums, AfterValidator(_measured)]


class SpeedSums(Message):
    """The measured steps of all workers in one configuration, which the first six fields identify.

    Only steps while the members were unchanged for a settling time count, and none right after a task or an outage.
    """

    device: str = Field(max_length=128)
    """The accelerator by its name in the operator's catalogue ("T4"); "CPU" without one."""
    devices: int = Field(ge=1, le=1024)
    """Accelerators of one worker; 1 for "CPU"."""
    cores: float = Field(ge=0, le=1e6, allow_inf_nan=False)
    """CPU cores that one worker may use, 0.5 for half of one; 0: unknown."""
    batch_size: int = Field(ge=1, le=10**9)
    """Samples in one step of one worker."""
    workers: int = Field(ge=1, le=10**6)
    """Workers that were active, of all devices."""
    servers: int = Field(ge=1, le=10**6)
    """Parameter servers."""
    compute: MeasuredSums = LogSums()
    """Computing a step and waiting for its input."""
    pull: MeasuredSums = LogSums()
    """Waiting for the servers' answer and reading it."""
    push: MeasuredSums = LogSums()
    """Sending the update."""
    step: MeasuredSums = LogSums()
    """From push to push: of the exchange only what is not beside the computation, and waits for others, too."""

    @property
    def key(self) -> tuple[str, int, float, int, int, int]:
        """The configuration."""
        return self.device, self.devices, self.cores, self.batch_size, self.workers, self.servers


class BesideSums(Sums):
    """What passes beside training steps: evaluation, callbacks, and the waits for them. Not the last of a job.

    Workers differ in speed, and each does its tasks about as much faster as its steps. So time counts as the samples
    that this worker would have trained in it.
    """

    epochs: Difference = 0
    """Epochs that ended."""
    others: Difference = 0
    """Workers but one at the end of each of these, summed."""
    tasks: Number = 0.0
    """Samples that were not trained because of tasks."""
    waits: Number = 0.0
    """Samples that were not trained because workers had nothing to do."""


def _passed(sums: BesideSums) -> BesideSums:
    """Sums of what has passed: nothing of it is negative."""
    if min(sums.epochs, sums.others, sums.tasks, sums.waits) < 0:
        raise ValueError(f"what passed beside steps is not negative: {sums}")
    return sums


PassedSums = Annotated[BesideSums, AfterValidator(_passed)]

MAX_SPEEDS = 64
"""Configurations in a report; beyond that, the one that was measured longest ago is dropped."""


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
    """The coordinator's report. After a rollback, or a restart of PS 0 from a snapshot, counters may fall."""

    version: Count = VERSION
    job_uid: str
    phase: Phase
    epoch: Count = 0
    """The current epoch of training, from 0. (The epoch of a shard is in `shards`.)"""
    epochs_total: Count | None = None
    step: Count = 0
    samples: Count = 0
    loss: Figure = None
    metrics: Metrics = Field(default_factory=dict)
    """Those of training in the newest epoch, also if it is not over, and those of the newest evaluation (`val_…`)."""
    epochs: tuple[EpochReport, ...] = ()
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
    goodput: Figure = None
    """Share of the computed steps that count, 0 to 1."""
    input_wait: Figure = None
    """Share of the active workers' time spent waiting for the next batch, 0 to 1."""
    data: DataReport = DataReport()
    workers: tuple[WorkerReport, ...] = ()
    shards: tuple[ShardReport, ...] = ()
    model: ModelReport | None = None
    """None until a worker has connected."""
    speed: tuple[SpeedSums, ...] = ()
    """The measured steps by configuration, cumulative over the life of the coordinator's process (`speed_epoch`): a
    reader takes differences, so that a missed report loses nothing. At most `MAX_SPEEDS`."""
    speed_epoch: str = ""
    """Identifies the process whose sums `speed` and `beside` are: with another one they begin at 0."""
    beside: PassedSums = BesideSums()
    """What passed beside training steps, cumulative like `speed`."""
    message: str = ""

    @property
    def messages(self) -> tuple[str, ...]:
        """The message of the job, and those of its workers, which say what they wait for."""
        at_work = {WorkerState.ACTIVE, WorkerState.SILENT}
        waiting = (w for w in self.workers if w.message and w.state in at_work)
        said = (f"worker {w.slot}-{w.incarnation}: {w.message}" for w in waiting)
        return tuple(filter(None, (self.message, *said)))


# --- the end ------------------------------------------------------------------------------------------------------


class Outcome(StrEnum):
    """How a job ended."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


FAILURE_REASONS = frozenset({"UserError", "InternalError", "NoAccelerator", "OutOfMemory", "HungStep"})
"""The reasons of failures. A reader treats any other reason as part of the message."""


class Ranges(Message):
    """The number of ranges that were trained once, more than once, on some shards only, and never."""

    once: Count = 0
    repeated: Count = 0
    partial: Count = 0
    never: Count = 0


class TerminationMessage(Message):
    """The termination message with which PS 0 ends the job when it exits 0.

    Kubernetes keeps at most 4,096 bytes of it. For an error in the user's code, a worker writes one with
    `outcome=Failed` and exits `EXIT_USER`; the operator copies `reason` and `message` to `status.lastFailure`.
    """

    version: Count = VERSION
    outcome: Outcome
    reason: str = ""
    message: str = ""
    model_uri: str | None = None
    model_digest: str | None = None
    """SHA-256 of the manifest of `model/`."""
    step: Count = 0
    epoch: Count = 0
    samples: Count = 0
    loss: Figure = None
    metrics: Metrics = Field(default_factory=dict)
    wasted_steps: Count = 0
    data: DataReport = DataReport()
    ranges: Ranges = Ranges()


# --- the job's credentials ----------------------------------------------------------------------------------------


def job_key(install_key: bytes, job_uid: str, key_id: str) -> bytes:
    """The 32-byte key of a run: HMAC-SHA256(install key, job uid, key id), so the operator need not read Secrets."""
    return hmac.new(install_key, f"shoal/v1/job\0{job_uid}\0{key_id}".encode(), hashlib.sha256).digest()
