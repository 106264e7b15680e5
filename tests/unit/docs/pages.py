"""Reading the documentation: its pages, the tables in them, and the blocks of commands with what they print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *(ROOT / f"{each}/README.md" for each in ("dev", "examples", "charts/shoal")),
    ]
)
FENCES = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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
    return [block for kind, block in FENCES.findall(read(page)) if kind == language]


def lines(page: str) -> Iterator[list[str]]:
    """The commands of a page, split into words; those of a pipe one after another."""
    for block in blocks(page, "sh"):
        for line in block.splitlines():
            words = shlex.split(re.sub(r"(^|\s)#\s.*", "", line))
            yield from (list(part) for is_command, part in groupby(words, "|".__ne__) if is_command)


class Command(NamedTuple):
    """What a user copies, and what the page shows below it."""

    line: str
    shown: str = ""

    @property
    def words(self) -> list[str]:
        """As a shell splits it."""
        return shlex.split(self.line.replace("\\\n", ""), comments=True)


class Block(NamedTuple):
    """A fence with commands, or, where `kind` is empty, with what they print."""

    page: str
    kind: str
    text: str

    @property
    def commands(self) -> list[Command]:
        """A command may go on in further lines."""
        if self.kind == "sh":
            parts = re.findall(r"(?:.*\\\n|.*<<EOF\n(?:.*\n)*?(?=EOF$))*.*\n", self.text, re.MULTILINE)
            return [Command(part.rstrip("\n")) for part in parts]
        found = re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", self.text, re.MULTILINE)
        return [Command(line, shown) for line, shown in found]


def all_blocks() -> list[Block]:
    """Those of all pages: commands, and what they print."""
    pages = ((str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in PAGES)
    return [
        Block(page, kind, text)
        for page, whole in pages
        for kind, text in FENCES.findall(whole)
        if kind in {"sh", "console", ""}
    ]


def block(page: str, begins: str) -> Block:
    """The one that begins with these words. test_inventory.py reads these calls: the caller runs all of it."""
    [found] = [each for each in all_blocks() if each.page == page and begin(each).startswith(begins)]
    return found


def begin(each: Block) -> str:
    return each.text.removeprefix("$ ")


DIFFERS = re.compile(
    r"(?P<lines>^…\n)|(?P<rest>…)|(?P<id>(?<=/)[0-9a-f]{12}(?=/))|(?P<pod>(?<=-)[0-9a-z]{9,10}-[0-9a-z]{5}\b)"
    r"|(?P<age>\b(?:\d+[dhms])+\b)|(?P<number>\d[\d,.]*)|(?P<space> {2,})",
    re.MULTILINE,
)
ALIKE = {
    "lines": r"(?:.*\n)*", "rest": ".*", "id": "[0-9a-f]{12}", "pod": "[0-9a-z]{9,10}-[0-9a-z]{5}",
    "age": r"(?:\d+[dhms])+", "number": r"\d[\d,.]*", "space": " +",
}  # fmt: skip


def alike(shown: str, *exactly: str) -> str:
    """A pattern of what the page shows: measured numbers, ages, ids and the widths of columns may differ.

    Kinds of `DIFFERS` that are given are to be as shown.
    """
    pattern, end = "", 0
    for found in DIFFERS.finditer(shown):
        kind = str(found.lastgroup)
        pattern += re.escape(shown[end : found.start()])
        pattern += re.escape(found[0]) if kind in exactly else ALIKE[kind]
        end = found.end()
    return pattern + re.escape(shown[end:])
