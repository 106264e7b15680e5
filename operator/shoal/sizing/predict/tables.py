"""Read and validate tables of measurements, with one name and unit for every column.

docs/sizing.md documents the columns. Every error names the file, the row and the column, and says what to change.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pandas as pd

from shoal.errors import UsageError
from shoal.sizing.accelerators import Catalogue
from shoal.sizing.availability import Floats

__all__ = ["COLUMNS", "TARGETS", "Column", "load", "measured_in", "read_csv"]


@dataclass(frozen=True)
class Column:
    """A column: its name, its aliases in files, its factor to our unit, and its meaning."""

    name: str
    aliases: tuple[str, ...]
    meaning: str
    factors: tuple[float, ...] = ()

    def within(self, frame: pd.DataFrame) -> tuple[str, float] | None:
        """The file's name for this column and the factor to our unit, or None."""
        for number, alias in enumerate((self.name, *self.aliases)):
            if alias in frame.columns:
                factor = self.factors[number - 1] if self.factors and number > 0 else 1.0
                return alias, factor
        return None


MODEL = Column("model", (), "name of the model: rows of one model are never split between training and test")
ACCELERATOR = Column("accelerator", ("gpu",), "name in the catalogue of accelerators")
FLOPS = Column(
    "flops",
    ("flops_per_sample", "gflops", "gflops_1e9"),
    "operations for one sample, by one convention for all models",
    (1.0, 1e9, 1e9),
)
PARAMETERS = Column("params", ("parameters",), "trainable parameters")
TENSORS = Column("num_tensors", ("tensors",), "tensors that are exchanged or saved")
BATCH = Column("batch_size", ("batch",), "samples in a worker's step; without it all rows count as equal")
CORES = Column("cpu_cores", ("cores", "cpus"), "CPU cores of a worker")
WORKERS = Column("num_workers", ("workers",), "workers in the cluster")
SERVERS = Column("num_ps", ("parameter_servers", "ps"), "parameter servers; without it 1")
SIZE = Column(
    "ckpt_mb", ("checkpoint_mb", "size_mb"), "size of the checkpoint in MB; without it params decide"
)
STEP_SPEED = Column(
    "steps_per_s",
    ("steps_per_s_plateau", "steps_per_s_mean", "steps_per_s_median", "steps_per_second"),
    "speed in steps/s; of a cluster the sum over its workers",
)
STEP_TIME = Column(
    "step_time_s", ("step_time_mean_s", "step_time_median_s", "step_seconds"), "seconds per step"
)
DURATION = Column("total_s", ("total_mean_s", "seconds", "checkpoint_s"), "seconds to save a checkpoint")
COLUMNS: tuple[Column, ...] = (
    MODEL,
    ACCELERATOR,
    FLOPS,
    PARAMETERS,
    TENSORS,
    BATCH,
    CORES,
    WORKERS,
    SERVERS,
    SIZE,
)
COLUMNS += (STEP_SPEED, STEP_TIME, DURATION)

# target of `evaluate` -> (required columns, optional columns)
TARGETS: dict[str, tuple[tuple[Column, ...], tuple[Column, ...]]] = {
    "worker-speed": ((MODEL, ACCELERATOR, FLOPS, PARAMETERS, TENSORS), (BATCH, CORES)),
    "cluster-speed": ((MODEL, ACCELERATOR, WORKERS, FLOPS, PARAMETERS, TENSORS), (SERVERS, BATCH, CORES)),
    "checkpoint": ((MODEL, PARAMETERS, TENSORS), (SIZE,)),
}
_OPTIONAL = (BATCH, CORES, SIZE)
_OPEN: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_UNREADABLE = (
    *(OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError),
    *(csv.Error, pd.errors.ParserError, pd.errors.EmptyDataError),
)


def read_csv(path: Path) -> pd.DataFrame:
    """Read a CSV file that has at least one row, and may be compressed, as its name then says."""
    try:
        with _OPEN.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:
            text = file.read()
        _check_form(text, path)
        frame = pd.read_csv(io.StringIO(text), index_col=False, skipinitialspace=True)
    except _UNREADABLE as error:
        raise UsageError(f"cannot read {path} as CSV with a header line: {error}") from error
    if frame.empty:
        raise UsageError(f"{path} has no rows: give measurements, one a line")
    frame.columns = frame.columns.str.strip()
    frame.attrs["path"] = str(path)
    return frame


def _check_form(text: str, path: Path) -> None:
    """Refuse what pandas would read as something else: it shifts columns, and renames or cuts what is odd."""
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UsageError(f"{path} line {line} has a NUL byte: save the file as plain UTF-8 text")
    rows = csv.reader(io.StringIO(text), skipinitialspace=True)
    header = [name.strip() for name in next(rows, [])]
    for name, number in Counter(filter(None, header)).items():
        if number > 1:
            raise UsageError(f"{path} line 1 names the column {name} {number} times: keep one of them")
    for row in rows:
        if len(row) > len(header):
            raise UsageError(
                f"{path} line {rows.line_num} has {len(row)} values for {len(header)} columns: remove what is too much "
                "(a comma at its end?), or name the column in line 1"
            )


