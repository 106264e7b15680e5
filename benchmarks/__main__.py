"""`make bench`: runs the benchmarks, prints their tables, writes `build/bench.json`.

`python -m benchmarks kernels wire` runs some of them; `--quick` measures less, as a smoke test; `--record` also
writes the tables and plots to docs/benchmarks.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console

from benchmarks.harness import Measurement, conditions, record, show, table, write

PAGES = Path("docs/benchmarks")
ORDER = (
    "kernels",
    "wire",
    "simulated_device",
    "real_compute",
    "strategy",
    "join",
    "scale",
    "links",
    "convergence",
    "operator",
)


def main() -> None:
    """Run the named benchmarks, or all."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*ORDER, []], help="default: all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--record", action="store_true", help=f"write the tables and plots to {PAGES}")
    parser.add_argument("--output", type=Path, default=Path("build/bench.json"))
    options = parser.parse_args()
    if options.record and options.quick:
        parser.error("--quick is a smoke test: its figures are not for a page")
    console = Console(width=140)
    everything: list[Measurement] = []
    began = time.monotonic()
    names = options.names or ORDER
    for number, name in enumerate(names, start=1):
        console.print(f"[bold]{number}/{len(names)} {name}[/]", highlight=False)
        module = importlib.import_module(f"benchmarks.{name}")
        measured = []
        for figure in module.measure(quick=options.quick):
            console.print(
                f"  {time.monotonic() - began:5.0f} s  {figure.name}: {figure.value:.4g} {figure.unit}",
                highlight=False,
            )
            measured.append(figure)
            write(options.output, [*everything, *measured])
        title = (module.__doc__ or name).splitlines()[0]
        show(title, measured, console)
        if options.record and name != "convergence":  # its page holds more than the table
            # A benchmark may have a table of its own, and more to say beside it.
            found = conditions(f"python -m benchmarks {name}") + getattr(module, "table", table)(measured)
            if hasattr(module, "text"):
                found += module.text(measured)
            record(PAGES / f"{name}.md", title.rstrip("."), found)
        if options.record and (plot := Path(f"build/{name}.png")).exists():
            shutil.copy(plot, PAGES)
        everything += measured
    missed = [m.name for m in everything if m.met is False]
    console.print(
        f"{len(everything)} figures in {options.output}; goals missed: {', '.join(missed) or 'none'}"
    )
    sys.exit(0)


if __name__ == "__main__":
    main()
