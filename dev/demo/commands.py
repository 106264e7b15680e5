"""Running other people's commands, with their own words when they fail."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from dev.errors import DevError


def command(
    *words: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    check: bool = True,
    timeout: float = 1800,
) -> str:
    """Run a command and return what it prints.

    Raises:
        DevError: it failed, and `check` is set.
    """
    done = subprocess.run(
        words,
        env=None if env is None else dict(env),
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    if check and done.returncode != 0:
        raise DevError(f"`{' '.join(words)}` failed:\n{(done.stderr or done.stdout)[-2000:]}")
    return done.stdout
