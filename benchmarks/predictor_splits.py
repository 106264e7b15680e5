"""Predictions farther away than one model: what is left out together is a quarter of the models, or all of a kind.

Leaving one model out of sixteen alike is interpolation. Here whole kinds are new: the largest models, another family,
another accelerator, larger clusters than any that was measured. So the page shows where the intervals still hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.predictor_peers import Published, checkpoint_regressors, same_feature_regressors
from shoal.sizing.accelerators import Catalogue
from shoal.sizing.predict import tables
from shoal.sizing.predict.cluster_speed import ClusterSpeed
from shoal.sizing.predict.durations import SnapshotTime
from shoal.sizing.predict.worker_speed import WorkerSpeed

__all__ = ["Split", "splits"]

DRAWS = 10
PART = 0.25

Parts = list[tuple[pd.DataFrame, pd.DataFrame]]
Fit = Callable[[pd.DataFrame, pd.DataFrame], pd.DataFrame]


class Split:
    """Pairs of (fitted rows, rows to predict) with the predictions of ours, and of a peer if one can."""

    def __init__(self, name: str, parts: Parts, ours: Fit, peers: dict[str, Published]) -> None:
        self.name = name
        self.rows = pd.concat([ours(train, test) for train, test in parts])
        self.peers: dict[str, float] = {}
        for label, peer in peers.items():
            found = pd.concat([_with(test, peer.fit(train).predict(test)) for train, test in parts])
            self.peers[label] = float(100 * (found["predicted"] / found["measured"] - 1).abs().mean())


def splits(
    data: Path, files: dict[str, str], models: list[Path], sheets: Catalogue
) -> dict[str, list[Split]]:
    """The splits of all three targets."""
    workers = tables.load(data / files["worker-speed"], "worker-speed", models, sheets)
    clusters = tables.load(
        data / files["cluster-speed"], "cluster-speed", [*models, data / files["worker-speed"]], sheets
    )
    snapshots = tables.load(data / files["checkpoint"], "checkpoint", models, sheets)
    families = _families(models)

    def worker(train: pd.DataFrame, test: pd.DataFrame) -> pd.DataFrame:
        return _with(test, 1 / WorkerSpeed(catalogue=sheets).fit(train).predict(test)[:, ::-1])

    def snapshot(train: pd.DataFrame, test: pd.DataFrame) -> pd.DataFrame:
        return _with(test, SnapshotTime().fit(train).predict(test))

    def cluster(train: pd.DataFrame, test: pd.DataFrame) -> pd.DataFrame:
        return _with(test, ClusterSpeed(sheets).fit(train, workers).predict(test))

    form = same_feature_regressors()
    peers = {"form alone": next(iter(form.values())), "ridge": form["ridge of logarithms, same features"]}
    size = {"linear": checkpoint_regressors()["linear, size"]}
    return {
        "Speed of one worker": [
            *(Split(name, parts, worker, peers) for name, parts in _by_model(workers, "flops", families)),
            Split("a new model on a new accelerator", _both_new(workers), worker, {}),
        ],
        "Speed of a cluster": [
            Split("another accelerator (its single workers known)", _each(clusters, "accelerator"), cluster, {}),
            Split("5 workers and more, fitted to at most 4", [_halved(clusters)], cluster, {}),
        ],
        "Time of a checkpoint": [
            Split(name, parts, snapshot, size) for name, parts in _by_model(snapshots, "params", families)
        ],
    }  # fmt: skip


def _by_model(rows: pd.DataFrame, size: str, families: pd.Series) -> Iterator[tuple[str, Parts]]:
    order = rows.groupby("model")[size].first().sort_values(kind="stable").index.to_numpy()
    many = max(1, round(PART * len(order)))
    rng = np.random.default_rng(0)
    drawn = [rng.choice(order, many, replace=False) for _ in range(DRAWS)]
    yield f"{many} models at random, {DRAWS} times", [_without(rows, names) for names in drawn]
    yield f"the {many} largest", [_without(rows, order[-many:])]
    yield f"the {many} smallest", [_without(rows, order[:many])]
    for family in sorted(families.unique()):
        names = families.index[families == family].to_numpy()
        if 2 < len(set(names) & set(order)) < len(order) - 2:
            yield f"the family {family}", [_without(rows, names)]


def _without(rows: pd.DataFrame, names: np.ndarray) -> tuple[pd.DataFrame, pd.DataFrame]:
    out = rows["model"].isin(names).to_numpy()
    return rows[~out], rows[out]


def _both_new(rows: pd.DataFrame) -> Parts:
    found = []
    for name in rows["model"].unique():
        for accelerator in rows["accelerator"].unique():
            model, here = (rows["model"] == name).to_numpy(), (rows["accelerator"] == accelerator).to_numpy()
            found.append((rows[~model & ~here], rows[model & here]))
    return found


def _each(rows: pd.DataFrame, column: str) -> Parts:
    return [(rows[(rows[column] != value).to_numpy()], rows[(rows[column] == value).to_numpy()])
            for value in sorted(rows[column].unique())]  # fmt: skip


def _halved(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    few = (rows["num_workers"] <= 4).to_numpy()
    return rows[few], rows[~few]


def _families(models: list[Path]) -> pd.Series:
    known = [pd.read_csv(path) for path in models]
    named = [table.set_index("model")["family"] for table in known if "family" in table]
    return pd.concat(named) if named else pd.Series(dtype=object)


def _with(rows: pd.DataFrame, predicted: np.ndarray) -> pd.DataFrame:
    return rows.assign(low=predicted[:, 0], predicted=predicted[:, 1], high=predicted[:, 2])
