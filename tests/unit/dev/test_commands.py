"""Commands fail with their own words, and none is left when another fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dev.commands import command, side_by_side
from dev.errors import DevError


def test_a_command_answers_or_says_what_it_said() -> None:
    assert command("cat", stdin="x") == "x"
    assert command("false", check=False) == ""
    with pytest.raises(DevError, match=r"`sh -c .*` failed:\nbecause"):
        command("sh", "-c", "echo because >&2; exit 3")
    with pytest.raises(DevError, match="did not end"):
        command("sleep", "1000", timeout=0.05)


def test_when_one_fails_the_others_are_ended(tmp_path: Path) -> None:
    started = tmp_path / "started"

    def fail() -> None:
        deadline = time.monotonic() + 20
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        raise DevError("the first one's words")

    begin = time.monotonic()
    with pytest.raises(DevError, match="the first one's words"):
        side_by_side(fail, lambda: command("sh", "-c", f"touch {started}; exec sleep 1000"))
    assert time.monotonic() - begin < 30
    assert command("echo", "again") == "again\n"
