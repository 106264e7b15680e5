"""Single scenarios of the operator's benchmark, and the pages of what they measured.

`python -m benchmarks.operator reaction leaders` runs these, and keeps the figures of each in `build/operator`, with the
machine's load. `--record` writes their page of docs/benchmarks from all that are kept. All of them at once is
`python -m benchmarks operator`; on a machine that others use, too, one at a time is what gets a quiet moment. `peers`
stands apart, with a page of its own: it builds TFJob's and JobSet's controllers when it first runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import Measurement, conditions, table
from benchmarks.harness import record as put
from benchmarks.operator import SCENARIOS, beside_peers, one, planning
from benchmarks.operator.page import PLOT, beside, draw, text
from benchmarks.operator.systems import versions

KEPT = Path("build/operator")
PAGES = Path("docs/benchmarks")
OWN = ("planning", *SCENARIOS)
PEERS = "peers"


def run(name: str, quick: bool) -> None:
    """Run one scenario and keep its figures, if it was the whole of it."""
    rows = []
    began = os.getloadavg()[0]
    for row in _measured(name, quick):
        print(f"{name}: {row.name}: {row.value:.4g} {row.unit}", flush=True)
        rows.append(asdict(row))
    if quick:
        return
    load = [round(began, 1), round(os.getloadavg()[0], 1)]
    KEPT.mkdir(parents=True, exist_ok=True)
    kept = {"at": f"{datetime.now(UTC):%Y-%m-%d %H:%M}", "load": load, "rows": rows}
    (KEPT / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def _measured(name: str, quick: bool) -> Iterator[Measurement]:
    if name == PEERS:
        return beside_peers(quick)
    return planning.measure(quick) if name == "planning" else one(name, quick)


def record() -> None:
    """Write the operator's own page."""
    rows: list[Measurement] = []
    when = ["", "## When", "", "| scenario | at (UTC) | load before, after |", "|---|---|---|"]
    for name, kept in _kept(OWN):
        rows += _rows(kept)
        when.append(f"| {name} | {kept['at']} | {kept['load'][0]}, {kept['load'][1]} |")
    draw(rows)
    title = "Operator: reaction and scale on a real control plane with fake nodes, beside a bare client"
    command = "python -m benchmarks.operator " + " ".join(name for name, _ in _kept(OWN))
    put(PAGES / "operator.md", title, conditions(command) + table(rows) + text(rows) + "\n".join(when))
    shutil.copy(PLOT, PAGES)


def record_peers() -> None:
    """Write the page of the operator beside its peers."""
    for name, kept in _kept((PEERS,)):
        found = beside(_rows(kept), versions(), f"{kept['at']} UTC, load {kept['load'][0]} before it")
        title = "Operator beside TFJob and JobSet: the same jobs and losses on control planes alike, in turns"
        put(PAGES / "operator_peers.md", title, conditions(f"python -m benchmarks.operator {name}") + found)


def _kept(names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        if (path := KEPT / f"{name}.json").exists():
            yield name, json.loads(path.read_text())


def _rows(kept: dict[str, Any]) -> list[Measurement]:
    return [Measurement(**row) for row in kept["rows"]]


def main() -> None:
    """Run what was named."""
    parser = argparse.ArgumentParser(prog="benchmarks.operator", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*OWN, PEERS, []])
    parser.add_argument("--quick", action="store_true", help="briefly: the figures are not kept")
    parser.add_argument("--record", action="store_true", help=f"write the page in {PAGES} of what was kept")
    options = parser.parse_args()
    for name in options.names:
        run(name, options.quick)
    if options.record and options.names != [PEERS]:
        record()
    if options.record and PEERS in options.names:
        record_peers()


if __name__ == "__main__":
    main()
