"""The SpeedProfile: measured step times of one model, kept in the cluster for new jobs.

It is the predictor's training data. The operator writes it; a user can write one to plan before the first run. It has
no status.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from shoal.api.base import Resource, Strict
from shoal.api.rules import DECIMAL, rules

__all__ = ["Convergence", "ProfiledModel", "SpeedProfile", "SpeedProfileSpec", "SpeedRow"]


class ProfiledModel(Strict):
    """Properties of a model that determine its speed."""

    fingerprint: str = Field("", max_length=128)
    """Identifies the model: equal for equal architectures."""
    flops_per_sample: str = Field(pattern=DECIMAL, max_length=32)
    """Floating point operations of one sample's forward pass, a decimal in quotes: `"8.2e7"`."""
    parameters: int = Field(ge=1)
    """Trainable parameters."""
    tensors: int = Field(ge=1)
    """Variables exchanged with the parameter servers."""
    bytes_per_sample: int | None = Field(None, ge=0)
    """Accelerator memory used by one sample of a batch. Unset: memory is not checked."""
    samples_per_epoch: int | None = Field(None, ge=1)
    """Samples in one pass over the data; needed to plan a job that stops after epochs."""


class Convergence(Strict):
    """The loss after j steps with N workers: (r2 b + r3) sqrt(N) / (j + r1) + r4, b the weighted batch size."""

    r1: str = Field(pattern=DECIMAL, max_length=32)
    """Shift of the curve in steps."""
    r2: str = Field(pattern=DECIMAL, max_length=32)
    """Change of the amplitude with the batch size."""
    r3: str = Field(pattern=DECIMAL, max_length=32)
    """Amplitude."""
    r4: str = Field(pattern=DECIMAL, max_length=32)
    """The loss at which the curve levels off."""
    least_batch: int = Field(1, ge=1)
    """Smallest weighted batch size of the fit."""
    most_batch: int = Field(1_000_000_000, ge=1)
    """Largest weighted batch size of the fit."""


class SpeedRow(Strict):
    """The measured step time of one configuration."""

    accelerator: str = Field(min_length=1, max_length=63)
    """Name of the accelerator in the catalogue, or as the cloud labels it."""
    accelerator_count: int = Field(1, ge=1, le=64)
    """Accelerators per worker."""
    batch_size: int = Field(ge=1)
    """Samples in one step of a worker."""
    workers: int = Field(1, ge=1)
    """Number of workers."""
    parameter_servers: int = Field(1, ge=1)
    """Number of parameter servers."""
    step_seconds: str = Field(pattern=DECIMAL, max_length=32)
    """Mean time of a worker's step in seconds, a decimal in quotes."""
    spread: str = Field("0", pattern=DECIMAL, max_length=32)
    """Standard deviation of that time between measurements, in seconds."""
    compute_seconds: str | None = Field(None, pattern=DECIMAL, max_length=32)
    """The part spent computing."""
    pull_seconds: str | None = Field(None, pattern=DECIMAL, max_length=32)
    """The part spent fetching parameters."""
    push_seconds: str | None = Field(None, pattern=DECIMAL, max_length=32)
    """The part spent sending gradients."""
    count: int = Field(1, ge=1)
    """Number of measurements."""
    last_seen: str | None = Field(None, max_length=64)
    """When it was last measured (RFC 3339)."""


class SpeedProfileSpec(Strict):
    """The model and its measurements."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.convergence) || self.convergence.leastBatch <= self.convergence.mostBatch",
                "convergence.leastBatch must not exceed convergence.mostBatch",
            )
        )
    )

    model: ProfiledModel
    """The model."""
    convergence: Convergence | None = None
    """Its loss curve. Unset: unknown."""
    rows: list[SpeedRow] = Field(default=[], max_length=512)
    """Measured step times."""


class SpeedProfile(Resource):
    """Measured step times of one model on all accelerators."""

    PLURAL: ClassVar[str] = "speedprofiles"

    kind: Literal["SpeedProfile"] = "SpeedProfile"
    spec: SpeedProfileSpec
    """The model and its measurements."""
