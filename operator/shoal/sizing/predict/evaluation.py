"""Evaluate predictions on models, files or accelerators that were not fitted: `shoal predict evaluate`.

All three splits keep the rows of a model together; repeats are never split at random.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shoal.errors import NotEnoughData, UsageError
from shoal.sizing.accelerators import Catalogue
from shoal.sizing.availability import Floats
from shoal.sizing.predict import tables
from shoal.sizing.predict.cluster_speed import ClusterSpeed, alone_speeds
from shoal.sizing.predict.durations import SnapshotTime
from shoal.sizing.predict.worker_speed import WorkerSpeed

__all__ = ["LEAST_MODELS", "Evaluation", "Predictor", "evaluate", "folds_by_model", "leave_one_model_out"]


ENOUGH_MODELS = 6  # single workers of fewer models do not predict an unseen model's worker
LEAST_MODELS = 3  # fewer are not enough to predict another model
MOST_FOLDS = 40  # see group_folds


class Predictor(Protocol):
    """The interface of the evaluated predictors."""

    def fit(self, rows: pd.DataFrame) -> Predictor:
        """Fit to the rows of `tables.load`."""

    def notes_on(self, rows: pd.DataFrame, /) -> list[str]:
        """What a reader of the predictions for these rows has to know."""

    def predict(self, rows: pd.DataFrame) -> Floats:
        """Give (n, 3) low, predicted, high in the unit of `measured`."""


@dataclass
class _ClusterSteps:
    """Cluster speed.

    `given`: a worker's own speed is taken as measured, since the single workers of `single_models` models are too few
    to predict it. `held_out`: only models in the fitted rows, or `never_clustered`, may teach it.
    """

    catalogue: Catalogue
    workers: pd.DataFrame | None
    given: bool
    held_out: bool
    single_models: int
    never_clustered: set[str]
    elsewhere: bool = False

    def leave_out(self, accelerator: str) -> None:
        """Fit no single worker with this accelerator."""
        if self.workers is not None:
            others = self.workers[self.workers["accelerator"] != accelerator]
            self.workers = others if len(others) else None

    def fit(self, rows: pd.DataFrame) -> _ClusterSteps:
        workers = self.workers
        if workers is not None and self.held_out:
            workers = workers[workers["model"].isin(set(rows["model"]) | self.never_clustered)]
        self._cluster = ClusterSpeed(self.catalogue, self.elsewhere).fit(rows, workers)
        return self

    def notes_on(self, rows: pd.DataFrame) -> list[str]:
        return self._cluster.notes_on(rows)

    def predict(self, rows: pd.DataFrame) -> Floats:
        return self._cluster.predict(rows, alone_speeds(rows) if self.given else None)


@dataclass(frozen=True)
class Evaluation:
    """Measured and predicted, row by row, with the notes that a reader needs."""

    target: str
    rows: pd.DataFrame  # model, accelerator, measured, predicted, low, high
    notes: tuple[str, ...] = ()

    def summary(self, rows: pd.DataFrame | None = None) -> dict[str, Any]:
        """n, MAPE in %, MAE in the unit of the target, the part of rows inside their 90 % interval, and its width.

        The width is the median of high / low.
        """
        r = self.rows if rows is None else rows
        error = (r["predicted"] - r["measured"]).abs()
        inside = (r["low"] <= r["measured"]) & (r["measured"] <= r["high"])
        return {
            "n": len(r),
            "mape": float(100 * (error / r["measured"]).mean()),
            "mae": float(error.mean()),
            "coverage90": float(inside.mean()),
            "width90": float(np.median(r["high"] / r["low"])),
        }

    def by_accelerator(self) -> dict[str, dict[str, Any]]:
        """The same for every accelerator."""
        return {str(name): self.summary(part) for name, part in self.rows.groupby("accelerator")}

    def as_json(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        return {
            "target": self.target,
            **self.summary(),
            "by_accelerator": self.by_accelerator(),
            "notes": list(self.notes),
            "rows": self.rows.to_dict(orient="records"),
        }


def group_folds(groups: NDArray[Any], most: int, seed: int = 0) -> NDArray[np.intp]:
    """The fold of every row: one group per fold up to `most` groups, else groups dealt evenly.

    With more than three times `most` groups, half as many folds are enough.
    """
    names, index = np.unique(groups, return_inverse=True)
    if len(names) > 3 * most:
        most = (most + 1) // 2
    order = (
        np.random.default_rng(seed).permutation(len(names)) if len(names) > most else np.arange(len(names))
    )
    return np.asarray((order % most)[index])


def folds_by_model(rows: pd.DataFrame) -> Iterator[tuple[pd.DataFrame, pd.DataFrame]]:
    """Yield (training rows, rows of the models left out), one model at a time up to `MOST_FOLDS` models."""
    fold = group_folds(rows["model"].to_numpy(), MOST_FOLDS)
    for number in range(int(fold.max()) + 1):
        yield rows[fold != number], rows[fold == number]


def leave_one_model_out(predictor: Predictor, rows: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Predict every row by a fit without its model; gives the rows with `low`, `predicted`, `high`, and notes."""
    parts, notes = [], []
    for train, test in folds_by_model(rows):
        predictor.fit(train)
        parts.append(_with(test, predictor.predict(test)))
        notes = predictor.notes_on(test)
    if rows["model"].nunique() > MOST_FOLDS:
        notes = [
            *notes,
            f"more than {MOST_FOLDS} models: they are left out in {len(parts)} groups of whole models",
        ]
    return pd.concat(parts).sort_index(), notes


