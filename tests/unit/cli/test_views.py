"""What is printed into a file or a pipe is whole, however narrow the terminal would have been, and has no colours."""

from __future__ import annotations

import contextlib
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


def test_colours_are_for_terminals() -> None:
    words = [sys.executable, "-c", "from shoal.cli import main; main()", "plan", "-f", "job.yaml"]
    words += ["--pools", "pools.yaml", "--profiles", "profiles.yaml"]
    of_the_user = {
        name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR"}
    }
    environment = of_the_user | {"TERM": "xterm-256color"}
    folder, colour = ROOT / "examples" / "sizing", b"\x1b["
    piped = subprocess.run(words, cwd=folder, env=environment, capture_output=True, check=True)
    assert colour not in piped.stdout + piped.stderr
    ours, its = os.openpty()
    with subprocess.Popen(words, cwd=folder, env=environment, stdin=its, stdout=its, stderr=its) as process:
        os.close(its)
        seen = b""
        with contextlib.suppress(OSError):  # how Linux says that nobody has the other end any more
            while part := os.read(ours, 65536):
                seen += part
    os.close(ours)
    assert process.returncode == 0
    assert colour in seen
