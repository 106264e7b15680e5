"""The commands of the pages for a laptop run as they stand and print what is shown."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dev.paths import ROOT
from tests.unit.docs.pages import alike, block, code, read

pytestmark = pytest.mark.nightly


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy, since they leave files."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def run(folder: Path, script: str) -> str:
    """What it prints, with the programs of this environment."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder, env=env, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_shown(shown: str, printed: str, home: str) -> None:
    """In a checkout of a user it is another folder that is named. Lines of progress come with the time that passes."""
    pattern = alike(re.sub(rf"file:///home/me/{home}(?=/)", "file://HERE", shown))
    ended = "".join(line for line in printed.splitlines(keepends=True) if " processes, " not in line)
    told = re.sub(r"file://\S*?/(?=shoal-runs)", "file://HERE/", ended)
    assert re.fullmatch(pattern, told), f"the page is to show:\n{printed}"


def test_the_first_commands(checkout: Path) -> None:
    """docs/data.md shows two lines of what `check` says of the same file."""
    install, *commands = block("README.md", "make install").commands
    assert install.line == "make install"  # has been done where a test runs
    printed = run(checkout, "\n".join(each.line for each in commands))
    checked, verdict, ran = printed.partition("a cluster would take this job.\n")
    assert verdict
    assert_shown(block("README.md", "…\nEpoch").text, ran, "shoal/examples/quickstart")
    for line in block("docs/data.md", "ok    model").text.splitlines():
        assert re.search(f"^{alike(line)}$", checked, re.MULTILINE), checked


def test_an_own_file_is_checked_and_run(checkout: Path) -> None:
    """What docs/keras.md shows of it is a part of what docs/laptop.md shows."""
    check, ran, short = (
        block("docs/laptop.md", "cd examples/digits"),
        block("docs/laptop.md", "shoal-trainer run"),
        block("docs/keras.md", "cd examples/digits"),
    )
    here, *whole = [*check.commands, *ran.commands]
    assert [each.line for each in short.commands] == [here.line, *(each.line for each in whole)]
    for command, part in zip(whole, short.commands[1:], strict=True):
        printed = run(checkout, f"{here.line}\n{command.line}")
        assert_shown(command.shown, printed, "digits")
        assert_shown(f"{part.shown}…\n", printed, "digits")


def table() -> list[str]:
    """The commands of the examples' table that begin in a folder: they need no cluster."""
    return [span for span in code(read("examples/README.md")) if span.startswith("cd ")]


def test_the_table_is_read() -> None:
    assert len(table()) == 8


@pytest.mark.parametrize("line", table())
def test_each_example_ends_as_the_page_says(line: str, checkout: Path) -> None:
    printed = run(checkout, line)
    if "shoal-trainer run" in line:
        assert re.search(r"^Succeeded in \d+ s, ", printed, re.MULTILINE)
        assert "data: every sample was trained exactly once per completed epoch" in printed
