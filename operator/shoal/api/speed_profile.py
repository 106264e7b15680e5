"""The SpeedProfile: what has been measured of one model, kept in the cluster so that new jobs begin with it.

It is the predictor's training data. The operator writes it; a person can write one by hand to plan before the first
run. It is a record, so it has no status.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from shoal.api.base import Resource, Strict
from shoal.api.rules import DECIMAL, rules

__all__ = ["Convergence", "ProfiledModel", "SpeedProfile", "SpeedProfileSpec", "SpeedRow"]


class ProfiledModel(Strict):
    """What the speed of a model depends on."""

    fingerprint: str = Field("", max_length=128)
    """Identifies the model: equal for equal architectures."""
    flops_per_sample: str = Field(pattern=DECIMAL, max_length=32)
    """Floating point operations of one sample's forward pass, a decimal in quotes: `"8.2e7"`."""
    parameters: int = Field(ge=1)
    """Trainable parameters."""
    tensors: int = Field(ge=1)
    """Variables that are exchanged with the parameter servers."""
    bytes_per_sample: int | None = Field(None, ge=0)
    """Accelerator memory that one sample of a batch takes. Unset: memory is not checked."""
    samples_per_epoch: int | None = Field(None, ge=1)
    """Samples in one pass over the data; needed to plan a job that stops after epochs."""


class Convergence(Strict):
    """The loss after j steps with N workers: (r2 b + r3) sqrt(N) / (j + r1) + r4, b the weighted batch size."""

    r1: str = Field(pattern=DECIMAL, max_length=32)
    """Steps by which the curve is shifted."""
    r2: str = Field(pattern=DECIMAL, max_length=32)
    """How the amplitude changes with the batch size."""
    r3: str = Field(pattern=DECIMAL, max_length=32)
    """Amplitude."""
    r4: str = Field(pattern=DECIMAL, max_length=32)
    """The loss at which the curve levels off."""
    least_batch: int = Field(1, ge=1)
    """Smallest weighted batch size that the curve was fitted with."""
    most_batch: int = Field(1_000_000_000, ge=1)
    """Largest weighted batch size that the curve was fitted with."""


class SpeedRow(Strict):
    """One configuration that was measured, and its step time."""

    accelerator: str = Field(min_length=1, max_length=63)
    """Name of the accelerator in the catalogue, or as the cloud labels it."""
    accelerator_count: int = Field(1, ge=1, le=64)
    """Accelerators of one worker."""
    batch_size: int = Field(ge=1)
    """Samples in one step of a worker."""
    workers: int = Field(1, ge=1)
    """Workers at the time."""
    parameter_servers: int = Field(1, ge=1)
    """Parameter servers at the time."""
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
    """How many measurements this is the mean of."""
    last_seen: str | None = Field(None, max_length=64)
    """When it was last measured (RFC 3339)."""


class SpeedProfileSpec(Strict):
    """The model, and what was measured of it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.convergence) || self.convergence.leastBatch <= self.convergence.mostBatch",
                "convergence.leastBatch must not be more than mostBatch",
            )
        )
    )

    model: ProfiledModel
    """The model."""
    convergence: Convergence | None = None
    """Its loss curve. Unset: not known."""
    rows: list[SpeedRow] = Field(default=[], max_length=512)
    """Measured step times."""


class SpeedProfile(Resource):
    """What has been measured of one model on every accelerator."""

    PLURAL: ClassVar[str] = "speedprofiles"

    kind: Literal["SpeedProfile"] = "SpeedProfile"
    spec: SpeedProfileSpec
    """The model, and what was measured of it."""
