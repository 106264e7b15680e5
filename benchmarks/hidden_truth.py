"""What planning against the unknown costs: the real operator in scenarios of a hidden truth, in virtual time.

`python -m benchmarks.hidden_truth 0-49 62` plays the scenarios of these seeds (0 to 49 if none is named), prints a line
for each as it ends, and the table of `docs/benchmarks/hidden_truth.md`. Each is kept in `build/hidden_truth.jsonl`:
what was played already is not played again, unless the code is another one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.virtual.figures import NEAR, Figures, Summary, figures

__all__ = ["code", "kept", "seeds", "table"]

SEEDS = "0-49"
ROOT = Path(__file__).parent.parent
CODE = ("operator/shoal", "trainer_image/shoal_trainer", "tests/virtual")
"""What the figures follow from."""
DIGITS = 12
"""Of the code's digest, so many are kept."""


def seeds(words: Sequence[str]) -> list[int]:
    """The seeds of `0-3 7`: 0, 1, 2, 3 and 7.

    Raises:
        ValueError: a word is neither a number nor two of them with a hyphen between.

    """
    found = dict[int, None]()
    for word in words:
        first, _, last = word.partition("-")
        found.update(dict.fromkeys(range(int(first), int(last or first) + 1)))
    return list(found)


def code() -> str:
    """A digest of the code that is played."""
    digest = sha256()
    for path in sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:DIGITS]


def kept(lines: Iterable[str], of: str) -> dict[int, Figures]:
    """The figures by seed that this code had."""
    rows = [json.loads(line) for line in lines]
    return {row["seed"]: _figures(row) for row in rows if row.pop("code") == of}


def table(every: Sequence[Figures]) -> str:
    """The table of the log."""
    whole = Summary(every)
    rows = [
        ("cost of all nodes, over the best fixed choice in hindsight, median", f"{whole.over_hindsight:.2f}"),
        (
            "cost in all, over uniform progress that knows every speed from the start",
            f"{whole.over_uniform:.2f}",
        ),
        (
            "jobs later than their deadline, of those that were promised 95 %",
            f"{whole.late} of {whole.promised}",
        ),
        (
            f"jobs whose finish, as predicted at half of the work, was within {100 * NEAR:.0f} % of the true one",
            f"{100 * whole.near:.0f} %",
        ),
        ("scenarios in which an invariant was broken", str(sum(bool(each.broken) for each in every))),
        (
            "changes of a plan that went back within a minute",
            f"{sum(each.back for each in every)} of {sum(each.changes for each in every)}",
        ),
    ]
    lines = [f"| | {len(every)} seeds |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)]
    return "\n".join(lines)


def _figures(row: dict[str, Any]) -> Figures:
    row |= {name: tuple(row[name]) for name in ("errors", "broken")}
    return Figures(**row)


def _line(each: Figures, number: int, of: int, took: float) -> str:
    near = sum(abs(error) <= NEAR for error in each.errors)
    broken = f"; broken: {'; '.join(each.broken)}" if each.broken else ""
    return (
        f"{number}/{of} seed {each.seed}, {each.jobs} job{'s' if each.jobs > 1 else ''}: {each.over_hindsight:.2f} of "
        f"hindsight, {each.over_uniform:.2f} of uniform progress, {each.late} of {each.promised} late, {near} of "
        f"{len(each.errors)} within {NEAR:.0%}; {took:.0f} s{broken}"
    )


def main() -> None:
    """Play, and tell."""
    parser = argparse.ArgumentParser(prog="benchmarks.hidden_truth", description=__doc__)
    parser.add_argument("seeds", nargs="*", default=[SEEDS], help=f"such as 0-9 62; default: {SEEDS}")
    parser.add_argument("--output", type=Path, default=Path("build/hidden_truth.jsonl"))
    options = parser.parse_args()
    try:
        wanted = seeds(options.seeds)
    except ValueError as error:
        parser.error(f"seeds are numbers, or two with a hyphen between: {error}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    version = code()
    before = options.output.read_text().splitlines() if options.output.exists() else []
    found = {seed: each for seed, each in kept(before, version).items() if seed in wanted}
    for number, seed in enumerate(wanted, start=1):
        began = time.monotonic()
        if seed not in found:
            found[seed] = figures(seed)
            with options.output.open("a") as file:
                file.write(json.dumps({"code": version, **asdict(found[seed])}) + "\n")
        print(_line(found[seed], number, len(wanted), time.monotonic() - began), flush=True)
    print(f"\n{table([found[seed] for seed in wanted])}")


if __name__ == "__main__":
    main()
