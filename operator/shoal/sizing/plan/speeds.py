"""The speed of one worker in each pool: measured if possible, else predicted, with a note."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from shoal.api.speed_profile import SpeedProfile, SpeedRow
from shoal.errors import UsageError
from shoal.sizing.accelerators import Catalogue
from shoal.sizing.predict.contention import Contention
from shoal.sizing.predict.worker_speed import WorkerSpeed
from shoal.sizing.types import ModelFeatures, PsModel

__all__ = ["PoolSpeed", "ServerSpeed", "Speeds"]

LEAST_SIGMA = 0.02
"""The least relative standard deviation of a measured step time."""
Z90 = 1.6449
SERVER_BANDWIDTH = 1.25e9
"""Assumed bytes/s of one parameter server, both ways together: 10 Gbit/s."""
GUESS_SIGMA = 0.7
"""Its relative standard deviation: networks and processors of nodes differ by a factor of two and more."""


@dataclass(frozen=True)
class PoolSpeed:
    """Step time of one worker without contention, its relative standard deviation, and a note."""

    step_seconds: float
    sigma: float
    note: str = ""


@dataclass(frozen=True)
class ServerSpeed:
    """The cost of an update, its relative standard deviation, the most servers measured, and a note."""

    model: PsModel
    sigma: float
    measured: int
    note: str = ""


class Speeds:
    """Step times from one model's profile."""

    def __init__(self, profile: SpeedProfile, catalogue: Catalogue) -> None:
        model = profile.model
        name = profile.metadata.name or "model"
        self.features = ModelFeatures(
            float(model.flops_per_sample), model.parameters, model.tensors, model.fingerprint or name
        )
        self._catalogue = catalogue
        self._rows = profile.spec.rows
        if not self._rows:
            raise UsageError(
                f"SpeedProfile {name} has no rows: add at least one measured step time under spec.rows"
            )
        for row in self._rows:
            if not float(row.step_seconds) > 0:
                raise UsageError(
                    f"SpeedProfile {name}: stepSeconds must be greater than 0, not {row.step_seconds}"
                )
        self._predictor: WorkerSpeed | None = None

    def of(self, accelerator: str, count: int, batch: int) -> PoolSpeed:
        """The speed of a worker with `count` accelerators of this name and `batch` samples in a step."""
        name = self._catalogue.find(accelerator).name
        same = [r for r in self._rows if self._is(r, name) and r.accelerator_count == count]
        exact = [r for r in same if r.batch_size == batch and r.workers == 1]
        if exact:
            times = np.array([float(r.step_seconds) for r in exact])
            weights = np.array([r.count for r in exact], dtype=float)
            mean = float(np.average(times, weights=weights))
            spread = max(float(r.spread) for r in exact)
            between = float(np.sqrt(np.average((times - mean) ** 2, weights=weights)))
            return PoolSpeed(mean, max(LEAST_SIGMA, np.hypot(spread, between) / mean))
        found = self._predict().step_seconds(self.features, name, batch / count)
        sigma = max(LEAST_SIGMA, float(np.log(found.high / found.low)) / (2 * Z90))
        known = ", ".join(sorted({r.accelerator for r in self._rows}))
        note = (
            f"No step of {batch} samples was measured on {accelerator}{f' x {count}' if count > 1 else ''}: its time "
            f"of {found.mean:.3g} s is predicted from {known} and may lie between {found.low:.3g} s and "
            f"{found.high:.3g} s."
        )
        return PoolSpeed(found.mean, sigma, note)

    def servers(self) -> ServerSpeed:
        """The cost of an update at a parameter server, fitted to measured clusters or else assumed."""
        clusters = [r for r in self._rows if r.workers > 1 and r.accelerator_count == 1]
        if len(clusters) >= 2:
            frame = self._frame(clusters)
            workers = [self.of(r.accelerator, r.accelerator_count, r.batch_size) for r in clusters]
            alone = 1 / np.array([worker.step_seconds for worker in workers])
            frame["measured"] = [r.workers / float(r.step_seconds) for r in clusters]
            fitted = Contention.fit(frame, alone)
            return ServerSpeed(
                fitted.of(self.features),
                # The capacity is at most as sure as the speed of the workers that it was derived from.
                float(np.hypot(fitted.capacity_sigma(frame, alone), min(w.sigma for w in workers))),
                max(r.parameter_servers for r in clusters),
            )
        return ServerSpeed(
            PsModel.of(self.features, bandwidth=SERVER_BANDWIDTH, bytes_per_parameter=2.0),
            GUESS_SIGMA,
            1,
            "Several workers were not measured together: a parameter server is taken to move "
            f"{SERVER_BANDWIDTH / 1e9:.3g} GB/s, or half or twice as much.",
        )

    def _is(self, row: SpeedRow, name: str) -> bool:
        return self._catalogue.find(row.accelerator).name == name

    def _predict(self) -> WorkerSpeed:
        if self._predictor is None:
            single = [r for r in self._rows if r.workers == 1]
            if not single:
                raise UsageError(
                    "the SpeedProfile has no row with workers: 1: measure a worker alone, at least once"
                )
            frame = self._frame(single)
            frame["measured"] = [1 / float(r.step_seconds) for r in single]
            self._predictor = WorkerSpeed(catalogue=self._catalogue).fit(frame)
        return self._predictor

    def _frame(self, rows: list[SpeedRow]) -> pd.DataFrame:
        return pd.DataFrame(
            {
                "model": self.features.fingerprint,
                "accelerator": [self._catalogue.find(r.accelerator).name for r in rows],
                "flops": self.features.flops_per_sample,
                "params": float(self.features.parameters),
                "num_tensors": float(self.features.tensors),
                # The accelerators of one worker share its batch.
                "batch_size": [r.batch_size / r.accelerator_count for r in rows],
                "num_workers": [float(r.workers) for r in rows],
                "num_ps": [float(r.parameter_servers) for r in rows],
            }
        )
