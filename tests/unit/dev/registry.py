"""An OCI registry on loopback, with TLS and a password."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dev.cluster.pki import Pki
from dev.paths import ROOT
from dev.tools.build import go_environment

USER, PASSWORD = "robot", "secret"


def command(*words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """HOST:PORT. Its certificate is signed by `pki/ca.crt` in the folder."""
    Pki(folder / "pki").create("127.0.0.1")
    command(
        "go",
        "build",
        "-o",
        str(folder / "registry"),
        "./registry",
        cwd=ROOT / "dev/checks",
        env=go_environment(),
    )
    certificate = [str(folder / "pki" / f"apiserver.{each}") for each in ("crt", "key")]
    with subprocess.Popen(
        [str(folder / "registry"), *certificate, USER, PASSWORD],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()