def evaluate(
    target: str,
    train: Path,
    models: Sequence[Path],
    catalogue: Catalogue,
    *,
    test: Path | None = None,
    new_accelerator: str | None = None,
) -> Evaluation:
    """Evaluate on a test file, on an accelerator that is not fitted, or else by leaving one model out at a time.

    A note says how many rows have a fitted model: they do not test prediction.
    """
    rows = tables.load(train, target, models, catalogue)
    _enough(rows, train)
    held = tables.load(test, target, models, catalogue) if test is not None else None
    left_out = test is None and new_accelerator is None
    predictor = _predictor(target, rows, held, models, catalogue, left_out)
    notes = [] if held is None else _remembered(set(rows["model"]) | _models_alone(predictor), held)
    if new_accelerator is not None:
        name = catalogue.find(new_accelerator).name
        rows, held = _split_by_accelerator(target, rows, name, train)
        if isinstance(predictor, _ClusterSteps):
            predictor.leave_out(name)
    predicted, more = _predict(predictor, rows, held)
    if isinstance(predictor, _ClusterSteps) and predictor.given:
        notes.append(_GIVEN.format(models=predictor.single_models))
        predicted = predicted[(predicted["num_workers"] > 1).to_numpy()]
    if "accelerator" not in predicted:
        predicted = predicted.assign(accelerator="any")
    columns = ["model", "accelerator", "measured", "predicted", "low", "high"]
    return Evaluation(
        target, predicted[columns].reset_index(drop=True), tuple(dict.fromkeys([*notes, *more]))
    )


_GIVEN = (
    "single workers of {models} models only are known, too few to predict an unseen model's worker: the rows of one "
    "worker are taken as given and not scored; to predict them too, give a file of worker speeds as another --models"
)


def _predictor(
    target: str,
    rows: pd.DataFrame,
    held: pd.DataFrame | None,
    models: Sequence[Path],
    catalogue: Catalogue,
    left_out: bool,
) -> Predictor:
    """The predictor of a target. Another file was measured on another day, so its intervals are wider."""
    elsewhere = held is not None
    if target == "cluster-speed":
        return _cluster(rows, rows if held is None else held, models, catalogue, left_out, elsewhere)
    return SnapshotTime(elsewhere) if target == "checkpoint" else WorkerSpeed(elsewhere, catalogue)


def _split_by_accelerator(
    target: str, rows: pd.DataFrame, name: str, path: Path
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of the other accelerators, and the rows of this one."""
    if target == "checkpoint":
        raise UsageError(
            "--new-accelerator is for speeds: the time of a checkpoint depends on no accelerator"
        )
    new = (rows["accelerator"] == name).to_numpy()
    if not new.any() or new.all():
        what = "no row" if not new.any() else "rows of no other accelerator than"
        raise UsageError(f"{path} has {what} {name}: --new-accelerator needs rows of it and of another one")
    _enough(rows[~new], path)
    return rows[~new], rows[new]


def _predict(
    predictor: Predictor, rows: pd.DataFrame, held: pd.DataFrame | None
) -> tuple[pd.DataFrame, list[str]]:
    if held is None:
        return leave_one_model_out(predictor, rows)
    predictor.fit(rows)
    return _with(held, predictor.predict(held)), predictor.notes_on(held)


def _cluster(
    rows: pd.DataFrame,
    scored: pd.DataFrame,
    models: Sequence[Path],
    catalogue: Catalogue,
    left_out: bool,
    elsewhere: bool,
) -> _ClusterSteps:
    """Find single workers among the --models files, and decide whether a worker's own speed is predicted."""
    found = []
    for path in models:
        frame = tables.read_csv(path)
        if tables.ACCELERATOR.within(frame) and (
            tables.STEP_SPEED.within(frame) or tables.STEP_TIME.within(frame)
        ):
            found.append(tables.load(path, "worker-speed", models, catalogue))
    workers = pd.concat(found, ignore_index=True) if found else None
    measured_alone = set(rows["model"][(rows["num_workers"] == 1).to_numpy()])
    worker_models = set() if workers is None else set(workers["model"])
    known = measured_alone | worker_models
    given = (
        len(known) <= ENOUGH_MODELS
        and alone_speeds(scored) is not None
        and bool((scored["num_workers"] > 1).any())
    )
    return _ClusterSteps(
        catalogue, workers, given, left_out, len(known), worker_models - set(rows["model"]), elsewhere
    )


def _models_alone(predictor: Predictor) -> set[str]:
    """The models whose single workers are fitted besides the rows."""
    if not isinstance(predictor, _ClusterSteps) or predictor.workers is None:
        return set()
    return set(predictor.workers["model"])


def _remembered(fitted: set[str], held: pd.DataFrame) -> list[str]:
    """A note on the test rows whose model is among the fitted ones."""
    known = int(held["model"].isin(fitted).sum())
    if not known:
        return []
    return [
        f"{known} of {len(held)} rows are of models that were fitted: they do not test prediction; "
        "test with models that neither --train nor a file of single workers has, or use --leave-one-model-out"
    ]


def _with(rows: pd.DataFrame, predicted: Floats) -> pd.DataFrame:
    return rows.assign(low=predicted[:, 0], predicted=predicted[:, 1], high=predicted[:, 2])


def _enough(rows: pd.DataFrame, path: Path) -> None:
    known = rows["model"].nunique()
    if known < LEAST_MODELS:
        raise NotEnoughData(
            f"{path} has measurements of {known} model{'s' if known != 1 else ''}: "
            f"give at least {LEAST_MODELS}, since a model is predicted from others"
        )
