"""The step time of one worker: a fit per accelerator, transferred to other accelerators by their data sheets.

Form: `step = a + b * work + c * tensors + ...` per accelerator, chosen by its error on unseen models. An accelerator
without rows uses the fits of the others, with the work divided by the ratio of arithmetic and the overheads by the
ratio of small kernels (`Catalogue.speed_up`). Its first rows correct that by a factor, and with `OWN_FIT` models it
has its own fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shoal.errors import NotEnoughData, UsageError
from shoal.sizing.accelerators import Catalogue, catalogue
from shoal.sizing.predict.conformal import FEW_GROUPS, GroupConformalRegressor, little_data_factor
from shoal.sizing.predict.estimators import PowerLaw, RelativeNNLS
from shoal.sizing.types import Interval, ModelFeatures

__all__ = ["Measurement", "WorkerSpeed", "features_matrix"]

Floats = NDArray[np.float64]

OWN_FIT = 6  # models measured on an accelerator for a fit of its own
FEW_FORMS = 3  # fewer models do not separate the terms of a step: only constant and work are fitted
REPEAT_NOISE = 0.05  # prior relative spread of a repeated measurement
Z90 = 1.6449  # a normal 90 % interval is this many standard deviations to each side

# Columns of the feature matrix.
WORK, TENSORS, PARAMETERS, BATCH, FEEDING = range(5)


def features_matrix(rows: pd.DataFrame) -> Floats:
    """(n, 5): GFLOP per step, tensors, parameters in millions, samples, samples per CPU core (0: not known)."""
    batch = rows["batch_size"].to_numpy(float)
    feeding = batch / rows["cpu_cores"].to_numpy(float) if "cpu_cores" in rows else np.zeros(len(rows))
    return np.column_stack(
        [
            rows["flops"].to_numpy(float) * batch / 1e9,
            rows["num_tensors"].to_numpy(float),
            rows["params"].to_numpy(float) / 1e6,
            batch,
            feeding,
        ]
    )


@dataclass(frozen=True)
class Measurement:
    """One measured step time of one worker, as reported by a running job."""

    model: str
    accelerator: str
    features: ModelFeatures
    step_seconds: float
    batch_size: float = 1.0
    cpu_cores: float | None = None
    at_seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        """The measurement as a row of the table for `WorkerSpeed.fit`."""
        if not (np.isfinite(self.step_seconds) and self.step_seconds > 0):
            raise UsageError(
                f"a measured step time must be a positive number of seconds, not {self.step_seconds}"
            )
        row = {
            "model": self.model,
            "accelerator": self.accelerator,
            "flops": self.features.flops_per_sample,
            "params": float(self.features.parameters),
            "num_tensors": float(self.features.tensors),
            "batch_size": float(self.batch_size),
            "measured": 1.0 / self.step_seconds,
            "at_seconds": self.at_seconds,
        }
        if self.cpu_cores is not None:
            row["cpu_cores"] = float(self.cpu_cores)
        return row


@dataclass
class WorkerSpeed:
    """Predict a worker's step time, with a 90 % prediction interval.

    Args:
        half_life: seconds after which a measurement weighs half (`at_seconds` of the rows), None: equal weights.
        catalogue: the data sheets.

    After `fit` or `add`: `notes` lists the limits of the predictions.

    """

    half_life: float | None = None
    catalogue: Catalogue = field(default_factory=catalogue)
    rows: pd.DataFrame = field(default_factory=pd.DataFrame, init=False, repr=False)
    notes: list[str] = field(default_factory=list, init=False)
    _fits: dict[str, GroupConformalRegressor] = field(default_factory=dict, init=False, repr=False)
    _factors: dict[str, tuple[float, float, int]] = field(default_factory=dict, init=False, repr=False)
    _measured_work: dict[str, tuple[float, float]] = field(default_factory=dict, init=False, repr=False)
    _stale: bool = field(default=False, init=False, repr=False)

    def fit(self, rows: pd.DataFrame) -> Self:
        """Fit to a table as `tables.load` gives it: model, accelerator, features, `measured` steps/s of one worker."""
        if len(rows) == 0:
            raise NotEnoughData("no measurement of a worker's speed is known: give at least one")
        self.rows = rows.reset_index(drop=True)
        self._refit()
        return self

    def add(self, measurement: Measurement) -> Self:
        """Add one measurement, for example of a running job. The next prediction includes it."""
        self.catalogue.find(measurement.accelerator)
        self.rows = pd.concat([self.rows, pd.DataFrame([measurement.row()])], ignore_index=True)
        self._stale = True
        return self

    def step_seconds(
        self,
        features: ModelFeatures,
        accelerator: str,
        batch_size: float = 1.0,
        cpu_cores: float | None = None,
    ) -> Interval:
        """Step time of one worker alone, in s; `features.fingerprint` identifies a model that was measured before."""
        row: dict[str, Any] = {
            "model": features.fingerprint,
            "accelerator": accelerator,
            "flops": features.flops_per_sample,
            "params": features.parameters,
            "num_tensors": features.tensors,
            "batch_size": batch_size,
        }
        if cpu_cores is not None:
            row["cpu_cores"] = cpu_cores
        low, mean, high = self.predict(pd.DataFrame([row]))[0]
        return Interval(float(low), float(mean), float(high))

    def predict(self, rows: pd.DataFrame) -> Floats:
        """Give (n, 3) low, predicted and high step time in s for every row of model, accelerator and features."""
        if self._stale:
            self._refit()
        if not self._fits:
            raise NotEnoughData("no measurement of a worker's speed is known: call fit or add first")
        out = np.empty((len(rows), 3))
        names = [self.catalogue.find(name).name for name in rows["accelerator"]]
        for name in sorted(set(names)):
            chosen = np.array([n == name for n in names])
            part = rows[chosen]
            out[chosen] = self._remembered(name, part, self._predict(name, self._matrix(part)))
        return out

    # -- fitting ------------------------------------------------------------------------------------------------

    def _matrix(self, rows: pd.DataFrame) -> Floats:
        X = features_matrix(rows)
        known = features_matrix(self.rows)[:, FEEDING]
        X[:, FEEDING] = np.where(
            np.isfinite(X[:, FEEDING]) & (X[:, FEEDING] > 0), X[:, FEEDING], np.nanmean(known)
        )
        return np.nan_to_num(X)

    def _weights(self) -> Floats:
        """Weights: 1 per configuration, however often it was measured; recent measurements weigh more."""
        keys = [c for c in ("model", "accelerator", "batch_size", "cpu_cores") if c in self.rows]
        repeats = self.rows.groupby(keys, dropna=False)["model"].transform("size").to_numpy(float)
        if self.half_life is None or "at_seconds" not in self.rows:
            return np.asarray(1.0 / repeats)
        return np.asarray(np.maximum(self._recency() / repeats, 1e-6))

    def _recency(self) -> Floats:
        if self.half_life is None or "at_seconds" not in self.rows:
            return np.ones(len(self.rows))
        at = self.rows["at_seconds"].fillna(0.0).to_numpy(float)
        return np.asarray(0.5 ** ((at.max() - at) / self.half_life))

    def _refit(self) -> None:
        self._stale, self.notes, self._fits, self._factors, self._measured_work = False, [], {}, {}, {}
        rows, weights = self.rows, self._weights()
        rows["accelerator"] = [self.catalogue.find(name).name for name in rows["accelerator"]]
        X, y = self._matrix(rows), 1.0 / rows["measured"].to_numpy(float)
        models = rows["model"].astype(str).to_numpy()
        names = rows["accelerator"].to_numpy()
        known = {name: len(set(models[names == name])) for name in sorted(set(names))}
        # Accelerators with enough rows have their own fit. If there are none, the one with the most models has, and
        # among equals the one with the most kinds of steps.
        kinds = {name: len(np.unique(X[names == name, WORK])) for name in known}
        own = [n for n, k in known.items() if k >= OWN_FIT] or [
            max(known, key=lambda n: (known[n], kinds[n]))
        ]
        for name in own:
            at = names == name
            self._fits[name] = GroupConformalRegressor(_candidates(X[at], known[name])).fit(
                X[at], y[at], groups=models[at], sample_weight=weights[at]
            )
            if known[name] < FEW_FORMS:
                self._measured_work[name] = (float(X[at, WORK].min()), float(X[at, WORK].max()))
        for name in (n for n in known if n not in own):
            at = names == name
            prior, sigma = self._carried(name, X[at])
            ratio, w = np.log(y[at] / prior[:, 1]), weights[at]
            noise = max(self._noise(), 0.01)
            kept = sigma**2 / (sigma**2 + noise**2 / w.sum())  # shrink the factor to the data sheets' 1
            self._factors[name] = (
                float(kept * (w @ ratio) / w.sum()),
                sigma * np.sqrt(1 - kept),
                known[name],
            )
        for name, k in known.items():
            if k < FEW_GROUPS:
                self.notes.append(
                    f"{name} was measured with {k} model{'s' if k > 1 else ''} only: its interval is widened; "
                    f"measure {FEW_GROUPS - k} more for a sharper one"
                )

    def _noise(self) -> float:
        """Relative spread of the fits on unseen models, one standard deviation."""
        residuals = np.concatenate([f.residuals_ for f in self._fits.values()])
        weights = np.concatenate([f.group_weight_ for f in self._fits.values()])
        return float(np.sqrt(np.average(residuals**2, weights=weights))) if len(residuals) > 1 else 0.3

    def _interval(self, name: str, X: Floats) -> Floats:
        """(n, 3) of the accelerator's own fit, wider outside the measured work if few models were measured.

        A step is a constant and a part that grows with the work. The measurements determine that part only as far as
        they differ in work. With one batch size the fit assumes half: all or nothing of the step may grow with the
        work.
        """
        found = self._fits[name].predict_interval(X)
        if name in self._measured_work:
            least, most = self._measured_work[name]
            unknown = min(1.0, np.sqrt(2) * REPEAT_NOISE / max(np.log(most / least), 1e-9))
            ratio = X[:, WORK] / np.clip(X[:, WORK], least, most)
            half = (1 + ratio) / 2
            found[:, 0] *= (np.minimum(ratio, 1.0) / half) ** unknown
            found[:, 2] *= (np.maximum(ratio, 1.0) / half) ** unknown
        return np.asarray(found)

    def _carried(self, name: str, X: Floats) -> tuple[Floats, float]:
        """Predictions for an accelerator from the fits of the others, and the standard deviation of the transfer."""
        ups = {source: self.catalogue.speed_up(source, name) for source in self._fits}
        nearest = min(up.sigma for up in ups.values())
        sources = [s for s, up in ups.items() if up.sigma <= 1.5 * nearest]
        logs = [
            np.log(_scaled(self._fits[s], X, self._interval(s, X), ups[s].arithmetic, ups[s].overhead))
            for s in sources
        ]
        mean = np.mean(logs, axis=0)
        return np.exp(mean), float(np.mean([ups[s].sigma for s in sources]))

    def _predict(self, name: str, X: Floats) -> Floats:
        if name in self._fits:
            return self._interval(name, X)
        prior, sigma = self._carried(name, X)
        factor, left, seen = self._factors.get(name, (0.0, sigma, 0))
        if seen == 0:
            note = f"{name} was never measured: its speed is carried over from {', '.join(self._fits)} by data sheets"
            if note not in self.notes:
                self.notes.append(note)
        wide = little_data_factor(seen + 2) if seen else 1.0
        logs = np.log(prior)
        half = np.hypot(np.maximum(logs[:, 2] - logs[:, 1], logs[:, 1] - logs[:, 0]), Z90 * left) * wide
        mean = logs[:, 1] + factor
        return np.asarray(np.exp(np.column_stack([mean - half, mean, mean + half])))

    def _remembered(self, name: str, rows: pd.DataFrame, predicted: Floats) -> Floats:
        """Correct predictions for models that were measured on this accelerator with this batch size.

        The deviation of a model from the fit is a random effect with the variance of the out-of-fold residuals;
        its estimate is shrunk by the noise and the age of its measurements.
        """
        past = self.rows[(self.rows["accelerator"] == name).to_numpy()]
        recency = self._recency()[(self.rows["accelerator"] == name).to_numpy()]
        fitted: Floats | None = None
        for position, (model, batch) in enumerate(zip(rows["model"], rows["batch_size"], strict=True)):
            same = ((past["model"] == model) & (past["batch_size"] == batch)).to_numpy() & (model != "")
            if not same.any():
                continue
            if fitted is None:
                fitted = np.log(self._predict(name, self._matrix(past))[:, 1])
            w = recency[same]
            ratio = -np.log(past["measured"].to_numpy(float)[same]) - fitted[same]
            level = float(w @ ratio / w.sum())
            spread = np.sqrt(w @ (ratio - level) ** 2 / w.sum()) if len(w) > 2 else 0.0
            repeat = max(REPEAT_NOISE, float(spread))
            logs = np.log(predicted[position])
            half = max(logs[2] - logs[1], logs[1] - logs[0])
            between = max(half / Z90, 1e-3)
            kept = between**2 / (between**2 + repeat**2 / w.sum())
            mean = logs[1] + kept * level
            half = Z90 * np.hypot(between * np.sqrt(1 - kept), repeat)
            predicted[position] = np.exp([mean - half, mean, mean + half])
        return predicted


def _candidates(X: Floats, models: int) -> list[Any]:
    """Physically motivated forms, simplest first. A column that does not vary is not a term."""
    varies = [np.ptp(x) > 1e-9 * max(abs(x).max(), 1e-300) for x in X.T]
    if models < FEW_FORMS:
        return [RelativeNNLS(columns=(WORK,))]
    extra = [c for c in (BATCH, FEEDING) if varies[c]]
    base = [(WORK,), (WORK, TENSORS), (WORK, PARAMETERS), (WORK, TENSORS, PARAMETERS)]
    forms = [form for form in base if all(varies[c] for c in form[1:])]
    forms += [(*form, c) for c in extra for form in forms]
    if len(extra) == 2:
        forms += [(*form, *extra) for form in base if all(varies[c] for c in form[1:])]
    power = tuple(c for c in range(X.shape[1]) if varies[c])
    found: list[Any] = [RelativeNNLS(columns=form) for form in forms]
    return [*found, PowerLaw(columns=power)] if power else found


def _scaled(
    fit: GroupConformalRegressor, X: Floats, interval: Floats, arithmetic: float, overhead: float
) -> Floats:
    """The interval of a fit, transferred to another accelerator: each part has its own speed-up."""
    best = fit.estimator_
    if isinstance(best, RelativeNNLS):
        work = X[:, WORK] * best.coef_[WORK]
        share = np.clip(work / np.maximum(interval[:, 1], 1e-300), 0.0, 1.0)
    else:
        share = np.full(len(X), 0.5)
    return np.asarray(interval * (share / arithmetic + (1 - share) / overhead)[:, None])
