"""What a fresh clone says before and while it installs: in a folder with its scripts, where commands are played."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dev.paths import ROOT


def play(folder: Path, **scripts: str) -> None:
    """Commands of these names, each a line of sh."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, line in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)


def run(script: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A script of this repository, with the commands in `folder`/bin first on PATH."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    words = [str(folder / script) if (folder / script).exists() else str(ROOT / script)]
    return subprocess.run(
        words, env={"HOME": "/", "PATH": path, **env}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("free", "there", "code"), [(60_000, 0, 2), (19_000_000, 0, 0), (10_000_000, 9_000_000, 0)]
)
def test_a_disk_that_is_too_small_is_said_at_once(tmp_path: Path, free: int, there: int, code: int) -> None:
    table = f"echo Filesystem 1024-blocks Used Available Capacity Mounted on; echo x 1 1 {free} 1% /"
    play(tmp_path / "bin", uname="echo Linux", id="echo 0", df=table, du=f"echo {there} folder")
    cache = tmp_path / "not" / "there"
    done = run("dev/demo/possible.sh", tmp_path, XDG_CACHE_HOME=str(cache))
    assert done.returncode == code, done.stderr
    if code:
        has = "of which 0.0 GB are there, and 0.1 GB are free."
        words = f"error: make demo needs 19 GB in {cache} the first time, {has}"
        assert done.stderr == f"{words} Set XDG_CACHE_HOME to a folder on a disk that has them.\n"


def test_what_was_built_needs_no_more_of_the_disk(tmp_path: Path) -> None:
    play(tmp_path / "bin", uname="echo Linux", id="echo 0", df="exit 1", du="exit 1")
    last = tmp_path / "shoal/images/built/shoal-digits_dev/manifest.json"
    last.parent.mkdir(parents=True)
    last.touch()
    assert run("dev/demo/possible.sh", tmp_path, XDG_CACHE_HOME=str(tmp_path)).returncode == 0


def test_an_installation_says_that_it_goes_on(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "lock", tmp_path / "lock")
    (tmp_path / "dev").mkdir()
    shutil.copy(ROOT / "dev/bootstrap.sh", tmp_path / "dev")
    slow = 'case "$*" in *"pip sync"*) /bin/sleep 0.2;; esac'
    play(tmp_path / "bin", sleep='[ "$1" = 20 ] && exec /bin/sleep 0.05', **{"python3.13": "exit 0"})
    play(tmp_path / ".venv/bin", python=slow)
    done = run("dev/bootstrap.sh", tmp_path)
    assert done.returncode == 0, done.stderr
    first, *others, last = [line.partition("==>\033[0m ")[2] for line in done.stderr.splitlines()]
    assert first.startswith("installing ")
    assert others
    assert set(others) <= {f"installing Python packages … {seconds} s" for seconds in range(60)}
    assert last.startswith("installed in ")
