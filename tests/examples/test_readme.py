"""README.md, "On a laptop": its commands run as they stand and print what is shown."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dev.paths import ROOT
from tests.unit.docs.pages import blocks


def alike(text: str) -> str:
    """Without what differs from run to run: measured values, the run's id, the folder of the clone."""
    text = re.sub(r"file:///\S*/examples", "file:///examples", text)
    return re.sub(r"(?<=/)[0-9a-f]{12}(?=/)", "ID", re.sub(r"\d+\.\d+|(?<= in )\d+(?= s)", "N", text))


@pytest.mark.nightly
def test_first_commands_do_what_is_shown(tmp_path: Path) -> None:
    """In a copy, since they leave files; `make install` has been done where a test runs."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    first, rest = blocks("README.md", "sh")[0].split("\n", 1)
    assert first == "make install"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", rest], cwd=tmp_path, env=os.environ, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a cluster would take this job" in done.stdout
    [first, *shown] = alike(blocks("README.md", "")[0]).splitlines()
    assert first == "…"
    printed = alike(done.stdout)
    assert [line for line in shown if line not in printed] == [], printed
