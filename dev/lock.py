"""Resolve pyproject.toml into `lock/`: hashed requirements, one file per environment.

`lock/dev.txt` is resolved first and constrains the others, so that the images have the tested versions. The files
name no index, so that they work with any mirror.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    "dev": "dev",
    "ps": "ps",
    "worker": "trainer",
    "worker-gpu": "trainer-gpu",
    "operator": "pools",
    "plugin": "plugin",
}


def compile_lock(name: str, extra: str) -> None:
    """Write `lock/<name>.txt` for an extra of the distribution."""
    print(f"resolving lock/{name}.txt", file=sys.stderr)
    constraint = [] if name == "dev" else ["--constraint", "lock/dev.txt"]
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--extra", extra, *constraint]
    options = ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-emit-index-url"]
    subprocess.run(
        [*command, *options, "--no-header", "--quiet", "--output-file", f"lock/{name}.txt"],
        cwd=ROOT,
        check=True,
    )


def main() -> None:
    """Write all of them."""
    for name, extra in FILES.items():
        compile_lock(name, extra)


if __name__ == "__main__":
    main()
