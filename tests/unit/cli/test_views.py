"""What is printed into a file or a pipe is whole, however narrow the terminal would have been."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dev.paths import ROOT


def test_no_cell_of_a_table_is_cut_in_a_pipe(tmp_path: Path) -> None:
    words = []
    for option, name in (("-f", "job"), ("--pools", "pools"), ("--profiles", "profiles")):
        text = (ROOT / "examples" / "sizing" / f"{name}.yaml").read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("spot-", "spot-of-a-team-with-a-long-name-"))
        words += [option, str(tmp_path / name)]
    run = "import sys; from shoal.cli import main; main(sys.argv[1:])"
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    done = subprocess.run(
        [sys.executable, "-c", run, "plan", *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "spot-of-a-team-with-a-long-name-p100" in done.stdout
    assert "…" not in done.stdout
