"""Errors of commands contain their output, and a failure ends concurrent commands."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dev.commands import command, exports, side_by_side
from dev.errors import DevError


def test_command_returns_output_or_raises_error_with_it() -> None:
    assert command("cat", stdin="x") == "x"
    assert command("false", check=False) == ""
    with pytest.raises(DevError, match=r"`sh -c .*` failed:\nbecause"):
        command("sh", "-c", "echo because >&2; exit 3")
    with pytest.raises(DevError, match="did not end"):
        command("sleep", "1000", timeout=0.05)


def test_exports_lead_another_shell_to_the_cluster(tmp_path: Path) -> None:
    """The kept cluster's kubectl is found, its kubeconfig used, and what was on PATH still is."""
    tools = tmp_path / "built tools"
    tools.mkdir()
    (tools / "kubectl").write_text("#!/bin/sh\necho reads $KUBECONFIG\n")
    (tools / "kubectl").chmod(0o755)
    here = os.environ["PATH"]
    line = exports({"KUBECONFIG": "/k 1/config", "PATH": f"{tools}:{here}"})
    assert command("bash", "-c", f"{line}; kubectl; ls -d /") == "reads /k 1/config\n/\n"
    assert exports({"KUBECONFIG": "/k", "PATH": here}) == "export KUBECONFIG=/k"


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
