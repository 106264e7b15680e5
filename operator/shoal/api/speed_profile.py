"""The SpeedProfile: what was measured of one model on every accelerator, kept in the cluster for new jobs.

It is the predictor's training data. The spec is the user's priors, to plan before the first run, and Git owns it. The
status is what running jobs measured; only the operator writes it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from shoal.api.base import Column, Condition, Resource, Status, Strict
from shoal.api.capacity_pool import Cores
from shoal.api.rules import Amount, Number, Positive, Size, rules

__all__ = [
    "BesideSteps",
    "Convergence",
    "LogMoments",
    "MeasuredModel",
    "MeasuredRow",
    "ProfiledModel",
    "ServerLoad",
    "SpeedProfile",
    "SpeedProfileSpec",
    "SpeedProfileStatus",
    "SpeedRow",
    "SpeedSource",
]

MOST_ROWS = 512
MOST_SOURCES = 256
MOST_LENGTHS = 8
"""Lengths of epochs that are told apart."""


class ProfiledModel(Strict):
    """Properties of a model that determine its speed."""

    fingerprint: str = Field("", max_length=128)
    """Identifies the model: equal for equal architectures."""
    flops_per_sample: Size
    """Floating point operations of one sample's forward pass: `8.2e+7`."""
    parameters: int = Field(ge=1, le=10**15)
    """Trainable parameters."""
    tensors: Positive
    """Variables exchanged with the parameter servers."""
    bytes_per_sample: int | None = Field(None, ge=0, le=10**15)
    """Accelerator memory used by one sample of a batch. Unset: memory is not checked."""
    samples_per_epoch: int | None = Field(None, ge=1, le=10**15)
    """Samples in one pass over the data; needed to plan a job that stops after epochs."""


class Convergence(Strict):
    """The loss after j steps with N workers: (r2 b + r3) sqrt(N) / (j + r1) + r4, b the weighted batch size."""

    r1: Number
    """Shift of the curve in steps."""
    r2: Number
    """Change of the amplitude with the batch size."""
    r3: Number
    """Amplitude."""
    r4: Number
    """The loss at which the curve levels off."""
    least_batch: Positive = 1
    """Smallest weighted batch size of the fit."""
    most_batch: Positive = 1_000_000_000
    """Largest weighted batch size of the fit."""


class SpeedRow(Strict):
    """The measured step time of one configuration."""

    accelerator: str = Field(min_length=1, max_length=63)
    """Name of the accelerator in the catalogue, or as the cloud labels it."""
    accelerator_count: int = Field(1, ge=1, le=64)
    """Accelerators per worker."""
    cores: Cores | None = None
    """CPU cores per worker: needed where `accelerator` is `CPU`. Unset: unknown."""
    batch_size: Positive
    """Samples in one step of a worker."""
    workers: Positive = 1
    """Number of workers."""
    parameter_servers: Positive = 1
    """Number of parameter servers."""
    step_seconds: Size
    """Mean time of a worker's step in seconds."""
    spread: Amount = 0
    """Standard deviation of that time between measurements, in seconds."""
    compute_seconds: Amount | None = None
    """The part spent computing."""
    pull_seconds: Amount | None = None
    """The part spent fetching parameters."""
    push_seconds: Amount | None = None
    """The part spent sending gradients."""
    count: Positive = 1
    """Number of measurements."""
    last_seen: str | None = Field(None, max_length=64)
    """When it was last measured (RFC 3339)."""


class SpeedProfileSpec(Strict):
    """What the user knows of the model before the first run."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.convergence) || self.convergence.leastBatch <= self.convergence.mostBatch",
                "convergence.leastBatch must not exceed convergence.mostBatch",
            )
        )
    )

    model: ProfiledModel | None = None
    """The model. Unset: as jobs report it."""
    convergence: Convergence | None = None
    """Its loss curve. Unset: unknown."""
    rows: list[SpeedRow] = Field(default=[], max_length=MOST_ROWS)
    """Step times that are known from elsewhere."""


class LogMoments(Status):
    """A duration: its mean, mean and variance of its natural logarithm, and how many durations these stand for."""

    mean_seconds: str = "0"
    """Mean of the seconds, a decimal: what many steps take together. 0: not known."""

    mean_log: str = "0"
    """Mean of ln(seconds), a decimal."""
    variance_log: str = "0"
    """Variance of ln(seconds) between single steps, a decimal."""
    count: str = "0"
    """Number of steps, a decimal: old ones count less."""


def _decimal(value: Any) -> Any:
    """The status of an earlier version has a number here."""
    return f"{value:g}" if isinstance(value, int | float) else value


class MeasuredRow(Status):
    """The parts of a worker's step in one configuration."""

    device: str
    """Name of the accelerator in the catalogue; `CPU` without one."""
    devices: int = 1
    """Accelerators per worker."""
    cores: Annotated[str, BeforeValidator(_decimal)] = "0"
    """CPU cores per worker, a decimal; 0: unknown."""
    batch_size: int
    """Samples in one step of a worker."""
    workers: int
    """Number of workers."""
    parameter_servers: int
    """Number of parameter servers."""
    compute: LogMoments = LogMoments()
    """Computing the gradient, with the wait for input."""
    pull: LogMoments = LogMoments()
    """Receiving parameters."""
    push: LogMoments = LogMoments()
    """Sending the gradient."""
    step: LogMoments = LogMoments()
    """From push to push: with what of the exchange is not beside the computation, and with waits for other workers."""
    last_seen: str = ""
    """When it was last measured (RFC 3339)."""


