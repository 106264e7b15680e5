"""Errors of commands contain their output, and a failure ends concurrent commands."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dev.commands import command, side_by_side
from dev.errors import DevError


def test_command_returns_output_or_raises_error_with_it() -> None:
    assert command("cat", stdin="x") == "x"
    assert command("false", check=False) == ""
    with pytest.raises(DevError, match=r"`sh -c .*` failed:\nbecause"):
        command("sh", "-c", "echo because >&2; exit 3")
    with pytest.raises(DevError, match="did not end"):
        command("sleep", "1000", timeout=0.05)


def test_failure_ends_concurrent_commands(tmp_path: Path) -> None:
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
