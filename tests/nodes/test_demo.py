"""README.md, "The demo": its command runs as it stands, on a cluster of its own, and ends as the page says."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from dev.paths import ROOT
from tests.unit.docs.pages import block


@pytest.mark.nightly
def test_the_command_of_the_readme_ends_with_every_sample_trained_once() -> None:
    [command] = block("README.md", "make demo").commands
    written = ROOT / "build" / "demo.json"
    written.unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command.line], cwd=ROOT, env=os.environ, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data: every sample was trained exactly once per completed epoch" in done.stderr
    told = json.loads(written.read_text())
    assert told["accuracy"] >= 0.95
    assert (told["disruptions"], told["parameterServerRestarts"]) == (2, 1)
    assert (told["ranges"]["never"], told["ranges"]["repeated"], told["ranges"]["partial"]) == (0, 0, 0)
    assert written.with_suffix(".png").exists()
