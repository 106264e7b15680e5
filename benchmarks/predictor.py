"""How good the speed predictor is, beside regressors that were published and others that get the same features.

`python -m benchmarks.predictor` replaces the tables of docs/benchmarks/predictor.md, in their order, and its plots.
What people wrote between them stays. All files are written at the end, each by a rename, so that an error leaves the
old page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.predictor_peers import (
    by_sheet,
    checkpoint_regressors,
    same_feature_regressors,
    worker_regressors,
)
from benchmarks.predictor_splits import Split, splits
from shoal.errors import UsageError
from shoal.sizing.accelerators import Catalogue
from shoal.sizing.predict import tables
from shoal.sizing.predict.cluster_speed import alone_speeds
from shoal.sizing.predict.evaluation import Evaluation, Predictor, evaluate, leave_one_model_out

__all__ = ["FILES", "write_report"]

# The files of a folder of measurements that the report reads.
FILES = {
    "worker-speed": "worker_speed.csv",
    "cluster-speed": "cluster_speed.csv",
    "checkpoint": "checkpoint_models.csv",
}
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "predictor.md"
INSTANCES = Path("tests/data/spotdnn/instances.csv")
_SPEED = "steps/s"
_MODELS = "models.csv"
GOALS = ("", "MAPE wanted", "MAPE %", "95 % interval", "models", "in 90 % interval", "95 % interval")
FARTHER = ("left out", "rows", "MAPE %", "95 % interval", "worst %", "in 90 % interval")
_New = dict[str, tuple[Evaluation, Mapping[str, float]]]


@dataclass(frozen=True)
class _Section:
    target: str
    title: str
    unit: str
    ours: Evaluation
    others: Mapping[str, pd.DataFrame]


def write_report(data: Path, out: Path, catalogue: Catalogue) -> list[Path]:
    """Write the page with its new tables, and its plots, to `out` from the folder `data`. Returns the files written."""
    missing = [name for name in FILES.values() if not (data / name).is_file()]
    if missing:
        raise UsageError(
            f"{data} has no {', '.join(missing)}: give a folder with {', '.join(FILES.values())}"
        )
    for target, name in FILES.items():  # fail before the long computation
        models = (
            [*_models(data), data / FILES["worker-speed"]] if target == "cluster-speed" else _models(data)
        )
        tables.load(data / name, target, models, catalogue)
    sections = [_worker(data, catalogue), _cluster(data, catalogue), _checkpoint(data, catalogue)]
    new = _new_accelerators(data, catalogue)
    farther = splits(data, FILES, _models(data), catalogue, INSTANCES)
    tables_of_page = [
        _goals(sections, new, farther),
        *map(_section, sections),
        _transfers(new),
        *map(_farther, farther.values()),
    ]
    contents = {PAGE.name: _filled(PAGE.read_text(), tables_of_page).encode()}
    contents |= {f"predictor-{section.target}.png": _plot(section) for section in sections}
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, content in contents.items():
        partial = out / f".{name}.partial"
        partial.write_bytes(content)
        written.append(partial.replace(out / name))
    return written


def _new_accelerators(data: Path, catalogue: Catalogue) -> _New:
    """Each accelerator, predicted from the rows of the others, and the errors of ratios of data sheets."""
    path = data / FILES["worker-speed"]
    rows = tables.load(path, "worker-speed", _models(data), catalogue)
    found: _New = {}
    for name in sorted(set(rows["accelerator"])):
        here = (rows["accelerator"] == name).to_numpy()
        peers = {
            label: float(
                100
                * np.abs(
                    by_sheet(rows[~here], rows[here], catalogue, peak) / rows[here]["measured"] - 1
                ).mean()
            )
            for label, peak in (("fp32 ratio", "fp32_tflops"), ("bandwidth ratio", "bandwidth_gbs"))
        }
        ours = evaluate("worker-speed", path, _models(data), catalogue, new_accelerator=name)
        found[name] = (ours, peers)
    return found


def _models(data: Path) -> list[Path]:
    return [data / _MODELS] if (data / _MODELS).is_file() else []


def _rows_of(predictor: Predictor, rows: pd.DataFrame) -> pd.DataFrame:
    found, _ = leave_one_model_out(predictor, rows)
    return found if "accelerator" in found else found.assign(accelerator="any")


def _worker(data: Path, catalogue: Catalogue) -> _Section:
    path = data / FILES["worker-speed"]
    rows = tables.load(path, "worker-speed", _models(data), catalogue)
    peers = same_feature_regressors() | worker_regressors(catalogue)
    others = {name: _rows_of(p, rows) for name, p in peers.items()}
    ours = evaluate("worker-speed", path, _models(data), catalogue)
    return _Section("worker-speed", "Speed of one worker", _SPEED, ours, others)


def _cluster(data: Path, catalogue: Catalogue) -> _Section:
    path = data / FILES["cluster-speed"]
    models = [*_models(data), data / FILES["worker-speed"]]
    ours = evaluate("cluster-speed", path, models, catalogue)
    rows = tables.load(path, "cluster-speed", models, catalogue)
    others = {}
    alone = alone_speeds(rows)
    if alone is not None:
        several = (rows["num_workers"] > 1).to_numpy()
        naive = rows.assign(predicted=alone * rows["num_workers"])[several]
        others["sum of the measured workers (CM-DARE), 2 workers and more"] = naive
        given = evaluate("cluster-speed", path, _models(data), catalogue)
        if given.notes:
            others["ours, with one worker's speed measured (2 workers and more)"] = given.rows
    return _Section("cluster-speed", "Speed of a cluster", _SPEED, ours, others)


def _checkpoint(data: Path, catalogue: Catalogue) -> _Section:
    path = data / FILES["checkpoint"]
    rows = tables.load(path, "checkpoint", _models(data), catalogue)
    others = {name: _rows_of(p, rows) for name, p in checkpoint_regressors().items()}
    return _Section(
        "checkpoint",
        "Time of a checkpoint",
        "s",
        evaluate("checkpoint", path, _models(data), catalogue),
        others,
    )


def _interval_of_mean(rows: pd.DataFrame, error: pd.Series) -> str:
    """The 95 % interval of the mean error, by drawing whole models: rows of one model are not independent."""
    by_model = [part.to_numpy() for _, part in error.groupby(rows["model"].to_numpy())]
    if len(by_model) == 1:
        return "one model"
    rng = np.random.default_rng(0)
    means = [
        np.concatenate([by_model[i] for i in rng.integers(0, len(by_model), len(by_model))]).mean()
        for _ in range(2000)
    ]
    low, high = np.quantile(means, (0.025, 0.975))
    return f"{low:.1f} to {high:.1f}"


def _line(name: str, rows: pd.DataFrame, accelerators: list[str], unit: str) -> list[object]:
    error = 100 * (rows["predicted"] / rows["measured"] - 1).abs()
    cells = [f"{error.mean():.1f}", _interval_of_mean(rows, error)]
    if len(accelerators) > 1:
        cells += [f"{error[(rows['accelerator'] == a).to_numpy()].mean():.1f}" for a in accelerators]
    if unit == _SPEED:
        cells.append(f"{100 * (rows['measured'] / rows['predicted'] - 1).abs().mean():.1f}")
    cells += [f"{error.max():.0f}", f"{(rows['predicted'] - rows['measured']).abs().mean():.3g}"]
    inside = (rows["low"] <= rows["measured"]) & (rows["measured"] <= rows["high"]) if "low" in rows else None
    known = inside is not None and rows["low"].notna().all()
    cells += (
        [f"{100 * inside.mean():.0f} %", _width(rows)] if inside is not None and known else ["none given", ""]
    )
    return [name, len(rows), *cells]


def _width(rows: pd.DataFrame) -> str:
    """The median interval, relative to the prediction."""
    low, high = (float(np.median(rows[end] / rows["predicted"] - 1)) for end in ("low", "high"))
    return f"{100 * low:.0f}/+{100 * high:.0f} %"


def _goals(sections: list[_Section], new: _New, farther: Mapping[str, list[Split]]) -> str:
    """What the project wants of the predictor, and how it is today."""
    ours = {section.target: section.ours.rows for section in sections}
    far = {split.name: split.rows for rows in farther.values() for split in rows}
    stores = [far[name] for name in far if re.search(r"store of (0\.9|1\.1) ", name)]
    servers = next(rows for name, rows in far.items() if name.startswith("two servers"))
    goals = [
        ("a worker of a model that was never measured", 6, ours["worker-speed"]),
        (
            "a worker on an accelerator that was never measured",
            12,
            pd.concat([found.rows for found, _ in new.values()]),
        ),
        ("clusters of two servers, from data of one (simulated)", 12, servers),
        ("a checkpoint of a model that was never measured", 9, ours["checkpoint"]),
        ("the same in a store that is 10 % faster or slower", 9, pd.concat(stores)),
    ]
    out = []
    for name, most, rows in goals:
        error = 100 * (rows["predicted"] / rows["measured"] - 1).abs()
        inside = float(((rows["low"] <= rows["measured"]) & (rows["measured"] <= rows["high"])).mean())
        models = rows["model"].nunique()
        low, high = _wilson(inside, models)
        share, between = f"{100 * inside:.0f} %", f"{100 * low:.0f} to {100 * high:.0f}"
        mean = [f"{error.mean():.1f}", _interval_of_mean(rows, error)]
        out.append([name, most, *mean, models, share, between, _width(rows), _honest(rows)])
    return _table([*GOALS, "width", "honest at"], out)


def _wilson(share: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """The interval of a share that was seen in n draws (Wilson, 1927)."""
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _section(s: _Section) -> str:
    """The table of one target, ours and its peers, and its notes."""
    accelerators = sorted(set(s.ours.rows["accelerator"]))
    heads = [f"MAPE {a} %" for a in accelerators] if len(accelerators) > 1 else []
    heads += ["MAPE of step time %"] if s.unit == _SPEED else []
    columns = ["", "rows", "MAPE %", "95 % interval", *heads, "worst %", f"MAE {s.unit}", "in 90 % interval"]
    every = {"**ours**": s.ours.rows, **s.others}
    lines = [_line(name, rows, accelerators, s.unit) for name, rows in every.items()]
    return "\n\n".join([_table([*columns, "width"], lines), *(f"Note: {note}." for note in s.ours.notes)])


def _transfers(new: _New) -> str:
    """The table of accelerators that were never measured."""
    lines = []
    for name, (found, peers) in new.items():
        total = found.summary()
        others = ", ".join(f"{peer} {error:.1f}" for peer, error in peers.items())
        share = f"{100 * total['coverage90']:.0f} %"
        lines.append([name, total["n"], f"{total['mape']:.1f}", share, _width(found.rows), others])
    return _table(["accelerator", "rows", "MAPE %", "in 90 % interval", "width", "peers"], lines)


def _farther(found: Sequence[Split]) -> str:
    """The table of predictions farther away than one model."""
    lines = []
    for split in found:
        r = split.rows
        error = 100 * (r["predicted"] / r["measured"] - 1).abs()
        inside = (r["low"] <= r["measured"]) & (r["measured"] <= r["high"])
        peers = ", ".join(f"{name} {value:.1f}" for name, value in split.peers.items())
        cells = [f"{error.mean():.1f}", _interval_of_mean(r, error), f"{error.max():.0f}"]
        share = f"{100 * inside.mean():.0f} %"
        lines.append([split.name, len(r), *cells, share, _width(r), _honest(r), peers])
    return _table([*FARTHER, "width", "honest at", "peers"], lines)


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *lines])


def _filled(page: str, tables: Sequence[str]) -> str:
    """The page with new tables, each with its notes, in place of those that it has."""
    parts = [part for part in page.rstrip("\n").split("\n\n") if not part.startswith("Note: ")]
    if sum(part.startswith("|") for part in parts) != len(tables):
        raise UsageError(f"{PAGE} must have {len(tables)} tables: they are replaced in their order")
    left = iter(tables)
    return "\n\n".join(next(left) if part.startswith("|") else part for part in parts) + "\n"


def _plot(section: _Section) -> bytes:
    from matplotlib.figure import Figure  # slow to import; a Figure has no global state

    rows = section.ours.rows
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    against, residuals, coverage = figure.subplots(1, 3)
    for name, part in rows.groupby("accelerator"):
        bars = np.abs(np.array([part["predicted"] - part["low"], part["high"] - part["predicted"]]))
        label = "all" if name == "any" else str(name)
        against.errorbar(part["measured"], part["predicted"], yerr=bars, fmt="o", ms=4, lw=0.8, label=label)
        residuals.plot(
            part["measured"], 100 * (part["predicted"] / part["measured"] - 1), "o", ms=4, label=label
        )
    ends = [rows[["measured", "low"]].min().min(), rows[["measured", "high"]].max().max()]
    against.plot(ends, ends, color="grey", lw=0.8)
    against.set(
        xscale="log", yscale="log", xlabel=f"measured ({section.unit})", ylabel=f"predicted ({section.unit})"
    )
    against.set_title("predicted, with 90 % interval")
    against.legend()
    residuals.axhline(0, color="grey", lw=0.8)
    residuals.set(xscale="log", xlabel=f"measured ({section.unit})", ylabel="predicted / measured - 1 (%)")
    residuals.set_title("residuals, models not seen")
    _coverage(coverage, rows)
    figure.suptitle(section.title)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=100, metadata={"Software": None})
    return stream.getvalue()


def _needed(rows: pd.DataFrame) -> np.ndarray:
    """(n,) by how much each row's 90 % interval would have to be multiplied (in logarithms) to end at the truth."""
    logs = np.log(rows[["low", "predicted", "high", "measured"]].astype(float))
    up = logs["measured"] >= logs["predicted"]
    half = np.where(up, logs["high"] - logs["predicted"], logs["predicted"] - logs["low"])
    return np.asarray(np.abs(logs["measured"] - logs["predicted"]) / np.maximum(half, 1e-12))


def _honest(rows: pd.DataFrame) -> str:
    """The multiple of the 90 % interval that has 90 % of the rows inside."""
    return f"{np.quantile(_needed(rows), 0.9):.2f}"


def _coverage(axes: Any, rows: pd.DataFrame) -> None:
    """Plot the share of rows within a multiple of the 90 % interval: at 1 it should be 0.9."""
    needed = np.sort(_needed(rows))
    axes.step(np.concatenate([[0], needed]), np.arange(len(needed) + 1) / len(needed), where="post")
    axes.axvline(1, color="grey", lw=0.8)
    axes.axhline(0.9, color="grey", lw=0.8)
    axes.set(
        xlabel="multiple of the 90 % interval", ylabel="part of rows inside", title="coverage", ylim=(0, 1.03)
    )


if __name__ == "__main__":
    from shoal.sizing.accelerators import catalogue

    write_report(Path("tests/data/cmdare"), Path("docs/benchmarks"), catalogue())
