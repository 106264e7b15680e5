"""`promtool`, from Debian's package `prometheus`, unpacked beside the cache: installing it would start a Prometheus."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from dev.commands import command
from dev.console import step
from dev.errors import DevError
from dev.paths import cache


def promtool() -> Path:
    """The command. Raises DevError where it is missing and this is no Debian."""
    if found := shutil.which("promtool"):
        return Path(found)
    kept = cache() / "prometheus" / "usr" / "bin" / "promtool"
    if kept.exists():
        return kept
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise DevError(
            "Install promtool (of Prometheus): it is missing, and only Debian's package is fetched."
        )
    with step("fetching promtool"), tempfile.TemporaryDirectory() as folder:
        command("apt-get", "download", "-q", "prometheus", cwd=Path(folder))
        [package] = Path(folder).glob("*.deb")
        command("dpkg-deb", "--extract", str(package), str(cache() / "prometheus"))
    return kept