def load(
    path: Path, target: str, models: Sequence[Path], catalogue: Catalogue, *, measured: bool = True
) -> pd.DataFrame:
    """Read measurements for a target with our names and units, joined with features by `model`.

    The frame has `model`, `line` (in the file), the feature columns, and `measured` (steps/s, or s for a checkpoint)
    if requested.
    """
    frame = read_csv(path)
    needed, optional = TARGETS[target]
    out = pd.DataFrame({"line": np.arange(2, len(frame) + 2)})
    out.attrs["path"] = str(path)
    if "model" not in frame.columns:
        raise UsageError(f"{path} has no column model: name the model of every row")
    out["model"] = _names(frame["model"], "model", path)
    tables = [read_csv(p) for p in models]
    for column in (*needed[1:], *optional):
        values = _column(column, frame, tables, out["model"], path)
        if values is not None:
            out[column.name] = values
        elif column in needed:
            names = " or ".join((column.name, *column.aliases))
            raise UsageError(
                f"{path} has no column {names}: add it, or join a file that has it with --models"
            )
    if ACCELERATOR.name in out:
        out[ACCELERATOR.name] = [catalogue.find(name).name for name in out[ACCELERATOR.name]]
    if SERVERS.name not in out:
        out[SERVERS.name] = 1.0
    if measured:
        out["measured"] = _measured(frame, target, path)
    return out


def _measured(frame: pd.DataFrame, target: str, path: Path) -> pd.Series:
    if target == "checkpoint":
        found = DURATION.within(frame)
        if found is None:
            raise UsageError(f"{path} has no column {DURATION.name}: give the seconds that a checkpoint took")
        return _positive(frame[found[0]], found[0], path)
    if (found := STEP_SPEED.within(frame)) is not None:
        return _positive(frame[found[0]], found[0], path)
    if (found := STEP_TIME.within(frame)) is not None:
        return 1.0 / _positive(frame[found[0]], found[0], path)
    raise UsageError(
        f"{path} has no column {STEP_SPEED.name} or {STEP_TIME.name}: give a measured speed in every row"
    )


def _column(
    column: Column, frame: pd.DataFrame, tables: Iterable[pd.DataFrame], model: pd.Series, path: Path
) -> pd.Series | None:
    found = column.within(frame)
    if found is not None:
        if column is ACCELERATOR:
            return _names(frame[found[0]], found[0], path)
        values = frame[found[0]]
        empty = values.isna()
        joined = _joined(column, tables, model[empty], path) if empty.any() else None
        if joined is None:
            return _positive(values, found[0], path) * found[1]
        return _positive(values.fillna(joined / found[1]), found[0], path) * found[1]
    return None if column is ACCELERATOR else _joined(column, tables, model, path)


def _joined(column: Column, tables: Iterable[pd.DataFrame], model: pd.Series, path: Path) -> pd.Series | None:
    """The column's values for every row's model, each from the first file of `tables` that has it.

    None: no table has the column, or it is optional and incomplete.
    """
    joined = pd.Series(np.nan, index=model.index, dtype=float)
    asked = []
    for table in tables:
        found = column.within(table)
        if found is None or "model" not in table.columns:
            continue
        origin = Path(table.attrs["path"])
        values = _positive(table[found[0]].dropna(), found[0], origin) * found[1]
        names = table.loc[values.index, "model"].astype(str).str.strip()
        by_model = values.groupby(names).agg(["first", "nunique"])
        if (by_model["nunique"] > 1).any():
            if column in _OPTIONAL:
                continue  # not a property of the model
            name = by_model.index[by_model["nunique"] > 1][0]
            raise UsageError(f"{origin} gives several {found[0]} for the model {name}: keep one")
        asked.append(str(origin))
        joined = joined.fillna(model.map(by_model["first"]))
        if not joined.isna().any():
            return joined
    if not asked or column in _OPTIONAL:
        return None
    raise UsageError(
        f"{' and '.join(asked)} {'has' if len(asked) == 1 else 'have'} no row for the model "
        f"{model[joined.isna()].iloc[0]} of {path} with a {column.name}: add it"
    )


def _names(values: pd.Series, name: str, path: Path) -> pd.Series:
    if values.isna().any():
        raise UsageError(f"{path} line {int(np.argmax(values.isna())) + 2}: {name} is empty: fill it in")
    return values.astype(str).str.strip()


def _positive(values: pd.Series, name: str, path: Path) -> pd.Series:
    numbers = pd.to_numeric(values, errors="coerce").astype(float)
    wrong = ~(np.isfinite(numbers) & (numbers > 0))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise UsageError(
            f"{path} line {int(values.index[row]) + 2}: {name} is {values.iloc[row]}; it must be a number greater "
            "than 0: correct it or remove the row"
        )
    return numbers


def measured_in(rows: pd.DataFrame) -> Floats:
    """(n,) what was measured, of a table that need not be from a file.

    Raises:
        UsageError: one is no number above 0: what is fitted are logarithms.
    """
    values = np.asarray(rows["measured"], dtype=np.float64)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if len(wrong):
        at = wrong[0]
        raise UsageError(f"row {rows.index[at]}: measured must be a number above 0, not {values[at]:g}")
    return values
