"""The values that the predictor and the planner share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.errors import UsageError

__all__ = ["Interval", "ModelFeatures", "PsModel"]


@dataclass(frozen=True)
class Interval:
    """A prediction and its 90 % prediction interval."""

    low: float
    mean: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.mean <= self.high:
            raise UsageError(
                f"an interval needs low <= mean <= high, not {self.low}, {self.mean}, {self.high}"
            )

    @property
    def relative_sigma(self) -> float:
        """The standard deviation relative to the mean, of a normal distribution of the logarithm."""
        return math.log(self.high / self.low) / (2 * 1.6449)


@dataclass(frozen=True)
class ModelFeatures:
    """The features of a model that determine its speed.

    `flops_per_sample` counts two operations per multiply-add, forward pass only (CM-DARE's tables count a whole
    training step, three times as much: do not mix them). `tensors` is the number of variables exchanged with the
    parameter servers.
    """

    flops_per_sample: float
    parameters: int
    tensors: int
    fingerprint: str = ""

    def __post_init__(self) -> None:
        for name in ("flops_per_sample", "parameters", "tensors"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} of a model must be a positive number, not {value}")


@dataclass(frozen=True)
class PsModel:
    """The cost of one update (a push and a pull) of one model at a parameter server.

    `update_seconds`: time of one server for the whole model, so n servers do at most n^scaling / update_seconds
    updates per second; 0: no contention. `sharpness` >= 1: how sharply the speed bends from the sum of the workers to
    that cap (infinite: minimum of both). `scaling`: 1 if the parameters are spread evenly,
    else less.
    """

    update_seconds: float
    sharpness: float = 4.0
    scaling: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.update_seconds) and self.update_seconds >= 0):
            raise UsageError(f"update_seconds must be a finite number >= 0, not {self.update_seconds}")
        if not self.sharpness >= 1:
            raise UsageError(f"sharpness must be at least 1, not {self.sharpness}")
        if not 0 <= self.scaling <= 1:
            raise UsageError(f"scaling must be between 0 and 1, not {self.scaling}")
