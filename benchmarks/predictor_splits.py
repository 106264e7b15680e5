"""Predictions farther away than one model: what is left out together is a quarter of the models, or all of a kind.

Leaving one model out of sixteen alike is interpolation. Here whole kinds are new: the largest models, another family,
another accelerator, larger clusters than any that was measured, a second server, another store. So the page shows where
the intervals still hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.predictor_peers import (
    Published,
    SumOfWorkers,
    by_sheet,
    checkpoint_regressors,
    cluster_regressors,
    same_feature_regressors,
)
from benchmarks.predictor_servers import simulated
from shoal.sizing.accelerators import Catalogue
from shoal.sizing.predict import tables
from shoal.sizing.predict.cluster_speed import ClusterSpeed
from shoal.sizing.predict.durations import SnapshotTime
from shoal.sizing.predict.evaluation import folds_by_model
from shoal.sizing.predict.worker_speed import WorkerSpeed
from shoal.sizing.speed import priors
from shoal.sizing.speed.measurements import Model
from shoal.sizing.speed.worker import Configuration, Observation, WorkerModel

__all__ = ["Split", "splits"]

DRAWS = 10
PART = 0.25
SIMULATED = 5  # draws of how tensors are dealt to two servers
SHIFTS = (0.8, 0.9, 1.1, 1.25)  # of another store: all its times together

# spotDNN's instances by their index: kind of accelerator. All ran ResNet-110 for CIFAR: 0.51 GFLOPs forward.
SPOTDNN = {0: "V100", 1: "T4", 2: "M60", 3: "M60", 4: "K80"}
RESNET110 = Model("resnet110", 0.51e9, 1_730_000, 329)

Parts = list[tuple[pd.DataFrame, pd.DataFrame]]
Fit = Callable[[pd.DataFrame, pd.DataFrame], pd.DataFrame]
Peers = Mapping[str, Published | SumOfWorkers]


class Split:
    """Pairs of (fitted rows, rows to predict) with the predictions of ours, and of a peer if one can."""

    def __init__(self, name: str, parts: Parts, ours: Fit, peers: Peers) -> None:
        self.name = name
        self.rows = pd.concat([ours(train, test) for train, test in parts])
        self.peers: dict[str, float] = {}
        for label, peer in peers.items():
            found = pd.concat([_with(test, peer.fit(train).predict(test)) for train, test in parts])
            self.peers[label] = float(100 * (found["predicted"] / found["measured"] - 1).abs().mean())


def splits(
    data: Path, files: dict[str, str], models: list[Path], sheets: Catalogue, instances: Path
) -> dict[str, list[Split]]:
    """The splits of all three targets."""
    workers = tables.load(data / files["worker-speed"], "worker-speed", models, sheets)
    clusters = tables.load(
        data / files["cluster-speed"], "cluster-speed", [*models, data / files["worker-speed"]], sheets
    )
    snapshots = tables.load(data / files["checkpoint"], "checkpoint", models, sheets)
    families = _families(models)

    def worker(train: pd.DataFrame, test: pd.DataFrame) -> pd.DataFrame:
        return _with(test, WorkerSpeed(catalogue=sheets).fit(train).predict(test))

    def snapshot(train: pd.DataFrame, test: pd.DataFrame) -> pd.DataFrame:
        return _with(test, SnapshotTime().fit(train).predict(test))

    def cluster(train: pd.DataFrame, test: pd.DataFrame) -> pd.DataFrame:
        return _with(test, ClusterSpeed(sheets).fit(train, workers).predict(test))

    def later(train: pd.DataFrame, test: pd.DataFrame) -> pd.DataFrame:
        return _with(test, ClusterSpeed(sheets, elsewhere=True).fit(train, workers).predict(test))

    def store(train: pd.DataFrame, test: pd.DataFrame) -> pd.DataFrame:
        return _with(test, SnapshotTime(elsewhere=True).fit(train).predict(test))

    form = same_feature_regressors()
    peers = {"form alone": next(iter(form.values())), "ridge": form["ridge of logarithms, same features"]}
    size = {"linear": checkpoint_regressors()["linear, size"]}
    many = cluster_regressors(workers)
    add = {"sum of workers": many["sum of workers"]}
    singles = workers[workers["model"].isin(clusters["model"])]
    return {
        "Speed of one worker": [
            *(Split(name, parts, worker, peers) for name, parts in _by_model(workers, "flops", families)),
            Split("a new model on a new accelerator", _both_new(workers), worker, {}),
            _Instances(instances, sheets),
        ],
        "Speed of a cluster": [
            Split("another accelerator (its single workers known)", _each(clusters, "accelerator"), cluster, add),
            *(
                Split(f"{most + 1} workers and more, fitted to at most {most}", [_few(clusters, most)], cluster, many)
                for most in (2, 3, 4)
            ),
            Split("two servers of another day, fitted to one (simulated)", _second(singles), later, many),
        ],
        "Time of a checkpoint": [
            *(Split(name, parts, snapshot, size) for name, parts in _by_model(snapshots, "params", families)),
            *(
                Split(f"one model, in a store of {shift:g} times the seconds", _shifted(snapshots, shift), store, size)
                for shift in SHIFTS
            ),
        ],
    }  # fmt: skip


class _Instances(Split):
    """One model on an accelerator that was never measured, from spotDNN's instances of the other kinds.

    The instances have one to eight accelerators, and no choice of the form or of a prior has seen them.
    """

    def __init__(self, path: Path, sheets: Catalogue) -> None:
        self.name = "spotDNN: ResNet-110 on another accelerator"
        table = pd.read_csv(path)
        kinds = [SPOTDNN[index] for index in table["index"]]
        seconds = table["comp_time_s_per_paper_eq6_7"].to_numpy(float)
        used = [
            Configuration(RESNET110, kind, float(batch * devices), int(devices))
            for kind, batch, devices in zip(kinds, table["batch_per_gpu"], table["gpus"], strict=True)
        ]
        measured = [Observation(one, float(np.log(t)), 0.0) for one, t in zip(used, seconds, strict=True)]
        found, of = [], {"fp32 ratio": "fp32_tflops", "bandwidth ratio": "bandwidth_gbs"}
        each = pd.DataFrame({"model": "resnet110", "accelerator": kinds})
        images = np.array([one.batch / one.devices for one in used]) / seconds
        each["measured"] = images  # of one accelerator: peers know no loss over several
        errors: dict[str, list[float]] = {label: [] for label in of}
        for kind in dict.fromkeys(kinds):
            here = np.array(kinds) == kind
            model = WorkerModel([o for o, out in zip(measured, here, strict=True) if not out], sheets)
            mean, sigma = model.predict([one for one, out in zip(used, here, strict=True) if out], again=True)
            rows = each[here].assign(measured=1 / seconds[here])
            half = priors.Z90 * sigma
            found.append(_with(rows, np.exp(np.column_stack([-mean - half, -mean, -mean + half]))))
            for label, peak in of.items():
                guess = by_sheet(each[~here], each[here], sheets, peak)
                errors[label] += list(100 * np.abs(guess / images[here] - 1))
        self.rows = pd.concat(found)
        self.peers = {label: float(np.mean(e)) for label, e in errors.items()}


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


def _few(rows: pd.DataFrame, most: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    few = (rows["num_workers"] <= most).to_numpy()
    return rows[few], rows[~few]


def _second(singles: pd.DataFrame) -> Parts:
    found = []
    for seed in range(SIMULATED):
        rows = simulated(singles, range(1, 9), seed)
        one = (rows["num_ps"] == 1).to_numpy()
        found.append((rows[one], rows[~one]))
    return found


def _shifted(rows: pd.DataFrame, shift: float) -> Parts:
    return [(train, test.assign(measured=shift * test["measured"])) for train, test in folds_by_model(rows)]


def _families(models: list[Path]) -> pd.Series:
    known = [pd.read_csv(path) for path in models]
    named = [table.set_index("model")["family"] for table in known if "family" in table]
    return pd.concat(named) if named else pd.Series(dtype=object)


def _with(rows: pd.DataFrame, predicted: np.ndarray) -> pd.DataFrame:
    return rows.assign(low=predicted[:, 0], predicted=predicted[:, 1], high=predicted[:, 2])
