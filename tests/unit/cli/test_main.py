"""The root of the command line."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner, Result

from shoal import __version__
from shoal.cli import _COMMANDS, main
from shoal.cli.cluster import FAULT

SIZING = Path(__file__).parents[3] / "examples" / "sizing"


def test_version_without_installed_distribution_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:  # as in the image of the operator, where the package is copied
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0, result.output
    assert __version__ in result.output


def test_a_misspelt_command_is_told_the_like_one() -> None:
    result = CliRunner().invoke(main, ["submt", "digits.py"])
    assert result.exit_code == 2
    assert "Error: No such command 'submt'. Did you mean 'submit'?" in result.stderr
    assert "Error: No such command 'xyzzy'." in CliRunner().invoke(main, ["xyzzy"]).stderr


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("module", "words", "missing", "extra"),
    [
        ("shoal.cli", ["plan", "-f", str(SIZING / "job.yaml")], "numpy", "sizing"),
        ("shoal.cli", ["list"], "kubernetes", "client"),
        ("shoal_trainer.cli", ["check", "examples/digits/digits.py:job"], "tensorflow", "trainer"),
    ],
)
def test_a_command_whose_packages_are_missing_says_what_to_install(
    module: str, words: list[str], missing: str, extra: str
) -> None:
    """As after `pip install '.[client]'`, or with no extra at all."""
    gone = f"import sys; sys.modules[{missing!r}] = None; from {module} import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", gone, *words], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 2, done.stderr
    assert f"pip install '.[{extra}]' in a checkout" in done.stderr
    assert missing in done.stderr
    assert "Traceback" not in done.stderr


def test_a_terminal_that_is_not_utf8_gets_what_it_can_show() -> None:
    code = """
import click
from shoal import cli

@click.command()
def say():
    click.echo("größe → 5")

cli._COMMANDS["say"] = ("__main__", "say", "")
cli.main()
"""
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code, "say"], capture_output=True, env=env, check=False)
    assert (done.returncode, done.stdout.decode("latin-1")) == (0, "größe ? 5\n"), done.stderr


def test_a_table_for_nobody_is_no_fault() -> None:
    """`shoal list >&-`: Python has no stdout then."""
    code = "from shoal.cli.cluster import console; console().print('x')"
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "{code}" >&-', sys.executable], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], Result]:
    """What `shoal fail` ends with, where such an exception is raised in it."""

    def invoke(error: Exception) -> Result:
        @click.command()
        def fail() -> None:
            raise error

        monkeypatch.setitem(sys.modules, "failing", SimpleNamespace(fail=fail))
        monkeypatch.setitem(_COMMANDS, "fail", ("failing", "fail", ""))
        return CliRunner().invoke(main, ["fail"])

    return invoke


def test_a_fault_of_shoal_is_one_line_and_no_answer(
    failing: Callable[[Exception], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1 is the answer "no", which a script believes."""
    found = failing(KeyError("digits.py"))
    assert (found.exit_code, found.stdout) == (FAULT, "")
    [line] = found.stderr.splitlines()
    assert line.startswith(
        "Error: a fault of shoal itself: KeyError: 'digits.py'. SHOAL_TRACEBACK=1 shows where"
    )
    monkeypatch.setenv("SHOAL_TRACEBACK", "1")
    assert isinstance(failing(KeyError("digits.py")).exception, KeyError)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (PermissionError(13, "Permission denied", "/model"), 2, "Error: /model: Permission denied\n"),
        (OSError(28, "No space left on device"), 2, "Error: No space left on device\n"),
        (click.exceptions.Exit(3), 3, ""),
        (click.Abort(), 1, "Aborted!\n"),
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
    ],
)
def test_what_is_no_fault_is_as_it_was(
    failing: Callable[[Exception], Result], error: Exception, code: int, words: str
) -> None:
    found = failing(error)
    assert (found.exit_code, found.stderr) == (code, words)
