"""What the operator and the trainer must agree on, and nothing else.

The two live in different images and are upgraded apart from each other, so this one module is imported by both:
the runtime configuration that the operator hands to a pod, the status report that the coordinator serves, the
termination message that ends a job, and the names and numbers around them. It imports nothing heavy.

Unknown keys are ignored on reading: a newer side may add fields, an older one must go on.
Times are seconds, sizes bytes, counts samples unless a name says otherwise.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

VERSION = 1
CONFIG_ENV = "SHOAL_CONFIG"
"""The environment variable that holds a pod's `RuntimeConfig` as JSON."""

SECRET_DIR = "/var/run/shoal/secret"
"""Where the job's Secret is mounted: `key` (32 bytes), `key-id`, `tls.crt`, `tls.key`.

During a rotation also `previous-key`, `previous-key-id`.
"""

STORAGE_DIR = "/var/run/shoal/storage"
"""Where a volume claim (or the ephemeral volume) of the job is mounted; its URI is `file://` + this."""

TERMINATION_LOG = "/dev/termination-log"
DATA_PORT = 7070
CONTROL_PORT = 7071
METRICS_PORT = 7072

EXIT_OK = 0
EXIT_USER = 2
"""The user's code or configuration is wrong; starting it again cannot help."""
EXIT_FENCED = 4
"""A newer incarnation holds this place."""
EXIT_DRAINED = 143
"""The worker (or shard) stopped because it was told to: never 0, or Kubernetes would call it success."""

SILENCE_SECONDS = 5.0
SILENCE_STEPS = 3
"""A worker silent for longer than max(SILENCE_SECONDS, SILENCE_STEPS of its own steps) is reported silent."""


class Message(BaseModel):
    """A value both sides read: camelCase on the wire, frozen, tolerant of what it does not know."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore", ser_json_inf_nan="null"
    )

    def to_json(self) -> str:
        """The message as compact JSON with camelCase keys."""
        return self.model_dump_json(by_alias=True, exclude_none=True)


class Role(StrEnum):
    """What a pod is."""

    PS = "ps"
    WORKER = "worker"


class JobIdentity(Message):
    """Which job, and which run of it: `uid` differs when a job is deleted and applied again."""

    namespace: str
    name: str
    uid: str

    @property
    def prefix(self) -> str:
        """Everything of the run lies under `<storage>/<prefix>/`."""
        return f"{self.namespace}/{self.name}/{self.uid}"


FALLS = (
    "loss", "error", "(root_)?mean_squared_error", "r?mse", "mean_absolute_error", "mae", "mape", "msle",
    "mean_absolute_percentage_error", "mean_squared_logarithmic_error", "log_?cosh(_error)?", "huber(_loss)?",
    "poisson", "(squared_|categorical_)?hinge", "bce", "((binary|(sparse_)?categorical)_)?(focal_)?crossentropy",
    "kl_divergence", "kullback_leibler_divergence", "kld", "ctc", "circle", "perplexity", "false_(positives|negatives)",
)  # fmt: skip
"""Names (patterns of the whole name) of what is the better the smaller: Keras' losses and errors, short and long."""
RISES = (
    "((binary|(sparse_)?(top_(k|[0-9]+)_)?categorical|(sparse_)?top_(k|[0-9]+))_)?acc(uracy)?", "((roc|pr)_)?auc",
    "(precision|recall|sensitivity|specificity)(_at_(precision|recall|sensitivity|specificity))?",
    "f1(_?score)?", "f_?beta_score", "(one_hot_)?(mean_|binary_|m)?io_?u", "r2(_score)?", "cosine_similarity",
    "(concordance|pearson)_correlation", "true_(positives|negatives)",
)  # fmt: skip
"""Names of what is the better the greater."""


def names_of(*patterns: str) -> str:
    """One pattern, of RE2 and Python alike, for metrics of these names: also with `val_`, and counted by Keras."""
    return f"(?i)^(val_)?({'|'.join(patterns)})(_[0-9]+)?$"


class StopAfter(Message):
    """When training ends: after so many passes over the data, steps of the whole job, or at a metric's value."""

    epochs: int | None = None
    steps: int | None = None
    metric: str | None = None
    value: float | None = Field(None, allow_inf_nan=False)
    mode: Literal["Min", "Max"] | None = None
    """Whether the metric is to fall to the value or to rise to it; None: as its name says."""

    @property
    def direction(self) -> Literal["Min", "Max"] | None:
        """The mode, or what the metric's name says; None: neither is known."""
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
    """How a gradient computed on old parameters is weighted: lr / tau**p with p = 0, 1/2, 1."""

    max: int | None = None
    policy: Literal["Constant", "InverseSquareRoot", "Inverse"] = "InverseSquareRoot"


class SnapshotPolicy(Message):
    """How often all shards are saved, and how many snapshots are kept."""

    every_seconds: int = 60
    retain: int = 3


class InitialFrom(Message):
    """Another run to begin from."""

    uri: str
    weights_only: bool = False


class Shard(Message):
    """Where one parameter server is reached: the ClusterIP Service of the shard."""

    host: str
    data_port: int = DATA_PORT
    control_port: int = CONTROL_PORT


class AcceleratorBatch(Message):
    """The batch size of workers whose accelerator has all the words of `accelerator` in its name; "CPU": none."""

    accelerator: str
    batch_size: int


