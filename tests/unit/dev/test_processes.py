"""Recorded processes: found by another command, and ended by identity."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dev.cluster.processes import Identity, ProcessTable
from dev.errors import DevError

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the local cluster runs on Linux"
)


@pytest.fixture
def table(tmp_path: Path) -> ProcessTable:
    return ProcessTable(tmp_path / "processes", tmp_path / "logs")


def test_recorded_process_can_be_stopped_by_another_command(table: ProcessTable, tmp_path: Path) -> None:
    started = table.start("sleeper", ["sleep", "1000"])
    assert table.running("sleeper")
    assert Identity.of(started.pid) == started
    later = ProcessTable(tmp_path / "processes", tmp_path / "logs")
    assert later.names() == ["sleeper"]
    assert later.find("sleeper") == started
    later.stop("sleeper")
    assert not started.running
    assert later.names() == []
    table.stop("sleeper")  # a stopped process is ignored


def test_process_that_ignores_sigterm_is_killed(table: ProcessTable) -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    script = f"import signal; {ignore}; print('on', flush=True); signal.pause()"
    started = table.start("stubborn", [sys.executable, "-c", script])
    while "on" not in table.tail("stubborn"):
        assert table.running("stubborn")
    table.stop("stubborn", seconds=0.05)
    assert not started.running


def test_other_process_with_recorded_pid_is_not_signaled(table: ProcessTable) -> None:
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        theirs = Identity.of(bystander.pid)
        assert theirs is not None
        for forged in (
            Identity(theirs.boot, theirs.pid, theirs.started - 1),
            Identity("another boot", theirs.pid, theirs.started),
        ):
            assert not forged.running
            assert not forged.signal(signal.SIGKILL)
        record = f"{theirs.boot}\n{theirs.pid} (sleep) S " + "0 " * 18 + str(theirs.started - 1) + "\n"
        table.folder.mkdir()
        (table.folder / "old").write_text(record)
        table.stop("old")
        assert bystander.poll() is None
        bystander.kill()


def test_process_name_with_brackets_and_spaces_is_parsed(tmp_path: Path) -> None:
    stat = "77 (a) b (c)) S " + "1 " * 18 + "424242 0 0"
    assert Identity.parse(f"boot\n{stat}") == Identity("boot", 77, 424242)


def test_missing_command_is_reported_in_log(table: ProcessTable) -> None:
    table.start("nothing", ["/nonexistent/command"])
    while table.running("nothing"):
        os.sched_yield()
    assert "not found" in table.tail("nothing")
    table.stop("nothing")


def test_unwritable_record_raises_error_and_starts_nothing(table: ProcessTable, tmp_path: Path) -> None:
    (tmp_path / "processes" / "x").mkdir(parents=True)
    (tmp_path / "processes" / "x" / "in-the-way").touch()
    with pytest.raises((DevError, IsADirectoryError, PermissionError)):
        table.start("x", ["sleep", "1000"])
