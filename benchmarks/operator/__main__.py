"""Single scenarios of the operator's benchmark, and the page of what they measured.

`python -m benchmarks.operator reaction leaders` runs these, and keeps the figures of each in `build/operator`, with the
machine's load. `--record` writes the page of docs/benchmarks from all that are kept. All of them at once is
`python -m benchmarks operator`; on a machine that others use, too, one at a time is what gets a quiet moment.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import Measurement, conditions, table
from benchmarks.harness import record as put
from benchmarks.operator import SCENARIOS, one, planning
from benchmarks.operator.page import PLOT, draw, text

KEPT = Path("build/operator")
PAGES = Path("docs/benchmarks")
NAMES = ("planning", *SCENARIOS)


def run(name: str, quick: bool) -> None:
    """Run one scenario and keep its figures."""
    rows = []
    began = os.getloadavg()[0]
    for row in planning.measure(quick) if name == "planning" else one(name, quick):
        print(f"{name}: {row.name}: {row.value:.4g} {row.unit}", flush=True)
        rows.append(asdict(row))
    load = [round(began, 1), round(os.getloadavg()[0], 1)]
    KEPT.mkdir(parents=True, exist_ok=True)
    kept = {"at": f"{datetime.now(UTC):%Y-%m-%d %H:%M}", "load": load, "rows": rows}
    (KEPT / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def record() -> None:
    """Write the page."""
    rows: list[Measurement] = []
    when = ["", "## When", "", "| scenario | at (UTC) | load before, after |", "|---|---|---|"]
    for name, kept in _kept():
        rows += [Measurement(**row) for row in kept["rows"]]
        when.append(f"| {name} | {kept['at']} | {kept['load'][0]}, {kept['load'][1]} |")
    draw(rows)
    title = "Operator: reaction and scale on a real control plane with fake nodes, beside a bare client"
    command = "python -m benchmarks.operator " + " ".join(name for name, _ in _kept())
    put(PAGES / "operator.md", title, conditions(command) + table(rows) + text(rows) + "\n".join(when))
    shutil.copy(PLOT, PAGES)


def _kept() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in NAMES:
        if (path := KEPT / f"{name}.json").exists():
            yield name, json.loads(path.read_text())


def main() -> None:
    """Run what was named."""
    parser = argparse.ArgumentParser(prog="benchmarks.operator", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--record", action="store_true", help=f"write {PAGES}/operator.md of all that is kept"
    )
    options = parser.parse_args()
    for name in options.names:
        run(name, options.quick)
    if options.record:
        record()


if __name__ == "__main__":
    main()
