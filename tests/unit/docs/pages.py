"""Reading the documentation: its pages and the tables in them."""

import re
import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *(ROOT / f"{each}/README.md" for each in ("dev", "examples", "charts/shoal")),
    ]
)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def section(page: str, heading: str) -> str:
    """The text under a second-level heading."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, f"no section {heading!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row whose first cell begins with code."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def code(cell: str) -> list[str]:
    """The code spans of a cell."""
    return re.findall(r"`([^`]*)`", cell)


def blocks(page: str, language: str) -> list[str]:
    """What the fences of a page contain, of one language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL)
    return [block for kind, block in found if kind == language]


def lines(page: str) -> Iterator[list[str]]:
    """The commands of a page, split into words; those of a pipe one after another."""
    for block in blocks(page, "sh"):
        for line in block.splitlines():
            words = shlex.split(re.sub(r"(^|\s)#\s.*", "", line))
            yield from (list(part) for is_command, part in groupby(words, "|".__ne__) if is_command)
