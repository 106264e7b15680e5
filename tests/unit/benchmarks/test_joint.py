"""docs/planning-model.md has what the comparison with the exact optimum prints."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from dev.paths import ROOT
from tests.unit.docs.pages import alike, block


@pytest.mark.nightly
def test_the_page_shows_the_gaps() -> None:
    """Its instances are drawn from fixed seeds: all but the time is as shown."""
    gaps, took = block("docs/planning-model.md", "200 instances").text.split(";")
    words = [sys.executable, "-m", "benchmarks.joint"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.fullmatch(f"{re.escape(gaps)};{alike(took)}", done.stdout), done.stdout
