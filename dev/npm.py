"""Single files of npm packages, pinned by version and digest; `npm pack` fetches a package without its dependencies."""

from __future__ import annotations

import base64
import hashlib
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dev.commands import command
from dev.console import step
from dev.errors import DevError
from dev.paths import cache


@dataclass(frozen=True)
class Pin:
    """One package; `integrity` as npm writes it."""

    name: str
    version: str
    integrity: str
    file: str


AXE = Pin(
    "axe-core",
    "4.14.1",
    "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
    "axe.min.js",
)
MERMAID = Pin(
    "mermaid",
    "11.6.0",
    "sha512-PE8hGUy1LDlWIHWBP05SFdqUHGmRcCcK4IzpOKPE35eOw+G9zZgcnMpyunJVUEOgb//KBORPjysKndw8bFLuRg==",
    "dist/mermaid.min.js",
)


def fetched(pin: Pin) -> Path:
    """The file, from the cache or fetched.

    Raises:
        DevError: npm is missing, or what it fetched is not what is pinned.
    """
    kept = cache() / "npm" / f"{pin.name}-{pin.version}" / Path(pin.file).name
    if kept.exists():
        return kept
    if shutil.which("npm") is None:
        raise DevError(
            f"npm is needed to fetch {pin.name}. On Debian: sudo apt-get install npm, or `python -m dev setup`."
        )
    kept.parent.mkdir(parents=True, exist_ok=True)
    with step(f"fetching {pin.name}"), tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        command("npm", "pack", "--silent", f"{pin.name}@{pin.version}", "--pack-destination", folder)
        [package] = Path(folder).glob("*.tgz")
        digest = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
        if f"sha512-{digest}" != pin.integrity:
            raise DevError(f"{pin.name} {pin.version} is not the package that dev/npm.py pins.")
        with tarfile.open(package) as archive:
            member = archive.extractfile(f"package/{pin.file}")
            assert member is not None
            unfinished = Path(folder) / "file"
            unfinished.write_bytes(member.read())
        unfinished.rename(kept)
    return kept
