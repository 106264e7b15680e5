"""The common part of the benchmarks: figures, goals, tables and files.

Machines are shared and noisy, so a figure is a ratio to a reference measured in the same run, repeated, with the
median and the spread. A benchmark is a module with `def measure(quick: bool) -> Iterator[Measurement]`.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Measurement:
    """One figure. `value` is the median of the repeats, `low` and `high` their extremes.

    `against` describes the reference of the ratio; `goal` is the minimum (with `at_most`, the maximum) required, or
    None.
    """

    name: str
    value: float
    unit: str
    against: str
    goal: float | None = None
    at_most: bool = False
    low: float | None = None
    high: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def summary(
    name: str,
    values: Iterable[float],
    unit: str,
    against: str,
    goal: float | None = None,
    *,
    at_most: bool = False,
) -> Measurement:
    """A measurement from repeats."""
    repeats = sorted(values)
    return Measurement(
        name, statistics.median(repeats), unit, against, goal, at_most, repeats[0], repeats[-1]
    )


def seconds(function: Callable[[], object], *, repeats: int = 7) -> float:
    """The shortest time of a call, which is least affected by other processes."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


def anonymous_bytes(pid: int) -> int:
    """The anonymous memory of a process."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Anonymous"))


def show(title: str, measurements: Iterable[Measurement], console: Console) -> None:
    """Print one benchmark's table."""
    table = Table(title=title, title_justify="left")
    for column in ("what", "value", "spread", "against", "goal", ""):
        table.add_column(column, justify="right" if column in {"value", "goal"} else "left")
    for m in measurements:
        spread = "" if m.low is None or m.high is None else f"{m.low:.4g} to {m.high:.4g}"
        goal = "" if m.goal is None else f"{'≤' if m.at_most else '≥'} {m.goal:g}"
        mark = {None: "", True: "[green]met[/]", False: "[red]missed[/]"}[m.met]
        table.add_row(m.name, f"{m.value:.4g} {m.unit}", spread, m.against, goal, mark)
    console.print(table)


BEGIN, END = "<!-- measured -->", "<!-- end of what was measured -->"
"""Around what `--record` replaces on a page."""


def record(path: Path, title: str, found: str) -> None:
    """Put what was measured on its page. What people wrote before and after it stays."""
    text = path.read_text() if path.exists() else f"# {title}\n\n{BEGIN}{END}\n"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path}: put {BEGIN} and {END} around what is to be replaced")
    path.write_text(f"{before}{BEGIN}\n\n{found.strip()}\n\n{END}{after}")


def conditions(command: str) -> str:
    """The command, the date and the machine, as a page says them before its table."""
    load = "/".join(f"{one:.1f}" for one in os.getloadavg())
    return (
        f"`{command}` on {datetime.now(UTC):%Y-%m-%d}: {os.cpu_count()} cores ({_processor()}), shared with others;"
        f" load {load} at the end. The median of the repeats, and their spread.\n\n"
    )


def table(measurements: Iterable[Measurement]) -> str:
    """A row for each figure."""
    lines = ["| what | value | spread | against | goal | |", "|---|---|---|---|---|---|"]
    for m in measurements:
        spread = "" if m.low is None or m.high is None else f"{m.low:.3g} to {m.high:.3g}"
        goal = "" if m.goal is None else f"{'≤' if m.at_most else '≥'} {m.goal:g}"
        mark = {None: "", True: "met", False: "**missed**"}[m.met]
        lines.append(f"| {m.name} | {m.value:.3g} {m.unit} | {spread} | {m.against} | {goal} | {mark} |")
    return "\n".join(lines) + "\n"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def write(path: Path, measurements: Iterable[Measurement]) -> None:
    """Write `build/bench.json`: a list of {name, value, unit, against, goal, met, …}.

    Raises ValueError if two figures have the same name.
    """
    measurements = list(measurements)
    for name, count in Counter(m.name for m in measurements).items():
        if count > 1:
            raise ValueError(f"{count} figures are named {name!r}. Give each figure its own name.")
    rows = [
        {**{k: v for k, v in asdict(m).items() if v is not None}, "goal": m.goal, "met": m.met}
        for m in measurements
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")
