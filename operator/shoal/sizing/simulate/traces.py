"""Read revocation traces: when spot nodes were added and removed, or how many there were.

The form is recognized by the content of the file (docs/simulate.md has examples):

- events, CSV `time,add|remove,node`: without a header the time is in milliseconds, as Bamboo records it
  (Thorpe et al., "Bamboo: Making Preemptible Instances Resilient for Affordable Training of Large DNNs", NSDI 2023);
- counts, CSV with a header such as `seconds,nodes`;
- counts at equal intervals, JSON `{"metadata": {"gap_seconds": 600}, "data": [4, 3, …]}`, as SkyPilot records them.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.sizing.availability import Floats

__all__ = ["Trace", "read_trace"]

UNITS = dict.fromkeys(("ms", "milliseconds", "timestamp_ms"), 1e-3)
UNITS |= dict.fromkeys(("s", "seconds", "time", "t"), 1.0)
COUNTS = ("nodes", "capacity", "available", "count", "instances")
ADDED = re.compile(r"add(ed)?|launch(ed)?|start")
REMOVED = re.compile(r"removed?|preempt(ed)?|revoked?|terminated?|stop")

MOST_BINS = 5_000_000
"""Ten years of minutes: what is longer has its times in another unit."""
MOST_NODES = 100_000
"""Ten clusters of the largest size: a greater number counts something else."""
GAP = 100
"""A trace of counts has a gap where a row is so many times later than rows are in the middle."""


@dataclass(frozen=True)
class Trace:
    """Lifetimes of nodes: node i exists from `begins[i]` to `ends[i]` (s, infinite: beyond the trace's `span`).

    `note`: what is odd about it.
    """

    name: str
    begins: Floats
    ends: Floats
    span: float
    note: str = ""

    def bins(self, step: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The nodes at the end of each interval of `step` s, and the losses within it of nodes present at its start.

        The trace is repeated: at the wrap-around it loses the difference in the number of nodes.
        """
        number = max(1, math.ceil(self.span / step - 1e-9))
        if number > MOST_BINS:
            raise UsageError(
                f"the trace {self.name} spans {self.span / 86400:,.0f} days, which is {number:,} intervals of "
                f"{step:g} s: is a time in ms where it should be in seconds?"
            )
        edges = step * np.arange(number + 1)
        begun = np.searchsorted(np.sort(self.begins), edges, side="right")
        gone = np.searchsorted(np.sort(self.ends), edges, side="right")
        there = (begun - gone)[1:]
        # Interval i is (i step, (i + 1) step]. Nodes that were added and removed within one are ignored.
        first = np.ceil(self.begins / step - 1e-9).astype(np.int64) - 1
        last = np.ceil(np.where(np.isfinite(self.ends), self.ends, -step) / step - 1e-9).astype(np.int64) - 1
        at = last[(first < last) & (last >= 0) & (last < number)]
        lost = np.bincount(at, minlength=number)[:number]
        if number > 1:
            lost[0] = max(0, there[-1] - there[0])
            before = np.roll(there, 1)
            lost = np.clip(lost, np.maximum(before - there, 0), before)
        else:
            lost[:] = 0
        return there.astype(np.int64), lost.astype(np.int64)


def read_trace(path: Path) -> Trace:
    """Read a trace."""
    trace = _read(path)
    if not trace.span > 0:
        raise UsageError(f"{path} spans no time, so it has neither losses nor none: give a longer trace")
    return trace


def _read(path: Path) -> Trace:
    try:
        text = path.read_text(encoding="utf-8-sig")  # as Excel writes it
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the trace {path}: {error}") from error
    if not text.strip():
        raise UsageError(f"{path} is empty: give a trace")
    if text.lstrip()[0] in "{[":
        return _counts_json(path, text)
    rows = [
        (number, [cell.strip() for cell in row])
        for number, row in enumerate(csv.reader(text.splitlines()), start=1)
        if any(cell.strip() for cell in row) and not row[0].lstrip().startswith("#")
    ]
    if not rows:
        raise UsageError(f"{path} has no rows: give a trace")
    header = [cell.lower() for cell in rows[0][1]]
    numeric = _is_number(header[0])
    events = any(ADDED.fullmatch(cell) or REMOVED.fullmatch(cell) for cell in header)
    if events or (not numeric and len(header) >= 3):
        unit = 1e-3 if numeric else _unit(header[0], path)
        return _events(path, rows if numeric else rows[1:], unit)
    if numeric:
        raise UsageError(
            f"{path} line {rows[0][0]}: a trace of counts needs a header such as seconds,nodes; one of events has "
            "lines such as 60000,add,node1"
        )
    column = next((header.index(name) for name in COUNTS if name in header), None)
    if column is None:
        raise UsageError(
            f"{path} has no column {', '.join(COUNTS[:-1])} or {COUNTS[-1]}: rename the column of the nodes"
        )
    unit = _unit(header[0], path)
    times = [_number(row, 0, path, number) * unit for number, row in rows[1:]]
    counts = [_number(row, column, path, number) for number, row in rows[1:]]
    return _from_counts(path, times, counts, None)


def _unit(name: str, path: Path) -> float:
    if name not in UNITS:
        raise UsageError(f"{path}: the first column must be ms or seconds, not {name!r}")
    return UNITS[name]


def _events(path: Path, rows: Iterable[tuple[int, Sequence[str]]], unit: float) -> Trace:
    events = []
    for number, row in rows:
        if len(row) < 3:
            raise UsageError(f"{path} line {number}: write time,add|remove,node, not {','.join(row)!r}")
        action = row[1].lower()
        added = bool(ADDED.fullmatch(action))
        if not (added or REMOVED.fullmatch(action)):
            raise UsageError(f"{path} line {number}: the event must be add or remove, not {row[1]!r}")
        events.append((_number(row, 0, path, number) * unit, added, row[2]))
    if not events:
        raise UsageError(f"{path} has no events: give a trace")
    events.sort(key=lambda event: event[0])
    start = events[0][0]
    alive: dict[str, float] = {}
    seen: set[str] = set()
    begins, ends = [], []
    for time, added, node in events:
        if added:
            alive.setdefault(node, time - start)
        elif node in alive:
            begins.append(alive.pop(node))
            ends.append(time - start)
        elif node not in seen:  # it existed before the trace began
            begins.append(0.0)
            ends.append(time - start)
        seen.add(node)
    begins += alive.values()
    ends += [math.inf] * len(alive)
    return Trace(path.name, np.array(begins), np.array(ends), events[-1][0] - start)


def _counts_json(path: Path, text: str) -> Trace:
    try:
        data: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} line {error.lineno} is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deeply: give a trace") from error
    counts = data.get("data") if isinstance(data, dict) else None
    meta = data.get("metadata", data) if isinstance(data, dict) else {}
    gap = meta.get("gap_seconds") if isinstance(meta, dict) else None
    good = isinstance(counts, list) and counts and all(isinstance(n, int | float) for n in counts)
    if not good or not isinstance(gap, int | float) or not 0 < gap < math.inf:
        raise UsageError(
            f'{path} must be {{"metadata": {{"gap_seconds": 600}}, "data": [4, 3, …]}} with the nodes at each time: '
            "correct it"
        )
    assert isinstance(counts, list)
    return _from_counts(path, [gap * i for i in range(len(counts))], counts, gap * len(counts))