class ServerLoad(Status):
    """What one update costs the parameter servers, for a number of them."""

    parameter_servers: int
    """Number of parameter servers."""
    busy_seconds: str = "0"
    """Seconds spent on updates, summed over the servers, a decimal."""
    updates: str = "0"
    """Updates applied, summed over the servers, a decimal."""
    batches_per_update: str = "0"
    """Batches that one of them is of, the harmonic mean over jobs, a decimal; 0: no job told it."""
    bytes: str = "0"
    """Bytes received, summed over the servers, a decimal."""
    last_seen: str = ""
    """When it was last measured (RFC 3339)."""


class BesideSteps(Status):
    """What passes beside training steps (evaluation, callbacks), in samples that would have been trained meanwhile."""

    samples_per_epoch: int = 0
    """Samples in each of these epochs, or nearly so; 0: not known."""
    epochs: str = "0"
    """Epochs that were measured, a decimal: old ones count less."""
    others: str = "0"
    """Workers but one in each of these epochs, summed, a decimal."""
    task_samples: str = "0"
    """Samples that were not trained because of tasks, a decimal."""
    task_squares: str = "0"
    """Squares of an epoch's samples of tasks, summed, a decimal: how much epochs differ."""
    wait_samples: str = "0"
    """Samples that were not trained because workers had nothing to do, a decimal."""
    last_seen: str = ""
    """When it was last measured (RFC 3339)."""


class SpeedSource(Status):
    """The reports of one job that are already in `rows` and `serverLoad`, so that none is counted twice."""

    uid: str
    """The job's uid."""
    report: str = ""
    """The life of the coordinator whose cumulative sums these are."""
    counts: dict[str, str] = Field(default_factory=dict)
    """Cumulative sums by row, as last merged."""
    seconds: str = "0"
    """How long the merged steps took, one after the other, of all lives of the coordinator, a decimal."""
    at: str = ""
    """When they were merged (RFC 3339)."""


class MeasuredModel(Status):
    """Properties of the model, as its jobs report them."""

    fingerprint: str = ""
    """SHA-256 of the paths, shapes and types of its tensors."""
    flops_per_sample: str | None = None
    """Floating point operations of one sample's forward pass, a decimal: those of another input size have a profile of
    their own."""
    precision: str = ""
    """The types that its layers compute with, such as `float32`; empty: not known."""
    parameters: int = 0
    """Trainable parameters."""
    tensors: int = 0
    """Variables exchanged with the parameter servers."""
    samples_per_epoch: int | None = None
    """Samples in one pass over the data that most was trained on: jobs of one model may have different data."""


class SpeedProfileStatus(Status):
    """What jobs measured."""

    observed_generation: int = 0
    """The generation of the spec that this status is based on."""
    model: MeasuredModel | None = None
    """The model."""
    rows: tuple[MeasuredRow, ...] = Field(default=(), max_length=MOST_ROWS)
    """Measured parts of steps, by configuration."""
    row_count: int = 0
    """Number of rows."""
    devices: str = ""
    """The devices that were measured."""
    server_load: tuple[ServerLoad, ...] = Field(default=(), max_length=16)
    """Measured cost of an update on the parameter servers."""
    beside: BesideSteps | None = None
    """That of `besideSteps` with most samples: what an earlier version, which knows no lengths, wrote and reads."""
    beside_steps: tuple[BesideSteps, ...] = Field(default=(), max_length=MOST_LENGTHS)
    """Measured time beside training steps, by the length of the epochs."""
    sources: tuple[SpeedSource, ...] = Field(default=(), max_length=MOST_SOURCES)
    """The jobs whose measurements these are."""
    jobs: str = ""
    """Names of the newest jobs that were measured."""
    last_updated: str = ""
    """When the newest measurement was merged (RFC 3339)."""
    conditions: tuple[Condition, ...] = Field(
        default=(),
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Ready: False while plans leave the profile out, since the predictor fails with it or its namespace has too many
    rows, or rows of its spec; absent if they never did."""


class SpeedProfile(Resource):
    """Measured step times of one model on all accelerators."""

    PLURAL: ClassVar[str] = "speedprofiles"
    SHORT_NAMES: ClassVar[tuple[str, ...]] = ("sprofile",)
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("Parameters", ".status.model.parameters", "integer"),
        Column("Devices", ".status.devices", description="Devices that were measured"),
        Column("Jobs", ".status.jobs", description="The newest jobs that were measured"),
        Column("Rows", ".status.rowCount", "integer", description="Measured configurations"),
        Column("Updated", ".status.lastUpdated", "date"),
        Column("Age", ".metadata.creationTimestamp", "date"),
        Column("Fingerprint", ".status.model.fingerprint", wide=True),
    )

    kind: Literal["SpeedProfile"] = "SpeedProfile"
    spec: SpeedProfileSpec = SpeedProfileSpec()
    """What the user knows before the first run."""
    status: SpeedProfileStatus = SpeedProfileStatus()
    """What jobs measured, written only by the operator."""
