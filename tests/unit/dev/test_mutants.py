"""The mutants are of the code as it is: each names one line of it, and each result is Python."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dev import mutants
from dev.mutants import (
    JUDGES,
    PACKAGES,
    ROOT,
    SEEDS,
    SURVIVES,
    UNKNOWN,
    Mutant,
    Stage,
    load,
    main,
    mutate,
    outcome,
    stages,
    verdict,
)

MUTANTS = load()


def test_each_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_there_are_enough_that_a_night_judges_by_the_simulation_alone() -> None:
    """Of fencing, boots, claims, the ledger and journals, which the Makefile names."""
    (rooms,) = re.findall(r"dev\.mutants seeds (.+?);", (ROOT / "Makefile").read_text())
    judged = [each for each in MUTANTS if each.name.startswith(tuple(rooms.split())) and not each.beyond]
    assert {each.name.partition(":")[0] for each in judged} == {
        "fence",
        "boot",
        "claims",
        "ledger",
        "journal",
    }
    assert len(judged) >= 40


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_changes_one_line_of_the_code(mutant: Mutant, tmp_path: Path) -> None:
    target = tmp_path / mutant.file
    target.parent.mkdir(parents=True)
    before = (PACKAGES[mutant.package] / mutant.file).read_text()
    target.write_text(before)
    mutate(mutant, tmp_path)
    assert ast.dump(ast.parse(target.read_text())) != ast.dump(ast.parse(before))
    assert all((ROOT / test).exists() for test in mutant.tests)


def pytests(monkeypatch: pytest.MonkeyPatch, *outcomes: tuple[int, str] | None) -> list[list[str]]:
    """Play the stages of a mutant: each exits so and says so, or has no end. Returns their commands."""
    left, commands = list(outcomes), list[list[str]]()

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if (played := left.pop(0)) is None:
            raise subprocess.TimeoutExpired(command, 1)
        return subprocess.CompletedProcess(command, played[0], played[1], "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def failed_with(error: str) -> tuple[int, str]:
    return 1, f"/tests/test_a.py:7: {error}\nFAILED tests/test_a.py::test_b[3] - {error}\n"


HANGS = failed_with("Failed: Timeout (>5.0s) from pytest-timeout.")


def test_mutant_is_killed_by_the_first_test_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pytests(monkeypatch, (0, ""), failed_with("AssertionError: 1 != 2"))
    assert verdict(MUTANTS[0], JUDGES) == "FAILED tests/test_a.py::test_b[3]"
    assert [command[-1] for command in commands] == [MUTANTS[0].tests[-1], "tests/unit/trainer/simulation"]


def test_mutant_survives_what_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytests(monkeypatch, (0, ""), (0, ""))
    assert verdict(MUTANTS[0], JUDGES) == SURVIVES


def test_mutant_is_killed_by_a_test_of_its_room_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytests(monkeypatch, HANGS)
    assert verdict(MUTANTS[0], ["rooms"]) == "FAILED tests/test_a.py::test_b[3]"


def test_mutant_is_judged_by_few_seeds_and_then_by_more(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pytests(monkeypatch, (0, ""), failed_with("AssertionError: 1 != 2"))
    assert verdict(MUTANTS[0], ["seeds"]) == "FAILED tests/test_a.py::test_b[3]"
    assert [command[-1] for command in commands] == ["tests/unit/trainer/simulation/test_simulation.py"] * 2
    seeds = [stage.seeds for stage in stages(MUTANTS[0], ["seeds"])]
    assert seeds == sorted(set(seeds))
    assert seeds[-1] == SEEDS


def test_what_the_seeds_cannot_find_is_told_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    operators = next(mutant for mutant in MUTANTS if mutant.package == "shoal")
    monkeypatch.setattr(mutants, "load", lambda: (replace(MUTANTS[0], beyond="it is slow"), operators))
    assert main(["seeds"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith("beyond the seeds: it is slow")
    assert told[1] == "1 mutants, 0 survive, 0 unknown"


@pytest.mark.parametrize("simulated", [HANGS, None], ids=["a test", "all of them"])
def test_nobody_knows_a_mutant_whose_seeds_run_out_of_time(
    simulated: tuple[int, str] | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The seeds of a busy machine are slow: they would else be said to have found it."""
    pytests(monkeypatch, (0, ""), simulated)
    monkeypatch.setattr(mutants, "load", lambda: MUTANTS[:1])
    assert main([]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith(UNKNOWN)
    assert told[1] == "1 mutants, 0 survive, 1 unknown"


def test_timeout_is_told_apart_from_another_failure(tmp_path: Path) -> None:
    """By what pytest itself says of it, with the options of a stage."""
    (tmp_path / "conftest.py").write_text(
        "from hypothesis import settings\n\nsettings.register_profile('any-example')\n"
    )
    (tmp_path / "test_slow.py").write_text(
        "import threading\n\ndef test_a():\n    threading.Event().wait(60)\n"
    )
    assert outcome("a", Stage((str(tmp_path),), 1, hangs_kill=False), os.environ) == UNKNOWN
