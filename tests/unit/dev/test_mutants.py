"""The mutants are of the code as it is: each names one line of it, and each result is Python."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from dev.mutants import PACKAGES, ROOT, Mutant, killed_by, load, mutate

MUTANTS = load()


def test_there_are_enough_of_them_with_names_of_their_own() -> None:
    assert len(MUTANTS) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_changes_one_line_of_the_code(mutant: Mutant, tmp_path: Path) -> None:
    target = tmp_path / mutant.file
    target.parent.mkdir(parents=True)
    before = (PACKAGES[mutant.package] / mutant.file).read_text()
    target.write_text(before)
    mutate(mutant, tmp_path)
    assert ast.dump(ast.parse(target.read_text())) != ast.dump(ast.parse(before))
    assert all((ROOT / test).exists() for test in mutant.tests)


def test_mutant_whose_tests_do_not_end_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are slow: a test that hangs fails by its own limit."""

    def run(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert killed_by(MUTANTS[0], fast=True) is None
