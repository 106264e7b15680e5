"""What is printed into a file or a pipe is whole, however narrow the terminal would have been, and has no colours."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from dev.paths import ROOT

COLOUR = "\x1b["


def plan_words(folder: Path) -> list[str]:
    """`shoal plan` of the example, with a long name of the nodes."""
    words = [sys.executable, "-c", "from shoal.cli import main; main()", "plan"]
    for option, name in (("-f", "job"), ("--pools", "pools"), ("--profiles", "profiles")):
        text = (ROOT / "examples" / "sizing" / f"{name}.yaml").read_text(encoding="utf-8")
        (folder / name).write_text(text.replace("spot-", "spot-of-a-team-with-a-long-name-"))
        words += [option, str(folder / name)]
    return words


def environment() -> dict[str, str]:
    """Of a terminal that has colours and a width of its own."""
    of_the_user = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"}
    kept = {name: value for name, value in os.environ.items() if name not in of_the_user}
    return kept | {"TERM": "xterm-256color"}


def test_no_cell_of_a_table_is_cut_in_a_pipe_and_none_has_a_colour(tmp_path: Path) -> None:
    done = subprocess.run(
        plan_words(tmp_path), capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert "spot-of-a-team-with-a-long-name-p100" in done.stdout
    assert "…" not in done.stdout
    assert COLOUR not in done.stdout + done.stderr


def test_colours_are_for_terminals(tmp_path: Path) -> None:
    ours, its = os.openpty()
    with subprocess.Popen(
        plan_words(tmp_path), env=environment(), stdin=its, stdout=its, stderr=its
    ) as process:
        os.close(its)
        seen = b""
        with contextlib.suppress(OSError):  # how Linux says that nobody has the other end any more
            while part := os.read(ours, 65536):
                seen += part
    os.close(ours)
    assert process.returncode == 0
    assert COLOUR in seen.decode()
