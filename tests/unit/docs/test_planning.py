"""The pages about plans and speeds show what their commands print today."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.cli import main
from tests.unit.docs.pages import ROOT, Block, Command, alike, block

EXACT = ("id", "age", "number", "pod", "space")
"""Nothing is measured here: only what `…` stands for may differ."""
NIGHTLY = pytest.mark.nightly


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parts that these commands read, in which they may write."""
    shutil.copytree(ROOT / "examples/sizing", tmp_path / "examples/sizing")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: Command) -> str:
    """What a command prints; those of `shoal` run in this process, which has imported what they need."""
    name, *words = command.words
    if name != "shoal":
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command.line], capture_output=True, text=True, check=True
        )
        return done.stdout
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("folder", "each"),
    [
        pytest.param(".", block("docs/planning.md", "cd examples/sizing"), id="plan"),
        pytest.param(".", block("docs/simulate.md", "cd examples/sizing"), id="simulate"),
        pytest.param(".", block("docs/sizing.md", "cd tests/data/cmdare"), id="predict"),
        pytest.param(
            "tests/data/cmdare",
            block("docs/sizing.md", "shoal predict evaluate"),
            id="what else can be predicted",
        ),
        pytest.param(
            ".",
            block("docs/benchmarks/calibration.md", "cd examples/sizing"),
            id="calibrate",
            marks=NIGHTLY,
        ),
    ],
)
def test_the_output_is_that_of_the_commands(
    folder: str, each: Block, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout / folder)
    for command in each.commands:
        if command.line.startswith("cd "):
            monkeypatch.chdir(command.line.removeprefix("cd "))
            continue
        printed = run(command)
        if command.shown:
            assert re.fullmatch(alike(command.shown, *EXACT), printed), f"the page is to show:\n{printed}"
        for plot in re.findall(r"--plot (\S+)", command.line):
            assert Path(plot).stat().st_size > 10_000
