"""Every command of `shoal`, `shoal-trainer`, `make`, `python -m dev` and the benchmarks on any page exists, with its
options."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from benchmarks.__main__ import ORDER as BENCHMARKS
from dev.cli import main as dev
from shoal.cli import main as shoal
from shoal_trainer.cli import main as trainer
from tests.unit.docs.pages import FENCES, PAGES, ROOT, read

PROGRAMS: dict[str, click.Group] = {"shoal": shoal, "shoal-trainer": trainer, "dev": dev}
TARGETS = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
OF_THESE = "shoal|shoal-trainer|make|kubectl|helm|python -m dev|python -m benchmarks[\\w.]*"
NAMED = re.compile(rf"`((?:[A-Z_]+=\S+ )*(?:{OF_THESE})(?: [^`…|]*)?)`")


def commands(page: str) -> Iterator[list[str]]:
    """In blocks of a shell, and in the text."""
    for language, block in FENCES.findall(page):
        for line in block.replace("\\\n", " ").splitlines() if language in {"sh", "console"} else ():
            if language == "sh" or line.startswith("$ "):
                for part in re.split(r"&&|;|\|", line.removeprefix("$ ")):
                    yield shlex.split(part, comments=True)
    for span in NAMED.findall(re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)):
        yield shlex.split(span)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    for line in commands(page.read_text(encoding="utf-8")):
        words = [word for word in line if not re.match(r"[A-Z_]+=", word)]
        if words[:2] == ["kubectl", "shoal"]:
            words = words[1:]
        if words[1:3] == ["-m", "dev"]:
            words = words[2:]
        if words[1:2] == ["-m"] and words[2].startswith("benchmarks"):
            check_benchmark(*words[2:])
        if len(words) < 2:
            continue
        if words[0] == "make":
            assert words[1] in TARGETS, words
        if words[0] in PROGRAMS:
            check(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_told_as_such_and_a_shell_reads_them(page: Path) -> None:
    """Else no test would look at them."""
    blocks = FENCES.findall(page.read_text(encoding="utf-8"))
    begins = re.compile(
        r"(\$ )?(kubectl|helm|shoal|shoal-trainer|make|python|aws|gcloud|eksctl|docker|sudo|kind)\b"
    )
    assert [block for kind, block in blocks if not kind and begins.match(block)] == []
    script = "\n".join(block for kind, block in blocks if kind == "sh")
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def check(words: list[str]) -> None:
    """Assert that the subcommand and its options exist."""
    command: click.Command = PROGRAMS[words[0]]
    rest = words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(click.Context(command), rest[0])
        assert found is not None, f"no such command: {words}"
        command, rest = found, rest[1:]
    known = {
        option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    used = {word.partition("=")[0] for word in rest if word.startswith("--")}
    assert used <= known | {"--help", "--version"}, f"no such option: {words}"


def check_benchmark(module: str, *words: str) -> None:
    """Assert that there is such a benchmark, whose source has these options."""
    path = ROOT / module.replace(".", "/")
    files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    for option in [word for word in words if word.startswith("--")]:
        assert f'"{option}"' in source, f"no such option: {module} {option}"
    if module == "benchmarks":
        names = [word for word in words if not word.startswith("--")]
        assert set(names) - {"NAME"} <= set(BENCHMARKS), names