class RuntimeConfig(Message):
    """Everything a pod of a job is told, in the environment variable `SHOAL_CONFIG`.

    `index` is the slot of a worker or the shard of a parameter server; `incarnation` counts the pods that have
    filled it, and is the epoch of a shard. `workers_expected` is a hint for the first plan of the data, no limit.
    """

    version: int = VERSION
    job: JobIdentity
    role: Role
    index: int
    incarnation: int
    parameter_servers: tuple[Shard, ...]
    entrypoint: str
    args: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    batch_size: int = 128
    """Samples in one step of this pod's worker."""
    batch_sizes: tuple[AcceleratorBatch, ...] = ()
    """What `batch_size` becomes once a worker has seen its accelerator: the first that fits."""
    reference_batch_size: int | None = None
    """A push of so many samples has weight 1; None: `batch_size`."""
    stop_after: StopAfter = StopAfter(epochs=1)
    staleness: Staleness = Staleness()
    snapshot: SnapshotPolicy = SnapshotPolicy()
    storage_uri: str
    initial_from: InitialFrom | None = None
    secret_dir: str = SECRET_DIR
    bind_host: str = "0.0.0.0"  # the operator sets the pod's own address through the downward API
    data_tls: bool = False
    node_name: str = ""
    pool: str = ""


# --- the coordinator's status report ------------------------------------------------------------------------------

STATUS_PATH = "/v1/status"
"""GET over TLS on the control port of PS 0, with `Authorization: Bearer <status_token(key)>`."""


def status_token(key: bytes) -> str:
    """The bearer token for the status endpoint: derived from the job's key, so that the key never travels."""
    return hmac.new(key, b"shoal/v1/status", hashlib.sha256).hexdigest()


class WorkerState(StrEnum):
    """What the coordinator thinks of a worker."""

    ACTIVE = "Active"
    SILENT = "Silent"
    DRAINED = "Drained"
    LEFT = "Left"
    FENCED = "Fenced"


class WorkerReport(Message):
    """One (slot, incarnation) as the coordinator sees it. Newest incarnation of each slot first; bounded."""

    slot: int
    incarnation: int
    state: WorkerState
    steps: int = 0
    samples: int = 0
    last_seen_seconds: float = 0.0
    """Seconds since it last spoke, on the coordinator's monotonic clock."""
    first_push_at: float | None = None
    """Unix seconds of its first accepted push."""
    step_seconds: float | None = None
    compute_seconds: float | None = None
    pull_seconds: float | None = None
    push_seconds: float | None = None
    input_seconds: float | None = None
    staleness: float | None = None
    batch_size: int = 0
    node: str = ""
    pool: str = ""
    message: str = ""


class ShardReport(Message):
    """One shard: its epoch, how many updates it applied, and its last snapshot (Unix seconds)."""

    index: int
    epoch: int
    version: int = 0
    ready: bool = True
    last_snapshot_at: float | None = None


class DataReport(Message):
    """Samples of the current epoch by state, and three counters over the whole run (in samples).

    `repeated`: applied twice. `partial`: applied on some shards only. `lost`: never applied though called done.
    """

    done: int = 0
    leased: int = 0
    total: int | None = None
    repeated: int = 0
    partial: int = 0
    lost: int = 0


class Phase(StrEnum):
    """What the trainer as a whole is doing."""

    STARTING = "Starting"
    TRAINING = "Training"
    FINISHING = "Finishing"  # evaluation, callbacks, export
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class StatusReport(Message):
    """What the coordinator tells about the job. Counters only grow within a run, also over restarts of PS 0."""

    version: int = VERSION
    job_uid: str
    phase: Phase
    epoch: int = 0
    """Which pass over the data, from 0. (The epoch of a shard is in `shards`.)"""
    epochs_total: int | None = None
    step: int = 0
    samples: int = 0
    loss: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    samples_per_second: float | None = None
    progress_percent: float | None = None
    remaining_seconds: float | None = None
    wasted_steps: int = 0
    rollbacks: int = 0
    """How often the job went back to its newest snapshot because its loss was not finite."""
    goodput: float | None = None
    """Share of the samples computed that count, 0 to 1."""
    input_wait: float | None = None
    """Share of the active workers' time that they wait for the next batch, 0 to 1."""
    data: DataReport = DataReport()
    workers: tuple[WorkerReport, ...] = ()
    shards: tuple[ShardReport, ...] = ()
    message: str = ""


# --- the end ------------------------------------------------------------------------------------------------------


class Outcome(StrEnum):
    """How a job ended."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


FAILURE_REASONS = frozenset({"UserError", "InternalError"})
"""What the trainer calls its failures. Who reads another word takes it for a part of the message."""


class Ranges(Message):
    """How many ranges of the data were trained once, more than once, on some shards only, never."""

    once: int = 0
    repeated: int = 0
    partial: int = 0
    never: int = 0


class TerminationMessage(Message):
    """What PS 0 writes to its termination log before it exits 0: the evidence that the job has ended.

    Kubernetes keeps at most 4,096 bytes of it. Workers write one with `outcome=Failed` and exit `EXIT_USER` when
    the user's code is at fault: the operator copies `reason` and `message` into `status.lastFailure`.
    """

    version: int = VERSION
    outcome: Outcome
    reason: str = ""
    message: str = ""
    model_uri: str | None = None
    model_digest: str | None = None
    """SHA-256 of the manifest of `model/`."""
    step: int = 0
    epoch: int = 0
    samples: int = 0
    loss: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    wasted_steps: int = 0
    data: DataReport = DataReport()
    ranges: Ranges = Ranges()


# --- the job's credentials ----------------------------------------------------------------------------------------


def job_key(install_key: bytes, job_uid: str, key_id: str) -> bytes:
    """The 32-byte key of one run: HMAC-SHA256(install key, job uid, key id). The operator never has to read Secrets."""
    return hmac.new(install_key, f"shoal/v1/job\0{job_uid}\0{key_id}".encode(), hashlib.sha256).digest()
