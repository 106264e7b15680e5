"""The step time of one worker from tables of measurements: `speed.worker` for data frames."""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator

from shoal.errors import NotEnoughData, UsageError
from shoal.sizing.accelerators import Catalogue, catalogue
from shoal.sizing.availability import Floats
from shoal.sizing.predict.tables import measured_in
from shoal.sizing.speed import priors
from shoal.sizing.speed.measurements import Model
from shoal.sizing.speed.model import chosen, merged
from shoal.sizing.speed.worker import Configuration, Observation, WorkerModel

__all__ = ["Interval", "WorkerSpeed"]


FEW_MODELS = 10


class Interval(NamedTuple):
    """A prediction and its 90 % prediction interval; `sigma`: the standard deviation of its logarithm."""

    low: float
    mean: float
    high: float
    sigma: float


class WorkerSpeed(BaseEstimator):  # type: ignore[misc]
    """Predict a worker's speed, with a 90 % prediction interval.

    Args:
        elsewhere: whether the interval is for another day than the measured ones.
        catalogue: the data sheets. None: those of Shoal.

    Attributes:
        model_: the posterior.
        accelerators_: those that were measured.
        batches_: whether the measurements have batch sizes.
        notes_: what a reader of its predictions has to know; see `notes_on`.

    """

    def __init__(self, elsewhere: bool = False, catalogue: Catalogue | None = None) -> None:
        self.elsewhere = elsewhere
        self.catalogue = catalogue

    def fit(self, rows: pd.DataFrame) -> Self:
        """Fit to a table as `tables.load` gives it: model, accelerator, features, `measured` steps/s of one worker."""
        if len(rows) == 0:
            raise NotEnoughData("no measurement of a worker's speed is known: give at least one")
        steps = -np.log(measured_in(rows))
        self.batches_ = "batch_size" in rows
        observations = [
            Observation(one, float(step), 0.0)
            for one, step in zip(self._configurations(rows), steps, strict=True)
        ]
        unit = priors.ANY_CONVENTION if self.batches_ else priors.ANY_UNIT
        every = merged(observations)
        taken = chosen(every, ())
        self.model_ = WorkerModel(taken, self._sheets, work_sigma=unit)
        self.notes_ = self._limits(rows)
        if left_out := len(every) - len(taken):
            self.notes_.append(
                f"{left_out} of {len(every)} configurations are left out: {len(taken)} are fitted"
            )
        return self

    def step_seconds(
        self, model: Model, accelerator: str, batch_size: float | None = None, cpu_cores: float | None = None
    ) -> Interval:
        """Step time of one worker alone, in s; `model.fingerprint` identifies a model that was measured before."""
        self._check_fitted()
        if (batch_size is not None) != self.batches_:
            raise UsageError(
                "the measurements have batch sizes: give the batch_size of the step"
                if self.batches_
                else "the measurements have no batch sizes, so that a step of another size cannot be predicted: leave "
                "batch_size out, or add the column to the table"
            )
        name = self._sheets.find(accelerator).name
        one = Configuration(model, name, batch_size or 1.0, cores=cpu_cores or 0.0)
        mean, sigma = (float(value[0]) for value in self._logarithms([one]))
        low, middle, high = (math.exp(mean + z * sigma) for z in (-priors.Z90, 0.0, priors.Z90))
        return Interval(low, middle, high, sigma)

    def predict(self, rows: pd.DataFrame) -> Floats:
        """Give (n, 3) low, predicted and high steps/s for every row of model, accelerator and features."""
        mean, sigma = self.logarithms(rows)
        return np.exp(np.column_stack([-mean - priors.Z90 * sigma, -mean, -mean + priors.Z90 * sigma]))

    def logarithms(self, rows: pd.DataFrame) -> tuple[Floats, Floats]:
        """(n,) mean and standard deviation of ln(seconds) of a new measurement."""
        self._check_fitted()
        return self._logarithms(self._configurations(rows))

    def notes_on(self, rows: pd.DataFrame) -> list[str]:
        """What a reader of the predictions for these rows has to know."""
        self._check_fitted()
        new = {self._sheets.find(name).name for name in rows["accelerator"]} - set(self.accelerators_)
        sources = ", ".join(self.accelerators_)
        return self.notes_ + [
            f"{name} was never measured: its speed is carried over from {sources} by data sheets"
            for name in sorted(new)
        ]

    @property
    def _sheets(self) -> Catalogue:
        return catalogue() if self.catalogue is None else self.catalogue

    def _check_fitted(self) -> None:
        if not hasattr(self, "model_"):
            raise NotEnoughData("no measurement of a worker's speed is known: call fit first")

    def _logarithms(self, rows: list[Configuration]) -> tuple[Floats, Floats]:
        mean, sigma = self.model_.predict(rows, again=True)
        return mean, np.hypot(sigma, priors.ANOTHER_DAY if self.elsewhere else 0.0)

    def _configurations(self, rows: pd.DataFrame) -> list[Configuration]:
        batch = rows["batch_size"].to_numpy(float) if self.batches_ else np.ones(len(rows))
        cores = rows["cpu_cores"].to_numpy(float) if "cpu_cores" in rows else np.zeros(len(rows))
        return [
            Configuration(
                Model(str(name), float(flops), max(int(params), 1), max(int(tensors), 1)),
                self._sheets.find(accelerator).name,
                float(b),
                cores=float(c) if np.isfinite(c) else 0.0,
            )
            for name, accelerator, flops, params, tensors, b, c in zip(
                rows["model"], rows["accelerator"], rows["flops"], rows["params"], rows["num_tensors"], batch, cores,
                strict=True,
            )
        ]  # fmt: skip

    def _limits(self, rows: pd.DataFrame) -> list[str]:
        names = np.array([self._sheets.find(name).name for name in rows["accelerator"]])
        self.accelerators_ = sorted(set(names.tolist()))
        notes = []
        for name in self.accelerators_:
            known = rows["model"][names == name].nunique()
            if known < FEW_MODELS:
                notes.append(
                    f"{name} was measured with {known} model{'s' if known > 1 else ''} only: its interval is widened; "
                    f"measure {FEW_MODELS - known} more for a sharper one"
                )
        return notes
