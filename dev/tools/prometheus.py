"""`prometheus` and `promtool`, from Debian's package, unpacked beside the cache (installing it would start one)."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Literal

from dev.commands import command
from dev.console import step
from dev.errors import DevError
from dev.paths import cache


def prometheus_command(name: Literal["prometheus", "promtool"]) -> Path:
    """The command. Raises DevError where it is missing and this is no Debian."""
    if found := shutil.which(name):
        return Path(found)
    kept = cache() / "prometheus"
    if not kept.exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise DevError(f"Install Prometheus: {name} is missing, and only Debian's package is fetched.")
        with step("fetching prometheus"), tempfile.TemporaryDirectory(dir=cache()) as folder:
            command("apt-get", "download", "-q", "prometheus", cwd=Path(folder))
            [package] = Path(folder).glob("*.deb")
            command("dpkg-deb", "--extract", str(package), f"{folder}/all")
            if not kept.exists():  # another process may have been faster
                Path(f"{folder}/all").rename(kept)
    return kept / "usr" / "bin" / name