def _from_counts(path: Path, times: Sequence[float], counts: Sequence[float], span: float | None) -> Trace:
    """Lifetimes of nodes from their number: first in, first out."""
    if not times:
        raise UsageError(f"{path} has a header and no rows: give a trace")
    if not all(0 <= n <= MOST_NODES and float(n).is_integer() for n in counts):
        raise UsageError(f"{path}: the number of nodes must be a whole number from 0 to {MOST_NODES:,}")
    order = sorted(range(len(times)), key=lambda i: times[i])
    start = times[order[0]]
    alive: deque[float] = deque()
    begins, ends = [], []
    for i in order:
        now = times[i] - start
        while len(alive) < counts[i]:
            alive.append(now)
        while len(alive) > counts[i]:
            begins.append(alive.popleft())
            ends.append(now)
    begins += alive
    ends += [math.inf] * len(alive)
    last = times[order[-1]] - start
    return Trace(
        path.name,
        np.array(begins),
        np.array(ends),
        last if span is None else span,
        _gaps(path, np.sort(times)),
    )


def _gaps(path: Path, times: Floats) -> str:
    """A note where nothing was recorded for long."""
    apart = np.diff(times)
    long = apart[apart > GAP * np.median(apart)] if len(apart) > 1 else apart[:0]
    if not len(long):
        return ""
    return (
        f"{path.name} has {len(long)} gap{'s' if len(long) > 1 else ''} of up to {long.max() / 3600:,.1f} h without a "
        "row: the number of nodes is taken to be the same for so long; split the trace there if nothing was recorded."
    )


def _number(row: Sequence[str], column: int, path: Path, line: int) -> float:
    text = row[column] if column < len(row) else ""
    if not _is_number(text):
        raise UsageError(f"{path} line {line}: {text!r} is not a number: correct it")
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"{path} line {line}: {text} must be a number of 0 or more")
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
