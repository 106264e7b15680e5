"""Errors of commands contain their output, and a failure ends concurrent commands."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dev import cli, commands
from dev.commands import command, exports, side_by_side
from dev.console import alone
from dev.errors import DevError


def test_command_returns_output_or_raises_error_with_it() -> None:
    assert command("cat", stdin="x") == "x"
    assert command("false", check=False) == ""
    with pytest.raises(DevError, match=r"`sh -c .*` failed:\nbecause"):
        command("sh", "-c", "echo because >&2; exit 3")
    with pytest.raises(DevError, match="did not end"):
        command("sleep", "1000", timeout=0.05)


def test_exports_lead_another_shell_to_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept cluster's kubectl is found and `shoal`, its kubeconfig used, and what was on PATH still is."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    tools = tmp_path / "built tools"
    tools.mkdir()
    (tools / "kubectl").write_text("#!/bin/sh\necho reads $KUBECONFIG\n")
    (tools / "kubectl").chmod(0o755)
    here = os.environ["PATH"]
    line = exports({"KUBECONFIG": "/k 1/config", "PATH": f"{tools}:{here}"})
    assert command("bash", "-c", f"{line}; kubectl; ls -d /") == "reads /k 1/config\n/\n"
    assert command("bash", "-c", f"{line}; command -v shoal") == f"{sysconfig.get_path('scripts')}/shoal\n"
    monkeypatch.setenv("PATH", f"{sysconfig.get_path('scripts')}:{here}")
    assert exports({"KUBECONFIG": "/k", "PATH": os.environ["PATH"]}) == "export KUBECONFIG=/k"


def test_down_says_that_there_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cli, "orphans", list)
    monkeypatch.setattr("dev.demo.kind.ROOT", tmp_path)
    done = CliRunner().invoke(cli.main, ["down"])
    assert done.exit_code == 0
    assert done.stderr == "==> no cluster is there\n"


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


def test_failure_ends_a_command_that_begins_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What began, and was not yet known to run when the others were ended, would be waited for to its own end."""
    began, ended = threading.Event(), threading.Event()

    class Slow(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            began.set()
            assert ended.wait(20)

    class Known(set[Slow]):
        def __iter__(self) -> Iterator[Slow]:
            yield from list(super().__iter__())
            ended.set()

    def fail() -> None:
        assert began.wait(20)
        raise DevError("the first one's words")

    monkeypatch.setattr(subprocess, "Popen", Slow)
    monkeypatch.setattr(commands, "_running", Known())
    begin = time.monotonic()
    with pytest.raises(DevError, match="the first one's words"):
        side_by_side(fail, lambda: command("sleep", "60"))
    assert time.monotonic() - begin < 30


def test_what_waits_for_another_command_ends_with_the_rest(tmp_path: Path) -> None:
    """Ctrl-C reaches the main thread only; the others would wait in flock for ever."""
    lock, waiting = tmp_path / ".lock", threading.Event()

    def wait() -> None:
        waiting.set()
        with alone(lock, "building images"):
            pass

    def interrupt() -> None:
        waiting.wait(20)
        raise KeyboardInterrupt

    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        let_go = threading.Timer(10, fcntl.flock, (held, fcntl.LOCK_UN))
        let_go.start()
        with pytest.raises(KeyboardInterrupt):
            side_by_side(interrupt, wait)
        assert let_go.is_alive()
        let_go.cancel()


def test_what_waited_for_another_command_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / ".lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(0.02, fcntl.flock, (held, fcntl.LOCK_UN)).start()
        with alone(lock, "building images"), pytest.raises(BlockingIOError), lock.open() as another:
            fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert "another command is building images; waiting for it" in capsys.readouterr().err
